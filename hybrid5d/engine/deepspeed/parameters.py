"""Parameter groups that are the same on every rank, and frozen parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.parallel.agree import gather_objects, world_axis
from hybrid5d.parallel.shard import pieces_of, shard_of
from hybrid5d.plan.tensors import freeze_errors


def decays(param: nn.Parameter) -> bool:
    """Megatron's rule: no weight decay on biases and other one-dimensional parameters (norms)."""
    return param.dim() > 1


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, `decay` and `no_decay`, in this order on every rank.

    Stages whose groups differ would hang (deepspeed.md: Parameter groups). A stage without a trainable parameter
    of a kind (an embedding alone, all frozen) therefore gets a placeholder of one element: it takes no part in the
    forward pass, has no gradient and is not saved.
    """
    groups: list[dict[str, Any]] = []
    for name, wanted in (("decay", True), ("no_decay", False)):
        params = [p for p in module.parameters() if p.requires_grad and decays(p) is wanted]
        if not params:
            shape = (1, 1) if wanted else (1,)
            placeholder = nn.Parameter(torch.zeros(shape, device=_device_of(module)))
            placeholder.ds_pipe_replicated = True  # type: ignore[attr-defined]  # DeepSpeed: not in the norm
            module.register_parameter(f"placeholder_{name}", placeholder)
            params = [placeholder]
        group: dict[str, Any] = {"params": params, "name": name}
        if not wanted:
            group["weight_decay"] = 0.0
        groups.append(group)
    return groups


def tag_for_deepspeed(module: nn.Module) -> None:
    """Say in DeepSpeed's terms what each parameter's shard says, for its gradient norm (0.19.8, runtime/utils.py).

    It counts parameters with `tensor_model_parallel` on every tp rank, others on tp rank 0 only, and none with
    `ds_pipe_replicated`: all copies of kv heads but the first (deepspeed.md: What the norm counts).
    """
    for param in module.parameters():
        shard = shard_of(param)
        if shard is not None and shard.is_cut:
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            if shard.replica:
                param.ds_pipe_replicated = True  # type: ignore[attr-defined]


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Names that one of the shell-style patterns matches."""
    return {n for n in names if any(fnmatchcase(n, p) for p in patterns)}


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Switch gradients off for every parameter whose HF name a pattern matches. Collective over the world.

    Raises:
        ConfigErrors: a pattern matches no parameter of any rank, or all are frozen; a pattern matches part of a fused
            parameter only (q but not k and v, gate but not up).
    """
    if not patterns:
        return
    local = {p.name for param in module.parameters() for p in pieces_of(param)}
    errors = freeze_errors(patterns, sorted(set().union(*gather_objects(local, world_axis()))))
    for param in module.parameters():
        names = [p.name for p in pieces_of(param)]
        hit = matching(names, patterns)
        if hit and len(hit) == len(set(names)):
            param.requires_grad_(False)
        elif hit:
            rule = f"matches {sorted(hit)} but these share one matrix with {sorted(set(names) - hit)}"
            errors.append(ConfigError("actor.freeze_parameters", list(patterns), rule, "match all of them or none"))
    if errors:
        raise ConfigErrors(errors)
