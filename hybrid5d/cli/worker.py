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

from hybrid5d.cli.preflight import Words, plan_run
from hybrid5d.config.errors import ConfigError, ConfigErrors
from hybrid5d.data.build import eval_loader_from_plan, loader_from_plan
from hybrid5d.data.loader import EvalLoader, Loader
from hybrid5d.engine.job import Job, say
from hybrid5d.engine.launch_env import LaunchEnv, settle_environment, threads_per_rank
from hybrid5d.engine.run_folder import RunFolder
from hybrid5d.plan.outputs import RESOLVED
from hybrid5d.plan.run import RunPlan

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
        plan, notices = plan_run(_words(args), env, evaluate=args.eval)
        job.join()
        _run(job, plan, notices, evaluate=args.eval)
    except BaseException as exc:
        if isinstance(exc, SystemExit) and not exc.code and env.world_size == 1:
            raise  # --help
        code = job.fail(exc)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # tearing down process groups can wait for ranks that are gone
    return 0


def _words(args: argparse.Namespace) -> Words:
    if args.run_dir is None:
        return Words(args.config, tuple(args.overrides))
    return Words(args.run_dir / RESOLVED, tuple(args.overrides))


def _run(job: Job, plan: RunPlan, notices: Sequence[str], *, evaluate: bool) -> None:
    env, folder = job.env, RunFolder.of(plan)
    first = env.rank == 0
    if first and not evaluate:
        folder.prepare(plan)
    loader, eval_loader = _open_data(job, plan, evaluate)
    if first:
        say("\n".join(_introduction(plan, env, loader or eval_loader, notices)), sys.stdout)
    engine = _build(job, plan)
    if evaluate:
        _evaluate(job, engine, eval_loader, folder)
    else:
        _train(job, engine, loader, eval_loader, folder)


def _open_data(job: Job, plan: RunPlan, evaluate: bool) -> tuple[Loader | None, EvalLoader | None]:
    """Faults in data files are found here, before a process group exists."""
    job.where = "reading the data"
    dp_rank = plan.layout.coordinate(job.env.rank).dp
    loader = None if evaluate else loader_from_plan(plan, dp_rank)
    wanted = evaluate or plan.config.runner.val_check_interval > 0
    eval_loader = eval_loader_from_plan(plan, dp_rank) if wanted and plan.config.data.val_data_paths else None
    return loader, eval_loader


def _introduction(plan: RunPlan, env: LaunchEnv, loader: Loader | None, notices: Sequence[str]) -> list[str]:
    from hybrid5d import __version__

    layout, batch, runner = plan.layout, plan.batch, plan.config.runner
    axes = f"tp {layout.tp}{' + sp' if plan.sequence_parallel else ''} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"
    rows = f"{batch.global_batch_size} rows a step" + ("" if runner.seq_length is None else f" of up to {runner.seq_length} tokens")
    parts = "micro-batches by token budget" if batch.dynamic else (
        f"{batch.gradient_accumulation_steps} micro-batches of {batch.micro_batch_size} per dp rank"
    )  # fmt: skip
    lines = [
        f"hybrid5d {__version__}: {runner.experiment_name} on {env.world_size} processes: {axes}",
        f"{plan.precision.dtype}, ZeRO {plan.zero_stage}, {rows}, {parts}, layers per stage {list(plan.stages)}",
    ]
    if loader is not None:
        lines.append(f"data: {loader.describe()}")
    return [*lines, *(f"notice: {n}" for n in notices)]


def _build(job: Job, plan: RunPlan) -> Engine:
    """Import what is heavy, join the process group, build this rank's part of the model."""
    job.where = "building the model"
    settle_environment(job.env, os.environ)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]) or threads_per_rank(job.env))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.showwarning = _rank_warning(job.env)
    with redirect_stdout(StringIO()):  # DeepSpeed prints its topology and memory, each rank its own
        from hybrid5d.engine.engine import initialize

        return initialize(plan)


def _rank_warning(env: LaunchEnv) -> Any:
    """Warnings from libraries: whole lines, from one rank."""

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        if env.rank == 0 and not issubclass(category, FutureWarning | DeprecationWarning):
            say(f"warning: {message}")

    return show


def _train(job: Job, engine: Engine, loader: Loader | None, eval_loader: EvalLoader | None, folder: RunFolder) -> None:
    from hybrid5d.engine.trainer import Trainer, resume

    assert loader is not None
    first = job.env.rank == 0
    job.where = "loading the checkpoint"
    source = resume(engine, folder)
    if first:
        folder.write_environment(job.env, str(engine.device))
        if source is not None:
            say(f"resumed from {source} at step {engine.global_step}", sys.stdout)

    def note(where: str) -> None:
        job.where = where

    result = Trainer(engine, loader, folder, eval_loader=eval_loader, note=note).run()
    _leave(job)
    if first:
        if "hf" in result and engine.plan.config.data.type == "text":
            _show_sample(Path(result["hf"]), engine.plan, loader)
        folder.write_result(result)


def _leave(job: Job) -> None:
    """All ranks are here; those after the first are done."""
    import torch.distributed as dist

    job.where = "the end"
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    job.finish()


def _show_sample(folder: Path, plan: RunPlan, loader: Loader) -> None:
    from hybrid5d.engine.sample import sample

    text = sample(folder, plan, loader)
    if text is not None:
        clean = "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
        body = "\n".join(f"  | {line}" for line in clean.split("\n"))
        say(f"sample:\n{body}", sys.stdout)


def _evaluate(job: Job, engine: Engine, loader: EvalLoader | None, folder: RunFolder) -> None:
    from hybrid5d.engine.trainer import evaluate, resume

    assert loader is not None
    source = resume(engine, folder)
    job.where = "evaluation"
    found = evaluate(engine, loader)
    if job.env.rank == 0:
        at = f"{source}, step {engine.global_step}" if source is not None else engine.plan.config.actor.model.model_path
        say(f"{at}: {found}", sys.stdout)
    _leave(job)


if __name__ == "__main__":
    sys.exit(main())
