"""What the schema is made of: value types that YAML writers need, the field with its meaning, the frozen block."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from hybrid5d.config.dtypes import PRECISIONS, precision


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true/false")
    return value


def _no_number(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError("true or false is needed, not a number")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


DEFAULT_PRECISION = "fp32"


def _precision(value: Any) -> Any:
    if value is None:
        return DEFAULT_PRECISION
    name = None if isinstance(value, (bool, float)) else precision(str(value))
    if name is not None:
        return name
    raise ValueError("known precisions are fp32 (32), bf16 (bf16-mixed) and fp16 (16, 16-mixed)")


def default_for_null(default: str) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value, json_schema_input_type=str | None)


MAX_INT = 2**53  # what JSON and every tool downstream can hold
MAX_RANKS = 2**20
MAX_MINUTES = 60 * 24 * 366
Int = Annotated[int, BeforeValidator(_no_bool), Field(ge=-MAX_INT, le=MAX_INT)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Bool = Annotated[bool, BeforeValidator(_no_number)]
_LIST = BeforeValidator(_as_list, json_schema_input_type=str | tuple[str, ...])
Strings = Annotated[tuple[str, ...], _LIST]
File = Annotated[str, AfterValidator(os.path.expanduser)]  # every key that names a file or folder: `~` works
Files = Annotated[tuple[File, ...], _LIST]
_WORDS = [*PRECISIONS, *(word for d in PRECISIONS.values() for word in (d.hf, *d.aliases)), 16, 32, None]
Precision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_precision), WithJsonSchema({"enum": _WORDS})]


def key(default: Any, description: str, unit: str = "", *, to: str = "", unread: str = "", only: str = "",
        **limits: Any) -> Any:  # fmt: skip
    """A schema field.

    Args:
        default, description, unit: the value where the key is absent, what it means, its unit.
        to: the part of our engine that reads the value as it stands. Without one, the plan says what it makes of the
            key (`plan.emitted`): part of the DeepSpeed config, or of a value of ours.
        unread: why the value has no effect where the plan makes nothing of it.
        only: the kind of run that reads it: `rl`, or `critic` (an RL run with a critic).
        limits: pydantic's `ge`, `gt`, ...
    """
    extra: Any = {
        name: text for name, text in (("unit", unit), ("to", to), ("unread", unread), ("only", only)) if text
    } or None
    if isinstance(default, type):
        return Field(default_factory=default, description=description, json_schema_extra=extra, **limits)
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


class Block(BaseModel):
    """A frozen mapping of the YAML; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=()
    )
