"""Products of 16-bit matrices that keep their fp32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

_GEMM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()  # torch 2.8


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] b [k, n] in fp32 (fp64 for fp64).

    CUDA's GEMM hands its fp32 sums over; CPU's rounds 16-bit ones to the inputs' type first.
    """
    if _GEMM_WIDENS and a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    product = a.matmul(b)
    return product if product.dtype == torch.float64 else product.float()
