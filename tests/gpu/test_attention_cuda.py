"""CUDA kernels of attention against fp64 on the same device. Not yet run on a GPU: see the README."""

from __future__ import annotations

import pytest
import torch

from hybrid5d.context_parallel import ContextParallelAttention, SequencePlan
from hybrid5d.context_parallel.kernels import available_kernels
from hybrid5d.parallel.context import Axis

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KERNELS = ("flash_attn", "aten_flash", "aten_efficient", "chunked")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("documents,packed", [(((256,), (256,)), False), (((100, 156),), True)])
def test_kernel_equals_fp64(kernel: str, documents: tuple[tuple[int, ...], ...], packed: bool) -> None:
    """out, dq, dk, dv in bf16, grouped queries, dense and packed rows."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    if kernel not in available_kernels(device, dtype, 64):
        pytest.skip(f"{kernel} is not available on this device")
    plan = SequencePlan.build(documents, packed=packed)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(plan.batch, plan.local_length, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(s, device=device, dtype=dtype, generator=generator).requires_grad_() for s in shapes)
    out = ContextParallelAttention(Axis.single(), kernel=kernel)(q, k, v, plan)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    lengths = documents[0] if packed else (256,)
    parts, at = [], 0
    for n in lengths:
        cut = [x[:, at : at + n].transpose(1, 2) for x in wide]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*cut, is_causal=True, enable_gqa=True))
        at += n
    want = torch.cat(parts, 2).transpose(1, 2)
    dout = torch.randn(out.shape, device=device, dtype=dtype, generator=generator)
    out.backward(dout)
    want.backward(dout.double())
    for got, exact in ((out, want), *((a.grad, b.grad) for a, b in zip((q, k, v), wide))):
        assert got is not None and exact is not None
        assert (got.double() - exact).norm() <= 2e-2 * exact.norm()
