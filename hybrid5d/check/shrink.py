"""A run made small enough for this machine, with everything kept that decides whether its layout is right. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hybrid5d.check.cuts import Degrees
from hybrid5d.config import tree as trees
from hybrid5d.config.schema import RL_TASKS, RunConfig
from hybrid5d.errors import ConfigError
from hybrid5d.hf.families import FAMILIES, TEXT_PARTS, text_part
from hybrid5d.hf.spec import ModelSpec, parse_hf_config
from hybrid5d.plan.draft import MODEL_NUMBERS, ranks_per_node
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.sequence_rules import ulysses_degree
from hybrid5d.plan.tensors import shapes

STEPS = 3
VOCABULARY = 101  # odd: tp pads it
ROW_LENGTH, BUDGET = 40, 80  # tokens of a row, and of a micro-batch where a budget forms it
WINDOW = 7
# Learning rates that move weights within three steps. AdamW divides by the root of its second moment: with a tiny eps
# it blows rounding up to a whole step wherever a gradient is nearly nothing.
LEARNING_RATE = {"sgd": {"fp32": 0.5, "bf16": 0.1}, "adam": {"fp32": 1e-2, "bf16": 2e-3}}
ADAM_EPS, CLIP = 1e-3, 0.4
_UNSHARED = (*TEXT_PARTS, "vision_config", "quantization_config", "auto_map", "dtype", "torch_dtype")
_KEPT_SECTIONS = ("zero_optimization", "data_types", "communication_data_type")  # of actor.deepspeed
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def refusals(plan: RunPlan) -> list[ConfigError]:
    """What of a run cannot be checked here, by name."""
    config, errors = plan.config, []

    def refuse(key: str, value: Any, rule: str, fix: str) -> None:
        errors.append(ConfigError(key, value, rule, fix))

    if config.runner.task_type in RL_TASKS:
        rule = "check compares supervised steps; it has no reference for an RL step"
        refuse("runner.task_type", config.runner.task_type, rule, "give the layout with runner.task_type: sft")
    if plan.model is None or not plan.model.raw:
        rule = "check reads norms, biases, heads and the rotary embedding from the folder's config.json"
        refuse("actor.model.model_path", config.actor.model.model_path, rule, "name a folder that has one")
    if plan.precision.dtype == "fp16":
        rule = "check runs on the CPU, where fp16 does not train"
        refuse("actor.model.precision", "fp16", rule, "check the layout in fp32 or bf16")
    return errors


def cut_of(plan: RunPlan) -> Degrees:
    """The run's own layout."""
    model, layout = plan.config.actor.model, plan.layout
    assert plan.model is not None
    sizes, heads = model.hierarchical_context_parallel_sizes, plan.model.num_key_value_heads
    node = ranks_per_node(plan.config, layout.world_size)
    ulysses = ulysses_degree(model.cp_comm_type, sizes, heads, layout.tp, layout.cp, node)
    if model.cp_comm_type == "a2a":
        ulysses = layout.cp
    return Degrees(layout, plan.sequence_parallel, ulysses)


@dataclass(frozen=True)
class Small:
    """The small run.

    Attributes:
        model: its config.json.
        rows: rows of a global batch.
    """

    plan: RunPlan
    cut: Degrees
    model: dict[str, Any]
    rows: int

    def tree(self, cut: Degrees, folder: str) -> dict[str, Any]:
        """The YAML of one layout. The model and the rows lie in `folder`."""
        return _run(self, cut, folder)

    @property
    def spec(self) -> ModelSpec:
        """What config.json says."""
        return parse_hf_config(dict(self.model))

    @property
    def packed(self) -> bool:
        """Several documents share a row."""
        return self.plan.config.data.packing == "documents"


def shrink(plan: RunPlan, cut: Degrees) -> Small:
    """The small run whose widest layout is `cut`."""
    micro = min(plan.batch.micro_batch_size, 2)
    return Small(plan, cut, _model(plan, cut), micro * _micro_batches(plan, cut.layout.pp) * cut.layout.dp)


def _micro_batches(plan: RunPlan, pp: int) -> int:
    """Two a stage, or as few as the run has; a multiple of the stages where the run's number is one."""
    count = min(plan.batch.gradient_accumulation_steps, 2 * pp)
    if plan.batch.gradient_accumulation_steps % plan.layout.pp == 0:
        count = max(pp, count // pp * pp)
    return count


def _layers(plan: RunPlan, pp: int) -> int:
    """Two a stage, one more where the run's stages are uneven; as many as the first and last stage are given."""
    chunks = max(len(plan.stages) // plan.layout.pp, 1)
    ends = [n for n in (_end_layers(plan, name) for name in _ENDS) if n is not None]
    if pp == 1 or not ends:
        return 2 * pp * chunks + (len(set(plan.stages)) > 1)
    return sum(ends) + 2 * (pp * chunks - len(ends))


def _end_layers(plan: RunPlan, name: str) -> int | None:
    """0, 1 or 3 where the end stage holds none, at most the mean, or more."""
    given: int | None = getattr(plan.config.actor.model, name)
    if given is None:
        return None
    mean = sum(plan.stages) / len(plan.stages)
    return 0 if given == 0 else 1 if given <= mean else 3


def _heads(plan: RunPlan, cut: Degrees) -> tuple[int, int]:
    """(query heads, kv heads): the fewest in the run's ratio that tp and the exchange cut as they cut the run's."""
    spec, own = plan.model, cut_of(plan)
    assert spec is not None
    ratio = spec.num_attention_heads // spec.num_key_value_heads

    def shape(kv: int, tp: int, ulysses: int) -> tuple[bool, ...]:
        local = max(1, kv // tp)
        return kv < tp, kv > 1 or tp > 1, local % ulysses == 0

    def legal(kv: int) -> bool:
        tp, u, local = cut.layout.tp, cut.ulysses, max(1, kv // cut.layout.tp)
        whole = ratio * kv % (tp * u) == 0 and (kv % tp == 0 or tp % kv == 0)
        return whole and (local % u == 0 or u % local == 0)

    wanted = shape(spec.num_key_value_heads, own.layout.tp, own.ulysses)
    counts = range(1, spec.num_key_value_heads + 1)
    same = (kv for kv in counts if legal(kv) and shape(kv, cut.layout.tp, cut.ulysses) == wanted)
    kv = next(same, next((kv for kv in counts if legal(kv)), spec.num_key_value_heads))
    return ratio * kv, kv


def _model(plan: RunPlan, cut: Degrees) -> dict[str, Any]:
    spec = plan.model
    assert spec is not None
    text = {k: v for k, v in text_part(spec.raw).items() if k not in _UNSHARED}
    heads, kv_heads = _heads(plan, cut)
    layers, tp = _layers(plan, cut.layout.pp), cut.layout.tp
    size, inner = 8 if heads >= 4 else 16, spec.num_attention_heads * spec.head_dim
    width = heads * (size if spec.hidden_size == inner else size // 2 if spec.hidden_size < inner else 2 * size)
    text.update(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=tp * -(-40 // tp), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, bos_token_id=None, eos_token_id=None,
        pad_token_id=None if spec.pad_token_id is None else 5,
    )  # fmt: skip
    if text.get("head_dim") is not None or FAMILIES[spec.model_type].head_dim or spec.hidden_size != inner:
        text["head_dim"] = size
    else:
        text.pop("head_dim", None)
    if spec.sliding_window is not None:
        text.update(_windows(spec, text, layers))
    elif text.get("layer_types"):
        text["layer_types"] = ["full_attention"] * layers
    return text


def _windows(spec: ModelSpec, text: dict[str, Any], layers: int) -> dict[str, Any]:
    """Every other layer has the window where only some of the run's have it."""
    assert spec.sliding_window is not None
    changed: dict[str, Any] = {"sliding_window": min(spec.sliding_window, WINDOW)}
    kinds = set(spec.sliding_layers)
    if text.get("layer_types"):
        has = [i % 2 == 0 if len(kinds) == 2 else kinds != {False} for i in range(layers)]
        changed["layer_types"] = ["sliding_attention" if x else "full_attention" for x in has]
    elif spec.sliding_layers:
        changed["max_window_layers"] = {frozenset({True}): 0, frozenset({False}): layers}.get(
            frozenset(kinds), layers // 2
        )
    return changed


def _run(small: Small, cut: Degrees, folder: str) -> dict[str, Any]:
    tree = trees.copied(small.plan.config.to_tree())
    runner, data, defaults = tree["runner"], tree["data"], RunConfig().to_tree()
    for block in ("cluster", "algorithm", "critic", "rollout", "reward"):
        tree[block] = defaults[block]
    runner.update({k: defaults["runner"][k] for k in ("max_epochs", "save_interval", "val_check_interval", "logger")})
    runner.update(task_type="sft", seq_length=ROW_LENGTH, max_steps=STEPS, resume_dir=None, output_dir=folder)
    if runner["enable_dynamic_batch_size"]:
        runner["max_tokens_per_mbs"] = -(-BUDGET // cut.layout.cp)
    tree["data"] = defaults["data"] | {k: data[k] for k in ("packing", "shuffle", "seed")}
    tree["data"].update(type="tokens", train_data_paths=[f"{folder}/rows.jsonl"], cache_dir=f"{folder}/cache")
    tree["actor"] = _actor(small, tree["actor"], cut, folder)
    return tree


def _actor(small: Small, actor: dict[str, Any], cut: Degrees, folder: str) -> dict[str, Any]:
    model, optim, layout = actor["model"], actor["optim"], cut.layout
    actor.update(tokenizer={}, lr_sched={}, global_batch_size=small.rows)
    actor["micro_batch_size"] = min(actor["micro_batch_size"], 2)
    actor["deepspeed"] = {k: v for k, v in actor["deepspeed"].items() if k in _KEPT_SECTIONS}
    for name in ("offload_optimizer", "offload_param"):
        trees.drop(actor["deepspeed"], f"zero_optimization.{name}")
    actor["freeze_parameters"] = frozen(small)
    model.update(dict.fromkeys((*MODEL_NUMBERS, "hidden_size", "seq_length", "encoder_seq_length")))
    model.update(
        model_path=f"{folder}/model", load_weights=True, attention_kernel="auto",
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp, sequence_parallel=cut.sp,
    )  # fmt: skip
    for name in _ENDS:
        model[name] = _end_layers(small.plan, name) if layout.pp > 1 else None
    if layout.pp == 1:  # one stage has no schedule
        model.update({k: v for k, v in RunConfig().to_tree()["actor"]["model"].items() if "pipeline" in k})
    hybrid = model["cp_comm_type"] == "a2a+p2p" and layout.cp > 1
    model["hierarchical_context_parallel_sizes"] = [cut.ulysses, layout.cp // cut.ulysses] if hybrid else None
    if model["recompute_num_layers"] is not None:
        model["recompute_num_layers"] = min(model["recompute_num_layers"], 2)
    kind = "sgd" if optim["optimizer"] == "sgd" else "adam"
    optim.update(lr=LEARNING_RATE[kind][model["precision"]], optimizer_cpu_offload=False)
    optim["adam_eps"] = max(optim["adam_eps"], ADAM_EPS)
    optim["clip_grad"] = CLIP if optim["clip_grad"] else 0.0
    return actor


def frozen(small: Small) -> list[str]:
    """Globs of the run that name something in the small model too."""
    names = shapes(small.spec)
    return [g for g in small.plan.config.actor.freeze_parameters if any(fnmatchcase(n, g) for n in names)]


def differences(small: Small) -> Iterator[str]:
    """How the small run differs from the user's, in lines for people."""
    plan, config, spec, s = small.plan, small.plan.config, small.plan.model, small.spec
    assert spec is not None
    yield (
        f"model: {s.num_layers} layers of {spec.num_layers}, width {s.hidden_size} of {spec.hidden_size}, "
        f"MLP {s.intermediate_size} of {spec.intermediate_size}, "
        f"{s.num_attention_heads} heads of {spec.num_attention_heads}, {s.num_key_value_heads} kv heads of "
        f"{spec.num_key_value_heads}, vocabulary {s.vocab_size}; random weights"
    )
    if s.sliding_window != spec.sliding_window:
        yield f"window: {s.sliding_window} of {spec.sliding_window} tokens"
    yield from _smaller_numbers(small)
    yield (
        f"batch: {small.rows} rows of up to {ROW_LENGTH} tokens a step, {STEPS} steps; learning rate constant, so "
        "large that weights move" + (f", clipping at {CLIP}, which acts" if config.actor.optim.clip_grad else "")
    )
    if config.actor.optim.optimizer != "sgd" and config.actor.optim.adam_eps < ADAM_EPS:
        yield f"adam_eps {ADAM_EPS:g}: a smaller one turns rounding of tiny gradients into whole steps"
    if config.actor.model.attention_kernel != "auto":
        yield f"attention_kernel {config.actor.model.attention_kernel}: the CPU's stands in for it"
    if config.actor.optim.optimizer_cpu_offload or "offload" in str(config.actor.deepspeed):
        yield "offloading is left out: it moves tensors and computes nothing else"
    if others := [k for k in config.actor.deepspeed if k not in _KEPT_SECTIONS]:
        yield f"actor.deepspeed: {', '.join(others)} left out"
    if gone := [g for g in plan.config.actor.freeze_parameters if g not in frozen(small)]:
        yield f"freeze_parameters: {', '.join(gone)} name nothing in the small model"


def _smaller_numbers(small: Small) -> Iterator[str]:
    """Numbers of the YAML that go with the model's and the batch's size, where they are others."""
    config, cut = small.plan.config, small.cut
    own, theirs = config.actor.model, RunConfig.model_validate(small.tree(cut, ".")).actor.model
    if config.runner.enable_dynamic_batch_size:
        yield f"micro-batches of at most {BUDGET} tokens"
    elif small.plan.batch.micro_batch_size > 2:
        yield f"micro-batches of 2 rows of {small.plan.batch.micro_batch_size}"
    for name in ("recompute_num_layers", *_ENDS):
        if getattr(own, name) != getattr(theirs, name):
            yield f"{name}: {getattr(theirs, name)} of {getattr(own, name)}"


def alone(small: Small, folder: str) -> dict[str, Any]:
    """The YAML of the small run on one rank."""
    return small.tree(Degrees(ParallelLayout()), folder)
