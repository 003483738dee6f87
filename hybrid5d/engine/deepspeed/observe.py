"""Whole gradients and weights of an engine, as its optimizer is about to use them: for checks and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn


def full_gradient(param: nn.Parameter) -> Tensor | None:
    """The reduced gradient, whole over dp x cp; None for a frozen parameter. Collective over dp x cp."""
    return safe_get_full_grad(param) if param.requires_grad else None


def full_weight(param: nn.Parameter, precision: str, zero_stage: int) -> Tensor:
    """The fp32 master, whole over dp x cp; the parameter itself where there is none. Collective over dp x cp."""
    if (precision == "fp32" and zero_stage < 3) or not param.requires_grad:
        return param
    full = safe_get_full_fp32_param(param)
    return param if full is None else full


def before_first_update(ds: Any, look: Callable[[], None]) -> None:
    """Call `look` once, when the gradients of the first optimizer step are reduced and not yet clipped."""
    take_step = ds._take_model_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        ds._take_model_step = take_step
        look()
        return take_step(*args, **kwargs)

    ds._take_model_step = spy
