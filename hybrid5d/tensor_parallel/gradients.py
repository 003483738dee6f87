"""Sums that replicated parameters need over the tensor-parallel axis.

A parameter that several tp ranks hold, but whose gradient on each covers only part of the sequence (norms and row
biases under SP) or part of the heads (per-head q/k norms; kv heads shared by several ranks), needs its gradient summed
over the ranks that share it. `annotate` sees to it: each backward sums. A loop that accumulates over micro-batches may
sum once a step instead, all parameters in one buffer: `defer_partial_sums`, then `sum_partial_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hybrid5d.parallel.collectives import all_reduce
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.shard import Shard, shard_of


def annotate(param: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Attach a shard; a partial gradient is from now on summed over its copies whenever it is computed.

    `copy.deepcopy` of a parameter drops both, as it drops every attribute and hook.
    """
    param.shard = shard  # type: ignore[attr-defined]
    if shard.needs_sum:

        def summed(grad: Tensor) -> Tensor:
            total = grad.clone()
            _sum_shared([(total, shard)])
            return total

        param.partial_sum = param.register_hook(summed)  # type: ignore[attr-defined]
    return param


def replicated(param: nn.Parameter, axis: Axis, name: str = "", *, partial: bool) -> nn.Parameter:
    """Annotate a parameter that every tp rank holds whole.

    `partial`: each rank's gradient covers only its tokens or heads (a norm in a sequence-parallel region).
    """
    return annotate(param, Shard.replicated(name, param.shape, axis, partial))


def defer_partial_sums(params: Iterable[nn.Parameter]) -> None:
    """Stop summing in each backward: the caller owes `sum_partial_gradients` before every optimizer step."""
    for param in params:
        hook = getattr(param, "partial_sum", None)
        if hook is not None:
            hook.remove()
            param.partial_sum = None  # type: ignore[attr-defined]


def sum_partial_gradients(
    params: Iterable[nn.Parameter], grad_of: Callable[[nn.Parameter], Tensor | None] = lambda p: p.grad
) -> None:
    """All-reduce the partial gradients of `params` over tp, in place; one message for each dtype.

    `grad_of` names the tensor that the optimizer will use. A parameter without one must have none on any rank.

    Raises:
        RuntimeError: a parameter's gradient was summed in backward already (see `defer_partial_sums`).
    """
    groups: dict[tuple[Axis, torch.dtype], list[tuple[Tensor, Shard]]] = {}
    for param in params:
        shard = shard_of(param)
        if shard is None or not shard.needs_sum:
            continue
        if getattr(param, "partial_sum", None) is not None:
            raise RuntimeError("partial gradients were summed in backward: call defer_partial_sums first")
        grad = grad_of(param)
        if grad is not None:
            groups.setdefault((shard.axis, grad.dtype), []).append((grad, shard))
    for shared in groups.values():
        _sum_shared(shared)


def _sum_shared(grads: list[tuple[Tensor, Shard]]) -> None:
    """Sum tensors of one dtype and axis over the neighbours that share them, in place. One all-reduce.

    The buffer has a slot for each set of sharing ranks; a rank fills the slot of its own and leaves zeros elsewhere.
    """
    axis = grads[0][1].axis
    slots = [axis.size // shard.copies for _, shard in grads]
    buffer = grads[0][0].new_zeros(sum(g.numel() * n for (g, _), n in zip(grads, slots)))
    places, offset = [], 0
    for (grad, shard), count in zip(grads, slots):
        place = buffer.narrow(0, offset + axis.rank // shard.copies * grad.numel(), grad.numel())
        place.copy_(grad.reshape(-1))
        places.append(place)
        offset += grad.numel() * count
    all_reduce(buffer, axis).wait()  # in place: the buffer is contiguous
    for (grad, _), place in zip(grads, places):
        grad.copy_(place.view(grad.shape))
