"""The YAML's schema: every key that means something to hybrid5d, with description, unit, default and where it goes.

Names and shape are RLinf's. Cross-key rules live in `hybrid5d.plan.rules`; this file knows types and ranges only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from hybrid5d.config.fields import (
    DEFAULT_PRECISION,
    MAX_MINUTES,
    MAX_RANKS,
    Block,
    Bool,
    File,
    Files,
    Float,
    Int,
    Precision,
    Strings,
    key,
)  # fmt: skip
from hybrid5d.config.fields import default_for_null as _or

RL_TASKS = ("reasoning", "coding_online_rl")  # RLinf's; their training part is translated
# Trackers a YAML may name -> the package that feeds it; None: the name is RLinf's, nothing is fed
TRACKERS: dict[str, str | None] = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": None}

# Why a key has no effect in a run that makes nothing of it
_RL_ONLY = "only RLinf's RL batch arithmetic reads it (runner.task_type of an RL task, data.rollout_batch_size)"
_NO_RL = "only an RL run reads it (runner.task_type of an RL task with data.rollout_batch_size)"
NO_CRITIC = "critic.use_critic_model is false"
_FULL_ONLY = "only recompute_granularity full reads it"
_ADAM_ONLY = "only adam reads it"
_DYNAMIC = "only a dynamic fp16 loss scale reads it"
_NO_OFFLOAD = "nothing is offloaded: it takes the switch and a fraction above 0"
_DECAYING = "lr_decay_style constant does not read it"
_WSD_ONLY = "only lr_decay_style WSD reads it"


def _rl(default: Any, description: str, unit: str = "", *, to: str, **limits: Any) -> Any:
    """A key that only an RL run reads."""
    return key(default, description, unit, to=to, only="rl", unread=_NO_RL, **limits)


def _alg(name: str, default: Any, description: str, unit: str = "", **limits: Any) -> Any:
    """A key of the RL step, shown under its own name."""
    return _rl(default, description, unit, to=f"algorithm.{name}", **limits)


def _critic(default: Any, description: str, unit: str = "", *, to: str, **limits: Any) -> Any:
    """A key that only a run with a critic reads."""
    return key(default, description, unit, to=to, only="critic", unread=NO_CRITIC, **limits)


class ClusterConfig(Block):
    """Where the job runs."""

    num_nodes: Int = key(
        1, "nodes of the job; 0 = all that are connected (only a launcher knows)", "nodes", ge=0, le=MAX_RANKS
    )
    component_placement: dict[str, Any] = key(
        dict, "GPUs of each component, RLinf's grammar; only `actor` is ours. Absent: actor: all"
    )
    node_groups: list[Any] | None = key(None, "labelled node sets that a placement may name")


class LoggerConfig(Block):
    """Where metrics go, besides metrics.jsonl."""

    log_path: File | None = key(
        None, "folder of the tracker's files; null: output_dir/experiment_name", "path", to="trackers.log_path"
    )
    project_name: Annotated[str, _or("hybrid5d")] = key(
        "hybrid5d", "project name shown by the tracker", to="trackers.project_name"
    )
    experiment_name: str | None = key(
        None, "run name shown by the tracker; null: runner.experiment_name", to="trackers.experiment_name"
    )
    logger_backends: Strings = key((), "trackers to feed: tensorboard, wandb, swanlab", to="trackers.backends")


class RunnerConfig(Block):
    """Length of the run, saving, resuming, logging."""

    task_type: str = key("sft", "sft, or RLinf's reasoning / coding_online_rl (their training part)", to="task_type")
    seq_length: Int | None = key(None, "length that rows are cut to; null: the longest row of the data", "tokens", ge=1)
    max_steps: Int = key(
        -1, "stop after this many optimizer steps (RL: RL steps); -1: no limit", "steps", ge=-1, to="max_steps"
    )
    max_epochs: Int = key(
        -1, "stop after this many passes over the data; -1: no limit", "epochs", ge=-1, to="max_epochs"
    )
    save_interval: Int = key(
        -1, "save a checkpoint every so many steps and at the end; <= 0: never", "steps", to="save_interval"
    )
    async_save: Bool = key(
        False,
        "write checkpoints while training goes on, from a copy in CPU memory; the last one of a run is waited for",
        to="async_save",
    )
    keep_last: Int | None = key(
        None, "keep so many of this run's newest checkpoints, remove older ones; null: all", ge=1, to="keep_last"
    )
    keep_every: Int | None = key(
        None, "with keep_last: those of steps that are a multiple of this stay", "steps", ge=1, to="keep_every"
    )
    on_save_error: Literal["stop", "continue"] = key(
        "stop", "a checkpoint that cannot be written ends the run, or is said and left out", to="on_save_error"
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "a step whose loss or gradients are not finite changes nothing and ends the run, or is said and skipped",
        to="on_nonfinite",
    )
    check_replicas_every: Int = key(
        -1,
        "compare copies of weights and optimizer state bit by bit every so many steps, at the start and before saves;"
        " <= 0: never",
        "steps",
        to="check_replicas_every",
    )
    val_check_interval: Int = key(
        -1, "evaluate every so many steps, and before and after training; <= 0: never", "steps", to="val_check_interval"
    )
    resume_dir: File | None = key(
        None, "checkpoint to go on from, or 'auto' for the newest of this run", "path", to="resume_dir"
    )
    output_dir: Annotated[File, _or("results")] = key("results", "root of run directories", "path", to="output_dir")
    experiment_name: Annotated[str, _or("run")] = key(
        "run", "name of the run directory inside output_dir", to="experiment_name"
    )
    enable_dynamic_batch_size: Bool = key(
        False, "form micro-batches by token budget instead of by row count", to="dynamic_batch.enabled"
    )
    max_tokens_per_mbs: Int | None = key(
        None,
        "token budget of a micro-batch per GPU (times context_parallel_size)",
        "tokens",
        ge=1,
        unread="only enable_dynamic_batch_size reads it",
    )
    grace_seconds: Float = key(
        30.0,
        "after SIGTERM: finish the step, save and end within this time; else the last whole checkpoint is what stays",
        "seconds",
        gt=0,
        to="grace_seconds",
    )
    hang_timeout: Float | None = key(
        None,
        "a step that takes longer ends the run, with what each rank does; other phases and the first step may take ten"
        " times as long; null: 20 times the longest step, at least 600",
        "seconds",
        gt=0,
        to="hang_timeout",
    )
    peer_timeout: Float = key(
        30.0,
        "several hosts: one that is not heard for this long ends the job on all sides",
        "seconds",
        ge=3,
        to="peer_timeout",
    )
    cpu_backend: Literal["auto", "shm", "gloo"] = key(
        "auto",
        "collectives on CPU: auto (shared memory for groups of one host, else gloo), shm, gloo",
        to="cpu_backend",
    )
    trace_steps: tuple[Int, Int] | None = key(
        None,
        "[first, last]: time every instruction and collective of these optimizer steps on every rank, for `hybrid5d "
        "trace`; null: none",
        "steps",
        to="trace_steps",
    )
    logger: LoggerConfig = key(LoggerConfig, "trackers")


class DataConfig(Block):
    """What is read, and how rows are made of it."""

    type: str = key(
        "tokens",
        "text | tokens | chat; RL: rollouts (files with responses) | prompts (RLinf: math, ...)",
        to="data.type",
    )
    train_data_paths: Files | None = key(None, "files, folders or globs to train on", "paths", to="data.train")
    val_data_paths: Files | None = key(None, "files, folders or globs to evaluate on", "paths", to="data.val")
    shuffle: Bool = key(True, "new row order each epoch, a function of (seed, epoch)", to="data.shuffle")
    seed: Int = key(42, "seed of the row order", ge=0, to="data_seed")
    num_workers: Int = key(0, "processes that tokenise; 0: in the caller", "processes", ge=0, to="data.num_workers")
    rollout_batch_size: Int | None = key(None, "RL: prompts per RL step", "prompts", ge=1, unread=_RL_ONLY)
    max_prompt_length: Int | None = _rl(
        None, "RL: longest prompt; null: what runner.seq_length leaves beside max_new_tokens", "tokens", ge=1,
        to="data.max_prompt_length",
    )  # fmt: skip
    filter_prompt_by_length: Bool = _rl(
        True, "RL: longer prompts are left out and counted; false: refused. None is cut", to="data.filter_prompts"
    )
    answer_key: str = _rl("answer", "RL: field of the right answer, a value or a list of them", to="data.answer_key")
    apply_chat_template: Bool | None = _rl(
        None, "RL: a prompt becomes the user's turn; null: where the tokenizer has a template", to="data.chat_prompts"
    )
    messages_key: str = key("messages", "chat: field that holds the list of turns", to="data.messages_key")
    prompt_key: str = key("prompt", "chat, RL: field of a single prompt", to="data.prompt_key")
    response_key: str = key("response", "chat: field of its answer", to="data.response_key")
    instruction_key: str = key("instruction", "chat: field of the instruction (Alpaca form)", to="data.instruction_key")
    input_key: str = key("input", "chat: field of the instruction's input (Alpaca form)", to="data.input_key")
    output_key: str = key("output", "chat: field of the answer (Alpaca form)", to="data.output_key")
    text_key: str = key("text", "text: field of the document in JSONL and Parquet files", to="data.text_key")
    train_on: Literal["assistant", "all"] = key(
        "assistant", "chat: turns whose tokens are trained on", to="data.train_on"
    )
    packing: Literal["none", "documents"] = key(
        "none", "documents: several samples in a row, separated in attention", to="packing"
    )
    overlong: Literal["truncate", "drop", "error"] = key(
        "truncate", "what happens to a sample longer than seq_length", to="data.overlong"
    )
    last_batch: Literal["pad", "drop_last"] = key(
        "pad", "rows left over at the end of an epoch: fill up the batch or not", to="data.last_batch"
    )
    chat_template: File | None = key(
        None, "chat: Jinja file in place of the tokenizer's own template", "path", to="data.chat_template"
    )
    cache_dir: File | None = key(
        None, "folder of tokenised files; null: ~/.cache/hybrid5d or $XDG_CACHE_HOME", "path", to="data.cache_dir"
    )


class SamplingConfig(Block):
    """How responses are generated. The temperature is that of every log-prob and loss of an RL run too."""

    do_sample: Bool = _rl(True, "false: the likeliest token", to="sampling.do_sample")
    temperature: Float = _rl(
        1.0, "what logits are divided by: sampling, log-probs, loss, entropy", gt=0, to="sampling.temperature"
    )
    top_k: Int = _rl(-1, "sample from so many tokens; -1, 0 or the vocabulary's size and more: off", ge=-1,
                     to="sampling.top_k")  # fmt: skip
    top_p: Float = _rl(1.0, "sample from the likeliest tokens of this total probability", gt=0, le=1,
                       to="sampling.top_p")  # fmt: skip
    repetition_penalty: Float = _rl(
        1.0, "divides (multiplies, below 0) logits of tokens that were seen; 1: off", gt=0,
        to="sampling.repetition_penalty",
    )  # fmt: skip
    max_new_tokens: Int | None = _rl(
        None, "longest response; null: what runner.seq_length leaves beside data.max_prompt_length", "tokens", ge=1,
        to="sampling.max_new_tokens",
    )  # fmt: skip
    min_new_tokens: Int = _rl(0, "no stop before so many", "tokens", ge=0, to="sampling.min_new_tokens")
    stop_token_ids: tuple[Int, ...] = _rl((), "ids that end a response, beside the model's own",
                                          to="sampling.stop_token_ids")  # fmt: skip
    stop: Strings = _rl((), "texts that end a response", to="sampling.stop")


class AlgorithmConfig(Block):
    """RL: batch sizes, advantages, loss. What each value means: `hybrid5d.rl`."""

    group_size: Int = key(1, "sequences per prompt", "sequences", ge=1, unread=_RL_ONLY)
    n_minibatches: Int = key(1, "optimizer steps per RL step", "steps", ge=1, unread=_RL_ONLY)
    training_batch_size_per_gpu: Int = key(1, "micro-batch size per dp rank", "sequences", ge=1, unread=_RL_ONLY)
    logprob_forward_micro_batch_size: Int | None = _rl(
        None, "sequences per dp rank and forward pass for log-probs; null: training_batch_size_per_gpu", "sequences",
        ge=1, to="algorithm.logprob_forward_micro_batch_size",
    )  # fmt: skip
    multi_agent: Bool = key(
        False, "prompts yield any number of sequences (RLinf: agentloop.is_dynamic_rollout_batch)", unread=_RL_ONLY
    )
    recompute_logprobs: Bool = _alg(
        "recompute_logprobs", True, "old log-probs by a forward pass with the RL step's first weights; false: those of "
        "the rollout",
    )  # fmt: skip
    shuffle_rollout: Bool = _alg("shuffle_rollout", False, "rows in an order by (seed, RL step) before minibatches")
    adv_type: Literal["grpo", "grpo_dynamic", "reinpp", "gae", "raw"] = _alg("adv_type", "grpo", "advantages")
    advantage_mode: Literal["trajectory", "turn"] = _alg(
        "advantage_mode", "trajectory", "grpo_dynamic: a group compares trajectories, or their rows"
    )
    normalize_advantages: Bool = _alg(
        "normalize_advantages", False, "whiten advantages over the response tokens of the RL step"
    )
    gamma: Float = _alg("gamma", 1.0, "gae: discount", ge=0, le=1)
    gae_lambda: Float = _alg("gae_lambda", 1.0, "gae: decay of later errors", ge=0, le=1)
    use_reinpp_baseline: Bool = _alg("use_reinpp_baseline", False, "reinpp: subtract the group's mean reward first")
    reinpp_kl_beta: Float = _alg("reinpp_kl_beta", 0.0, "reinpp: weight of the KL inside the reward", ge=0)
    loss_type: Literal["actor"] = _alg("loss_type", "actor", "the clipped policy loss")
    loss_agg_func: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = _alg(
        "loss_agg_func", "token-mean", "what the loss is the mean of"
    )
    use_valid_token_scale: Bool = _alg(
        "use_valid_token_scale", False, "times the optimizer step's part of the RL step's response tokens"
    )
    ratio_clip_eps: Float = _alg("ratio_clip_eps", 0.2, "clip of the ratio where low or high is null", ge=0)
    clip_ratio_low: Float | None = _alg("clip_ratio_low", None, "ratio is held above 1 - this", ge=0)
    clip_ratio_high: Float | None = _alg("clip_ratio_high", None, "ratio is held below 1 + this", ge=0)
    clip_ratio_c: Float | None = _alg("clip_ratio_c", None, "dual clip: bound of the loss at negative advantages", gt=1)
    clip_log_ratio_min: Float | None = _alg("clip_log_ratio_min", None, "log-ratio is held above it")
    clip_log_ratio_max: Float | None = _alg("clip_log_ratio_max", None, "log-ratio is held below it")
    kl_beta: Float = _alg("kl_beta", 0.0, "weight of the KL to the model of model_path in the loss", ge=0)
    kl_penalty_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = _alg(
        "kl_penalty_type", "low_var_kl", "estimator of the KL"
    )
    entropy_bonus: Float = _alg("entropy_bonus", 0.0, "weight of the entropy in the loss, with calculate_entropy", ge=0)
    calculate_entropy: Bool = _alg("calculate_entropy", False, "entropy is a metric, and a bonus where one is set")
    importance_sampling_fix: Bool = _alg(
        "importance_sampling_fix", False, "advantages times the ratio of training to rollout probabilities"
    )
    importance_sampling_clip: Float | None = _alg("importance_sampling_clip", None, "upper bound of that ratio", gt=0)
    early_stop_imp_ratio: Float | None = _alg(
        "early_stop_imp_ratio", None, "an optimizer step whose mean ratio exceeds it has gradient 0", gt=0
    )
    value_cliprange: Float = _critic(0.2, "critic: how far a value may move from the rollout's in the loss", gt=0,
                                     to="algorithm.value_cliprange")  # fmt: skip
    critic_warmup_steps: Int = _critic(0, "first RL steps that train the critic only", "RL steps", ge=0,
                                       to="algorithm.critic_warmup_steps")  # fmt: skip
    sampling_params: SamplingConfig = key(SamplingConfig, "how responses are generated")


class RolloutConfig(Block):
    """Where responses come from."""

    rollout_backend: Literal["hybrid5d", "files", "sglang", "vllm"] = _rl(
        "hybrid5d", "hybrid5d: the training engine generates (sglang, vllm mean it too); files: data.type rollouts",
        to="rollout.backend",
    )  # fmt: skip


class RewardConfig(Block):
    """What a response is worth."""

    reward_type: str | None = _rl(None, "math: the math-verify package on data.answer_key", to="reward.type")
    reward_scale: Float = _rl(1.0, "math: right is +this, wrong -this", gt=0, to="reward.scale")
    function: File | None = _rl(
        None, "path/file.py:name of one's own: (prompt, response, row) -> float", to="reward.function"
    )
    timeout: Float = _rl(10.0, "time that one row may take", "seconds", gt=0, to="reward.timeout")
    num_workers: Int = _rl(2, "processes that score", "processes", ge=1, to="reward.num_workers")
    on_error: Float | Literal["stop"] = _rl(
        "stop", "an exception, a hang or no number: stop ends the job, a number counts instead", to="reward.on_error"
    )


class TokenizerConfig(Block):
    """Tokenizer of the data."""

    tokenizer_model: File | None = key(
        None,
        "tokenizer folder, or 'byte' for the built-in one; null: the model folder's, else byte",
        "path",
        to="tokenizer",
    )


class ModelConfig(Block):
    """Model folder, precision, parallel degrees, recomputation."""

    model_path: File | None = key(
        None, "Hugging Face folder; its config.json gives the architecture", "path", to="model_path"
    )
    model_type: str | None = key(
        None,
        "RLinf's model family name; the folder decides where it exists",
        unread="the model folder's config.json names the family",
    )
    load_weights: Bool | None = key(
        None,
        "read weights from the folder's safetensors; null: where there are any; false: random start",
        to="load_weights",
    )
    precision: Precision = key(DEFAULT_PRECISION, "fp32 | bf16 | fp16 of weights and activations; null = fp32")
    tensor_model_parallel_size: Int = key(
        1, "TP: ranks that share each weight matrix", "ranks", ge=1, le=MAX_RANKS, to="layout.tp"
    )
    pipeline_model_parallel_size: Int = key(
        1, "PP: stages that share the layers", "ranks", ge=1, le=MAX_RANKS, to="layout.pp"
    )
    context_parallel_size: Int = key(
        1, "CP: ranks that share the sequence", "ranks", ge=1, le=MAX_RANKS, to="layout.cp"
    )
    cp_comm_type: Literal["p2p", "a2a", "a2a+p2p", "all_gather"] = key(
        "p2p",
        "how CP attention communicates: ring, Ulysses, both, or gathered keys and values",
        to="context_parallel.cp_comm_type",
    )
    cp_load_balance: Literal["zigzag", "contiguous"] = key(
        "zigzag", "how the sequence is cut over cp ranks", to="context_parallel.cp_load_balance"
    )
    hierarchical_context_parallel_sizes: tuple[Int, Int] | None = key(
        None,
        "a2a+p2p: [Ulysses degree, ring degree]; null: chosen from the kv heads",
        "ranks",
        to="context_parallel.hierarchical_context_parallel_sizes",
    )
    attention_kernel: Literal["auto", "aten_cpu", "flash_attn", "aten_flash", "aten_efficient", "chunked"] = key(
        "auto", "attention kernel; auto: the best one that device and dtype have", to="attention_kernel"
    )
    sequence_parallel: Bool = key(
        False,
        "SP: cut activations between TP regions along the sequence, same ranks as TP",
        to="layout.sequence_parallel",
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"] | None = key(
        None,
        "PP: order of forward and backward passes; null: interleaved where a rank holds several runs of layers, else "
        "1f1b",
        to="pipeline.schedule",
    )
    virtual_pipeline_model_parallel_size: Int | None = key(
        None, "runs of layers that each rank holds", "chunks", ge=1, le=MAX_RANKS, to="pipeline.chunks"
    )
    pipeline_warmup: Literal["plain", "wide"] = key(
        "plain",
        "1f1b: wide runs up to twice as many forward passes ahead, hides messages, costs their memory",
        to="pipeline.warmup",
    )
    pipeline_partition: Literal["uniform", "cost"] = key(
        "uniform", "layers per stage: equal counts, or equal work (the head weighs in)", to="pipeline.partition"
    )
    decoder_first_pipeline_num_layers: Int | None = key(
        None, "decoder layers of the first stage", "layers", ge=0, to="layout.decoder_layers_first_stage"
    )
    decoder_last_pipeline_num_layers: Int | None = key(
        None, "decoder layers of the last stage", "layers", ge=0, to="layout.decoder_layers_last_stage"
    )
    recompute_granularity: Literal["full", "selective"] | None = key(
        None, "what is recomputed in backward; null: nothing", to="recompute.granularity"
    )
    recompute_method: Literal["block", "uniform"] | None = key(
        None, "full: block = the first n layers of each stage, uniform = groups of n layers", unread=_FULL_ONLY
    )
    recompute_num_layers: Int | None = key(
        None, "the n of recompute_method", "layers", ge=1, le=MAX_RANKS, unread=_FULL_ONLY
    )
    seq_length: Int | None = key(None, "row length where runner.seq_length is absent", "tokens", ge=1)
    encoder_seq_length: Int | None = key(None, "row length where seq_length is absent too", "tokens", ge=1)
    num_layers: Int | None = key(None, "decoder layers; the folder's config.json wins", "layers", ge=1, le=MAX_RANKS)
    hidden_size: Int | None = key(
        None, "residual width; config.json wins", ge=1, unread="the model folder's config.json has it"
    )
    ffn_hidden_size: Int | None = key(None, "MLP width; config.json wins", ge=1)
    num_attention_heads: Int | None = key(None, "query heads; config.json wins", "heads", ge=1, le=MAX_RANKS)
    num_query_groups: Int | None = key(None, "key/value heads; config.json wins", "heads", ge=1, le=MAX_RANKS)
    padded_vocab_size: Int | None = key(None, "vocabulary; config.json wins", "tokens", ge=1)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the model and its sequence: the world is a multiple of it."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class OptimConfig(Block):
    """Optimizer, clipping, loss scale."""

    optimizer: Literal["adam", "adamw", "sgd"] = key("adam", "adam = AdamW (decoupled decay); sgd")
    lr: Float = key(1e-3, "peak learning rate", ge=0)
    adam_beta1: Float = key(0.9, "decay of the first moment", ge=0, lt=1, unread=_ADAM_ONLY)
    adam_beta2: Float = key(0.999, "decay of the second moment", ge=0, lt=1, unread=_ADAM_ONLY)
    adam_eps: Float = key(1e-8, "added to the denominator", gt=0, unread=_ADAM_ONLY)
    sgd_momentum: Float = key(0.9, "momentum of sgd", ge=0, lt=1, unread="only sgd reads it")
    weight_decay: Float = key(0.01, "decoupled decay of matrices and embeddings; biases and norms have none", ge=0)
    clip_grad: Float = key(1.0, "global gradient norm above which gradients are scaled down; 0: off", ge=0)
    use_distributed_optimizer: Bool = key(True, "ZeRO 1: shard optimizer state over dp x cp")
    optimizer_cpu_offload: Bool = key(
        False, "keep optimizer_offload_fraction of the optimizer state on the CPU", unread=_NO_OFFLOAD
    )
    optimizer_offload_fraction: Float = key(
        0.0, "part of the optimizer state that is offloaded; 0: none", ge=0, le=1, unread=_NO_OFFLOAD
    )
    overlap_grad_reduce: Bool = key(False, "reduce gradients while backward runs")
    fp16: Bool | None = key(None, "must agree with model.precision where given")
    bf16: Bool | None = key(None, "must agree with model.precision where given")
    loss_scale: Float | None = key(
        None,
        "fp16: constant loss scale; null or 0: dynamic",
        ge=0,
        unread="only fp16 has a loss scale (Megatron would apply a constant one)",
    )
    initial_loss_scale: Float = key(2.0**16, "fp16, dynamic: first scale", gt=0, unread=_DYNAMIC)
    loss_scale_window: Int = key(
        1000, "fp16, dynamic: steps without overflow before the scale doubles", "steps", ge=1, unread=_DYNAMIC
    )
    hysteresis: Int = key(2, "fp16, dynamic: overflows before the scale halves", "steps", ge=1, unread=_DYNAMIC)
    min_loss_scale: Float = key(1.0, "fp16, dynamic: smallest scale", gt=0, unread=_DYNAMIC)


class LRSchedConfig(Block):
    """Learning rate and weight decay per optimizer step, Megatron's formula."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "constant", "shape of the schedule after warm-up", to="schedule.style"
    )
    lr_decay_iters: Int | None = key(
        None, "step at which min_lr is reached, warm-up included; null: 100000", "steps", ge=1, unread=_DECAYING
    )
    lr_warmup_fraction: Float | None = key(None, "warm-up as a part of lr_decay_iters; wins over iters", ge=0, lt=1)
    lr_warmup_iters: Int = key(0, "warm-up length", "steps", ge=0)
    lr_warmup_init: Float = key(0.0, "learning rate of the first step when there is a warm-up", ge=0)
    min_lr: Float = key(0.0, "floor of the decaying styles", ge=0, unread=_DECAYING)
    start_weight_decay: Float | None = key(
        None, "weight decay at step 0; null: optim.weight_decay", ge=0, unread=_DECAYING
    )
    end_weight_decay: Float | None = key(
        None, "weight decay at step 100000; null: optim.weight_decay", ge=0, unread=_DECAYING
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = key(
        "constant", "shape of the decay's ramp", unread=_DECAYING
    )
    lr_wsd_decay_iters: Int | None = key(None, "WSD: length of the tail", "steps", ge=1, unread=_WSD_ONLY)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = key(
        "exponential", "WSD: shape of the tail", unread=_WSD_ONLY
    )


class MegatronConfig(Block):
    """The few keys of RLinf's `actor.megatron` that have a meaning here."""

    use_hf_ckpt: Bool = key(
        True,
        "start from a Hugging Face folder; Megatron-format weights are refused",
        unread="a switch between RLinf's two kinds of start weights; ours are model_path's",
    )
    distributed_timeout_minutes: Float = key(
        10, "how long a collective may take", "minutes", gt=0, le=MAX_MINUTES, to="distributed_timeout_minutes"
    )
    ddp_bucket_size: Int | None = key(
        None, "elements per gradient bucket", "elements", ge=1, unread="null: DeepSpeed's own size"
    )


class ActorConfig(Block):
    """The trained model and everything that trains it."""

    training_backend: Literal["deepspeed", "megatron"] = key(
        "deepspeed", "'megatron' is accepted: it is translated", to="training_backend"
    )
    micro_batch_size: Int = key(1, "rows per dp rank and micro-batch", "rows", ge=1)
    global_batch_size: Int | None = key(
        None, "rows per optimizer step over all dp ranks; null: micro_batch_size x dp", "rows", ge=1
    )
    seed: Int = key(1234, "seed of initial weights and dropout", ge=0, to="seed")
    loss_normalization: Literal["token", "micro_batch"] = key(
        "token",
        "token: mean over all valid tokens of the global batch; micro_batch: mean of micro-batch means (RLinf)",
        to="loss_normalization",
    )
    enable_dp_load_balance: Bool = key(False, "spread rows over dp ranks by token count", to="dp_load_balance")
    freeze_parameters: Strings = key(
        (), "globs of Hugging Face parameter names that are not trained", to="freeze_parameters"
    )
    tokenizer: TokenizerConfig = key(TokenizerConfig, "tokenizer of the data")
    model: ModelConfig = key(ModelConfig, "model, precision, parallel degrees")
    optim: OptimConfig = key(OptimConfig, "optimizer")
    lr_sched: LRSchedConfig = key(LRSchedConfig, "schedules")
    megatron: MegatronConfig = key(MegatronConfig, "RLinf's Megatron section")
    deepspeed: dict[str, Any] = key(dict, "raw DeepSpeed keys, merged last and checked against what we own")


class CriticConfig(Block):
    """PPO's second engine, in the actor's processes: the decoder with a value head, cut and trained by its own keys."""

    use_critic_model: Bool = key(False, "train a critic (adv_type gae)", to="critic.enabled", only="rl", unread=_NO_RL)
    training_backend: Literal["deepspeed", "megatron"] = key("deepspeed", "as actor.training_backend")
    seed: Int | None = key(None, "seed of a fresh value head; null: actor.seed", ge=0)
    model: ModelConfig = key(ModelConfig, "model_path null: the actor's; precision, parallel degrees")
    optim: OptimConfig = key(OptimConfig, "optimizer")
    lr_sched: LRSchedConfig = key(LRSchedConfig, "schedules")
    deepspeed: dict[str, Any] = key(dict, "raw DeepSpeed keys")


class RunConfig(Block):
    """A whole run. Build it with `hybrid5d.load.load_config`, or from a dict with `model_validate`."""

    cluster: ClusterConfig = key(ClusterConfig, "where the job runs")
    runner: RunnerConfig = key(RunnerConfig, "length of the run, saving, logging")
    data: DataConfig = key(DataConfig, "what is trained on")
    algorithm: AlgorithmConfig = key(AlgorithmConfig, "RL batch sizes, advantages, loss")
    actor: ActorConfig = key(ActorConfig, "the trained model")
    critic: CriticConfig = key(CriticConfig, "PPO's value model")
    rollout: RolloutConfig = key(RolloutConfig, "where responses come from")
    reward: RewardConfig = key(RewardConfig, "what a response is worth")
    _keys: Any = PrivateAttr(default=None)

    @property
    def row_length(self) -> int | None:
        """Tokens that a row is cut to: runner.seq_length, else the model block's; None: the longest row of the data."""
        model = self.actor.model
        return self.runner.seq_length or model.seq_length or model.encoder_seq_length

    @property
    def is_rl(self) -> bool:
        """True where batch sizes follow RLinf's RL arithmetic instead of actor.global_batch_size."""
        return self.runner.task_type in RL_TASKS and self.data.rollout_batch_size is not None

    @property
    def has_critic(self) -> bool:
        """An RL run that trains a value model beside the actor."""
        return self.is_rl and self.critic.use_critic_model

    @property
    def keys(self) -> Any:
        """What loading made of each input key (`config.loaded.KeyReport`); None for a config built by hand."""
        return self._keys

    def __eq__(self, other: object) -> bool:
        """Equal values; where they were read from does not matter."""
        return isinstance(other, RunConfig) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.runner, self.data.train_data_paths, self.actor.seed))

    def to_tree(self) -> dict[str, Any]:
        """The whole config as plain YAML-ready data, defaults written out."""
        return self.model_dump(mode="json")


def block_of(path: str) -> type[Block] | None:
    """The block class at a dotted path ("" is the whole config), or None where there is no such block."""
    block: type[Block] = RunConfig
    for part in filter(None, path.split(".")):
        field = block.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, Block)):
            return None
        block = field.annotation
    return block


@lru_cache(maxsize=1)
def schema_keys() -> Mapping[str, Any]:
    """Dotted path of every leaf key -> its pydantic field."""
    return _fields(RunConfig, "")


def _fields(block: type[Block], prefix: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            keys |= _fields(field.annotation, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = field
    return keys
