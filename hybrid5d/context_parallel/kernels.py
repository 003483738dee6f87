"""Attention kernels that return (out, lse) and whose backward takes both from outside.

All tensors are [b, s, heads, d] with any strides (last one 1); lse is [b, heads, s] fp32. A kernel computes one `Call`
on tensors that the caller cut. GQA: fewer kv heads than query heads, never expanded by the caller.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid5d.plan.sequence_blocks import Block

aten = torch.ops.aten


class Call(Protocol):
    """What one kernel call covers: rows of the queries, keys, and whether earlier calls touched these rows."""

    @property
    def rows(self) -> slice | Tensor: ...

    @property
    def keys(self) -> slice | Tensor: ...

    @property
    def first(self) -> bool: ...


class Kernel(Protocol):
    """One way to compute blocks of attention."""

    name: str

    def calls(self, blocks: tuple[Block, ...], device: torch.device) -> Sequence[Call]:
        """How the kernel computes a step's blocks: one call each, or several in one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any, scale: float) -> tuple[Tensor, Tensor]:
        """q [b, m, nq, d], k, v [b, n, nkv, d] -> out [b, m, nq, d] (q's type or fp32), lse [b, nq, m]."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v (their type or fp32) through this call, given the final out and lse of its rows."""


class BlockKernel:
    """A kernel that computes one block a call."""

    name = ""

    def calls(self, blocks: tuple[Block, ...], device: torch.device) -> Sequence[Call]:
        return blocks


class AtenCpuKernel(BlockKernel):
    """aten's flash attention for CPU: fp32, fp64, bf16, fp16; GQA native; fp32 lse (fp64 for fp64).

    Small 16-bit blocks are computed, and returned, in fp32: faster below about 512 x 512, and partial results that are
    merged later keep their digits.
    """

    name = "aten_cpu"
    small = 512 * 512

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = self._widened(q, k, v)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, call.kind == "causal", attn_mask=_mask(call, q), scale=scale
        )
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, dout, out = self._widened(q, k, v, dout, out)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(dout, q, k, v, out), lse, 0.0, call.kind == "causal", attn_mask=_mask(call, q), scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _widened(self, q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        tensors = (q, k, *others)
        if q.dtype in (torch.bfloat16, torch.float16) and q.shape[1] * k.shape[1] <= self.small:
            return tuple(x.float() for x in tensors)
        return tensors


class AtenFlashKernel(BlockKernel):
    """aten's flash attention for CUDA: fp16 and bf16, GQA and windows native, d a multiple of 8 up to 256."""

    name = "aten_flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, call.kind == "causal", False,
            scale=scale, **flash_window(call),
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is 0
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, call.kind == "causal",
            unused, unused[0], scale=scale, **flash_window(call),
        )  # fmt: skip


class AtenEfficientKernel(BlockKernel):
    """aten's memory-efficient attention for CUDA, for fp32; kv heads are expanded per call, bands go to `chunked`."""

    name = "aten_efficient"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        if call.kind == "band":
            return ChunkedKernel().forward(q, k, v, call, scale)
        heads = _heads_first(q, *(_expand(x, q.shape[2]) for x in (k, v)))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *heads, None, True, 0.0, call.kind == "causal", scale=scale
        )
        return out.transpose(1, 2), lse[:, :, : q.shape[1]]  # the op pads lse to a multiple of 32

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call.kind == "band":
            return ChunkedKernel().backward(dout, q, k, v, out, lse, call, scale)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        wide = (_expand(x, q.shape[2]) for x in (k, v))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *_heads_first(dout, q, *wide), None, out.transpose(1, 2), padded, unused, unused, 0.0,
            [True, True, True, False], call.kind == "causal", scale=scale,
        )  # fmt: skip
        groups = (k.shape[2], -1)
        dk, dv = (x.transpose(1, 2).unflatten(2, groups).sum(3) for x in (dk, dv))
        return dq.transpose(1, 2), dk, dv


class ChunkedKernel(BlockKernel):
    """Plain matmuls in fp32 (fp64 for fp64), 128 rows at a time: any device, any head size, any mask; the reference."""

    name = "chunked"
    rows = 128

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for at in range(0, q.shape[1], self.rows):
            scores, _, wide_v = self._scores(q[:, at : at + self.rows], k, v, call, at, scale)
            lse = scores.logsumexp(-1, keepdim=True)
            outs.append(torch.einsum("bgrqk,bkgd->bqgrd", (scores - lse).exp_(), wide_v).flatten(2, 3))
            lses.append(lse.squeeze(-1).flatten(1, 2))
        return torch.cat(outs, 1).to(q.dtype), torch.cat(lses, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for at in range(0, q.shape[1], self.rows):
            part = slice(at, at + self.rows)
            scores, wide_k, wide_v = self._scores(q[:, part], k, v, call, at, scale)
            wide_q, wide_out, wide_dout = (_grouped(x[:, part], k.shape[2], scores.dtype) for x in (q, out, dout))
            p = (scores - lse[:, :, part].unflatten(1, (k.shape[2], -1)).unsqueeze(-1)).exp_()
            delta = (wide_out * wide_dout).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)  # [b, g, r, q, 1]
            ds = p * (torch.einsum("bqgrd,bkgd->bgrqk", wide_dout, wide_v) - delta) * scale
            dqs.append(torch.einsum("bgrqk,bkgd->bqgrd", ds, wide_k).flatten(2, 3))
            dk += torch.einsum("bgrqk,bqgrd->bkgd", ds, wide_q)
            dv += torch.einsum("bgrqk,bqgrd->bkgd", p, wide_dout)
        return torch.cat(dqs, 1).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(
        self, q: Tensor, k: Tensor, v: Tensor, call: Block, at: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Masked scores [b, kv head, query head of it, rows, n] of rows from `at`, and k, v in the wide type."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k, v = k.to(wide), v.to(wide)
        scores = torch.einsum("bqgrd,bkgd->bgrqk", _grouped(q, k.shape[2], wide), k) * scale
        if call.kind != "full":
            shift, window = (0, k.shape[1]) if call.kind == "causal" else (call.shift, call.window)
            scores += band_mask(q.shape[1], k.shape[1], at + shift, window, wide, q.device)
        return scores, k, v


def _grouped(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[b, m, nq, d] -> [b, m, nkv, nq/nkv, d]."""
    return x.to(dtype).unflatten(2, (kv_heads, -1))


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _expand(x: Tensor, heads: int) -> Tensor:
    """[b, n, nkv, d] -> [b, n, heads, d]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def _mask(block: Block, q: Tensor) -> Tensor | None:
    if block.kind != "band":
        return None
    return band_mask(block.q1 - block.q0, block.k1 - block.k0, block.shift, block.window, q.dtype, q.device)


@lru_cache(maxsize=64)
def band_mask(m: int, n: int, shift: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [1, 1, m, n]: 0 where 0 <= i - j + shift < window, else -inf. Small: a strip, never S x S."""
    age = torch.arange(m, device=device)[:, None] + shift - torch.arange(n, device=device)
    mask = torch.zeros(age.shape, dtype=dtype, device=device)
    return mask.masked_fill_((age < 0) | (age >= window), float("-inf"))[None, None]


def flash_window(block: Block) -> dict[str, int]:
    """The band as flash attention counts it, from the lower right corner: row i sees i+n-m-left .. i+n-m+right."""
    if block.kind != "band":
        return {}
    right = block.shift - (block.k1 - block.k0) + (block.q1 - block.q0)
    return {"window_size_left": block.window - 1 - right, "window_size_right": right}


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """Names of the kernels that can run such tensors here, the best first."""
    if device.type == "cpu":
        return ("aten_cpu", "chunked")
    if device.type != "cuda":
        return ("chunked",)
    half = dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
    names = []
    if half and importlib.util.find_spec("flash_attn") is not None:
        names.append("flash_attn")
    if half:
        names.append("aten_flash")
    if dtype != torch.float64 and head_dim % 8 == 0:
        names.append("aten_efficient")
    return (*names, "chunked")


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> Kernel:
    """The kernel of that name; `auto` = the best one for such tensors.

    Raises:
        ValueError: unknown name, or one that cannot run such tensors here.
    """
    names = available_kernels(device, dtype, head_dim)
    if name != "auto" and name not in names:
        what = f"{str(dtype).removeprefix('torch.')} on {device.type} with head size {head_dim}"
        raise ValueError(f"attention kernel {name!r} cannot run {what}: use auto or one of {', '.join(names)}")
    return _kernel(names[0] if name == "auto" else name)


@lru_cache
def _kernel(name: str) -> Kernel:
    if name == "flash_attn":
        from hybrid5d.context_parallel.flash import FlashAttnKernel

        return FlashAttnKernel()
    kinds = (AtenCpuKernel, AtenFlashKernel, AtenEfficientKernel, ChunkedKernel)
    return {kind.name: kind for kind in kinds}[name]()
