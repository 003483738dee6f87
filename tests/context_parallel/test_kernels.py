"""The kernels other than the CPU's own: each against fp64, and flash-attn's calls against a stand-in package."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace

import pytest
import torch

from hybrid5d.context_parallel import SequencePlan, choose_kernel
from hybrid5d.context_parallel.kernels import available_kernels
from hybrid5d.context_parallel.kernels.aten_flash import AtenFlashKernel
from hybrid5d.context_parallel.kernels.chunked import ChunkedKernel
from hybrid5d.context_parallel.kernels.flash_attn import FlashAttnKernel, package_functions
from hybrid5d.plan.sequence_blocks import Block
from tests.attention_cases import Case, Error, Runner
from tests.harness import run_ranks

CASES = [
    Case("p2p", 8, 2, ((37,), (20,))),
    Case("p2p", 8, 2, ((5, 40, 3), (17,)), True),
    Case("all_gather", 8, 8, ((301, 20),), True, 90),
    Case("a2a", 8, 2, ((40,), (31,)), window=6),
    Case("p2p", 8, 2, ((5, 40, 3, 33),), True, 9),
    Case("p2p", 4, 2, (tuple(3 + i % 5 for i in range(64)),), True),
    Case("all_gather", 4, 2, (tuple(3 + 4 * (i % 5) for i in range(16)),), True, 6),
]


def _varlen(q, k, v, lengths_q, lengths_k, call):
    """Split flattened [T, heads, d] tensors and apply `call(i, j, rows, keys)` per sequence."""
    return [call(slice(a, b), slice(c, d)) for a, b, c, d in zip(lengths_q, lengths_q[1:], lengths_k, lengths_k[1:])]


def _block(m, n, causal, left, right):
    """The block that these flash-attn options mean: a band counted from the lower right corner."""
    if causal:
        assert m == n
        return Block(0, m, 0, n, "causal")
    if left < 0:
        return Block(0, m, 0, n, "full")
    shift = right + n - m
    return Block(0, m, 0, n, "band", shift, left + 1 + right)


def fake_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    """flash_attn 2.8's `_flash_attn_varlen_forward`, in plain torch."""
    assert dropout_p == 0.0 and cu_seqlens_q.dtype == torch.int32 and q.dim() == 3
    assert cu_seqlens_q[-1] == q.shape[0] and cu_seqlens_k[-1] == k.shape[0]
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()

    def one(rows, keys):
        block = _block(rows.stop - rows.start, keys.stop - keys.start, causal, window_size_left, window_size_right)
        out, lse = ChunkedKernel().forward(q[None, rows], k[None, keys], v[None, keys], block, softmax_scale)
        return out[0], lse[0]

    outs, lses = zip(*_varlen(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), one))
    return torch.cat(outs), torch.cat(lses, 1), None, None


def fake_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """flash_attn 2.8's `_flash_attn_varlen_backward`: fills dq, dk, dv."""
    assert softmax_lse.shape == (q.shape[1], q.shape[0]) and softmax_lse.is_contiguous() and not deterministic

    def one(rows, keys):
        block = _block(rows.stop - rows.start, keys.stop - keys.start, causal, window_size_left, window_size_right)
        parts = (
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            softmax_lse[None, :, rows],
        )
        for whole, at, grad in zip(
            (dq, dk, dv), (rows, keys, keys), ChunkedKernel().backward(*parts, block, softmax_scale)
        ):
            whole[at] = grad[0]

    _varlen(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), one)


def stand_in() -> None:
    """Put a `flash_attn` package of the two functions above in place."""
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward = fake_forward, fake_backward
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = interface
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})
    package_functions.cache_clear()


class AtenFlashOnCpu(AtenFlashKernel):
    """aten's operators, which only CUDA has, in plain torch: the dense form as a batch of one sequence each."""

    def _forward(self, qkv, offsets, call, scale):
        q, k, v = qkv
        if offsets[0] is None:
            block = _block(q.shape[1], k.shape[1], call.causal, call.left, call.right)
            return ChunkedKernel().forward(q, k, v, block, scale)
        longest = max(call.row_counts), max(call.key_counts)
        return fake_forward(q, k, v, *offsets, *longest, 0.0, scale, call.causal, call.left, call.right)[:2]

    def _backward(self, given, lse, offsets, call, scale):
        dout, q, k, v, out = given
        if offsets[0] is None:
            block = _block(q.shape[1], k.shape[1], call.causal, call.left, call.right)
            return ChunkedKernel().backward(dout, q, k, v, out, lse, block, scale)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        longest = max(call.row_counts), max(call.key_counts)
        fake_backward(
            dout, q, k, v, out, lse, *grads, *offsets, *longest, 0.0, scale, call.causal, call.left, call.right, 0.0,
            None, False,
        )  # fmt: skip
        return tuple(grads)


def errors_of(rank: int, world: int, kernel: str) -> list[list[Error]]:
    if kernel == "flash_attn":
        stand_in()
    made = {"flash_attn": FlashAttnKernel, "aten_flash": AtenFlashOnCpu}
    chosen = made[kernel]() if kernel in made else kernel
    runner = Runner(rank, world)
    return [runner.errors(replace(case, kernel=chosen)) for case in CASES]


@pytest.mark.parametrize("kernel", ["chunked", "flash_attn", "aten_flash"])
@pytest.mark.parametrize("cp", [1, 4])
def test_kernel_equals_full_attention(kernel, cp):
    for errors in run_ranks(cp, errors_of, cp, kernel):
        for case, worst in zip(CASES, errors):
            assert max(e.largest for e in worst) < 5e-6, f"{case} with {kernel}: {worst}"


def test_flash_attn_computes_all_documents_in_one_call(monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    stand_in()
    case = Case(documents=((5, 40, 3), (17,)), packed=True)
    plan = Runner(0, 1).plan(replace(case))
    kernel = FlashAttnKernel()
    (call,) = kernel.calls(plan.steps(0)[0].blocks, 1)
    assert (call.rows, call.row_counts) == (slice(0, 65), (5, 40, 3, 17))
    plan = plan.build(case.documents, 2, packed=True)
    (call,) = kernel.calls(plan.steps(1)[1].blocks, 1)  # all queries of rank 1 on the first chunk of rank 0
    assert call.row_counts == (4, 20, 2, 10) and call.key_counts == (2, 10, 1, 5)
    assert isinstance(call.rows, slice) and not isinstance(call.keys, slice)


@pytest.mark.parametrize("window", [None, 9])
def test_documents_and_windows_are_one_call(window):
    """64 documents, some shorter than the window: one call; on a ring one a step, or one a pair of chunks."""
    lengths = (tuple(3 + 4 * (i % 7) for i in range(64)),)
    kernel = AtenFlashKernel()
    plan = SequencePlan.build(lengths, packed=True)
    (call,) = kernel.calls(plan.steps(0, window, strips=False)[0].blocks, 1)
    assert len(call.row_counts) == 64 and isinstance(call.rows, slice) and isinstance(call.keys, slice)
    assert (call.causal, call.left, call.right) == ((True, -1, -1) if window is None else (False, 8, 0))
    q, k = call.offsets
    assert q.dtype == torch.int32 and q.tolist() == k.tolist() and q[-1] == sum(lengths[0])
    there = iter([x + 1 for x in call.tensors])
    moved = call.placed(there)
    assert moved.offsets.q[0] == 1 and moved.rows == call.rows and not list(there)
    long = SequencePlan.build(((700, 300, 5),), packed=True)
    assert [c.row_counts for c in kernel.calls(long.steps(0, window, strips=False)[0].blocks, 1)] == [(700, 300, 5)]
    ring = SequencePlan.build(((28,) * 64,), 2, packed=True)
    for rank in range(2):
        steps = ring.steps(rank, window, strips=False)
        assert sum(len(kernel.calls(step.blocks, 1)) for step in steps) <= (2 if window is None else 5)
    assert len(ChunkedKernel().calls(plan.steps(0, window)[0].blocks, 1)) >= 64


def test_choice():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_kernel("auto", cpu, torch.float32).name == "aten_cpu"
    assert choose_kernel("chunked", cpu, torch.float32).name == "chunked"
    assert available_kernels(cuda, torch.bfloat16, 64)[-3:] == ("aten_flash", "aten_efficient", "chunked")
    assert available_kernels(cuda, torch.bfloat16, 300)[0] == "chunked"
    assert available_kernels(cuda, torch.float32, 64)[0] == "aten_efficient"
    with pytest.raises(ValueError, match="use auto or one of aten_cpu, chunked"):
        choose_kernel("aten_flash", cpu, torch.float32)
