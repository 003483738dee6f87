"""What a checkpoint is made of and restored into; the engine hands it over, so nothing here knows the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.run import RunPlan


class OptimizerAccess(Protocol):
    """An optimizer's state by parameter; `engine.deepspeed.optimizer_state` documents the one there is.

    `kind` is `weight` (the fp32 master) or the name of a moment.
    """

    @property
    def name(self) -> str: ...
    def shape(self, param: nn.Parameter) -> torch.Size: ...
    def moments(self) -> tuple[str, ...]: ...
    def holds(self, param: nn.Parameter, kind: str) -> bool: ...
    def gather(self, param: nn.Parameter, kind: str, owner: int) -> Tensor | None: ...
    def step(self) -> int: ...
    def loss_scaler(self) -> dict[str, Any]: ...
    def reset(self, moments: tuple[str, ...], step: int) -> None: ...
    def set(self, param: nn.Parameter, kind: str, full: Tensor) -> None: ...
    def set_loss_scaler(self, numbers: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainState:
    """A model in training at one step, on this rank.

    Attributes:
        module: this rank's layers; parameters say by HF name what they hold.
        optimizer: its masters and moments.
        ctx: this rank's axes.
        plan: of the run: precision, ZeRO stage, model folder.
        step: steps done.
        skipped: those of them that changed nothing (fp16).
        follows: id of the checkpoint that was saved or loaded last; "" for none.
    """

    module: nn.Module
    optimizer: OptimizerAccess
    ctx: ParallelContext
    plan: RunPlan
    step: int
    skipped: int = 0
    follows: str = ""

    def layout(self) -> dict[str, Any]:
        """What a manifest says of the run that wrote it."""
        degrees = {a: getattr(self.ctx.layout, a) for a in ("pp", "dp", "cp", "tp")}
        return {
            **degrees,
            "sequence_parallel": self.ctx.sequence_parallel,
            "zero_stage": self.plan.zero_stage,
            "optimizer": self.optimizer.name,
        }
