"""Weights of a reference model: this rank's shards on the CPU, in the model's place while it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Reference:
    """The weights that a module has now, kept for good; one copy of each shard, on the CPU."""

    def __init__(self, module: nn.Module):
        self._weights = [(p, _held(p).to("cpu", copy=True)) for p in module.parameters()]

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The module computes with these weights inside; its own wait on the CPU."""
        own = [(p, _held(p).to("cpu", copy=True)) for p, _ in self._weights]
        _fill(self._weights)
        try:
            yield
        finally:
            _fill(own)


def _held(param: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter: with ZeRO 3 its partition."""
    partition: Tensor | None = getattr(param, "ds_tensor", None)
    return param.detach() if partition is None else partition.detach()


def _fill(weights: list[tuple[nn.Parameter, Tensor]]) -> None:
    for param, value in weights:
        if hasattr(param, "ds_tensor") and param.data.numel():  # ZeRO 3 keeps small ones gathered
            param.partition()  # type: ignore[attr-defined]
        _held(param).copy_(value)
