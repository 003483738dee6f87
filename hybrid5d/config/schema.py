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
_RL_LOSS = "belongs to the RL loss; hybrid5d's loss is set by actor.loss_normalization"
_FULL_ONLY = "only recompute_granularity full reads it"
_ADAM_ONLY = "only adam reads it"
_DYNAMIC = "only a dynamic fp16 loss scale reads it"
_NO_OFFLOAD = "nothing is offloaded: it takes the switch and a fraction above 0"
_DECAYING = "lr_decay_style constant does not read it"
_WSD_ONLY = "only lr_decay_style WSD reads it"


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
    cpu_backend: Literal["auto", "shm", "gloo"] = key(
        "gloo",
        "collectives on CPU: gloo, shm (shared memory, one host), auto (shm for groups on one host)",
        to="cpu_backend",
    )
    logger: LoggerConfig = key(LoggerConfig, "trackers")


class DataConfig(Block):
    """What is read, and how rows are made of it."""

    type: str = key("tokens", "text | tokens | chat (RLinf's own types are translated, not trained)", to="data.type")
    train_data_paths: Files | None = key(None, "files, folders or globs to train on", "paths", to="data.train")
    val_data_paths: Files | None = key(None, "files, folders or globs to evaluate on", "paths", to="data.val")
    shuffle: Bool = key(True, "new row order each epoch, a function of (seed, epoch)", to="data.shuffle")
    seed: Int = key(42, "seed of the row order", ge=0, to="data_seed")
    num_workers: Int = key(0, "processes that tokenise; 0: in the caller", "processes", ge=0, to="data.num_workers")
    rollout_batch_size: Int | None = key(None, "RL: prompts per RL step", "prompts", ge=1, unread=_RL_ONLY)
    max_prompt_length: Int | None = key(
        None,
        "RL: width of the prompt part of a row",
        "tokens",
        ge=1,
        unread="width of RLinf's left-padded prompts; our rows are not padded that way",
    )
    messages_key: str = key("messages", "chat: field that holds the list of turns", to="data.messages_key")
    prompt_key: str = key("prompt", "chat: field of a single prompt", to="data.prompt_key")
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
    """The one sampling value that RLinf also uses in training."""

    temperature: Float = key(
        1.0, "RLinf divides the training logits by it; ours are never divided", gt=0, unread=_RL_LOSS
    )


class AlgorithmConfig(Block):
    """RL: what decides batch sizes and the averaging of the loss."""

    group_size: Int = key(1, "sequences per prompt", "sequences", ge=1, unread=_RL_ONLY)
    n_minibatches: Int = key(1, "optimizer steps per RL step", "steps", ge=1, unread=_RL_ONLY)
    training_batch_size_per_gpu: Int = key(1, "micro-batch size per dp rank", "sequences", ge=1, unread=_RL_ONLY)
    logprob_forward_micro_batch_size: Int | None = key(
        None,
        "sequences per log-prob forward pass; null: not checked",
        "sequences",
        ge=1,
        unread="splits RLinf's log-prob pass; ours takes the rows it is given",
    )
    loss_agg_func: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = key(
        "token-mean", "RLinf's averaging of the loss inside a micro-batch; ours averages over tokens", unread=_RL_LOSS
    )
    use_valid_token_scale: Bool = key(False, "RLinf's re-weighting by token counts", unread=_RL_LOSS)
    multi_agent: Bool = key(
        False, "prompts yield any number of sequences (RLinf: agentloop.is_dynamic_rollout_batch)", unread=_RL_ONLY
    )
    sampling_params: SamplingConfig = key(SamplingConfig, "temperature")


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
    initial_loss_scale: Float = key(2.0**32, "fp16, dynamic: first scale", gt=0, unread=_DYNAMIC)
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


class RunConfig(Block):
    """A whole run. Build it with `hybrid5d.load.load_config`, or from a dict with `model_validate`."""

    cluster: ClusterConfig = key(ClusterConfig, "where the job runs")
    runner: RunnerConfig = key(RunnerConfig, "length of the run, saving, logging")
    data: DataConfig = key(DataConfig, "what is trained on")
    algorithm: AlgorithmConfig = key(AlgorithmConfig, "RL batch arithmetic")
    actor: ActorConfig = key(ActorConfig, "the trained model")
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
