"""Folder faults are found from headers alone, all together, one line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybrid5d.errors import ConfigErrors
from hybrid5d.hf.folder import HeaderError, inspect_hf_folder, read_header, weights_wanted
from hybrid5d.hf.spec import ModelSpec, parse_hf_config, read_hf_config
from hybrid5d.plan.tensors import shapes
from tests.kit import MODELS


def spec_of(name: str, **changes: object) -> ModelSpec:
    return parse_hf_config({**MODELS[name], "num_hidden_layers": 2, **changes})


def write_folder(
    folder: Path, spec: ModelSpec, shards: int = 1, drop: tuple[str, ...] = (), **extra: np.ndarray
) -> Path:
    """A folder with the expected tensors of a model, in one file or `shards` files with an index."""
    tensors = {n: np.zeros(s, np.float32) for n, s in shapes(spec).items() if n not in drop} | extra
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def lines(folder: Path, spec: ModelSpec) -> list[str]:
    found = [str(e) for e in inspect_hf_folder(folder, spec, shapes(spec))[1]]
    assert all("\n" not in line for line in found)
    return found


def one_line(folder: Path, spec: ModelSpec, *words: str) -> None:
    found = lines(folder, spec)
    assert len(found) == 1, found
    for word in words:
        assert word in found[0], found[0]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_sound_folders(tmp_path: Path, name: str, shards: int) -> None:
    assert lines(write_folder(tmp_path, spec_of(name), shards), spec_of(name)) == []


def test_tied_model_stored_under_either_name_or_both(tmp_path: Path) -> None:
    spec = spec_of("qwen3")
    table = np.zeros((spec.vocab_size, spec.hidden_size), np.float32)
    write_folder(tmp_path, spec, **{"lm_head.weight": table})
    assert lines(tmp_path, spec) == []
    write_folder(tmp_path, spec, drop=("model.embed_tokens.weight",), **{"lm_head.weight": table})
    assert lines(tmp_path, spec) == []


def test_index_of_a_tied_model_may_list_its_head(tmp_path: Path) -> None:
    spec = spec_of("qwen3")
    write_folder(tmp_path, spec, 2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert lines(tmp_path, spec) == []


def test_untied_model_needs_its_own_head(tmp_path: Path) -> None:
    spec = spec_of("llama")
    one_line(
        write_folder(tmp_path, spec, drop=("lm_head.weight",)), spec, "lm_head.weight is missing", "tie_word_embeddings"
    )
    write_folder(tmp_path, spec, drop=("model.embed_tokens.weight",))
    one_line(tmp_path, spec, "1 tensors are missing: model.embed_tokens.weight")


def test_pickled_weights_are_refused_with_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    one_line(tmp_path, spec_of("llama"), "pickled", "save_pretrained")


@pytest.mark.parametrize(
    ("names", "by_default"),
    [
        (["config.json", "tokenizer.json"], False),
        (["config.json", "training_args.bin", "optimizer.pt"], False),
        (["config.json", "model.safetensors"], True),
        (["config.json", "model-00001-of-00002.safetensors"], True),
        (["config.json", "pytorch_model.bin"], True),
        (["config.json", "pytorch_model-00001-of-00002.bin"], True),
    ],
)
def test_weights_that_lie_there_are_never_passed_over(tmp_path: Path, names: list[str], by_default: bool) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    assert weights_wanted(None, tmp_path) is by_default
    assert weights_wanted(True, tmp_path) and not weights_wanted(False, tmp_path)
    assert not weights_wanted(None, None) and not weights_wanted(None, tmp_path / "nothing")


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.errors import ConfigErrors
    from hybrid5d.plan.run import build_plan

    spec = spec_of("llama")
    write_folder(tmp_path, spec, drop=("model.norm.weight",))
    (tmp_path / "config.json").write_text(json.dumps(spec.raw))
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}')
    data = {"type": "tokens", "train_data_paths": [str(tmp_path / "rows.jsonl")]}

    def plan(load_weights: bool | None, purpose: Any = "train") -> None:
        model = {"model_path": str(tmp_path), "load_weights": load_weights}
        run = {"runner": {"max_steps": 1}, "data": data, "actor": {"model": model}}
        build_plan(RunConfig.model_validate(run), 1, purpose)

    plan(False)
    plan(True, "translate")
    for wanted in (True, None):
        with pytest.raises(ConfigErrors, match=r"1 tensors are missing: model\.norm\.weight"):
            plan(wanted)


def test_no_weights_and_loose_shards(tmp_path: Path) -> None:
    spec = spec_of("llama")
    one_line(tmp_path, spec, "neither", "load_weights=false")
    save_file({"x": np.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    one_line(tmp_path, spec, "model-00001-of-00002.safetensors", "index")


def test_missing_shards_and_missing_tensors(tmp_path: Path) -> None:
    spec = spec_of("llama")
    write_folder(tmp_path, spec, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    one_line(tmp_path, spec, "1 shards that are not there", "model-00002-of-00003.safetensors")
    write_folder(tmp_path, spec, 3)
    tensors = {n: np.zeros(s, np.float32) for n, s in list(shapes(spec).items())[3::3]}
    save_file(tensors, tmp_path / "model-00001-of-00003.safetensors")
    one_line(tmp_path, spec, "lists 1 tensors that no file holds: model.embed_tokens.weight")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{", '{"weight_map": {"a": "../x.safetensors"}}'])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    words = "outside the folder" if ".." in content else "no JSON object with a weight_map"
    one_line(tmp_path, spec_of("llama"), "index", words)


def test_fused_quantised_and_foreign_names_all_at_once(tmp_path: Path) -> None:
    spec = spec_of("llama")
    odd = {
        "model.layers.0.self_attn.qkv_proj.weight": np.zeros((4, 4), np.float32),
        "model.layers.0.attn.Wqkv.weight": np.zeros((4, 4), np.float32),
        "model.layers.0.mlp.gate_proj.weight_scale": np.zeros(1, np.float32),
        "transformer.wte.weight": np.zeros(1, np.float32),
    }
    found = lines(write_folder(tmp_path, spec, drop=("model.norm.weight",), **odd), spec)
    assert len(found) == 4
    for words in (
        "2 tensors are fused",
        "parts of quantised",
        "transformer.wte.weight",
        "1 tensors are missing: model.norm.weight",
    ):
        assert any(words in line for line in found), found


def test_names_without_prefix_show_what_the_model_calls_them(tmp_path: Path) -> None:
    spec = spec_of("llama")
    tensors = {n.removeprefix("model."): np.zeros(s, np.float32) for n, s in shapes(spec).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert any("the model calls a tensor model.embed_tokens.weight" in line for line in lines(tmp_path, spec))


def test_old_rotary_buffers_are_no_fault(tmp_path: Path) -> None:
    spec = spec_of("llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert lines(write_folder(tmp_path, spec, **extra), spec) == []


def test_wrong_shapes_and_dtypes(tmp_path: Path) -> None:
    spec = spec_of("llama")
    bad = {
        "model.embed_tokens.weight": np.zeros((100, 32), np.float32),
        "model.norm.weight": np.zeros(32, np.int8),
    }
    found = lines(write_folder(tmp_path, spec, **bad), spec)
    assert len(found) == 2
    assert "has shape [100, 32] but config.json gives [101, 32]" in found[0]
    assert "dtype I8" in found[1]
    wide = spec_of("llama", hidden_size=64)
    found = lines(write_folder(tmp_path, spec), wide)
    assert len(found) == 7 and "more tensors do not fit" in found[-1]


def test_quantised_config(tmp_path: Path) -> None:
    spec = spec_of("llama", quantization_config={"quant_method": "gptq"})
    one_line(write_folder(tmp_path, spec), spec, "gptq", "dequantise")
    spec = spec_of("llama", quantization_config="gptq")
    one_line(tmp_path, spec, "gptq", "dequantise")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head_dim", "8"),
        ("num_key_value_heads", "2"),
        ("num_key_value_heads", -2),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", None),
        ("max_position_embeddings", "2k"),
        ("max_position_embeddings", float("inf")),
        ("rms_norm_eps", float("nan")),
        pytest.param("rope_theta", 10**400, id="rope_theta-huge"),
        ("initializer_range", []),
        ("attention_dropout", "none"),
        ("tie_word_embeddings", "false"),
        ("attention_bias", "no"),
        ("sliding_window", "all"),
        ("rope_parameters", "default"),
        ("rope_scaling", [1]),
        ("rope_theta", "1e4"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "linear"}),
        ("rope_parameters", {"rope_type": "yarn", "factor": "4"}),
        ("layer_types", ["full_attention"]),
    ],
)
def test_config_values_of_the_wrong_kind(name: str, value: object) -> None:
    with pytest.raises(ConfigErrors) as e:
        spec_of("mistral_window", **{name: value})
    (line,) = str(e.value).split("\n")
    assert line.startswith(f"actor.model.model_path: config.json {name}") and "Fix: " in line


@pytest.mark.parametrize("body", ["[" * 100_000, "9" * 5000, "{"])
def test_config_that_is_no_json(tmp_path: Path, body: str) -> None:
    (tmp_path / "config.json").write_text(body)
    with pytest.raises(ConfigErrors, match=r"config\.json cannot be read: "):
        read_hf_config(tmp_path)


def test_tied_model_with_a_head_of_another_shape(tmp_path: Path) -> None:
    spec = spec_of("qwen3")
    write_folder(tmp_path, spec, **{"lm_head.weight": np.zeros((7, spec.hidden_size), np.float32)})
    one_line(tmp_path, spec, "lm_head.weight", "tie_word_embeddings")


def _with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(8)


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    changed = {
        "empty": b"",
        "short data": data[:-5],
        "short header": data[: length // 2],
        "not json": data[:8] + b"#" * length + data[8 + length :],
        "html": b"<!DOCTYPE html><html>",
        "no dtype": data[:8] + data[8 : 8 + length].replace(b'"dtype"', b'"dtypo"') + data[8 + length :],
        "wrong size": data[:8] + data[8 : 8 + length].replace(b'"F32"', b'"F16"', 1) + data[8 + length :],
        "list": (2).to_bytes(8, "little") + b"[]",
        "deep": (100_000).to_bytes(8, "little") + b"[" * 100_000,
        "text offsets": _with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
        "half offsets": _with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 4.5]}}'),
        "half shape": _with_header(b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}'),
        "negative shape": _with_header(b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}'),
    }[how]
    path.write_bytes(changed)


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "short data", "short header", "not json", "html", "no dtype", "wrong size", "list", "deep"),
        *("text offsets", "half offsets", "half shape", "negative shape"),
    ],
)
def test_damaged_file(tmp_path: Path, how: str) -> None:
    spec = spec_of("llama")
    write_folder(tmp_path, spec, 2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    _damage(file, how)
    one_line(tmp_path, spec, file.name)
    with pytest.raises(HeaderError):
        read_header(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, spec_of("llama")) if folder.mkdir() else None
    folder.chmod(0)
    try:
        one_line(folder, spec_of("llama"), "ermission")
    finally:
        folder.chmod(0o755)


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (tmp_path / "x.safetensors").mkdir()
    one_line(tmp_path, spec_of("llama"), "cannot be read")


def test_check_needs_no_torch() -> None:
    code = "import sys; import hybrid5d.hf.folder; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "."})
