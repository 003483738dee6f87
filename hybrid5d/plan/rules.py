"""Cross-key rules: each returns every violation it finds (key, value, rule with the numbers put in, a fix) and says
which keys it reads. `world_size` and `model` (config.json, or the YAML's numbers) count as keys.
"""

from __future__ import annotations

import glob
import sys
from importlib.util import find_spec
from pathlib import Path

from hybrid5d.config.schema import MAX_RANKS, TRACKERS, ModelConfig, RunConfig
from hybrid5d.errors import ConfigError, Rule, reads
from hybrid5d.hf.folder import inspect_hf_folder, weights_wanted
from hybrid5d.plan.deepspeed_config import asked_zero_stage
from hybrid5d.plan.deepspeed_rules import unused
from hybrid5d.plan.draft import Draft, ranks_per_node
from hybrid5d.plan.lr import DEFAULT_DECAY_STEPS, warmup_steps
from hybrid5d.plan.model import ModelNumbers
from hybrid5d.plan.pipeline_rules import asked_chunks, pipeline, stages
from hybrid5d.plan.placement import Placement, actor_placement, components
from hybrid5d.plan.sequence_rules import check_heads, check_hierarchical, ulysses_degree
from hybrid5d.plan.tensors import legal_degrees, shapes, tp_faults
from hybrid5d.plan.trace_rules import trace_steps

_M, _O, _L = "actor.model.", "actor.optim.", "actor.lr_sched."
_TP, _PP, _CP = f"{_M}tensor_model_parallel_size", f"{_M}pipeline_model_parallel_size", f"{_M}context_parallel_size"
CLUSTER = ("cluster.num_nodes", "cluster.component_placement", "cluster.node_groups")
_RL = ("runner.task_type", "data.rollout_batch_size")
SUPERVISED = ("text", "tokens", "chat")
PROMPTS = ("prompts", "math")
_STAGE = ("actor.deepspeed", f"{_O}use_distributed_optimizer")


@reads("world_size", _TP, _PP, _CP)
def world(draft: Draft) -> list[ConfigError]:
    """The three degrees must divide the world."""
    m, size = draft.config.actor.model, draft.world
    if size < 1:
        return [ConfigError("world_size", size, "at least one process is needed", "start one or more")]
    if size > MAX_RANKS:
        rule = f"no cluster has so many: at most {MAX_RANKS}"
        return [ConfigError("world_size", size, rule, "check cluster.num_nodes")]
    unit = m.ranks_per_replica
    if size % unit == 0:
        return []
    low, high = size // unit * unit, (size // unit + 1) * unit
    near = " or ".join(str(n) for n in (low, high) if n)
    rule = (
        f"not a multiple of tensor_model_parallel_size {m.tensor_model_parallel_size} x "
        f"pipeline_model_parallel_size {m.pipeline_model_parallel_size} x "
        f"context_parallel_size {m.context_parallel_size} = {unit}"
    )
    return [ConfigError("world_size", size, rule, f"start {near} processes, or lower a degree")]


def actor_world(config: RunConfig, gpus_per_node: int) -> tuple[Placement | None, list[ConfigError]]:
    """The actor's processes as `cluster` describes them."""
    cluster = config.cluster
    if cluster.num_nodes == 0:
        rule = "0 means all connected nodes, which only a running cluster knows"
        return None, [ConfigError("cluster.num_nodes", 0, rule, "write the number, or give --world-size")]
    return actor_placement(cluster.component_placement, cluster.num_nodes, gpus_per_node, cluster.node_groups)


@reads("world_size", *CLUSTER)
def placement(draft: Draft) -> list[ConfigError]:
    """At launch the started processes must be those that an explicit placement names."""
    cluster = draft.config.cluster
    if draft.translation or cluster.num_nodes == 0:
        return []
    # any number that is large enough: the launcher knows the GPUs, here only the count of processes matters
    placed, errors = actor_world(draft.config, draft.gpus_per_node or max(draft.world, 1) * 1024)
    if errors or placed is None or placed.everything or placed.processes == draft.world:
        return errors
    key = next(k for k in cluster.component_placement if "actor" in components(k))
    rule = f"gives the actor {placed.processes} processes, {draft.world} were started"
    fix = f"start {placed.processes}, or set it to all"
    return [ConfigError(f"cluster.component_placement.{key}", cluster.component_placement[key], rule, fix)]


@reads("world_size", _TP, _PP, _CP, *_RL, "actor.micro_batch_size", "actor.global_batch_size")
def batch(draft: Draft) -> list[ConfigError]:
    """Rows per step over dp ranks and micro-batches."""
    return [] if draft.config.is_rl or world.check(draft) else draft.batch_errors


@reads("world_size", _TP, _PP, _CP, *_RL, *(f"algorithm.{n}" for n in (
    "group_size", "n_minibatches", "training_batch_size_per_gpu", "multi_agent", "logprob_forward_micro_batch_size",
)), "runner.enable_dynamic_batch_size")  # fmt: skip
def rl_batch(draft: Draft) -> list[ConfigError]:
    """The same by RLinf's RL arithmetic."""
    return draft.batch_errors if draft.config.is_rl and not world.check(draft) else []


@reads(*_RL, "algorithm.adv_type", "algorithm.group_size", "critic.use_critic_model",
       *(f"algorithm.{n}" for n in ("importance_sampling_fix", "importance_sampling_clip")))  # fmt: skip
def rl_keys(draft: Draft) -> list[ConfigError]:
    """RL keys that need one another."""
    config = draft.config
    if not config.is_rl:
        return []
    a, errors = config.algorithm, []
    if a.adv_type in ("grpo", "grpo_dynamic") and a.group_size < 2:
        rule = f"adv_type {a.adv_type} compares the sequences of a prompt with one another, so it needs at least 2"
        errors.append(ConfigError("algorithm.group_size", a.group_size, rule, "use 2 or more"))
    if a.importance_sampling_fix and a.importance_sampling_clip is None:
        rule = "importance_sampling_fix needs its upper bound"
        errors.append(ConfigError("algorithm.importance_sampling_clip", None, rule, "write it, such as 2.0"))
    if a.adv_type == "gae" and not config.critic.use_critic_model:
        rule = "adv_type gae needs the values of a critic"
        errors.append(ConfigError("algorithm.adv_type", "gae", rule, "set critic.use_critic_model: true"))
    elif config.critic.use_critic_model and a.adv_type != "gae":
        rule = f"nothing reads a critic's values with adv_type {a.adv_type}"
        errors.append(ConfigError("critic.use_critic_model", True, rule, "use adv_type gae, or train no critic"))
    return errors


@reads(f"{_M}model_path")
def model_folder(draft: Draft) -> list[ConfigError]:
    """The folder is there and holds a model that can be built."""
    return draft.reading.errors


@reads(f"{_M}model_path", f"{_M}load_weights")
def weight_files(draft: Draft) -> list[ConfigError]:
    """The weights in the folder fit its config.json."""
    model, spec = draft.config.actor.model, draft.spec
    if draft.translation or spec is None or model.model_path is None:
        return []
    folder = Path(model.model_path)
    return inspect_hf_folder(folder, spec, shapes(spec))[1] if weights_wanted(model.load_weights, folder) else []


@reads("model", _TP)
def heads(draft: Draft) -> list[ConfigError]:
    """Heads, MLP width and vocabulary against tp."""
    model, numbers = draft.config.actor.model, draft.reading.numbers
    tp, key = model.tensor_model_parallel_size, f"tensor_model_parallel_size={model.tensor_model_parallel_size}"
    if tp > 1 and numbers.num_attention_heads is None:
        legal = f"multiples of {tp} ({tp}, {2 * tp}, {3 * tp}, ...)"
        draft.unchecked.append(f"num_attention_heads with {key}: legal are {legal}")
    if tp > 1 and numbers.num_key_value_heads is None:
        fewer = ", ".join(str(d) for d in range(1, tp) if tp % d == 0)
        draft.unchecked.append(f"num_key_value_heads with {key}: legal are multiples of {tp}, and {fewer} (replicated)")
    if tp > 1 and numbers.vocab_size is None:
        draft.unchecked.append(f"vocabulary with {key}: any size is legal, it is padded to a multiple of {tp}")
    return head_rules(model, numbers)


@reads("model", "world_size", "cluster.num_nodes", _TP, _CP, f"{_M}cp_comm_type",
       f"{_M}hierarchical_context_parallel_sizes")  # fmt: skip
def ulysses(draft: Draft) -> list[ConfigError]:
    """Heads against cp."""
    model, cp = draft.config.actor.model, draft.config.actor.model.context_parallel_size
    if cp > 1 and model.cp_comm_type == "a2a" and draft.reading.numbers.num_attention_heads is None:
        draft.unchecked.append(
            f"heads with cp_comm_type a2a, context_parallel_size={cp}: query heads per tp rank must divide by {cp}, "
            f"kv heads per tp rank must be a multiple or a divisor of {cp}"
        )
    return ulysses_rules(model, draft.reading.numbers, ranks_per_node(draft.config, draft.world))


def head_rules(model: ModelConfig, numbers: ModelNumbers) -> list[ConfigError]:
    """Query and key/value heads and MLP width against tp."""
    tp, sizes = model.tensor_model_parallel_size, numbers.cut_by_tp
    if tp == 1 or not (faults := tp_faults(tp, *sizes)):
        return []
    fix = f"use one of {', '.join(map(str, legal_degrees(*sizes)))}"
    return [ConfigError(f"{_M}tensor_model_parallel_size", tp, rule, fix) for rule in faults]


def ulysses_rules(model: ModelConfig, numbers: ModelNumbers, ranks_per_node: int | None = None) -> list[ConfigError]:
    """Heads against cp, where tp can cut them."""
    tp, heads, kv = model.tensor_model_parallel_size, numbers.num_attention_heads, numbers.num_key_value_heads
    if heads is None or head_rules(model, numbers):
        return []
    cp, sizes = model.context_parallel_size, model.hierarchical_context_parallel_sizes
    degree = ulysses_degree(model.cp_comm_type, sizes, kv or heads, tp, cp, ranks_per_node)
    return check_heads(heads, kv or heads, tp, cp, model.cp_comm_type, degree)


@reads(f"{_M}sequence_parallel", _TP)
def sequence_parallel(draft: Draft) -> list[ConfigError]:
    """SP needs a tp group to cut over."""
    model = draft.config.actor.model
    if not model.sequence_parallel or model.tensor_model_parallel_size > 1:
        return []
    rule = "sequence parallelism cuts activations over the tensor-parallel group, and tensor_model_parallel_size is 1"
    return [ConfigError(f"{_M}sequence_parallel", True, rule, "set it to false, or tensor_model_parallel_size >= 2")]


@reads(f"{_M}hierarchical_context_parallel_sizes", _CP, f"{_M}cp_comm_type")
def hierarchical(draft: Draft) -> list[ConfigError]:
    """[Ulysses, ring] must make cp."""
    model = draft.config.actor.model
    sizes = model.hierarchical_context_parallel_sizes
    return check_hierarchical(sizes, model.context_parallel_size, model.cp_comm_type)


@reads(f"{_M}recompute_granularity", f"{_M}recompute_method")
def recompute_method(draft: Draft) -> list[ConfigError]:
    """`full` says how layers are chosen."""
    model = draft.config.actor.model
    if model.recompute_granularity != "full" or model.recompute_method is not None:
        return []
    rule = "recompute_granularity full needs it"
    return [ConfigError(f"{_M}recompute_method", None, rule, "use uniform or block")]


@reads(f"{_M}recompute_granularity", f"{_M}recompute_num_layers")
def recompute_layers(draft: Draft) -> list[ConfigError]:
    """`full` says how many layers, `selective` means all."""
    model = draft.config.actor.model
    key, count, granularity = f"{_M}recompute_num_layers", model.recompute_num_layers, model.recompute_granularity
    if granularity == "full" and count is None:
        rule = "recompute_granularity full needs it"
        return [ConfigError(key, None, rule, "use 1 with uniform, or layers per stage")]
    if granularity == "selective" and count is not None:
        rule = "recompute_granularity selective recomputes attention in every layer, so it must be null"
        return [ConfigError(key, count, rule, "set it to null")]
    return []


@reads(*(f"{_L}{n}" for n in ("lr_decay_iters", "lr_warmup_fraction", "lr_warmup_iters")))
def warmup(draft: Draft) -> list[ConfigError]:
    """Warm-up ends before the decay does."""
    config = draft.config
    sched = config.actor.lr_sched
    decay, steps = sched.lr_decay_iters or DEFAULT_DECAY_STEPS, warmup_steps(config)
    if steps < decay:
        return []
    name = "lr_warmup_iters" if sched.lr_warmup_fraction is None else "lr_warmup_fraction"
    rule = f"warm-up of {steps:g} steps must end before lr_decay_iters={decay} (which counts from step 0)"
    return [ConfigError(f"{_L}{name}", getattr(sched, name), rule, f"use fewer than {decay} steps of warm-up")]


def _below_peak(name: str) -> Rule[Draft]:
    """A learning rate that may not exceed the peak."""

    @reads(f"{_L}{name}", f"{_O}lr")
    def rule(draft: Draft) -> list[ConfigError]:
        value, peak = getattr(draft.config.actor.lr_sched, name), draft.config.actor.optim.lr
        if value <= peak:
            return []
        return [ConfigError(f"{_L}{name}", value, f"must not exceed actor.optim.lr={peak:g}", f"use {peak:g} or less")]

    return rule


@reads(*(f"{_L}{n}" for n in ("lr_decay_style", "lr_wsd_decay_iters")))
def tail(draft: Draft) -> list[ConfigError]:
    """WSD has a tail."""
    sched = draft.config.actor.lr_sched
    if sched.lr_decay_style != "WSD" or sched.lr_wsd_decay_iters is not None:
        return []
    return [ConfigError(f"{_L}lr_wsd_decay_iters", None, "style WSD needs the length of its tail", "write it")]


@reads(*(f"{_L}{n}" for n in ("lr_decay_style", "lr_wsd_decay_iters", "lr_decay_iters")))
def tail_length(draft: Draft) -> list[ConfigError]:
    """WSD's tail fits in."""
    sched = draft.config.actor.lr_sched
    length, decay = sched.lr_wsd_decay_iters, sched.lr_decay_iters or DEFAULT_DECAY_STEPS
    if sched.lr_decay_style != "WSD" or length is None or length <= decay:
        return []
    return [ConfigError(f"{_L}lr_wsd_decay_iters", length, f"the tail is longer than lr_decay_iters={decay}",
                        f"use {decay} or less")]  # fmt: skip


@reads(f"{_O}weight_decay", *(f"{_L}{n}" for n in ("lr_decay_style", "start_weight_decay", "end_weight_decay",
                                                   "weight_decay_incr_style")))  # fmt: skip
def weight_decay(draft: Draft) -> list[ConfigError]:
    """Weight decay rises from start to end, or stays."""
    optim, sched = draft.config.actor.optim, draft.config.actor.lr_sched
    if sched.lr_decay_style == "constant":
        return []
    start = optim.weight_decay if sched.start_weight_decay is None else sched.start_weight_decay
    end = optim.weight_decay if sched.end_weight_decay is None else sched.end_weight_decay
    key = f"{_L}end_weight_decay"
    if end < start:
        return [ConfigError(key, end, f"must not be below start_weight_decay={start:g}", f"use {start:g} or more")]
    if sched.weight_decay_incr_style == "constant" and start != end:
        rule = f"weight_decay_incr_style constant needs start_weight_decay={start:g} to be equal"
        return [ConfigError(key, end, rule, f"use {start:g}, or weight_decay_incr_style: linear")]
    return []


@reads(*_STAGE, _PP)
def zero(draft: Draft) -> list[ConfigError]:
    """ZeRO 2 and 3 shard gradients, which accumulation over a pipeline cannot bear."""
    stage, pp = asked_zero_stage(draft.config), draft.config.actor.model.pipeline_model_parallel_size
    if stage < 2 or pp == 1:
        return []
    rule = f"ZeRO {stage} does not work with pipeline_model_parallel_size={pp}"
    fix = "use stage: 1, or pipeline_model_parallel_size: 1"
    return [ConfigError("actor.deepspeed.zero_optimization.stage", stage, rule, fix)]


@reads("runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs")
def token_budget(draft: Draft) -> list[ConfigError]:
    """Dynamic batches need a budget."""
    runner = draft.config.runner
    if not runner.enable_dynamic_batch_size or runner.max_tokens_per_mbs is not None:
        return []
    rule = "enable_dynamic_batch_size needs a token budget"
    return [ConfigError("runner.max_tokens_per_mbs", None, rule, "write tokens per GPU")]


@reads("runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs", "runner.seq_length", _CP,
       f"{_M}seq_length", f"{_M}encoder_seq_length")  # fmt: skip
def budget_holds_a_row(draft: Draft) -> list[ConfigError]:
    """A budget is no smaller than one row."""
    config = draft.config
    budget, cp, length = config.runner.max_tokens_per_mbs, config.actor.model.context_parallel_size, config.row_length
    if not config.runner.enable_dynamic_batch_size or budget is None or length is None or budget * cp >= length:
        return []
    rule = f"{budget} x cp {cp} = {budget * cp} tokens do not hold one row of seq_length={length}"
    return [ConfigError("runner.max_tokens_per_mbs", budget, rule, f"use {-(-length // cp)} or more")]


@reads("runner.logger.logger_backends")
def trackers(draft: Draft) -> list[ConfigError]:
    """Trackers that exist, and before a run: that are installed."""
    key, errors = "runner.logger.logger_backends", []
    for name in draft.config.runner.logger.logger_backends:
        package = TRACKERS.get(name)
        if name not in TRACKERS:
            errors.append(ConfigError(key, name, "unknown tracker", f"known: {', '.join(TRACKERS)}"))
        elif not draft.translation and package is not None and not _installed(package):
            fix = f"pip install 'hybrid5d[{name}]', or leave it out"
            errors.append(ConfigError(key, name, f"{package} is not installed", fix))
    return errors


def _installed(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


@reads("runner.keep_last", "runner.keep_every")
def retention(draft: Draft) -> list[ConfigError]:
    """Nothing is removed without keep_last, so nothing is exempt."""
    runner = draft.config.runner
    if runner.keep_every is None or runner.keep_last is not None:
        return []
    rule = "runner.keep_last is null: all checkpoints stay"
    return [ConfigError("runner.keep_every", runner.keep_every, rule, "set keep_last, or drop keep_every")]


@reads("actor.deepspeed")
def deepspeed_block(draft: Draft) -> list[ConfigError]:
    """What `actor.deepspeed` may not say. What we emit ourselves is compared where its sources are known."""
    return draft.block_errors


# --- what a run needs on disk beyond the model's config.json ---------------------------------------------------------


@reads("data.type", "critic.use_critic_model", "runner.val_check_interval", *_RL, "rollout.rollout_backend",
       "reward.function", "reward.reward_type", "algorithm.sampling_params.max_new_tokens", "data.max_prompt_length",
       "runner.seq_length", f"{_M}seq_length", f"{_M}encoder_seq_length")  # fmt: skip
def data_type(draft: Draft) -> list[ConfigError]:
    """Rows can be made of the data."""
    kind = draft.config.data.type
    if draft.config.is_rl:
        return _rl_data(draft)
    if kind in SUPERVISED:
        return []
    if kind == "rollouts":
        rule = "rollouts are trained on by RL"
        fix = "write runner.task_type: reasoning and data.rollout_batch_size"
        return [ConfigError("data.type", kind, rule, fix)]
    rule = "a supervised run trains on text, tokens or chat"
    return [ConfigError("data.type", kind, rule, "use chat for conversations, text for documents")]


def _prompt_data(draft: Draft) -> list[ConfigError]:
    """What generating and rewarding needs."""
    config = draft.config
    errors, reward, asked = [], config.reward, config.algorithm.sampling_params.max_new_tokens
    if draft.pipeline.chunks > 1 and not draft.value_head:  # a critic generates nothing
        rule = f"{config.data.type} are answered by the training engine, which generates with one run of layers a rank"
        fix = "set it to null, or use data.type: rollouts"
        errors.append(ConfigError(*asked_chunks(config.actor.model), rule, fix))
    if config.rollout.rollout_backend == "files":
        fix = "use hybrid5d, or data.type: rollouts"
        errors.append(
            ConfigError("rollout.rollout_backend", "files", f"data.type {config.data.type} is generated", fix)
        )
    if reward.function is None and reward.reward_type != "math":
        rule = "rewards are math's, or those of a function of one's own"
        errors.append(ConfigError("reward.reward_type", reward.reward_type, rule, "use math, or name reward.function"))
    prompt, length = config.data.max_prompt_length, config.row_length
    if length is None or (prompt is None and asked is None):
        rule = "the lengths of prompt and response are not known"
        fix = "write runner.seq_length, and data.max_prompt_length or sampling_params.max_new_tokens"
        errors.append(ConfigError("data.max_prompt_length", prompt, rule, fix))
    elif (prompt or 1) + (asked or 1) > length:
        rule = f"no room: prompt of {prompt or 1} and response of {asked or 1} tokens exceed seq_length={length}"
        errors.append(ConfigError("data.max_prompt_length", prompt, rule, "use shorter ones"))
    return errors


def _rl_data(draft: Draft) -> list[ConfigError]:
    """What of RL runs here: training on rollouts that a generator has written."""
    config, errors = draft.config, []
    if draft.purpose == "eval":
        return [ConfigError("runner.task_type", config.runner.task_type, "RL has no evaluation", "use sft")]
    kind = config.data.type
    if kind in PROMPTS:
        errors += _prompt_data(draft)
    elif kind != "rollouts":
        rule = "RL trains on rollouts from files, or on prompts"
        errors.append(ConfigError("data.type", kind, rule, "use prompts, or rollouts"))
    if config.runner.val_check_interval > 0 and kind == "rollouts":
        rule = "rollouts have no validation"
        errors.append(ConfigError("runner.val_check_interval", config.runner.val_check_interval, rule, "set it to -1"))
    return errors


@reads("runner.resume_dir", f"{_M}model_path", "algorithm.kl_beta", "algorithm.reinpp_kl_beta", *_RL)
def reference(draft: Draft) -> list[ConfigError]:
    """A resumed run compares with the model that it started from."""
    config, folder = draft.config, draft.config.actor.model.model_path
    wanted = config.is_rl and (config.algorithm.kl_beta or config.algorithm.reinpp_kl_beta)
    if not wanted or config.runner.resume_dir is None or (folder and Path(folder).is_dir()):
        return []
    rule = "the KL's reference is the model of this folder, also after a resume, and the folder is gone"
    return [ConfigError(f"{_M}model_path", folder, rule, "put it back")]


@reads("data.train_data_paths")
def train_data(draft: Draft) -> list[ConfigError]:
    """A training reads data; an evaluation reads none of it."""
    if draft.purpose == "eval":
        return []
    paths = draft.config.data.train_data_paths
    if not paths:
        return [ConfigError("data.train_data_paths", None, "a run needs data", "name files, folders or globs")]
    return _missing_files("data.train_data_paths", paths)


@reads("data.val_data_paths")
def val_data(draft: Draft) -> list[ConfigError]:
    """An evaluation needs its data; what a training names must be there too."""
    paths = draft.config.data.val_data_paths
    if draft.purpose == "eval" and not paths:
        return [ConfigError("data.val_data_paths", None, "an evaluation needs data", "name files, folders or globs")]
    return _missing_files("data.val_data_paths", paths or ())


def _missing_files(key: str, paths: tuple[str, ...]) -> list[ConfigError]:
    named = [p for p in paths if p.split("/")[0] != "stdlib"]  # `stdlib`: the running Python's own sources
    missing = [p for p in named if not (glob.has_magic(p) and glob.glob(p, recursive=True)) and not Path(p).exists()]
    return [ConfigError(key, p, "no such file or folder", "check the path") for p in missing]


@reads(f"{_M}model_path", f"{_M}load_weights")
def weights(draft: Draft) -> list[ConfigError]:
    """Weights that are asked for are there."""
    model = draft.config.actor.model
    folder = Path(model.model_path) if model.model_path else None
    if not model.load_weights or folder is None or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return []
    fix = "convert the weights to safetensors, or load_weights: false"
    return [ConfigError(f"{_M}load_weights", True, f"{folder} has no safetensors", fix)]


@reads("actor.tokenizer.tokenizer_model")
def tokenizer(draft: Draft) -> list[ConfigError]:
    """The tokenizer's folder is there."""
    folder = draft.config.actor.tokenizer.tokenizer_model
    if folder in (None, "byte") or Path(str(folder)).exists():
        return []
    fix = "name a tokenizer folder, or byte"
    return [ConfigError("actor.tokenizer.tokenizer_model", folder, "the folder does not exist", fix)]


@reads("runner.resume_dir")
def resume(draft: Draft) -> list[ConfigError]:
    """The checkpoint's folder is there."""
    folder = draft.config.runner.resume_dir
    if folder in (None, "auto") or Path(str(folder)).is_dir():
        return []
    return [ConfigError("runner.resume_dir", folder, "the folder does not exist", "name a checkpoint, auto, or null")]


@reads(f"{_O}optimizer_cpu_offload", f"{_O}optimizer_offload_fraction")
def offload(draft: Draft) -> list[ConfigError]:
    """Our trainer offloads nothing."""
    optim = draft.config.actor.optim
    if not optim.optimizer_cpu_offload or optim.optimizer_offload_fraction <= 0:
        return []
    rule = "hybrid5d's trainer does not offload optimizer state yet (the translation to DeepSpeed does)"
    return [ConfigError(f"{_O}optimizer_cpu_offload", True, rule, "set it to false")]


@reads()
def loaded(draft: Draft) -> list[ConfigError]:
    """What reading the YAML found that a run, unlike a translation, cannot do without."""
    keys = draft.config.keys
    return list(keys.run_faults) if keys is not None else []


RULES: tuple[Rule[Draft], ...] = (
    world, placement, batch, rl_batch, rl_keys, model_folder, weight_files, heads, ulysses, sequence_parallel,
    hierarchical, recompute_method, recompute_layers, pipeline, stages, warmup, _below_peak("min_lr"),
    _below_peak("lr_warmup_init"), tail, tail_length, weight_decay, zero, token_budget, budget_holds_a_row, trackers,
    retention, trace_steps, deepspeed_block,
)  # fmt: skip
RUN_RULES: tuple[Rule[Draft], ...] = (
    data_type, reference, train_data, val_data, weights, tokenizer, resume, offload, unused, loaded,
)  # fmt: skip
