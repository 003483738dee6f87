"""Tensors as torch gives them, brought to contiguous memory of this host."""

from __future__ import annotations

import torch
from torch import Tensor


def ready(x: Tensor) -> bool:
    """Whether a tensor can be read and written as it is: what `Staged` would do to it is nothing."""
    fine = x.is_cpu and x.layout is torch.strided and x.is_contiguous() and not x.requires_grad
    return fine and not x.is_neg() and not x.is_conj()


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as its bytes."""
    if x.numel() == 0:
        return x.new_empty(0, dtype=torch.uint8)
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element may be contiguous with any stride


def plain(x: Tensor) -> Tensor:
    """The tensor without its history (what arrives in it is no step of autograd).

    Raises:
        ValueError: not dense memory of this host.
    """
    if x.device.type != "cpu" or x.layout != torch.strided:
        raise ValueError(f"the backend shm takes dense CPU tensors, got {x.layout} on {x.device}")
    return x.data


class Staged:
    """Contiguous copies of tensors that are not; `finish` writes those back that were to be changed."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []

    def read(self, x: Tensor) -> Tensor:
        x = plain(x)
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        return x.contiguous()

    def write(self, x: Tensor, keep: bool = True) -> Tensor:
        """`keep`: what it holds now is needed too."""
        x = plain(x)
        if ready(x):
            return x
        copy = x.resolve_conj().resolve_neg().contiguous() if keep else torch.empty(x.shape, dtype=x.dtype)
        if copy.data_ptr() == x.data_ptr():
            copy = copy.clone()
        self._back.append((x, copy))
        return copy

    def __bool__(self) -> bool:
        """Whether anything is to be written back."""
        return bool(self._back)

    def finish(self) -> None:
        for x, copy in self._back:
            x.copy_(copy)


def same(name: str, x: Tensor, like: Tensor) -> None:
    if x.numel() != like.numel() or x.dtype != like.dtype:
        text = f"{tuple(x.shape)} of {x.dtype} and {tuple(like.shape)} of {like.dtype}"
        raise ValueError(f"{name}: tensors differ in size or dtype: {text}")
