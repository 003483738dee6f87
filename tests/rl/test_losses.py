"""Losses and advantages against RLinf 0.3.0's own functions (rlinf_losses.json), worked numbers and autograd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid5d.rl import aggregate, compute_advantages, kl_penalty, policy_loss, value_loss

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "rlinf_losses.json").read_text())["cases"]
JUNK = (math.nan, math.inf, -9999.0)


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def double(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(got: Tensor, expected: Any, mask: Tensor | None = None, atol: float = 1e-5) -> None:
    expected = torch.as_tensor(expected, dtype=got.dtype)
    mask = torch.ones_like(got, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(got[mask], expected[mask], atol=atol, rtol=0)


def spoil(x: Any, mask: Tensor, junk: float) -> Tensor:
    return tensor(x).masked_fill(~mask, junk)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("case", VECTORS, ids=lambda c: c["adv"]["type"])
def test_rlinfs_own_answers_with_junk_under_the_mask(case: dict[str, Any], junk: float) -> None:
    mask, right = tensor(case["response_mask"]).bool(), case["right"]
    adv = {k: v for k, v in case["adv"].items() if k not in ("type", "group_size")}
    algorithm = SimpleNamespace(**case["algorithm"], **adv, adv_type=case["adv"]["type"])
    old, ref = spoil(case["old_logprobs"], mask, junk), spoil(case["ref_logprobs"], mask, junk)
    values = None if case["values"] is None else spoil(case["values"], mask, junk)
    advantages, returns = compute_advantages(
        algorithm, tensor(case["rewards"]), mask, group_size=case["adv"]["group_size"], values=values, logprobs=old,
        ref_logprobs=ref,
    )  # fmt: skip
    close(advantages, right["advantages"], mask)
    assert not advantages[~mask].any()

    logprobs = spoil(case["logprobs"], mask, junk).requires_grad_()
    loss, metrics = policy_loss(
        algorithm, logprobs, old, spoil(right["advantages"], mask, junk), mask, ref_logprobs=ref,
        rollout_logprobs=spoil(case["rollout_logprobs"], mask, junk),
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(right["loss"], abs=1e-5)
    close(logprobs.grad, right["dloss_dlogprobs"], mask)
    assert not logprobs.grad[~mask].any()
    for name in ("ratio", "clip_fraction", "approx_kl", "policy_loss"):
        assert metrics[name] == pytest.approx(right[name], abs=1e-5), name
    if case["algorithm"]["kl_beta"]:
        assert metrics["kl"] == pytest.approx(right["kl_loss"], abs=1e-5)

    if returns is not None:
        close(returns, right["returns"], mask)
        now = spoil(case["critic"]["values_now"], mask, junk).requires_grad_()
        loss, metrics = value_loss(
            now, spoil(right["returns"], mask, junk), values, mask, value_cliprange=case["critic"]["value_cliprange"]
        )
        loss.backward()
        assert loss.item() == pytest.approx(right["value_loss"], abs=1e-5)
        close(now.grad, right["dloss_dvalues"], mask)
        assert metrics["explained_variance"] == pytest.approx(right["explained_variance"], abs=1e-5)


def plain(logprobs: list, advantages: list, mask: list, how: str = "token-mean", **keys: Any) -> tuple[float, Tensor]:
    """Loss and gradient with old = current."""
    now = double(logprobs).requires_grad_()
    loss, _ = policy_loss({"loss_agg_func": how, **keys}, now, now, double(advantages), double(mask))
    loss.backward()
    return loss.item(), now.grad


def rows(lengths: list[int]) -> list[list[int]]:
    return [[1] * n + [0] * (max(lengths) - n) for n in lengths]


@pytest.mark.parametrize(
    ("how", "right"),
    [("token-mean", -0.291667), ("seq-mean-token-sum", -0.875), ("seq-mean-token-mean", -0.6875)],
)
def test_uneven_rows_have_one_denominator(how: str, right: float) -> None:
    """R01: the tokens or rows of all, whatever they were cut into."""
    mask = rows([1, 5, 2, 4])
    advantages = [[a] * 5 for a in (1.0, -0.5, 2.0, 0.25)]
    loss, grad = plain([[-1.0] * 5] * 4, advantages, mask, how)
    assert loss == pytest.approx(right, abs=1e-6)
    if how == "token-mean":
        assert grad[1, 0].item() == pytest.approx(0.041667, abs=1e-6)


@pytest.mark.parametrize(
    ("how", "right"), [("token-mean", 0.5), ("seq-mean-token-sum", 0.5), ("seq-mean-token-mean", 0.25)]
)
def test_a_row_without_a_token_counts_and_adds_nothing(how: str, right: float) -> None:
    """R02: for each kind of mean."""
    loss, grad = plain([[-1.0] * 3] * 2, [[-0.5] * 3, [-2.0] * 3], [[1, 1, 0], [0, 0, 0]], how)
    assert loss == pytest.approx(right, abs=1e-12)
    assert not grad[1].any()
    loss, grad = plain([[-1.0] * 3], [[1.0] * 3], [[0, 0, 0]], how)
    assert loss == 0 and not grad.any()


def grpo(rewards: list[float], size: int, **keys: Any) -> Tensor:
    mask = torch.ones(len(rewards), 2)
    return compute_advantages({"adv_type": "grpo", **keys}, tensor(rewards), mask, group_size=size)[0][:, 0]


def test_groups_are_compared_with_the_unbiased_deviation() -> None:
    """R03: of four."""
    close(grpo([0, 0, 0, 1], 4), [-0.499999, -0.499999, -0.499999, 1.499997], atol=1e-6)


@pytest.mark.parametrize("value", [0.95, 0.2, 0.0, 1.0, 1 / 3])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(value: float) -> None:
    """R03: rewards that float32 cannot hold, too."""
    assert grpo([value] * 8, 8).tolist() == [0.0] * 8
    for size in (3, 6, 7, 10):  # the mean of equal doubles need not be the double
        got, _ = compute_advantages({}, double([value] * size), torch.ones(size, 1), group_size=size)
        assert not got.any()


def test_groups_of_trajectories_and_of_turns() -> None:
    """R03: three rows and one."""
    rewards, ids, mask = tensor([1, 1, 1, 0]), torch.tensor([4, 4, 4, 9]), torch.ones(4, 1)
    for mode, right in (("trajectory", [0.707106] * 3 + [-0.707106]), ("turn", [0.499999] * 3 + [-1.499997])):
        algorithm = {"adv_type": "grpo_dynamic", "advantage_mode": mode}
        got, _ = compute_advantages(algorithm, rewards, mask, group_size=2, trajectory_ids=ids)
        close(got[:, 0], right, atol=1e-6)


@pytest.mark.parametrize(
    ("logprob", "ref", "kind", "value", "slope"),
    [
        (-2, -1.2, "k1", -0.8, 1), (-2, -1.2, "abs", 0.8, -1), (-2, -1.2, "k2", 0.32, -0.8),
        (-2, -1.2, "k3", 0.425541, -1.225541), (-1, -13, "k3", 10, 0), (-1, -11, "k3", 9.000045, 0.999955),
        (-30, -1, "k3", 10, 0),
    ],
)  # fmt: skip
def test_kl_estimates_and_their_slopes(logprob: float, ref: float, kind: str, value: float, slope: float) -> None:
    """R04: also where a bound acts."""
    x = double(logprob).requires_grad_()
    kl = kl_penalty(x, double(ref), kind)
    kl.backward()
    assert kl.item() == pytest.approx(value, abs=1e-6) and x.grad.item() == pytest.approx(slope, abs=1e-6)


def test_a_far_reference_gives_no_nan_in_float32() -> None:
    """R04: 200 apart."""
    x = tensor(-200.0).requires_grad_()
    kl = kl_penalty(x, tensor(-1.0), "k3")
    kl.backward()
    assert kl.item() == 10 and x.grad.item() == 0


def test_the_kl_penalty_pulls_towards_the_reference() -> None:
    """R04: its sign."""
    now = double([[-2.0]]).requires_grad_()
    keys = {"kl_beta": 0.5, "kl_penalty_type": "k2"}
    loss, metrics = policy_loss(keys, now, now, double([[0.0]]), double([[1]]), ref_logprobs=double([[-1.2]]))
    loss.backward()
    assert metrics["kl"] == pytest.approx(0.32) and loss.item() == pytest.approx(0.16)
    assert now.grad.item() == pytest.approx(-0.4)  # descending raises the log-prob


def test_a_masked_overflow_reaches_no_gradient() -> None:
    """R05: exp(200) under the mask."""
    now = tensor([[-1.0, -2.0, 0.0]]).requires_grad_()
    old, mask = tensor([[-1.1, -2.0, -200.0]]), tensor([[1, 1, 0]])
    loss, _ = policy_loss({}, now, old, tensor([[1.0, 1.0, 0.0]]), mask)
    loss.backward()
    assert loss.item() == pytest.approx(-1.052585, abs=1e-6)
    close(now.grad, [[-0.552585, -0.5, 0]], atol=1e-6)


def test_dual_clip_and_clip_fraction() -> None:
    """R06: each sign, each side."""
    advantages, ratios = double([[-1, 1, 1, -1, -1]]), double([[5, 5, 0.1, 0.1, 2]])
    now = ratios.log().requires_grad_()
    keys = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    loss, metrics = policy_loss(keys, now, torch.zeros(1, 5).double(), advantages, torch.ones(1, 5))
    loss.backward()
    assert loss.item() == pytest.approx(0.884, abs=1e-9) and metrics["clip_fraction"] == pytest.approx(0.4)
    close(now.grad, [[0, 0, -0.02, 0, 0.4]], atol=1e-9)


def test_gae_steps_over_tool_tokens() -> None:
    """R09: two rows."""
    mask = double([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]).bool()
    values = double([[0.5, 0.4, 0.9, 0.9, 0.6], [0.2, 0.3, 0.1, 0, 0]])
    algorithm = {"adv_type": "gae", "gamma": 0.9, "gae_lambda": 0.8}
    got, returns = compute_advantages(algorithm, double([1, -1]), mask, group_size=1, values=values)
    close(got, [[0.168160, 0.428, 0, 0, 0.4], [-0.651440, -1.002, -1.1, 0, 0]], atol=1e-6)
    close(returns, [[0.668160, 0.828, 0, 0, 1], [-0.451440, -0.702, -1, 0, 0]], atol=1e-6)


def test_reinpp_with_kl_in_the_reward() -> None:
    """R10: the KL under the mask is large."""
    mask = double([[1, 1, 0, 1], [1, 1, 0, 0]])
    kl = double([[0.2, 0.1, 3, 0.4], [0.3, -0.1, 7, 7]])
    algorithm = {"adv_type": "reinpp", "reinpp_kl_beta": 0.1, "kl_penalty_type": "k1"}
    got, _ = compute_advantages(
        algorithm, double([1, 0]), mask, group_size=1, logprobs=kl, ref_logprobs=torch.zeros_like(kl)
    )
    close(got, [[0.780419, 0.823299, 0, 0.844739], [-1.256389, -1.192069, 0, 0]], atol=1e-6)


def test_whitening_is_over_the_tokens_of_the_whole_step() -> None:
    """R11: by both keys."""
    mask = double(rows([3, 1, 2, 2]))
    right = double([-0.237915, -0.872357, -0.872357, 1.665408])
    got, _ = compute_advantages({"adv_type": "reinpp"}, double([1, 0, 0, 4]), mask, group_size=1)
    close(got[:, 0], right, atol=1e-6)
    algorithm = {"adv_type": "raw", "normalize_advantages": True}
    got, _ = compute_advantages(algorithm, double([1, 0, 0, 4]), mask, group_size=1)
    close(got[:, 0], [-0.237914, -0.872351, -0.872351, 1.665398], atol=1e-6)
    assert not got[1, 1:].any()


def test_rollout_weights_are_constants_and_logged_before_their_clip() -> None:
    """R12: four tokens."""
    old, rollout = double([[-1, -1, -0.5, -2]]), double([[-1.5, -3, -0.2, -2]])
    now = old.clone().requires_grad_()
    keys = {"importance_sampling_fix": True, "importance_sampling_clip": 2.0}
    loss, metrics = policy_loss(keys, now, old, double([[1, -1, 2, 0.5]]), torch.ones(1, 4), rollout_logprobs=rollout)
    loss.backward()
    assert loss.item() == pytest.approx(-0.407589, abs=1e-6)
    close(now.grad, [[-0.412180, 0.5, -0.370409, -0.125]], atol=1e-6)
    assert metrics["importance_ratio"] == pytest.approx(2.694649, abs=1e-6)


def test_the_critics_clip_takes_the_larger_error() -> None:
    """R13: half the square."""
    now = double([[2, 2, 1.1, 0.5]]).requires_grad_()
    returns, old = double([[0.5, 3, 1.3, 0.9]]), double([[1, 1, 1, 0.8]])
    loss, _ = value_loss(now, returns, old, torch.ones(1, 4), value_cliprange=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.71125, abs=1e-9)
    close(now.grad, [[0.375, 0, -0.05, -0.1]], atol=1e-9)


def test_early_stop_asks_once_and_zeroes_the_gradient() -> None:
    """R14: also where the loss is infinite."""
    ratios = double([[1, 1, 1, 1, 12, 12]])
    for limit, stops in ((5.0, False), (4.0, True)):
        now = ratios.log().requires_grad_()
        loss, metrics = policy_loss(
            {"early_stop_imp_ratio": limit}, now, torch.zeros(1, 6).double(), torch.full((1, 6), -1.0), torch.ones(1, 6)
        )
        loss.backward()
        assert metrics["ratio"] == pytest.approx(28 / 6)
        assert (loss.item() == 0 and not now.grad.any()) == stops
    now = torch.full((1, 2), 1000.0, dtype=torch.float64).requires_grad_()  # the ratio overflows
    loss, _ = policy_loss(
        {"early_stop_imp_ratio": 5.0}, now, torch.zeros(1, 2).double(), torch.full((1, 2), -1.0), torch.ones(1, 2)
    )
    loss.backward()
    assert loss.item() == 0 and now.grad.tolist() == [[0.0, 0.0]]


def test_the_entropy_bonus_is_learnt() -> None:
    entropy = double([[0.9, 0.4]]).requires_grad_()
    zero = torch.zeros(1, 2).double()
    keys = {"entropy_bonus": 0.1, "calculate_entropy": True}
    loss, metrics = policy_loss(keys, zero, zero, zero, torch.ones(1, 2), entropy=entropy)
    loss.backward()
    assert loss.item() == pytest.approx(-0.065) and metrics["entropy"] == pytest.approx(0.65)
    close(entropy.grad, [[-0.05, -0.05]], atol=1e-12)
    off, _ = policy_loss({"entropy_bonus": 0.1}, zero, zero, zero, torch.ones(1, 2), entropy=entropy)
    assert off.item() == 0


ONE = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policy_loss({"clip_ratio_c": 1.0}, ONE, ONE, ONE, ONE), "clip_ratio_c 1.0 must be above 1"),
        (lambda: policy_loss({"loss_agg_func": "sum"}, ONE, ONE, ONE, ONE), "unknown loss_agg_func 'sum'"),
        (lambda: policy_loss({"kl_beta": 0.1}, ONE, ONE, ONE, ONE), "needs ref_logprobs"),
        (lambda: policy_loss({"importance_sampling_fix": True}, ONE, ONE, ONE, ONE), "needs rollout_logprobs"),
        (lambda: policy_loss({}, ONE, ONE, ONE[:, :1], ONE), r"advantages has shape \(2, 1\)"),
        (lambda: kl_penalty(ONE, ONE, "k4"), "unknown kl_penalty_type 'k4'"),
        (lambda: value_loss(ONE, ONE, ONE, ONE, value_cliprange=0.0), "value_cliprange 0.0"),
        (lambda: compute_advantages({"adv_type": "rloo"}, ONE[0], ONE, group_size=2), "unknown adv_type 'rloo'"),
        (lambda: compute_advantages({}, ONE[0], ONE, group_size=1), "at least 2"),
        (lambda: compute_advantages({}, torch.ones(3), torch.ones(3, 1), group_size=2), "3 sequences"),
        (lambda: compute_advantages({"adv_type": "gae"}, ONE[0], ONE, group_size=1), "gae needs values"),
        (
            lambda: compute_advantages(
                {"adv_type": "grpo_dynamic"}, tensor([1, 0]), ONE, group_size=2, trajectory_ids=torch.tensor([3, 3])
            ),
            "1 trajectories",
        ),
        (
            lambda: compute_advantages(
                {"adv_type": "grpo_dynamic"}, tensor([1, 0, 1]), torch.ones(3, 1), group_size=2,
                trajectory_ids=torch.tensor([3, 3, 4]),
            ),
            "different rewards",
        ),
        (
            lambda: compute_advantages({"adv_type": "reinpp", "reinpp_kl_beta": 0.1}, ONE[0], ONE, group_size=1),
            "needs logprobs and ref_logprobs",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_aggregations_of_hand_made_numbers() -> None:
    x, mask = double([[1, 2, 9], [4, 9, 9]]), double([[1, 1, 0], [1, 0, 0]])
    assert aggregate(x, mask, "token-mean").item() == pytest.approx(7 / 3)
    assert aggregate(x, mask, "seq-mean-token-sum").item() == pytest.approx(3.5)
    assert aggregate(x, mask, "seq-mean-token-mean").item() == pytest.approx(2.75)
