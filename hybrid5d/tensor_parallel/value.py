"""A head of width 1 on every token: the values of a critic. Its weight is whole on every tensor-parallel rank.

Legend: b batch, s sequence, H hidden, n = tp size. A value is one number a token, so where the sequence is cut over tp
the values are gathered and not the hidden states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid5d.parallel.collectives import all_gather_seq, split_seq
from hybrid5d.parallel.context import Axis
from hybrid5d.tensor_parallel.loss import IGNORE_INDEX, Columns, TokenLoss, TokenRule, selected, wide_dtype


class _Total(torch.autograd.Function):
    """A loss that is known, with its slopes: backward gives each value its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, total: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grads[0], None, None


def _own_values(hidden: Tensor, weight: Tensor) -> Tensor:
    """In fp32: a value rounded to 16 bits would be off by more than `value_cliprange` moves it."""
    wide = wide_dtype(hidden)
    return hidden.to(wide).matmul(weight[0].to(wide))


def linear_values(hidden: Tensor, weight: Tensor, axis: Axis, sequence_parallel: bool = False) -> Tensor:
    """hidden [b, s, H] ([b, s/n, H] with SP), weight [1, H] -> fp32 [b, s], equal on every tp rank; no gradient."""
    values = _own_values(hidden.detach(), weight.detach())
    return all_gather_seq(values, axis).wait() if sequence_parallel else values


def linear_value_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, axis: Axis, rule: TokenRule, columns: Columns,
    sequence_parallel: bool = False,
) -> TokenLoss:  # fmt: skip
    """A loss of the values `hidden weight^T`, summed over the tokens with a target [b, s] (IGNORE_INDEX: none).

    `rule` reads a token's value where other rules read its log-probability. With SP one all-gather of the values over
    tp, and the weight's gradient covers this rank's tokens only (declare it `replicated(..., partial=True)`).
    """
    own = _own_values(hidden, weight)
    values = all_gather_seq(own.detach(), axis).wait() if sequence_parallel else own.detach()
    pick, terms = partial(selected, ignored=targets == IGNORE_INDEX), rule.of(values, None, columns)
    slopes = pick(terms.d_logp)
    means, parts = ({name: pick(x).double().sum() for name, x in kind.items()} for kind in (terms.means, terms.parts))
    loss = _Total.apply(own, pick(terms.loss).sum(), split_seq(slopes, axis) if sequence_parallel else slopes)
    return TokenLoss(loss, pick(values), None, means, parts)
