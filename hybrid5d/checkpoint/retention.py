"""Which checkpoints of a run stay: `runner.keep_last` and `runner.keep_every`. Pure: no torch.

Only whole ones of the line that led to the newest are removed, told by the ids in their manifests. What the run did not
write, links, folders that hold a file named `keep`, and what is damaged stay.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hybrid5d.checkpoint.manifest import ACTOR, checkpoints, read_manifest, step_faults
from hybrid5d.errors import CheckpointError
from hybrid5d.files import temporary_of

PIN = "keep"


def line_of(newest: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints that led to `newest`, it first, as far back as they lie beside it."""
    by_id: dict[str, tuple[int, Path, str]] = {}
    for step, folder in checkpoints(newest.parent):
        if folder.is_symlink():
            continue
        try:
            manifest = read_manifest(folder / ACTOR)
        except CheckpointError:
            continue
        if manifest.id and (manifest.id not in by_id or folder == newest):
            by_id[manifest.id] = (step, folder, manifest.follows)
    at = next((key for key, (_, folder, _) in by_id.items() if folder == newest), "")
    found: list[tuple[int, Path]] = []
    while at in by_id:
        step, folder, follows = by_id.pop(at)
        found.append((step, folder))
        at = follows
    return found


def prune(newest: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Remove what is older than the `keep_last` newest of the line of `newest`; multiples of `keep_every` stay.

    Nothing is removed unless `newest` is whole. Returns what was removed.
    """
    removed, kept = [], 0
    for step, folder in line_of(newest):
        if step_faults(folder):
            if folder == newest:
                return []
            continue  # it counts for nothing, and is left for whoever wants to know why
        kept += 1
        if kept <= keep_last or (keep_every and step % keep_every == 0) or (folder / PIN).exists():
            continue
        gone = temporary_of(folder)  # a removal that is cut short leaves nothing that looks like a checkpoint
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        removed.append(folder)
    return removed
