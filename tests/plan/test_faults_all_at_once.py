"""Faults of different stages (types, layout, batch, rules, disk) in one YAML are told in one start; no false ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid5d.cli import main
from hybrid5d.config.fields import Block
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigErrors, touches
from hybrid5d.launch.preflight import Argv, plan_run
from hybrid5d.plan import draft as draft_module
from hybrid5d.plan.convert import translate
from hybrid5d.plan.draft import MODEL_NUMBERS, Draft
from hybrid5d.plan.rules import RULES, RUN_RULES
from tests.config_kit import native, write_model, write_yaml

M, O, L = "actor.model.", "actor.optim.", "actor.lr_sched."
LR = f"{O}lr=-1: should be greater than or equal to 0. Fix: peak learning rate; default 0.001"
MICRO = (
    "actor.micro_batch_size='four': should be a valid integer, unable to parse string as an integer. "
    "Fix: rows per dp rank and micro-batch; default 1"
)
SP = (
    f"{M}sequence_parallel=True: sequence parallelism cuts activations over the tensor-parallel group, and "
    "tensor_model_parallel_size is 1. Fix: set it to false, or tensor_model_parallel_size >= 2"
)
HEADS = f"{M}tensor_model_parallel_size=3: num_attention_heads=8 is not a multiple of it. Fix: use one of 1, 2, 4, 8"
WORLD_2 = (
    "world_size=3: not a multiple of tensor_model_parallel_size 1 x pipeline_model_parallel_size 2 x "
    "context_parallel_size 1 = 2. Fix: start 2 or 4 processes, or lower a degree"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the native YAML runs: model (8 heads, 2 kv heads, 6 layers, MLP 96) and data are there."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", intermediate_size=96)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    return tmp_path


def write(here: Path, **changes: Any) -> Path:
    return write_yaml(here / "run.yaml", native(**{"actor__model__load_weights": False, **changes}))


def lines(path: Path, world: int, *words: str) -> list[str]:
    """What a start on `world` processes says."""
    with pytest.raises(ConfigErrors) as caught:
        plan_run(Argv(path, words), world)
    return str(caught.value).split("\n")


TYPE, LAYOUT = {"actor__optim__lr": -1, "actor__micro_batch_size": "four"}, {"actor__model__sequence_parallel": True}


def test_three_stages_in_one_report(here: Path) -> None:
    """Types, then layout, then disk; once each; in the order of the stages."""
    path = write(here, **TYPE, **LAYOUT, data__train_data_paths=["gone.jsonl"])
    gone = "data.train_data_paths='gone.jsonl': no such file or folder. Fix: check the path"
    assert lines(path, 1) == [MICRO, LR, SP, gone]


@pytest.mark.parametrize(
    "changes, world, told",
    [
        ({"actor__model__tensor_model_parallel_size": 3}, 3, [LR, HEADS]),
        ({"actor__model__pipeline_model_parallel_size": 2}, 3, [LR, WORLD_2]),
        (
            {"actor__global_batch_size": 7}, 2,
            [LR, "actor.global_batch_size=7: global batch 7 is not a multiple of micro batch 1 x dp 2 = 2 (gradient "
             "accumulation = 7 / 2 = 3.5). Fix: use a global batch of 6 or 8, or change actor.micro_batch_size"],
        ),
        (
            {"actor__deepspeed__zero_optimization__stage": 3, "actor__model__pipeline_model_parallel_size": 2}, 2,
            [LR, "actor.deepspeed.zero_optimization.stage=3: ZeRO 3 does not work with pipeline_model_parallel_size=2. "
             "Fix: use stage: 1, or pipeline_model_parallel_size: 1"],
        ),
        (
            {"actor__lr_sched__lr_decay_style": "WSD"}, 1,
            [LR, f"{L}lr_wsd_decay_iters=None: style WSD needs the length of its tail. Fix: write it"],
        ),
        (
            {"actor__deepspeed__zero_optimisation": {"stage": 1}}, 1,
            [LR, "actor.deepspeed.zero_optimisation={'stage': 1}: unknown DeepSpeed key. "
             "Fix: did you mean zero_optimization?"],
        ),
        (
            {"actor__optim__fp16": True}, 1,
            [LR, f"{O}fp16=True: {O}fp16=True contradicts {M}precision=None. "
             f"Fix: remove it, or set {M}precision: fp16"],
        ),
        (
            {"actor__model__num_layers": 0, "actor__model__load_weights": 3,
             "actor__model__tensor_model_parallel_size": 3}, 3,
            [f"{M}num_layers=0: should be greater than or equal to 1. "
             "Fix: decoder layers; the folder's config.json wins; default None",
             f"{M}load_weights=3: true or false is needed, not a number. Fix: read weights from the folder's "
             "safetensors; null: where there are any; false: random start; default None",
             LR, HEADS],
        ),
    ],
    ids=["heads", "world", "batch", "zero", "schedule", "deepspeed", "precision", "model_keys"],
)  # fmt: skip
def test_each_later_stage_is_heard_beside_a_type_fault(
    here: Path, changes: dict[str, Any], world: int, told: list[str]
) -> None:
    found = lines(write(here, actor__optim__lr=-1, **changes), world)
    assert sorted(found) == sorted(told)  # the order inside pydantic's own faults is the schema's
    assert found[-1] == told[-1]


@pytest.mark.parametrize(
    "changes, world, key",
    [
        # In each the default of the refused key would break a rule: tp 1 with SP, pp 1 with a last stage of 2, ...
        ({"actor__model__tensor_model_parallel_size": "two", **LAYOUT}, 2, f"{M}tensor_model_parallel_size"),
        (
            {"actor__model__pipeline_model_parallel_size": 0, "actor__model__decoder_last_pipeline_num_layers": 2}, 2,
            f"{M}pipeline_model_parallel_size",
        ),
        ({"actor__model__context_parallel_size": 1.5, "actor__global_batch_size": 6}, 4, f"{M}context_parallel_size"),
        ({"actor__micro_batch_size": [4], "actor__global_batch_size": 7}, 2, "actor.micro_batch_size"),
        ({"actor__optim__lr": "big", "actor__lr_sched__min_lr": 0.1}, 1, f"{O}lr"),
        ({"actor__lr_sched__lr_decay_iters": -5, "actor__lr_sched__lr_warmup_iters": 200000}, 1, f"{L}lr_decay_iters"),
        ({"data__train_data_paths": 5}, 1, "data.train_data_paths"),
        ({"data": [1]}, 1, "data"),
        ({"actor__model__model_path": ["model"], "actor__model__num_attention_heads": 9,
          "actor__model__tensor_model_parallel_size": 2}, 2, f"{M}model_path"),
        ({"actor__model__precision": "fp7", "actor__optim__bf16": True}, 1, f"{M}precision"),
        ({"runner__max_tokens_per_mbs": "many", "runner__enable_dynamic_batch_size": True}, 1,
         "runner.max_tokens_per_mbs"),
        ({"actor__deepspeed__train_batch_size": 8, "actor__micro_batch_size": -2}, 1, "actor.micro_batch_size"),
        ({"actor__deepspeed": {"optimizer": {"params": {"lr": 0.5}}}, "actor__optim__lr": "half"}, 1, f"{O}lr"),
        ({"cluster__num_nodes": "2n", "cluster__component_placement": {"actor": "8-15"},
          "actor__model__tensor_model_parallel_size": 2}, 8, "cluster.num_nodes"),
    ],
)  # fmt: skip
def test_no_fault_that_only_a_default_makes(here: Path, changes: dict[str, Any], world: int, key: str) -> None:
    (line,) = lines(write(here, **changes), world)
    assert line.startswith(f"{key}=")
    for size in (world, None):
        translated = translate(here / "run.yaml", world_size=size)
        assert [str(e) for e in translated.errors] == [line] and translated.plan is None


def test_keys_without_a_value_of_their_own_are_invalid_too(here: Path) -> None:
    """A reference that dangles, a misspelt key, a key in the wrong block, a refused word: SP may well be legal."""
    sp = {"actor__model__sequence_parallel": True}
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"actor__model__tensor_model_parallel_size": "${nowhere.tp}"}, (), "the reference cannot be resolved"),
        ({"actor__model__tensor_model_parallel_sise": 2}, (), "unknown key"),
        ({"actor__tensor_model_parallel_size": 2}, (), "unknown key"),
        ({}, (f"{M}tensor_model_paralel_size=2",), "neither the file nor the schema has this key"),
        ({}, (f"+{M}tensor_model_parallel_size=2",), "+key adds a key, and this one exists"),
        ({"defaults": ["gone"]}, (), "gone.yaml does not exist"),
    ]
    for changes, words, rule in cases:
        tree = native(**sp, actor__model__load_weights=False)
        if not words:
            del tree["actor"]["model"]["tensor_model_parallel_size"]
        for key, value in changes.items():
            *parents, last = key.split("__")
            holder = tree
            for parent in parents:
                holder = holder[parent]
            holder[last] = value
        found = lines(write_yaml(here / "run.yaml", tree), 2, *words)
        assert len(found) == 1 and rule in found[0], (changes, found)


def test_an_unknown_key_does_not_hide_what_it_cannot_mean(here: Path) -> None:
    found = lines(write(here, actor__optim__learning_rat=1, **LAYOUT), 1)
    assert [line.split("=")[0] for line in found] == [f"{O}learning_rat", f"{M}sequence_parallel"]


def test_what_refers_to_a_invalid_key_is_invalid(here: Path) -> None:
    """lr_decay_iters is 5 because max_steps is 0.5: that 10 steps of warm-up do not fit in is no fault of theirs."""
    changes = {"runner__max_steps": 0.5, "actor__lr_sched__lr_decay_iters": "${multiply:${runner.max_steps},10}"}
    (line,) = lines(write(here, **changes), 1)
    assert line.startswith("runner.max_steps=0.5: ")


def test_a_rule_of_rlinf_beside_a_type_fault(here: Path) -> None:
    """RLinf's own rules are a later stage too; those that read the invalid key stay away."""
    rl = {"actor__training_backend": "megatron", "data__type": "vlm", "data__train_data_paths": [], "actor__seed": 0}
    found = translate(write(here, actor__optim__lr=-1, **rl))
    assert [e.key for e in found.errors] == [f"{O}lr", f"{L}start_weight_decay", f"{L}end_weight_decay", "actor.seed"]
    found = translate(write(here, actor__lr_sched__lr_decay_style="wavy", **rl))
    assert [e.key for e in found.errors] == [f"{L}lr_decay_style", "actor.seed"]
    found = translate(write(here, **{**rl, "data__type": ["vlm"]}))
    assert [e.key for e in found.errors] == ["data.type"]


def test_convert_and_train_exit_with_2_and_all_lines(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(here, **TYPE, **LAYOUT))

    def told(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["hybrid5d", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        return capsys.readouterr().err

    for words in (["convert", path], ["convert", path, "--world-size", "1"], ["train", path],
                  ["train", path, "--num-procs", "1"]):  # fmt: skip
        assert told(*words) == f"{MICRO}\n{LR}\n{SP}\n"
    started = told("train", path, "--num-procs", "2", "--launcher", "mpi").splitlines()
    assert started[0].startswith("--launcher='mpi': ") and started[1:] == [MICRO, LR, SP]
    assert not (here / "results").exists()


def test_train_without_num_procs_where_a_degree_is_invalid(here: Path) -> None:
    """The world is unknown then; what does not depend on it is told."""
    path = write(here, actor__model__pipeline_model_parallel_size="x", actor__model__tensor_model_parallel_size=3)
    with pytest.raises(ConfigErrors) as caught:
        plan_run(Argv(path), None)
    first, second = str(caught.value).split("\n")
    assert first.startswith(f"{M}pipeline_model_parallel_size='x': ") and second == HEADS
    known = {"actor__model__tensor_model_parallel_size": 2, "actor__model__pipeline_model_parallel_size": 2}
    plan, _ = plan_run(Argv(write(here, **known)), None)
    assert plan.layout.world_size == 4 and plan.layout.dp == 1


def test_eval_asks_for_its_data_in_the_same_start(here: Path) -> None:
    path = write(here, actor__optim__lr=-1)
    with pytest.raises(ConfigErrors) as caught:
        plan_run(Argv(path), 1, "eval")
    needs = "data.val_data_paths=None: an evaluation needs data. Fix: name files, folders or globs"
    assert str(caught.value).split("\n") == [LR, needs]


def test_weights_in_megatrons_format_are_a_notice_to_convert_and_a_fault_of_a_run(here: Path) -> None:
    path = write(here, actor__model__megatron_checkpoint="/m")
    found = translate(path, world_size=1)
    assert not found.errors and any("megatron_checkpoint='/m' is dropped" in n for n in found.notices)
    (line,) = lines(path, 1)
    assert line.startswith(f"{M}megatron_checkpoint='/m': weights in Megatron's format cannot be read")


def test_model_folder_of_the_command_line_beside_a_type_fault(here: Path) -> None:
    found = translate(write(here, actor__optim__lr=-1), world_size=1, model=str(here / "no"))
    assert [e.key for e in found.errors] == [f"{O}lr", "--model"]


def test_only_type_faults_read_as_they_did(here: Path) -> None:
    path = write(here, **TYPE)
    assert lines(path, 1) == [MICRO, LR]
    found = translate(path, world_size=1)
    assert [str(e) for e in found.errors] == [MICRO, LR]
    assert found.plan is None and found.to_dict()["layout"] is None and found.notices == []


def test_a_failure_of_ours_hides_no_fault(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without faults in the file it is raised."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug\nof ours")

    monkeypatch.setattr(draft_module, "plan_batch", broken)
    bug = (
        "the rules beyond these lines could not be checked (ZeroDivisionError: a bug of ours). "
        "Fix: repair what the other lines name, and start again"
    )
    assert lines(write(here, actor__optim__lr=-1), 1) == [LR, bug]
    assert [str(e) for e in translate(here / "run.yaml", world_size=1).errors] == [LR, bug]
    with pytest.raises(ZeroDivisionError):
        plan_run(Argv(write(here)), 1)


class Recorder:
    """A config (or a block of it) that notes which keys are read, properties' keys included."""

    def __init__(self, block: Any, prefix: str, seen: set[str]):
        self.__dict__ |= {"_block": block, "_prefix": prefix, "_seen": seen}

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self._block), name, None)
        if isinstance(found, property) and name != "keys":
            return found.fget(self)  # type: ignore[misc]
        value = getattr(self._block, name)
        if isinstance(value, Block):
            return Recorder(value, f"{self._prefix}{name}.", self._seen)
        self._seen.add(f"{self._prefix}{name}")
        return value


BUSY: list[dict[str, Any]] = [
    {},
    {"runner__task_type": "reasoning", "data__rollout_batch_size": 32, "algorithm": {
        "logprob_forward_micro_batch_size": 3, "group_size": 4, "n_minibatches": 2, "multi_agent": True}},
    {"actor__lr_sched": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 10**6, "start_weight_decay": 0.2}},
    {"actor__model__recompute_granularity": "full", "actor__global_batch_size": None},
    {"actor__model__recompute_granularity": "selective", "actor__model__context_parallel_size": 2,
     "actor__model__cp_comm_type": "a2a+p2p", "actor__model__tensor_model_parallel_size": 2},
    {"runner__enable_dynamic_batch_size": True, "runner__max_tokens_per_mbs": 5, "runner__seq_length": None},
    {"actor__model__model_path": "none", "actor__model__num_attention_heads": 6, "actor__model__num_layers": 5,
     "actor__model__pipeline_model_parallel_size": 2, "actor__model__decoder_last_pipeline_num_layers": 5},
    {"cluster__component_placement": {"actor": "0-7"}, "actor__optim__optimizer_cpu_offload": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", BUSY)
@pytest.mark.parametrize("purpose", ["translate", "train", "eval"])
@pytest.mark.parametrize("rule", [*RULES, *RUN_RULES], ids=lambda r: r.check.__name__)
def test_a_rule_reads_what_it_says(here: Path, rule: Any, purpose: Any, changes: dict[str, Any]) -> None:
    """One that read more would judge by a default what the file has wrong."""
    seen: set[str] = set()
    config = Recorder(RunConfig.model_validate(native(**changes)), "", seen)
    draft = Draft(config, 4, purpose)  # type: ignore[arg-type]
    rule.check(draft)
    said = {*rule.reads, "keys"}
    if "model" in said:
        said |= {f"actor.model.{n}" for n in ("model_path", *MODEL_NUMBERS)}
    # Computed on the way, in values that the rule does not judge by: notices about config.json, the token budget; and
    # deepspeed_block compares each value that we emit by the sources of that value.
    passing = {*(f"actor.model.{n}" for n in (*MODEL_NUMBERS, "hidden_size")), "runner.max_tokens_per_mbs"}
    passing.add("runner.enable_dynamic_batch_size" if rule.check.__name__ == "batch" else "")
    if rule.check.__name__ != "deepspeed_block":
        seen -= passing - said
        assert not [key for key in seen if not touches([key], said)]
