"""PPO's value model: every step against a plain loop, in layouts beside the actor's; saved, resumed, refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid5d.check.observe import RankRun, joined, shards
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import CheckpointError, ConfigErrors, DataError
from hybrid5d.plan.run import build_plan
from hybrid5d.rl.rollouts import Rollout, RolloutFiles
from tests.engine.test_fp16 import allow_fp16
from tests.engine_kit import Layout, compare, config_dict
from tests.harness import RankFailure, run_ranks
from tests.kit import MODELS, Recipe, Trace, hf_model
from tests.layouts import SCHEDULES
from tests.rl.test_step import FIVE, engine_of, rollouts

ALGORITHM: dict[str, Any] = {
    "adv_type": "gae", "group_size": 1, "n_minibatches": 2, "gamma": 0.9, "gae_lambda": 0.8,
    "normalize_advantages": True, "value_cliprange": 0.02, "sampling_params": {"temperature": 0.7},
}  # fmt: skip
RECIPE, CRITIC = Recipe(lr=0.05), Recipe(lr=0.002)
M = "_model_parallel_size"


@pytest.fixture(scope="module")
def headed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama with a value head in place of the vocabulary's."""
    folder = tmp_path_factory.mktemp("critic")
    tensors = load_file(folders["llama"] / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(9)) * 0.2
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    return folder


def tree(actor: Layout, critic: Layout, folder: Path, head: Path, **algorithm: Any) -> dict[str, Any]:
    made = config_dict(actor, RECIPE, str(folder), 8)
    made["runner"] |= {"task_type": "reasoning"}
    made["data"] |= {"type": "rollouts", "rollout_batch_size": 8}
    made["algorithm"] = {**ALGORITHM, "training_batch_size_per_gpu": 1, **algorithm}
    theirs = config_dict(critic, CRITIC, str(head), 8)["actor"]
    kept = {name: theirs[name] for name in ("model", "optim", "lr_sched", "deepspeed") if name in theirs}
    return {**made, "critic": {"use_critic_model": True, **kept}}


def _rank(rank: int, config: dict[str, Any], world: int) -> tuple[RankRun, RankRun]:
    from hybrid5d.engine.deepspeed.observe import before_first_update, full_gradient, full_weight
    from hybrid5d.rl.step import PolicyUpdate

    if config["critic"]["model"]["precision"] == "fp16":
        allow_fp16()
    actor = engine_of(config, world)
    engines, found = (actor, actor.critic), ([], [])  # type: ignore[var-annotated]
    for engine, grads in zip(engines, found):

        def look(engine: Any = engine, grads: Any = grads) -> None:
            grads.extend(shards(engine.module, full_gradient))

        before_first_update(engine.ds, look)
    update = PolicyUpdate(actor)
    results = [r for step in range(2) for r in update.run(rollouts(step), step)]
    runs = []
    for engine, grads in zip(engines, found):
        kept = (engine.plan.precision.dtype, engine.plan.zero_stage)
        runs.append(RankRun(results, grads, shards(engine.module, lambda p, kept=kept: full_weight(p, *kept))))
    return runs[0], runs[1]


@dataclass
class Plain:
    """What the plain loop gives."""

    actor: Trace
    critic: Trace
    said: list[dict[str, float]]


def gae(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    """By the definition: the sum of the later errors, each (gamma lam) further away."""
    last = len(values) - 1
    errors = [(reward if t == last else gamma * values[t + 1]) - v for t, v in enumerate(values)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, last + 1)) for t in range(last + 1)]


def plain(head: Path, dtype: torch.dtype = torch.float32, **algorithm: Any) -> Plain:
    """`dtype`: of the critic."""
    a, temperature = {**ALGORITHM, **algorithm}, ALGORITHM["sampling_params"]["temperature"]
    model, value = hf_model(MODELS["llama"]), hf_model(MODELS["llama"]).to(dtype)
    weight = torch.nn.Parameter(load_file(head / "model.safetensors")["score.weight"].to(dtype))
    body = {f"model.{n}": p for n, p in value.model.named_parameters()} | {"score.weight": weight}
    steps = [torch.optim.SGD(model.parameters(), lr=RECIPE.lr), torch.optim.SGD(body.values(), lr=CRITIC.lr)]
    found = Plain(Trace(), Trace(), [])

    def logprobs(row: Rollout) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
        logits = model(ids[None]).logits[0][len(row.prompt_ids) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, torch.from_numpy(row.response_ids)[:, None])[:, 0]

    def values(row: Rollout) -> torch.Tensor:
        """R13: of response token t at position len(prompt) - 1 + t."""
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
        hidden = value.model(ids[None]).last_hidden_state[0].float()
        return (hidden @ weight[0].float())[len(row.prompt_ids) - 1 : -1]

    for step in range(2):
        rows = rollouts(step)
        own = [torch.from_numpy(r.mask) for r in rows]
        with torch.no_grad():
            old = [logprobs(r)[m] for r, m in zip(rows, own)]
            before = [values(r)[m].double() for r, m in zip(rows, own)]
        raw = [
            torch.tensor(gae(r.reward, v.tolist(), a["gamma"], a["gae_lambda"]), dtype=torch.float64)
            for r, v in zip(rows, before)
        ]
        goals = [x + v for x, v in zip(raw, before)]
        every = torch.cat(raw)
        gains = [(x - every.mean()) / (every.std(correction=0) + 1e-5) for x in raw]
        for part in np.array_split(np.arange(8), a["n_minibatches"]):
            policy, errors, bound = [], [], []
            for i in part:
                ratio = (logprobs(rows[i])[own[i]] - old[i]).exp()
                gain, now = gains[i].float(), values(rows[i])[own[i]]
                policy.append(torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)))
                held = before[i].float() + (now - before[i].float()).clamp(-a["value_cliprange"], a["value_cliprange"])
                one, two = 0.5 * (now - goals[i].float()) ** 2, 0.5 * (held - goals[i].float()) ** 2
                errors.append(torch.maximum(one, two))
                bound.append((one < two).float())
            R, V = (torch.cat([x[i] for i in part]) for x in (goals, before))
            found.said.append(
                {"value_clip_fraction": torch.cat(bound).mean().item(),
                 "explained_variance": float(1 - (R - V).var(correction=0) / R.var(correction=0))}
            )  # fmt: skip
            for trace, terms, optimizer, params in (
                (found.actor, policy, steps[0], dict(model.named_parameters())), (found.critic, errors, steps[1], body),
            ):  # fmt: skip
                loss = torch.cat(terms).mean()
                optimizer.zero_grad()
                loss.backward()
                if not trace.grads:
                    trace.grads = {n: p.grad.float().numpy().copy() for n, p in params.items()}  # type: ignore[union-attr]
                trace.losses.append(loss.item())
                trace.norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), float("inf"))))
                optimizer.step()
    found.actor.weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    found.critic.weights = {n: p.detach().float().numpy() for n, p in body.items()}
    return found


TP, PP, CP, DP = Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2)
BESIDE = [  # the actor's layout, the critic's
    (Layout(), Layout()), (DP, TP), (TP, DP), (CP, PP), (PP, CP), (Layout(pp=2, dp=2), Layout(tp=4)),
    (CP, Layout(pp=2, model=SCHEDULES["zbv"])),
]  # fmt: skip
MANY = [
    (Layout(**FIVE), Layout(tp=4, pp=2, cp=2, sp=True)),
    (Layout(tp=4, pp=2, cp=2, sp=True), Layout(**FIVE)),
    (Layout(pp=2, model=SCHEDULES["interleaved"]), TP),
    (TP, Layout(pp=2, model=SCHEDULES["interleaved"])),
    (DP, Layout(cp=2, model={"cp_comm_type": "a2a"})),
    (Layout(tp=2, pp=4), Layout(tp=2, pp=2, cp=2, sp=True)),
    (Layout(tp=2, dp=4), Layout(tp=2, pp=2, dp=2, sp=True)),
    (PP, Layout(tp=2)),
    (Layout(dp=2, zero=2), CP),
    (PP, Layout(dp=2, zero=3)),
]


@pytest.mark.parametrize(
    ("actor", "critic"),
    [*BESIDE, *(pytest.param(*pair, marks=(pytest.mark.full, pytest.mark.timeout(600))) for pair in MANY)], ids=str,
)  # fmt: skip
def test_two_engines_are_the_plain_loop(actor: Layout, critic: Layout, folders: dict[str, Path], headed: Path) -> None:
    """R24, R13: loss, norm, every gradient by name, the head's too, every weight; tool tokens have no value (R09)."""
    ranks = run_ranks(actor.world, _rank, tree(actor, critic, folders["llama"], headed), actor.world, timeout=240)
    want = plain(headed)
    compare(joined([a for a, _ in ranks]), want.actor, weight=2e-5)
    (got, _), results = ranks[0], ranks[0][0].results
    theirs = joined([c for _, c in ranks])
    theirs.losses, theirs.norms = ([r.metrics[n] for r in results] for n in ("critic_loss", "critic_grad_norm"))
    compare(theirs, want.critic, weight=2e-5)
    for result, numbers in zip(got.results, want.said, strict=True):
        for name, value in numbers.items():
            assert result.metrics[name] == pytest.approx(value, abs=1e-4), name
    assert [r.step for r in results] == [1, 2, 3, 4]


def _off(got: Trace, want: Trace) -> tuple[float, float, float]:
    """How far the first step is: loss, norm, all gradients as one vector; the last two relative."""
    apart = sum(float(np.square(got.grads[n] - want.grads[n]).sum()) for n in want.grads) ** 0.5
    whole = sum(float(np.square(g).sum()) for g in want.grads.values()) ** 0.5
    norm = abs(got.norms[0] - want.norms[0]) / want.norms[0]
    return abs(got.losses[0] - want.losses[0]), norm, apart / whole


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_critic_in_16_bits_is_as_near_as_16_bits_are(
    precision: str, dtype: torch.dtype, folders: dict[str, Path], headed: Path
) -> None:
    """Beside an actor in fp32: no further from fp32's plain loop than twice what the HF model in 16 bits is itself."""
    algorithm = {"n_minibatches": 1, "value_cliprange": 5.0}  # no clip acts: rounding would move tokens across it
    want, same = plain(headed, **algorithm).critic, plain(headed, dtype, **algorithm).critic
    config = tree(DP, Layout(tp=2, sp=True, precision=precision), folders["llama"], headed, **algorithm)
    scale = 256.0 if precision == "fp16" else 1.0
    config["critic"]["optim"]["initial_loss_scale"] = 256.0
    ranks = run_ranks(2, _rank, config, 2, timeout=240)
    results, theirs = ranks[0][0].results, joined([c for _, c in ranks])
    theirs.losses, theirs.norms = ([r.metrics[n] for r in results] for n in ("critic_loss", "critic_grad_norm"))
    theirs.grads = {name: g / scale for name, g in theirs.grads.items()}  # looked at before they are unscaled
    for ours, noise, least in zip(_off(theirs, want), _off(same, want), (1e-3, 5e-3, 5e-3), strict=True):
        assert ours <= 2 * noise + least, (_off(theirs, want), _off(same, want))
    if precision == "fp16":
        assert [(r.metrics["critic_loss_scale"], r.metrics["critic_skipped"]) for r in results] == [(scale, 0)] * 2


# --- starts -----------------------------------------------------------------------------------------------------------


def _start(rank: int, config: dict[str, Any], world: int) -> Any:
    return shards(engine_of(config, world).critic.module, lambda p: p)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_folder_without_a_head_gives_a_fresh_one(name: str, folders: dict[str, Path]) -> None:
    """R24: also a tied one; torch's linear layer's range, from the seed and not from the layout."""
    from hybrid5d.check.observe import assemble

    found = {}
    for layout in (Layout(), Layout(tp=2, sp=True), Layout(pp=2)):
        config = tree(layout, layout, folders[name], folders[name])
        weights, _ = assemble(run_ranks(layout.world, _start, config, layout.world))
        found[str(layout)] = weights
        assert "lm_head.weight" not in weights
        hf = hf_model(MODELS[name])
        for key, value in hf.model.named_parameters():
            np.testing.assert_array_equal(weights[f"model.{key}"], value.detach().numpy())
    heads = [w["score.weight"] for w in found.values()]
    assert heads[0].shape == (1, 32) and np.abs(heads[0]).max() <= 32**-0.5 and heads[0].std() > 0.3 * 32**-0.5
    assert all(np.array_equal(heads[0], other) for other in heads[1:])
    if name == "llama":
        config = tree(Layout(), Layout(), folders[name], folders[name])
        for seed in (RunConfig().actor.seed, 5):  # null is the first
            config["critic"]["seed"] = seed
            head = assemble(run_ranks(1, _start, config, 1))[0]["score.weight"]
            assert np.array_equal(head, heads[0]) is (seed == RunConfig().actor.seed)


def refusal(config: dict[str, Any], world: int) -> list[tuple[str, str]]:
    with pytest.raises(ConfigErrors) as caught:
        build_plan(RunConfig.model_validate(config), world, "train")
    return [(e.key, e.rule) for e in caught.value.errors]


def test_the_critics_faults_are_under_its_own_keys(folders: dict[str, Path], headed: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")

    def config(critic: Layout, head: Path = headed) -> dict[str, Any]:
        made = tree(Layout(dp=4), critic, folders["llama"], head)
        made["data"]["train_data_paths"] = [str(rows)]
        return made

    assert build_plan(RunConfig.model_validate(config(Layout(tp=4))), 4, "train").critic is not None
    ((key, rule),) = refusal(config(Layout(cp=3)), 4)
    assert key == "world_size" and rule.startswith("the critic:")
    keys = [key for key, _ in refusal(config(Layout(sp=True)), 4)]
    assert keys == ["critic.model.sequence_parallel"]
    ((key, rule),) = refusal(config(Layout(), tmp_path / "nowhere"), 4)
    assert key == "critic.model.model_path" and "does not exist" in rule
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(headed / "model.safetensors")
    del tensors["model.norm.weight"]  # only the head may be missing
    save_file({**tensors, "model.other": torch.zeros(2)}, broken / "model.safetensors")
    (broken / "config.json").write_bytes((headed / "config.json").read_bytes())
    found = refusal(config(Layout(), broken), 4)
    assert {key for key, _ in found} == {"critic.model.model_path"}
    assert any("model.norm.weight" in rule for _, rule in found) and any("model.other" in rule for _, rule in found)


def test_given_advantages_are_refused(folders: dict[str, Path], headed: Path, tmp_path: Path) -> None:
    made = tree(Layout(), Layout(), folders["llama"], headed)
    row = {"prompt_ids": [1], "response_ids": [2, 3], "reward": 1.0, "advantages": [1.0, 2.0]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    made["data"]["train_data_paths"] = [str(tmp_path / "rows.jsonl")]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: advantages are given, which the critic's values make"):
        RolloutFiles(RunConfig.model_validate(made), 101)


# --- a run ------------------------------------------------------------------------------------------------------------


def _run(rank: int, config: dict[str, Any], steps: int, poison: bool = False) -> Any:
    from hybrid5d.engine.build import initialize
    from hybrid5d.train.resuming import resume
    from hybrid5d.train.rl_trainer import RLTrainer
    from hybrid5d.train.run_folder import RunFolder

    config["runner"]["max_steps"] = steps
    plan = build_plan(RunConfig.model_validate(config), 2, "train")
    engine, folder = initialize(plan), RunFolder.of(plan)
    files = RolloutFiles(plan.config, 101)
    folder.path.mkdir(parents=True, exist_ok=True)
    if poison:
        assert engine.critic is not None
        next(iter(engine.critic.module.parameters())).data.fill_(float("nan"))
    RLTrainer(engine, files, folder, resumed=resume(engine, folder, files)).run()


def test_a_resumed_run_goes_on_and_the_actor_waits(tmp_path: Path, folders: dict[str, Path]) -> None:
    """R24: the critic's weights, moments and schedule are saved; in its warm-up the actor's do not move."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(0, 101, 3).tolist(), "response_ids": rng.integers(0, 101, int(n)).tolist(),
         "reward": float(rng.normal())}
        for n in rng.integers(1, 9, 8)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    falling = {"lr_decay_style": "linear", "lr_decay_iters": 20}
    config: dict[str, Any] = {
        "runner": {"task_type": "reasoning", "seq_length": 16, "save_interval": 1, "output_dir": str(tmp_path),
                   "resume_dir": "auto"},
        "data": {"type": "rollouts", "rollout_batch_size": 4, "train_data_paths": [str(tmp_path / "rows.jsonl")]},
        "algorithm": {**ALGORITHM, "critic_warmup_steps": 2, "value_cliprange": 5.0},
        "actor": {"model": {"model_path": str(folders["llama"]), f"tensor{M}": 2}, "optim": {"lr": 0.01},
                  "lr_sched": falling},
        "critic": {"use_critic_model": True, "model": {f"pipeline{M}": 2}, "optim": {"lr": 0.02}, "lr_sched": falling},
    }  # fmt: skip
    for name, parts in (("whole", [4]), ("broken", [1, 3, 4])):
        behind = name == "broken"  # saved while training goes on, copies compared: nothing else changes
        config["runner"] |= {"experiment_name": name, "async_save": behind, "check_replicas_every": 1 if behind else -1}
        for steps in parts:
            run_ranks(2, _run, config, steps)
    whole, broken = (
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("whole", "broken")
    )
    assert [x["step"] for x in whole] == list(range(1, 9)) and [x["rl_step"] for x in whole] == [1, 1, 2, 2, 3, 3, 4, 4]
    keep = ("step", "rl_step", "loss", "grad_norm", "lr", "critic_loss", "critic_grad_norm", "critic_lr", "ratio")
    for a, b in zip(whole, broken, strict=True):
        for name in keep:
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-7), name
    assert [x["lr"] for x in whole] == pytest.approx([0, 0, 0, 0, *(0.01 * (1 - k / 20) for k in range(4))])
    assert [x["critic_lr"] for x in whole] == pytest.approx([0.02 * (1 - k / 20) for k in range(8)])
    assert all(x["grad_norm"] == 0 and x["ratio"] == pytest.approx(1, abs=1e-6) for x in whole[:4])
    assert whole[4]["grad_norm"] > 0 and min(x["critic_grad_norm"] for x in whole) > 0
    root = tmp_path / "whole" / "checkpoints"
    says = [json.loads((root / f"global_step_{k}/{part}/manifest.json").read_text())
            for k, part in ((2, "actor"), (2, "critic"), (4, "actor"), (4, "critic"))]  # fmt: skip
    assert [m["step"] for m in says] == [0, 4, 4, 8] and "score.weight" in says[1]["tensors"]
    assert says[0]["id"] == says[1]["id"] and says[0]["follows"] == says[1]["follows"] != ""
    start = load_file(folders["llama"] / "model.safetensors")["model.norm.weight"]
    shard = load_file(root / "global_step_2/actor/model-pp00-tp00.safetensors")
    assert torch.equal(shard["weight/model.norm.weight"], start)
    config["runner"] |= {"experiment_name": "poisoned", "check_replicas_every": -1}
    with pytest.raises(
        RankFailure, match=r"step 1: actor: loss nan.*; critic: loss nan.*actor\.optim\.lr and critic\.optim\.lr"
    ):
        run_ranks(2, _run, config, 1, True)
    config["runner"]["experiment_name"] = "broken"
    for folder in (tmp_path / "broken" / "checkpoints").glob("global_step_*"):
        (folder / "critic").rename(folder / "elsewhere")
    with pytest.raises(Exception, match="holds no critic, which this run trains") as caught:
        run_ranks(2, _run, config, 5)
    assert CheckpointError.__name__ in str(caught.value)
