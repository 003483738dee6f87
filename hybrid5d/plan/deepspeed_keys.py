"""DeepSpeed 0.19.8's configuration keys. DeepSpeed ignores unknown top-level keys, so we check them here.

`tests/plan/test_deepspeed_accepts.py` compares the sections with the installed DeepSpeed.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _names(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "managed_gradient_accumulation steps_per_print dump_state disable_python_gc disable_allgather "
    "communication_data_type seq_parallel_communication_data_type prescale_gradients "
    "gradient_predivide_factor gradient_allreduce_op zero_optimization activation_checkpointing "
    "comms_logger tensorboard wandb csv_monitor comet gradient_clipping fp16 bf16 torch_autocast "
    "optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler "
    "wall_clock_breakdown memory_breakdown autotuning hybrid_engine pipeline data_efficiency "
    "curriculum_learning checkpoint data_types aio dataloader_drop_last log_level datastates "
    "weight_quantization compile timers tensor_parallel expert_parallel sequence_parallel_size "
    "vocabulary_size compression_training elasticity use_data_before_expert_parallelism"
)

SECTIONS: dict[str, frozenset[str]] = {
    "zero_optimization": _names(
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param "
        "cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size param_persistence_threshold "
        "model_persistence_threshold max_live_parameters max_reuse_distance "
        "gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params "
        "allgather_sequential stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory leaf_module stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential"
    ),
    "bf16": _names(
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "fp16": _names(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
        "min_loss_scale fp16_master_weights_and_grads"
    ),
    "pipeline": _names(
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant"
    ),
    "data_types": _names("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "tensorboard": _names("enabled output_path job_name"),
    "wandb": _names("enabled group team project"),
    "csv_monitor": _names("enabled output_path job_name"),
    "optimizer": _names("type params legacy_fusion"),
}

TRACKERS = _names("tensorboard wandb csv_monitor comet")

# Keys that would change the numbers or the layout, beside those that the plan emits: key -> what to set in the YAML
# instead ("" = it is fixed).
FORBIDDEN: dict[str, str] = {
    "managed_gradient_accumulation": "",
    "optimizer": "actor.optim",
    "scheduler": "actor.lr_sched",
    "fp16": "actor.model.precision",
    "bf16.enabled": "actor.model.precision",
    "bf16.immediate_grad_update": "",
    "bf16.bf16_master_weights_and_grads": "",
    "bf16.bf16_optimizer_states": "",
    "torch_autocast": "actor.model.precision",
    "data_types.param_dtype": "actor.model.precision",
    "seq_parallel_communication_data_type": "",
    "prescale_gradients": "",
    "gradient_predivide_factor": "",
    "gradient_allreduce_op": "",
    "pipeline.stages": "actor.model.pipeline_model_parallel_size",
    "pipeline.partition": "actor.model.decoder_first_pipeline_num_layers",
    "pipeline.activation_checkpoint_interval": "actor.model.recompute_granularity",
    "activation_checkpointing.partition_activations": "",
    "tensor_parallel": "actor.model.tensor_model_parallel_size",
    "sequence_parallel_size": "actor.model.context_parallel_size",
    "expert_parallel": "",
    "use_data_before_expert_parallelism": "",
    "vocabulary_size": "",
    "hybrid_engine": "",
    "elasticity": "",
    "autotuning": "",
    "compression_training": "",
    "weight_quantization": "",
    "curriculum_learning": "",
    "data_efficiency": "",
    "disable_allgather": "",
    "zero_optimization.zero_quantized_weights": "",
    "zero_optimization.zero_quantized_nontrainable_weights": "",
    "zero_optimization.zero_quantized_gradients": "",
}

_OFFLOAD = "hybrid5d's trainer offloads nothing (the translation to DeepSpeed does)"
_CHECKPOINT = "checkpoints are written and read by hybrid5d, not by DeepSpeed"
_RECOMPUTE = "recomputation is hybrid5d's, not DeepSpeed's"
_TIMES = "DeepSpeed does not see every pass and collective of a hybrid5d run"
# Keys that act in a DeepSpeed program of one's own, not in `hybrid5d train`: path -> (why, what to do).
UNUSED: dict[str, tuple[str, str]] = {
    "activation_checkpointing": (_RECOMPUTE, "set actor.model.recompute_granularity"),
    "zero_optimization.offload_optimizer": (_OFFLOAD, "remove it"),
    "zero_optimization.offload_param": (_OFFLOAD, "remove it"),
    "zero_optimization.cpu_offload": (_OFFLOAD, "remove it"),
    "zero_optimization.cpu_offload_param": (_OFFLOAD, "remove it"),
    "zero_optimization.cpu_offload_use_pin_memory": (_OFFLOAD, "remove it"),
    "zero_optimization.zenflow": (_OFFLOAD, "remove it"),
    "aio": (_OFFLOAD, "remove it"),
    "checkpoint": (_CHECKPOINT, "remove it"),
    "datastates": (_CHECKPOINT, "set runner.async_save"),
    "zero_optimization.elastic_checkpoint": (_CHECKPOINT, "remove it"),
    "zero_optimization.pipeline_loading_checkpoint": (_CHECKPOINT, "remove it"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (_CHECKPOINT, "remove it"),
    "zero_optimization.zero_hpz_partition_size": ("weights are cut over all of dp x cp", "remove it"),
    "dataloader_drop_last": ("rows are dealt by hybrid5d's loader", "remove it"),
    "compile": ("hybrid5d compiles nothing", "remove it"),
    "pipeline.seed_layers": ("stages are hybrid5d's, their seed does not depend on the layout", "set actor.seed"),
    "flops_profiler": (_TIMES, "use hybrid5d plan for FLOPs and runner.trace_steps for times"),
    "comms_logger": (_TIMES, "use hybrid5d plan for bytes and runner.trace_steps for times"),
}

# Said, not refused: what is asked for happens, only not by DeepSpeed.
GATHER_ON_SAVE = frozenset(
    f"zero_optimization.{name}"
    for name in (
        "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    )
)  # fmt: skip

# "auto" of Hugging Face's Trainer: DeepSpeed's own default is meant, so the key is left out.
AUTO_MEANS_DEFAULT = frozenset(
    f"zero_optimization.{name}"
    for name in (
        "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size",
        "stage3_param_persistence_threshold", "param_persistence_threshold", "sub_group_size", "overlap_comm",
        "contiguous_gradients", "reduce_scatter", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
    )
)  # fmt: skip
