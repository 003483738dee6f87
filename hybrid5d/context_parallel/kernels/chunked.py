"""Attention in plain matmuls, the reference of the other kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.base import BlockKernel, band_mask
from hybrid5d.plan.sequence_blocks import Block


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
