"""Element-wise reductions in rank order.

((v0 + v1) + v2) + …, whoever computes it and however the tensor is cut: the same bits on every rank and in every run.
Sums and products of 16-bit floats are made in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_R: Any = dist.ReduceOp.RedOpType
_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    _R.SUM: torch.add,
    _R.AVG: torch.add,
    _R.PRODUCT: torch.mul,
    _R.MIN: torch.minimum,
    _R.MAX: torch.maximum,
    _R.BAND: torch.bitwise_and,
    _R.BOR: torch.bitwise_or,
    _R.BXOR: torch.bitwise_xor,
}
_CHECKED: set[tuple[int, torch.dtype]] = set()
_EXACT = (_R.MIN, _R.MAX, _R.BAND, _R.BOR, _R.BXOR)


def check_reduction(op: Any, dtype: torch.dtype) -> Any:
    """The operation's plain type.

    Raises:
        ValueError: it is not one that this backend makes, or not for this dtype.
    """
    kind = getattr(op, "op", op)
    if (kind.value, dtype) in _CHECKED:
        return kind
    if kind not in _FUNCTIONS:
        raise ValueError(f"the backend shm does not make {kind}")
    bitwise = kind in (_R.BAND, _R.BOR, _R.BXOR)
    if bitwise and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{kind} is for integers, and the tensor is {dtype}")
    if dtype.is_complex and kind in (_R.MIN, _R.MAX):
        raise ValueError(f"{kind} has no meaning for {dtype}")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ValueError(f"the backend shm moves {dtype} but does not sum it")
    _CHECKED.add((kind.value, dtype))
    return kind


def pairwise(kind: Any, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The reduction of two tensors as one call of torch (a, b, out=), where it is no more than that."""
    return None if kind == _R.AVG or (dtype in _WIDE and kind not in _EXACT) else _FUNCTIONS[kind]


def reduce_into(out: Tensor, parts: Sequence[Tensor], kind: Any) -> None:
    """`out` = the reduction of `parts` (equal 1-D tensors) in their order.

    `out` may be parts[0] or parts[1]; it may not be a later one.
    """
    function, wide = _FUNCTIONS[kind], _WIDE.get(out.dtype)
    if len(parts) == 1:
        if out is not parts[0]:
            out.copy_(parts[0])
        return
    if wide is None or kind in _EXACT:
        function(parts[0], parts[1], out=out)
        for part in parts[2:]:
            function(out, part, out=out)
        if kind == _R.AVG:
            _divide(out, len(parts))
        return
    total = parts[0].to(wide)
    for part in parts[1:]:
        function(total, part, out=total)
    if kind == _R.AVG:
        _divide(total, len(parts))
    out.copy_(total)


def _divide(x: Tensor, by: int) -> None:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.div_(by)
    else:
        x.div_(by, rounding_mode="trunc")
