"""What context parallelism sends, holds and computes: counted, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid5d.context_parallel import ContextParallelAttention, SequencePlan, Traffic, ring_attention, ulysses_attention
from hybrid5d.context_parallel.kernels.aten_cpu import AtenCpuKernel
from hybrid5d.context_parallel.ulysses import to_heads, to_sequence
from hybrid5d.parallel.context import Axis
from tests.attention_cases import HEAD_DIM, Case, Runner, reference
from tests.harness import run_ranks


def sent(rank: int, world: int, cases: list[Case]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Bytes this rank sent in the forward and in the backward of each case."""
    runner, result = Runner(rank, world), []
    for case in cases:
        (q, k, v, dout), _ = runner.local(case)
        for x in (q, k, v):
            x.requires_grad_()
        attention = runner.attention(case)
        out = attention(q, k, v, runner.plan(case), case.window)
        forward = dict(attention.traffic.bytes)
        out.backward(dout)
        total = attention.traffic.bytes
        result.append((forward, {kind: total[kind] - forward[kind] for kind in total}))
    return result


@pytest.mark.parametrize("dtype,size", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_on_the_wire(cp, dtype, size):
    """Ring and all-gather: (cp-1)/cp of K and V forward; the same and dK, dV in fp32 backward. As kv heads."""
    length, heads, kv = 64, 8, 2
    base = Case("p2p", heads, kv, ((length,),), dtype=dtype)
    cases = [base, replace(base, method="all_gather"), replace(base, method="a2a")]
    keys = (cp - 1) * (length // cp) * kv * HEAD_DIM
    kv_wide = max(kv, cp)  # fewer kv heads than ranks travel repeated
    part = (cp - 1) * length // cp * HEAD_DIM // cp
    for ring, gather, ulysses in run_ranks(cp, sent, cp, cases):
        for forward, backward in (ring, gather):
            assert forward == {"p2p": 2 * keys * size}
            assert backward == {"p2p": 2 * keys * size + 2 * keys * 4}
        for direction in ulysses:
            assert direction == {"all_to_all": (2 * heads + 2 * kv_wide) * part * size}


def test_bytes_of_the_hybrid():
    """Ulysses 2 outside, ring 2 inside: each as if alone, on its share of heads and sequence."""
    length, heads, kv = 64, 8, 2
    case = Case("a2a+p2p", heads, kv, ((length,),))
    for forward, backward in (result[0] for result in run_ranks(4, sent, 4, [case])):
        keys = (length // 2) * (kv // 2) * HEAD_DIM * 4
        exchanged = (2 * heads + 2 * kv) * (length // 4) * HEAD_DIM * 4 // 2
        assert forward == {"all_to_all": exchanged, "p2p": 2 * keys}
        assert backward == {"all_to_all": exchanged, "p2p": 4 * keys}


def test_a_window_sends_only_what_is_seen():
    case = Case("all_gather", 8, 2, ((64,),), window=5, balance="contiguous")
    block = 2 * 16 * 2 * HEAD_DIM * 4
    for rank, ((forward, _),) in enumerate(run_ranks(4, sent, 4, [case])):
        assert forward["p2p"] == (block if rank < 3 else 0)  # the next rank alone needs it
    ring = replace(case, method="p2p")
    assert all(forward["p2p"] == block for ((forward, _),) in run_ranks(4, sent, 4, [ring]))


class CountingKernel(AtenCpuKernel):
    """Counts the scores of its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.scores = 0

    def forward(self, q, k, v, call, scale):
        self.scores += call.scores
        assert q.shape[1] * k.shape[1] <= 256 * 256, "a block as large as the whole"
        return super().forward(q, k, v, call, scale)


def computed(rank: int, world: int, documents: tuple[tuple[int, ...], ...]) -> int:
    kernel = CountingKernel()
    plan = SequencePlan.build(documents, world, packed=len(documents[0]) > 1)
    q = torch.zeros(1, plan.local_length, 1, 8)
    ContextParallelAttention(Axis.from_group(None), kernel=kernel)(q, q, q, plan)
    return kernel.scores


@pytest.mark.parametrize("documents", [((512,),), ((100, 301, 111),)])
def test_the_kernel_is_given_equal_work(documents):
    counts = run_ranks(4, computed, 4, documents)
    exact = sum(n * (n + 1) // 2 for n in documents[0])
    assert max(counts) <= 1.02 * min(counts)
    assert exact <= sum(counts) <= (1.02 if len(documents[0]) == 1 else 1.03) * exact


class LargestTensors(TorchDispatchMode):
    """Bytes of the storages alive at once, and the largest tensor ever made, by watching every operator's result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def held(rank: int, world: int, method: str, length: int, window: int | None) -> tuple[int, int]:
    """Bytes saved for backward, and the largest tensor of forward and backward."""
    plan = SequencePlan.build(((length,),), world, method)
    axis = Axis.from_group(None) if world > 1 else Axis.single()
    attention = ContextParallelAttention(axis, method)
    q, k, v = (torch.randn(1, plan.local_length, 4, HEAD_DIM, requires_grad=True) for _ in range(3))
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with LargestTensors() as watch:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(q, k, v, plan, window)
        out.sum().backward()
    return sum(saved.values()), watch.largest


@pytest.mark.parametrize("method", ["p2p", "a2a", "all_gather"])
def test_memory_falls_with_cp(method):
    """Held until the backward: 1/cp. No tensor of S x S, nor of strip x S x heads, ever."""
    length = 2048
    alone, _ = held(0, 1, method, length, None)
    assert alone == pytest.approx((4 * HEAD_DIM + 1) * 4 * length * 4)  # q, k, v, out and lse of 4 heads
    for cp in (2, 4):
        # on gloo: views of the shared segment are no memory of a step
        for saved, largest in run_ranks(cp, held, cp, method, length, None, backend="gloo"):
            assert saved == pytest.approx(alone / cp, rel=0.15)
            assert largest <= 2 * length * 4 * HEAD_DIM * 4 // cp  # K and V of one rank


def test_a_window_needs_small_masks_only():
    for _, largest in run_ranks(2, held, 2, "p2p", 4096, 64):
        assert largest < 4096 * 4096 * 4 / 16


def ids(rank: int, world: int) -> bool:
    """batch*1e4 + pos*1e2 + head survives the exchange and names its place."""
    axis, right = Axis.from_group(None), True
    for batch in (1, 2, 3):
        local, heads = 5, 8
        b, s, h = torch.meshgrid(
            torch.arange(batch), rank * local + torch.arange(local), torch.arange(heads), indexing="ij"
        )
        x = (b * 1e4 + s * 1e2 + h)[..., None].expand(-1, -1, -1, 2).contiguous().requires_grad_()
        q, k, v = to_heads(x, x[:, :, :2], x[:, :, :2], axis)
        share = heads // world
        b, s, h = torch.meshgrid(
            torch.arange(batch), torch.arange(local * world), rank * share + torch.arange(share), indexing="ij"
        )
        expected = (b * 1e4 + s * 1e2 + h)[..., None].expand(-1, -1, -1, 2)
        right &= torch.equal(q, expected) and torch.equal(k, v)
        kv_head = rank * 2 // world  # the one of this rank's queries
        right &= torch.equal(k, (b * 1e4 + s * 1e2 + kv_head)[:, :, :1, None].expand(-1, -1, -1, 2))
        back = to_sequence(q, axis)
        right &= torch.equal(back, x)
        (back.sum() + v.sum()).backward()
        right &= torch.equal(x.grad[:, :, 2:], torch.ones_like(x.grad[:, :, 2:]))
        right &= torch.equal(x.grad[:, :, :2], torch.full_like(x.grad[:, :, :2], 1.0 + world / 2))
    return right


@pytest.mark.parametrize("cp", [2, 4])
def test_ids_survive_the_exchange(cp):
    assert all(run_ranks(cp, ids, cp))


def library(rank: int, world: int) -> float:
    """ring_attention and ulysses_attention on plain tensors with a default or explicit group; errors that speak."""
    full = [torch.randn(24, h, HEAD_DIM, generator=torch.Generator().manual_seed(h)) for h in (8, 2, 2, 8)]
    right, worst = reference(*full, (24,), None)[0], 0.0
    for attend, group, method in [
        (ring_attention, None, "p2p"),
        (ring_attention, torch.distributed.group.WORLD, "p2p"),
        (ulysses_attention, None, "a2a"),
    ]:
        index = SequencePlan.build(((24,),), world, method).source_index(rank)[0]
        q, k, v = (x[index][None] for x in full[:3])
        worst = max(worst, (attend(q, k, v, group)[0] - right[index]).abs().max().item())
    odd = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]  # last stride not 1
    worst = max(worst, (ulysses_attention(*odd)[0] - right[index]).abs().max().item())
    with pytest.raises(ValueError, match="do not belong together"):
        ulysses_attention(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="multiple of 4"):
        ring_attention(q[:, :3], k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="3 local query heads"):
        ulysses_attention(q[:, :, :3], k[:, :, :1], v[:, :, :1])
    with pytest.raises(ValueError, match="3 local kv heads"):
        to_heads(q[:, :, :6], q[:, :, :3], q[:, :, :3], Axis.from_group(None))
    with pytest.raises(ValueError, match="plan is for a2a"):
        ContextParallelAttention(Axis.from_group(None))(q, k, v, SequencePlan.build(((24,),), 2, "a2a"))
    return worst


def test_library_use():
    assert max(run_ranks(2, library, 2)) < 2e-6


def test_traffic_counts():
    traffic = Traffic()
    traffic.add("p2p", 3)
    traffic.add("p2p", 4)
    assert (traffic.bytes, traffic.calls) == ({"p2p": 7}, {"p2p": 2})
