"""A Hugging Face folder from stored runs of tensors: shard plan, index, dtype. One tensor is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid5d.checkpoint.manifest import WEIGHT, StoredTensor
from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter, tensor_bytes
from hybrid5d.checkpoint.start_weights import TensorFiles
from hybrid5d.checkpoint.stored import fill_from_runs
from hybrid5d.hf.folder import INDEX_FILE, SINGLE_FILE
from hybrid5d.parallel.shard import Piece
from hybrid5d.plan.cut import Cut


@dataclass(frozen=True)
class ShardPlan:
    """Which tensors go into which file, in order."""

    files: Mapping[str, tuple[str, ...]]
    total_bytes: int

    def index(self) -> dict[str, Any] | None:
        """Content of the index; None where one file holds everything."""
        if len(self.files) == 1:
            return None
        weight_map = {name: file for file, names in self.files.items() for name in names}
        return {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def plan_shards(tensors: Mapping[str, StoredTensor], dtype: torch.dtype, max_bytes: int) -> ShardPlan:
    """Fill files in order up to `max_bytes`; a tensor larger than that gets a file of its own."""
    groups: list[list[str]] = [[]]
    used = total = 0
    for name in tensors:
        size = tensor_bytes(dtype, tensors[name].shape)
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
        total += size
    n = len(groups)
    names = [SINGLE_FILE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return ShardPlan({file: tuple(group) for file, group in zip(names, groups)}, total)


def write_shard(
    path: Path, names: Sequence[str], tensors: Mapping[str, StoredTensor], source: Path, dtype: torch.dtype
) -> None:
    """One file of whole tensors in `dtype`, put together from the runs stored in `source`."""
    layout = {name: (dtype, tensors[name].shape) for name in names}
    with TensorFiles() as reader, SafetensorsWriter(path, layout) as writer:
        for name in names:
            stored = tensors[name]
            whole = torch.empty(stored.shape, dtype=torch.float32)
            piece = Piece(name, stored.shape, Cut.whole(stored.shape))
            fill_from_runs(whole, piece, stored, WEIGHT, source, reader)
            writer.write(name, whole)


def write_index(folder: Path, plan: ShardPlan) -> None:
    """The index, where there is more than one file."""
    index = plan.index()
    if index is not None:
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
