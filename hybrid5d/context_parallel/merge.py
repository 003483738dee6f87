"""Partial attention results of the same queries, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels import Call
from hybrid5d.context_parallel.transport import accumulate_dtype


class Merge:
    """Running (out, lse) of the local queries in fp32."""

    def __init__(self, q: Tensor):
        self._q = q
        self._out: Tensor | None = None  # [b, s, nq, d]
        self._lse: Tensor | None = None  # [b, nq, s]

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Merge a call's result into its rows: weights from the difference of the two lse, so nothing overflows."""
        out = out.to(accumulate_dtype(out.dtype))
        if self._out is None or self._lse is None:
            if out.shape == self._q.shape:
                self._out, self._lse = out, lse
                return
            self._out, self._lse = self._empty(lse.dtype)
        rows = call.rows
        if not call.first:
            old = self._lse[:, :, rows]
            weight = torch.sigmoid(lse - old).transpose(1, 2).unsqueeze(-1)  # [b, m, nq, 1]
            out = self._out[:, rows].lerp_(out, weight)  # in place where rows is a range
            lse = torch.logaddexp(old, lse)
        if call.first or not isinstance(rows, slice):
            self._out[:, rows] = out
        self._lse[:, :, rows] = lse

    def _empty(self, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        b, s, heads, d = self._q.shape
        out = self._q.new_zeros((b, s, heads, d), dtype=accumulate_dtype(self._q.dtype))  # padding rows stay zero
        lse = self._q.new_full((b, s, heads), float("-inf"), dtype=lse_dtype)
        return out, lse.transpose(1, 2)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the queries' dtype, and lse; zeros in rows where no block came."""
        if self._out is None or self._lse is None:
            self._out, self._lse = self._empty(accumulate_dtype(self._q.dtype))
        return self._out.to(self._q.dtype), self._lse
