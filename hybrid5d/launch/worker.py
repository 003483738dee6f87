"""What every rank runs: `python worker.py --config RUN.yaml [key=value ...]`, under any launcher or none.

The configuration is checked first, without torch; rank 0 alone speaks of what is refused. The launcher of `hybrid5d
train` gives `--run-dir DIR` instead, a directory that holds the resolved configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid5d.console import say
from hybrid5d.data.build import eval_loader_from_plan, loader_from_plan
from hybrid5d.data.loader import Loader
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.launch.env import LaunchEnv, environment, settle_environment, threads_per_rank
from hybrid5d.launch.preflight import Argv, plan_run
from hybrid5d.launch.watch import Job
from hybrid5d.plan.draft import Purpose
from hybrid5d.plan.outputs import read_settings
from hybrid5d.plan.run import RunPlan, build_plan
from hybrid5d.train.run_folder import RunFolder

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine


class _Parser(argparse.ArgumentParser):
    """Faults of the command line are refusals like any other."""

    def error(self, message: str) -> Any:
        raise ConfigErrors([ConfigError("", None, message, "write --config RUN.yaml [key=value ...]")])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Words of the command line. `--local_rank` comes from launchers, in either spelling.

    Raises:
        ConfigErrors: unknown words, no configuration.
    """
    parser = _Parser(prog="train.py", description="Train (or evaluate) what a YAML describes.", allow_abbrev=False)
    parser.add_argument("--config", type=Path, metavar="RUN.yaml", help="the run, in RLinf's shape")
    parser.add_argument("--run-dir", type=Path, help="run directory written by `hybrid5d train`, instead of --config")
    parser.add_argument("--eval", action="store_true", help="evaluate data.val_data_paths; no training")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help="set by launchers")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="they win over the file")
    args, rest = parser.parse_known_intermixed_args(list(argv))
    unknown = [w for w in rest if w.startswith("-")]
    if unknown:
        raise ConfigErrors([ConfigError("", None, f"unknown option {w}", _options(parser)) for w in unknown])
    args.overrides += rest
    if (args.config is None) == (args.run_dir is None):
        parser.error("one of --config and --run-dir is needed")
    return args


def _options(parser: argparse.ArgumentParser) -> str:
    names = [o for a in parser._actions for o in a.option_strings if o.startswith("--")]
    return f"options are {', '.join(names)}; settings of the run are written key=value"


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank; returns its exit code (0 done, 2 refused, 1 failed)."""
    env = LaunchEnv()
    job = Job(env)
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        env = LaunchEnv.read(os.environ, args.local_rank)
        job = Job(env)
        plan, notices = _plan(args, env)
        job.join()
        if args.eval:
            _evaluate(job, plan, notices, args.run_dir)
        else:
            _train(job, plan, notices)
    except BaseException as exc:
        if isinstance(exc, SystemExit) and not exc.code and env.world_size == 1:
            raise  # --help
        code = job.fail(exc)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # tearing down process groups can wait for ranks that are gone
    return 0


def _plan(args: argparse.Namespace, env: LaunchEnv) -> tuple[RunPlan, tuple[str, ...]]:
    """The plan, and what the user should know; the launcher of `hybrid5d train` has checked and said it already."""
    purpose: Purpose = "eval" if args.eval else "train"
    if args.run_dir is None:
        return plan_run(Argv(args.config, tuple(args.overrides)), env.world_size, purpose)
    return build_plan(read_settings(args.run_dir), env.world_size, purpose), ()


def _train(job: Job, plan: RunPlan, notices: Sequence[str]) -> None:
    """Faults of the run directory and of data files are found before a process group exists."""
    first, folder = job.env.rank == 0, RunFolder.of(plan)
    if first:
        folder.prepare(plan)
    job.where = "reading the data"
    dp_rank = plan.layout.coordinate(job.env.rank).dp
    loader = loader_from_plan(plan, dp_rank)
    wanted = plan.config.runner.val_check_interval > 0 and plan.config.data.val_data_paths
    eval_loader = eval_loader_from_plan(plan, dp_rank) if wanted else None
    if first:
        say("\n".join(_introduction(plan, job.env, loader, notices)), sys.stdout)
    engine = _build(job, plan)

    from hybrid5d.train.trainer import Trainer

    _resume(job, engine, folder, loader)
    if first:
        say(f"attention kernel: {engine.attention_kernel}", sys.stdout)
        folder.write_environment(environment(job.env, str(engine.device)))

    def note(where: str) -> None:
        job.where = where

    result = Trainer(engine, loader, folder, eval_loader=eval_loader, note=note).run()
    _leave(job)
    if first:
        if "hf" in result and plan.config.data.type == "text":
            _show_sample(Path(result["hf"]), plan, loader)
        folder.write_result(result)


def _evaluate(job: Job, plan: RunPlan, notices: Sequence[str], run_dir: Path | None) -> None:
    """result.json goes beside the run's own files, into `eval/`."""
    first, folder = job.env.rank == 0, RunFolder.of(plan)
    target = RunFolder(run_dir or folder / "eval")
    if first:
        target.prepare(plan)
    job.where = "reading the data"
    loader = eval_loader_from_plan(plan, plan.layout.coordinate(job.env.rank).dp)
    if first:
        say("\n".join(_introduction(plan, job.env, loader, notices)), sys.stdout)
    engine = _build(job, plan)

    from hybrid5d.train.trainer import evaluate

    source = _resume(job, engine, folder)
    job.where = "evaluation"
    found = evaluate(engine, loader)
    if first:
        say(f"eval of {source or plan.config.actor.model.model_path}: {found}", sys.stdout)
    _leave(job)
    if first:
        target.write_result(found.record(engine.global_step))


def _introduction(plan: RunPlan, env: LaunchEnv, loader: Loader | None, notices: Sequence[str]) -> list[str]:
    from hybrid5d import __version__

    layout, batch, runner = plan.layout, plan.batch, plan.config.runner
    axes = (
        f"tp {layout.tp}{' + sp' if plan.sequence_parallel else ''} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"
    )
    rows = f"{batch.global_batch_size} rows a step" + (
        "" if plan.config.row_length is None else f" of up to {plan.config.row_length} tokens"
    )
    parts = "micro-batches by token budget" if batch.dynamic else (
        f"{batch.gradient_accumulation_steps} micro-batches of {batch.micro_batch_size} per dp rank"
    )  # fmt: skip
    lines = [
        f"hybrid5d {__version__}: {runner.experiment_name} on {env.world_size} processes: {axes}",
        f"{plan.precision.dtype}, ZeRO {plan.zero_stage}, {rows}, {parts}, layers per stage {list(plan.stages)}",
    ]
    if loader is not None:
        lines.append(f"data: {loader.describe()}")
        if loader.total_steps is None:
            lines.append("notice: neither runner.max_steps nor runner.max_epochs ends the run: it goes on till stopped")
    return [*lines, *(f"notice: {n}" for n in notices)]


def _build(job: Job, plan: RunPlan) -> Engine:
    """Import what is heavy, join the process group, build this rank's part of the model."""
    job.where = "building the model"
    settle_environment(job.env, os.environ)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]) or threads_per_rank(job.env))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.showwarning = _whole_line(job)
    with redirect_stdout(StringIO()):  # DeepSpeed prints its topology and memory, each rank its own
        from hybrid5d.engine.build import initialize

        return initialize(plan)


def _whole_line(job: Job) -> Any:
    """Warnings from libraries: one line each, from the first rank that has it."""

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if not issubclass(category, FutureWarning | DeprecationWarning):
            job.warn(" ".join(str(message).split()))

    return show


def _resume(job: Job, engine: Engine, folder: RunFolder, loader: Loader | None = None) -> Path | None:
    from hybrid5d.train.trainer import resume

    job.where = "loading the checkpoint"
    source, changes = resume(engine, folder, loader)
    if source is not None and job.env.rank == 0:
        say(f"resumed from {source} at step {engine.global_step}", sys.stdout)
        if changes:
            told = f"rows differ from those that the checkpoint was made with: {', '.join(changes)}"
            say(f"notice: {told}; step {engine.global_step + 1} takes its place in the new order", sys.stdout)
    return source


def _leave(job: Job) -> None:
    """All ranks are here; those after the first are done."""
    import torch.distributed as dist

    job.where = "the end"
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    job.finish()


def _show_sample(folder: Path, plan: RunPlan, loader: Loader) -> None:
    from hybrid5d.train.sample import sample

    text = sample(folder, plan, loader)
    if text is not None:
        clean = "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
        body = "\n".join(f"  | {line}" for line in clean.split("\n"))
        say(f"sample:\n{body}", sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
