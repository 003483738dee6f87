"""Each layer against its one-process twin: forward and every gradient, with and without sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid5d.parallel import collectives as c
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.shard import pieces_of
from hybrid5d.tensor_parallel import (
    IGNORE_INDEX,
    ColumnParallelLinear,
    HeadOptions,
    RowParallelLinear,
    VocabParallelEmbedding,
    defer_partial_sums,
    linear_cross_entropy,
    linear_logprobs,
    sum_partial_gradients,
)
from tests.harness import run_ranks

H, FFN, VOCAB, B, S = 12, 20, 101, 2, 8


def _axis(world: int) -> Axis:
    return Axis.from_group(None) if world > 1 else Axis.single()


def _fill(module: torch.nn.Module, full: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for p in module.parameters():
            for piece in pieces_of(p):
                piece.local_view(p).copy_(piece.of(full[piece.name]))


def _tensors(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "gate.weight": (FFN, H), "up.weight": (FFN, H), "down.weight": (H, FFN), "gate.bias": (FFN,), "up.bias": (FFN,),
        "down.bias": (H,), "table.weight": (VOCAB, H), "x": (B, S, H), "dy": (B, S, H), "dvocab": (B, S, VOCAB),
    }  # fmt: skip
    return {k: torch.randn(v, generator=g, dtype=torch.float64).float() for k, v in shapes.items()}


def _mlp_rank(rank: int, world: int, sp: bool, deferred: bool) -> dict[str, Tensor]:
    axis, full = _axis(world), _tensors()
    column = ColumnParallelLinear(H, (FFN, FFN), axis, sequence_parallel=sp, names=("gate", "up"))
    row = RowParallelLinear(FFN, H, axis, sequence_parallel=sp, name="down")
    _fill(column, full)
    _fill(row, full)
    x = (c.split_seq(full["x"], axis) if sp else full["x"]).clone().requires_grad_(True)
    dy = c.split_seq(full["dy"], axis) if sp else full["dy"]
    gate, up = column(x).chunk(2, -1)
    y = row(torch.tanh(gate) * up)
    params = [*column.parameters(), *row.parameters()]
    if deferred:
        defer_partial_sums(params)
    y.backward(dy.contiguous())
    if deferred:
        sum_partial_gradients(params)
    assert x.grad is not None
    out = {"y": y.detach(), "dx": x.grad}
    if sp:
        out = {k: c.all_gather_seq(v, axis).wait() for k, v in out.items()}
    for p in params:
        for piece in pieces_of(p):
            assert p.grad is not None
            out[f"{piece.name}@{piece.cut.start}:{piece.cut.stop}"] = piece.local_view(p.grad).clone()
    return out


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sp,deferred", [(False, False), (True, False), (True, True)])
def test_columns_then_rows(world: int, sp: bool, deferred: bool) -> None:
    full = {k: v.double().requires_grad_(True) for k, v in _tensors().items()}
    hidden = torch.tanh(F.linear(full["x"], full["gate.weight"], full["gate.bias"]))
    y = F.linear(
        hidden * F.linear(full["x"], full["up.weight"], full["up.bias"]), full["down.weight"], full["down.bias"]
    )
    y.backward(full["dy"].detach())
    for rank, got in enumerate(run_ranks(world, _mlp_rank, world, sp and world > 1, deferred)):
        torch.testing.assert_close(got.pop("y").double(), y.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.pop("dx").double(), full["x"].grad, rtol=1e-5, atol=1e-5)
        assert len(got) == 6
        for key, value in got.items():
            name, _, run = key.partition("@")
            start, stop = map(int, run.split(":"))
            grad = full[name].grad
            assert grad is not None
            cut = grad if name == "down.bias" else grad.narrow(1 if name == "down.weight" else 0, start, stop - start)
            torch.testing.assert_close(value.double(), cut, rtol=1e-5, atol=1e-5, msg=f"rank {rank} {key}")


def _targets() -> Tensor:
    g = torch.Generator().manual_seed(7)
    targets = torch.randint(0, VOCAB, (B, S), generator=g)
    targets[0, ::3] = IGNORE_INDEX
    targets[0, 1] = VOCAB - 1  # the last real row, beside the padding
    return targets


def _vocab_rank(rank: int, world: int, sp: bool, chunk: int, dtype: torch.dtype) -> dict[str, Any]:
    axis, full = _axis(world), _tensors()
    table = VocabParallelEmbedding(VOCAB, H, axis, sequence_parallel=sp, name="table").to(dtype)
    _fill(table, full)
    piece = pieces_of(table.weight)[0]
    with torch.no_grad():
        table.weight[piece.length :] = 10.0  # poison the padding
    ids = _targets().clamp(min=0)
    x = table(ids)
    options = HeadOptions(sp, chunk_tokens=chunk)
    loss = linear_cross_entropy(x, table.weight, _targets(), table.vocab, options)
    (loss * 0.5).backward()
    logprobs, entropy = linear_logprobs(x.detach(), table.weight.detach(), _targets(), table.vocab, options)
    assert table.weight.grad is not None
    return {
        "loss": loss.detach(), "rows": (piece.cut.start, piece.cut.stop), "grad": piece.local_view(table.weight.grad),
        "padding_grad": table.weight.grad[piece.length :], "logprobs": logprobs, "entropy": entropy,
    }  # fmt: skip


@pytest.mark.parametrize(
    "world,sp,chunk", [(1, False, 1024), (2, False, 5), (2, True, 1024), (4, True, 3), (4, False, 16)]
)
def test_embedding_head_and_loss(world: int, sp: bool, chunk: int) -> None:
    """Odd vocabulary, padding rows preset to +10, chunks that do not divide the tokens, a tied matrix."""
    weight = _tensors()["table.weight"].double().requires_grad_(True)
    targets = _targets().reshape(-1)
    hidden = F.embedding(_targets().clamp(min=0), weight).reshape(-1, H)
    logits = hidden.matmul(weight.t())
    want = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    want.sum().backward()
    assert weight.grad is not None
    log = torch.log_softmax(logits.detach(), -1)
    for got in run_ranks(world, _vocab_rank, world, sp, chunk, torch.float32):
        start, stop = got["rows"]
        near = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got["loss"].double(), want.sum().detach(), **near)
        torch.testing.assert_close(got["grad"].double(), 0.5 * weight.grad[start:stop], **near)
        assert not got["padding_grad"].any()
        torch.testing.assert_close(got["logprobs"].double().reshape(-1), -want.detach(), **near)
        torch.testing.assert_close(got["entropy"].double().reshape(-1), -(log.exp() * log).sum(-1), **near)


def test_loss_in_bf16_is_close() -> None:
    exact = run_ranks(2, _vocab_rank, 2, False, 16, torch.float32)[0]
    rounded = run_ranks(2, _vocab_rank, 2, False, 16, torch.bfloat16)[0]
    torch.testing.assert_close(rounded["loss"], exact["loss"], rtol=2e-2, atol=0)
    assert rounded["grad"].dtype == torch.bfloat16
    torch.testing.assert_close(rounded["grad"].float(), exact["grad"], rtol=0.1, atol=0.1)


def _collectives_rank(rank: int, world: int, dtype: torch.dtype) -> list[Tensor]:
    axis = _axis(world)
    x = torch.arange(world * 3 * 2 * 2, dtype=dtype).reshape(2, world * 3, 2) * (rank + 1)
    summed = c.all_reduce(x.clone(), axis).wait()
    scattered = c.reduce_scatter_seq(x, axis).wait()
    gathered = c.all_gather_seq(scattered, axis).wait()
    return [summed, gathered]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reduce_scatter_then_gather_is_an_all_reduce(world: int, dtype: torch.dtype) -> None:
    base = torch.arange(world * 3 * 2 * 2, dtype=torch.float64).reshape(2, world * 3, 2)
    want = (base * sum(range(1, world + 1))).to(dtype)
    results = run_ranks(world, _collectives_rank, world, dtype)
    for summed, gathered in results:
        torch.testing.assert_close(summed, want, rtol=1e-2, atol=0)
        torch.testing.assert_close(gathered, want, rtol=1e-2, atol=0)
        assert torch.equal(summed, results[0][0]) and torch.equal(gathered, results[0][1])


def test_sizes_that_do_not_divide_are_refused() -> None:
    axis = Axis(None, 2, 0, (0, 1))
    with pytest.raises(ValueError, match="out_features=21 is not a multiple of the tensor-parallel size 2"):
        ColumnParallelLinear(H, 21, axis)
    with pytest.raises(ValueError, match="in_features=21 is not a multiple"):
        RowParallelLinear(21, H, axis)
