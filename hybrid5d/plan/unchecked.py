"""Rules that could not be checked because the model's numbers are unknown, with the values that would be legal."""

from __future__ import annotations

from hybrid5d.config.schema import RunConfig
from hybrid5d.plan.model import ModelNumbers


def unchecked_rules(config: RunConfig, numbers: ModelNumbers) -> list[str]:
    """One line per rule; empty where the numbers are known."""
    model = config.actor.model
    tp, pp, cp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size
    lines: list[str] = []
    if numbers.num_layers is None and pp > 1:
        lines.append(
            f"num_layers with pipeline_model_parallel_size={pp}: legal from "
            f"{max(pp - 2, 1)} decoder layers on (uneven too)"
        )
    if numbers.num_attention_heads is None and tp > 1:
        lines.append(
            f"num_attention_heads with tensor_model_parallel_size={tp}: legal "
            f"are multiples of {tp} ({tp}, {2 * tp}, {3 * tp}, ...)"
        )
    if numbers.num_key_value_heads is None and tp > 1:
        small = [d for d in range(1, tp) if tp % d == 0]
        less = ", ".join(str(d) for d in small)
        lines.append(
            f"num_key_value_heads with tensor_model_parallel_size={tp}: legal "
            f"are multiples of {tp}, and {less} (replicated)"
        )
    if numbers.vocab_size is None and tp > 1:
        lines.append(
            f"vocabulary with tensor_model_parallel_size={tp}: any size is legal, it is padded to a multiple of {tp}"
        )
    if numbers.num_attention_heads is None and cp > 1 and model.cp_comm_type == "a2a":
        lines.append(
            f"heads with cp_comm_type a2a, context_parallel_size={cp}: query "
            f"heads per tp rank must divide by {cp}, kv heads per tp "
            f"rank must be a multiple or a divisor of {cp}"
        )
    if lines:
        where = model.model_path or "no model_path"
        lines[0] = f"{lines[0]}. The model folder ({where}) is not here; give --model DIR to check"
    return lines
