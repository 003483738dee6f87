"""What the comparison of two runs calls equal, and what it names where they differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid5d.check.compare import BOUNDS, Trace, compare

BIG = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)  # norm 5
SMALL = np.array([1e-3, 0.0], np.float32)  # 2e-4 of the whole norm


def trace(scale: float = 1.0, big: float = 0.0, small: float = 0.0, weight: float = 0.0) -> Trace:
    """A run whose gradients are off by `big` and `small` in one element."""
    grads = {"w.weight": BIG * scale, "k.bias": SMALL * scale}
    grads["w.weight"][0, 1] += big
    grads["k.bias"][1] += small
    return Trace([2.0, 1.5], [5.0, 4.0], grads, {"w.weight": BIG + weight, "k.bias": SMALL})


def test_equal_runs_have_no_faults() -> None:
    found = compare(trace(), trace(), "fp32")
    assert found.faults == [] and found.tensor is None
    assert found.loss_errors == [0, 0] and set(found.gradients.values()) == {0}


@pytest.mark.parametrize("precision", list(BOUNDS))
def test_an_error_is_measured_against_the_tensors_own_norm(precision: str) -> None:
    bound = BOUNDS[precision].grad
    assert compare(trace(big=5 * bound * 0.98), trace(), precision).faults == []
    found = compare(trace(big=5 * bound * 1.02), trace(), precision)
    assert found.tensor == "w.weight" and len(found.faults) == 1 and "w.weight" in found.faults[0]


def test_a_small_gradient_is_measured_against_a_share_of_the_whole_norm_in_bf16_only() -> None:
    allowed = BOUNDS["bf16"].grad * BOUNDS["bf16"].floor * 5
    assert compare(trace(small=allowed * 0.98), trace(), "bf16").faults == []
    assert compare(trace(small=allowed * 1.02), trace(), "bf16").tensor == "k.bias"
    assert compare(trace(small=1e-3 * 1.02e-5), trace(), "fp32").tensor == "k.bias"
    assert compare(trace(small=1e-3 * 0.98e-5), trace(), "fp32").faults == []


def test_what_is_not_a_number_is_a_fault_everywhere() -> None:
    for got in (
        trace(big=float("nan")),
        trace(weight=float("nan")),
        replace(trace(), losses=[2.0, float("nan")]),
        replace(trace(), norms=[float("nan"), 4.0]),
    ):
        assert len(compare(got, trace(), "bf16").faults) == 1


def test_a_common_factor_and_copies_that_differ_are_named() -> None:
    assert "2 times" in compare(trace(scale=2.0), trace(), "fp32").faults[0]
    found = compare(replace(trace(), copies={"k.bias": 1e-3}), trace(), "fp32")
    assert found.tensor == "k.bias" and "copies" in found.faults[0]


def test_runs_of_other_steps_or_tensors_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="different steps"):
        compare(replace(trace(), losses=[2.0]), trace())
    with pytest.raises(ValueError, match=r"no gradient of k\.bias"):
        compare(replace(trace(), grads={"w.weight": BIG}), trace())
