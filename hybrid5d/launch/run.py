"""A rank's work once its settings are checked: the run folder, the data, the engine, then training or evaluation."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hybrid5d.console import say
from hybrid5d.data.build import eval_loader_from_plan, loader_from_plan, tokenizer_name
from hybrid5d.data.loader import EvalLoader, Loader
from hybrid5d.errors import ConfigErrors, HybridError
from hybrid5d.launch.env import LaunchEnv, environment, settle_environment, threads_per_rank
from hybrid5d.launch.watch import Job
from hybrid5d.plan.draft import Purpose
from hybrid5d.plan.flops import model_line
from hybrid5d.plan.job import played
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.trace_rules import trace_faults
from hybrid5d.train.lock import take
from hybrid5d.train.run_folder import RunFolder

TORCHRUN_GRACE_SECONDS = 30  # torch.distributed.elastic's own limit; accelerate launches through it

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine
    from hybrid5d.rl.prompts import PromptFiles
    from hybrid5d.rl.rollouts import RolloutFiles
    from hybrid5d.train.resuming import Resumed, Source

    Training: TypeAlias = Loader | PromptFiles | RolloutFiles


def train(job: Job, plan: RunPlan, notices: Sequence[str], run_dir: Path | None) -> int:
    """Train to the end, or till a stop is asked; returns the exit code.

    What can be refused of the run folder and of data files is, before a process group exists.

    Args:
        run_dir: where the launcher of `hybrid5d train`, which holds the folder, has made everything ready.
    """
    first, folder = job.env.rank == 0, RunFolder.of(plan)
    if first:
        take(folder.path, "rank 0", under_launcher=run_dir is not None)  # to the end of this process
        notices = [*notices, *(folder.prepare(plan) if run_dir is None else ())]
        grace = plan.config.runner.grace_seconds
        if run_dir is None and "TORCHELASTIC_RUN_ID" in os.environ and grace > TORCHRUN_GRACE_SECONDS:
            notices.append(
                f"torchrun kills ranks {TORCHRUN_GRACE_SECONDS} s after SIGTERM: runner.grace_seconds={grace:g} is cut"
            )
    job.where = "reading the data"
    dp_rank = plan.layout.coordinate(job.env.rank).dp
    source, eval_loader = sources(plan, job.env, "train", dp_rank)
    assert source is not None
    if first:
        say("\n".join(introduction(plan, job.env.world_size, source, notices)), sys.stdout)
    engine = _build(job, plan, train_data_paths=source, val_data_paths=eval_loader)

    from hybrid5d.rl.step import needs_reference
    from hybrid5d.train.rl_trainer import RLTrainer
    from hybrid5d.train.trainer import Trainer

    if plan.config.is_rl and needs_reference(plan.config.algorithm):
        engine.keep_reference()  # before a checkpoint is loaded: the reference is the model of model_path
    resumed = _resume(job, engine, folder, source)
    if first:
        say(f"attention kernel: {engine.attention_kernel}; collectives: {engine.transport}", sys.stdout)
        folder.write_environment(environment(job.env, str(engine.device)))

    note, job.grace_seconds, job.progress.timeout = (
        job.progress.note, plan.config.runner.grace_seconds, plan.config.runner.hang_timeout,
    )  # fmt: skip
    if isinstance(source, Loader):
        trainer = Trainer(engine, source, folder, eval_loader=eval_loader, note=note, requests=job.requests)
    else:
        trainer = RLTrainer(engine, source, folder, resumed=resumed, note=note, requests=job.requests)
    result = trainer.run()
    _barrier()
    if first:
        if trainer.tracer.written and (line := measured_bubble(folder.path)):
            say(line, sys.stdout)
        folder.write_result(result)
    _leave(job)
    return int(result["exit_code"])


def measured_bubble(folder: Path) -> str | None:
    """The traced steps' bubble beside the schedule's; None without a pipeline, or where the trace cannot be read."""
    from hybrid5d.trace.files import read_trace
    from hybrid5d.trace.summary import summary
    from hybrid5d.trace.text import bubble_line

    try:
        found = summary(read_trace(folder))
    except HybridError as exc:
        return f"notice: the trace was not read: {exc}"
    return bubble_line(found) if found.trace.schedule.stages > 1 else None


def evaluate(job: Job, plan: RunPlan, notices: Sequence[str], run_dir: Path | None) -> int:
    """Loss over data.val_data_paths; result.json goes beside the run's own files, into `eval/`."""
    first, folder = job.env.rank == 0, RunFolder.of(plan)
    target = RunFolder(folder / "eval")
    if first:
        take(target.path, "rank 0", under_launcher=run_dir is not None)
        if run_dir is None:
            target.prepare_evaluation(plan)
    job.where = "reading the data"
    _, loader = sources(plan, job.env, "eval", plan.layout.coordinate(job.env.rank).dp)
    assert loader is not None
    if first:
        say("\n".join(introduction(plan, job.env.world_size, loader, notices)), sys.stdout)
    engine = _build(job, plan, val_data_paths=loader)

    from hybrid5d.train import trainer

    source = _resume(job, engine, folder).source
    job.progress.timeout = plan.config.runner.hang_timeout

    def left() -> bool:
        job.progress.note("evaluation")  # each batch is progress
        return False

    result = trainer.evaluate(engine, loader, left)
    assert result is not None
    if first:
        say(f"eval of {source or plan.config.actor.model.model_path}: {result}", sys.stdout)
    _barrier()
    if first:
        target.write_result({"exit_code": 0, **result.record(engine.global_step)})
    _leave(job)
    return 0


def _rollouts(env: LaunchEnv, plan: RunPlan) -> RolloutFiles | PromptFiles:
    settle_environment(env, os.environ)  # before torch, which the package of RL imports
    from hybrid5d.rl.prompts import PromptFiles
    from hybrid5d.rl.rollouts import RolloutFiles

    assert plan.model is not None
    if plan.config.data.type != "rollouts":
        return PromptFiles(plan.config, plan.model, tokenizer_name(plan))
    return RolloutFiles(plan.config, plan.model.vocab_size)


def sources(
    plan: RunPlan, env: LaunchEnv, purpose: Purpose, dp_rank: int = 0
) -> tuple[Training | None, EvalLoader | None]:
    """What a dp rank trains on and evaluates on; None where it does not. Reads the data."""
    if purpose == "eval":
        return None, eval_loader_from_plan(plan, dp_rank)
    training = _rollouts(env, plan) if plan.config.is_rl else loader_from_plan(plan, dp_rank)
    _refuse_trace(plan, training)
    return training, eval_loader_from_plan(plan, dp_rank) if _evaluates(plan) else None


def _refuse_trace(plan: RunPlan, source: Source) -> None:
    """Where the data decides how many steps there are."""
    if faults := trace_faults(plan.config, source.total_steps):
        raise ConfigErrors(faults)


def _evaluates(plan: RunPlan) -> bool:
    config = plan.config
    return bool(not config.is_rl and config.runner.val_check_interval > 0 and config.data.val_data_paths)


def _pipeline(plan: RunPlan) -> str:
    """What the schedule costs, by its closed program: every pass of a stage one unit, messages free."""
    schedule, m = plan.pipeline, plan.batch.gradient_accumulation_steps
    t = played(schedule, m)
    name = f"{schedule.kind}{', wide warm-up' if schedule.wide else ''}"
    chunks = f" of {schedule.chunks} runs of layers a rank" if schedule.chunks > 1 else ""
    unit = "micro-batches" if schedule.chunks == 1 else "micro-batches of one run"
    alive = f"at most {max(t.live)} {unit} alive on a rank"
    return f"pipeline {name}{chunks}: {alive}, bubble {100 * t.bubble:.1f} % with equal stages"


def introduction(plan: RunPlan, world_size: int, loader: Source | None, notices: Sequence[str]) -> list[str]:
    """What a run says of itself at its start."""
    from hybrid5d import __version__

    batch, runner = plan.batch, plan.config.runner
    rows = f"{batch.global_batch_size} rows a step" + (
        "" if plan.config.row_length is None else f" of up to {plan.config.row_length} tokens"
    )
    parts = "micro-batches by token budget" if batch.dynamic else (
        f"{batch.gradient_accumulation_steps} micro-batches of {batch.micro_batch_size} per dp rank"
    )  # fmt: skip
    lines = [
        f"hybrid5d {__version__}: {runner.experiment_name} on {world_size} processes: {_axes(plan)}",
        f"{plan.precision.dtype}, ZeRO {plan.zero_stage}, {rows}, {parts}, layers per stage {list(plan.stages)}",
    ]
    if critic := plan.critic:
        numbers = f"{critic.precision.dtype}, ZeRO {critic.zero_stage}, layers per stage {list(critic.stages)}"
        lines.append(f"critic on the same processes: {_axes(critic)}, {numbers}")
    if plan.pipeline.stages > 1:
        lines.append(_pipeline(plan))
    if model := model_line(plan):
        lines.append(model)
    if loader is not None:
        lines.append(f"data: {loader.describe()}")
        if loader.total_steps is None:
            lines.append("notice: neither runner.max_steps nor runner.max_epochs ends the run: it goes on till stopped")
    return [*lines, *(f"notice: {n}" for n in notices)]


def _axes(plan: RunPlan) -> str:
    layout, sp = plan.layout, " + sp" if plan.sequence_parallel else ""
    return f"tp {layout.tp}{sp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"


def _build(job: Job, plan: RunPlan, **sources: Source | None) -> Engine:
    """Import what is heavy, join the process group, build this rank's part of the model.

    Args:
        sources: rows by the YAML's word for them; all ranks must have the same.
    """
    job.where = "building the model"
    settle_environment(job.env, os.environ)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]) or threads_per_rank(job.env))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.showwarning = _whole_line(job)
    with redirect_stdout(StringIO()):  # DeepSpeed prints its topology and memory, each rank its own
        from hybrid5d.engine.build import initialize

        found = {word: source.identity() for word, source in sources.items() if source is not None}
        facts = {f"data.{word}: {name}": value for word, about in found.items() for name, value in about.items()}
        return initialize(plan, facts=facts, met=lambda store: job.connect(store, plan.config.runner.peer_timeout))


def _whole_line(job: Job) -> Any:
    """Warnings from libraries: one line each, from the first rank that has it."""

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if not issubclass(category, FutureWarning | DeprecationWarning):
            job.warn(" ".join(str(message).split()))

    return show


def _resume(job: Job, engine: Engine, folder: RunFolder, loader: Source | None = None) -> Resumed:
    from hybrid5d.train.resuming import resume

    job.where = "loading the checkpoint"
    resumed = resume(engine, folder, loader)
    if resumed.source is not None and job.env.rank == 0:
        lines = [f"resumed from {resumed.source} at step {resumed.step}"]
        say("\n".join([*lines, *(f"notice: {n}" for n in resumed.notices)]), sys.stdout)
    return resumed


def _barrier() -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def _leave(job: Job) -> None:
    """No rank ends before all are here: the result is written then, and an exit code other than 0 ends the others."""
    job.progress.note("the end")
    _barrier()
    job.finish()
