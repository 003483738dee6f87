"""A whole translation: read, plan, account. What `hybrid5d convert` shows, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, SpoiltKey, best_effort, judged
from hybrid5d.plan.outputs import layout_summary
from hybrid5d.plan.report import report_of
from hybrid5d.plan.run import RunPlan, actor_world, assemble, find_faults
from hybrid5d.plan.unchecked import unchecked_rules
from hybrid5d.rlinf.account import Account
from hybrid5d.rlinf.load import load_document


@dataclass
class Translation:
    """Verdict, numbers and account. `plan` is there as far as the input could be understood, also when refused."""

    account: Account
    plan: RunPlan | None = None
    errors: list[ConfigError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    report: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """translate or refuse."""
        return "refuse" if self.errors else "translate"

    def to_dict(self) -> dict[str, Any]:
        """The object that `--format json` prints."""
        plan = self.plan
        return {
            "verdict": self.verdict,
            "errors": [e.to_dict() for e in self.errors],
            "layout": None if plan is None else layout_summary(plan),
            "batch": None if plan is None else _batch(plan),
            "optimizer": None if plan is None else _optimizer(plan),
            "schedule": None if plan is None else plan.schedule.to_dict(),
            "precision": None if plan is None else _precision(plan),
            "deepspeed": None if plan is None else plan.deepspeed,
            "engine": None if plan is None else _engine(plan),
            "report": self.report,
            "notices": self.notices,
            "unchecked": self.unchecked,
        }


def translate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    gpus_per_node: int = 8,
    world_size: int | None = None,
    model: str | None = None,
) -> Translation:
    """Translate a YAML; never raises for what the file says."""
    words = [*overrides, *([f"actor.model.model_path={model}"] if model else [])]
    document = load_document(path, words)
    rest = document.judged
    result = Translation(document.account, errors=list(document.errors), notices=list(document.account.notices))
    if document.config is not None:
        world, errors = _world(document.config, gpus_per_node, world_size, result.notices)
        assembly = assemble(document.config, world)
        result.plan = assembly.plan
        faults = [*errors, *assembly.errors]
        result.notices = [*assembly.plan.notices, *(n for n in result.notices if n not in assembly.plan.notices)]
        result.unchecked = unchecked_rules(document.config, assembly.numbers)
        result.notices += [f"unchecked: {rule}" for rule in result.unchecked]
    if rest is not None and (document.config is None or document.account.spoilt):
        faults = best_effort(partial(_further, rest, gpus_per_node, world_size))
    if rest is not None:
        result.errors += [e for e in faults if e not in result.errors]
        result.errors += _model_folder(result.errors, model)
    result.report = report_of(document.account, result.plan)
    if result.plan is not None:
        result.plan = replace(result.plan, report=tuple(result.report))
    return result


def _further(config: RunConfig, gpus_per_node: int, world_size: int | None) -> list[ConfigError]:
    """Faults beside those of the file itself, in its config with holes."""
    world = world_size
    with suppress(SpoiltKey):
        world, _ = _world(config, gpus_per_node, world_size, [])
    errors = judged([lambda: actor_world(config, gpus_per_node)[1]])
    return errors + find_faults(config, world, training=False)


def _world(
    config: Any, gpus_per_node: int, world_size: int | None, notices: list[str]
) -> tuple[int, list[ConfigError]]:
    placement, errors = actor_world(config, gpus_per_node)
    if world_size is not None:
        if placement is not None and placement.processes != world_size:
            notices.append(
                f"--world-size {world_size} replaces the {placement.processes} processes of component_placement"
            )
        return world_size, []
    if placement is None:
        model = config.actor.model
        least = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
        return least, errors
    return placement.processes, errors


def _model_folder(errors: list[ConfigError], model: str | None) -> list[ConfigError]:
    if model is None or (Path(model) / "config.json").is_file():
        return []
    if any(e.key.startswith("actor.model.model_path") for e in errors):
        return []
    return [ConfigError("--model", model, "the folder has no config.json", "give a Hugging Face model folder")]


def _batch(plan: RunPlan) -> dict[str, Any]:
    batch = plan.batch
    return {
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "sequences_per_rl_step": batch.sequences_per_rl_step,
        "n_minibatches": batch.n_minibatches,
        "dynamic": batch.dynamic,
        "max_tokens_per_micro_batch": batch.max_tokens_per_micro_batch,
    }


def _optimizer(plan: RunPlan) -> dict[str, Any]:
    optim = plan.config.actor.optim
    adam = optim.optimizer != "sgd"
    return {
        "type": plan.deepspeed["optimizer"]["type"],
        "lr": optim.lr,
        "betas": [optim.adam_beta1, optim.adam_beta2] if adam else None,
        "eps": optim.adam_eps if adam else None,
        "weight_decay": plan.schedule.weight_decay(0),
        "momentum": None if adam else optim.sgd_momentum,
    }


def _precision(plan: RunPlan) -> dict[str, Any]:
    precision = plan.precision
    scale: Any = precision.loss_scale
    return {"dtype": precision.dtype, "loss_scale": "dynamic" if precision.dynamic_loss_scale else scale}


def _engine(plan: RunPlan) -> dict[str, Any]:
    """What no DeepSpeed key can say."""
    config = plan.config
    model, runner = config.actor.model, config.runner
    return {
        "layout": layout_summary(plan),
        "context_parallel": {
            "cp_comm_type": model.cp_comm_type,
            "cp_load_balance": model.cp_load_balance,
            "hierarchical_context_parallel_sizes": model.hierarchical_context_parallel_sizes,
        },
        "recompute": {
            "granularity": plan.recompute.granularity,
            "method": plan.recompute.method,
            "num_layers": plan.recompute.num_layers,
        },
        "schedule": plan.schedule.to_dict(),
        "weight_decay_groups": {
            "decayed": "matrices and embeddings",
            "not_decayed": "biases and 1-D parameters (norms)",
        },
        "loss_normalization": config.actor.loss_normalization,
        "dynamic_batch": {
            "enabled": plan.batch.dynamic,
            "max_tokens_per_micro_batch": plan.batch.max_tokens_per_micro_batch,
        },
        "dp_load_balance": config.actor.enable_dp_load_balance,
        "optimizer_steps_per_rl_step": plan.batch.n_minibatches if plan.batch.sequences_per_rl_step else None,
        "freeze_parameters": list(config.actor.freeze_parameters),
        "seed": config.actor.seed,
        "data_seed": config.data.seed,
        "seq_length": config.row_length,
        "packing": config.data.packing,
        "model_path": model.model_path,
        "tokenizer": config.actor.tokenizer.tokenizer_model,
        "max_steps": runner.max_steps,
        "max_epochs": runner.max_epochs,
        "save_interval": runner.save_interval,
        "val_check_interval": runner.val_check_interval,
        "resume_dir": runner.resume_dir,
        "output_dir": runner.output_dir,
        "experiment_name": runner.experiment_name,
        "distributed_timeout_minutes": config.actor.megatron.distributed_timeout_minutes,
    }
