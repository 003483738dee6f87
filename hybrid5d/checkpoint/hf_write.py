"""A Hugging Face folder's weight files from a stream of whole tensors: shard plan, index, dtype."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid5d.checkpoint.hf_tensors import Shapes, buckets
from hybrid5d.checkpoint.manifest import WEIGHT, StoredTensor
from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter, tensor_bytes
from hybrid5d.checkpoint.start_weights import TensorFiles
from hybrid5d.checkpoint.stored import fill_from_runs
from hybrid5d.hf.folder import INDEX_FILE, SINGLE_FILE
from hybrid5d.parallel.context import Axis
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


def plan_shards(shapes: Shapes, dtype: torch.dtype, max_bytes: int) -> ShardPlan:
    """Fill files in order up to `max_bytes`; a tensor larger than that gets a file of its own."""
    groups = buckets(shapes, dtype, max_bytes)
    n = len(groups)
    names = [SINGLE_FILE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    total = sum(tensor_bytes(dtype, shape) for shape in shapes.values())
    return ShardPlan({file: tuple(group) for file, group in zip(names, groups)}, total)


def stored_tensors(source: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) put together from the runs stored in `source`; one is in memory at a time."""
    with TensorFiles() as reader:
        for name, stored in tensors.items():
            whole = torch.empty(stored.shape, dtype=torch.float32)
            fill_from_runs(whole, Piece(name, stored.shape, Cut.whole(stored.shape)), stored, WEIGHT, source, reader)
            yield name, whole


def write_weights(
    folder: Path, shapes: Shapes, stream: Iterator[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int, axis: Axis
) -> None:
    """The weight files, dealt over the ranks of `axis`, all of which draw the whole stream; the index by its first.

    Raises:
        OSError: after the stream is drawn to its end, as other ranks may need this one for it.
    """
    plan = plan_shards(shapes, dtype, max_bytes)
    try:
        for number, (file, names) in enumerate(plan.files.items()):
            layout = {name: (dtype, shapes[name]) for name in names}
            mine = number % axis.size == axis.rank
            with SafetensorsWriter(folder / file, layout) if mine else nullcontext() as writer:
                for name, tensor in islice(stream, len(names)):
                    if writer is not None:
                        writer.write(name, tensor)
        index = plan.index()
        if index is not None and axis.rank == 0:
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    finally:
        for _ in stream:
            pass
