"""Products put off and added in place equal autograd, whatever reads a weight and how often.

Letters and numbers are cases of a list of failures seen elsewhere; each test says what goes wrong there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybrid5d.parallel.context import Axis
from hybrid5d.tensor_parallel import Place, WeightGradients
from hybrid5d.tensor_parallel.layers import column_linear, row_linear

ONE = Axis.single()


def _place(param: Tensor) -> Place:
    param.additions = getattr(param, "additions", 0) + 1
    fresh = param.grad is None
    if param.grad is None:
        param.grad = torch.full_like(param, torch.nan)  # what is fresh is written, not added to
    return Place(param.grad, fresh)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    (y,) = column_linear(x, [(w, b)], ONE, False)
    return y


def split(loss: Callable[[], Tensor], *weights: Tensor) -> tuple[WeightGradients, list]:
    """B of a loss whose products of these weights are put off; what `run` will add."""
    gradients = WeightGradients(_place)
    gradients.attach(weights)
    with gradients.put_off() as waiting:
        loss().backward()
    return gradients, waiting


def test_a_weight_used_twice_on_one_path() -> None:
    """P01: the inner use counted twice where W walks from the outer one through it. Worked by hand: y = sum(x w w)."""
    x, w = torch.tensor([[1.1, -0.7]]), torch.tensor([[0.4, -0.2], [0.7, 0.3]], requires_grad=True)
    # y_k = (x w)_j w_jk; column_linear multiplies by the transpose
    gradients, waiting = split(lambda: row_linear(linear(x, w), w, None, ONE, False).sum(), w)
    assert len(waiting) == 2 and w.grad is None
    gradients.run(waiting)
    ones, v = torch.ones(1, 2), w.detach()
    torch.testing.assert_close(w.grad, ones.t() @ (x @ v.t()) + (ones @ v).t() @ x)
    assert w.additions == 2 and not waiting
    wt = w.detach().t().contiguous().requires_grad_()  # the case as it is written: x w w
    gradients, waiting = split(lambda: linear(linear(x, wt), wt).sum(), wt)
    gradients.run(waiting)
    torch.testing.assert_close(wt.grad.t(), torch.tensor([[0.17, 1.05], [-0.57, -1.13]]))


def test_several_outputs_of_one_product() -> None:
    """P02: the gradients of gate and up (or q, k, v) added up and sent to the first of them."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 5), torch.randn(8, 5, requires_grad=True)

    def loss(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return (F.silu(gate) * up).sum()

    gradients, waiting = split(lambda: loss(linear(x, w)), w)
    gradients.run(waiting)
    want = w.detach().clone().requires_grad_()
    loss(F.linear(x, want)).backward()
    torch.testing.assert_close(w.grad, want.grad)


def test_what_is_no_product_comes_in_b_and_once() -> None:
    """P03, P05: norms and biases have no W; an input that needs no gradient (stage 0) still leaves the products."""
    torch.manual_seed(0)
    x, scale = torch.randn(2, 3, 5), torch.rand(5, requires_grad=True)
    w, b = torch.randn(4, 5, requires_grad=True), torch.randn(4, requires_grad=True)
    gradients, waiting = split(lambda: linear(x, w, b).square().sum() + (x * scale).sum(), w)
    assert w.grad is None and b.grad is not None and scale.grad is not None
    before = b.grad.clone(), scale.grad.clone()
    gradients.run(waiting)
    assert torch.equal(b.grad, before[0]) and torch.equal(scale.grad, before[1])
    want, bias = w.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    F.linear(x, want, bias).square().sum().backward()
    torch.testing.assert_close((w.grad, b.grad), (want.grad, bias.grad))


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_micro_batch_counts(count: int) -> None:
    """P04: a flag that is cleared once a step leaves the first micro-batch's W alone, an overwriting W the last."""
    torch.manual_seed(0)
    w, xs = torch.randn(4, 5, requires_grad=True), [10.0**i * torch.randn(1, 3, 5) for i in range(count)]
    gradients = WeightGradients(_place)
    gradients.attach([w])
    kept = []
    for x in xs:
        with gradients.put_off() as waiting:
            linear(x, w).sum().backward()
        kept.append(waiting)
    for waiting in kept[::-1]:  # in any order
        gradients.run(waiting)
    want = w.detach().clone().requires_grad_()
    sum(F.linear(x, want).sum() for x in xs).backward()
    torch.testing.assert_close(w.grad, want.grad, rtol=1e-5, atol=1e-5)
    assert w.additions == count


def test_recomputation_runs_once_for_both_halves() -> None:
    """P06: W throws in a second recomputation; here B's is the last forward, and W uses what it made."""
    torch.manual_seed(0)
    calls, w = [], torch.randn(5, 5, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        return linear(torch.tanh(linear(x, w)), w)

    x = torch.randn(1, 3, 5, requires_grad=True)
    gradients, waiting = split(lambda: checkpoint(layer, x, use_reentrant=False).square().sum(), w)
    assert len(calls) == 2 and len(waiting) == 2
    gradients.run(waiting)
    assert len(calls) == 2
    want = w.detach().clone().requires_grad_()
    F.linear(torch.tanh(F.linear(x, want)), want).square().sum().backward()
    torch.testing.assert_close(w.grad, want.grad)


def test_entries_are_freed_one_by_one() -> None:
    """P08: what is kept between B and W goes with each product, not at the end of the step."""
    w = torch.zeros(2, 2, requires_grad=True)
    gradients = WeightGradients(lambda p: (lengths.append(len(waiting)), _place(p))[1])
    gradients.attach([w])
    lengths: list[int] = []
    with gradients.put_off() as waiting:
        for _ in range(3):
            linear(torch.ones(1, 1, 2), w).sum().backward()
    gradients.run(waiting)
    assert lengths == [2, 1, 0]
