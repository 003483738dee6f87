"""The YAML's schema: every key that means something to hybrid5d, with description, unit and default.

Names and shape are RLinf's. Cross-key rules live in `hybrid5d.plan.rules`; this file knows types and ranges only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from hybrid5d.errors import SpoiltKey


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true/false")
    return value


def _no_number(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError("true or false is needed, not a number")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


PRECISIONS = {
    "fp32": ("fp32", "32", "32-true", "float32"),
    "bf16": ("bf16", "bf16-mixed", "bf16-true", "bfloat16"),
    "fp16": ("fp16", "16", "16-mixed", "16-true", "float16"),
}
DEFAULT_PRECISION = "fp32"


def _precision(value: Any) -> Any:
    if value is None:
        return DEFAULT_PRECISION
    text = str(value).strip().lower()
    for name, spellings in PRECISIONS.items():
        if text in spellings and not isinstance(value, (bool, float)):
            return name
    raise ValueError("known precisions are fp32 (32), bf16 (bf16-mixed) and fp16 (16, 16-mixed)")


def _or(default: str) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


MAX_INT = 2**53  # what JSON and every tool downstream can hold
MAX_RANKS = 2**20
MAX_MINUTES = 60 * 24 * 366
Int = Annotated[int, BeforeValidator(_no_bool), Field(ge=-MAX_INT, le=MAX_INT)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Bool = Annotated[bool, BeforeValidator(_no_number)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Precision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_precision)]


def key(default: Any, description: str, unit: str = "", **limits: Any) -> Any:
    """A schema field: default, what it means, its unit, and pydantic limits (`ge`, `gt`, ...)."""
    extra: Any = {"unit": unit} if unit else None
    if isinstance(default, type):
        return Field(default_factory=default, description=description, json_schema_extra=extra, **limits)
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


class Block(BaseModel):
    """A frozen mapping of the YAML; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=()
    )

    if not TYPE_CHECKING:  # mypy would take any attribute for known

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes only: a field is missing where `RunConfig.without` took it out."""
            if name in type(self).model_fields:
                raise SpoiltKey(name)
            return super().__getattr__(name)


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

    log_path: str | None = key(None, "folder of the tracker's files; null: output_dir/experiment_name", "path")
    project_name: Annotated[str, _or("hybrid5d")] = key("hybrid5d", "project name shown by the tracker")
    experiment_name: str | None = key(None, "run name shown by the tracker; null: runner.experiment_name")
    logger_backends: Strings = key((), "trackers to feed: tensorboard, wandb, swanlab")


class RunnerConfig(Block):
    """Length of the run, saving, resuming, logging."""

    task_type: str = key("sft", "sft, or RLinf's reasoning / coding_online_rl (their training part)")
    seq_length: Int | None = key(None, "length that rows are cut to; null: the longest row of the data", "tokens", ge=1)
    max_steps: Int = key(-1, "stop after this many optimizer steps (RL: RL steps); -1: no limit", "steps", ge=-1)
    max_epochs: Int = key(-1, "stop after this many passes over the data; -1: no limit", "epochs", ge=-1)
    save_interval: Int = key(-1, "save a checkpoint every so many steps and at the end; <= 0: never", "steps")
    val_check_interval: Int = key(-1, "evaluate every so many steps; <= 0: never", "steps")
    resume_dir: str | None = key(None, "checkpoint to go on from, or 'auto' for the newest of this run", "path")
    output_dir: Annotated[str, _or("results")] = key("results", "root of run directories", "path")
    experiment_name: Annotated[str, _or("run")] = key("run", "name of the run directory inside output_dir")
    enable_dynamic_batch_size: Bool = key(False, "form micro-batches by token budget instead of by row count")
    max_tokens_per_mbs: Int | None = key(
        None, "token budget of a micro-batch per GPU (times context_parallel_size)", "tokens", ge=1
    )
    logger: LoggerConfig = key(LoggerConfig, "trackers")


class DataConfig(Block):
    """What is read, and how rows are made of it."""

    type: str = key("tokens", "text | tokens | chat (RLinf's own types are translated, not trained)")
    train_data_paths: Strings | None = key(None, "files, folders or globs to train on", "paths")
    val_data_paths: Strings | None = key(None, "files, folders or globs to evaluate on", "paths")
    shuffle: Bool = key(True, "new row order each epoch, a function of (seed, epoch)")
    seed: Int = key(42, "seed of the row order", ge=0)
    num_workers: Int = key(0, "processes that tokenise; 0: in the caller", "processes", ge=0)
    rollout_batch_size: Int | None = key(None, "RL: prompts per RL step", "prompts", ge=1)
    max_prompt_length: Int | None = key(None, "RL: width of the prompt part of a row", "tokens", ge=1)
    messages_key: str = key("messages", "chat: field that holds the list of turns")
    prompt_key: str = key("prompt", "chat: field of a single prompt")
    response_key: str = key("response", "chat: field of its answer")
    instruction_key: str = key("instruction", "chat: field of the instruction (Alpaca form)")
    input_key: str = key("input", "chat: field of the instruction's input (Alpaca form)")
    output_key: str = key("output", "chat: field of the answer (Alpaca form)")
    text_key: str = key("text", "text: field of the document in JSONL and Parquet files")
    train_on: Literal["assistant", "all"] = key("assistant", "chat: turns whose tokens are trained on")
    packing: Literal["none", "documents"] = key("none", "documents: several samples in a row, separated in attention")
    overlong: Literal["truncate", "drop", "error"] = key("truncate", "what happens to a sample longer than seq_length")
    last_batch: Literal["pad", "drop_last"] = key(
        "pad", "rows left over at the end of an epoch: fill up the batch or not"
    )
    chat_template: str | None = key(None, "chat: Jinja file in place of the tokenizer's own template", "path")
    cache_dir: str | None = key(None, "folder of tokenised files; null: ~/.cache/hybrid5d or $XDG_CACHE_HOME", "path")


class SamplingConfig(Block):
    """The one sampling value that RLinf also uses in training."""

    temperature: Float = key(1.0, "RLinf divides the training logits by it; ours are never divided", gt=0)


class AlgorithmConfig(Block):
    """RL: what decides batch sizes and the averaging of the loss."""

    group_size: Int = key(1, "sequences per prompt", "sequences", ge=1)
    n_minibatches: Int = key(1, "optimizer steps per RL step", "steps", ge=1)
    training_batch_size_per_gpu: Int = key(1, "micro-batch size per dp rank", "sequences", ge=1)
    logprob_forward_micro_batch_size: Int | None = key(
        None, "sequences per log-prob forward pass; null: not checked", "sequences", ge=1
    )
    loss_agg_func: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = key(
        "token-mean", "RLinf's averaging of the loss inside a micro-batch; ours averages over tokens"
    )
    use_valid_token_scale: Bool = key(False, "RLinf's re-weighting by token counts")
    multi_agent: Bool = key(False, "prompts yield any number of sequences (RLinf: agentloop.is_dynamic_rollout_batch)")
    sampling_params: SamplingConfig = key(SamplingConfig, "temperature")


class TokenizerConfig(Block):
    """Tokenizer of the data."""

    tokenizer_model: str | None = key(
        None, "tokenizer folder, or 'byte' for the built-in one; null: the model folder's, else byte", "path"
    )


class ModelConfig(Block):
    """Model folder, precision, parallel degrees, recomputation."""

    model_path: str | None = key(None, "Hugging Face folder; its config.json gives the architecture", "path")
    model_type: str | None = key(None, "RLinf's model family name; the folder decides where it exists")
    load_weights: Bool | None = key(
        None, "read weights from the folder's safetensors; null: where there are any; false: random start"
    )
    precision: Precision = key(DEFAULT_PRECISION, "fp32 | bf16 | fp16 of weights and activations; null = fp32")
    tensor_model_parallel_size: Int = key(1, "TP: ranks that share each weight matrix", "ranks", ge=1, le=MAX_RANKS)
    pipeline_model_parallel_size: Int = key(1, "PP: stages that share the layers", "ranks", ge=1, le=MAX_RANKS)
    context_parallel_size: Int = key(1, "CP: ranks that share the sequence", "ranks", ge=1, le=MAX_RANKS)
    cp_comm_type: Literal["p2p", "a2a", "a2a+p2p", "all_gather"] = key(
        "p2p", "how CP attention communicates: ring, Ulysses, both, or gathered keys and values"
    )
    cp_load_balance: Literal["zigzag", "contiguous"] = key("zigzag", "how the sequence is cut over cp ranks")
    hierarchical_context_parallel_sizes: tuple[Int, Int] | None = key(
        None, "a2a+p2p: [Ulysses degree, ring degree]; null: chosen from the kv heads", "ranks"
    )
    attention_kernel: Literal["auto", "aten_cpu", "flash_attn", "aten_flash", "aten_efficient", "chunked"] = key(
        "auto", "attention kernel; auto: the best one that device and dtype have"
    )
    sequence_parallel: Bool = key(False, "SP: cut activations between TP regions along the sequence, same ranks as TP")
    decoder_first_pipeline_num_layers: Int | None = key(None, "decoder layers of the first stage", "layers", ge=0)
    decoder_last_pipeline_num_layers: Int | None = key(None, "decoder layers of the last stage", "layers", ge=0)
    recompute_granularity: Literal["full", "selective"] | None = key(
        None, "what is recomputed in backward; null: nothing"
    )
    recompute_method: Literal["block", "uniform"] | None = key(
        None, "full: block = the first n layers of each stage, uniform = groups of n layers"
    )
    recompute_num_layers: Int | None = key(None, "the n of recompute_method", "layers", ge=1, le=MAX_RANKS)
    seq_length: Int | None = key(None, "row length where runner.seq_length is absent", "tokens", ge=1)
    encoder_seq_length: Int | None = key(None, "row length where seq_length is absent too", "tokens", ge=1)
    num_layers: Int | None = key(None, "decoder layers; the folder's config.json wins", "layers", ge=1, le=MAX_RANKS)
    hidden_size: Int | None = key(None, "residual width; config.json wins", ge=1)
    ffn_hidden_size: Int | None = key(None, "MLP width; config.json wins", ge=1)
    num_attention_heads: Int | None = key(None, "query heads; config.json wins", "heads", ge=1, le=MAX_RANKS)
    num_query_groups: Int | None = key(None, "key/value heads; config.json wins", "heads", ge=1, le=MAX_RANKS)
    padded_vocab_size: Int | None = key(None, "vocabulary; config.json wins", "tokens", ge=1)


class OptimConfig(Block):
    """Optimizer, clipping, loss scale."""

    optimizer: Literal["adam", "adamw", "sgd"] = key("adam", "adam = AdamW (decoupled decay); sgd")
    lr: Float = key(1e-3, "peak learning rate", ge=0)
    adam_beta1: Float = key(0.9, "decay of the first moment", ge=0, lt=1)
    adam_beta2: Float = key(0.999, "decay of the second moment", ge=0, lt=1)
    adam_eps: Float = key(1e-8, "added to the denominator", gt=0)
    sgd_momentum: Float = key(0.9, "momentum of sgd", ge=0, lt=1)
    weight_decay: Float = key(0.01, "decoupled decay of matrices and embeddings; biases and norms have none", ge=0)
    clip_grad: Float = key(1.0, "global gradient norm above which gradients are scaled down; 0: off", ge=0)
    use_distributed_optimizer: Bool = key(True, "ZeRO 1: shard optimizer state over dp x cp")
    optimizer_cpu_offload: Bool = key(False, "keep optimizer_offload_fraction of the optimizer state on the CPU")
    optimizer_offload_fraction: Float = key(0.0, "part of the optimizer state that is offloaded; 0: none", ge=0, le=1)
    overlap_grad_reduce: Bool = key(False, "reduce gradients while backward runs")
    fp16: Bool | None = key(None, "must agree with model.precision where given")
    bf16: Bool | None = key(None, "must agree with model.precision where given")
    loss_scale: Float | None = key(None, "fp16: constant loss scale; null or 0: dynamic", ge=0)
    initial_loss_scale: Float = key(2.0**32, "fp16, dynamic: first scale", gt=0)
    loss_scale_window: Int = key(1000, "fp16, dynamic: steps without overflow before the scale doubles", "steps", ge=1)
    hysteresis: Int = key(2, "fp16, dynamic: overflows before the scale halves", "steps", ge=1)
    min_loss_scale: Float = key(1.0, "fp16, dynamic: smallest scale", gt=0)


class LRSchedConfig(Block):
    """Learning rate and weight decay per optimizer step, Megatron's formula."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "constant", "shape of the schedule after warm-up"
    )
    lr_decay_iters: Int | None = key(
        None, "step at which min_lr is reached, warm-up included; null: 100000", "steps", ge=1
    )
    lr_warmup_fraction: Float | None = key(None, "warm-up as a part of lr_decay_iters; wins over iters", ge=0, lt=1)
    lr_warmup_iters: Int = key(0, "warm-up length", "steps", ge=0)
    lr_warmup_init: Float = key(0.0, "learning rate of the first step when there is a warm-up", ge=0)
    min_lr: Float = key(0.0, "floor of the decaying styles", ge=0)
    start_weight_decay: Float | None = key(None, "weight decay at step 0; null: optim.weight_decay", ge=0)
    end_weight_decay: Float | None = key(None, "weight decay at step 100000; null: optim.weight_decay", ge=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = key("constant", "shape of the decay's ramp")
    lr_wsd_decay_iters: Int | None = key(None, "WSD: length of the tail", "steps", ge=1)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = key(
        "exponential", "WSD: shape of the tail"
    )


class MegatronConfig(Block):
    """The few keys of RLinf's `actor.megatron` that have a meaning here."""

    use_hf_ckpt: Bool = key(True, "start from a Hugging Face folder; Megatron-format weights are refused")
    distributed_timeout_minutes: Float = key(10, "how long a collective may take", "minutes", gt=0, le=MAX_MINUTES)
    ddp_bucket_size: Int | None = key(None, "elements per gradient bucket", "elements", ge=1)


class ActorConfig(Block):
    """The trained model and everything that trains it."""

    training_backend: Literal["deepspeed", "megatron"] = key("deepspeed", "'megatron' is accepted: it is translated")
    micro_batch_size: Int = key(1, "rows per dp rank and micro-batch", "rows", ge=1)
    global_batch_size: Int | None = key(
        None, "rows per optimizer step over all dp ranks; null: micro_batch_size x dp", "rows", ge=1
    )
    seed: Int = key(1234, "seed of initial weights and dropout", ge=0)
    loss_normalization: Literal["token", "micro_batch"] = key(
        "token", "token: mean over all valid tokens of the global batch; micro_batch: mean of micro-batch means (RLinf)"
    )
    enable_dp_load_balance: Bool = key(False, "spread rows over dp ranks by token count")
    freeze_parameters: Strings = key((), "globs of Hugging Face parameter names that are not trained")
    tokenizer: TokenizerConfig = key(TokenizerConfig, "tokenizer of the data")
    model: ModelConfig = key(ModelConfig, "model, precision, parallel degrees")
    optim: OptimConfig = key(OptimConfig, "optimizer")
    lr_sched: LRSchedConfig = key(LRSchedConfig, "schedules")
    megatron: MegatronConfig = key(MegatronConfig, "RLinf's Megatron section")
    deepspeed: dict[str, Any] = key(dict, "raw DeepSpeed keys, merged last and checked against what we own")


class RunConfig(Block):
    """A whole run. Build it with `hybrid5d.rlinf.load.load_config`, or from a dict with `model_validate`."""

    cluster: ClusterConfig = key(ClusterConfig, "where the job runs")
    runner: RunnerConfig = key(RunnerConfig, "length of the run, saving, logging")
    data: DataConfig = key(DataConfig, "what is trained on")
    algorithm: AlgorithmConfig = key(AlgorithmConfig, "RL batch arithmetic")
    actor: ActorConfig = key(ActorConfig, "the trained model")
    _account: Any = PrivateAttr(default=None)

    @property
    def row_length(self) -> int | None:
        """Tokens that a row is cut to: runner.seq_length, else the model block's; None: the longest row of the data."""
        model = self.actor.model
        return self.runner.seq_length or model.seq_length or model.encoder_seq_length

    @property
    def account(self) -> Any:
        """What loading found out about each input key (a `config.account.Account`); None for a config built by hand."""
        return self._account

    def __eq__(self, other: object) -> bool:
        """Equal values; where they were read from does not matter."""
        return isinstance(other, RunConfig) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.runner, self.data.train_data_paths, self.actor.seed))

    def without(self, paths: Iterable[str]) -> RunConfig:
        """A copy with holes: reading one of `paths`, keys or whole blocks, raises `SpoiltKey`."""
        config = self
        for path in paths:
            config = _hollow(config, path.split("."))
        return config

    def to_tree(self) -> dict[str, Any]:
        """The whole config as plain YAML-ready data, defaults written out."""
        return self.model_dump(mode="json")


def _hollow(block: Any, parts: list[str]) -> Any:
    copy, (name, *rest) = block.model_copy(), parts
    inner = copy.__dict__.get(name)
    if rest and isinstance(inner, Block):
        copy.__dict__[name] = _hollow(inner, rest)
    else:
        copy.__dict__.pop(name, None)
    return copy


def block_of(path: str) -> type[Block] | None:
    """The block class at a dotted path ("" is the whole config), or None where there is no such block."""
    block: type[Block] = RunConfig
    for part in filter(None, path.split(".")):
        found = block.model_fields.get(part)
        if found is None or not (isinstance(found.annotation, type) and issubclass(found.annotation, Block)):
            return None
        block = found.annotation
    return block


def schema_keys(block: type[Block] = RunConfig, prefix: str = "") -> Mapping[str, Any]:
    """Dotted path of every leaf key -> its pydantic field."""
    keys: dict[str, Any] = {}
    for name, found in block.model_fields.items():
        if isinstance(found.annotation, type) and issubclass(found.annotation, Block):
            keys.update(schema_keys(found.annotation, f"{prefix}{name}."))
        else:
            keys[f"{prefix}{name}"] = found
    return keys
