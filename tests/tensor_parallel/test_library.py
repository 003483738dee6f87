"""The layers as a library: on plain process groups, drawn as torch draws, gradients whole without any further call."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid5d.models.init import init_weights
from hybrid5d.parallel.shard import pieces_of
from hybrid5d.tensor_parallel import (
    Axis,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    defer_partial_sums,
    replicated,
    split_seq,
    sum_partial_gradients,
)
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
IN, OUT, VOCAB = 12, 20, 101


def _group(world: int) -> Any:
    return dist.group.WORLD if world > 1 else Axis.single()


def _draw(rank: int, world: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    layers = {
        "up": ColumnParallelLinear(IN, OUT, _group(world)),
        "down": RowParallelLinear(OUT, IN, _group(world)),
        "table": VocabParallelEmbedding(VOCAB, IN, _group(world), padding_idx=VOCAB - 1),
    }
    return {f"{name}.{part}": p.detach() for name, layer in layers.items() for part, p in layer.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_values_are_those_of_torch_layers_of_the_same_seed(world: int) -> None:
    torch.manual_seed(5)
    up, down, table = nn.Linear(IN, OUT), nn.Linear(OUT, IN), nn.Embedding(VOCAB, IN, padding_idx=VOCAB - 1)
    ranks = run_ranks(world, _draw, world)
    near = {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(torch.cat([r["up.weight"] for r in ranks]), up.weight.detach(), **near)
    torch.testing.assert_close(torch.cat([r["up.bias"] for r in ranks]), up.bias.detach(), **near)
    torch.testing.assert_close(torch.cat([r["down.weight"] for r in ranks], 1), down.weight.detach(), **near)
    rows = torch.cat([r["table.weight"] for r in ranks])
    torch.testing.assert_close(rows[:VOCAB], table.weight.detach(), **near)
    assert not rows[VOCAB:].any()
    for r in ranks:
        torch.testing.assert_close(r["down.bias"], down.bias.detach(), **near)


def _norm_and_rows(rank: int, world: int, deferred: bool) -> list[list[Tensor]]:
    """Gradients of a norm and a row bias in a sequence-parallel region, over two micro-batches."""
    torch.manual_seed(1)
    axis = Axis.of(_group(world))
    norm, up = nn.LayerNorm(IN), ColumnParallelLinear(IN, OUT, axis, sequence_parallel=True)
    down = RowParallelLinear(OUT, IN, axis, sequence_parallel=True)
    for p in norm.parameters():
        replicated(p, axis, partial=True)
    params = [*norm.parameters(), *down.parameters()]
    if deferred:
        defer_partial_sums(params)
    for x in torch.randn(2, 3, 8, IN, generator=torch.Generator().manual_seed(2)):
        down(F.gelu(up(norm(split_seq(x, axis))))).square().sum().backward()
    if deferred:
        sum_partial_gradients(params)
    elif world > 1:
        with pytest.raises(RuntimeError, match="summed in backward"):
            sum_partial_gradients(params)
    return [[p.grad for p in norm.parameters() if p.grad is not None], [down.bias.grad]]  # type: ignore


@pytest.mark.parametrize("deferred", [False, True])
def test_partial_gradients_are_summed_unless_the_loop_defers_them(deferred: bool) -> None:
    (whole,) = run_ranks(1, _norm_and_rows, 1, False)
    for got in run_ranks(4, _norm_and_rows, 4, deferred):
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


def _shared_heads(rank: int, world: int) -> dict[str, Any]:
    """Two matrices of two heads each over four ranks: ranks 0 and 1 hold each first head, 2 and 3 each second one.

    Each rank's loss is its own factor times the sum of what it holds, so a head's whole factor is its ranks' sum.
    """
    factors = [2.0, 5.0, 3.0, 7.0]
    torch.manual_seed(3)
    layer = ColumnParallelLinear(IN, (6, 10), _group(world), copies=2 if world > 1 else 1)
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(4), requires_grad=True)
    if world > 1:
        slopes = torch.full((8,), factors[rank])
    else:
        slopes = torch.cat([torch.full((n // 2,), f) for n in (6, 10) for f in (2.0 + 5.0, 3.0 + 7.0)])
    (layer(x) * slopes).sum().backward()
    pieces = pieces_of(layer.weight)
    assert layer.weight.grad is not None and x.grad is not None
    return {
        "dx": x.grad,
        "rows": [(p.full_shape[0], p.cut.start, p.cut.stop, p.local_view(layer.weight.grad)) for p in pieces],
    }


def test_shared_shares_sum_their_gradients() -> None:
    (whole,) = run_ranks(1, _shared_heads, 1)
    full = {size: grad for size, _, _, grad in whole["rows"]}
    for rank, got in enumerate(run_ranks(4, _shared_heads, 4)):
        torch.testing.assert_close(got["dx"], whole["dx"], rtol=1e-5, atol=1e-5)
        for size, start, stop, grad in got["rows"]:
            assert (start, stop) == (rank // 2 * size // 2, (rank // 2 + 1) * size // 2)
            torch.testing.assert_close(grad, full[size][start:stop], rtol=1e-5, atol=1e-5)


TWO = Axis(None, 2, 1, (0, 1))  # the second of two ranks; nothing here communicates


def test_a_copy_that_lost_its_sum_is_refused() -> None:
    layer = copy.deepcopy(RowParallelLinear(OUT, IN, TWO, sequence_parallel=True))
    with pytest.raises(RuntimeError, match="lost the sum of its gradient"):
        layer(torch.zeros(1, 4, OUT // 2))


def test_representations_name_the_cut() -> None:
    assert repr(ColumnParallelLinear(IN, OUT, TWO)) == (
        f"ColumnParallelLinear(in_features={IN}, out_features={OUT}/2, bias=True)"
    )
    row = RowParallelLinear(OUT, IN, TWO, bias=False, sequence_parallel=True)
    assert repr(row) == (
        f"RowParallelLinear(in_features={OUT}/2, out_features={IN}, bias=False, sequence_parallel=True)"
    )
    assert repr(VocabParallelEmbedding(VOCAB, IN, TWO)) == f"VocabParallelEmbedding({VOCAB}/2, {IN})"


def test_named_layers_wait_for_their_values_and_nameless_ones_cannot_be_filled_by_name() -> None:
    assert not ColumnParallelLinear(IN, OUT, TWO, names=["up"]).weight.any()
    with pytest.raises(ValueError, match=r"a parameter cut from \(20, 12\) has no name"):
        init_weights(ColumnParallelLinear(IN, OUT, TWO), 0, 0.02)


def test_the_example_trains_as_one_process() -> None:
    env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    script = "examples/tensor_parallel_mlp.py"
    done = subprocess.run([*launch, script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("losses on 2 ranks, as in one process: 1.")
