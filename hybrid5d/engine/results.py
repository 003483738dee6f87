"""What a call of the engine reports. Every rank gets the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What `eval_batch` says of a batch.

    Attributes:
        step: optimizer steps done.
        loss: mean over the global batch's valid tokens (0 where there are none).
        valid_tokens, tokens: tokens with a label; tokens of real rows. Counted once, whatever the layout.
        step_time_s: seconds, slowest rank.
        peak_memory_bytes: largest peak over ranks since the step before (device memory on CUDA; on CPU resident set
            of the process).
        rows_seen: sample ids of the global batch.
        padding: part of the computed token places, over all dp ranks, that hold no token of a real row.
        metrics: what the objective's rule reports: `means` over the global batch's valid tokens, `parts` of the loss
            averaged as the loss is.
    """

    step: int
    loss: float
    valid_tokens: int
    tokens: int
    step_time_s: float
    peak_memory_bytes: int
    rows_seen: tuple[int, ...]
    padding: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepResult(BatchResult):
    """What `train_batch` says: the same of the batch before the update, and the update.

    Attributes:
        grad_norm: global L2 norm before clipping.
        lr: learning rate this step used.
        skipped: loss or gradients were not finite: weights, moments and schedule did not change.
        skipped_steps: such steps so far.
        origin: of such a step that no smaller loss scale can mend: rank, rows and first tensor that was not finite.
        loss_scale: fp16: what the loss was multiplied by in this step.
        critic: the critic's own step, where RL trains one.
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    skipped_steps: int = 0
    origin: str | None = None
    loss_scale: float | None = None
    critic: StepResult | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Per-token results of one document, natural order.

    logprobs[i] is the log-probability of labels[i] after reading input_ids[i] (0 where there is no label), entropy[i]
    that of the whole next-token distribution. fp32 numpy [n] each.
    """

    logprobs: np.ndarray
    entropy: np.ndarray
