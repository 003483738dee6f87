"""Options of the data pipeline, written short."""

from __future__ import annotations

from typing import Any

from hybrid5d.config.schema import DataConfig
from hybrid5d.data.options import DataOptions, LoaderOptions


def data_options(
    kind: str, paths: tuple[str, ...], seq_length: int | None, vocab_size: int, **more: Any
) -> DataOptions:
    """DataOptions; `more`: of theirs or of the `data` block."""
    own = {k: more.pop(k) for k in ("tokenizer", "allow_empty") if k in more}
    return DataOptions(DataConfig(type=kind, **more), paths, seq_length, vocab_size, **own)


def loader_options(global_batch_size: int, micro_batch_size: int, **more: Any) -> LoaderOptions:
    """LoaderOptions; `more`: of theirs or of the `data` block."""
    block = {k: more.pop(k) for k in ("shuffle", "seed", "packing", "last_batch") if k in more}
    return LoaderOptions(global_batch_size, micro_batch_size, DataConfig(**{"seed": 0, **block}), **more)
