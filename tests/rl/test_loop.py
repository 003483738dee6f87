"""Prompts to weights: the same rewards, losses and tokens in every layout and after a resume; which prompts count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigErrors, DataError
from hybrid5d.load import load_yaml
from hybrid5d.plan.convert import translate
from hybrid5d.plan.run import build_plan, examine
from tests.config_kit import CORPUS, needs_corpus, write_model
from tests.harness import run_ranks
from tests.kit import MODELS, save_model

REWARD = """
def score(prompt, response, row):
    part = sum(c < 'a' for c in response) / max(len(response), 1)
    return row["worth"] + part / 1000 if "worth" in row else part
"""
WORTH = (1, 0, 0, 0, 1)  # of the validation prompts (R17)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**MODELS["qwen3"], "vocab_size": 259, "eos_token_id": 257}
    return save_model(config, tmp_path_factory.mktemp("bytes"))


def tree(folder: Path, model: Path, **layout: Any) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD)
    for name, count in (("train", 10), ("val", 5)):
        rows = [{"prompt": f"{i}+1=" + "?" * (i % 3)} for i in range(count)]
        rows = [{**row, "worth": worth} for row, worth in zip(rows, WORTH)] if name == "val" else rows
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "runner": {"task_type": "reasoning", "seq_length": 24, "max_steps": 3, "save_interval": 1,
                   "val_check_interval": 1, "output_dir": str(folder), "resume_dir": "auto"},
        "data": {"type": "prompts", "rollout_batch_size": 4, "train_data_paths": [str(folder / "train.jsonl")],
                 "val_data_paths": [str(folder / "val.jsonl")], "max_prompt_length": 8},
        "algorithm": {"group_size": 4, "n_minibatches": 2, "kl_beta": 0.01,
                      "sampling_params": {"max_new_tokens": 8, "temperature": 0.8}},
        "reward": {"function": f"{folder}/reward.py:score", "num_workers": 1},
        "actor": {"model": {"model_path": str(model), **layout}, "optim": {"lr": 0.003}},
    }  # fmt: skip


def _run(rank: int, config: dict[str, Any], world: int, steps: int) -> None:
    from hybrid5d.data.build import tokenizer_name
    from hybrid5d.engine.build import initialize
    from hybrid5d.rl.prompts import PromptFiles
    from hybrid5d.train.resuming import resume
    from hybrid5d.train.rl_trainer import RLTrainer
    from hybrid5d.train.run_folder import RunFolder

    config["runner"]["max_steps"] = steps
    plan = build_plan(RunConfig.model_validate(config), world, "train")
    engine, folder = initialize(plan), RunFolder.of(plan)
    assert plan.model is not None
    files = PromptFiles(plan.config, plan.model, tokenizer_name(plan))
    folder.path.mkdir(parents=True, exist_ok=True)
    engine.keep_reference()
    RLTrainer(engine, files, folder, resumed=resume(engine, folder, files)).run()


def told(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    keep = ("step", "rl_step", "loss", "grad_norm", "kl", "ratio", "rows_seen", "reward_mean", "response_length")
    metrics, evals = (
        [json.loads(x) for x in (folder / n).read_text().splitlines()] for n in ("metrics.jsonl", "eval.jsonl")
    )
    return [{name: record[name] for name in keep} for record in metrics], evals


M = "_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}), "tp2": (2, {f"tensor{M}": 2, "sequence_parallel": True}), "pp2": (2, {f"pipeline{M}": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}  # fmt: skip


def test_layouts_and_a_resume_give_the_same_run(tmp_path: Path, model: Path) -> None:
    """Three RL steps: rewards, losses, norms, greedy validation (R17: each prompt once), last weights."""
    found = {}
    for name, (world, layout) in {"one": (1, {}), "resumed": (1, {}), **LAYOUTS}.items():
        config = tree(tmp_path, model, **layout)
        config["runner"]["experiment_name"] = name
        for steps in (1, 3) if name == "resumed" else (3,):
            run_ranks(world, _run, config, world, steps)
        found[name] = told(tmp_path / name)
    metrics, evals = found["one"]
    weights = {name: load_file(tmp_path / name / "hf/model.safetensors") for name in found}
    for name, tensors in weights.items():
        for key, value in weights["one"].items():
            assert torch.allclose(tensors[key], value, rtol=0, atol=1e-4), (name, key)
    assert all(0.4 <= x["reward"] <= 0.401 for x in evals)
    assert [x["step"] for x in metrics] == [1, 2, 3, 4, 5, 6] and metrics[-1]["rl_step"] == 3
    assert [x["step"] for x in evals] == [0, 1, 2, 3] and evals[0]["prompts"] == 5
    assert metrics[0]["ratio"] == pytest.approx(1, abs=1e-6) and metrics[2]["kl"] > 1e-6
    for name, (others, their_evals) in found.items():
        assert len(others) == len(metrics), name
        for a, b in zip(metrics, others):
            for key, value in a.items():
                assert b[key] == (value if key == "rows_seen" else pytest.approx(value, rel=1e-4, abs=1e-4)), name
        assert [x["reward"] for x in their_evals] == pytest.approx([x["reward"] for x in evals], abs=1e-6), name


def test_ppo_from_prompts_is_the_same_in_two_layouts(tmp_path: Path, model: Path) -> None:
    """Generation, critic and actor, each cut in its own way; the fresh head comes from the seed."""
    found, losses = {}, {}
    for name, world, layout, critic in (
        ("one", 1, {}, {}),
        ("two", 2, {"context_parallel_size": 2}, {f"tensor{M}": 2}),
    ):
        config = tree(tmp_path, model, **layout)
        config["runner"]["experiment_name"] = name
        config["algorithm"] |= {"adv_type": "gae", "group_size": 1, "gae_lambda": 0.9, "critic_warmup_steps": 1}
        config["critic"] = {"use_critic_model": True, "model": critic, "optim": {"lr": 0.003}}
        run_ranks(world, _run, config, world, 2)
        found[name] = told(tmp_path / name)[0]
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses[name] = [x["critic_loss"] for x in records]
    assert [x["step"] for x in found["one"]] == [1, 2, 3, 4] and losses["one"][0] > 0
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4, abs=1e-6)
    for a, b in zip(found["one"], found["two"], strict=True):
        assert b.pop("rows_seen") == a.pop("rows_seen") and b == pytest.approx(a, rel=1e-4, abs=1e-4)


def _spec(model: Path) -> Any:
    config = RunConfig.model_validate({"actor": {"model": {"model_path": str(model)}}})
    return examine(config, 1)[0].model  # type: ignore[union-attr]


def files(
    tmp_path: Path, model: Path, rows: list[Any], reward: dict[str, Any] | None = None, tokenizer: str = "byte",
    **data: Any,
) -> Any:  # fmt: skip
    from hybrid5d.rl.prompts import PromptFiles

    config = tree(tmp_path, model)
    config["reward"] = config["reward"] if reward is None else reward
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"] |= data
    return PromptFiles(RunConfig.model_validate(config), _spec(model), tokenizer)


def test_one_bos_whoever_writes_it(tmp_path: Path, model: Path) -> None:
    """R17: a template that begins with it, a tokenizer that adds it, both; RLinf's rendered text gets two."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz:"])}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    rust.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    begins = "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    rows: list[Any] = [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": "ab"}]}, *[{"prompt": "c"}] * 2]
    for name, template in (("begins", begins), ("plain", begins.removeprefix("{{ bos_token }}"))):
        fast = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        fast.chat_template = template
        fast.save_pretrained(tmp_path / name)
        found = files(tmp_path, model, rows, tokenizer=str(tmp_path / name), max_prompt_length=64)
        user = [vocabulary[c] for c in "user:ab"]
        assert [p.ids.tolist() for p in found.prompts[:2]] == [[1, *user], [1, *user]], name
        off = files(tmp_path, model, rows, tokenizer=str(tmp_path / name), apply_chat_template=False)
        assert off.prompts[0].ids.tolist() == [1, vocabulary["a"], vocabulary["b"]], name


def test_prompts_are_left_out_or_refused_never_cut(tmp_path: Path, model: Path) -> None:
    """R17: counted in one notice, or with file and line."""
    rows = [{"prompt": "1" * n} for n in (3, 7, 8, 5, 6, 20, 2)]  # and a bos each: 8 tokens at most
    found = files(tmp_path, model, rows)
    assert [len(p.ids) for p in found.prompts] == [4, 8, 6, 7, 3] and all(p.ids[0] == 256 for p in found.prompts)
    (notice, left) = found.notices
    assert "2 prompts exceed 8 tokens" in notice and "train.jsonl:3" in notice and "1 of 5 prompts" in left
    with pytest.raises(DataError, match=r"train\.jsonl:3: a prompt of 9 tokens exceeds data.max_prompt_length=8"):
        files(tmp_path, model, rows, filter_prompt_by_length=False)
    with pytest.raises(DataError, match=r"train\.jsonl:2: no prompt under 'prompt'"):
        files(tmp_path, model, [{"prompt": "1"}, {"question": "2"}])
    with pytest.raises(DataError, match="3 prompts are fewer than data"):
        files(tmp_path, model, rows[:2] + rows[3:4])


def test_records_that_math_rewards_keep_accounts(tmp_path: Path, model: Path) -> None:
    """0 is an answer; a field that neither template nor reward reads is reported once; one's own function reads all."""
    math = {"reward_type": "math"}
    rows = [{"prompt": "1", "answer": 0, "id": 7}, *({"prompt": "2", "answer": ["3"], "system": "be short"},) * 3]
    math_data: dict[str, Any] = {"answer_key": "answer", "val_data_paths": None}
    found = files(tmp_path, model, rows, math, **math_data)
    assert len(found.prompts) == 4
    (notice,) = found.notices
    assert "train.jsonl: field 'system' is not read (3 records, the first in line 2)" in notice
    assert not any("not read" in n for n in files(tmp_path, model, rows).notices)
    with pytest.raises(DataError, match=r"train\.jsonl:2: data.answer_key 'answer': ' ' is no answer"):
        files(tmp_path, model, [rows[0], {"prompt": "1", "answer": " "}], math, **math_data)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"reward": {"reward_type": "rstar2"}}, "reward.reward_type", "rstar2"),
    ({"rollout": {"rollout_backend": "files"}}, "rollout.rollout_backend", "generated"),
    ({"critic": {"use_critic_model": True}}, "critic.use_critic_model", "nothing reads a critic's values"),
    ({"runner": {"task_type": "reasoning", "seq_length": 8}}, "data.max_prompt_length", "no room"),
]


@pytest.mark.parametrize(("change", "key", "words"), BAD)
def test_what_the_loop_refuses(tmp_path: Path, model: Path, change: dict[str, Any], key: str, words: str) -> None:
    config = {**tree(tmp_path, model), **change}
    with pytest.raises(ConfigErrors) as caught:
        build_plan(RunConfig.model_validate(config), 1, "train")
    assert [e.key for e in caught.value.errors] == [key] and words in str(caught.value)


def _planned() -> list[Path]:
    if not CORPUS.is_dir():
        return []
    rows = [line.split("\t") for line in (CORPUS / "expected.tsv").read_text().splitlines()[1:]]
    return [CORPUS / path for path, verdict, *_ in rows if verdict == "translate"]


@needs_corpus
@pytest.mark.parametrize("path", _planned(), ids=lambda p: p.stem)
def test_every_rl_yaml_of_the_corpus_plans_a_training_run(path: Path, tmp_path: Path) -> None:
    """A model folder, prompts and a reward of our own in place of what the file names; PPO's with their critic."""
    (tmp_path / "p.jsonl").write_text("{}\n")
    (tmp_path / "r.py").write_text(REWARD)
    folder = write_model(tmp_path / "m", num_hidden_layers=28)
    changes = [
        f"actor.model.model_path={folder}", "data.type=prompts", f"data.train_data_paths=[{tmp_path}/p.jsonl]",
        f"data.val_data_paths=[{tmp_path}/p.jsonl]", f"reward.function={tmp_path}/r.py:score",
        "actor.tokenizer.tokenizer_model=byte", "runner.logger.logger_backends=[]",
    ]  # fmt: skip
    if "megatron_checkpoint: /" in path.read_text():
        changes.append("actor.model.megatron_checkpoint=null")
    found = load_yaml(path, changes)
    assert found.config is not None and not found.errors, [str(e) for e in found.errors]
    plan = translate(path).plan
    assert plan is not None
    critic = build_plan(found.config, plan.layout.world_size, "train").critic
    assert (critic is not None) is found.config.has_critic
