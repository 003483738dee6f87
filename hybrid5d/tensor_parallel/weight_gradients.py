"""Weight gradients added where they accumulate, at once or later: the W of a pipeline schedule that splits backward.

A weight's gradient is a sum of products dy^T x, one for each use. Autograd would make each in a tensor of its own and
add it; here a layer hands (dy, x) to the `WeightGradients` attached to its weight, which adds the product in place, or
keeps the pair until it is asked for. What is no product (norms, biases) stays with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid5d.parallel.collectives import all_gather_seq
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.messages import Pending, done
from hybrid5d.tensor_parallel.products import wide_product


class Place(NamedTuple):
    """Where a gradient accumulates: a tensor of the parameter's shape; `fresh` ones hold nothing yet."""

    total: Tensor
    fresh: bool


@dataclass
class _Use:
    """One use of weights that read one input: gradients [b, s, O] of each output, x [b, s, I].

    Where `axis` is given x is this rank's part of the sequence, [b, s/n, I].
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    x: Tensor
    axis: Axis | None

    def whole(self) -> Pending[Tensor]:
        return done(self.x) if self.axis is None else all_gather_seq(self.x, self.axis)


class WeightGradients:
    """Accumulates the weight gradients of the linear layers and embeddings that it is attached to.

    Args:
        place: says where a parameter's gradient accumulates; asked once before each addition.
    """

    def __init__(self, place: Callable[[Tensor], Place]):
        self._place, self._waiting = place, list[_Use]()
        self._put_off = False

    def attach(self, params: Iterable[Tensor]) -> None:
        """Take the gradients of these parameters from now on."""
        for param in params:
            param.weight_gradients = self  # type: ignore[attr-defined]

    @contextmanager
    def put_off(self) -> Iterator[list[_Use]]:
        """Inside, products are kept in the list that is given, one entry a use; `run` adds them."""
        self._waiting, self._put_off = [], True
        try:
            yield self._waiting
        finally:
            self._put_off = False

    @torch.no_grad()
    def run(self, waiting: list[_Use]) -> None:
        """Add what was put off and empty the list, so that each entry's tensors go when it is done.

        Collective over the entries' axes; the next entry's input is gathered meanwhile.
        """
        waiting.reverse()
        coming = waiting[-1].whole() if waiting else None
        while waiting:
            use, gathered = waiting.pop(), coming
            coming = waiting[-1].whole() if waiting else None
            assert gathered is not None
            self._add(use.pairs, gathered.wait())

    def gather(self, x: Tensor, axis: Axis) -> Pending[Tensor] | None:
        """Begin to gather an input that `products` will need at once; None where products are put off."""
        return None if self._put_off else all_gather_seq(x, axis)

    def products(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        x: Tensor,
        axis: Axis | None = None,
        gathered: Pending[Tensor] | None = None,
    ) -> None:
        """dy^T x for each (weight, dy).

        `axis`: x is cut over it along the sequence; it is `gathered`, or will be when it is needed.
        """
        use = _Use(pairs, x, axis)
        if self._put_off:
            self._waiting.append(use)
        else:
            self._add(pairs, (gathered or use.whole()).wait())

    def product(self, weight: Tensor, dy: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """factor dy^T x, now: dy [t, rows], for the first `rows` rows of a weight."""
        total, fresh = self._place(weight)
        rows = dy.shape[-1]
        if fresh and rows < len(total):
            total[rows:].zero_()
        _add_product(total[:rows], fresh, dy, x, factor)

    def rows(self, weight: Tensor, ids: Tensor, dy: Tensor, padding_idx: int | None) -> None:
        """Add dy [..., H] to the rows `ids` [...] of a weight's gradient, now; rows `padding_idx` get nothing."""
        total, fresh = self._place(weight)
        if fresh:
            total.zero_()
        flat, values = ids.reshape(-1), dy.reshape(-1, dy.shape[-1]).to(total.dtype)
        if padding_idx is not None:
            values = values.masked_fill((flat == padding_idx).unsqueeze(-1), 0.0)
        total.index_add_(0, flat, values)

    def _add(self, pairs: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        for weight, dy in pairs:
            total, fresh = self._place(weight)
            _add_product(total, fresh, dy.reshape(-1, dy.shape[-1]), flat)


def _add_product(total: Tensor, fresh: bool, dy: Tensor, x: Tensor, factor: float = 1.0) -> None:
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x, beta=0 if fresh else 1, alpha=factor)
        return
    product = wide_product(dy.t(), x).mul_(factor)
    if fresh:
        total.copy_(product)
    else:
        total.add_(product)


def gradients_of(weight: Tensor | None) -> WeightGradients | None:
    """What takes the gradients of a weight in place of autograd, if anything."""
    return getattr(weight, "weight_gradients", None)
