"""Architecture numbers read from a Hugging Face `config.json`. Pure: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.hf.families import DROPOUTS, FAMILIES, LAYER_TYPES, NEUTRAL, Family, is_moe, text_part
from hybrid5d.hf.rope import RopeSpec, is_number, read_rope, rope_faults, rope_key

KEY = "actor.model.model_path"
WINDOW_KEYS = {"use_sliding_window", "sliding_window"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder. Sizes are global (before any cut)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeSpec
    attention_bias: bool = False  # q, k, v projections
    attention_out_bias: bool = False  # o projection (Llama's attention_bias covers it too)
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # per layer; empty = all layers where sliding_window is set
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    value_head: bool = False  # one number a token in place of the vocabulary: a critic
    notices: tuple[str, ...] = ()  # what config.json says without effect
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tied(self) -> bool:
        """Whether the embedding's matrix is the head's as well."""
        return self.tie_word_embeddings and not self.value_head

    def window(self, layer: int) -> int | None:
        """Sliding-window size of a layer (keys a query sees, itself included), or None for full attention."""
        if self.sliding_window is None:
            return None
        return self.sliding_window if not self.sliding_layers or self.sliding_layers[layer] else None


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The JSON object of `folder/config.json`.

    Raises:
        ConfigErrors: the file is missing, unreadable or not a JSON object.
    """
    path = Path(folder) / "config.json"

    def refused(rule: str, fix: str = "repair the file") -> ConfigErrors:
        return ConfigErrors([ConfigError(KEY, str(folder), f"{path} {rule}", fix)])

    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refused("does not exist", "give a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as exc:  # ValueError: not UTF-8, not JSON, an endless number
        raise refused(f"cannot be read: {exc}") from None
    if not isinstance(config, dict):
        raise refused("holds no JSON object")
    return config


def dropout_faults(spec: ModelSpec) -> list[ConfigError]:
    """Dropouts that config.json asks for: a run is refused, a translation is not."""
    text = text_part(spec.raw)
    return [
        ConfigError(f"{KEY}: config.json {name}", text[name], "dropout is not supported", "set it to 0.0")
        for name in DROPOUTS
        if text.get(name)
    ]


def _is_integer(value: Any, least: int) -> bool:
    return is_number(value, (int,)) and bool(value >= least)


def _wrong_kinds(text: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Any, str]]:
    """(key, value, rule) of values that cannot be meant."""
    never_null = ("max_position_embeddings", "max_window_layers", "head_dim" if family.head_dim else "")
    for name in SIZES:
        if not _is_integer(text.get(name), 1):
            yield name, text.get(name), "a positive integer is needed"
    for name in ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "max_position_embeddings"):
        value = text.get(name)
        if name not in text or (value is None and name not in never_null):
            continue
        least = 0 if name == "max_window_layers" or (name == "sliding_window" and name not in family.reads) else 1
        if not _is_integer(value, least):
            yield name, value, f"a whole number of {least} or more is needed"
    for name in ("rms_norm_eps", "initializer_range"):
        if name in text and not (is_number(text[name]) and text[name] >= 0):
            yield name, text[name], "a number is needed"
    for name in DROPOUTS:
        if text.get(name) is not None and not (is_number(text[name]) and 0 <= text[name] <= 1):
            yield name, text[name], "a number from 0 to 1 is needed"
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(text.get(name), bool | None):
            yield name, text[name], "true or false is needed"
    pad, size = text.get("pad_token_id"), text.get("vocab_size", 0)
    if pad is not None and _is_integer(size, 1) and not (_is_integer(pad, -size) and pad < size):
        yield "pad_token_id", pad, f"an id below vocab_size={size} is needed"  # below 0: from the end, as in torch


def _wrong_structure(text: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Any, str]]:
    """(key, value, rule) of what makes another network of the model, or one that cannot be."""
    for name, neutral in NEUTRAL.items():
        if text.get(name) not in neutral:
            yield name, text[name], f"{family.name} models of transformers have no such part"
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        yield "hidden_act", text["hidden_act"], "supported activation is silu (SwiGLU)"
    types, layers = text.get("layer_types"), text["num_hidden_layers"]
    if types is None:
        return
    if not isinstance(types, list) or len(types) != layers:
        yield "layer_types", types, f"a list with one entry for each of {layers} layers is needed"
    elif unknown := sorted({str(t) for t in types if t not in LAYER_TYPES}):
        yield "layer_types", types, f"{', '.join(unknown)}: known are full_attention and sliding_attention"
    elif "layer_types" in family.reads and any(LAYER_TYPES[t] for t in types) and not family.sliding(text, layers)[0]:
        yield "layer_types", types, f"sliding_attention needs {' and '.join(sorted(family.reads & WINDOW_KEYS))}"


def _heads(text: Mapping[str, Any], family: Family) -> tuple[int, int]:
    """(key-value heads, head size)."""
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    return text.get("num_key_value_heads", family.kv_heads) or heads, (
        text.get("head_dim", family.head_dim) or hidden // heads
    )


def _wrong_heads(text: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Any, str]]:
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    kv_heads, head_dim = _heads(text, family)
    if heads % kv_heads:
        default = "" if text.get("num_key_value_heads") else f" ({family.name}'s default)"
        yield "num_key_value_heads", kv_heads, f"must divide num_attention_heads={heads}{default}"
    if head_dim % 2 or not head_dim:
        yield "head_dim", head_dim, "rotary embedding needs an even head_dim"
    if family.even_heads and hidden % heads:
        yield "hidden_size", hidden, f"must be a multiple of num_attention_heads={heads}"


def _notices(text: Mapping[str, Any], family: Family) -> Iterator[str]:
    for name in family.unread(text):
        yield f"config.json {name}={text[name]} has no effect: {family.name} models do not read it"
    if text.get("rope_scaling") and text.get("rope_parameters") and text["rope_scaling"] != text["rope_parameters"]:
        yield f"config.json has rope_scaling and rope_parameters: {rope_key(text)} counts, as in transformers"


def parse_hf_config(config: dict[str, Any], key: str = KEY) -> ModelSpec:
    """A `ModelSpec` from the content of an HF `config.json`, read as its family's class in transformers reads it.

    Raises:
        ConfigErrors: families, rope variants or activations that are not ours, numbers missing or contradictory,
            structure that these families do not have.
    """
    text = text_part(config)
    name = str(text.get("model_type", ""))

    def refuse_if(faults: Iterator[tuple[str, Any, str]], fix: str) -> None:
        if errors := [ConfigError(f"{key}: config.json {name}", value, rule, fix) for name, value, rule in faults]:
            raise ConfigErrors(errors)

    if is_moe(config):
        refuse_if(iter([("model_type", name, "mixture-of-experts models are not supported")]), "use a dense model")
    if name not in FAMILIES:
        rule = f"supported families are {', '.join(FAMILIES)}"
        refuse_if(iter([("model_type", name, rule)]), "use one of these families")
    family = FAMILIES[name]
    text.setdefault("max_position_embeddings", family.max_positions)
    refuse_if(iter([*_wrong_kinds(text, family), *rope_faults(text)]), "repair config.json")
    refuse_if(iter([*_wrong_structure(text, family), *_wrong_heads(text, family)]), "use a model of this structure")
    kv_heads, head_dim = _heads(text, family)
    window, sliding_layers = family.sliding(text, text["num_hidden_layers"])
    bias = bool(text.get("attention_bias"))
    return ModelSpec(
        model_type=name,
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_attention_heads=text["num_attention_heads"],
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=text["max_position_embeddings"],
        tie_word_embeddings=bool(text.get("tie_word_embeddings")),
        rope=read_rope(text),
        attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=family.mlp_bias and bool(text.get("mlp_bias")),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        initializer_range=float(text.get("initializer_range", 0.02)),
        bos_token_id=text.get("bos_token_id", family.bos),
        eos_token_id=text.get("eos_token_id", family.eos),
        pad_token_id=text.get("pad_token_id"),
        notices=tuple(_notices(text, family)),
        raw=config,
    )
