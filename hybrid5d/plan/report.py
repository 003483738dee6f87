"""The account of every key: where it went, or why it has no place."""

from __future__ import annotations

from typing import Any

from hybrid5d.config.schema import RunConfig, schema_keys
from hybrid5d.config.tree import get, leaves
from hybrid5d.plan.deepspeed_config import offload_ratio
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.targets import DEEPSPEED_TARGETS, engine_target
from hybrid5d.rlinf.account import Account
from hybrid5d.rlinf.classify import owner

DISPOSITIONS = ("overridden", "dropped", "engine", "deepspeed", "defaulted")
_MUST_AGREE = "must agree with actor.model.precision, which decides"


def entry(key: str, value: Any, disposition: str, target: str | None, why: str) -> dict[str, Any]:
    """One line of the report."""
    return {"key": key, "value": value, "disposition": disposition, "target": target, "why": why}


def build_report(plan: RunPlan) -> list[dict[str, Any]]:
    """One entry per input key, then one per schema key that took its default."""
    account: Account = plan.config.account or _bare_account(plan.config)
    return report_of(account, plan)


def _bare_account(config: RunConfig) -> Account:
    """Stands in where a config was built in Python: its explicitly set fields are the input."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    return Account(tree=tree, owned=dict(leaves(tree)))


def report_of(account: Account, plan: RunPlan | None) -> list[dict[str, Any]]:
    """The report of whatever was read; without a plan every key is accounted for as far as it was sorted."""
    entries: dict[str, dict[str, Any]] = {}
    for path, value in account.owned.items():
        entries[path] = _owned(path, value, plan)
    for path, (value, why) in account.overridden.items():
        entries[path] = entry(path, value, "overridden", None, why)
    for path, (value, why) in account.dropped.items():
        entries[path] = entry(path, value, "dropped", None, why)
    for path, target in account.aliases.items():
        entries[path] = entry(
            path, get(account.tree, path), "engine", target, f"read as {target}, which the YAML leaves out"
        )
    for path, what in account.command_line.items():
        _mark(entries, path, what)
    if plan is not None:
        _defaults(entries, account, plan)
    return list(entries.values())


def _mark(entries: dict[str, dict[str, Any]], path: str, what: str) -> None:
    for name, line in entries.items():
        if name == path or name.startswith(f"{path}."):
            line["why"] = f"{line['why']} ({what})"
    if what.startswith("removed") and path not in entries:
        entries[path] = entry(path, None, "overridden", None, what)


def _owned(path: str, value: Any, plan: RunPlan | None) -> dict[str, Any]:
    name = owner(path) or path
    component = "".join(path.split(".")[2:3])
    if name == "cluster.component_placement" and "actor" not in [p.strip() for p in component.split(",")]:
        return entry(path, value, "dropped", None, "placement of another component")
    if name == "actor.deepspeed" and path != name:
        why = "'auto': resolved from the YAML, or DeepSpeed's default" if value == "auto" else "merged last"
        return entry(path, value, "deepspeed", path.removeprefix("actor.deepspeed."), why)
    found = schema_keys().get(name)
    why = found.description if found is not None else "a block of the schema"
    lost = _lost(name, plan)
    if lost is not None:
        return entry(path, value, lost[0], None, lost[1])
    target = DEEPSPEED_TARGETS.get(name)
    if target is not None:
        return entry(path, value, "deepspeed", target, why)
    if name == "actor.model.precision" and plan is not None and plan.precision.dtype != "fp32":
        return entry(path, value, "deepspeed", f"{plan.precision.dtype}.enabled", why)
    return entry(path, value, "engine", engine_target(name), why)


def _lost(name: str, plan: RunPlan | None) -> tuple[str, str] | None:
    """(disposition, why) of a schema key whose value has no effect in this plan."""
    if plan is None:
        return None
    config, precision = plan.config, plan.precision
    sched = config.actor.lr_sched
    if name in ("actor.optim.fp16", "actor.optim.bf16"):
        return "overridden", _MUST_AGREE
    if name == "actor.optim.loss_scale" and precision.dtype != "fp16":
        return "dropped", f"{precision.dtype} needs no loss scale (Megatron would apply a constant one)"
    dynamic = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
    if name in [f"actor.optim.{n}" for n in dynamic] and not precision.dynamic_loss_scale:
        return "dropped", "only a dynamic fp16 loss scale reads it"
    if name == "actor.lr_sched.lr_warmup_iters" and sched.lr_warmup_fraction is not None:
        return "overridden", f"lr_warmup_fraction={sched.lr_warmup_fraction:g} wins"
    if (
        name == "actor.optim.weight_decay"
        and sched.lr_decay_style != "constant"
        and sched.start_weight_decay is not None
    ):
        return "overridden", "lr_sched.start_weight_decay wins when the style is not constant"
    offload = ("actor.optim.optimizer_cpu_offload", "actor.optim.optimizer_offload_fraction")
    if name in offload and "offload_optimizer" not in plan.deepspeed["zero_optimization"]:
        return "dropped", "nothing is offloaded: it takes the switch and a fraction above 0"
    if name == offload[1] and offload_ratio(config) != config.actor.optim.optimizer_offload_fraction:
        return "overridden", "DeepSpeed offloads a part with ZeRO 3 only: all of it goes to the CPU"
    if name == "actor.optim.sgd_momentum" and config.actor.optim.optimizer != "sgd":
        return "dropped", "only sgd reads it"
    if name.startswith("actor.optim.adam_") and config.actor.optim.optimizer == "sgd":
        return "dropped", "only adam reads it"
    if name.startswith("actor.lr_sched.lr_wsd_") and sched.lr_decay_style != "WSD":
        return "dropped", "only lr_decay_style WSD reads it"
    if name in _ARCHITECTURE and plan.model is not None:
        return "overridden", "config.json of the model folder wins"
    return _lost_rl(name, plan)


_ARCHITECTURE = tuple(
    f"actor.model.{n}"
    for n in (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "padded_vocab_size",
    )
)


def _lost_rl(name: str, plan: RunPlan) -> tuple[str, str] | None:
    config = plan.config
    rl = plan.batch.sequences_per_rl_step is not None
    if name in ("actor.global_batch_size", "actor.micro_batch_size") and rl:
        return "overridden", "RLinf's RL batch arithmetic overwrites it"
    foreign = config.account is not None and config.account.foreign
    if name in ("algorithm.loss_agg_func", "algorithm.use_valid_token_scale", "algorithm.sampling_params.temperature"):
        return "dropped", "belongs to the RL loss; hybrid5d's loss is set by actor.loss_normalization"
    if name == "algorithm.logprob_forward_micro_batch_size":
        return "dropped", "splits RLinf's log-prob pass; ours takes the rows it is given"
    if name == "data.prompt_key" and foreign:
        return "dropped", "field of RLinf's prompt data"
    if name == "data.max_prompt_length":
        return "dropped", "width of RLinf's left-padded prompts; our rows are not padded that way"
    if name in ("actor.model.seq_length", "actor.model.encoder_seq_length") and config.runner.seq_length is not None:
        return "overridden", "runner.seq_length is the row length"
    if name == "actor.model.encoder_seq_length" and config.actor.model.seq_length is not None:
        return "overridden", "actor.model.seq_length is the row length"
    return None


def _defaults(entries: dict[str, dict[str, Any]], account: Account, plan: RunPlan) -> None:
    aliased = set(account.aliases.values())
    given = [*entries]
    for name in schema_keys():
        if name in aliased or any(path == name or path.startswith(f"{name}.") for path in given):
            continue
        value = _value(plan.config, name)
        target = DEEPSPEED_TARGETS.get(name) or engine_target(name)
        entries[name] = entry(name, value, "defaulted", target, schema_keys()[name].description)


def _value(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value
