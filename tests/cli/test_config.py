"""`hybrid5d config schema` takes what the loader takes; `config show` says where each value comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid5d.config.schema import schema_keys
from hybrid5d.load import load_yaml
from tests.cli_kit import hybrid5d
from tests.config_kit import REPO, native, write_yaml

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> list[str]:
    """What a JSON Schema validator would say, for the words that ours uses."""
    if "$ref" in schema:
        return faults(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema:
        return [] if any(not faults(value, s, root, at) for s in schema["anyOf"]) else [at]
    if "enum" in schema and value not in schema["enum"]:
        return [at]
    if "const" in schema and value != schema["const"]:
        return [at]
    kinds = schema.get("type", ())
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [at]
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return [at]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    tests = (
        ("minimum", "__ge__"),
        ("maximum", "__le__"),
        ("exclusiveMinimum", "__gt__"),
        ("exclusiveMaximum", "__lt__"),
    )
    if number and any(word in schema and not getattr(float(value), test)(float(schema[word])) for word, test in tests):
        return [at]
    found: list[str] = []
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            known = name in schema["properties"]
            found += faults(inner, schema["properties"][name], root, f"{at}.{name}") if known else [f"{at}.{name}"]
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return [at]
        for i, inner in enumerate(value):
            items = schema["prefixItems"][i] if "prefixItems" in schema else schema.get("items", {})
            found += faults(inner, items, root, f"{at}[{i}]")
    return found


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and (kind == "number" or value.is_integer()))
        return whole and not isinstance(value, bool)
    return isinstance(value, TYPES[kind])


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    done = hybrid5d("config", "schema")
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_every_key_has_its_description_and_default(schema: dict[str, Any]) -> None:
    for path, field in schema_keys().items():
        at = schema
        for part in path.split("."):
            at = at["properties"][part]
            at = {**schema["$defs"][at["$ref"].rpartition("/")[2]], **at} if "$ref" in at else at
        assert at["description"].startswith(field.description), path
        if field.default_factory is None:
            default = field.get_default()
            assert at["default"] == (list(default) if isinstance(default, tuple) else default), path


@pytest.mark.parametrize("file", ["examples/quickstart.yaml", "examples/smollm2_sft.yaml"])
def test_our_own_files_are_valid(schema: dict[str, Any], file: str) -> None:
    assert faults(yaml.safe_load((REPO / file).read_text()), schema, schema) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor.optim.lr", -1.0), ("actor.optim.lr", "fast"), ("actor.optim.lr", True), ("actor.optim.lr", 1e-3),
        ("actor.optim.lr", "${runner.max_steps}"), ("actor.optim.adam_beta1", 1), ("actor.optim.optimizer", "lion"),
        ("actor.optim.optimizer", "sgd"), ("actor.model.precision", 16), ("actor.model.precision", "bf16-mixed"),
        ("actor.model.precision", "fp8"), ("actor.model.precision", None), ("actor.model.num_layers", 0),
        ("actor.model.num_layers", None), ("actor.model.num_layers", 2.5), ("actor.model.cp_comm_type", "ring"),
        ("actor.model.hierarchical_context_parallel_sizes", [2, 2]), ("actor.model.tensor_parallel", 2),
        ("actor.model.hierarchical_context_parallel_sizes", [2]), ("actor.model.sequence_parallel", 1),
        ("data.train_data_paths", "one.jsonl"), ("data.train_data_paths", ["a", "b"]), ("data.shuffle", None),
        ("runner.experiment_name", 2024), ("runner.experiment_name", None), ("runner.resume_dir", None),
        ("runner.max_steps", -2), ("runner.max_steps", "many"), ("actor.micro_batch_size", None),
        ("actor.freeze_parameters", "model.*"), ("reward.on_error", "stop"), ("reward.on_error", "go"),
        ("cluster.component_placement", {"actor": "0-7"}), ("cluster.component_placement", 3), ("actor", None),
    ],
)  # fmt: skip
def test_it_refuses_what_the_loader_refuses_and_nothing_else(
    tmp_path: Path, schema: dict[str, Any], key: str, value: Any
) -> None:
    tree = native(**{key.replace(".", "__"): value})
    loaded = load_yaml(write_yaml(tmp_path / "run.yaml", tree))
    # what depends on the type of another key, or on the value of a reference, is no word of a schema
    refused = any(e.key.startswith(key) for e in loaded.errors) and "${" not in str(value)
    assert bool(faults(tree, schema, schema)) == refused, loaded.errors


def test_show_names_the_source_of_every_value(tmp_path: Path) -> None:
    tree = native(actor__optim__lr="${actor.lr_sched.min_lr}", actor__lr_sched__min_lr=1e-4)
    run = write_yaml(tmp_path / "run.yaml", tree)
    done = hybrid5d("config", "show", run, "runner.seq_length=64", "--all", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = {entry["key"]: entry for entry in json.loads(done.stdout)}
    assert list(found) == list(schema_keys())
    assert found["runner.seq_length"] == {"key": "runner.seq_length", "value": 64, "from": "command line"}
    assert found["actor.optim.lr"]["value"] == 1e-4
    assert found["actor.optim.lr"]["from"] == f"{run}, written ${{actor.lr_sched.min_lr}}"
    assert found["cluster.component_placement"] == {
        "key": "cluster.component_placement", "value": {"actor": "all"}, "from": str(run),
    }  # fmt: skip
    assert found["actor.optim.clip_grad"] == {"key": "actor.optim.clip_grad", "value": 1.0, "from": "default"}
    text = hybrid5d("config", "show", run).stdout
    assert "actor.optim.clip_grad" not in text
    values = yaml.safe_load(text)  # a flat YAML with comments
    assert values["actor.optim.adam_beta2"] == 0.95 and values["runner.max_steps"] == 200


def test_show_knows_what_another_program_calls_it() -> None:
    done = hybrid5d("config", "show", "examples/rlinf/qwen2.5-7b-cp2.yaml", "--format", "json")
    found = {entry["key"]: entry["from"] for entry in json.loads(done.stdout)}
    file = "examples/rlinf/qwen2.5-7b-cp2.yaml"
    assert found["actor.model.model_path"] == f"rollout.model.model_path in {file}"
    assert found["actor.model.context_parallel_size"] == f"{file} or the file that it names"


def test_a_refused_file_is_not_shown(tmp_path: Path) -> None:
    done = hybrid5d("config", "show", write_yaml(tmp_path / "run.yaml", native(actor__optim__lr=-1)))
    assert done.returncode == 2 and "actor.optim.lr=-1" in done.stderr and done.stdout == ""
