"""What the data pipeline is given: the YAML's `data` block, and what a plan derives from other blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid5d.config.schema import DataConfig


@dataclass(frozen=True)
class DataOptions:
    """What to read and how samples are made of it.

    Attributes:
        config: `type` is text (files are documents), tokens (rows of ids) or chat (conversations).
        paths: files, folders, globs, `stdlib`; see `sources.resolve_sources`.
        seq_length: most tokens of a row; None: the longest sample's (not for text, whose documents it cuts).
        vocab_size: of the model; every id must be below it.
        tokenizer: an HF folder, or `byte`. Unused for tokens.
        allow_empty: no row at all is no fault (evaluation).
    """

    config: DataConfig
    paths: tuple[str, ...]
    seq_length: int | None
    vocab_size: int
    tokenizer: str = "byte"
    allow_empty: bool = False


@dataclass(frozen=True)
class LoaderOptions:
    """How rows become steps: by `shuffle`, `seed`, `packing` and `last_batch` of the block, and the batch arithmetic.

    Attributes:
        global_batch_size: rows per step over all dp ranks; samples per step with a token budget.
        micro_batch_size: rows per micro-batch; unused with a token budget.
        token_budget: most tokens of a micro-batch (already times cp), None for micro-batches of micro_batch_size rows.
            Micro-batches are then one packed row each, balanced over dp ranks.
        balance_dp: without a budget, deal rows to dp ranks by tokens (equally many each) instead of by place.
        start_step: first step to yield. max_steps, max_epochs: None for no bound; the smaller bound counts.
    """

    global_batch_size: int
    micro_batch_size: int
    config: DataConfig = field(default_factory=DataConfig)
    dp: int = 1
    dp_rank: int = 0
    token_budget: int | None = None
    balance_dp: bool = False
    start_step: int = 0
    max_steps: int | None = None
    max_epochs: int | None = None
