"""Keys of a YAML that no other test names: each is read from a file and changes what it should, or is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid5d.data.build import loader_from_plan
from hybrid5d.errors import DataError
from hybrid5d.launch.run import introduction
from hybrid5d.load import load_config
from hybrid5d.plan.convert import Translation, translate
from hybrid5d.plan.report import build_report
from hybrid5d.plan.run import RunPlan, build_plan
from tests.config_kit import error_lines, native, write_model, write_yaml

M, LOG = "actor__model__", "runner__logger__"
RL: dict[str, Any] = {
    "runner__task_type": "reasoning",
    "actor__training_backend": "megatron",
    "data__type": "math",
    "data__rollout_batch_size": 32,
    "algorithm": {"group_size": 4, "n_minibatches": 2},
    "actor__lr_sched": {"lr_decay_style": "constant"},
}  # fmt: skip  the smallest RLinf file on the Megatron backend


def translated(tmp_path: Path, world: int | None = None, **changes: Any) -> Translation:
    """What `convert` makes of a YAML; its model folder is not there, so numbers come from the YAML."""
    return translate(write_yaml(tmp_path / "run.yaml", native(**changes)), gpus_per_node=4, world_size=world)


def run_of(tmp_path: Path, world: int = 1, records: str = "{}\n", **changes: Any) -> RunPlan:
    """The plan of a training run from a YAML, with a model folder and one data file."""
    (tmp_path / "rows.jsonl").write_text(records)
    ready = {
        f"{M}model_path": str(write_model(tmp_path / "model")),
        "data__train_data_paths": [str(tmp_path / "rows.jsonl")],
        "data__cache_dir": str(tmp_path / "cache"),
    }
    return build_plan(load_config(write_yaml(tmp_path / "run.yaml", native(**{**ready, **changes}))), world)


def report(found: Translation | RunPlan, key: str) -> dict[str, Any]:
    """The report's line of a key."""
    lines = found.report if isinstance(found, Translation) else build_report(found)
    return next(line for line in lines if line["key"] == key)


def told(found: Translation | RunPlan, word: str) -> list[str]:
    """Notices that name a key."""
    return [n for n in found.notices if word in n]


WRONG = {
    "runner.logger.log_path": [["logs"], True],
    "runner.cpu_backend": ["mpi", None, True],
    **{f"data.{shape}_key": [["a"], None] for shape in ("messages", "prompt", "response")},
    **{f"data.{shape}_key": [{"a": 1}, True] for shape in ("instruction", "input", "output")},
    "data.train_on": ["user", None, True],
    "algorithm.loss_agg_func": ["token_mean", "seq-mean", None],  # RLinf: NotImplementedError
    "algorithm.use_valid_token_scale": [1, "maybe"],
    "algorithm.multi_agent": [1, "maybe"],
    "actor.model.encoder_seq_length": [0, "long", True],
    **{f"actor.model.{n}": [0, 2.5, True] for n in ("num_layers", "ffn_hidden_size", "padded_vocab_size")},
    "actor.optim.optimizer_offload_fraction": [-0.1, 1.5, True],
    "actor.lr_sched.lr_wsd_decay_style": ["square", None, 1],
    "actor.megatron.distributed_timeout_minutes": [0, -1, "soon", 1e12],
    "cluster.node_groups": ["a100", 3],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_wrong_values_are_refused_by_key(tmp_path: Path, key: str, value: Any) -> None:
    path = write_yaml(tmp_path / "run.yaml", native(**{key.replace(".", "__"): value}))
    lines = error_lines(load_config, path)
    assert list(lines) == [key] and lines[key].startswith(f"{key}={value!r}: ") and ". Fix: " in lines[key]


GROUPS = [{"label": "a100", "node_ranks": "0,2-3"}, {"label": "h100", "node_ranks": 1}, {"label": 7}]


@pytest.mark.parametrize(("label", "nodes"), [("a100", 3), ("h100", 1), ("7", 4)])
def test_a_node_group_gives_its_nodes_to_the_actor(tmp_path: Path, label: str, nodes: int) -> None:
    place = {"cluster__component_placement": {"actor": {"node_group": label, "placement": "all"}}}
    changes = {"cluster__num_nodes": 4, "cluster__node_groups": GROUPS, "actor__global_batch_size": 48, **place}
    found = translated(tmp_path, **changes)
    assert not found.errors and found.plan is not None
    assert found.plan.layout.world_size == nodes * 4  # 4 GPUs per node
    assert report(found, "cluster.component_placement.actor.node_group")["disposition"] == "engine"
    assert run_of(tmp_path, nodes * 2, **changes).layout.dp == nodes * 2  # a launch says how many there are


BAD_GROUPS: list[tuple[list[Any], str, str]] = [
    (["a100"], "[0]", "label"),
    ([{"node_ranks": 0}], "[0]", "label"),
    ([{"label": "cluster"}], "[0].label", "RLinf"),
    ([{"label": "a"}, {"label": "a"}], "[1].label", "two groups"),
    ([{"label": "a", "node_ranks": "1-4"}], "[0].node_ranks", "0..3"),
    ([{"label": "a", "node_ranks": "1,0-2"}], "[0].node_ranks", "twice"),
    ([{"label": "a", "node_ranks": [0, 1]}], "[0].node_ranks", "list"),
]


@pytest.mark.parametrize(("groups", "key", "word"), BAD_GROUPS)
def test_node_groups_that_are_refused(tmp_path: Path, groups: list[Any], key: str, word: str) -> None:
    (error,) = translated(tmp_path, cluster__num_nodes=4, cluster__node_groups=groups).errors
    assert error.key == f"cluster.node_groups{key}" and word in error.rule and error.fix
    place = {"cluster__component_placement": {"actor": {"node_group": "b200", "placement": "all"}}}
    (error,) = translated(tmp_path, cluster__num_nodes=4, cluster__node_groups=GROUPS, **place).errors
    assert "a100, h100, 7" in error.rule and "cluster.node_groups" in error.fix


@pytest.mark.parametrize("log_path", [None, "elsewhere"])
def test_log_path_holds_every_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_path: str | None) -> None:
    from hybrid5d.train import metrics

    folders: dict[str, Path] = {}
    monkeypatch.setattr(metrics, "TensorBoard", lambda folder: folders.update(tensorboard=folder))
    wandb = SimpleNamespace(init=lambda **options: folders.update(wandb=Path(options["dir"])))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logger = {f"{LOG}log_path": log_path, f"{LOG}logger_backends": ["tensorboard", "wandb"]}
    plan = run_of(tmp_path, runner__output_dir="out", runner__experiment_name="e", **logger)
    metrics.open_trackers(plan.config, Path("out/e"))
    wanted = Path(log_path or "out/e")  # RLinf: log_path/tensorboard, log_path/wandb
    assert folders == {"tensorboard": wanted / "tensorboard", "wandb": wanted}
    assert "tensorboard" not in plan.deepspeed  # our own metrics feed it
    block = translated(tmp_path, runner__output_dir="out", runner__experiment_name="e", **logger).plan
    assert block is not None and block.deepspeed["tensorboard"]["output_path"] == f"{wanted}/tensorboard"


HEAD, TAIL, BOS, EOS = b"<|user|>\nhi", b"\n<|assistant|>\n", 256, 257  # the byte tokenizer's chat format
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SHAPES: dict[str, dict[str, Any]] = {
    "messages_key": {"x": TURNS}, "prompt_key": {"x": "hi", "response": "yo"},
    "response_key": {"prompt": "hi", "x": "yo"}, "instruction_key": {"x": "hi", "output": "yo"},
    "input_key": {"instruction": "hi", "x": "now", "output": "yo"}, "output_key": {"instruction": "hi", "x": "yo"},
}  # fmt: skip


def first_row(plan: RunPlan) -> Any:
    """The run's first row that is no filling."""
    rows = [row for mb in loader_from_plan(plan, 0).step(0).micro_batches for row in mb]
    return next(document for document, *_ in rows if document.row_id >= 0)


def chat(tmp_path: Path, record: Any, **changes: Any) -> RunPlan:
    return run_of(tmp_path, records=json.dumps(record) + "\n", data__type="chat", **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_field_names_of_conversations(tmp_path: Path, name: str) -> None:
    record, more = SHAPES[name], b"\n\nnow" if name == "input_key" else b""
    row = first_row(chat(tmp_path, record, **{f"data__{name}": "x"}))
    assert list(row.input_ids) == [BOS, *HEAD, *more, *TAIL, *b"yo", EOS]
    if name == "input_key":  # the one field that may be absent
        assert list(first_row(chat(tmp_path, record)).input_ids) == [BOS, *HEAD, *TAIL, *b"yo", EOS]
        return
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*" + name.removesuffix("_key")):
        loader_from_plan(chat(tmp_path, record), 0)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_train_on_decides_the_targets(tmp_path: Path, train_on: str) -> None:
    row = first_row(chat(tmp_path, {"messages": TURNS}, data__train_on=train_on))
    ids = [BOS, *HEAD, *TAIL, *b"yo", EOS]
    answer = len(ids) - 3  # "y", "o" and the end of the turn
    wanted = [t if train_on == "all" or place >= answer else -100 for place, t in enumerate(ids)][1:]
    assert list(row.labels) == [*wanted, -100]  # shifted: what comes next, nothing after the last


LOSS = {"loss_agg_func": "seq-mean-token-sum", "use_valid_token_scale": True}


@pytest.mark.parametrize("name", LOSS)
def test_keys_of_the_rl_loss_act_in_rl_and_say_so_elsewhere(tmp_path: Path, name: str) -> None:
    written = {f"algorithm__{name}": LOSS[name]}
    outside, inside = translated(tmp_path, 8, **written), translated(tmp_path, 8, **RL, **written)
    assert len(told(outside, f"{name}={LOSS[name]} is read in RL only")) == 1 and not told(inside, name)
    assert report(outside, f"algorithm.{name}")["disposition"] == "dropped"
    line = report(inside, f"algorithm.{name}")
    assert line["disposition"] == "engine" and inside.to_dict()["engine"]["algorithm"][name] == LOSS[name]


RL_NOTICES: list[tuple[dict[str, Any], str]] = [
    ({"algorithm__normalize_advantages": True}, "RLinf does it twice"),
    ({"algorithm__early_stop_imp_ratio": 5.0}, "once per optimizer step"),
    ({"rollout__rollout_backend": "vllm"}, "generated by the training engine"),
    ({"algorithm__adv_type": "gae", "algorithm__gamma": 0.9, "critic__use_critic_model": True}, "padding"),
    ({"algorithm__sampling_params": {"temperature": 0.7}, f"{M}pipeline_model_parallel_size": 2}, "between pipeline"),
    ({"agentloop": {"name": "search"}}, "answered in one turn"),
]


@pytest.mark.parametrize(("changes", "words"), RL_NOTICES)
def test_where_rl_differs_from_rlinf_is_told(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert not told(translated(tmp_path, 8, **RL), words)
    found = translated(tmp_path, 8, **{**RL, **changes})
    assert not found.errors and len(told(found, words)) == 1


def test_a_critic_is_shown_key_by_key(tmp_path: Path) -> None:
    critic = {"critic": {"use_critic_model": True, "model": {"tensor_model_parallel_size": 2}}}
    found = translated(tmp_path, 8, **RL, **critic)
    assert found.to_dict()["engine"]["critic"]["model"]["tensor_model_parallel_size"] == 2
    assert report(found, "critic.model.tensor_model_parallel_size")["disposition"] == "engine"
    critic["critic"]["use_critic_model"] = False
    line = report(translated(tmp_path, 8, **RL, **critic), "critic.model.tensor_model_parallel_size")
    assert line["disposition"] == "dropped" and line["why"] == "critic.use_critic_model is false"


def test_a_critics_keys_without_effect_are_told_as_the_actors(tmp_path: Path) -> None:
    """Loss scale, dead rates, flags against the precision, and what the actor's value replaces."""
    own = {
        "use_critic_model": True, "model": {"precision": "bf16", "seq_length": 77},
        "optim": {"loss_scale": 128.0, "min_lr": 1e-9, "bf16": False}, "lr_sched": {"max_lr": 3.0},
    }  # fmt: skip
    found = translated(tmp_path, 8, **RL, critic=own)
    for words in ("bf16 with loss_scale 128", "optim.min_lr=1e-09 is dead", "lr_sched.max_lr=3 is dead",
                  "optim.bf16=False contradicts precision bf16"):  # fmt: skip
        assert len(told(found, f"critic: {words}")) == 1, words
    fates = {key: report(found, f"critic.{key}") for key in ("optim.loss_scale", "optim.min_lr", "model.seq_length")}
    assert [line["disposition"] for line in fates.values()] == ["dropped", "overridden", "overridden"]
    for key, words in (("optim.loss_scale", "only fp16"), ("model.seq_length", "the critic has the actor's")):
        assert words in fates[key]["why"]
    assert report(found, "critic.model.precision")["disposition"] == "engine"
    own["use_critic_model"] = False
    assert not told(translated(tmp_path, 8, **RL, critic=own), "critic:")


@pytest.mark.parametrize("key", ["algorithm__multi_agent", "agentloop__is_dynamic_rollout_batch"])
@pytest.mark.parametrize(
    ("prompts", "alone", "many"),
    [(32, "", ""), (20, "20 % 8 = 4", ""), (6, "6 % 8 = 6", "each of the dp=8 ranks needs a prompt")],
)
def test_multi_agent_frees_prompts_from_dp(tmp_path: Path, key: str, prompts: int, alone: str, many: str) -> None:
    size = {**RL, "data__rollout_batch_size": prompts}
    for value, wanted in ((False, alone), (True, many)):
        found = translated(tmp_path, 8, **size, **{key: value})
        assert bool(found.errors) == bool(wanted) and wanted in "".join(map(str, found.errors))
        assert bool(told(found, "multi-agent actor: the real global batch")) == value


@pytest.mark.parametrize(
    ("runner", "model", "encoder", "length"), [(None, None, 16, 16), (None, 24, 16, 24), (32, None, 16, 32)]
)
def test_encoder_seq_length_is_the_last_word_on_row_length(
    tmp_path: Path, runner: int | None, model: int | None, encoder: int, length: int
) -> None:
    keys = {"runner__seq_length": runner, f"{M}seq_length": model, f"{M}encoder_seq_length": encoder}
    (tmp_path / "text.txt").write_text("a" * 100)
    plan = run_of(tmp_path, data__type="text", **keys, data__train_data_paths=[str(tmp_path / "text.txt")])
    assert loader_from_plan(plan, 0).dataset.lengths.max() == length
    found = translated(tmp_path, 1, **keys, runner__enable_dynamic_batch_size=True, runner__max_tokens_per_mbs=15)
    assert found.to_dict()["engine"]["seq_length"] == length and f"seq_length={length}" in found.errors[0].rule
    assert bool(told(plan, f"encoder_seq_length={encoder} is not read")) != (length == encoder)
    assert report(plan, "actor.model.encoder_seq_length")["disposition"] == (
        "engine" if length == encoder else "overridden"
    )


@pytest.mark.parametrize(
    "keys, told", [({}, False), ({"max_steps": -1}, True), ({"max_steps": -1, "max_epochs": 2}, False)]
)
def test_a_run_without_end_is_told(tmp_path: Path, keys: dict[str, int], told: bool) -> None:
    plan = run_of(tmp_path, records='{"input_ids": [1, 2]}\n', **{f"runner__{k}": v for k, v in keys.items()})
    lines = introduction(plan, 1, loader_from_plan(plan, 0), ())
    assert any("neither runner.max_steps nor runner.max_epochs ends the run" in line for line in lines) == told


SIZES = {"num_layers": (30, 6), "ffn_hidden_size": (96, 128), "padded_vocab_size": (300, 259)}


@pytest.mark.parametrize("name", SIZES)
def test_config_json_wins_over_sizes_of_the_yaml_and_says_so(tmp_path: Path, name: str) -> None:
    written, real = SIZES[name]
    plan = run_of(tmp_path, 4, **{f"{M}{name}": written, f"{M}pipeline_model_parallel_size": 4})
    assert told(plan, name) == [f"actor.model.{name}={written} is overwritten by config.json: {real}"]
    assert sum(plan.stages) == 6 and report(plan, f"actor.model.{name}")["disposition"] == "overridden"
    assert not told(run_of(tmp_path, **{f"{M}{name}": real}), name)


def test_sizes_of_the_yaml_count_where_no_folder_is(tmp_path: Path) -> None:
    pipeline = {f"{M}pipeline_model_parallel_size": 4}
    assert translated(tmp_path, 4, **pipeline).plan.stages == ()  # type: ignore[union-attr]
    for layers, wanted in ((8, [2, 2, 2, 2]), (30, [7, 7, 8, 8])):
        found = translated(tmp_path, 4, **pipeline, **{f"{M}num_layers": layers})
        assert sorted(found.plan.stages) == wanted  # type: ignore[union-attr]
    tp = {f"{M}tensor_model_parallel_size": 4, f"{M}num_attention_heads": 8}
    assert not translated(tmp_path, 4, **tp, **{f"{M}ffn_hidden_size": 100}).errors
    (error,) = translated(tmp_path, 4, **tp, **{f"{M}ffn_hidden_size": 102}).errors
    assert "MLP width 102" in error.rule and error.fix == "use one of 1, 2"  # divides 102 and 8
    folder = str(write_model(tmp_path / "odd", intermediate_size=130))
    lines = error_lines(run_of, tmp_path, 4, **tp, **{f"{M}model_path": folder})  # and so before a run starts
    assert "MLP width 130" in lines["actor.model.tensor_model_parallel_size"]
    for vocabulary, padded in ((1000, False), (1001, True)):
        found = translated(tmp_path, 4, **RL, **tp, **{f"{M}padded_vocab_size": vocabulary})
        assert bool(told(found, f"vocabulary {vocabulary} over tp=4")) == padded
        assert not any("vocabulary" in line for line in found.plan.unchecked)


@pytest.mark.parametrize(("fraction", "stage", "ratio"), [(0.5, 1, 1.0), (0.5, 3, 0.5), (1.0, 1, 1.0)])
def test_offload_is_what_deepspeed_takes(tmp_path: Path, fraction: float, stage: int, ratio: float) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    key = "actor.optim.optimizer_offload_fraction"
    asked = {key.replace(".", "__"): fraction, "actor__deepspeed": {"zero_optimization": {"stage": stage}}}
    on = {**asked, "actor__optim__optimizer_cpu_offload": True}  # our own trainer refuses it
    found = translated(tmp_path, 1, **on)
    assert not found.errors and found.plan is not None
    block = DeepSpeedZeroConfig(**found.plan.deepspeed["zero_optimization"])  # refuses a part below stage 3
    assert block.offload_optimizer is not None and block.offload_optimizer.ratio == ratio
    assert bool(told(found, f"optimizer_offload_fraction={fraction:g} becomes 1")) == (fraction != ratio)
    assert report(found, key)["disposition"] == ("deepspeed" if fraction == ratio else "overridden")
    off = translated(tmp_path, 1, **asked)
    assert off.plan is not None and "offload_optimizer" not in off.plan.deepspeed["zero_optimization"]
    assert "optimizer_cpu_offload" in error_lines(run_of, tmp_path, **on)["actor.optim.optimizer_cpu_offload"]
    assert report(off, key)["disposition"] == "dropped" and not told(off, "optimizer_offload_fraction")


QUARTER = {"exponential": 2 * 0.5**0.25 - 1, "linear": 0.75, "cosine": (1 + math.sqrt(0.5)) / 2, "minus_sqrt": 0.5}


@pytest.mark.parametrize("style", [None, *QUARTER])
def test_wsd_decay_style_shapes_the_tail(tmp_path: Path, style: str | None) -> None:
    sched: dict[str, Any] = {"lr_decay_style": "WSD", "lr_decay_iters": 100, "lr_wsd_decay_iters": 40, "min_lr": 1e-4}
    given = {"actor__lr_sched": sched | ({"lr_wsd_decay_style": style} if style else {})}
    lr = run_of(tmp_path, **given).schedule.lr
    wanted = 1e-4 + 9e-4 * QUARTER[style or "exponential"]  # Megatron's formula a quarter into the tail
    assert (lr(60), lr(70), lr(101)) == pytest.approx((1e-3, wanted, 1e-4), rel=1e-12)
    other = run_of(tmp_path, actor__lr_sched__lr_wsd_decay_style=style or "linear")  # a cosine schedule
    assert report(other, "actor.lr_sched.lr_wsd_decay_style")["disposition"] == "dropped"


def test_the_timeout_of_rlinf_is_the_default(tmp_path: Path) -> None:
    assert translated(tmp_path).to_dict()["engine"]["distributed_timeout_minutes"] == 10
