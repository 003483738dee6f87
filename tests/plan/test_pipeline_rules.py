"""Keys of the pipeline that do not go together, and those that have no effect; a critic's keys beside the actor's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid5d.plan.run import build_plan, examine
from tests.config_kit import config_of, error_lines, write_model

M = "actor__model__"
PP, SCHEDULE, CHUNKS = (
    f"{M}{n}" for n in ("pipeline_model_parallel_size", "pipeline_schedule", "virtual_pipeline_model_parallel_size")
)
WARM, SPLIT = f"{M}pipeline_warmup", f"{M}pipeline_partition"
FIRST, LAST = (f"{M}decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
ZERO = "actor__deepspeed"


def ready(folder: Path, **changes: Any) -> dict[str, Any]:
    return {f"{M}model_path": str(write_model(folder / "model", num_hidden_layers=8)), PP: 2, **changes}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({SCHEDULE: "interleaved"}, CHUNKS, "needs the number of runs"),
        ({SCHEDULE: "1f1b", CHUNKS: 2}, CHUNKS, "pipeline_schedule 1f1b has 1 run(s)"),
        ({SCHEDULE: "zbv", CHUNKS: 3}, CHUNKS, "pipeline_schedule zbv has 2 run(s)"),
        ({SCHEDULE: "gpipe", WARM: "wide"}, WARM, "only pipeline_schedule 1f1b has a wider warm-up"),
        ({SPLIT: "cost", FIRST: 2}, FIRST, "pipeline_partition: cost decides"),
        ({SCHEDULE: "zbv", LAST: 2}, LAST, "pipeline_schedule: zbv decides"),
        ({SCHEDULE: "zb-h1", PP: 1, ZERO: {"zero_optimization": {"stage": 2}}}, SCHEDULE, "ZeRO 2 runs micro-batches"),
        ({CHUNKS: 2, PP: 1, ZERO: {"zero_optimization": {"stage": 3}}}, CHUNKS, "ZeRO 3 runs micro-batches"),
        ({SCHEDULE: "zbv", PP: 6}, PP, "8 decoder layers fill at most 10 stages"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, changes: dict[str, Any], key: str, words: str) -> None:
    config = config_of(**ready(tmp_path, **changes))
    lines = error_lines(build_plan, config, config.actor.model.pipeline_model_parallel_size, "translate")
    assert list(lines) == [key.replace("__", ".")] and words in lines[key.replace("__", ".")]


def test_too_many_runs_of_layers_are_told_in_the_users_numbers(tmp_path: Path) -> None:
    lines = error_lines(build_plan, config_of(**ready(tmp_path, **{SCHEDULE: "zbv", PP: 6})), 6, "translate")
    assert lines["actor.model.pipeline_model_parallel_size"] == (
        "actor.model.pipeline_model_parallel_size=6: 8 decoder layers fill at most 10 stages (embedding and head may "
        "stand alone); 2 runs of layers a rank make 12. Fix: use 5 or less"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({PP: 1, WARM: "wide"}, "pipeline_warmup=wide has no effect: there is one stage"),
        ({PP: 1, SCHEDULE: "gpipe"}, "pipeline_schedule=gpipe has no effect"),
        (
            {PP: 1, WARM: "wide", ZERO: {"zero_optimization": {"stage": 2}}},
            "pipeline_warmup=wide has no effect: ZeRO 2",
        ),
    ],
)
def test_what_has_no_effect_is_noticed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    plan = build_plan(config_of(**ready(tmp_path, **changes)), 1, "translate")
    assert any(words in notice for notice in plan.notices), plan.notices
    usual = build_plan(config_of(**ready(tmp_path, **{PP: 1})), 1, "translate")
    assert not any("has no effect" in notice for notice in usual.notices)


def rl(folder: Path, **changes: Any) -> dict[str, Any]:
    """PPO on prompts; the critic begins as the actor's folder."""
    base = {
        "runner__task_type": "reasoning", "data__type": "prompts", "data__rollout_batch_size": 8,
        "data__max_prompt_length": 16, "algorithm__adv_type": "gae", "algorithm__group_size": 1,
        "algorithm__n_minibatches": 1, "actor__global_batch_size": 8, "reward__function": "x.py:score",
        "critic__use_critic_model": True,
    }  # fmt: skip
    return ready(folder, **{**base, **changes})


def test_a_critic_may_have_a_schedule_that_cannot_generate(tmp_path: Path) -> None:
    theirs = {"critic__model__pipeline_model_parallel_size": 2, "critic__model__pipeline_schedule": "zbv"}
    plan, errors = examine(config_of(**rl(tmp_path, **theirs)), 2, "train")
    assert plan is not None and plan.critic is not None and plan.critic.pipeline.kind == "zbv"
    assert not any("schedule" in error.key or "virtual" in error.key for error in errors)
    for key, value in ((SCHEDULE, "zbv"), (CHUNKS, 2)):
        _, errors = examine(config_of(**rl(tmp_path, **{key: value})), 2, "train")
        (error,) = (e for e in errors if e.key == key.replace("__", "."))
        assert "generates with one run of layers a rank" in error.rule and error.value == value


def test_layers_by_cost_know_that_a_critics_head_is_one_column(tmp_path: Path) -> None:
    theirs = {f"critic__model__pipeline_{name}": value for name, value in
              (("model_parallel_size", 2), ("partition", "cost"))}  # fmt: skip
    changes = {f"{M}model_path": str(write_model(tmp_path / "wide", num_hidden_layers=8, vocab_size=50_000)),
               SPLIT: "cost", **theirs}  # fmt: skip
    plan = build_plan(config_of(**rl(tmp_path, **changes)), 2, "translate")
    assert plan.critic is not None and plan.critic.stages == (4, 4)
    assert plan.stages[1] < plan.stages[0]  # the actor's head is worth many layers


def test_critic_keys_that_the_actors_replace_are_noticed(tmp_path: Path) -> None:
    theirs = {"critic__model__seq_length": 64, "critic__model__num_layers": 3, f"{M}num_layers": 8}
    plan = build_plan(config_of(**rl(tmp_path, **theirs)), 2, "translate")
    said = [n for n in plan.notices if n.startswith("critic.model.")]
    assert [n.partition("=")[0] for n in said] == ["critic.model.seq_length", "critic.model.num_layers"]


@pytest.mark.parametrize("own, actors, taken", [(True, False, True), (False, None, False), (None, False, False)])
def test_a_critics_own_word_on_loading_weights_holds(
    tmp_path: Path, own: bool | None, actors: bool | None, taken: bool | None
) -> None:
    changes = {"critic__model__load_weights": own, f"{M}load_weights": actors}
    plan = build_plan(config_of(**rl(tmp_path, **changes)), 2, "translate")
    assert plan.critic is not None and plan.critic.config.actor.model.load_weights is taken
