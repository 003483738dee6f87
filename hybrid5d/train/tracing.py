"""The steps of runner.trace_steps: timed on every rank, written to the run folder's `trace/`, a file a rank.

Format 1, JSON. Times are nanoseconds of the rank's own clock; `offset_ns` is how far that is ahead of rank 0's.
`hybrid5d.trace` reads it.
"""

from __future__ import annotations

import json
from typing import Any

from hybrid5d.data.types import StepBatch
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.recorder import HostClock, Recorder, clock_name
from hybrid5d.engine.results import StepResult
from hybrid5d.files import write_whole
from hybrid5d.parallel.agree import gather_objects, world_axis
from hybrid5d.parallel.watch import clock_offset
from hybrid5d.train.metrics import Console
from hybrid5d.train.run_folder import TRACE, TRACE_FORMAT, RunFolder, trace_file


class Tracer:
    """Trains, and records the steps that are asked for. Nothing is timed, and nothing exists, for the others."""

    def __init__(self, engine: Engine, folder: RunFolder, console: Console):
        self.engine, self.folder, self.console = engine, folder, console
        asked = engine.plan.config.runner.trace_steps
        self.steps = range(0) if asked is None else range(asked[0], asked[1] + 1)
        self._recorder: Recorder | None = None
        self._offset = (0, 0)
        self._tokens: list[int] = []
        self.written = False  # the files of all ranks

    def begin(self, done: int) -> None:
        """Say which of the asked steps this start does not do, as `done` steps are done."""
        if self.steps and done >= self.steps[0]:
            left = f"steps {done + 1} to {self.steps[-1]} are traced" if done < self.steps[-1] else "nothing is traced"
            self.console.say(f"notice: runner.trace_steps: this start begins after step {done}: {left}")

    def train_batch(self, step: int, batch: StepBatch) -> StepResult:
        """`engine.train_batch` of a step (1 = the first)."""
        if step not in self.steps:
            return self.engine.train_batch(batch)
        if self._recorder is None:
            self._recorder = Recorder(self.engine.device)
            self._offset = clock_offset(world_axis(), clock_name(), HostClock.now)
        with self.engine.recording(self._recorder, step):
            result = self.engine.train_batch(batch)
        self._tokens.append(result.tokens)
        if step == self.steps[-1]:
            self.finish()
        return result

    def finish(self) -> None:
        """Write what was recorded; once. Collective over the world where there is something.

        A file that cannot be written is said, and the run goes on.
        """
        if self._recorder is None:
            return
        recorder, axis, self._recorder = self._recorder, world_axis(), None
        if not recorder.steps:
            return
        target, told = self.folder / TRACE, ""
        start = gather_objects(recorder.steps[0].start, axis)[0]  # so that files of two starts are not taken for one
        try:
            target.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._document(recorder, start), separators=(",", ":"))
            write_whole(target / trace_file(self.engine.ctx.rank), text)
        except OSError as exc:
            told = f"{target}: cannot be written: {exc.strerror}"
        failed = [line for line in gather_objects(told, axis) if line]
        steps = f"{recorder.steps[0].step} to {recorder.steps[-1].step}"
        if failed:
            self.console.say(f"notice: the trace of steps {steps} is lost: {failed[0]}")
        else:
            self.written = True
            self.console.say(f"trace of steps {steps}: {target}; `hybrid5d trace {self.folder.path}` draws it")

    def _document(self, recorder: Recorder, start: int) -> dict[str, Any]:
        plan, ctx = self.engine.plan, self.engine.ctx
        return {
            "format": TRACE_FORMAT,
            "id": start,
            "rank": ctx.rank,
            "layout": {axis: getattr(plan.layout, axis) for axis in ("pp", "dp", "cp", "tp")},
            "schedule": {"kind": plan.pipeline.kind, "chunks": plan.pipeline.chunks, "wide": plan.pipeline.wide},
            "decoder_layers": list(plan.stages),
            "device": str(self.engine.device.type),
            "transport": self.engine.transport,
            "clock": recorder.clock.kind,
            "offset_ns": self._offset[0],
            "offset_error_ns": self._offset[1],
            "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in recorder.groups],
            "steps": [
                {"step": s.step, "start": s.start, "end": s.end, "tokens": tokens, "work": s.work, "calls": s.calls}
                for s, tokens in zip(recorder.steps, self._tokens)
            ],
        }
