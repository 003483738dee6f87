"""The losses of `hybrid5d.rl.losses` as rules of the fused head: slopes by autograd on the [t] vectors of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid5d.engine.objective import Objective
from hybrid5d.rl.losses import LossTerms, policy_columns, policy_terms, value_terms
from hybrid5d.rl.options import option
from hybrid5d.tensor_parallel import TokenRule, TokenTerms
from hybrid5d.tensor_parallel.loss import Columns

Terms = Callable[[Tensor, Tensor | None, Columns], LossTerms]


def rule_of(terms: Terms, needs: tuple[str, ...], means: tuple[str, ...], parts: tuple[str, ...]) -> TokenRule:
    """A differentiable loss of each token as a rule. `parts` with `entropy`: it reads the entropy."""

    def of(logp: Tensor, entropy: Tensor | None, columns: Columns) -> TokenTerms:
        with torch.enable_grad():
            x = logp.detach().requires_grad_(True)
            h = None if entropy is None else entropy.detach().requires_grad_(True)
            found = terms(x, h, columns)
            slopes = torch.autograd.grad(found.loss.sum(), [x] if h is None else [x, h], materialize_grads=True)
        detached = [{name: values.detach() for name, values in kind.items()} for kind in (found.means, found.parts)]
        return TokenTerms(found.loss.detach(), slopes[0], slopes[1] if h is not None else None, *detached)

    return TokenRule(of, "entropy" in parts, needs, means, parts)


def policy_objective(algorithm: Any, *, temperature: float = 1.0, factor: float = 1.0) -> Objective:
    """`policy_loss` of the `algorithm` block for `Engine.train_batch`; documents carry `policy_columns`.

    loss_agg_func seq-mean-token-mean also needs the column `loss_weight`: 1 / the row's tokens with a target.
    early_stop_imp_ratio is no part of it: see `rl.step`.
    """
    means: tuple[str, ...] = ("ratio", "clip_fraction", "approx_kl")
    means += ("importance_ratio",) if option(algorithm, "importance_sampling_fix", False) else ()
    parts: tuple[str, ...] = ("policy_loss",)
    parts += ("kl",) if option(algorithm, "kl_beta", 0.0) else ()
    parts += ("entropy",) if option(algorithm, "calculate_entropy", False) else ()
    how = option(algorithm, "loss_agg_func", "token-mean")
    needs = (*policy_columns(algorithm), *(("loss_weight",) if how == "seq-mean-token-mean" else ()))
    rule = rule_of(lambda logp, h, columns: policy_terms(algorithm, logp, h, columns), needs, means, parts)
    return Objective(rule, "tokens" if how == "token-mean" else "rows", factor, temperature)


def value_objective(value_cliprange: float) -> Objective:
    """`value_loss` for a critic's `Engine.train_batch`; documents carry the columns `returns` and `old_values`.

    The token mean whatever loss_agg_func says, as RLinf's. Values know no temperature.
    """

    def terms(values: Tensor, entropy: Tensor | None, columns: Columns) -> LossTerms:
        return value_terms(value_cliprange, values, columns)

    return Objective(rule_of(terms, ("returns", "old_values"), ("value_loss", "value_clip_fraction"), ()))


def nothing(objective: Objective) -> Objective:
    """The same question without a lesson: loss and gradient are exactly 0, also where the loss is infinite."""

    def of(logp: Tensor, entropy: Tensor | None, columns: Columns) -> TokenTerms:
        zero = torch.zeros_like(logp)
        return TokenTerms(zero, zero)

    return Objective(TokenRule(of), objective.unit, 1.0, objective.temperature)
