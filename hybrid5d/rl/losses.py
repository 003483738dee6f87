"""Losses of the policy and of the critic over response tokens, exact over the rows given.

Whatever stands under the mask changes nothing, neither value nor gradient: tensors are selected before they are used.
"""

from __future__ import annotations

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
    for name, x in (("logprobs", logprobs), ("old_logprobs", old_logprobs), ("advantages", advantages)):
        check_shape(name, x, mask)
    how = option(algorithm, "loss_agg_func", "token-mean")
    current, old, adv = select(logprobs, mask), select(old_logprobs.detach(), mask), select(advantages.detach(), mask)
    metrics: dict[str, Tensor] = {}
    if option(algorithm, "importance_sampling_fix", False):
        weight = _rollout_weight(old, rollout_logprobs, mask)
        metrics["importance_ratio"] = aggregate(weight, mask, "token-mean")
        adv = adv * weight.clamp(max=_needed(algorithm, "importance_sampling_clip", "importance_sampling_fix"))
    log_ratio = (current - old).clamp(
        min=option(algorithm, "clip_log_ratio_min", -torch.inf), max=option(algorithm, "clip_log_ratio_max", torch.inf)
    )
    ratio = log_ratio.exp()
    per_token, clipped = _clipped(algorithm, ratio, adv)
    policy = aggregate(per_token, mask, how)
    loss, mean_ratio = policy, aggregate(ratio, mask, "token-mean")
    metrics |= {
        "policy_loss": policy,
        "ratio": mean_ratio,
        "clip_fraction": aggregate(clipped.to(ratio.dtype), mask, "token-mean"),
        "approx_kl": -aggregate(log_ratio, mask, "token-mean"),
    }
    beta = option(algorithm, "kl_beta", 0.0)
    if beta:
        if ref_logprobs is None:
            raise ValueError("kl_beta above 0 needs ref_logprobs")
        check_shape("ref_logprobs", ref_logprobs, mask)
        kind = option(algorithm, "kl_penalty_type", "low_var_kl")
        metrics["kl"] = aggregate(kl_penalty(current, select(ref_logprobs.detach(), mask), kind), mask, how)
        loss = loss + beta * metrics["kl"]
    if entropy is not None:
        check_shape("entropy", entropy, mask)
        metrics["entropy"] = aggregate(entropy, mask, how)
    bonus = option(algorithm, "entropy_bonus", 0.0)
    if bonus and option(algorithm, "calculate_entropy", False):
        if entropy is None:
            raise ValueError("entropy_bonus above 0 needs entropy")
        loss = loss - bonus * metrics["entropy"]
    stop = option(algorithm, "early_stop_imp_ratio")
    if stop is not None and mean_ratio.item() > stop:
        # not loss * 0: inf * 0 is NaN, and so is its gradient
        loss = logprobs.masked_fill(torch.ones_like(mask), 0.0).sum()
    return loss, {name: float(value.detach()) for name, value in metrics.items()}


def _needed(algorithm: Any, name: str, because: str) -> Any:
    value = option(algorithm, name)
    if value is None:
        raise ValueError(f"{because} needs {name}")
    return value


def _rollout_weight(old: Tensor, rollout: Tensor | None, mask: Tensor) -> Tensor:
    """exp(old - rollout): how much likelier the training weights find what the generator chose. A constant."""
    if rollout is None:
        raise ValueError("importance_sampling_fix needs rollout_logprobs")
    check_shape("rollout_logprobs", rollout, mask)
    return (old - select(rollout.detach(), mask)).exp()


def _clipped(algorithm: Any, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token loss [B, T], and where the clip binds. Dual clip (Ye et al. 2020) bounds it for negative advantages."""
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
    held = old + (v - old).clamp(-value_cliprange, value_cliprange)
    plain = F.huber_loss(v, target, reduction="none", delta=HUBER_DELTA)
    bounded = F.huber_loss(held, target, reduction="none", delta=HUBER_DELTA)
    loss = aggregate(torch.maximum(plain, bounded), mask, "token-mean")
    metrics = {
        "value_loss": float(loss.detach()),
        "value_clip_fraction": float(aggregate((plain < bounded).to(v.dtype), mask, "token-mean")),
        "explained_variance": _explained_variance(v.detach(), target, mask),
    }
    return loss, metrics


def _explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(R - v) / var(R) over the mask; NaN where the returns do not vary."""
    spread = returns[mask].double().var(correction=0)
    if mask.sum() < 2 or not spread > 0:
        return float("nan")
    return float(1 - (returns[mask].double() - values[mask].double()).var(correction=0) / spread)
