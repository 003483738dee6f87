"""What a run is made of and where it goes on: the checkpoint that `runner.resume_dir` names, loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybrid5d.checkpoint.manifest import CRITIC, Resume, resolve_resume
from hybrid5d.config.schema import NO_CRITIC
from hybrid5d.errors import DamagedCheckpoint
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.train.run_folder import CHECKPOINTS, RunFolder

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine

DATA, RL_STEP = "data", "rl_step"  # of a checkpoint's state: the loader's identity, RL steps done


class Source(Protocol):
    """What a run's steps are made of: a loader, or the rollouts and prompts of an RL run."""

    @property
    def total_steps(self) -> int | None: ...
    def describe(self) -> str: ...
    def identity(self) -> dict[str, int | str | bool]: ...


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run went on from (None: it starts), and what the user should know of it."""

    source: Path | None = None
    notices: tuple[str, ...] = ()
    step: int = 0  # what the checkpoint's folder counts: optimizer steps, RL steps of an RL run
    state: Mapping[str, Any] = field(default_factory=dict)


def resume(engine: Engine, folder: RunFolder, loader: Source | None = None) -> Resumed:
    """Load the checkpoint that `runner.resume_dir` names; `auto` is the newest whole one of this run, if it has any.

    Collective over the world. Checkpoints of this folder that are newer than the one loaded go aside where `loader` is
    given (a run that trains on), so that the next `auto` cannot take up what this run left behind.

    Raises:
        CheckpointError: a path that is not a whole checkpoint, none of the run's is whole, or it does not fit.
    """
    axis, asked, damaged = world_axis(), engine.plan.config.runner.resume_dir, list[Path]()
    while True:
        # Decided once: a shared file system may show another host another state of the folder.
        mine = together(axis, lambda: resolve_resume(asked, folder / CHECKPOINTS, damaged) if axis.rank == 0 else None)
        found: Resume = gather_objects(mine, axis)[0]
        if found.source is None:
            return Resumed()
        try:
            state = engine.load_checkpoint(found.source)
            break
        except DamagedCheckpoint:
            if asked != "auto":
                raise
            damaged.append(found.source)
    notices = list(found.passed_over)
    step = int(state.get(RL_STEP, engine.global_step))
    if loader is not None:
        notices += together(axis, lambda: folder.keep_later(step) if axis.rank == 0 else [])
        notices += _differing_rows(loader, state.get(DATA), step)
        if engine.critic is None and (critic := found.source.parent / CRITIC).is_dir():
            notices.append(f"{critic} is not loaded, and no later checkpoint holds it: {NO_CRITIC}")
    return Resumed(found.source, tuple(notices), step, state)


def _differing_rows(loader: Source, saved: Any, step: int) -> list[str]:
    if not isinstance(saved, dict):  # a loop that is not ours may have saved something else
        return []
    now = loader.identity()
    changes = [f"{n}={now[n]} (was {old})" for n, old in saved.items() if n in now and now[n] != old]
    if not changes:
        return []
    text = f"rows differ from those that the checkpoint was made with: {', '.join(changes)}"
    return [f"{text}; step {step + 1} takes its place in the new order"]
