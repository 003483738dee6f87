"""Each family's config.json against its own class in transformers: shapes of the file, refusals, logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hybrid5d.checkpoint.start_weights import load_hf_weights
from hybrid5d.data.types import Document
from hybrid5d.engine.collate import SequenceOptions, local_batch
from hybrid5d.errors import ConfigErrors
from hybrid5d.hf.families import FAMILIES, is_moe, is_vision, text_part
from hybrid5d.hf.spec import ModelSpec, parse_hf_config
from tests.checkpoint.test_start_weights import ONE, build, tp_context

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
EVERY = tuple(FAMILIES)
QWEN = ("qwen2", "qwen3")
ABSENT = object()
MIXED = ["full_attention", "sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}

# (families, changes to SIZES): what we read must be what transformers computes
READ: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (EVERY, {}),
    (("llama", "qwen2", "qwen3"), {"num_key_value_heads": None}),
    (("llama",), {"num_key_value_heads": ABSENT}),
    (("mistral",), {"num_key_value_heads": ABSENT, "num_attention_heads": 8}),
    (QWEN, {"num_key_value_heads": ABSENT, "num_attention_heads": 64, "head_dim": 2}),
    (EVERY, {"head_dim": ABSENT}),  # Qwen3: 128, the others hidden_size // num_attention_heads
    (("llama", "mistral"), {"head_dim": None}),
    (EVERY, {"head_dim": 16}),
    (("mistral", "qwen2", "qwen3"), {"hidden_size": 34, "head_dim": 6}),
    (EVERY, {"max_position_embeddings": ABSENT, "rope_scaling": YARN | {"factor": None}}),
    (EVERY, {"tie_word_embeddings": True}),
    (EVERY, {"tie_word_embeddings": False, "rms_norm_eps": 0.01}),
    (EVERY, {"attention_bias": True}),  # Mistral has none, Qwen2 always, Llama and Qwen3 with the output's
    (EVERY, {"mlp_bias": True}),
    (EVERY, {"attention_bias": True, "mlp_bias": True}),
    (EVERY, {"sliding_window": 4}),  # Mistral alone honours it
    (EVERY, {"sliding_window": None}),
    (EVERY, {**WINDOW}),
    (EVERY, {**WINDOW, "max_window_layers": 0}),
    (EVERY, {**WINDOW, "max_window_layers": 2}),
    (EVERY, {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}),
    (EVERY, {**WINDOW, "layer_types": MIXED}),
    (EVERY, {**WINDOW, "layer_types": MIXED, "max_window_layers": 0}),
    (EVERY, {**WINDOW, "layer_types": ["attention", "sliding_attention", "attention"]}),
    (EVERY, {"layer_types": ["full_attention"] * 3, "sliding_window": 4}),
    (("mistral",), {"layer_types": MIXED, "sliding_window": 4}),
    (("mistral",), {"layer_types": None, "sliding_window": 4}),
    (QWEN, {**WINDOW, "sliding_window": None, "max_window_layers": 0}),
    (EVERY, {"rope_theta": 300.0}),
    (EVERY, {"rope_parameters": PLAIN}),
    (EVERY, {"rope_parameters": PLAIN, "rope_theta": 77.0}),
    (EVERY, {"rope_parameters": {"rope_type": "default"}, "rope_theta": 77.0}),
    (EVERY, {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 77.0}),
    (EVERY, {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 3.0}}),
    (EVERY, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}),
    (EVERY, {"rope_scaling": {**YARN}, "rope_parameters": PLAIN}),  # the block and its theta are replaced whole
    (EVERY, {"rope_scaling": {**YARN}, "rope_parameters": PLAIN, "rope_theta": 77.0}),
    (EVERY, {"rope_scaling": {}, "rope_parameters": PLAIN, "rope_theta": 77.0}),
    (EVERY, {"rope_scaling": None, "rope_parameters": {**YARN, "rope_theta": 500.0}}),
    (EVERY, {"rope_scaling": {**PLAIN, "factor": 3.0}}),  # a factor that the default variant does not read
    (EVERY, {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    (EVERY, {"rope_parameters": LLAMA3}),
    (EVERY, {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16},
             "original_max_position_embeddings": 32}),
    (EVERY, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    (EVERY, {"rope_scaling": {**YARN, "factor": None}}),
    (EVERY, {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
    (EVERY, {"rope_scaling": {**YARN, "attention_factor": 0.7}}),
    (EVERY, {"rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    (EVERY, {"rope_scaling": {**YARN, "mscale": 0.8}}),
    (EVERY, {"rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 2, "truncate": False}}),
    (EVERY, {"rope_scaling": {**YARN, "beta_fast": None, "attention_factor": None}}),
    (EVERY, {"pad_token_id": 7, "bos_token_id": 3, "eos_token_id": [4, 5]}),
    (EVERY, {"pad_token_id": -1}),
    (EVERY, {"hidden_act": "swish", "torch_dtype": "float32", "use_cache": False, "pretraining_tp": 1}),
    (EVERY, {"num_local_experts": 1, "partial_rotary_factor": 1.0, "attention_dropout": 0}),
]  # fmt: skip

# transformers refuses these or computes NaN; so do we, and the word stands in the message
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("mistral",), {"num_key_value_heads": ABSENT}, "num_key_value_heads"),  # its default 8 and 4 heads
    (QWEN, {"num_key_value_heads": ABSENT}, "num_key_value_heads"),
    (EVERY, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (("llama",), {"hidden_size": 34}, "multiple of num_attention_heads"),
    (("qwen3",), {"head_dim": None}, "head_dim"),
    (EVERY, {"head_dim": 5}, "even head_dim"),
    (EVERY, {"layer_types": ["full_attention"] * 2}, "3 layers"),
    (EVERY, {"layer_types": []}, "3 layers"),
    (EVERY, {"layer_types": ["own_attention"] * 3}, "own_attention"),
    (("mistral", *QWEN), {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    (("mistral", *QWEN), {"layer_types": ["mamba"] * 3}, "mamba"),
    (QWEN, {"layer_types": MIXED}, "use_sliding_window"),
    (("mistral",), {"layer_types": MIXED, "sliding_window": None}, "sliding_window"),
    (QWEN, {**WINDOW, "max_window_layers": None}, "max_window_layers"),
    (EVERY, {"rope_theta": None}, "rope_theta"),
    (EVERY, {"rope_theta": 0}, "rope_theta"),
    (EVERY, {"rope_parameters": {"rope_theta": None}}, "rope_theta"),
    (EVERY, {"rope_parameters": {"rope_type": None}}, "rope_type"),
    (EVERY, {"rope_parameters": {"rope_type": "own"}}, "own"),
    (EVERY, {"rope_scaling": {"rope_type": "linear"}}, "linear needs factor"),
    (EVERY, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor: a number above 0"),
    (EVERY, {"rope_scaling": {"rope_type": "yarn"}}, "yarn needs factor"),
    (EVERY, {"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "original_max_position_embeddings"),
    (EVERY, {"rope_parameters": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor"),
    (EVERY, {"max_position_embeddings": None}, "max_position_embeddings"),
    (EVERY, {"pad_token_id": 101}, "pad_token_id"),
    (EVERY, {"num_hidden_layers": 3.0}, "num_hidden_layers"),
    (EVERY, {"hidden_act": None}, "hidden_act"),
]

# transformers computes something, of which we make no claim: refused by name
NOT_OURS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (EVERY, {"hidden_act": "gelu"}, "silu"),
    (EVERY, {"max_position_embeddings": 0}, "max_position_embeddings"),
    (("llama",), {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    (("mistral",), {"sliding_window": 0}, "sliding_window"),
    (QWEN, {**WINDOW, "sliding_window": 0, "max_window_layers": 0}, "sliding_window"),
    (EVERY, {"layer_types": MIXED, "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
     "full_attention, sliding_attention layers"),
    (EVERY, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    (EVERY, {"rope_parameters": {**PLAIN, "mrope_section": [1, 1, 2]}}, "mrope_section"),
    (EVERY, {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "above low_freq_factor"),
    (EVERY, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (EVERY, {"per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config"),
    (EVERY, {"attn_logit_softcapping": 30.0, "logit_scale": 0.5}, "logit_scale"),
    (EVERY, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    (EVERY, {"num_local_experts": 4}, "mixture-of-experts"),
    (EVERY, {"attention_dropout": 1.5}, "attention_dropout"),
]  # fmt: skip


def shape(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A config.json; ABSENT leaves a key out."""
    return {k: v for k, v in {"model_type": family, **SIZES, **changes}.items() if v is not ABSENT}


def each(cases: list[tuple[Any, ...]]) -> list[Any]:
    """One pytest parameter a family and case, named by both."""
    return [
        pytest.param(family, *rest, id=f"{family}-{i}-{','.join(rest[0]) or 'plain'}")
        for i, (families, *rest) in enumerate(cases)
        for family in families
    ]


def reference(config: dict[str, Any], folder: Path) -> Any:
    """transformers' model of the file, with random weights, written beside it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa").float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(0, 0.2)
    state = {n: t for n, t in model.state_dict().items() if not (model.config.tie_word_embeddings and "lm_head" in n)}
    save_file(state, folder / "model.safetensors")
    return model.eval()


def our_logits(spec: ModelSpec, folder: Path, ids: np.ndarray) -> torch.Tensor:
    """[S, V] of our layers in one process with the weights of a folder."""
    ctx, module = tp_context(1, 0), build(spec, 1, 0)
    load_hf_weights(module, folder, spec, ONE)
    document = Document(ids, np.full_like(ids, -100), 0)
    batch = local_batch(((document,),), ctx, SequenceOptions(), spec.hidden_size, torch.device("cpu"))
    with torch.no_grad():
        x: Any = None
        for layer in module[:-1]:
            x = layer(x, batch)
        return (x @ module[-1].weight[: spec.vocab_size].T)[0, : len(ids)]


@pytest.mark.parametrize(("family", "changes"), each(READ))
def test_logits_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = shape(family, changes)
    model, ids = reference(config, tmp_path), np.arange(40, dtype=np.int64) * 7 % 101
    spec = parse_hf_config(config)
    theirs = model.config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "tie_word_embeddings"):
        assert getattr(spec, name) == getattr(theirs, name), name
    assert spec.max_position_embeddings == theirs.max_position_embeddings
    if family != "mistral" or "layer_types" not in changes:  # AutoConfig then takes the Ministral class
        assert FAMILIES[family].architecture == type(model).__name__
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    assert torch.allclose(our_logits(spec, tmp_path, ids), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "changes", "word"), each(REFUSED))
def test_what_transformers_refuses_is_refused(family: str, changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    config = shape(family, changes)
    try:
        model = reference(config, tmp_path)
        with torch.no_grad():
            logits = model(torch.arange(40)[None], use_cache=False).logits
    except Exception:
        pass
    else:
        assert not logits.isfinite().all(), "transformers computes this"
    refused(config, word)


@pytest.mark.parametrize(("family", "changes", "word"), each(NOT_OURS))
def test_unknown_structure_is_refused_by_name(family: str, changes: dict[str, Any], word: str) -> None:
    refused(shape(family, changes), word)


def refused(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse_hf_config(config)
    assert any(word in str(e) for e in caught.value.errors), str(caught.value)
    assert all(e.fix and "\n" not in str(e) for e in caught.value.errors)


@pytest.mark.parametrize("family", EVERY)
def test_defaults_of_a_family_are_its_class_attributes(family: str) -> None:
    from transformers import AutoConfig

    theirs, row = AutoConfig.for_model(family), FAMILIES[family]
    heads = theirs.num_attention_heads
    assert (row.kv_heads or heads) == theirs.num_key_value_heads
    assert (row.bos, row.eos, row.max_positions) == (
        theirs.bos_token_id, theirs.eos_token_id, theirs.max_position_embeddings,
    )  # fmt: skip
    assert (row.head_dim or theirs.hidden_size // heads) == getattr(theirs, "head_dim", theirs.hidden_size // heads)
    assert row.window == type(theirs).__dataclass_fields__.get("sliding_window", _Nothing).default


class _Nothing:
    default = None


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"sliding_window": 4}, "sliding_window=4 has no effect: llama models do not read it"),
        ("llama", {**WINDOW, "layer_types": MIXED}, "layer_types"),
        ("mistral", WINDOW, "use_sliding_window=True has no effect"),
        ("mistral", {"attention_bias": True}, "attention_bias=True has no effect: mistral"),
        ("qwen2", {"attention_bias": True}, "attention_bias=True has no effect"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True has no effect"),
        ("llama", {"rope_scaling": YARN, "rope_parameters": PLAIN}, "rope_scaling counts"),
    ],
)
def test_what_has_no_effect_is_reported(family: str, changes: dict[str, Any], words: str) -> None:
    assert any(words in n for n in parse_hf_config(shape(family, changes)).notices)
    assert not parse_hf_config(shape(family, {})).notices


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_text_part_of_a_vision_config(name: str, tmp_path: Path) -> None:
    """The rules read the language model's numbers, under whichever name they stand: 6 heads fit no tp of 4."""
    from hybrid5d.plan.model import read_model
    from hybrid5d.plan.run import examine
    from tests.config_kit import config_of

    text = {**SIZES, "model_type": "qwen2", "num_attention_heads": 6}
    config = {"model_type": "internvl_chat", "vision_config": {"num_attention_heads": 16}, name: text}
    assert text_part(config)["num_attention_heads"] == 6 and is_vision(config) and not is_moe(config)
    assert is_moe({**config, name: {**text, "num_experts": 8}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"actor__model__model_path": str(tmp_path), "actor__model__tensor_model_parallel_size": 4}
    _, errors = examine(config_of(**model), 4)
    assert any("num_attention_heads=6" in e.rule for e in errors)
    assert read_model(config_of(**model), training=False).numbers.vocab_size == 101


@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout", "resid_pdrop"])
def test_dropout_is_refused_before_a_process_group(name: str, tmp_path: Path) -> None:
    from hybrid5d.plan.model import read_model
    from tests.config_kit import config_of

    (tmp_path / "config.json").write_text(json.dumps(shape("llama", {name: 0.1})))
    config = config_of(actor__model__model_path=str(tmp_path))
    (error,) = read_model(config, training=True).errors
    assert error.key == f"actor.model.model_path: config.json {name}" and error.value == 0.1
    assert not read_model(config, training=False).errors
