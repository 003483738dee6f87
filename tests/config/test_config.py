"""Reading: numbers, null, references, composition, overrides, unknown keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.config.schema import RunConfig, schema_keys
from hybrid5d.config.yaml_file import dump_yaml, parse_yaml
from hybrid5d.load import load_config, load_yaml
from tests.config_kit import error_lines, native, write_yaml


def load(tmp_path: Path, *overrides: str, **changes: Any) -> RunConfig:
    return load_config(write_yaml(tmp_path / "run.yaml", native(**changes)), overrides)


def refused(tmp_path: Path, *overrides: str, **changes: Any) -> dict[str, str]:
    return error_lines(load, tmp_path, *overrides, **changes)


def foreign(**changes: Any) -> dict[str, Any]:
    """The smallest RLinf file on the Megatron backend."""
    tree = native(
        runner__task_type="reasoning",
        data__type="math",
        data__rollout_batch_size=32,
        actor__training_backend="megatron",
        algorithm={"group_size": 4, "n_minibatches": 2, "training_batch_size_per_gpu": 1},
        actor__lr_sched={"lr_decay_style": "constant", "lr_decay_iters": 10},
        rollout={"model": {"model_path": "/models/x"}},
    )
    for path, value in changes.items():
        from hybrid5d.config.tree import put

        put(tree, path.replace("__", "."), value)
    return tree


def test_a_critics_precision_flags_are_held_to_its_own_precision(tmp_path: Path) -> None:
    rl = {"runner__task_type": "reasoning", "data__rollout_batch_size": 4, "algorithm": {"adv_type": "gae"}}
    critic = {"use_critic_model": True, "model": {"precision": "bf16"}, "optim": {"fp16": True}}
    lines = refused(tmp_path, **rl, critic=critic)
    assert len(lines) == 1 and "critic.model.precision" in lines["critic.optim.fp16"]
    lines = refused(tmp_path, **rl, critic={**critic, "optim": {"fp16": True, "bf16": True}})
    assert len(lines) == 1 and "critic.optim.bf16" in lines["critic.optim.fp16"]


@pytest.mark.parametrize("text", ["2e-05", "2e-5", "0.00002", '"2e-05"', "2.0e-5", "+2e-05", "20.0E-6"])
def test_numbers_without_a_dot_are_numbers(tmp_path: Path, text: str) -> None:
    path = write_yaml(tmp_path / "a.yaml", f"actor: {{optim: {{lr: {text}}}}}\n")
    assert load_config(path).actor.optim.lr == pytest.approx(2e-5, rel=1e-12)


@pytest.mark.parametrize("text", ["fast", "2e-0x", "true", "[1]", "{a: 1}", ".nan", ".inf", "-1e-3", "null"])
def test_no_number_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = write_yaml(tmp_path / "a.yaml", f"actor: {{optim: {{lr: {text}}}}}\n")
    lines = error_lines(load_config, path)
    assert next(iter(lines)).startswith("actor.optim.lr")


@pytest.mark.parametrize("text", ["fp32", "32", '"32"', "32-true", "null"])
def test_spellings_of_fp32(tmp_path: Path, text: str) -> None:
    path = write_yaml(tmp_path / "a.yaml", f"actor: {{model: {{precision: {text}}}}}\n")
    assert load_config(path).actor.model.precision == "fp32"


@pytest.mark.parametrize(
    ("value", "wanted"), [("bf16-mixed", "bf16"), (16, "fp16"), ("16-mixed", "fp16"), ("bf16", "bf16")]
)
def test_spellings_of_16_bits(tmp_path: Path, value: Any, wanted: str) -> None:
    assert load(tmp_path, actor__model__precision=value).actor.model.precision == wanted


@pytest.mark.parametrize("value", ["int8", 8, 16.0, True, ["bf16"]])
def test_unknown_precision(tmp_path: Path, value: Any) -> None:
    assert "actor.model.precision" in refused(tmp_path, actor__model__precision=value)


def test_null_is_not_absent(tmp_path: Path) -> None:
    assert load(tmp_path).actor.lr_sched.lr_warmup_fraction is None
    lines = refused(tmp_path, actor__lr_sched__lr_warmup_iters=None)
    assert "null" in lines["actor.lr_sched.lr_warmup_iters"]


def test_every_schema_key_says_what_it_is() -> None:
    for name, found in schema_keys().items():
        assert found.description, name
        assert not found.is_required(), f"{name} has no default"


def test_references_and_resolvers(tmp_path: Path) -> None:
    changes = {
        "runner__experiment_name": "${runner.task_type}-x",
        "runner__seq_length": "${multiply:${.max_steps},2}",
        "runner__save_interval": "${int_div:7,2}",
        "runner__max_epochs": "${subtract:5,2}",
        "actor__enable_dp_load_balance": "${not:${data.shuffle}}",
        "data__shuffle": True,
        "runner__output_dir": "${oc.env:H5D_NOWHERE,out}",
        "data__val_data_paths": "${data.train_data_paths}",
    }
    config = load(tmp_path, **changes)
    assert config.runner.experiment_name == "sft-x" and config.runner.seq_length == 400
    assert config.runner.save_interval == 3 and config.runner.max_epochs == 3
    assert config.actor.enable_dp_load_balance is False and config.runner.output_dir == "out"
    assert config.data.val_data_paths == ("rows.jsonl",)


@pytest.mark.parametrize("text", ["${nowhere.at.all}", "${unclosed", "${actor.optim.lr}", "${noresolver:1}", "???"])
def test_a_dangling_reference_in_a_needed_key(tmp_path: Path, text: str) -> None:
    lines = refused(tmp_path, actor__optim__lr=text)
    assert "actor.optim.lr" in lines and "resolved" in lines["actor.optim.lr"]
    if "nowhere" in text:
        assert "nowhere" in lines["actor.optim.lr"]


def test_a_dangling_reference_in_a_dropped_key_is_told(tmp_path: Path) -> None:
    config = load(tmp_path, rollout={"model": {"x": "${rollout.path}"}})
    assert config.keys.dropped["rollout.model.x"][1]
    tree = foreign(actor__megatron={"ckpt_convertor": {"hf_model_path": "${rollout.path}"}, "use_hf_ckpt": True})
    config = load_config(write_yaml(tmp_path / "b.yaml", tree))
    assert any("hf_model_path" in n and "rollout.path" in n for n in config.keys.notices)


def test_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "actor.optim.lr=3e-4",
        "+actor.model.context_parallel_size=2",
        "~data.train_data_paths",
        "actor.model.hierarchical_context_parallel_sizes=[1,2]",
        "runner.experiment_name=a=b",
        "cluster.component_placement.actor=0-3",
    )
    assert config.actor.optim.lr == 3e-4 and config.actor.model.context_parallel_size == 2
    assert config.data.train_data_paths is None and config.runner.experiment_name == "a=b"
    assert config.actor.model.hierarchical_context_parallel_sizes == (1, 2)
    assert config.cluster.component_placement == {"actor": "0-3"}


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("actor.optim.lrr=1", "actor.optim.lr"),
        ("+actor.optim.lr=1", "actor.optim.lr=..."),
        ("~actor.optim.lrr", "no such key"),
        ("actor.optim.lr", "no value"),
        ("=3", "no key"),
        ("actor..lr=3", "no key"),
        ("actor.optim.lr=[1", "YAML"),
    ],
)
def test_wrong_overrides_are_refused_by_name(tmp_path: Path, word: str, hint: str) -> None:
    assert hint in " ".join(refused(tmp_path, word).values())


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("actor__model__tensor_model_paralel_size", "tensor_model_parallel_size"),
        ("actor__model__context_paralel_size", "context_parallel_size"),
        ("actor__micro_batchsize", "micro_batch_size"),
        ("actor__optim__learning_rate", "known keys of actor.optim"),
        ("runner__logger__logger_backend", "logger_backends"),
        ("gradient_cliping", "known blocks"),
        ("actr", "actor"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(tmp_path: Path, path: str, near: str) -> None:
    lines = refused(tmp_path, **{path: 1})
    assert near in lines[path.replace("__", ".")]


def test_all_faults_at_once(tmp_path: Path) -> None:
    lines = refused(tmp_path, actor__optim__lr="fast", actor__model__precision="int8", actor__micro_batchsize=1)
    assert len(lines) == 3


def test_blocks_of_other_components_pass_with_one_line(tmp_path: Path) -> None:
    blocks = {name: {"a": 1, "b": {"c": 2}} for name in ("agentloop", "judge", "env", "hydra", "inference")}
    config = load(tmp_path, **blocks)
    assert len(config.keys.notices) == 1 and "agentloop" in config.keys.notices[0]


def test_a_misspelt_key_is_refused_on_the_megatron_backend_too(tmp_path: Path) -> None:
    path = write_yaml(
        tmp_path / "f.yaml", foreign(actor__model__tensor_model_paralel_size=2, actor__model__zzz_flag=True)
    )
    document = load_yaml(path)
    assert [e.key for e in document.errors] == ["actor.model.tensor_model_paralel_size"]
    assert any("zzz_flag" in n for n in document.keys.notices)


COMPOSED = {
    "parent.yaml": "actor: {model: {tensor_model_parallel_size: 1}, seed: 5}\nrunner: {max_steps: 3}\n",
    "child.yaml": "defaults: [parent]\nactor: {model: {tensor_model_parallel_size: 2}}\n",
    "self_first.yaml": "defaults: [_self_, parent]\nactor: {model: {tensor_model_parallel_size: 2}}\n",
    "group.yaml": (
        "defaults:\n  - model/small@actor.model\n  - optim: fast\n  - "
        "sched@actor.lr_sched: null\n  - optional extra: nothing\n"
        "  - override hydra/job_logging: stdout\nactor: {seed: 9}\n"
    ),
    "model/small.yaml": "pipeline_model_parallel_size: 3\n",
    "optim/fast.yaml": "# @package actor.optim\nlr: 0.5\n",
    "optim/slow.yaml": "# @package actor.optim\nlr: 0.25\n",
    "optim/global.yaml": "# @package _global_\nactor: {optim: {lr: 0.125}}\n",
    "nested.yaml": "defaults: [deep/outer]\nactor: {seed: 1}\n",
    "deep/outer.yaml": "# @package actor\ndefaults:\n  - inner@optim\nseed: 2\nmicro_batch_size: 4\n",
    "deep/inner.yaml": "lr: 0.75\n",
    "missing.yaml": "defaults: [nowhere, model/none@actor.model]\nactor: {seed: 1}\n",
    "loop.yaml": "defaults: [loop2]\nactor: {seed: 1}\n",
    "loop2.yaml": "defaults: [loop]\n",
    "searched.yaml": "defaults: [model/far@actor.model]\nhydra: {searchpath: "
    "['file://${oc.env:H5D_PLACES}/config/']}\nactor: {seed: 1}\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in COMPOSED.items():
        write_yaml(tmp_path / "c" / name, text)
    return tmp_path / "c"


def test_the_file_wins_over_its_parent(folder: Path) -> None:
    config = load_config(folder / "child.yaml")
    assert (config.actor.model.tensor_model_parallel_size, config.actor.seed, config.runner.max_steps) == (2, 5, 3)
    assert load_config(folder / "self_first.yaml").actor.model.tensor_model_parallel_size == 1


def test_config_groups_and_packages(folder: Path) -> None:
    config = load_config(folder / "group.yaml")
    assert config.actor.model.pipeline_model_parallel_size == 3 and config.actor.optim.lr == 0.5
    assert load_config(folder / "group.yaml", ["optim=slow"]).actor.optim.lr == 0.25
    assert load_config(folder / "group.yaml", ["optim=global"]).actor.optim.lr == 0.125
    nested = load_config(folder / "nested.yaml")
    assert (nested.actor.seed, nested.actor.micro_batch_size, nested.actor.optim.lr) == (1, 4, 0.75)


def test_a_missing_file_is_named(folder: Path) -> None:
    text = " ".join(error_lines(load_config, folder / "missing.yaml").values())
    assert "nowhere.yaml" in text or "model/none.yaml" in text
    assert len(load_yaml(folder / "missing.yaml").errors) == 2


def test_a_circle_of_files_is_named(folder: Path) -> None:
    assert "loop.yaml -> loop2.yaml -> loop.yaml" in " ".join(error_lines(load_config, folder / "loop.yaml").values())


def test_searchpath(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "H5D_PLACES" in " ".join(str(e) for e in load_yaml(folder / "searched.yaml").errors)
    write_yaml(tmp_path / "far" / "config" / "model" / "far.yaml", "context_parallel_size: 4\n")
    monkeypatch.setenv("H5D_PLACES", str(tmp_path / "far"))
    assert load_config(folder / "searched.yaml").actor.model.context_parallel_size == 4


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"a": 1}, "actor"),
        ({"actor": {"training_backend": "fsdp"}, "runner": {"task_type": "reasoning"}}, "actor.training_backend"),
        ({"actor": {"training_backend": "fsdp"}, "runner": {"task_type": "embodied"}}, "runner.task_type"),
        ({"runner": {"task_type": "reasoning_eval"}, "actor": {}}, "runner.task_type"),
        ({"defaults": ["x"], "actor": {"training_backend": "fsdp"}}, "actor.training_backend"),
    ],
)
def test_what_is_no_training_run_is_refused_in_one_line(tmp_path: Path, tree: dict, key: str) -> None:
    assert list(error_lines(load_config, write_yaml(tmp_path / "a.yaml", tree))) == [key]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"actor__model__expert_model_parallel_size": 2}, "actor.model.expert_model_parallel_size"),
        ({"actor__model__model_type": "qwen3_moe"}, "actor.model.expert_model_parallel_size"),
        ({"rollout__model__model_type": "deepseek_v3"}, "actor.model.expert_model_parallel_size"),
        ({"actor__model__fp8": "hybrid"}, "actor.model.fp8"),
        ({"actor__model__mcore_customization_config": {"x": 1}}, "actor.model.mcore_customization_config"),
        ({"cluster__auto_scheduler": True}, "cluster.auto_scheduler"),
        ({"runner__only_eval": True}, "runner.only_eval"),
        (
            {"actor__megatron__num_distributed_optimizer_instances": 2},
            "actor.megatron.num_distributed_optimizer_instances",
        ),
        ({"actor__megatron__use_torch_fsdp2": True}, "actor.megatron.use_torch_fsdp2"),
        (
            {"actor__megatron__encoder_tensor_model_parallel_size": 2},
            "actor.megatron.encoder_tensor_model_parallel_size",
        ),
        ({"actor__model__is_lora": True}, "actor.model.is_lora"),
        ({"actor__seed": 0}, "actor.seed"),
        ({"runner__save_interval": 7, "runner__val_check_interval": 2}, "runner.save_interval"),
        ({"actor__lr_sched__start_weight_decay": 0.1}, "actor.lr_sched.start_weight_decay"),
        ({"actor__lr_sched__lr_decay_style": "cosine"}, "actor.lr_sched.start_weight_decay"),
        ({"algorithm__adv_type": "ppo"}, "algorithm.adv_type"),
        ({"algorithm__loss_type": "dpo"}, "algorithm.loss_type"),
        ({"algorithm__clip_ratio_c": 1.0}, "algorithm.clip_ratio_c"),
        ({"algorithm__max_num_gen_batches": 2}, "algorithm.max_num_gen_batches"),
        ({"reward": {"use_reward_model": True}}, "reward.use_reward_model"),
        ({"critic": {"model": {"fp8": "hybrid"}}}, "critic.model.fp8"),
        (
            {"actor__megatron__use_tp_pp_dp_mapping": True, "actor__model__pipeline_model_parallel_size": 2},
            "actor.megatron.use_tp_pp_dp_mapping",
        ),
        ({"data__max_prompt_length": 512}, "data.max_prompt_length"),
        (
            {"actor__model__megatron_checkpoint": "/m", "actor__megatron": {"use_hf_ckpt": True}},
            "actor.model.megatron_checkpoint",
        ),
    ],
)
def test_refusals_of_rlinf_files(tmp_path: Path, changes: dict, key: str) -> None:
    assert not load_yaml(write_yaml(tmp_path / "ok.yaml", foreign())).errors
    assert key in error_lines(load_config, write_yaml(tmp_path / "a.yaml", foreign(**changes)))


def test_megatron_weights_without_a_hugging_face_folder(tmp_path: Path) -> None:
    tree = foreign(
        actor__model__megatron_checkpoint="/m", actor__megatron={"use_hf_ckpt": False}, actor__model__model_path=None
    )
    tree["rollout"]["model"] = {}
    assert "actor.model.megatron_checkpoint" in error_lines(load_config, write_yaml(tmp_path / "a.yaml", tree))


def test_older_names_of_rlinf(tmp_path: Path) -> None:
    tree = foreign(
        rollout={"model_dir": "/models/old"}, actor__model__model_path=None, actor__checkpoint_load_path="/m"
    )
    config = load_config(write_yaml(tmp_path / "a.yaml", tree))
    assert config.actor.model.model_path == "/models/old"
    assert any("checkpoint_load_path" in n for n in config.keys.notices)


def test_conflicting_precision_flags_name_both_keys(tmp_path: Path) -> None:
    lines = refused(tmp_path, actor__model__precision="bf16", actor__optim__fp16=True)
    assert len(lines) == 1 and "actor.model.precision" in lines["actor.optim.fp16"]
    lines = refused(tmp_path, actor__model__precision="bf16", actor__optim__fp16=True, actor__optim__bf16=True)
    assert len(lines) == 1 and "actor.optim.bf16" in lines["actor.optim.fp16"]


@pytest.mark.parametrize("text", ["2e-05", "3e-4", "1e-10", "1e5", "1.0e5", "1E+3", "-2e-3", ".5"])
def test_yaml_numbers_are_floats(text: str) -> None:
    value = parse_yaml(f"a: {text}", "t")["a"]
    assert isinstance(value, float) and value == float(text)


def test_dumped_text_reads_back_equal() -> None:
    tree = {
        "a": "1e5",
        "b": "yes",
        "c": "12:30",
        "d": 1e-6,
        "e": None,
        "f": [1, 2.5, "x"],
        "g": "2024-01-01",
        "h": "0x1",
        "i": "",
    }
    assert parse_yaml(dump_yaml(tree), "t") == tree


def test_importing_config_and_plan_is_light_and_pure() -> None:
    code = (
        "import sys; import hybrid5d.load, hybrid5d.plan.run, hybrid5d.plan.convert;"
        "print(len(sys.modules), [m for m in ('torch', 'deepspeed', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(
        maxsplit=1
    )
    assert int(out[0]) < 700 and out[1].strip() == "[]"  # modules; torch alone would add 1,500


def test_the_other_rank_order_is_the_same_without_a_pipeline(tmp_path: Path) -> None:
    tree = foreign(actor__megatron__use_tp_pp_dp_mapping=True)
    assert not load_yaml(write_yaml(tmp_path / "a.yaml", tree)).errors


def test_a_scale_that_deepspeed_rounds_is_told(tmp_path: Path) -> None:
    config = load(
        tmp_path, actor__model__precision="fp16", actor__optim={"initial_loss_scale": 1000, "min_loss_scale": 0.5}
    )
    assert sum("DeepSpeed takes" in n for n in config.keys.notices) == 2
