"""Files of a training checkpoint: layout on disk, manifest, pointer, verification. Pure: no torch.

checkpoints/
  latest                              name of the newest folder, written last
  global_step_20/actor/
    manifest.json                     what was saved, by which layout, where each tensor's runs are, sizes, checksums
    model-pp00-tp01.safetensors       fp32 masters of one shard, by HF name
    optim-pp00-tp01-dp00.safetensors  optimizer moments, spread over the ranks that share the shard
    hf/                               config.json, tokenizer files: what an export needs
  global_step_20/critic/              the same of PPO's value model
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from hybrid5d.errors import CheckpointError, ConfigError
from hybrid5d.files import crc32_of
from hybrid5d.hf.folder import FLOAT_DTYPES, HeaderError, read_header
from hybrid5d.plan.cut import Cut

FORMAT = 1
MANIFEST, LATEST, ACTOR, CRITIC, SIDECAR = "manifest.json", "latest", "actor", "critic", "hf"
STEP_FOLDER = re.compile(r"global_step_(\d+)")
WEIGHT = "weight"
SHARE = "Fix: runner.output_dir must be on a file system that all nodes share"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no folder, no way out of this one


@dataclass(frozen=True)
class Run:
    """One stored run of a tensor: rows (or columns, by `dim`) start..stop of it are `key` in `file`; dim None = all."""

    file: str
    dim: int | None
    start: int
    stop: int

    def key(self, name: str, kind: str) -> str:
        """Name of the entry in the safetensors file."""
        rows = "" if self.dim is None else f"[{self.dim}:{self.start}:{self.stop}]"
        return f"{kind}/{name}{rows}"

    @property
    def cut(self) -> Cut:
        return Cut(self.dim, self.start, self.stop)


@dataclass(frozen=True)
class StoredTensor:
    """One HF tensor: whole shape, and the runs of its weight and of each optimizer moment."""

    shape: tuple[int, ...]
    trainable: bool
    runs: Mapping[str, tuple[Run, ...]]


@dataclass(frozen=True)
class StoredFile:
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint says of itself.

    Attributes:
        step: steps done.
        skipped: those of them that changed nothing (fp16 overflows): the schedules do not count them.
        layout: degrees and options it was saved with; information only, any layout can load it.
        precision: of the run; masters and moments are fp32 whatever it is.
        optimizer: `type`, `state` (names of the moments), `step` (its own count).
        loss_scaler: fp16's scale and counters.
        state: what the caller gave to be handed back (data position, best loss ...).
        id: of this checkpoint; follows: of the one that its run had saved or loaded before it.
    """

    step: int
    layout: Mapping[str, Any]
    precision: str
    optimizer: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    loss_scaler: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    follows: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """`weight` and the optimizer's moments."""
        return (WEIGHT, *self.optimizer.get("state", ()))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True)


def describe_layout(layout: Mapping[str, Any]) -> str:
    """`pp2 dp1 cp1 tp2, zero 1, AdamW` from a layout's entries."""
    degrees = " ".join(f"{a}{layout.get(a, '?')}" for a in ("pp", "dp", "cp", "tp"))
    return f"{degrees}, zero {layout.get('zero_stage', '?')}, {layout.get('optimizer', '?')}"


def _parse(raw: Any) -> Manifest:
    """Raises ValueError, KeyError, TypeError, AttributeError for what no save writes; CheckpointError: the format."""
    if raw["format"] != FORMAT:
        raise CheckpointError(f"format {raw['format']} is not {FORMAT}, which this version reads")
    files = {name: StoredFile(**f) for name, f in raw["files"].items()}
    for name, file in files.items():
        _valid(_FILE.fullmatch(name) is not None, f"no name of a file here: {name!r}")
        _valid(_count(file.bytes) and _count(file.crc32), f"size and checksum of {name}")
    tensors = {name: _tensor(name, t, files) for name, t in raw["tensors"].items()}
    rest = {k: v for k, v in raw.items() if k not in ("format", "tensors", "files")}
    manifest = Manifest(tensors=tensors, files=files, **rest)
    optimizer, moments = manifest.optimizer, manifest.optimizer["state"]
    mappings = (manifest.layout, optimizer, manifest.loss_scaler, manifest.state)
    _valid(all(isinstance(m, dict) for m in mappings) and isinstance(moments, list), "a part of another kind")
    words = (manifest.precision, optimizer["type"], manifest.id, manifest.follows, *moments)
    _valid(all(isinstance(word, str) for word in words), "a name that is no text")
    steps = (manifest.step, manifest.skipped, optimizer["step"])
    _valid(all(map(_count, steps)), "a step that is no count")
    _valid(all(isinstance(n, int | float) for n in manifest.loss_scaler.values()), "a loss scaler without numbers")
    return manifest


def _tensor(name: str, raw: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    shape = tuple(raw["shape"])
    _valid(bool(shape) and all(map(_count, shape)) and isinstance(raw["trainable"], bool), f"shape or kind of {name}")
    runs = {kind: tuple(Run(**run) for run in found) for kind, found in raw["runs"].items()}
    for run in (run for found in runs.values() for run in found):
        _valid(run.file in files, f"{name} lies in {run.file!r}, which is not listed")
        inside = run.dim is None or (_count(run.dim) and run.dim < len(shape))
        _valid(inside and _count(run.start) and _count(run.stop), f"a run of {name}")
        _valid(run.start < run.stop <= shape[run.dim or 0], f"a run of {name} that is not inside it")
    return StoredTensor(shape, raw["trainable"], runs)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _valid(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in an `actor` folder.

    Raises:
        CheckpointError: absent, unreadable, not ours, or of another format.
    """
    path = folder / MANIFEST
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: {MANIFEST} is missing") from None
    except CheckpointError as exc:
        raise CheckpointError(f"{path}: {exc}") from None
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{path} is damaged ({type(exc).__name__}: {exc})") from None


def uncovered(manifest: Manifest) -> list[str]:
    """Tensors whose runs are not the whole, each element once; a sound checkpoint has none."""
    found = []
    for name, tensor in manifest.tensors.items():
        for kind, runs in tensor.runs.items():
            stored = sum(prod(b - a for a, b in run.cut.box(tensor.shape)) for run in runs)
            if stored != prod(tensor.shape):
                found.append(f"{kind} of {name}: {stored} of {prod(tensor.shape)} elements")
            elif len({run.dim for run in runs}) > 1 or any(
                a.stop > b.start for a, b in pairwise(sorted(runs, key=lambda run: run.start))
            ):
                found.append(f"{kind} of {name}: some elements twice")
    return found


def file_faults(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Missing files and wrong sizes, one line each; nothing is read."""
    faults = []
    for name in sorted(manifest.files if names is None else names):
        wanted = manifest.files[name].bytes
        try:
            size = (folder / name).stat().st_size
        except OSError as exc:
            faults.append(f"{folder / name}: {exc.strerror}")
            continue
        if size != wanted:
            faults.append(
                f"{folder / name} has {size} bytes, not the {wanted} that were written: truncated or replaced"
            )
    return faults


def header_faults(folder: Path, manifest: Manifest, name: str) -> list[str]:
    """Where a file's own header does not hold what the manifest says that it holds; no data is read."""
    try:
        header = read_header(folder / name)
    except HeaderError as exc:
        return [str(exc)]
    faults = []
    for tensor, stored in manifest.tensors.items():
        for kind, run in ((kind, run) for kind, runs in stored.runs.items() for run in runs if run.file == name):
            found, key = header.get(run.key(tensor, kind)), run.key(tensor, kind)
            shape = tuple(b - a for a, b in run.cut.box(stored.shape))
            if found is None or found.shape != shape or found.dtype not in FLOAT_DTYPES:
                what = "is missing" if found is None else f"is {found.dtype}{list(found.shape)}"
                faults.append(f"{folder / name}: {key} {what}, not of shape {list(shape)}")
    return faults[:3]


def content_faults(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Files whose content is not what was written; reads them whole."""
    faults = []
    for name in names:
        try:
            if crc32_of(folder / name) != manifest.files[name].crc32:
                faults.append(f"{folder / name} is damaged: its checksum is not that of the manifest")
        except OSError as exc:
            faults.append(f"{folder / name} cannot be read: {exc.strerror}")
    return faults


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return root / f"global_step_{step}"


def faults_of(folder: Path) -> list[str]:
    """Why an `actor` folder is not a whole checkpoint, as far as that shows without reading tensors; [] where it is."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as exc:
        return [str(exc)]
    return file_faults(folder, manifest) or [f"{folder}: {gap}" for gap in uncovered(manifest)[:3]]


def step_faults(folder: Path) -> list[str]:
    """`faults_of` every part of a `global_step_N` folder: a run with a critic goes on from both or not at all."""
    parts = [ACTOR, *([CRITIC] if (folder / CRITIC).is_dir() else [])]
    return [fault for part in parts for fault in faults_of(folder / part)]


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint under `root`, whole or not, newest first.

    `global_step_N.old` is what a crash in the middle of replacing step N leaves: it comes after `global_step_N`.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = sorted(p.name for p in root.iterdir() if p.is_dir())
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(f"{root} cannot be read: {exc.strerror}") from None
    found = [(int(m[1]), name) for name in names if (m := STEP_FOLDER.fullmatch(name.removesuffix(".old")))]
    return [(step, root / name) for step, name in sorted(found, key=lambda f: (-f[0], f[1]))]


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The `actor` folder meant by a path: itself, a `global_step_N` folder, or a `checkpoints` folder (its newest).

    Raises:
        CheckpointError: it is not there, or its manifest cannot be read.
    """
    path = Path(path)
    old = path.with_name(path.name + ".old")
    if (path / MANIFEST).is_file():
        folder = path
    elif STEP_FOLDER.fullmatch(path.name):
        folder = (old if not path.is_dir() and old.is_dir() else path) / ACTOR
    else:
        steps = checkpoints(path)
        if not steps and not path.is_dir():
            raise CheckpointError(f"{path} does not exist or is no folder")
        if not steps:
            raise CheckpointError(f"{path} holds no complete checkpoint (no {ACTOR}/{MANIFEST} below it)")
        folder = steps[0][1] / ACTOR
    read_manifest(folder)
    return folder


def critic_beside(actor: Path) -> Path:
    """The critic's folder of a checkpoint, beside the actor's.

    Raises:
        CheckpointError: it was saved by a run without one.
    """
    folder = actor.parent / CRITIC
    if not folder.is_dir():
        rule = f"{actor.parent} holds no critic, which this run trains; a run without one saved it"
        fix = "name a checkpoint with a critic in runner.resume_dir, or null, which starts anew"
        raise CheckpointError(str(ConfigError("critic.use_critic_model", True, rule, fix)))
    return folder


def whole_checkpoint(path: str | os.PathLike[str]) -> Path:
    """`find_checkpoint` for going on from it: every file is needed. Raises CheckpointError."""
    folder = find_checkpoint(path)
    if faults := faults_of(folder):
        raise CheckpointError("\n".join(faults))
    return folder


@dataclass(frozen=True)
class Resume:
    """Where a run goes on.

    Attributes:
        source: the `actor` folder; None = from the start.
        passed_over: newer checkpoints that are not whole, one line each with the reason.
    """

    source: Path | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps that the checkpoint has done; 0 from the start."""
        return 0 if self.source is None else read_manifest(self.source).step


def resolve_resume(resume_dir: str | None, root: Path, damaged: Collection[Path] = ()) -> Resume:
    """None = start anew; a path = that checkpoint; `auto` = the newest whole one of the run, if it has any.

    Args:
        damaged: `actor` folders whose content proved wrong when it was read; `auto` passes them over.

    Raises:
        CheckpointError: a path that is not a whole checkpoint; `auto` where there are checkpoints and none is whole.
    """
    if resume_dir is None:
        return Resume()
    if resume_dir != "auto":
        return Resume(whole_checkpoint(resume_dir))
    passed: list[str] = []
    for step, folder in checkpoints(root):
        faults = [f"{folder}: its content is damaged"] if folder / ACTOR in damaged else step_faults(folder)
        if not faults:
            return Resume(folder / ACTOR, tuple(passed))
        passed.append(f"the checkpoint of step {step} is passed over: {faults[0]}")
    if passed:
        fix = "Fix: repair one or name another in runner.resume_dir; null starts anew and keeps them aside"
        raise CheckpointError("\n".join([f"{root} has checkpoints, but none is whole. {fix}", *passed]))
    return Resume()
