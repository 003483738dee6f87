"""Sums that replicated parameters need over the tensor-parallel axis.

A parameter that several tp ranks hold, but whose gradient on each covers only part of the sequence (norms and row
biases under SP) or part of the heads (per-head q/k norms; kv heads shared by several ranks), needs its gradient summed
over the ranks that share it: once a step, all of them in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hybrid5d.parallel.collectives import all_reduce
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.pieces import Piece, pieces_of


def partial_pieces(param: Tensor) -> tuple[Piece, ...]:
    """The pieces of a parameter whose gradient must be summed over the tp ranks that share them."""
    if not getattr(param, "partial_over_tp", False):
        return ()
    return tuple(p for p in pieces_of(param) if p.num_replicas > 1)


def sum_partial_gradients(
    params: Iterable[nn.Parameter], axis: Axis, grad_of: Callable[[nn.Parameter], Tensor | None]
) -> None:
    """All-reduce, coalesced by dtype, the partial gradients of `params` over tp; in place.

    `grad_of` names the tensor the optimizer will use. A missing gradient counts as zero on this rank and stays missing
    only if it is missing on all (parameters are the same on every tp rank, so it is).
    """
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Piece]]] = {}
    for param in params:
        pieces = partial_pieces(param)
        grad = grad_of(param) if pieces else None
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).extend((p.local_view(grad), p) for p in pieces)
    for views in by_dtype.values():
        _sum_views(views, axis)


def _sum_views(views: list[tuple[Tensor, Piece]], axis: Axis) -> None:
    # Ranks sharing a run are neighbours: num_replicas ranks a slot. Each rank fills its own slot, zeros elsewhere.
    slots = [(axis.size // p.num_replicas, axis.rank // p.num_replicas) for _, p in views]
    total = sum(v.numel() * count for (v, _), (count, _) in zip(views, slots))
    buffer = torch.zeros(total, dtype=views[0][0].dtype, device=views[0][0].device)
    offset = 0
    places = []
    for (view, _), (count, slot) in zip(views, slots):
        place = buffer.narrow(0, offset + slot * view.numel(), view.numel())
        place.copy_(view.reshape(-1))
        places.append(place)
        offset += view.numel() * count
    summed = all_reduce(buffer, axis).wait()
    if summed.data_ptr() != buffer.data_ptr():
        raise RuntimeError("the sum must be in place")
    for (view, _), place in zip(views, places):
        view.copy_(place.view(view.shape))


def sum_in_backward(param: nn.Parameter, axis: Axis) -> None:
    """Sum a partial parameter's gradient over tp at each backward (for ZeRO 2 and 3, which reduce while they go)."""
    pieces = partial_pieces(param)
    if axis.size == 1 or not pieces or not param.requires_grad:
        return

    def hook(grad: Tensor) -> Tensor:
        out = grad.clone()
        _sum_views([(p.local_view(out), p) for p in pieces], axis)
        return out

    param.register_hook(hook)
