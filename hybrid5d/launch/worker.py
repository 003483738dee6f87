"""What every rank runs: `-m hybrid5d.worker --config RUN.yaml [key=value ...]`, under any launcher or none.

The configuration is checked first, without torch; rank 0 alone prints what is refused. `hybrid5d train` gives
`--run-dir DIR --digest HASH` instead: the settings that it checked and wrote, and the proof that they are still those.
Exit codes: 0 the end was reached, 2 refused, 3 stopped by SIGTERM with everything saved, 130 by SIGINT, 143 by a second
SIGTERM, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hybrid5d.errors import EXIT_REFUSED, ConfigError, ConfigErrors
from hybrid5d.launch.env import LaunchEnv, launcher_conflicts
from hybrid5d.launch.preflight import Argv, plan_run
from hybrid5d.launch.watch import Job
from hybrid5d.plan.draft import Purpose
from hybrid5d.plan.outputs import read_settings
from hybrid5d.plan.run import RunPlan, build_plan
from hybrid5d.train.run_folder import RunFolder


class _Parser(argparse.ArgumentParser):
    """Faults of the command line are refusals like any other."""

    def error(self, message: str) -> Any:
        raise ConfigErrors([ConfigError("", None, message, "write --config RUN.yaml [key=value ...]")])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Argv of the command line. `--local_rank` comes from launchers, in either spelling.

    Raises:
        ConfigErrors: unknown words, no configuration.
    """
    parser = _Parser(prog="hybrid5d.worker", description="Train or evaluate what a YAML describes.", allow_abbrev=False)
    parser.add_argument("--config", type=Path, metavar="RUN.yaml", help="the run, in RLinf's shape")
    parser.add_argument("--run-dir", type=Path, help="run directory written by `hybrid5d train`, instead of --config")
    parser.add_argument("--digest", help="of the settings in --run-dir")
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
    job, run_dir = Job(LaunchEnv()), None
    try:
        job = Job(LaunchEnv.read(os.environ))  # first, so that all ranks know which of them prints a refusal
        args = parse(sys.argv[1:] if argv is None else argv)
        job = Job(LaunchEnv.read(os.environ, args.local_rank), started=args.run_dir is not None)
        plan, notices = _plan(args, job.env)
        run_dir = args.run_dir
        job.join()
        from hybrid5d.launch.run import evaluate, train  # imports numpy, and torch in the end

        code = (evaluate if args.eval else train)(job, plan, notices, args.run_dir)
    except BaseException as exc:
        if isinstance(exc, SystemExit) and not exc.code and not job.joined:
            raise  # --help
        code = job.fail(exc)
        if code == EXIT_REFUSED and run_dir is not None and job.env.rank == 0:
            RunFolder(run_dir).write_refusal()
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End at once: tearing down process groups can wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _plan(args: argparse.Namespace, env: LaunchEnv) -> tuple[RunPlan, Sequence[str]]:
    """The plan, and what is to be printed of it: nothing where the launcher of `hybrid5d train` printed it.

    Raises:
        ConfigErrors: everything that is wrong; settings that another start has replaced.
    """
    purpose: Purpose = "eval" if args.eval else "train"
    if args.run_dir is None:
        return plan_run(Argv(args.config, tuple(args.overrides)), env.world_size, purpose)
    if args.overrides:
        raise ConfigErrors([ConfigError("--run-dir", str(args.run_dir), "its settings are fixed", "use --config")])
    plan = build_plan(read_settings(args.run_dir, args.digest), env.world_size, purpose)
    if conflicts := launcher_conflicts(os.environ, plan):
        raise ConfigErrors(conflicts)
    return plan, ()


if __name__ == "__main__":
    sys.exit(main())
