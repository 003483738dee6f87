"""Whole tensors of a live model in any layout: those of the folder it started from, those of the folder it exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid5d.checkpoint.hf_tensors import buckets
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import Recipe, make_rows, step_batch

ZERO3 = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
CASES = [
    (Layout(), "qwen2"),
    (Layout(tp=4), "llama_bias"),
    (Layout(tp=2, pp=2, sp=True, dp=2), "qwen3"),
    (Layout(pp=4), "qwen2"),
    (Layout(cp=2, dp=2, precision="bf16"), "llama"),
    (Layout(tp=2, dp=2, zero=3, extra=ZERO3), "llama_bias"),
    (Layout(tp=2, dp=2, zero=3, precision="bf16"), "qwen2"),
]


def _rank(rank: int, layout: Layout, folder: str, target: str) -> Any:
    engine = build_engine(layout, Recipe(lr=0.5), folder, 8)
    first = list(engine.hf_tensors("fp32", bucket_bytes=10_000))
    engine.train_batch(step_batch(make_rows(8, 16, 101), layout.dp, engine.ctx.dp.rank, layout.micro))
    after = list(engine.hf_tensors(bucket_bytes=7_001))
    engine.export_hf(target, max_shard_size="20KB")
    assert all(t.dtype == (torch.bfloat16 if layout.precision == "bf16" else torch.float32) for _, t in after)
    # as numpy: the harness sends results over a pipe
    return [(n, t.numpy()) for n, t in first], [(n, t.float().numpy()) for n, t in after]


def _folder(path: str | Path) -> dict[str, torch.Tensor]:
    return {n: t.float() for file in sorted(Path(path).glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("layout, model", CASES, ids=str)
def test_tensors_of_every_rank(layout: Layout, model: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Before a step the start folder's, bit by bit (rounded for bf16); after it those of the export."""
    target = str(tmp_path / "exported")
    results = run_ranks(layout.world, _rank, layout, str(folders[model]), target)
    start, trained = _folder(folders[model]), _folder(target)
    for first, after in results:
        assert [n for n, _ in first] == [n for n, _ in after] and {n for n, _ in first} == set(start) == set(trained)
        for name, values in first:
            want = start[name].bfloat16().float() if layout.precision == "bf16" else start[name]
            assert torch.equal(torch.from_numpy(values), want), name
        moved = 0
        for name, values in after:
            assert torch.equal(torch.from_numpy(values), trained[name]), name
            moved += not torch.equal(trained[name], start[name])
        assert moved > len(after) // 2


def test_buckets() -> None:
    """In order, full but not over; what is larger stands alone."""
    shapes = {"a": (2,), "b": (3,), "c": (9, 9), "d": (1,), "e": ()}
    assert buckets(shapes, torch.float32, 20) == [["a", "b"], ["c"], ["d", "e"]]
    assert buckets(shapes, torch.bfloat16, 1) == [[n] for n in shapes]
