"""`hybrid5d train --restarts N`: start a run that died again, from its newest whole checkpoint, while that gets on."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace

from hybrid5d.checkpoint.manifest import read_manifest, resolve_resume
from hybrid5d.console import say
from hybrid5d.errors import EXIT_REFUSED, EXIT_STOPPED, CheckpointError
from hybrid5d.launch.elastic import elastic
from hybrid5d.launch.preflight import Argv
from hybrid5d.launch.start import checked, launch
from hybrid5d.train.run_folder import CHECKPOINTS, RunFolder

_LONGEST_WAIT = 60.0
_RESUME = "runner.resume_dir=auto"


@dataclass
class Deaths:
    """Ends of a run without a new whole checkpoint in between.

    Attributes:
        limit: how many are followed by another start.
        newest: the newest whole checkpoint when the run was started last.
    """

    limit: int
    newest: str | None
    count: int = 0

    def wait(self, code: int, newest: str | None) -> float | None:
        """Seconds until the next start; None: no other, the run ended, was refused or stopped, or gets nowhere."""
        if code in (0, EXIT_REFUSED, EXIT_STOPPED):
            return None
        self.count = self.count + 1 if newest == self.newest else 1
        self.newest = newest
        return None if self.count > self.limit else min(_LONGEST_WAIT, 2.0 ** (self.count - 1))


def supervise(argv: Argv, num_procs: int | None, launcher: str | None, restarts: int, fits: bool = False) -> int:
    """`launch`, and again after each death, at most `restarts` times in a row without a new whole checkpoint.

    SIGINT, SIGTERM and refusals are not followed by another start, also while it is waited for. `fits`: each start
    takes the layout that the processes of that moment can form (`elastic`).

    Raises:
        HybridError: what `launch` raises.
    """
    start, count = elastic(argv, num_procs) if fits else (argv, num_procs)
    plan, starts = checked(start, count, launcher, "train")[0], 0
    if (interval := plan.config.runner.save_interval) <= 0:
        say(f"notice: runner.save_interval={interval} saves nothing: every start of --restarts {restarts} begins anew")
    folder = RunFolder.of(plan)
    deaths, stopped = Deaths(restarts, newest_whole(folder)), threading.Event()
    while True:
        code = launch(start, count, launcher, stopped=stopped)
        if stopped.is_set():
            return code
        newest = newest_whole(folder)
        seconds = deaths.wait(code, newest)
        if seconds is None:
            if deaths.count > restarts:
                why = "with no new whole checkpoint"
                say(f"no further start: ended {deaths.count} times {why} (--restarts {restarts})")
            return code
        starts += 1
        if newest is not None and _RESUME not in argv.overrides:
            argv = replace(argv, overrides=(*argv.overrides, _RESUME))
        where = "the newest whole checkpoint" if newest is not None else "where it began: there is no whole checkpoint"
        say(f"restart {starts}, in {seconds:g} s, from {where}")
        _sleep(seconds)
        start, count = elastic(argv, num_procs) if fits else (argv, num_procs)


def newest_whole(folder: RunFolder) -> str | None:
    """Which checkpoint `auto` would take: its place and id; None: there is none."""
    try:
        source = resolve_resume("auto", folder / CHECKPOINTS).source
        return None if source is None else f"{source}:{read_manifest(source).id}"
    except CheckpointError:
        return None


def _sleep(seconds: float) -> None:
    def stop(number: int, _: object) -> None:
        say(f"{signal.Signals(number).name}: no further start")
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        time.sleep(seconds)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
