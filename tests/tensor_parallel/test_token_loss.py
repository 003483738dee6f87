"""The fused head for any rule of log-probability and entropy: numbers, gradients through shards, memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid5d.parallel.context import Axis
from hybrid5d.tensor_parallel import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    HeadOptions,
    TokenRule,
    TokenTerms,
    VocabShard,
    linear_logprobs,
    linear_token_loss,
    split_seq,
)
from hybrid5d.tensor_parallel import loss as loss_module
from tests.harness import run_ranks

NEAR = {"rtol": 1e-5, "atol": 1e-6}


def _axis(world: int) -> Axis:
    return Axis.of(None) if world > 1 else Axis.single()


def _shard_of(weight: Tensor, shard: VocabShard) -> Tensor:
    """This rank's rows of a matrix; padding rows are poisoned."""
    local = torch.full((shard.size, weight.shape[1]), float("nan"), dtype=weight.dtype)
    local[: shard.real] = weight[shard.start : shard.start + shard.real]
    return local


def _given(rank: int, world: int, logits: list[float], token: int, temperature: float) -> dict[str, Any]:
    """Head that is the identity, so that hidden states are the logits: values, and gradients of both results."""
    shard = VocabShard.of(len(logits), _axis(world))
    weight = _shard_of(torch.eye(len(logits)), shard)
    options = HeadOptions(temperature=temperature)
    found: dict[str, Any] = {}
    for name, slopes in (("logp", (1.0, 0.0)), ("entropy", (0.0, 1.0))):
        hidden = torch.tensor([logits], requires_grad=True)

        def rule(logp: Tensor, entropy: Tensor | None, columns: Any, slopes: Any = slopes) -> Any:
            a, b = (torch.full_like(logp, s) for s in slopes)
            return TokenTerms(a * logp + b * entropy, a, b)

        result = linear_token_loss(
            hidden, weight, torch.tensor([token]), shard, TokenRule(rule, entropy=True), None, options
        )
        result.loss.backward()
        assert hidden.grad is not None
        found[name] = (result.loss.item(), hidden.grad[0].tolist())
    logp, entropy = linear_logprobs(torch.tensor([logits]), weight, torch.tensor([token]), shard, options)
    assert (found["logp"][0], found["entropy"][0]) == pytest.approx((logp.item(), entropy.item()), abs=1e-6)
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_worked_numbers_through_a_cut_vocabulary(world: int) -> None:
    """R08: logits by hand; three ranks leave the last one with padding alone."""
    for got in run_ranks(world, _given, world, [2.0, 0.0, -1.0, 1.0], 3, 1.0):
        assert got["entropy"][0] == pytest.approx(0.947537, abs=2e-6)
        assert got["entropy"][1] == pytest.approx([-0.326688, 0.130076, 0.079911, 0.116701], abs=2e-6)
        assert got["logp"][1] == pytest.approx([-0.643914, -0.087144, -0.032059, 0.763117], abs=2e-6)


@pytest.mark.parametrize(
    "temperature,logp,entropy", [(1.0, -1.440190, 0.947537), (0.5, -2.145078, 0.455429), (0.7, -1.699245, 0.702028)]
)
def test_one_temperature_for_logprob_and_entropy(temperature: float, logp: float, entropy: float) -> None:
    """R07: at 1, 0.5 and 0.7."""
    for got in run_ranks(2, _given, 2, [2.0, 1.0, 0.0, -1.0], 1, temperature):
        assert got["logp"][0] == pytest.approx(logp, abs=2e-6)
        assert got["entropy"][0] == pytest.approx(entropy, abs=2e-6)


def test_a_shard_of_padding_alone() -> None:
    """Vocabulary 5 on 4 ranks: the last one holds two columns, none of them real."""
    assert [VocabShard.of(5, Axis(None, 4, r, (0, 1, 2, 3))).real for r in range(4)] == [2, 2, 1, 0]
    for got in run_ranks(4, _given, 4, [2.0, 0.0, -1.0, 1.0, -3.0], 3, 1.0):
        z = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0], requires_grad=True)
        torch.log_softmax(z, 0)[3].backward()
        assert z.grad is not None and got["logp"][1] == pytest.approx(z.grad.tolist(), abs=1e-6)


B, S, H, VOCAB, TEMPERATURE = 2, 8, 12, 101, 0.7


def _inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    targets = torch.randint(0, VOCAB, (B, S), generator=g)
    targets[0, ::3], targets[1, 0] = IGNORE_INDEX, VOCAB - 1
    tensors = {
        "hidden": torch.randn(B, S, H, generator=g), "weight": torch.randn(VOCAB, H, generator=g),
        "advantages": torch.randn(B, S, generator=g), "old": -3 + torch.rand(B, S, generator=g),
    }  # fmt: skip
    tensors["old"][0, 0] = float("nan")  # no target there: must not matter
    return {**tensors, "targets": targets}


def _policy(logp: Tensor, entropy: Tensor, columns: Any) -> Tensor:
    """A ratio against old log-probabilities, and an entropy bonus; plain torch, for both sides."""
    return -columns["advantages"] * torch.exp(logp - columns["old"]) - 0.1 * entropy * columns["advantages"].abs()


def _policy_rule(logp: Tensor, entropy: Tensor | None, columns: Any) -> Any:
    assert entropy is not None
    gain = -columns["advantages"] * torch.exp(logp - columns["old"])
    return TokenTerms(_policy(logp, entropy, columns), gain, -0.1 * columns["advantages"].abs())


def _rule_rank(rank: int, world: int, sp: bool, chunk: int) -> dict[str, Any]:
    axis, x = _axis(world), _inputs()
    shard = VocabShard.of(VOCAB, axis)
    weight = _shard_of(x["weight"], shard).requires_grad_(True)
    hidden = (split_seq(x["hidden"], axis) if sp else x["hidden"]).clone().requires_grad_(True)
    columns = {k: x[k] for k in ("advantages", "old")}
    rule, options = TokenRule(_policy_rule, entropy=True), HeadOptions(sp, TEMPERATURE, chunk)
    result = linear_token_loss(hidden, weight, x["targets"], shard, rule, columns, options)
    (result.loss * 0.5).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not weight.grad[shard.real :].any()
    run = slice(rank * S // world, (rank + 1) * S // world) if sp else slice(None)
    return {
        "loss": result.loss.detach(), "dh": hidden.grad, "tokens": run, "dw": weight.grad[: shard.real],
        "rows": slice(shard.start, shard.start + shard.real), "logp": result.logprobs, "entropy": result.entropy,
    }  # fmt: skip


@pytest.mark.parametrize("world,sp,chunk", [(1, False, 1024), (2, False, 5), (2, True, 1024), (4, True, 3)])
def test_any_rule_equals_autograd_through_whole_logits(world: int, sp: bool, chunk: int) -> None:
    x = _inputs()
    hidden, weight = (x[k].double().requires_grad_(True) for k in ("hidden", "weight"))
    log = torch.log_softmax(hidden.matmul(weight.t()) / TEMPERATURE, -1)
    valid = x["targets"] != IGNORE_INDEX
    logp = log.gather(-1, x["targets"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log.exp() * log).sum(-1)
    columns = {k: x[k].double()[valid] for k in ("advantages", "old")}
    loss = _policy(logp[valid], entropy[valid], columns).sum()
    (loss * 0.5).backward()
    assert hidden.grad is not None and weight.grad is not None
    for got in run_ranks(world, _rule_rank, world, sp, chunk):
        near = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got["loss"].double(), loss.detach(), **near)
        torch.testing.assert_close(got["dh"].double(), hidden.grad[:, got["tokens"]], **near)
        torch.testing.assert_close(got["dw"].double(), weight.grad[got["rows"]], **near)
        torch.testing.assert_close(got["logp"].double(), (logp * valid).detach(), **near)
        torch.testing.assert_close(got["entropy"].double(), entropy.detach(), **near)


def test_loss_weights_are_a_column_of_cross_entropy() -> None:
    x = _inputs()
    hidden, weight = x["hidden"].requires_grad_(True), x["weight"]
    shard, factor = VocabShard.of(VOCAB, Axis.single()), x["advantages"].abs()
    loss = linear_token_loss(hidden, weight, x["targets"], shard, columns={"loss_weight": factor}).loss
    each = F.cross_entropy(hidden.matmul(weight.t()).transpose(1, 2), x["targets"], reduction="none")
    want = (each * factor).sum()
    torch.testing.assert_close(loss, want, **NEAR)
    torch.testing.assert_close(*(torch.autograd.grad(y, hidden)[0] for y in (loss, want)), rtol=1e-4, atol=1e-5)


def test_hidden_states_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden states of \(4,\) tokens but targets \(5,\)"):
        shard = VocabShard.of(7, Axis.single())
        linear_token_loss(torch.zeros(4, 3), torch.zeros(7, 3), torch.zeros(5, dtype=torch.int64), shard)


# --- 16 bits ---------------------------------------------------------------------------------------------------------


class CudaScalars(TorchDispatchMode):
    """Products with a scalar tensor as CUDA makes them: it rounds the scalar to the other tensor's type first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.mul_.Tensor):
            x, y = args
            if isinstance(y, Tensor) and y.dim() == 0 and x.dim() > 0:
                args = (x, y.to(x.dtype))
        return func(*args, **(kwargs or {}))


def test_a_scalar_tensor_is_rounded_as_on_cuda() -> None:
    x, factor = torch.ones(3, dtype=torch.float16), torch.tensor(2.0**20)
    with CudaScalars():
        assert torch.isinf(x * factor).all() and torch.isfinite(x.float() * factor).all()


def _head_gradients(
    dtype: torch.dtype, factor: float, known: bool = True, loss_weight: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """(gradient, the fp64 one of the same inputs) of hidden states and weight."""
    g = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 16, generator=g).to(dtype).requires_grad_(True) for n in (40, 20_011))
    targets = torch.randint(0, 20_011, (40,), generator=g)
    columns = {"loss_weight": torch.full((40,), loss_weight)}
    options = HeadOptions(chunk_tokens=16, upstream=factor if known else None)
    shard = VocabShard.of(20_011, Axis.single())
    with CudaScalars():
        (linear_token_loss(hidden, weight, targets, shard, columns=columns, options=options).loss * factor).backward()
    wide = [x.detach().double().requires_grad_(True) for x in (hidden, weight)]
    each = F.cross_entropy(wide[0].matmul(wide[1].t()), targets, reduction="sum")
    (each * loss_weight * factor).backward()
    grads = [(got.grad, want.grad) for got, want in zip((hidden, weight), wide)]
    return [(got.double(), want) for got, want in grads if got is not None and want is not None]


def _common(got: Tensor, want: Tensor) -> float:
    """By what factor all of it is off alike."""
    return abs(float((got * want).sum() / (want * want).sum()) - 1)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype,common,each", [(torch.bfloat16, 4e-4, 8e-3), (torch.float16, 1e-4, 1e-3)])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("factor,loss_weight", [(8195 / 12289, 1.0), (2.0**17, 2.0**-6)])
def test_the_factor_on_the_loss_is_never_16_bits_wide(
    dtype: torch.dtype, common: float, each: float, known: bool, factor: float, loss_weight: float
) -> None:
    """The first has no short binary form, the second is no fp16 number; gradients stay inside fp16's range.

    With the factor in 16 bits, or rounded with the logits' gradients, all gradients are off by it alike: 1.3e-3 in
    bf16, infinite in fp16.
    """
    for got, want in _head_gradients(dtype, factor, known, loss_weight):
        assert torch.isfinite(got).all()
        assert _common(got, want) < common
        assert _error(got, want) < each


def test_a_known_factor_adds_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products that keep their fp32 sums, as on CUDA; a power of two is exact, another factor is no worse."""
    monkeypatch.setattr(loss_module, "wide_product", lambda a, b: a.float().matmul(b.float()))
    exact = [_error(*pair) for pair in _head_gradients(torch.bfloat16, 0.5)]
    for known, worse in ((True, 1.03), (False, 1.6)):
        got = [_error(*pair) for pair in _head_gradients(torch.bfloat16, 6143 / 12289, known)]
        print(known, got, exact)
        assert all(a < worse * b for a, b in zip(got, exact))


def test_small_gradients_reach_fp16_after_the_factor() -> None:
    """Softmax over 20,011 columns lies below fp16's normal numbers until the loss scale is in it."""
    late, early = (_head_gradients(torch.float16, 2.0**16 / 8, known, 2.0**-10)[1] for known in (False, True))
    off = [float(((got - want).abs() > 0.01 * want.abs()).double().mean()) for got, want in (late, early)]
    assert off[0] > 0.5 and off[1] < 0.05, off


# --- memory ---------------------------------------------------------------------------------------------------------


def _peak(run: Callable[[], Any]) -> int:
    """Largest number of bytes that tensors made in `run` held at once, from the profiler's record of allocations."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def _peak_of(what: str, tokens: int = 2048, vocab: int = 50_000) -> float:
    """In copies of the fp32 logits of all tokens."""
    hidden = torch.randn(tokens, 16, requires_grad=True)
    weight = torch.randn(vocab, 16, requires_grad=True)
    targets, shard = torch.randint(0, vocab, (tokens,)), VocabShard.of(vocab, Axis.single())

    def bonus(logp: Tensor, entropy: Tensor | None, columns: Any) -> Any:
        return TokenTerms(-logp, torch.full_like(logp, -1.0), torch.full_like(logp, -0.1))

    def run() -> None:
        if what == "logprobs":
            linear_logprobs(hidden, weight, targets, shard)
        else:
            rule = TokenRule(bonus, entropy=True) if what == "entropy" else CROSS_ENTROPY
            linear_token_loss(hidden, weight, targets, shard, rule).loss.backward()

    return _peak(run) / (tokens * vocab * 4)


def test_the_profiler_sees_a_whole_copy() -> None:
    x, w = torch.randn(2048, 16), torch.randn(1000, 16)
    assert _peak(lambda: x.matmul(w.t())) == 2048 * 1000 * 4


@pytest.mark.parametrize("what", ["cross_entropy", "entropy", "logprobs"])
def test_one_chunk_of_logits_is_alive(what: str) -> None:
    """Two chunks of 1,024 tokens: one alive is half a copy; the gradients of 16 columns are 1 %."""
    rise = _peak_of(what)
    assert 0.5 < rise < 0.6, f"{rise:.2f} copies of the logits"
