"""Two training runs side by side: losses, norms, first gradients and last weights; what is off, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass
class Trace:
    """What a run did: per step loss and norm; first gradients and last weights by HF name.

    `copies`: tensors that ranks hold several copies of, and by how much these differ where they do.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    copies: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounds:
    """How far a run may be from one process: losses and weights absolutely, norms and each gradient relatively.

    `floor`: a gradient whose norm is a smaller share of the whole gradient's is compared with that share.
    """

    loss: float
    norm: float
    grad: float
    weight: float
    why: str
    floor: float = 0.0


# bf16: the largest seen among 87 pairs and triples of tests/layouts.py were loss 3.2e-3, norm 7.1e-3, weight 3.9e-3 and
# gradient 3.6e-2. The floor is for key biases: softmax ignores what is added to all scores, so that without RoPE their
# gradient is zero; with it, it is what is left of larger terms, 4e-4 to 8e-4 of the norm, off by 8e-2 of itself.
BOUNDS = {
    "fp32": Bounds(1e-5, 1e-5, 1e-5, 1e-5, "fp32: only the order of sums differs"),
    "bf16": Bounds(
        5e-3, 1e-2, 5e-2, 6e-3, "bf16: weights, activations and gradients have 8 significant bits, one process has 24",
        floor=2e-3,
    ),
}
_TINY_NORM = 1e-7


def relative(a: np.ndarray, b: np.ndarray, least: float = 0.0) -> float:
    """||a - b|| / max(||b||, least), or ||a|| where that is zero."""
    scale = max(float(np.linalg.norm(b)), least)
    return float(np.linalg.norm(a - b)) / (scale if scale > 0 else 1.0)


@dataclass(frozen=True)
class Comparison:
    """How far `got` is from `want`.

    Attributes:
        gradients, weights: error of each tensor by name, in the units of `Bounds`.
        factor: what every gradient is a multiple of, where they are off by nothing else.
    """

    got: Trace
    want: Trace
    bounds: Bounds
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    factor: float | None = None

    @property
    def loss_errors(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.got.losses, self.want.losses)]

    @property
    def norm_errors(self) -> list[float]:
        return [abs(a - b) / max(abs(b), _TINY_NORM) for a, b in zip(self.got.norms, self.want.norms)]

    @property
    def faults(self) -> list[str]:
        """What is outside its bound, the worst of each kind first; empty where the runs are equal."""
        b, result = self.bounds, list[str]()
        result += _series("loss", self.loss_errors, self.got.losses, self.want.losses, b.loss)
        result += _series("grad norm", self.norm_errors, self.got.norms, self.want.norms, b.norm)
        if self.got.copies:
            result.append(f"copies of one tensor differ between ranks: {_named(self.got.copies)}")
        if self.factor is not None:
            result.append(f"every first gradient is {self.factor:.4g} times what it should be")
        if wrong := outside(self.gradients, b.grad):
            result.append(f"first gradients off (bound {b.grad:g}): {_named(wrong)}")
        if far := outside(self.weights, b.weight):
            result.append(f"weights off (bound {b.weight:g}): {_named(far)}")
        return result

    @property
    def tensor(self) -> str | None:
        """The tensor to look at first: the worst of those with copies that differ, else the worst gradient."""
        wrong = (
            self.got.copies or outside(self.gradients, self.bounds.grad) or outside(self.weights, self.bounds.weight)
        )
        return max(wrong, key=lambda n: wrong[n]) if wrong else None


def compare(got: Trace, want: Trace, precision: str = "fp32", **changed: float) -> Comparison:
    """Loss of each step, norm, every first gradient and every last weight.

    Args:
        precision: whose bounds hold; `changed` replaces single ones.

    Raises:
        ValueError: the runs have other steps or tensors.
    """
    b: Bounds = replace(BOUNDS[precision], **changed)  # type: ignore[arg-type]
    if len(got.losses) != len(want.losses) or got.weights.keys() != want.weights.keys():
        raise ValueError("the runs have different steps or tensors")
    if missing := want.grads.keys() - got.grads.keys():
        raise ValueError(f"no gradient of {', '.join(sorted(missing))}")
    least = b.floor * math.sqrt(sum(float(np.linalg.norm(g)) ** 2 for g in want.grads.values()))
    gradients = {n: relative(got.grads[n], g, least) for n, g in want.grads.items()}
    weights = {n: float(np.abs(got.weights[n] - w).max()) for n, w in want.weights.items()}
    return Comparison(got, want, b, gradients, weights, _common_factor(got.grads, want.grads, b.grad))


def outside(errors: Mapping[str, float], bound: float) -> dict[str, float]:
    """Errors above the bound, NaN too, the largest first."""
    return {n: e for n, e in sorted(errors.items(), key=lambda item: -item[1]) if not e <= bound}


def _series(what: str, errors: list[float], got: list[float], want: list[float], bound: float) -> list[str]:
    wrong = [i for i, e in enumerate(errors) if not e <= bound]
    if not wrong:
        return []
    i = wrong[0]
    return [f"{what} of step {i + 1}: {got[i]:.8g}, one process {want[i]:.8g} (off {errors[i]:.2e}, bound {bound:g})"]


def _common_factor(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], bound: float) -> float | None:
    a = np.concatenate([got[n].ravel() for n in want]) if want else np.zeros(0)
    b = np.concatenate([want[n].ravel() for n in want]) if want else np.zeros(0)
    square = float(b @ b)
    factor = float(a @ b) / square if square else 1.0
    off = abs(factor - 1) > 10 * bound and relative(a, factor * b) <= bound * abs(factor)  # False for NaN
    return factor if off else None


def _named(errors: Mapping[str, float], shown: int = 4) -> str:
    names = sorted(errors, key=lambda n: -errors[n])
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"{n} {errors[n]:.2e}" for n in names[:shown]) + more
