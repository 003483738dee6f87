"""Advantages of the response tokens of one RL step, from one reward a sequence.

Statistics (groups, whitening) are of all rows given: give the whole RL step, before minibatches are cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid5d.rl.losses import kl_penalty
from hybrid5d.rl.options import check_shape, option, select

ADV_TYPES = ("grpo", "grpo_dynamic", "reinpp", "gae", "raw")
GROUP_EPS = 1e-6  # added to a group's standard deviation (RLinf, DeepSeekMath's code)
WHITEN_EPS = 1e-5  # normalize_advantages
MIN_VARIANCE = 1e-8  # reinpp


@torch.no_grad()
def compute_advantages(
    algorithm: Any,
    rewards: Tensor,
    response_mask: Tensor,
    *,
    group_size: int,
    values: Tensor | None = None,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Advantages [B, T] and, for `gae`, returns [B, T]; 0 where the mask is 0.

    Args:
        algorithm: the YAML's block (mapping or object): adv_type, gamma, gae_lambda, use_reinpp_baseline,
            reinpp_kl_beta, kl_penalty_type, advantage_mode, normalize_advantages.
        rewards: [B], one number a sequence.
        response_mask: [B, T], 1 where the token is the model's own. Other tokens take no step, value or discount, and
            are in no mean and no count.
        group_size: sequences (grpo_dynamic: trajectories) of a prompt; they are adjacent rows.
        values: [B, T] of the critic, for gae.
        logprobs, ref_logprobs: [B, T], those of the rollout's policy and of the reference, for `reinpp_kl_beta`.
        trajectory_ids: [B], for grpo_dynamic; rows of a trajectory are adjacent.

    grpo: (r - mean) / (std + 1e-6) of the group, unbiased std; exactly 0 where all rewards of a group are equal (RLinf
    keeps float32's rounding noise there). gae puts the reward on the last own token; RLinf puts it on the last column
    of the padded width, so that padding discounts. reinpp whitens over all rows; RLinf per dp rank.

    Raises:
        ValueError: an unknown adv_type, sizes that do not fit, or a tensor that the type needs and that is missing.
    """
    kind = option(algorithm, "adv_type", "grpo")
    if rewards.shape != response_mask.shape[:1]:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}, response_mask {tuple(response_mask.shape)}")
    mask, returns = response_mask.bool(), None
    reward = rewards.double()
    if kind == "grpo":
        advantages = _spread(_relative(reward, group_size), mask)
    elif kind == "grpo_dynamic":
        if trajectory_ids is None:
            raise ValueError("grpo_dynamic needs trajectory_ids")
        mode = option(algorithm, "advantage_mode", "trajectory")
        advantages = _spread(_relative_dynamic(reward, trajectory_ids, group_size, mode), mask)
    elif kind == "reinpp":
        advantages = _reinpp(algorithm, reward, mask, group_size, logprobs, ref_logprobs)
    elif kind == "gae":
        if values is None:
            raise ValueError("gae needs values, the critic's")
        check_shape("values", values, mask)
        gamma, lam = option(algorithm, "gamma", 1.0), option(algorithm, "gae_lambda", 1.0)
        advantages = _gae(reward, select(values.double(), mask), mask, gamma, lam)
        returns = select(advantages + values.double(), mask).float()
    elif kind == "raw":
        advantages = _spread(reward, mask)
    else:
        raise ValueError(f"unknown adv_type {kind!r}; known are {', '.join(ADV_TYPES)}")
    if option(algorithm, "normalize_advantages", False):
        mean, std = _moments(advantages, mask)
        advantages = (advantages - mean) / (std + WHITEN_EPS)
    return select(advantages, mask).float(), returns


def _spread(x: Tensor, mask: Tensor) -> Tensor:
    """[B] -> [B, T]: the same number on every own token."""
    return select(x[:, None].expand(mask.shape), mask)


def _moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased standard deviation over the tokens of the mask (0 and 0 where there are none)."""
    count = mask.sum().clamp(min=1)
    mean = select(x, mask).sum() / count
    return mean, (select(x - mean, mask).square().sum() / count).sqrt()


def _grouped(x: Tensor, size: int) -> Tensor:
    if size < 1 or x.numel() % size:
        raise ValueError(f"{x.numel()} sequences are no whole number of groups of group_size {size}")
    return x.view(-1, size)


def _relative(x: Tensor, size: int) -> Tensor:
    """Standardised inside each run of `size` values."""
    if size < 2:
        raise ValueError(f"group_size {size}: a group needs at least 2 sequences to compare")
    return torch.cat([_standardised(group) for group in _grouped(x, size)])


def _standardised(group: Tensor) -> Tensor:
    if group.numel() < 2 or bool((group == group[0]).all()):
        return torch.zeros_like(group)
    return (group - group.mean()) / (group.std() + GROUP_EPS)


def _relative_dynamic(x: Tensor, trajectory_ids: Tensor, size: int, mode: str) -> Tensor:
    """Groups of `size` trajectories, each of any number of rows; compared by trajectory, or by row (turn)."""
    if mode not in ("trajectory", "turn"):
        raise ValueError(f"unknown advantage_mode {mode!r}; known are trajectory and turn")
    if trajectory_ids.shape != x.shape:
        raise ValueError(f"trajectory_ids has shape {tuple(trajectory_ids.shape)}, rewards {tuple(x.shape)}")
    _, place, rows = torch.unique_consecutive(trajectory_ids, return_inverse=True, return_counts=True)
    if rows.numel() % size or size < 2:
        raise ValueError(f"{rows.numel()} trajectories are no whole number of groups of group_size {size}, at least 2")
    first = rows.cumsum(0) - rows
    if not torch.equal(x[first][place], x):
        raise ValueError("rows of one trajectory have different rewards")
    if mode == "trajectory":
        return _relative(x[first], size)[place]
    return torch.cat([_standardised(group) for group in x.split(rows.view(-1, size).sum(1).tolist())])


def _reinpp(
    algorithm: Any, reward: Tensor, mask: Tensor, group_size: int, logprobs: Tensor | None, ref: Tensor | None
) -> Tensor:
    """REINFORCE++ (Hu 2025): reward at the end less the KL of what follows, whitened over all tokens."""
    if option(algorithm, "use_reinpp_baseline", False):
        groups = _grouped(reward, group_size)
        reward = (groups - groups.mean(1, keepdim=True)).view(-1)
    returns = _spread(reward, mask)
    beta = option(algorithm, "reinpp_kl_beta", 0.0)
    if beta:
        if logprobs is None or ref is None:
            raise ValueError("reinpp_kl_beta above 0 needs logprobs and ref_logprobs")
        check_shape("logprobs", logprobs, mask)
        check_shape("ref_logprobs", ref, mask)
        kind = option(algorithm, "kl_penalty_type", "kl")
        kl = kl_penalty(select(logprobs, mask).double(), select(ref, mask).double(), kind)
        kl = select(kl, mask)
        returns = select(returns - beta * kl.flip(1).cumsum(1).flip(1), mask)
    mean, std = _moments(returns, mask)
    return (returns - mean) / std.clamp(min=MIN_VARIANCE**0.5)


def _gae(reward: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016) over own tokens; the last of them has the reward."""
    advantages = torch.zeros_like(values)
    after, after_value = torch.zeros_like(reward), torch.zeros_like(reward)
    pending = reward  # until the last own token has taken it
    for t in reversed(range(mask.shape[1])):
        own, value = mask[:, t], values[:, t]
        here = pending + gamma * after_value - value + gamma * lam * after
        advantages[:, t] = torch.where(own, here, advantages[:, t])
        after, after_value = torch.where(own, here, after), torch.where(own, value, after_value)
        pending = torch.where(own, torch.zeros_like(pending), pending)
    return advantages
