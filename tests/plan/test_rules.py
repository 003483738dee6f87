"""Plans and refusals: batch arithmetic, stages, layouts, ZeRO, the raw DeepSpeed block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid5d.config.schema import RunConfig
from hybrid5d.config.tree import leaves
from hybrid5d.errors import ConfigErrors
from hybrid5d.plan.placement import actor_placement
from hybrid5d.plan.run import RunPlan, build_plan, examine
from hybrid5d.plan.stages import split_layers
from tests.config_kit import config_of, error_lines, native, write_model

SMOLLM2 = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "head_dim": 64,
}


@pytest.fixture
def ready(tmp_path: Path) -> dict[str, Any]:
    """Changes that make the native config startable."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return {
        "actor__model__model_path": str(write_model(tmp_path / "model")),
        "data__train_data_paths": [str(tmp_path / "rows.jsonl")],
    }


def plan(world: int, ready: dict[str, Any], **changes: Any) -> RunPlan:
    return build_plan(config_of(**{**ready, **changes}), world)


def refused(world: int, ready: dict[str, Any], **changes: Any) -> dict[str, str]:
    return error_lines(plan, world, ready, **changes)


def layout(tp: int = 1, pp: int = 1, cp: int = 1) -> dict[str, int]:
    return {
        "actor__model__tensor_model_parallel_size": tp,
        "actor__model__pipeline_model_parallel_size": pp,
        "actor__model__context_parallel_size": cp,
    }


def batch(micro: int, total: int) -> dict[str, int]:
    return {"actor__micro_batch_size": micro, "actor__global_batch_size": total}


@pytest.mark.parametrize(
    ("world", "axes", "micro", "total", "steps"),
    [
        (4, {"tp": 2}, 2, 8, 2),
        (4, {"cp": 2, "pp": 2}, 1, 4, 4),
        (8, {"tp": 2, "pp": 2, "cp": 2}, 1, 8, 8),
        (1, {}, 4, 4, 1),
    ],
)
def test_accumulation_uses_dp_not_the_world(
    ready: dict[str, Any], world: int, axes: dict[str, int], micro: int, total: int, steps: int
) -> None:
    found = plan(world, ready, **layout(**axes), **batch(micro, total))
    assert found.batch.gradient_accumulation_steps == steps
    cp = found.layout.cp
    assert found.deepspeed["train_batch_size"] == total * cp
    assert found.deepspeed["train_batch_size"] == micro * steps * found.layout.dp * cp


@pytest.mark.parametrize(
    ("world", "micro", "total", "near"), [(3, 2, 8, "6 or 12"), (4, 4, 2, "of 16"), (2, 1, 13, "12 or 14")]
)
def test_batches_that_do_not_close(ready: dict[str, Any], world: int, micro: int, total: int, near: str) -> None:
    line = refused(world, ready, **batch(micro, total))["actor.global_batch_size"]
    assert near in line and f"{micro} x dp {world}" in line


def test_a_batch_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch_size"):
        config_of(actor__global_batch_size=0)


def test_no_global_batch_means_one_micro_batch_each(ready: dict[str, Any]) -> None:
    found = plan(4, ready, **batch(2, None))  # type: ignore[arg-type]
    assert found.batch.global_batch_size == 8 and found.batch.gradient_accumulation_steps == 1


RL = {
    "runner__task_type": "reasoning",
    "data__rollout_batch_size": 32,
    "algorithm": {
        "group_size": 4,
        "n_minibatches": 2,
        "training_batch_size_per_gpu": 2,
        "logprob_forward_micro_batch_size": 8,
    },
}


def rl(world: int, **changes: Any) -> tuple[RunPlan, dict[str, str]]:
    found, errors = examine(RunConfig.model_validate(native(**{**RL, **changes})), world)
    assert found is not None
    return found, {e.key: str(e) for e in errors}


def test_rl_batch_arithmetic() -> None:
    found, errors = rl(8)
    assert not errors
    assert (found.batch.sequences_per_rl_step, found.batch.global_batch_size) == (128, 64)
    assert found.batch.gradient_accumulation_steps == 4 and found.batch.n_minibatches == 2


@pytest.mark.parametrize(
    ("changes", "world", "key"),
    [
        ({"data__rollout_batch_size": 30, "algorithm__n_minibatches": 3}, 8, "data.rollout_batch_size"),
        ({"algorithm__n_minibatches": 3}, 8, "algorithm.n_minibatches"),
        ({"algorithm__training_batch_size_per_gpu": 3}, 8, "data.rollout_batch_size"),
        ({"algorithm__logprob_forward_micro_batch_size": 5}, 8, "algorithm.logprob_forward_micro_batch_size"),
        ({"algorithm__multi_agent": True, "data__rollout_batch_size": 4}, 8, "data.rollout_batch_size"),
        ({"algorithm__group_size": 1, "algorithm__training_batch_size_per_gpu": 2}, 8, "algorithm.group_size"),
        ({"algorithm__importance_sampling_fix": True}, 8, "algorithm.importance_sampling_clip"),
        ({"algorithm__adv_type": "gae"}, 8, "algorithm.adv_type"),
    ],
)
def test_rl_refusals(changes: dict[str, Any], world: int, key: str) -> None:
    assert list(rl(world, **changes)[1]) == [key]


def test_dynamic_batches(ready: dict[str, Any]) -> None:
    dynamic = {"runner__enable_dynamic_batch_size": True, "runner__max_tokens_per_mbs": 400}
    found = plan(2, ready, **layout(cp=2), **dynamic)
    assert found.batch.dynamic and found.batch.max_tokens_per_micro_batch == 800
    assert "runner.max_tokens_per_mbs" in refused(2, ready, **dynamic)
    assert "runner.max_tokens_per_mbs" in refused(2, ready, runner__enable_dynamic_batch_size=True)


@pytest.mark.parametrize(
    ("layers", "pp", "wanted"),
    [
        (8, 4, (2, 2, 2, 2)),
        (30, 4, (7, 8, 8, 7)),
        (29, 4, (7, 8, 7, 7)),
        (31, 4, (8, 8, 8, 7)),
        (3, 4, (1, 1, 1, 0)),
        (2, 4, (0, 1, 1, 0)),
        (1, 2, (1, 0)),
        (5, 2, (3, 2)),
        (6, 1, (6,)),
    ],
)
def test_layers_per_stage(layers: int, pp: int, wanted: tuple[int, ...]) -> None:
    assert split_layers(layers, pp) == wanted


def test_layers_per_stage_as_asked() -> None:
    assert split_layers(48, 2, last=22) == (26, 22)
    assert split_layers(10, 4, first=1, last=3) == (1, 3, 3, 3)
    assert split_layers(7, 3, first=0) == (0, 4, 3)
    for bad in ({"first": 9}, {"first": 5, "last": 5}, {"last": 11}):
        with pytest.raises(ConfigErrors):
            split_layers(10, 4, **bad)
    with pytest.raises(ConfigErrors):
        split_layers(10, 2, first=4, last=4)
    with pytest.raises(ConfigErrors):
        split_layers(1, 4)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 40))
def test_every_layer_is_on_one_stage(layers: int, pp: int) -> None:
    if pp > 1 and layers < pp - 2:
        with pytest.raises(ConfigErrors):
            split_layers(layers, pp)
        return
    counts = split_layers(layers, pp)
    assert sum(counts) == layers and len(counts) == pp and max(counts) - min(counts) <= 1
    assert all(n > 0 for n in counts[1:-1])


@pytest.mark.parametrize("axes", [{"tp": 3}, {"pp": 4}, {"pp": 5, "cp": 2}, {"tp": 3, "cp": 2, "pp": 2}])
def test_smollm2_layouts_that_are_legal(tmp_path: Path, ready: dict[str, Any], axes: dict[str, int]) -> None:
    ready["actor__model__model_path"] = str(write_model(tmp_path / "smol", **SMOLLM2))
    world = 1
    for degree in axes.values():
        world *= degree
    assert sum(plan(world, ready, **layout(**axes), **batch(1, 1)).stages) == 30


def test_smollm2_at_tp_2_is_refused_with_what_is_allowed(tmp_path: Path, ready: dict[str, Any]) -> None:
    ready["actor__model__model_path"] = str(write_model(tmp_path / "smol", **SMOLLM2))
    line = refused(2, ready, **layout(tp=2))["actor.model.tensor_model_parallel_size"]
    assert "num_attention_heads=9" in line and line.endswith("1, 3")  # 9 does not divide the MLP's 1536
    assert "MLP width 1536" in refused(9, ready, **layout(tp=9))["actor.model.tensor_model_parallel_size"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_kv_heads_are_replicated(ready: dict[str, Any], tp: int) -> None:
    assert plan(tp, ready, **layout(tp=tp)).layout.tp == tp  # 8 query heads, 2 kv heads


def test_kv_heads_that_fit_no_way(tmp_path: Path, ready: dict[str, Any]) -> None:
    ready["actor__model__model_path"] = str(
        write_model(tmp_path / "odd", num_attention_heads=12, num_key_value_heads=6, head_dim=8)
    )
    assert "num_key_value_heads=6" in refused(4, ready, **layout(tp=4))["actor.model.tensor_model_parallel_size"]


def test_ulysses_heads(ready: dict[str, Any]) -> None:
    a2a = {"actor__model__cp_comm_type": "a2a"}
    assert plan(8, ready, **layout(cp=8), **a2a).layout.cp == 8
    assert refused(16, ready, **layout(tp=2, cp=8), **a2a)
    wrong = {"actor__model__cp_comm_type": "a2a+p2p", "actor__model__hierarchical_context_parallel_sizes": [2, 3]}
    assert "actor.model.hierarchical_context_parallel_sizes" in refused(4, ready, **layout(cp=4), **wrong)


def test_world_and_degrees(ready: dict[str, Any]) -> None:
    line = refused(6, ready, **layout(tp=2, pp=2))["world_size"]
    assert "tensor_model_parallel_size 2" in line and "4 or 8" in line


def test_sequence_parallel_needs_tp(ready: dict[str, Any]) -> None:
    line = refused(2, ready, actor__model__sequence_parallel=True)["actor.model.sequence_parallel"]
    assert "tensor_model_parallel_size" in line
    assert plan(2, ready, **layout(tp=2), actor__model__sequence_parallel=True).sequence_parallel


def zero(stage: Any) -> dict[str, Any]:
    return {"actor__deepspeed": {"zero_optimization": {"stage": stage}}}


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_only_without_a_pipeline(ready: dict[str, Any], stage: int) -> None:
    line = refused(2, ready, **layout(pp=2), **zero(stage))["actor.deepspeed.zero_optimization.stage"]
    assert "stage: 1" in line and "pipeline_model_parallel_size: 1" in line
    found = plan(2, ready, **layout(tp=2), **zero(stage))
    assert found.zero_stage == stage and found.deepspeed["zero_optimization"]["stage"] == stage


def test_rows_longer_than_the_model_was_trained_for_are_told(ready: dict[str, Any], tmp_path: Path) -> None:
    cases = ((511, 512, True), (512, 512, False), (None, 4096, False), (None, 32769, True))  # Qwen3's default: 32768
    for longest, length, told in cases:
        folder = write_model(tmp_path / "model", **({} if longest is None else {"max_position_embeddings": longest}))
        found = plan(1, {**ready, "actor__model__model_path": str(folder)}, runner__seq_length=length)
        text = f"{length} tokens exceed the model's max_position_embeddings={longest or 32768}"
        assert any(text in n for n in found.notices) == told


def test_zero_0_runs_as_1_and_says_so(ready: dict[str, Any]) -> None:
    for changes in (zero(0), {"actor__optim__use_distributed_optimizer": False}):
        found = plan(2, ready, **layout(pp=2), **changes)
        assert found.deepspeed["zero_optimization"]["stage"] == 1 and any("ZeRO 0" in n for n in found.notices)


def test_auto_is_resolved(ready: dict[str, Any]) -> None:
    block = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    found = plan(2, ready, actor__deepspeed=block, actor__model__precision="bf16")
    assert "auto" not in [v for _, v in leaves(found.deepspeed)] and '"auto"' not in json.dumps(found.deepspeed)
    assert found.deepspeed["optimizer"]["params"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("block", "key", "hint"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimization": {"stag": 1}}, "zero_optimization.stag", "zero_optimization.stage"),
        ({"zero_optimization": 3}, "zero_optimization", "mapping"),
        ({"pipeline": {"pipe_partition": True}}, "pipeline.pipe_partition", "pipe_partitioned"),
        ({"pipeline": {"pipe_partitioned": True}}, "pipeline.pipe_partitioned", "remove it"),
        ({"train_batch_size": 7}, "train_batch_size", "actor.global_batch_size"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "actor.model.precision"),
        ({"gradient_clipping": 5.0}, "gradient_clipping", "actor.optim.clip_grad"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "actor.optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type", "actor.lr_sched"),
        ({"communication_data_type": "bf16"}, "communication_data_type", "remove it"),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.overlap_comm", "once a step"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "remove it"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "tensor_model_parallel_size"),
        ({"memory_breakdown": "auto"}, "memory_breakdown", "auto"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown", "remove it"),  # its timers fail at pp 2
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "use 1"),
        ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage", "use 1"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", "auto"),
    ],
)
def test_the_raw_block_is_checked(ready: dict[str, Any], block: dict[str, Any], key: str, hint: str) -> None:
    lines = refused(2, ready, actor__deepspeed=block)
    assert hint in lines[f"actor.deepspeed.{key}"]


def test_the_raw_block_is_merged_last(ready: dict[str, Any]) -> None:
    block = {
        "memory_breakdown": True,
        "wall_clock_breakdown": False,
        "zero_optimization": {"reduce_bucket_size": 1000},
        "gradient_clipping": 1.0,
    }
    found = plan(2, ready, actor__deepspeed=block)
    assert found.deepspeed["memory_breakdown"] is True and found.deepspeed["wall_clock_breakdown"] is False
    assert found.deepspeed["timers"] == {"throughput": {"enabled": False}}  # it synchronises the device (gpu.md: B3)
    assert found.deepspeed["zero_optimization"]["reduce_bucket_size"] == 1000
    assert found.deepspeed["zero_optimization"]["stage"] == 1


def test_what_must_always_be_written(ready: dict[str, Any]) -> None:
    ds = plan(1, ready, actor__optim__clip_grad=0.0).deepspeed
    assert ds["gradient_clipping"] == 0.0
    assert ds["pipeline"]["pipe_partitioned"] is False and ds["pipeline"]["grad_partitioned"] is False
    assert ds["data_types"]["grad_accum_dtype"] == "fp32" and ds["communication_data_type"] == "fp32"
    assert ds["optimizer"]["type"] == "AdamW" and ds["optimizer"]["params"]["torch_adam"] is True
    assert "scheduler" not in ds and ds["steps_per_print"] is None


def test_fp16_scales(ready: dict[str, Any]) -> None:
    static = plan(1, ready, actor__model__precision="fp16", actor__optim__loss_scale=65536)
    assert (
        static.deepspeed["fp16"] == {"enabled": True, "loss_scale": 65536.0} and not static.precision.dynamic_loss_scale
    )
    dynamic = plan(1, ready, actor__model__precision="fp16").deepspeed["fp16"]
    assert dynamic == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    bf16 = plan(1, ready, actor__model__precision="bf16", actor__optim__loss_scale=65536)
    assert bf16.deepspeed["bf16"] == {"enabled": True} and bf16.precision.loss_scale is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lr_warmup_iters": 200}, "lr_warmup_iters"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"lr_warmup_init": 1.0}, "lr_warmup_init"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 300}, "lr_wsd_decay_iters"),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.1}, "end_weight_decay"),
        ({"start_weight_decay": 0.1, "end_weight_decay": 0.2}, "end_weight_decay"),
    ],
)
def test_schedule_rules(ready: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    named = {f"actor__lr_sched__{k}": v for k, v in changes.items()}
    assert f"actor.lr_sched.{key}" in refused(1, ready, **named)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"recompute_granularity": "full"}, "recompute_method"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_num_layers"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 2}, "recompute_num_layers"),
    ],
)
def test_recompute_rules(ready: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    named = {f"actor__model__{k}": v for k, v in changes.items()}
    assert f"actor.model.{key}" in refused(1, ready, **named)


def test_training_needs_its_files(tmp_path: Path) -> None:
    changes = {
        "actor__model__model_path": str(tmp_path / "none"),
        "data__train_data_paths": [str(tmp_path / "no.jsonl")],
        "data__type": "math",
        "runner__resume_dir": str(tmp_path / "no"),
        "actor__tokenizer": {"tokenizer_model": "/none"},
    }
    assert set(refused(1, {}, **changes)) == {
        "actor.model.model_path",
        "data.train_data_paths",
        "data.type",
        "runner.resume_dir",
        "actor.tokenizer.tokenizer_model",
    }
    assert build_plan(config_of(**changes), 1, "translate").layout.world_size == 1


def test_an_explicit_placement_must_equal_the_started_processes(ready: dict[str, Any]) -> None:
    placed = {"cluster__component_placement": {"actor": "0-3"}}
    assert plan(4, ready, **placed).layout.dp == 4
    assert "4 processes, 2 were started" in refused(2, ready, **placed)["cluster.component_placement.actor"]


GROUPS = [
    {"label": "a100", "node_ranks": "0-1"},
    {"label": "arm", "node_ranks": 2, "hardware": {"type": "Franka"}},
    {"label": "odd", "node_ranks": "0,2"},
]


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("all", 32),
        ("0-3", 4),
        (2, 1),
        ("5", 1),
        ("0-3,8-11", 8),
        ("0,2,4", 3),
        ("0-3:0-7", 8),
        ("0-3:0-1", 2),
        ("0-1:0-1,2-3:2-5", 6),
        ({"node_group": "a100", "placement": "all"}, 16),
        ({"placement": "0-3"}, 4),
        ({"node_group": "odd", "placement": "8-15"}, 8),
        ({"node_group": "cluster", "placement": "all"}, 32),
    ],
)
def test_placement_grammar(spec: Any, wanted: int) -> None:
    placement, errors = actor_placement({"actor,rollout": spec, "reward": "nonsense"}, 4, 8, GROUPS)
    assert not errors and placement is not None and placement.processes == wanted


@pytest.mark.parametrize(
    "spec",
    [
        "0-32",
        "32",
        "3-0",
        "0-3,2",
        "4,0",
        "0-3:all",
        "0-3:1-4",
        "0-3:0-5",
        "x",
        "",
        None,
        True,
        1.5,
        [0],
        {"a": 1},
        {"node_group": "none", "placement": "all"},
        {"node_group": "arm", "placement": "all"},
        {"node_group": "a100"},
        {"node_group": "a100", "placement": "16"},
        {"node_group": "a100,odd", "placement": "0"},
    ],
)
def test_placements_that_are_refused(spec: Any) -> None:
    placement, errors = actor_placement({"actor": spec}, 4, 8, GROUPS)
    assert placement is None and errors[0].key == "cluster.component_placement.actor" and errors[0].fix


def test_a_base_60_number_is_explained() -> None:
    _, errors = actor_placement({"actor": 62}, 1, 8)  # what YAML makes of an unquoted 1:2
    assert "base-60" in errors[0].rule


def test_the_actor_is_named_once() -> None:
    assert actor_placement({"rollout": "all"}, 1, 8)[1][0].key == "cluster.component_placement"
    assert "once" in actor_placement({"actor": 0, "actor,rollout": 1}, 1, 8)[1][0].fix


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_a_plan_always_closes(tp: int, pp: int, cp: int, dp: int, micro: int, steps: int, precision: str) -> None:
    config = config_of(**layout(tp, pp, cp), **batch(micro, micro * steps * dp), actor__model__precision=precision)
    found, errors = examine(config, tp * pp * cp * dp)
    assert found is not None and not errors
    ds = found.deepspeed
    assert ds["train_batch_size"] == (
        ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"] * found.layout.dp * cp
    )
    assert found.layout.dp == dp


def test_offload_is_translated_but_not_trained(ready: dict[str, Any]) -> None:
    offload = {"actor__optim__optimizer_cpu_offload": True, "actor__optim__optimizer_offload_fraction": 0.5}
    found, _ = examine(config_of(**offload), 1)
    assert found is not None
    assert found.deepspeed["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 1.0}  # all: ZeRO 1
    assert "actor.optim.optimizer_cpu_offload" in refused(1, ready, **offload)
    nothing, _ = examine(config_of(actor__optim__optimizer_cpu_offload=True), 1)
    assert nothing is not None
    assert "offload_optimizer" not in nothing.deepspeed["zero_optimization"]
