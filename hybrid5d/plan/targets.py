"""Where each schema key goes: a key of the ds_config, or a part of our engine. Data for the report."""

from __future__ import annotations

# schema key -> path in the ds_config
DEEPSPEED_TARGETS: dict[str, str] = {
    "actor.global_batch_size": "train_batch_size",
    "actor.micro_batch_size": "train_micro_batch_size_per_gpu",
    "data.rollout_batch_size": "train_batch_size",
    "algorithm.group_size": "train_batch_size",
    "algorithm.n_minibatches": "train_batch_size",
    "algorithm.training_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "actor.optim.optimizer": "optimizer.type",
    "actor.optim.lr": "optimizer.params.lr",
    "actor.optim.adam_beta1": "optimizer.params.betas[0]",
    "actor.optim.adam_beta2": "optimizer.params.betas[1]",
    "actor.optim.adam_eps": "optimizer.params.eps",
    "actor.optim.sgd_momentum": "optimizer.params.momentum",
    "actor.optim.weight_decay": "optimizer.params.weight_decay",
    "actor.optim.clip_grad": "gradient_clipping",
    "actor.optim.use_distributed_optimizer": "zero_optimization.stage",
    "actor.optim.optimizer_cpu_offload": "zero_optimization.offload_optimizer.device",
    "actor.optim.optimizer_offload_fraction": "zero_optimization.offload_optimizer.ratio",
    "actor.optim.overlap_grad_reduce": "zero_optimization.overlap_comm",
    "actor.optim.loss_scale": "fp16.loss_scale",
    "actor.optim.initial_loss_scale": "fp16.initial_scale_power",
    "actor.optim.loss_scale_window": "fp16.loss_scale_window",
    "actor.optim.hysteresis": "fp16.hysteresis",
    "actor.optim.min_loss_scale": "fp16.min_loss_scale",
    "actor.megatron.ddp_bucket_size": "zero_optimization.reduce_bucket_size",
    "actor.lr_sched.start_weight_decay": "optimizer.params.weight_decay",
}

# schema key, or a prefix ending in a dot -> part of our engine (longest match wins)
ENGINE_TARGETS: dict[str, str] = {
    "cluster.": "layout.world_size",
    "runner.": "trainer",
    "runner.seq_length": "data: row length",
    "runner.task_type": "batch arithmetic",
    "runner.enable_dynamic_batch_size": "batch.dynamic",
    "runner.max_tokens_per_mbs": "batch.max_tokens_per_micro_batch",
    "runner.save_interval": "trainer: save_checkpoint",
    "runner.val_check_interval": "trainer: evaluation",
    "runner.resume_dir": "trainer: load_checkpoint",
    "runner.output_dir": "run directory",
    "runner.experiment_name": "run directory",
    "runner.logger.": "trackers",
    "data.": "data",
    "algorithm.": "batch arithmetic",
    "actor.": "engine",
    "actor.training_backend": "translation",
    "actor.seed": "seeds of weights and dropout",
    "actor.loss_normalization": "loss",
    "actor.enable_dp_load_balance": "data: rows over dp ranks",
    "actor.tokenizer.": "data: tokenizer",
    "actor.deepspeed": "merged into the ds_config",
    "actor.model.": "model",
    "actor.model.precision": "precision",
    "actor.model.tensor_model_parallel_size": "layout.tp",
    "actor.model.pipeline_model_parallel_size": "layout.pp",
    "actor.model.context_parallel_size": "layout.cp",
    "actor.model.cp_comm_type": "context parallelism",
    "actor.model.cp_load_balance": "context parallelism",
    "actor.model.hierarchical_context_parallel_sizes": "context parallelism",
    "actor.model.sequence_parallel": "layout.sequence_parallel",
    "actor.model.recompute_granularity": "recompute",
    "actor.model.recompute_method": "recompute",
    "actor.model.recompute_num_layers": "recompute",
    "actor.model.decoder_first_pipeline_num_layers": "stages",
    "actor.model.decoder_last_pipeline_num_layers": "stages",
    "actor.lr_sched.": "schedule",
    "actor.optim.": "optimizer",
    "actor.optim.fp16": "precision (checked)",
    "actor.optim.bf16": "precision (checked)",
    "actor.megatron.use_hf_ckpt": "start weights",
    "actor.megatron.distributed_timeout_minutes": "process groups",
}


def engine_target(path: str) -> str:
    """Engine part of a schema key."""
    exact = ENGINE_TARGETS.get(path)
    if exact is not None:
        return exact
    prefixes = [k for k in ENGINE_TARGETS if path.startswith(k)]
    return ENGINE_TARGETS[max(prefixes, key=len)] if prefixes else "engine"
