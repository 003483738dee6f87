"""The account of every key: where it went, or why it has no place. Read from what the plan emitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid5d.config.classify import owner
from hybrid5d.config.loaded import KeyReport
from hybrid5d.config.schema import NO_CRITIC, RunConfig, schema_keys
from hybrid5d.config.tree import get, leaves
from hybrid5d.plan.critic import replaced
from hybrid5d.plan.emitted import Emitted
from hybrid5d.plan.outputs import layout_summary
from hybrid5d.plan.placement import components
from hybrid5d.plan.run import RunPlan

_M, _S = "actor.model.", "actor.lr_sched."
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "padded_vocab_size",
)
_LENGTHS = ("runner.seq_length", f"{_M}seq_length", f"{_M}encoder_seq_length")


def emit_engine(plan: RunPlan) -> Emitted:
    """What no DeepSpeed key can say: the keys that the engine reads as they stand, and what the plan made of others."""
    config, e = plan.config, Emitted()
    cluster = ("cluster.num_nodes", "cluster.component_placement", "cluster.node_groups")
    for name, value in layout_summary(plan).items():
        e.emit(f"layout.{name}", value, *(cluster if name == "world_size" else ()))
    for key, field in schema_keys().items():
        extra = field.json_schema_extra or {}
        reads = {"rl": config.is_rl, "critic": config.has_critic}.get(extra.get("only", ""), True)
        if key.startswith("critic.") and extra.get("only") != "rl":
            if config.has_critic:  # a run of its own: its keys are shown as they stand
                e.emit(key, _value(config, key), key)
        elif extra.get("to") and reads:
            e.emit(extra["to"], _value(config, key), key)
    flags = ("actor.optim.fp16", "actor.optim.bf16")
    e.emit("precision", plan.precision.dtype, f"{_M}precision", over=flags,
           why="must agree with actor.model.precision, which decides")  # fmt: skip
    lengths = [_value(config, key) for key in _LENGTHS]
    last = next((i for i, length in enumerate(lengths) if length is not None), len(lengths) - 1)
    e.emit("seq_length", config.row_length, *_LENGTHS[: last + 1], over=_LENGTHS[last + 1 :],
           why=f"{_LENGTHS[last]} is the row length")  # fmt: skip
    for name in _SIZES:
        if plan.model is not None:
            e.lost[f"{_M}{name}"] = "config.json of the model folder wins"
        else:
            e.emit(f"model.{name}", _value(config, f"{_M}{name}"), f"{_M}{name}")
    full = plan.recompute.granularity == "full"
    for name in ("method", "num_layers"):
        e.emit(f"recompute.{name}", getattr(plan.recompute, name), *([f"{_M}recompute_{name}"] if full else []))
    _emit_schedule(e, plan)
    e.emit("weight_decay_groups.decayed", "matrices and embeddings")
    e.emit("weight_decay_groups.not_decayed", "biases and 1-D parameters (norms)")
    budget, rl = plan.batch.max_tokens_per_micro_batch, config.is_rl
    e.emit("dynamic_batch.max_tokens_per_micro_batch", budget,
           *(["runner.max_tokens_per_mbs"] if plan.batch.dynamic else []))  # fmt: skip
    e.emit("optimizer_steps_per_rl_step", plan.batch.n_minibatches if rl else None)
    e.emit("multi_agent", config.algorithm.multi_agent, *(["algorithm.multi_agent"] if rl else []))
    return e


def _emit_schedule(e: Emitted, plan: RunPlan) -> None:
    sched, shown = plan.config.actor.lr_sched, plan.schedule.to_dict()
    decays, fraction = sched.lr_decay_style != "constant", sched.lr_warmup_fraction
    iters = [f"{_S}lr_decay_iters"] if decays or fraction is not None else []
    ramp = [f"{_S}{n}" for n in ("start_weight_decay", "end_weight_decay") if getattr(sched, n) is not None]
    sources = {
        "decay_steps": iters,
        "warmup_steps": [f"{_S}lr_warmup_iters"] if fraction is None else [f"{_S}lr_warmup_fraction", *iters],
        "warmup_init": [f"{_S}lr_warmup_init"],
        "min_lr": [f"{_S}min_lr"] if decays else [],
        "max_lr": ["actor.optim.lr"],
        "weight_decay": [*ramp, *(["actor.optim.weight_decay"] if len(ramp) < 2 else [])] if decays else [],
        "weight_decay_style": [f"{_S}weight_decay_incr_style"] if decays else [],
    }
    for name in ("wsd_decay_steps", "wsd_decay_style"):
        sources[name] = [f"{_S}lr_{name.replace('steps', 'iters')}"] if sched.lr_decay_style == "WSD" else []
    for name, value in shown.items():
        if name != "style":
            e.emit(f"schedule.{name}", value, *sources[name])
    if fraction is not None:
        e.lost[f"{_S}lr_warmup_iters"] = f"lr_warmup_fraction={fraction:g} wins"


def entry(key: str, value: Any, disposition: str, target: str | None, why: str) -> dict[str, Any]:
    """One line of the report. `disposition`: deepspeed, engine, overridden, dropped or defaulted."""
    return {"key": key, "value": value, "disposition": disposition, "target": target, "why": why}


def build_report(plan: RunPlan) -> list[dict[str, Any]]:
    """One entry per input key, then one per schema key that took its default."""
    keys = plan.config.keys
    if keys is None:  # a config built in Python: its explicitly set fields are the input
        tree = plan.config.model_dump(mode="json", exclude_unset=True)
        keys = KeyReport(tree=tree, owned=dict(leaves(tree)))
    return report_of(keys, plan)


def report_of(keys: KeyReport, plan: RunPlan | None) -> list[dict[str, Any]]:
    """The report of whatever was read; without a plan every key is accounted for as far as it was sorted."""
    fates = None if plan is None else _fates(plan)
    entries = {path: _owned(path, value, fates) for path, value in keys.owned.items()}
    for path, (value, why) in keys.overridden.items():
        entries[path] = entry(path, value, "overridden", None, why)
    for path, (value, why) in keys.dropped.items():
        entries[path] = entry(path, value, "dropped", None, why)
    for path, target in keys.aliases.items():
        why = f"read as {target}, which the YAML leaves out"
        entries[path] = entry(path, get(keys.tree, path), "engine", target, why)
    for path, what in keys.command_line.items():
        _mark(entries, path, what)
    if plan is not None and fates is not None:
        _defaults(entries, keys, plan, fates)
    return list(entries.values())


def _mark(entries: dict[str, dict[str, Any]], path: str, what: str) -> None:
    for name, line in entries.items():
        if name == path or name.startswith(f"{path}."):
            line["why"] = f"{line['why']} ({what})"
    if what.startswith("removed") and path not in entries:
        entries[path] = entry(path, None, "overridden", None, what)


Fates = Mapping[str, tuple[str, str | None, str]]  # schema key -> disposition, target, why


def _fates(plan: RunPlan) -> Fates:
    """What became of each schema key."""
    engine, deepspeed = emit_engine(plan), plan.emitted
    result: dict[str, tuple[str, str | None, str]] = {}
    for key, field in schema_keys().items():
        extra, lost = field.json_schema_extra or {}, deepspeed.lost | engine.lost
        to, ours, theirs = extra.get("to"), engine.paths(key), deepspeed.paths(key)
        if to in ours:
            result[key] = ("engine", to, field.description)
        elif key in lost:
            result[key] = ("overridden", None, lost[key])
        elif theirs:
            result[key] = ("deepspeed", ", ".join(theirs), field.description)
        elif ours:
            result[key] = ("engine", ", ".join(ours), field.description)
        else:
            unread = NO_CRITIC if key.startswith("critic.") else extra.get("unread", "nothing reads it")
            result[key] = ("dropped", None, unread)
    return result | _fates_of_critic(plan)


def _fates_of_critic(plan: RunPlan) -> dict[str, tuple[str, str | None, str]]:
    """What the critic does not read of its keys, though they are shown: as the actor would not."""
    if plan.critic is None:
        return {}
    found = {
        key.replace("actor.", "critic.", 1): (fate, None, why.replace("actor.", "critic."))
        for key, (fate, _, why) in _fates(plan.critic).items()
        if key.startswith("actor.") and fate in ("dropped", "overridden")
    }
    given = {key: ("overridden", None, why) for key, why in replaced(plan.config).items()}
    return {key: fate for key, fate in (found | given).items() if key in schema_keys()}


def _owned(path: str, value: Any, fates: Fates | None) -> dict[str, Any]:
    name = owner(path) or path
    component = "".join(path.split(".")[2:3])
    if name == "cluster.component_placement" and path != name and "actor" not in components(component):
        return entry(path, value, "dropped", None, "placement of another component")
    if name == "actor.deepspeed" and path != name:
        why = "'auto': resolved from the YAML, or DeepSpeed's default" if value == "auto" else "merged last"
        return entry(path, value, "deepspeed", path.removeprefix("actor.deepspeed."), why)
    if name not in schema_keys():
        return entry(path, value, "engine", None, "a block of the schema, all of it defaults")
    if fates is None:
        return entry(path, value, "dropped", None, "the file is refused, so there is no plan that reads it")
    return entry(path, value, *fates[name])


def _defaults(entries: dict[str, dict[str, Any]], keys: KeyReport, plan: RunPlan, fates: Fates) -> None:
    aliased, given = set(keys.aliases.values()), [*entries]
    for name, field in schema_keys().items():
        if name in aliased or any(path == name or path.startswith(f"{name}.") for path in given):
            continue
        entries[name] = entry(name, _value(plan.config, name), "defaulted", fates[name][1], field.description)


def _value(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value
