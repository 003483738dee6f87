"""The saves of a run: begun, waited for, said; a failed one by `runner.on_save_error`, older ones by `keep_last`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid5d.checkpoint.retention import prune
from hybrid5d.checkpoint.save import Save
from hybrid5d.errors import CheckpointError, HybridError
from hybrid5d.parallel.agree import world_axis
from hybrid5d.train.metrics import Console

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine


SAID_SECONDS = 0.1  # of waiting, from which on it is worth a line


class TrainingError(HybridError):
    """Training cannot go on: numbers are no longer finite, or copies no longer equal. Raised by all ranks together."""


@dataclass(frozen=True)
class Saving:
    """A save that is on its way, of a step.

    Attributes:
        begun, blocked: when, and for how many seconds training stood still.
        background: written while training goes on.
    """

    save: Save
    step: int
    begun: float
    blocked: float
    background: bool


class Saver:
    """Every rank has one; all call the same methods in the same order.

    Args:
        root: of the run's checkpoints.
        note: told what happens now, for messages of failures.
        track: (step, group, values) for the trackers.

    Attributes:
        saved_at: step of the newest whole checkpoint of this run; None: there is none.
    """

    def __init__(
        self, engine: Engine, root: Path, console: Console, note: Callable[[str], None],
        track: Callable[[int, str, dict[str, Any]], None],
    ):  # fmt: skip
        self._engine, self._root, self._console, self._note, self._track = engine, root, console, note, track
        self._runner = engine.plan.config.runner
        self.saved_at: int | None = None
        self._saving: Saving | None = None

    @property
    def busy(self) -> bool:
        """This rank still writes."""
        return self._saving is not None and self._saving.save.busy

    def has(self, step: int) -> bool:
        """The checkpoint of a step is whole, or on its way."""
        return step in (self.saved_at, self._saving and self._saving.step)

    @property
    def last_good(self) -> str:
        """The state that a run could go back to."""
        return f"the checkpoint of step {self.saved_at}" if self.saved_at is not None else "the start"

    def save(self, step: int, state: Mapping[str, Any], last: bool = False) -> None:
        """Save, or begin to where `runner.async_save` says so; one that is still written is waited for.

        Raises:
            CheckpointError: it cannot be written, on every rank; with `runner.on_save_error: continue` only where
                nothing comes after it.
        """
        self.settle()
        begun, background = time.perf_counter(), self._runner.async_save and not last
        self._note(f"checkpoint after step {step}")
        try:
            save = self._engine.begin_save(self._root, state, step, background)
        except CheckpointError as exc:
            self._not_saved(step, exc, last)
            return
        self._saving = Saving(save, step, begun, time.perf_counter() - begun, background)
        if not background:
            self.settle(last)

    def settle(self, last: bool = False) -> None:
        """Wait until a save that was begun is whole. Collective over the world; raises as `save` does."""
        saving, begun = self._saving, time.perf_counter()
        while self._saving is not None:
            self._note(f"checkpoint after step {self._saving.step}")
            self._advance(self._saving, last)
        seconds = time.perf_counter() - begun
        if saving is not None and saving.background and seconds > SAID_SECONDS:
            self._console.say(f"waited {seconds:.1f} s for the checkpoint of step {saving.step} to be written")

    def settle_after(self, exc: Exception) -> None:
        """What all ranks raise together leaves time for a save that was begun; another rank is not waited for."""
        if isinstance(exc, TrainingError | CheckpointError) or world_axis().size == 1:
            try:
                self.settle()
            except CheckpointError as failure:
                self._console.say(f"notice: {failure}")

    def _advance(self, saving: Saving, last: bool = False) -> None:
        """Go on with a save of which no rank writes anything now, or wait till then. Collective over the world."""
        try:
            saved = saving.save.advance()
        except CheckpointError as exc:
            self._saving = None
            self._not_saved(saving.step, exc, last)
            return
        if saved is None:
            return
        self._saving, self.saved_at = None, saving.step
        self._console.say(f"checkpoint: {saved.path}")
        seconds = {"seconds": time.perf_counter() - saving.begun, "blocked_seconds": saving.blocked}
        self._track(saving.step, "save", {**seconds, "bytes": saved.bytes})
        if self._engine.ctx.rank == 0 and self._runner.keep_last is not None:
            try:
                prune(saved.path, self._runner.keep_last, self._runner.keep_every)
            except (OSError, CheckpointError) as exc:  # the save is whole: one rank must not end the run for the rest
                self._console.say(f"notice: older checkpoints stay: {exc}")

    def take_note(self) -> None:
        """No rank writes anything now: go on with what was begun. Collective over the world; raises as `save` does."""
        if self._saving is not None:
            self._advance(self._saving)

    def _not_saved(self, step: int, exc: CheckpointError, last: bool) -> None:
        if last or self._runner.on_save_error == "stop":
            raise exc
        self._console.say(f"notice: step {step} is not saved, training goes on from {self.last_good}: {exc}")
