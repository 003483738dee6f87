"""Keys of RLinf and Megatron that have no place in a hybrid5d run, and why. Data only.

A key is looked up by its longest matching pattern (`*` matches any rest). `notice` keys change what a user may expect
and get a notice of their own; the others appear in the report only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid5d.config.schema import RL_TASKS


@dataclass(frozen=True)
class Foreign:
    """Why a key is dropped, and whether the user should see a notice beside the report."""

    why: str
    notice: bool = False


# Top-level blocks of other components. They pass with one line.
RL_BLOCKS = (
    "inference",
    "actor_inference",
    "critic_inference",
    "env",
    "agentloop",
    "tools",
    "agentlightning",
    "rollout_judge",
    "rollout_server",
    "profile_data",
    "weight_syncer",
    "hydra",
    "defaults",
    "server",
    "eval",
    "ref",
    "reward_model",
    "judge",
    "router",
    "proxy",
    "mcp",
    "search",
    "sandbox",
    "simulator",
    "value_head",
)

_KERNEL = "a Megatron kernel or fusion switch; the numbers do not depend on it"
_MOE = "only read by mixture-of-experts models"
_COMM = "a Megatron communication detail; DeepSpeed and our groups have their own"
_CKPT = "describes Megatron's checkpoint format; ours has its own"
_FROM_HF = "the architecture comes from the Hugging Face config.json, as in RLinf"
_PREP = "prepares RLinf's own kinds of prompts, or images"
_BETWEEN = "moves tensors between RL phases (DeepSpeed: engine.offload_states), not during training"
_TP_KERNEL = "Transformer Engine's overlap of TP communication; not offered"


def _each(names: str, why: str, prefix: str, notice: bool = False) -> dict[str, Foreign]:
    return {f"{prefix}{name}": Foreign(why, notice) for name in names.split()}


FOREIGN: dict[str, Foreign] = {
    **_each(
        "use_pre_process_policy use_wait_before_last_iter_policy recreate_nccl_groups",
        "tunes RLinf's elastic scheduler",
        "cluster.",
    ),
    **_each("profiling* tracer*", "RLinf's profiling; DeepSpeed: flops_profiler, wall_clock_breakdown", "cluster."),
    **_each("num_gpus_per_node gpus_per_node", "RLinf dropped this key; give --gpus-per-node", "cluster.", notice=True),
    **_each("auto_scheduler", "off", "cluster."),
    **_each("ray* accelerator* num_gpus", "how RLinf starts its workers; the launcher does that here", "cluster."),
    **_each(
        "per_worker_log* early_stop* weight_sync_interval ckpt_path only_eval",
        "read by RLinf's runners only",
        "runner.",
    ),
    **_each("logger.*", "read by RLinf's loggers only", "runner."),
    **_each("profile* use_profiler* trace* timer* seed group_name", "read by RLinf's runners only", "runner."),
    # algorithm
    **_each(
        "loss_scales",
        "weights of RLinf's multi-agent loss; each row counts here as loss_agg_func says",
        "algorithm.",
        notice=True,
    ),
    **_each("down_sampling.*", "groups are not thinned out: every sequence is trained on", "algorithm."),
    **_each("use_critic use_value_loss", "read by nobody in RLinf; critic.use_critic_model decides", "algorithm."),
    **_each(
        "loss_mask* reward_* value_* huber_* target_kl", "read by RLinf's FSDP or embodied losses only", "algorithm."
    ),
    **_each("rollout_batch_size_per_gpu val_rollout_batch_size_per_gpu", "read by nobody in RLinf", "algorithm."),
    **_each("max_num_gen_batches", "1: one batch of prompts an RL step", "algorithm."),
    **_each("length_params.*", "sampling_params.max_new_tokens is the length", "algorithm."),
    # rollout, reward
    **_each(
        "group_name model.* model_dir tensor_parallel_size pipeline_parallel_size data_parallel_size "
        "gpu_memory_utilization enforce_eager disable_log_stats distributed_executor_backend detokenize "
        "max_running_requests cuda_graph_max_bs padding eos print_outputs validate_save_dir validate_weight* "
        "weight_reload use_torch_compile torch_compile_max_bs sglang* vllm* return_logprobs is_eval use_fixed_worker "
        "enable_offload max_num_batched_tokens",
        "sets up RLinf's generation engine; here the training engine generates, in the actor's layout",
        "rollout.",
    ),
    **_each(
        "custom_chat_template", "a prompt's template is the tokenizer's, or data.chat_template", "rollout.", notice=True
    ),
    **_each(
        "group_name tokenizer.* random_print_percent use_prompt reward_weights.*",
        "sets up RLinf's reward workers, or belongs to a reward type of its own",
        "reward.",
    ),
    **_each("use_reward_model", "off", "reward."),
    # data
    **_each(
        "dataset_name choice_key image_keys "
        "use_chat_template apply_chat_template_kwargs* "
        "data_size lazy_loading system_prompt answer_separator is_markdown unique_columns "
        "is_hybrid process_workers image_* solution_key format* prompt_template* chat_template* max_seq_length",
        _PREP,
        "data.",
    ),
    **_each(
        "val_rollout_batch_size validation_shuffle val_batch_size eval_batch_size eval_data_paths",
        "all validation prompts are answered, in the batches of training",
        "data.",
    ),
    # actor
    **_each(
        "group_name mcore_gpt spec_name calculate_flops inference_split",
        "names RLinf's worker or its Megatron class",
        "actor.",
    ),
    **_each("combine_reference_model reference*", "the reference's weights lie on the CPU, once per shard", "actor."),
    **_each("pack_traj", "each row of a trajectory is a row here", "actor."),
    **_each("use_critic_model", "critic.use_critic_model decides", "actor."),
    **_each("offload_optimizer offload_weight offload_grad", _BETWEEN, "actor.", notice=True),
    **_each("eval_batch_size", "RLinf's SFT evaluation; ours evaluates with micro_batch_size", "actor."),
    **_each("fsdp_config*", "read by RLinf's FSDP backend only", "actor."),
    **_each(
        "sync_weight* enable_offload rollout_* channel* weight_sync* recompute_logprobs* load_from_actor",
        "connects RLinf's components",
        "actor.",
    ),
    **_each("tokenizer.*", "RLinf passes on tokenizer_model only", "actor."),
    **_each(
        "checkpoint_load_path",
        "an older name of model.megatron_checkpoint: weights in Megatron's format cannot be read",
        "actor.",
        notice=True,
    ),
    # actor.model
    **_each(
        "gradient_accumulation_fusion masked_softmax_fusion persist_layer_norm "
        "bias_dropout_fusion bias_activation_fusion "
        "bias_swiglu_fusion bias_gelu_fusion apply_rope_fusion use_cpu_initialization perform_initialization "
        "enable_cuda_graph cuda_graph_* use_te_rng_tracker external_cuda_graph cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl deallocate_pipeline_outputs flash_decode use_flash_attn attention_backend "
        "memory_efficient_layer_norm cpu_offloading* gradient_checkpointing*",
        _KERNEL,
        "actor.model.",
    ),
    **_each(
        "batch_p2p_comm batch_p2p_sync overlap_p2p_comm use_ring_exchange_p2p defer_embedding_wgrad_compute "
        "wgrad_deferral_limit barrier_with_L1_time async_tensor_model_parallel_allreduce "
        "microbatch_group_size_per_vp_stage",
        _COMM,
        "actor.model.",
    ),
    **_each("tp_comm_* tp_only_amax_red sequence_parallel_*", _TP_KERNEL, "actor.model."),
    **_each("attention_softmax_in_fp32", "our attention always accumulates in fp32", "actor.model."),
    **_each(
        "moe_* num_moe_experts router_* aux_loss* z_loss* expert_tensor_parallel_size expert_model_parallel_size "
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mtp_* "
        "first_k_dense_replace n_shared_experts n_routed_experts",
        _MOE,
        "actor.model.",
    ),
    **_each(
        "activation normalization position_embedding_type add_bias_linear add_qkv_bias qk_layernorm rotary_* "
        "head_dim kv_channels layernorm_epsilon max_position_embeddings share_embeddings_and_output_weights "
        "seq_len_interpolation_factor init_method_std gated_linear_unit "
        "untie_embeddings_and_output_weights openai_gelu layernorm_* rope_* use_rotary_position_embeddings "
        "apply_query_key_layer_scaling transformer_block_type hidden_act swiglu vocab_size window_size",
        _FROM_HF,
        "actor.model.",
    ),
    **_each(
        "attention_dropout hidden_dropout",
        "config.json's dropout counts, as in RLinf, and hybrid5d trains without dropout",
        "actor.model.",
        notice=True,
    ),
    **_each(
        "make_vocab_size_divisible_by",
        "RLinf never pads the vocabulary; ours is padded to a multiple of tp",
        "actor.model.",
    ),
    **_each("variable_seq_lengths", "rows are always of variable length here", "actor.model."),
    **_each("is_lora lora* use_lora", "LoRA is off", "actor.model."),
    **_each(
        "distribute_saved_activations pipeline_dtype params_dtype autocast_dtype enable_autocast recompute_modules",
        "follows from model.precision and the layout",
        "actor.model.",
    ),
    **_each(
        "pipeline_model_parallel_split_rank mcore_customization_config* megatron_checkpoint fp8* fp4*",
        "off",
        "actor.model.",
    ),
    **_each(
        "trust_remote_code attn_implementation use_fast num_action* action_* image_* vision_* add_value_head",
        "read by RLinf's FSDP or embodied models only",
        "actor.model.",
    ),
    **_each("freeze_vision_model freeze_vision_projection", "the vision tower is not trained here", "actor.model."),
    **_each("freeze_language_model", "off", "actor.model."),
    # actor.optim
    **_each("min_lr", "a dead key in RLinf: lr_sched.min_lr wins", "actor.optim."),
    **_each("overlap_param_gather", "DeepSpeed gathers parameters inside step()", "actor.optim."),
    **_each("align_grad_reduce align_param_gather overlap_param_gather_with_optimizer_step", _COMM, "actor.optim."),
    **_each(
        "optimizer_enable_pin log_num_zeros_in_grad barrier_with_L1_time timers",
        "a dead key or a metric",
        "actor.optim.",
    ),
    **_each(
        "overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params",
        "a detail of Megatron's CPU optimizer",
        "actor.optim.",
    ),
    **_each(
        "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype main_params_dtype main_grads_dtype "
        "store_param_remainders",
        "Transformer Engine's low-precision optimizer state; ours is fp32",
        "actor.optim.",
        notice=True,
    ),
    **_each("decoupled_lr decoupled_min_lr", "off", "actor.optim."),
    **_each(
        "value_lr critic_* lr_warmup* lr_scheduler* warmup_* total_training_steps* weight_decay_*",
        "read by RLinf's FSDP backend only",
        "actor.optim.",
    ),
    # actor.lr_sched
    **_each("max_lr lr", "a dead key in RLinf: optim.lr is the peak", "actor.lr_sched."),
    **_each(
        "use_checkpoint_opt_param_scheduler override_opt_param_scheduler lr_decay_samples lr_warmup_samples",
        "on resume the step counter comes from the checkpoint, the schedule from the YAML",
        "actor.lr_sched.",
    ),
    # actor.megatron
    **_each(
        "ckpt_convertor.*",
        "converts weights to Megatron's format; hybrid5d reads the Hugging Face folder",
        "actor.megatron.",
    ),
    **_each("profiler.* use_profiler", "torch profiler around RLinf's worker", "actor.megatron."),
    **_each(
        "load save micro_batch_size global_batch_size train_iters pretrained_checkpoint make_vocab_size_divisible_by "
        "swiglu normalization untie_embeddings_and_output_weights",
        "RLinf overwrites it whatever the YAML says",
        "actor.megatron.",
        notice=True,
    ),
    **_each(
        "mbridge", "Megatron-Bridge builds RLinf's model; ours is read from the Hugging Face folder", "actor.megatron."
    ),
    **_each(
        "use_dist_ckpt ckpt_format ckpt_fully_parallel_save "
        "ckpt_fully_parallel_load async_save auto_detect_ckpt_format "
        "ckpt_convert_* non_persistent_* ckpt_assume_constant_structure dist_ckpt_* no_load_optim no_load_rng "
        "no_save_optim no_save_rng finetune exit_on_missing_checkpoint ckpt_step save_interval use_checkpoint_args",
        _CKPT,
        "actor.megatron.",
    ),
    **_each(
        "ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective distributed_backend "
        "nccl_communicator_config_path enable_gloo_process_groups "
        "use_tp_pp_dp_mapping num_distributed_optimizer_instances "
        "data_parallel_random_init local_rank lazy_mpu_init use_sharp "
        "nccl_ub keep_fp8* data_parallel_sharding_strategy "
        "gradient_reduce_div_fusion suggested_communication_unit_size",
        _COMM,
        "actor.megatron.",
    ),
    **_each(
        "tp_comm_overlap_cfg decoder_tp_comm_overlap tp_comm_bootstrap_backend tp_comm_*", _TP_KERNEL, "actor.megatron."
    ),
    **_each(
        "accumulate_allreduce_grads_in_fp32", "always on here: data_types.grad_accum_dtype is fp32", "actor.megatron."
    ),
    **_each(
        "check_for_nan_in_loss_and_grad check_for_large_grads",
        "a non-finite step is reported by our trainer",
        "actor.megatron.",
    ),
    **_each(
        "encoder_tensor_model_parallel_size encoder_pipeline_model_parallel_size "
        "use_torch_fsdp2 use_custom_fsdp skip_train "
        "moe_use_upcycling",
        "off",
        "actor.megatron.",
    ),
    **_each(
        "timing_log_* rerun_mode error_injection_* retro_* init_model_with_meta_device log_progress transformer_impl "
        "hybrid_* inference_* mamba_* result_rejected_tracker* straggler* "
        "log_* tensorboard_* wandb_* seed eval_* exit_*",
        "read by Megatron's own training script only",
        "actor.megatron.",
    ),
}
# The critic's block mirrors the actor's.
FOREIGN |= {key.replace("actor.", "critic.", 1): entry for key, entry in FOREIGN.items() if key.startswith("actor.")}
FOREIGN |= _each("use_hf_ckpt distributed_timeout_minutes ddp_bucket_size", "the actor's counts", "critic.megatron.")
FOREIGN |= _each(
    "micro_batch_size global_batch_size enable_dp_load_balance loss_normalization tokenizer.tokenizer_model",
    "the critic is given the actor's rows",
    "critic.",
)
FOREIGN["critic.model.megatron_checkpoint"] = Foreign(
    "weights in Megatron's format cannot be read: the critic starts from critic.model.model_path, else the actor's",
    notice=True,
)

# Keys whose value must be "off"; anything else is refused. key -> (values that mean off, rule, fix)
MUST_BE_OFF: dict[str, tuple[tuple[object, ...], str, str]] = {
    "cluster.auto_scheduler": (
        (False,),
        "the elastic scheduler changes dp at run time; a static translation has no meaning",
        "set it to false",
    ),
    "algorithm.max_num_gen_batches": (
        (None, 1),
        "multiplies the prompts of an RL step",
        "set it to 1 and multiply data.rollout_batch_size",
    ),
    "reward.use_reward_model": ((None, False), "a reward model is not offered", "set it to false"),
    "actor.model.pipeline_model_parallel_split_rank": (
        (None, 0),
        "encoder-decoder pipelines are not supported",
        "set it to null",
    ),
    "actor.model.fp8": ((None, False), "fp8 is not supported", "set it to null and use precision: bf16"),
    "actor.model.fp8_format": ((None, False), "fp8 is not supported", "remove it and use precision: bf16"),
    "actor.model.fp4": ((None, False), "fp4 is not supported", "set it to null and use precision: bf16"),
    "actor.model.fp8_param": ((None, False), "fp8 is not supported", "remove it and use precision: bf16"),
    "actor.model.is_lora": ((None, False), "LoRA is not supported", "set it to false"),
    "actor.model.freeze_language_model": (
        (None, False),
        "a frozen language model leaves nothing to train here",
        "set it to false",
    ),
    "actor.model.mcore_customization_config": (
        (None, {}),
        "raw attributes of Megatron's config cannot be translated",
        "remove its content",
    ),
    "actor.optim.decoupled_lr": (
        (None,),
        "a separate learning rate for embedding and head is not supported",
        "set it to null",
    ),
    "actor.optim.decoupled_min_lr": (
        (None,),
        "a separate learning rate for embedding and head is not supported",
        "set it to null",
    ),
    "actor.megatron.num_distributed_optimizer_instances": (
        (None, 1),
        "more than one optimizer instance is not supported (RLinf does not pass it on either)",
        "set it to 1",
    ),
    "actor.megatron.use_torch_fsdp2": ((None, False), "FSDP2 is another kind of data parallelism", "set it to false"),
    "actor.megatron.use_custom_fsdp": ((None, False), "FSDP is another kind of data parallelism", "set it to false"),
    "actor.megatron.encoder_tensor_model_parallel_size": (
        (None, 0),
        "encoder-decoder layouts are not supported",
        "set it to 0",
    ),
    "actor.megatron.encoder_pipeline_model_parallel_size": (
        (None, 0),
        "encoder-decoder layouts are not supported",
        "set it to 0",
    ),
    "actor.megatron.skip_train": ((None, False), "with skip_train nothing would be trained", "set it to false"),
    "actor.megatron.moe_use_upcycling": (
        (None, False),
        "mixture-of-experts models are not supported",
        "set it to false",
    ),
    "actor.megatron.use_tp_pp_dp_mapping": (
        (None, False),
        "only Megatron's default rank order tp-cp-dp-pp is supported",
        "set it to false",
    ),
}
MUST_BE_OFF |= {k.replace("actor.", "critic.", 1): v for k, v in MUST_BE_OFF.items() if k.startswith("actor.")}

TASKS = ("sft", *RL_TASKS)
VLM_TYPES = ("qwen2.5_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "llava", "vlm")
MOE_TYPES = ("deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "mixtral", "moonlight", "gpt_oss")
