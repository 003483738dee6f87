"""Losses of the policy and of the critic over response tokens, exact over the rows given.

Whatever stands under the mask changes nothing, neither value nor gradient: tensors are selected before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid5d.rl.options import check_shape, option, select

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
KL_TYPES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
HUBER_DELTA = 10_000.0  # RLinf's critic: quadratic for every error that occurs


def aggregate(x: Tensor, response_mask: Tensor, how: str) -> Tensor:
    """Mean of a per-token loss [B, T] over the batch, a scalar.

    token-mean: sum over tokens / their number. seq-mean-token-sum: mean over rows of their sums. seq-mean-token-mean:
    mean over rows of their means. A row without a token counts as a row and adds 0 (RLinf: NaN for the last kind).

    Raises:
        ValueError: an unknown kind.
    """
    mask = response_mask.bool()
    x = select(x, mask)
    if how == "token-mean":
        return x.sum() / mask.sum().clamp(min=1)
    if how == "seq-mean-token-sum":
        return x.sum() / max(mask.shape[0], 1)
    if how == "seq-mean-token-mean":
        return (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / max(mask.shape[0], 1)
    raise ValueError(f"unknown loss_agg_func {how!r}; known are {', '.join(AGGREGATIONS)}")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy, reference) per token (Schulman, "Approximating KL divergence", 2020).

    kl, k1: the difference. abs. mse, k2: half its square. low_var_kl, k3: exp(-d) + d - 1 with -d held in [-20, 20] and
    the result in [-10, 10]; the gradient is 0 where a bound acts.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KL_TYPES:
        raise ValueError(f"unknown kl_penalty_type {kind!r}; known are {', '.join(KL_TYPES)}")
    d = logprobs - ref_logprobs
    name = KL_TYPES[kind]
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    if name == "k2":
        return 0.5 * d.square()
    back = (-d).clamp(-20.0, 20.0)
    return (back.exp() - back - 1).clamp(-10.0, 10.0)


def policy_loss(
    algorithm: Any,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped policy loss (PPO, Schulman et al. 2017) with KL and entropy terms: a scalar and metrics.

    All tensors [B, T]; gradients flow to `logprobs` and `entropy` alone.

    Args:
        algorithm: the YAML's block: ratio_clip_eps, clip_ratio_low, clip_ratio_high (null: ratio_clip_eps),
            clip_ratio_c (dual clip), clip_log_ratio_min, clip_log_ratio_max, kl_beta, kl_penalty_type, entropy_bonus
            with calculate_entropy, importance_sampling_fix, importance_sampling_clip, early_stop_imp_ratio,
            loss_agg_func.
        ref_logprobs: of the reference, for kl_beta; rollout_logprobs: of the generator, for importance_sampling_fix.
        entropy: of the whole next-token distribution.

    Returns:
        loss = policy + kl_beta * KL - entropy_bonus * entropy, each aggregated alike; 0 with gradient 0 where the mean
        ratio exceeds early_stop_imp_ratio (one question for the rows given; RLinf asks per micro-batch). Metrics, means
        over tokens: ratio, clip_fraction (where the clip binds), approx_kl (old - new), policy_loss, kl, entropy,
        importance_ratio (old against rollout, before its clip).

    Raises:
        ValueError: shapes, unknown names, clip_ratio_c of 1 or less, a tensor that a key needs and that is missing.
    """
    mask = response_mask.bool()
    given = {
        "old_logprobs": old_logprobs, "advantages": advantages, "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
    }  # fmt: skip
    columns = {name: x.detach() for name, x in given.items() if x is not None}
    for name, x in (("logprobs", logprobs), *columns.items(), *([] if entropy is None else [("entropy", entropy)])):
        check_shape(name, x, mask)
    for name in policy_columns(algorithm):
        if name not in columns:
            raise ValueError(f"{_why(name)} needs {name}")
    if option(algorithm, "entropy_bonus", 0.0) and option(algorithm, "calculate_entropy", False) and entropy is None:
        raise ValueError("entropy_bonus above 0 needs entropy")
    how = option(algorithm, "loss_agg_func", "token-mean")
    chosen = {name: select(x, mask) for name, x in columns.items()}
    terms = policy_terms(algorithm, select(logprobs, mask), None if entropy is None else select(entropy, mask), chosen)
    loss = aggregate(terms.loss, mask, how)
    metrics = {name: aggregate(x.detach(), mask, "token-mean") for name, x in terms.means.items()}
    metrics |= {name: aggregate(x.detach(), mask, how) for name, x in terms.parts.items()}
    stop = option(algorithm, "early_stop_imp_ratio")
    if stop is not None and metrics["ratio"].item() > stop:
        # not loss * 0: inf * 0 is NaN, and so is its gradient
        loss = logprobs.masked_fill(torch.ones_like(mask), 0.0).sum()
    return loss, {name: float(value) for name, value in metrics.items()}


@dataclass(frozen=True)
class LossTerms:
    """A loss per token; `means`: numbers averaged over tokens, `parts`: terms of the loss, averaged as it is."""

    loss: Tensor
    means: dict[str, Tensor]
    parts: dict[str, Tensor]


def policy_columns(algorithm: Any) -> tuple[str, ...]:
    """What `policy_terms` needs of each token beside its log-probability."""
    names = ["advantages", "old_logprobs"]
    names += ["ref_logprobs"] if option(algorithm, "kl_beta", 0.0) else []
    names += ["rollout_logprobs"] if option(algorithm, "importance_sampling_fix", False) else []
    return tuple(names)


def _why(name: str) -> str:
    return {"ref_logprobs": "kl_beta above 0", "rollout_logprobs": "importance_sampling_fix"}.get(name, "the loss")


def policy_terms(algorithm: Any, logprobs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> LossTerms:
    """The policy loss of each token, in any shape; see `policy_loss`, which takes the mean. Differentiable.

    Raises:
        ValueError: unknown names, clip_ratio_c of 1 or less, importance_sampling_fix without its clip.
    """
    old, adv = columns["old_logprobs"], columns["advantages"]
    means: dict[str, Tensor] = {}
    if option(algorithm, "importance_sampling_fix", False):
        # how much likelier the training weights find what the generator chose: a constant
        weight = (old - columns["rollout_logprobs"]).exp()
        means["importance_ratio"] = weight
        clip = option(algorithm, "importance_sampling_clip")
        if clip is None:
            raise ValueError("importance_sampling_fix needs importance_sampling_clip")
        adv = adv * weight.clamp(max=clip)
    log_ratio = (logprobs - old).clamp(
        min=option(algorithm, "clip_log_ratio_min", -torch.inf), max=option(algorithm, "clip_log_ratio_max", torch.inf)
    )
    ratio = log_ratio.exp()
    loss, clipped = _clipped(algorithm, ratio, adv)
    parts = {"policy_loss": loss}
    means |= {"ratio": ratio, "clip_fraction": clipped.to(ratio.dtype), "approx_kl": -log_ratio}
    beta = option(algorithm, "kl_beta", 0.0)
    if beta:
        kind = option(algorithm, "kl_penalty_type", "low_var_kl")
        parts["kl"] = kl_penalty(logprobs, columns["ref_logprobs"], kind)
        loss = loss + beta * parts["kl"]
    if entropy is not None:
        parts["entropy"] = entropy
    bonus = option(algorithm, "entropy_bonus", 0.0)
    if bonus and entropy is not None and option(algorithm, "calculate_entropy", False):
        loss = loss - bonus * entropy
    return LossTerms(loss, means, parts)


def _clipped(algorithm: Any, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token loss, and where the clip binds. Dual clip (Ye et al. 2020) bounds it for negative advantages."""
    eps = option(algorithm, "ratio_clip_eps", 0.2)
    low, high = option(algorithm, "clip_ratio_low", eps), option(algorithm, "clip_ratio_high", eps)
    plain, held = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    per_token = torch.maximum(plain, held)
    bound = option(algorithm, "clip_ratio_c")
    if bound is not None:
        if bound <= 1:
            raise ValueError(f"clip_ratio_c {bound} must be above 1")
        per_token = torch.minimum(per_token, advantages.sign() * bound * advantages)
    return per_token, plain.detach() < held.detach()


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, response_mask: Tensor, *, value_cliprange: float
) -> tuple[Tensor, dict[str, float]]:
    """Clipped loss of the critic: token mean of max(h(v - R), h(clip(v) - R)), h(e) = e^2 / 2 (Huber, delta 10,000).

    All [B, T]; v is held within `value_cliprange` of the value that the rollout saw. Token mean whatever loss_agg_func
    says, as in RLinf. Metrics: value_clip_fraction, explained_variance (1 - var(R - v) / var(R) over the tokens).

    Raises:
        ValueError: shapes, a clip range that is not positive.
    """
    mask = response_mask.bool()
    for name, x in (("values", values), ("returns", returns), ("old_values", old_values)):
        check_shape(name, x, mask)
    if value_cliprange <= 0:
        raise ValueError(f"value_cliprange {value_cliprange} must be above 0")
    v, target, old = select(values, mask), select(returns.detach(), mask), select(old_values.detach(), mask)
    terms = value_terms(value_cliprange, v, {"returns": target, "old_values": old})
    loss = aggregate(terms.loss, mask, "token-mean")
    metrics = {name: float(aggregate(x.detach(), mask, "token-mean")) for name, x in terms.means.items()}
    metrics["explained_variance"] = explained_variance(v.detach()[mask], target[mask])
    return loss, metrics


def value_terms(value_cliprange: float, values: Tensor, columns: Mapping[str, Tensor]) -> LossTerms:
    """The critic's loss of each token, in any shape; see `value_loss`, which takes the mean. Differentiable."""
    target, old = columns["returns"], columns["old_values"]
    held = old + (values - old).clamp(-value_cliprange, value_cliprange)
    plain = F.huber_loss(values, target, reduction="none", delta=HUBER_DELTA)
    bounded = F.huber_loss(held, target, reduction="none", delta=HUBER_DELTA)
    loss = torch.maximum(plain, bounded)
    return LossTerms(loss, {"value_loss": loss, "value_clip_fraction": (plain < bounded).to(values.dtype)}, {})


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(R - v) / var(R) over tokens [t]; NaN where the returns do not vary."""
    spread = returns.double().var(correction=0) if len(returns) else 0.0
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread) if spread > 0 else float("nan")
