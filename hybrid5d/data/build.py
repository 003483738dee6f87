"""Loaders for a run: from a RunPlan (what the trainer calls) or from plain options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hybrid5d.data.dataset import open_dataset
from hybrid5d.data.loader import EvalLoader, Loader
from hybrid5d.data.options import DataOptions, LoaderOptions
from hybrid5d.data.tokenizer import BYTES, has_tokenizer
from hybrid5d.errors import ConfigError, ConfigErrors

if TYPE_CHECKING:
    from hybrid5d.plan.run import RunPlan


def build_loader(data: DataOptions, options: LoaderOptions) -> Loader:
    """Training rows of one dp rank."""
    return Loader(open_dataset(data), options)


def build_eval_loader(data: DataOptions, options: LoaderOptions) -> EvalLoader:
    """Evaluation rows of one dp rank: every row exactly once, in natural order; no rows give no steps."""
    data = replace(data, allow_empty=True)
    config = options.config.model_copy(update={"shuffle": False, "last_batch": "pad"})
    options = replace(options, config=config, start_step=0, max_steps=None, max_epochs=1)
    return EvalLoader(open_dataset(data), options)


def loader_from_plan(plan: RunPlan, dp_rank: int, *, start_step: int = 0) -> Loader:
    """The training loader of `plan` for one dp rank, from step `start_step` on. Raises DataError, ConfigErrors."""
    paths = plan.config.data.train_data_paths or ()
    return build_loader(_data_options(plan, tuple(paths)), loader_options(plan, dp_rank, start_step))


def eval_loader_from_plan(plan: RunPlan, dp_rank: int) -> EvalLoader:
    """The evaluation loader of `plan` for one dp rank. One pass over it is one evaluation; pass as often as needed."""
    paths = plan.config.data.val_data_paths or ()
    return build_eval_loader(_data_options(plan, tuple(paths)), loader_options(plan, dp_rank, 0))


def tokenizer_name(plan: RunPlan) -> str:
    """`byte` or the folder whose tokenizer the run uses: the one asked for, else the model's, else `byte`."""
    asked: str | None = plan.config.actor.tokenizer.tokenizer_model
    if asked is not None:
        return asked
    folder: str | None = plan.config.actor.model.model_path
    return str(folder) if has_tokenizer(folder) else BYTES


def _data_options(plan: RunPlan, paths: tuple[str, ...]) -> DataOptions:
    config = plan.config.data
    if config.type not in ("text", "tokens", "chat"):
        error = ConfigError("data.type", config.type, "nothing here reads it", "text, tokens or chat")
        raise ConfigErrors([error])
    assert plan.model is not None
    return DataOptions(config, paths, plan.config.row_length, plan.model.vocab_size, tokenizer_name(plan))


def loader_options(plan: RunPlan, dp_rank: int, start_step: int = 0) -> LoaderOptions:
    """How rows of `plan` are dealt to one dp rank."""
    runner, batch = plan.config.runner, plan.batch
    return LoaderOptions(
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        config=plan.config.data,
        dp=plan.layout.dp,
        dp_rank=dp_rank,
        token_budget=batch.max_tokens_per_micro_batch if batch.dynamic else None,
        balance_dp=plan.config.actor.enable_dp_load_balance,
        start_step=start_step,
        max_steps=runner.max_steps if runner.max_steps is not None and runner.max_steps >= 0 else None,
        max_epochs=runner.max_epochs if runner.max_epochs is not None and runner.max_epochs >= 0 else None,
    )
