"""The model's numbers for the rules: from the Hugging Face folder where it exists, else from the YAML, else unknown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.hf.families import is_vision, text_part
from hybrid5d.hf.spec import ModelSpec, dropout_faults, parse_hf_config, read_hf_config

_KEY = "actor.model.model_path"


@dataclass(frozen=True)
class ModelNumbers:
    """What the divisibility rules need; None = unknown. `source` names where they came from."""

    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    vocab_size: int | None = None
    source: str = ""
    intermediate_size: int | None = None

    @property
    def cut_by_tp(self) -> tuple[int | None, int | None, int | None]:
        """Query heads, key-value heads, MLP width: what tp cuts without padding."""
        return self.num_attention_heads, self.num_key_value_heads, self.intermediate_size


@dataclass
class ModelReading:
    """Outcome of looking for the model."""

    spec: ModelSpec | None = None
    numbers: ModelNumbers = field(default_factory=ModelNumbers)
    errors: list[ConfigError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def read_model(config: RunConfig, training: bool) -> ModelReading:
    """Find the model. A missing folder is an error only where a run is to start."""
    reading = ModelReading()
    path = config.actor.model.model_path
    folder = Path(path) if path else None
    if folder is not None and (folder / "config.json").is_file():
        _from_folder(folder, reading, training)
        _compare(config, reading)
        return reading
    if training:
        reading.errors.append(_missing(path))
    model = config.actor.model
    heads = model.num_attention_heads
    reading.numbers = ModelNumbers(
        model.num_layers, heads, model.num_query_groups or None, model.padded_vocab_size,
        "the YAML" if model.num_layers or heads or model.num_query_groups else "", model.ffn_hidden_size,
    )  # fmt: skip
    return reading


def _missing(path: str | None) -> ConfigError:
    if not path:
        return ConfigError(_KEY, None, "a run needs a model", "name a Hugging Face folder")
    rule = "the folder does not exist" if not Path(path).is_dir() else "the folder has no config.json"
    return ConfigError(_KEY, path, rule, "name a Hugging Face model folder")


def _from_folder(folder: Path, reading: ModelReading, training: bool) -> None:
    try:
        raw = read_hf_config(folder)
        if is_vision(raw):
            _vision(folder, raw, reading, training)
            return
        spec = parse_hf_config(raw)
    except ConfigErrors as exc:
        reading.errors.extend(exc.errors)
        return
    reading.spec = spec
    reading.notices += spec.notices
    if training:
        reading.errors += dropout_faults(spec)
    reading.numbers = ModelNumbers(
        spec.num_layers, spec.num_attention_heads, spec.num_key_value_heads, spec.vocab_size, str(folder),
        spec.intermediate_size,
    )  # fmt: skip


def _vision(folder: Path, raw: dict[str, Any], reading: ModelReading, training: bool) -> None:
    if training:
        rule = "vision-language models cannot be trained yet"
        reading.errors.append(ConfigError(_KEY, str(folder), rule, "use a text model"))
    text = text_part(raw)
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
    layers, heads, kv, vocab, inner = (n if isinstance(n, int) else None for n in map(text.get, names))
    reading.numbers = ModelNumbers(layers, heads, kv or heads, vocab, f"{folder} (its language model)", inner)
    reading.notices.append(
        "vision-language model: the numbers are those of its language model; training it is not supported yet"
    )


def _compare(config: RunConfig, reading: ModelReading) -> None:
    model, numbers = config.actor.model, reading.numbers
    pairs = (
        ("num_layers", model.num_layers, numbers.num_layers),
        ("num_attention_heads", model.num_attention_heads, numbers.num_attention_heads),
        ("num_query_groups", model.num_query_groups, numbers.num_key_value_heads),
        ("hidden_size", model.hidden_size, reading.spec.hidden_size if reading.spec else None),
        ("ffn_hidden_size", model.ffn_hidden_size, numbers.intermediate_size),
        ("padded_vocab_size", model.padded_vocab_size, numbers.vocab_size),
    )
    for name, written, real in pairs:
        if written is not None and real is not None and written != real:
            reading.notices.append(f"actor.model.{name}={written} is overwritten by config.json: {real}")
