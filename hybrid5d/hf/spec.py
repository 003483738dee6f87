"""Architecture numbers read from a Hugging Face `config.json`. Pure: no torch, no transformers."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid5d.errors import ConfigError, ConfigErrors

DENSE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # HF `model_type` of what we train
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}  # transformers' defaults
ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_NUMBERS = (
    *ROPE_NEEDS["llama3"], "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base, variant and the variant's parameters (HF names)."""

    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.parameters).get(name, default)


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
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    torch_dtype: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def window(self, layer: int) -> int | None:
        """Sliding-window size of a layer (keys a query sees, itself included), or None for full attention."""
        if self.sliding_window is None:
            return None
        return self.sliding_window if not self.sliding_layers or self.sliding_layers[layer] else None


def is_moe(config: dict[str, Any]) -> bool:
    """True where an HF config describes a mixture of experts."""
    text = _text_config(config)
    return "moe" in str(config.get("model_type", "")) or any((text.get(k) or 0) > 1 for k in MOE_KEYS)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a vision-language config; the config itself otherwise."""
    inner = config.get("text_config") or config.get("llm_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _is_number(value: Any, kinds: tuple[type, ...] = (int, float)) -> bool:
    return type(value) in kinds and abs(value) <= sys.float_info.max  # not a bool, an infinity or NaN


def _wrong_kinds(text: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, value, rule) of the optional keys whose values are of a kind that cannot be meant."""
    found = []
    for name in ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers"):
        value = text.get(name)
        if value is not None and not (_is_number(value, (int,)) and value >= 0):
            found.append((name, value, "a whole number, or null, is needed"))
    for name in ("rms_norm_eps", "initializer_range", "max_position_embeddings", "attention_dropout", "rope_theta"):
        may_be_null = name in ("attention_dropout", "rope_theta")
        if name in text and not (_is_number(text[name]) or (may_be_null and text[name] is None)):
            found.append((name, text[name], "a number is needed"))
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(text.get(name), bool | None):
            found.append((name, text[name], "true or false is needed"))
    if not isinstance(text.get("layer_types"), list | None):
        found.append(("layer_types", text["layer_types"], "a list is needed"))
    return found


def _wrong_rope(text: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, value, rule) of what keeps the rotary embedding from being computed."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(text.get(name), dict | None):
            return [(name, text[name], "an object is needed")]
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    params = _rope_params(text)
    variant = str(params.get("rope_type") or params.get("type"))
    needed = ROPE_NEEDS.get(variant, ())
    missing = [n for n in needed if params.get(n) is None]
    if missing:
        return [(name, text[name], f"{variant} needs {', '.join(missing)}")]
    wrong = [n for n in ROPE_NUMBERS if params.get(n) is not None and not _is_number(params[n])]
    return [(name, text[name], f"{', '.join(wrong)}: a number is needed")] if wrong else []


def _rope_params(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; older releases rope_theta beside rope_scaling.
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _rope(config: dict[str, Any]) -> RopeSpec:
    params = _rope_params(config)
    theta = params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    rope_type = params.pop("rope_type", None) or params.pop("type", None) or "default"
    params.pop("type", None)
    frozen = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in params.items()))
    return RopeSpec(float(theta), str(rope_type), frozen)


def _sliding(config: dict[str, Any], family: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = config.get("sliding_window")
    if not window or (family.startswith("qwen") and not config.get("use_sliding_window", False)):
        return None, ()
    types = config.get("layer_types")
    if types:
        return int(window), tuple(t == "sliding_attention" for t in types)
    if family.startswith("qwen"):
        first_full = int(config.get("max_window_layers") or 0)
        return int(window), tuple(i >= first_full for i in range(layers))
    return int(window), ()


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The JSON object of `folder/config.json`.

    Raises:
        ConfigErrors: the file is missing, unreadable or not a JSON object.
    """
    path = Path(folder) / "config.json"
    key = "actor.model.model_path"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigErrors(
            [ConfigError(key, str(folder), f"{path} does not exist", "give a Hugging Face model folder")]
        ) from None
    except (OSError, ValueError, RecursionError) as exc:  # ValueError: not UTF-8, not JSON, an endless number
        raise ConfigErrors(
            [ConfigError(key, str(folder), f"{path} cannot be read: {exc}", "repair the file")]
        ) from None
    if not isinstance(config, dict):
        raise ConfigErrors([ConfigError(key, str(folder), f"{path} holds no JSON object", "repair the file")])
    return config


def parse_hf_config(config: dict[str, Any], key: str = "actor.model.model_path") -> ModelSpec:
    """A `ModelSpec` from the content of an HF `config.json`.

    Raises:
        ConfigErrors: families, rope variants or activations that are not ours, numbers missing or contradictory.
    """
    text = _text_config(config)
    family = str(text.get("model_type", config.get("model_type", "")))
    errors: list[ConfigError] = []

    def refuse(name: str, value: Any, rule: str, fix: str) -> None:
        errors.append(ConfigError(f"{key}: config.json {name}", value, rule, fix))

    if is_moe(config):
        refuse("model_type", family, "mixture-of-experts models are not supported", "use a dense model")
    elif family not in DENSE_FAMILIES:
        refuse("model_type", family, f"supported families are {', '.join(DENSE_FAMILIES)}", "use one of these families")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in needed:
        value = text.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(name, value, "a positive integer is needed", "repair config.json")
    for name, value, rule in (*_wrong_kinds(text), *_wrong_rope(text)):
        refuse(name, value, rule, "repair config.json")
    if errors:
        raise ConfigErrors(errors)
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"must divide num_attention_heads={heads}", "repair config.json")
    if text.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", text["hidden_act"], "supported activation is silu (SwiGLU)", "use a model with silu")
    rope = _rope(text)
    if rope.rope_type not in ROPE_TYPES:
        refuse("rope_type", rope.rope_type, f"supported rope variants are {', '.join(ROPE_TYPES)}", "use one of these")
    if head_dim % 2:
        refuse("head_dim", head_dim, "rotary embedding needs an even head_dim", "repair config.json")
    if errors:
        raise ConfigErrors(errors)
    layers = text["num_hidden_layers"]
    window, sliding_layers = _sliding(text, family, layers)
    if sliding_layers and len(sliding_layers) != layers:
        refuse(
            "layer_types", text["layer_types"], f"one entry for each of {layers} layers is needed", "repair config.json"
        )
        raise ConfigErrors(errors)
    bias = bool(text.get("attention_bias", False))
    return ModelSpec(
        model_type=family,
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(text.get("max_position_embeddings", MAX_POSITIONS[family])),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        rope=rope,
        attention_bias=True if family == "qwen2" else bias,
        attention_out_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=bool(text.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_dropout=float(text.get("attention_dropout") or 0.0),
        initializer_range=float(text.get("initializer_range", 0.02)),
        bos_token_id=text.get("bos_token_id"),
        eos_token_id=text.get("eos_token_id"),
        pad_token_id=text.get("pad_token_id"),
        torch_dtype=text.get("dtype") or text.get("torch_dtype"),
        raw=config,
    )
