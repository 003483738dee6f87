"""RL steps on rollouts against a plain loop: the HF model, whole logits, autograd, formulas written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.rl.rollouts import Rollout
from tests.engine_kit import Layout, assemble, config_dict, shards
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, hf_model

RECIPE = Recipe(lr=0.05)
LENGTHS = [(3, 9), (2, 1), (5, 8), (1, 2), (4, 7), (2, 3), (6, 6), (3, 4)]  # prompt, response
FULL: dict[str, Any] = {
    "adv_type": "grpo", "group_size": 4, "n_minibatches": 2, "kl_beta": 0.05, "kl_penalty_type": "k2",
    "entropy_bonus": 0.01, "calculate_entropy": True, "importance_sampling_fix": True, "importance_sampling_clip": 1.2,
    "clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 3.0, "sampling_params": {"temperature": 0.7},
}  # fmt: skip


def rollouts(seed: int = 0) -> list[Rollout]:
    """Eight rows, two groups; tool tokens inside, and a row without a token of its own."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, (p, t) in enumerate(LENGTHS):
        mask = rng.random(t) < 0.8
        mask[0] = True
        if i == 3:
            mask[:] = False
        logprobs = np.where(mask, rng.uniform(-6, -3, t), np.nan).astype(np.float32)
        ids = [rng.integers(0, 101, n).astype(np.int64) for n in (p, t)]
        rows.append(Rollout(*ids, mask, float(rng.normal()), i // 4, i, logprobs))
    return rows


def _rank(rank: int, layout: Layout, folder: str, algorithm: dict[str, Any], runner: dict[str, Any]) -> Any:
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.engine.build import initialize
    from hybrid5d.plan.run import build_plan
    from hybrid5d.rl.step import PolicyUpdate

    tree = config_dict(layout, RECIPE, folder, 8)
    tree["runner"] |= {"task_type": "reasoning", **runner}
    tree["data"] |= {"type": "rollouts", "rollout_batch_size": 2}
    tree["algorithm"] = {**algorithm, "training_batch_size_per_gpu": layout.micro}
    engine = initialize(build_plan(RunConfig.model_validate(tree), layout.world, "translate"))
    engine.keep_reference()
    update = PolicyUpdate(engine)
    results = [r for step in range(2) for r in update.run(rollouts(step), step)]

    def whole(p: torch.nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(p) if layout.zero == 3 else p

    return [(r.loss, r.grad_norm, r.metrics) for r in results], shards(engine.module, whole)


def _scores(model: Any, row: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each response token, and entropy, [t]."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
    logits = model(ids[None]).logits[0][len(row.prompt_ids) - 1 : -1].float() / temperature
    every = logits.log_softmax(-1)
    return every.gather(1, torch.from_numpy(row.response_ids)[:, None])[:, 0], -(every.exp() * every).sum(-1)


def plain(algorithm: dict[str, Any]) -> tuple[list[tuple[float, float, dict[str, float]]], dict[str, np.ndarray]]:
    a, temperature = algorithm, algorithm["sampling_params"]["temperature"]
    model, start = hf_model(MODELS["llama"]), hf_model(MODELS["llama"])
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RECIPE.lr), []
    for step in range(2):
        rows = rollouts(step)
        rewards = torch.tensor([r.reward for r in rows], dtype=torch.float64).view(2, 4)
        adv = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        with torch.no_grad():
            old = [_scores(model, r, temperature)[0] for r in rows]
            ref = [_scores(start, r, temperature)[0] for r in rows]
        for part in (range(4), range(4, 8)):
            per_row, ratios, clipped, kls = [], [], [], []
            for i in part:
                own = torch.from_numpy(rows[i].mask)
                new, entropy = (x[own] for x in _scores(model, rows[i], temperature))
                weight = (old[i][own] - torch.from_numpy(rows[i].logprobs)[own]).exp().clamp(max=1.2)
                gain, ratio = weight * adv[i].float(), (new - old[i][own]).exp()
                one, two = -gain * ratio, -gain * ratio.clamp(0.95, 1.1)
                loss = torch.minimum(torch.maximum(one, two), gain.sign() * 3.0 * gain)
                kl = 0.5 * (new - ref[i][own]) ** 2
                per_row.append(loss + 0.05 * kl - 0.01 * entropy)
                ratios.append(ratio)
                clipped.append((one < two).float())
                kls.append(kl)
            how = a.get("loss_agg_func", "token-mean")
            tokens = sum(len(x) for x in per_row)
            loss = sum(x.sum() for x in per_row) / (tokens if how == "token-mean" else len(per_row))
            if how == "seq-mean-token-mean":
                loss = sum(x.mean() for x in per_row if len(x)) / len(per_row)
            if a.get("use_valid_token_scale"):
                loss = loss * tokens / sum(int(r.mask.sum()) for r in rows)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()
            numbers = {"ratio": torch.cat(ratios).mean().item(), "clip_fraction": torch.cat(clipped).mean().item()}
            found.append((loss.item(), float(norm), numbers | {"kl": torch.cat(kls).mean().item()}))
    return found, {n: p.detach().numpy() for n, p in model.named_parameters()}


def check(layout: Layout, folder: Path, algorithm: dict[str, Any], runner: dict[str, Any]) -> None:
    ranks = run_ranks(layout.world, _rank, layout, str(folder), algorithm, runner)
    want, weights = plain(algorithm)
    for got, _ in ranks:
        for (loss, norm, metrics), (loss_, norm_, metrics_) in zip(got, want, strict=True):
            assert abs(loss - loss_) < 1e-5 and norm == pytest.approx(norm_, rel=1e-5)
            for name in ("ratio", "clip_fraction", *(["kl"] if "loss_agg_func" not in algorithm else [])):
                assert metrics[name] == pytest.approx(metrics_[name], abs=1e-5), name
        assert got[0][2]["ratio"] == pytest.approx(1.0, abs=1e-6)  # R15: the first step is on policy
    for name, value in assemble([found for _, found in ranks]).items():
        np.testing.assert_allclose(value, weights[name], atol=2e-5, err_msg=name)


LAYOUTS = [
    Layout(), Layout(dp=2, micro=2), Layout(tp=2, sp=True, dp=2), Layout(pp=2), Layout(cp=2, micro=2), Layout(tp=4),
    Layout(cp=2, model={"cp_comm_type": "a2a"}), Layout(pp=4), Layout(dp=2, zero=3), Layout(dp=2, zero=2),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_rl_step_is_the_plain_loop_in_every_layout(layout: Layout, folders: dict[str, Path]) -> None:
    check(layout, folders["llama"], FULL, {})


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_by_token_budget(layout: Layout, folders: dict[str, Path]) -> None:
    budget = {"enable_dynamic_batch_size": True, "max_tokens_per_mbs": 20 // layout.cp}
    check(layout, folders["llama"], FULL, budget)


@pytest.mark.parametrize("more", [
    {"loss_agg_func": "seq-mean-token-sum"}, {"loss_agg_func": "seq-mean-token-mean"}, {"use_valid_token_scale": True},
])  # fmt: skip
def test_what_the_loss_is_the_mean_of(more: dict[str, Any], folders: dict[str, Path]) -> None:
    check(replace(Layout(), dp=2), folders["llama"], {**FULL, **more}, {})
