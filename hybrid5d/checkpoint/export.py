"""Hugging Face folders out of a live engine or a training checkpoint, whatever layout either has."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hybrid5d.checkpoint import manifest as files
from hybrid5d.checkpoint.hf_tensors import HfTensors, Shapes, ordered
from hybrid5d.checkpoint.hf_write import stored_tensors, write_weights
from hybrid5d.checkpoint.manifest import WEIGHT
from hybrid5d.checkpoint.sidecar import copy_sidecar, exported_config, read_config, write_sidecar
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.errors import CheckpointError, ConfigError, ConfigErrors, HybridError
from hybrid5d.files import fresh_folder, old_of, publish, replacing, temporary_of
from hybrid5d.models.dtypes import DTYPES
from hybrid5d.parallel.agree import together, world_axis
from hybrid5d.parallel.context import Axis

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportOptions:
    """What the user asked for; `dtype` is fp32, bf16 or fp16, `max_bytes` the limit of one file."""

    dtype: str
    max_bytes: int
    force: bool = False


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `200MB`, `2GiB`, `1000`.

    Raises:
        ConfigErrors: no size, or below one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else "?"
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise ConfigErrors([ConfigError("max_shard_size", text, "is no size", "write for example 5GB, 200MB or 2GiB")])
    return int(float(match[1]) * _UNITS[unit])


def export_options(dtype: str, max_shard_size: str, force: bool, precision: str) -> ExportOptions:
    """Check what was asked for; `same` means the run's precision.

    Raises:
        ConfigErrors: unknown dtype or size.
    """
    if dtype not in (*DTYPES, "same"):
        raise ConfigErrors([ConfigError("dtype", dtype, f"is none of {', '.join(DTYPES)}, same", "name one of them")])
    return ExportOptions(precision if dtype == "same" else dtype, parse_size(max_shard_size), force)


def refuse_existing(target: Path, force: bool) -> None:
    """Raise CheckpointError where `target` exists and `force` is off, or where it is nothing we may replace."""
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise CheckpointError(f"{target} exists; give another folder, or --force to replace it")
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} is no folder; it is not replaced")
    if any(target.iterdir()) and not (target / "config.json").is_file():
        raise CheckpointError(f"{target} holds something other than a model (no config.json); it is not replaced")


def _named(target: str | Path) -> Path:
    """The target with a name of its own to put another folder beside: `.` and `..` have none."""
    path = Path(target)
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def _write_folder(
    shapes: Shapes,
    stream: Iterator[tuple[str, Tensor]],
    sidecar: Path,
    target: Path,
    options: ExportOptions,
    axis: Axis,
) -> None:
    """Weights, dealt over the ranks of `axis`; configuration and tokenizer by its first.

    Raises:
        OSError, CheckpointError: after this rank has drawn the whole stream.
    """
    write_weights(target, shapes, stream, DTYPES[options.dtype], options.max_bytes, axis)
    if axis.rank == 0:
        raw = read_config(sidecar)
        copy_sidecar(sidecar, target)
        config = json.dumps(exported_config(raw, options.dtype), indent=2) + "\n"
        (target / "config.json").write_text(config, encoding="utf-8")


def export_checkpoint(
    checkpoint: str | Path, target: str | Path, dtype: str = "same", max_shard_size: str = "5GB", force: bool = False
) -> Path:
    """Write an HF folder from a training checkpoint of any layout, in this one process on the CPU.

    Raises:
        ConfigErrors: unknown dtype or size.
        CheckpointError: no complete checkpoint, damaged files, an existing target without `force`.
    """
    target, axis = _named(target), Axis.single()
    folder = files.find_checkpoint(checkpoint)
    manifest = files.read_manifest(folder)
    options = export_options(dtype, max_shard_size, force, manifest.precision)
    refuse_existing(target, force)
    needed = sorted({run.file for t in manifest.tensors.values() for run in t.runs[WEIGHT]})
    faults = files.file_faults(folder, manifest, needed) or files.content_faults(folder, manifest, needed)
    if faults:
        raise CheckpointError("\n".join(faults))
    try:
        with replacing(target) as temporary:
            tensors = {name: manifest.tensors[name] for name in ordered(manifest.tensors)}
            shapes, stream = {name: t.shape for name, t in tensors.items()}, stored_tensors(folder, tensors)
            _write_folder(shapes, stream, folder / files.SIDECAR, temporary, options, axis)
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or target}: {exc.strerror}") from None
    return target


class Stopped(HybridError):
    """An export that was to end before its end."""


def export_hf(
    state: TrainState, target: str | Path, dtype: str = "same", max_shard_size: str = "5GB", force: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Path:  # fmt: skip
    """Write an HF folder from a model in training: `HfTensors`, file by file. Collective over the world.

    Args:
        stop: asked before each bucket of tensors, the same answer on every rank; True ends the export.

    Raises:
        Stopped: `stop` said so; on every rank, with nothing left behind, and what was at `target` stays.
        ConfigErrors, CheckpointError: on every rank, with nothing left behind.
    """
    target, axis = _named(target), world_axis()
    temporary, sidecar = temporary_of(target), target.with_name(target.name + ".sidecar.tmp")
    options = together(axis, lambda: export_options(dtype, max_shard_size, force, state.plan.precision.dtype))

    def prepare() -> None:
        if axis.rank == 0:
            refuse_existing(target, force)
            fresh_folder(temporary)
            fresh_folder(sidecar)
            write_sidecar(state.plan, sidecar)

    ended = False

    def before() -> None:
        nonlocal ended
        ended = ended or stop()
        if ended:
            raise Stopped

    together(axis, prepare)
    try:
        tensors = HfTensors(state)
        stream = tensors.stream(DTYPES[options.dtype], before=before)
        # it communicates, but draws the stream to its end also where it fails
        together(axis, lambda: _write_folder(tensors.shapes, stream, sidecar, temporary, options, axis))
        together(axis, lambda: publish(temporary, target) if axis.rank == 0 else None)
    except CheckpointError:
        if ended:
            raise Stopped(f"{target} was not written: stopped") from None
        raise
    finally:
        if axis.rank == 0:
            for leftover in (temporary, sidecar, old_of(target)):
                shutil.rmtree(leftover, ignore_errors=True)
    return target
