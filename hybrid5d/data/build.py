"""Loaders for a run: from a RunPlan (what the trainer calls) or from plain options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hybrid5d.data.chat import ChatKeys
from hybrid5d.data.dataset import DataOptions, open_dataset
from hybrid5d.data.loader import EvalLoader, Loader, LoaderOptions
from hybrid5d.data.tokenizer import BYTES, has_tokenizer
from hybrid5d.errors import ConfigError, ConfigErrors, DataError

if TYPE_CHECKING:
    from hybrid5d.plan.run import RunPlan


def build_loader(data: DataOptions, options: LoaderOptions) -> Loader:
    """Training rows of one dp rank."""
    return Loader(open_dataset(data), options)


def build_eval_loader(data: DataOptions, options: LoaderOptions) -> EvalLoader:
    """Evaluation rows of one dp rank: every row exactly once, in natural order; no rows give no steps."""
    data = replace(data, allow_empty=True)
    options = replace(options, shuffle=False, last_batch="pad", start_step=0, max_steps=None, max_epochs=1)
    return EvalLoader(open_dataset(data), options)


def loader_from_plan(plan: RunPlan, dp_rank: int, *, start_step: int = 0) -> Loader:
    """The training loader of `plan` for one dp rank, from step `start_step` on. Raises DataError, ConfigErrors."""
    paths = plan.config.data.train_data_paths or ()
    return build_loader(_data_options(plan, tuple(paths)), _loader_options(plan, dp_rank, start_step))


def eval_loader_from_plan(plan: RunPlan, dp_rank: int) -> EvalLoader:
    """The evaluation loader of `plan` for one dp rank. One pass over it is one evaluation; pass as often as needed."""
    paths = plan.config.data.val_data_paths or ()
    return build_eval_loader(_data_options(plan, tuple(paths)), _loader_options(plan, dp_rank, 0))


def prepare_data(plan: RunPlan) -> tuple[str, ...]:
    """Reads and tokenises all data of `plan` before ranks are started; a line for each of training and evaluation.

    The ranks then find the tokens in the cache. Raises one DataError with the faults of both.
    """
    lines, faults = [], []
    for name, make in (("training data", loader_from_plan), ("evaluation data", eval_loader_from_plan)):
        try:
            lines.append(f"{name}: {make(plan, 0).describe()}")
        except DataError as e:
            faults.append(str(e))
    if faults:
        raise DataError("\n".join(faults))
    return tuple(lines)


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
    return DataOptions(
        type=config.type,
        paths=paths,
        seq_length=plan.config.row_length,
        vocab_size=plan.model.vocab_size,
        tokenizer=tokenizer_name(plan),
        overlong=config.overlong,
        train_on=config.train_on,
        chat_keys=ChatKeys(
            messages=config.messages_key,
            prompt=config.prompt_key,
            response=config.response_key,
            instruction=config.instruction_key,
            input=config.input_key,
            output=config.output_key,
        ),
        text_key=config.text_key,
        chat_template=config.chat_template,
        cache_dir=config.cache_dir,
        num_workers=config.num_workers,
    )


def _loader_options(plan: RunPlan, dp_rank: int, start_step: int) -> LoaderOptions:
    data, runner, batch = plan.config.data, plan.config.runner, plan.batch
    return LoaderOptions(
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        dp=plan.layout.dp,
        dp_rank=dp_rank,
        seed=data.seed,
        shuffle=data.shuffle,
        last_batch=data.last_batch,
        packing=data.packing,
        token_budget=batch.max_tokens_per_micro_batch if batch.dynamic else None,
        balance_dp=plan.config.actor.enable_dp_load_balance,
        start_step=start_step,
        max_steps=runner.max_steps if runner.max_steps is not None and runner.max_steps >= 0 else None,
        max_epochs=runner.max_epochs if runner.max_epochs is not None and runner.max_epochs >= 0 else None,
    )
