"""Saving training checkpoints that any layout can load: tensors by HF name and run, moments beside masters.

A save is atomic: everything goes into `global_step_N.tmp`, is renamed when every rank has finished, and only then does
`latest` name it. It may be written while training goes on, from copies; what needs all ranks stays on main threads.
"""

from __future__ import annotations

import copy
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hybrid5d.checkpoint import manifest as files
from hybrid5d.checkpoint.manifest import SHARE, Manifest, StoredFile
from hybrid5d.checkpoint.safetensors_writer import Layout
from hybrid5d.checkpoint.shards import Entry, ShardFile, check_room, gathered, planned_files, stored_tensors, write_file
from hybrid5d.checkpoint.sidecar import write_sidecar
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.errors import CheckpointError
from hybrid5d.files import fresh_folder, old_of, publish, temporary_of, wait_until, write_whole
from hybrid5d.parallel.agree import gather_objects, raise_together, together, world_axis
from hybrid5d.plan.run import RunPlan

SHARED_SECONDS = 40.0  # that a shared file system may take to show another host's files
T = TypeVar("T")
Written = dict[str, dict[str, StoredFile]]  # by part and name


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: its folder, its id, bytes of its tensors."""

    path: Path
    id: str
    bytes: int


class _Task(Generic[T]):
    """Work that is done when this returns, or by a thread of its own. Communicates with no other rank."""

    def __init__(self, work: Callable[[], T], background: bool):
        self._result: T | None = None
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, args=(work,), name="hybrid5d-save", daemon=True)
            self._thread.start()
        else:
            self._run(work)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except Exception as exc:  # raised where the main thread asks
            self._failure = exc

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> tuple[T | None, Exception | None]:
        if self._thread is not None:
            self._thread.join()
        return self._result, self._failure


class Save:
    """A checkpoint on its way. Every rank has one and calls the same methods in the same order.

    Attributes:
        path: where it will be.
    """

    def __init__(
        self, path: Path, parts: Mapping[str, tuple[RunPlan, Manifest]], write: Callable[[], Written],
        background: bool, whole: Callable[[Saved], None],
    ):  # fmt: skip
        self.path, self._parts, self._background, self._whole = path, parts, background, whole
        self._saved: Saved | None = None
        self._task: _Task[Any] = _Task(write, background)

    @property
    def busy(self) -> bool:
        """Something of it is still being written by this rank."""
        return self._task.running

    def advance(self) -> Saved | None:
        """Wait for what this rank does; all ranks go on to the next part, or have the whole checkpoint.

        Nothing is waited for where no rank is `busy`. Collective over the world.

        Raises:
            CheckpointError: a rank could not write, on every rank; nothing is left, what was there before stays.
        """
        axis = world_axis()
        written, failure = self._task.wait()
        try:
            raise_together(axis, failure)
        except CheckpointError:
            if axis.rank == 0:
                shutil.rmtree(temporary_of(self.path), ignore_errors=True)
            raise
        if self._saved is not None:
            self._whole(self._saved)
            return self._saved
        reports: list[Written] = gather_objects(written, axis)
        manifests = {
            name: replace(manifest, files={k: v for report in reports for k, v in report[name].items()})
            for name, (_, manifest) in self._parts.items()
        }
        size = sum(file.bytes for manifest in manifests.values() for file in manifest.files.values())
        self._saved = Saved(self.path, manifests[files.ACTOR].id, size)
        self._task = _Task(lambda: self._publish(manifests) if axis.rank == 0 else None, self._background)
        return None

    def finish(self) -> Saved:
        """Wait until it is whole and named. Collective over the world; raises as `advance` does."""
        while (saved := self.advance()) is None:
            pass
        return saved

    def _publish(self, manifests: Mapping[str, Manifest]) -> None:
        temporary, root = temporary_of(self.path), self.path.parent
        for name, manifest in manifests.items():
            folder = temporary / name
            if faults := _missing(folder, manifest):  # another node's files are not visible here
                raise CheckpointError("\n".join([*faults, f"{root} is not the same to all hosts. {SHARE}"]))
            write_sidecar(self._parts[name][0], folder / files.SIDECAR)
            write_whole(folder / files.MANIFEST, manifest.to_json())
        publish(temporary, self.path)
        write_whole(root / files.LATEST, self.path.name + "\n")  # last: what it names is whole
        shutil.rmtree(old_of(self.path), ignore_errors=True)


def _missing(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are not there after a while, or not whole."""
    wait_until(lambda: not files.file_faults(folder, manifest), folder, SHARED_SECONDS)
    return files.file_faults(folder, manifest)


def begin_save(
    state: TrainState, directory: str | Path, extra: Mapping[str, Any] | None = None, number: int | None = None,
    *, critic: TrainState | None = None, background: bool = False, whole: Callable[[Saved], None] = lambda saved: None,
) -> Save:  # fmt: skip
    """Begin to write `directory/global_step_N`; `Save.finish` ends it. Collective over the world.

    Args:
        extra: JSON-ready values of the caller (position in the data ...), kept in the manifest as its `state`.
        number: the N; None: optimizer steps done.
        critic: what is saved beside it, as whole or not at all.
        background: this rank's part is copied to CPU memory, and written while training goes on; else it is written
            when this returns, one tensor in memory at a time.
        whole: called when it is, on every rank.

    Raises:
        CheckpointError: there is no room, or a rank cannot write; on every rank, and what was there before stays valid.
    """
    root, axis = Path(directory), world_axis()
    final = files.step_folder(root, state.step if number is None else number)
    temporary = temporary_of(final)
    states = {files.ACTOR: state, **({files.CRITIC: critic} if critic is not None else {})}
    together(axis, lambda: _make(temporary, states) if axis.rank == 0 else None)
    try:
        together(axis, lambda: _arrive(temporary, states))
        moments = {name: _moments(part) for name, part in states.items()}
        planned = {name: planned_files(part, moments[name]) for name, part in states.items()}
        room = sum(file.bytes for own in planned.values() for file in own)
        entries = {name: [e for file in own for e in file.entries] for name, own in planned.items()}
        offers: list[tuple[int, str, dict[str, list[Entry]]]] = gather_objects(
            (room, secrets.token_hex(8), entries), axis
        )
        together(axis, lambda: check_room(temporary, sum(size for size, *_ in offers)) if axis.rank == 0 else None)
    except CheckpointError:
        if axis.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    parts = {}
    for name, part in states.items():
        stored = [entry for _, _, found in offers for entry in found[name]]
        head = replace(_head(part, moments[name], stored), id=offers[0][1], follows=state.follows)
        parts[name] = (part.plan, replace(head, state=copy.deepcopy(dict(extra or {}))) if part is state else head)
    values = {name: [gathered(part, file) for file in planned[name]] for name, part in states.items()}
    if background:
        values = {
            name: [_copies(source, file.layout) for source, file in zip(values[name], planned[name])] for name in values
        }
    return Save(final, parts, lambda: _write(temporary, planned, values), background, whole)


def _make(temporary: Path, parts: Mapping[str, Any]) -> None:
    fresh_folder(temporary)
    for name in parts:
        (temporary / name).mkdir()


def _arrive(temporary: Path, parts: Mapping[str, Any]) -> None:
    if not wait_until(lambda: all((temporary / name).is_dir() for name in parts), temporary.parent, SHARED_SECONDS):
        raise CheckpointError(f"{temporary} of rank 0 is not seen here. {SHARE}")


def _moments(state: TrainState) -> tuple[str, ...]:
    """Names of the optimizer's moments on any rank. Collective over the world."""
    return tuple(sorted({m for found in gather_objects(state.optimizer.moments(), world_axis()) for m in found}))


def _head(state: TrainState, moments: tuple[str, ...], entries: Sequence[Entry]) -> Manifest:
    """The manifest as far as it is known before files are written: the state's numbers as they are now."""
    access = state.optimizer
    manifest = Manifest(
        step=state.step,
        layout=state.layout(),
        precision=state.plan.precision.dtype,
        optimizer={"type": access.name, "state": list(moments), "step": access.step() if moments else 0},
        tensors=stored_tensors(entries),
        files={},
        loss_scaler=access.loss_scaler(),
        skipped=state.skipped,
    )
    gaps = files.uncovered(manifest)
    assert not gaps, f"a checkpoint would miss {gaps[:3]}"
    return manifest


def _copies(source: Iterator[tuple[str, Tensor]], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The values as they are now, in memory of their own; each goes when it is drawn. Collective over dp x cp."""
    kept = deque(
        (key, value.detach().to("cpu", layout[key][0], memory_format=torch.contiguous_format, copy=True))
        for key, value in source
    )

    def drawn() -> Iterator[tuple[str, Tensor]]:
        while kept:
            yield kept.popleft()

    return drawn()


def _write(
    folder: Path, planned: Mapping[str, Sequence[ShardFile]],
    values: Mapping[str, Sequence[Iterator[tuple[str, Tensor]]]],
) -> Written:  # fmt: skip
    """Write this rank's files; the first failure is raised when all of them were tried."""
    found: Written = {name: {} for name in planned}
    failure: OSError | None = None
    for name, own in planned.items():
        for file, source in zip(own, values[name]):
            try:
                stored = write_file(folder / name / file.name, file.layout, source)
            except OSError as exc:  # not raised yet: the gathers of other files need this rank
                failure = failure or exc
                continue
            found[name] |= {} if stored is None else {file.name: stored}
    if failure is not None:
        raise failure
    return found
