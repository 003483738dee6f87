"""Rules on pipeline schedules and the layers of their stages."""

from __future__ import annotations

from hybrid5d.config.schema import ModelConfig
from hybrid5d.errors import ConfigError, reads
from hybrid5d.plan.deepspeed_config import asked_zero_stage
from hybrid5d.plan.draft import Draft

_M = "actor.model."
_SCHEDULE, _CHUNKS = f"{_M}pipeline_schedule", f"{_M}virtual_pipeline_model_parallel_size"
_ENDS = tuple(f"{_M}decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
_KEYS = (f"{_M}pipeline_model_parallel_size", _SCHEDULE, _CHUNKS, f"{_M}pipeline_warmup", *_ENDS)


@reads(*_KEYS, f"{_M}pipeline_partition", "actor.deepspeed", "actor.optim.use_distributed_optimizer")
def pipeline(draft: Draft) -> list[ConfigError]:
    """Keys of the pipeline against its schedule."""
    model, errors = draft.config.actor.model, []
    kind, chunks = draft.pipeline.kind, model.virtual_pipeline_model_parallel_size
    if kind == "interleaved" and chunks is None:
        rule = "pipeline_schedule interleaved needs the number of runs of layers a rank holds"
        errors.append(ConfigError(_CHUNKS, None, rule, "use 2 or more"))
    elif kind != "interleaved" and chunks not in (None, draft.pipeline.chunks):
        rule = f"pipeline_schedule {kind} has {draft.pipeline.chunks} run(s) of layers a rank"
        errors.append(ConfigError(_CHUNKS, chunks, rule, "set it to null, or pipeline_schedule: interleaved"))
    if model.pipeline_warmup == "wide" and kind != "1f1b":
        rule = f"only pipeline_schedule 1f1b has a wider warm-up, not {kind}"
        errors.append(ConfigError(f"{_M}pipeline_warmup", "wide", rule, "set it to plain"))
    for key, layers in zip(_ENDS, (model.decoder_first_pipeline_num_layers, model.decoder_last_pipeline_num_layers)):
        fixed = "pipeline_partition: cost" if model.pipeline_partition == "cost" else f"pipeline_schedule: {kind}"
        if layers is not None and (model.pipeline_partition == "cost" or draft.pipeline.chunks > 1):
            errors.append(ConfigError(key, layers, f"{fixed} decides where the layers go", "set it to null"))
    stage = asked_zero_stage(draft.config)
    if stage >= 2 and kind != "1f1b":
        rule = f"ZeRO {stage} runs micro-batches one by one, without a pipeline"
        errors.append(ConfigError(*asked_chunks(model), rule, "set it to null, or use ZeRO stage 1"))
    return errors


def asked_chunks(model: ModelConfig) -> tuple[str, object]:
    """Key and value that ask for a schedule other than 1f1b."""
    if model.pipeline_schedule is None:
        return _CHUNKS, model.virtual_pipeline_model_parallel_size
    return _SCHEDULE, model.pipeline_schedule


@reads("model", *_KEYS, f"{_M}pipeline_partition")
def stages(draft: Draft) -> list[ConfigError]:
    """Every stage has work."""
    pp = draft.pipeline.stages
    if pp > 1 and draft.reading.numbers.num_layers is None:
        legal = f"legal from {max(pp - 2, 1)} decoder layers on (uneven too)"
        draft.unchecked.append(f"num_layers with pipeline_model_parallel_size={pp}: {legal}")
    if pp > 1 and draft.config.actor.model.pipeline_partition == "cost" and draft.spec is None:
        draft.unchecked.append("pipeline_partition=cost without config.json: layers are counted as in uniform")
    return draft.stage_errors
