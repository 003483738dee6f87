"""Token losses, log-probabilities and entropy over a vocabulary cut over the tensor-parallel axis.

Legend: T tokens, H hidden, V padded vocabulary, n = tp size. Logits are never gathered: a row's maximum and its sums
cross the tp axis as T numbers. Padding columns of the vocabulary are never computed, so they take no probability and no
gradient. After Shoeybi et al. 2019; the head and its loss are fused and worked through in chunks of tokens, gradients
computed in the forward pass as in Liger-Kernel (Hsu et al. 2024): one chunk of logits is alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid5d.parallel.collectives import all_reduce, all_reduce_max, enter_tp
from hybrid5d.parallel.context import Axis
from hybrid5d.tensor_parallel.products import wide_product
from hybrid5d.tensor_parallel.weight_gradients import gradients_of

IGNORE_INDEX = -100  # no target; the value HF and torch use
_ROWS = 64  # rows of a chunk that are exponentiated at a time, so that no second chunk is alive

Columns = Mapping[str, Tensor]


@dataclass(frozen=True)
class VocabShard:
    """The columns of the logits this rank holds: [start, start + size); those at or past `vocab_size` are padding."""

    axis: Axis
    start: int
    size: int
    vocab_size: int

    @classmethod
    def of(cls, vocab_size: int, group: Axis | dist.ProcessGroup | None = None) -> VocabShard:
        """This rank's equal share of a vocabulary, padded to a multiple of the group's size."""
        axis = Axis.of(group)
        size = -(-vocab_size // axis.size)
        return cls(axis, axis.rank * size, size, vocab_size)

    @property
    def real(self) -> int:
        """How many of the columns are no padding."""
        return min(max(self.vocab_size - self.start, 0), self.size)

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The local column of each id (0 where it is not here), and whether it is here."""
        local = ids - self.start
        here = (local >= 0) & (local < self.real)
        return local.masked_fill(~here, 0), here


@dataclass(frozen=True)
class HeadOptions:
    """How the head is applied.

    Attributes:
        sequence_parallel: the hidden states are the rank's part of the sequence, [b, s/n, H].
        temperature: what the logits are divided by, in fp32.
        chunk_tokens: how many tokens' logits are alive at a time.
        upstream: what backward will be called with, where that is known: gradients are then multiplied by it before
            they are rounded to 16 bits, and the weight's is added in the forward pass where something takes it
            (`WeightGradients`), so that no copy of it waits for the backward pass.
    """

    sequence_parallel: bool = False
    temperature: float = 1.0
    chunk_tokens: int = 1024
    upstream: float | None = None


@dataclass(frozen=True)
class TokenTerms:
    """What a rule makes of t tokens, [t] each.

    Attributes:
        loss, d_logp, d_entropy: the loss and its slopes; None: the rule does not read the entropy.
        means: numbers to report, to be averaged over tokens; parts: terms of the loss, averaged as the loss is.
    """

    loss: Tensor
    d_logp: Tensor
    d_entropy: Tensor | None = None
    means: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRule:
    """A loss that is a function of each token's log-probability, entropy and columns.

    Attributes:
        of: `of(logp, entropy, columns)`, fp32 [t] each, gives the terms. What it gives for tokens without a target is
            not used, so NaN there does no harm. Not seen by autograd.
        entropy: whether the rule reads the entropy; without it `entropy` is None.
        needs: columns without which it does not work.
        means, parts: names of what it reports (`TokenTerms`), the same for all tokens.
    """

    of: Callable[[Tensor, Tensor | None, Columns], TokenTerms]
    entropy: bool = False
    needs: tuple[str, ...] = ()
    means: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


CROSS_ENTROPY = TokenRule(lambda logp, entropy, columns: TokenTerms(-logp, -torch.ones_like(logp)))


class TokenLoss(NamedTuple):
    """A loss summed over the valid tokens (fp32, equal on every tp rank), and what it was computed from.

    logprobs, entropy: as `linear_logprobs` gives them, without a gradient; entropy is None where the rule needs none.
    means, parts: the rule's, summed over the valid tokens, fp64; parts times the column `loss_weight`, as the loss.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    means: dict[str, Tensor]
    parts: dict[str, Tensor]


class _Scores(NamedTuple):
    """A chunk of t tokens: logits minus their row's maximum [t, V/n], where the targets are, and results [t]."""

    shifted: Tensor
    log_norm: Tensor
    columns: Tensor
    here: Tensor
    logp: Tensor
    entropy: Tensor | None


def wide_dtype(x: Tensor) -> torch.dtype:
    """What losses are computed in: fp32, fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _score(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, temperature: float, entropy: bool
) -> _Scores:
    """One max and one sum all-reduce of t (2t or 3t) numbers over tp."""
    logits = wide_product(hidden, weight.t())
    if temperature != 1.0:
        logits.div_(temperature)
    lowest = torch.finfo(logits.dtype).min
    peak = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:1], lowest)
    logits.sub_(all_reduce_max(peak, shard.axis).unsqueeze(-1))
    columns, here = shard.columns(targets)
    sums = logits.new_zeros((3 if entropy else 2, logits.shape[0]))
    buffer = logits.new_empty((_ROWS, logits.shape[1]))
    for rows in _runs(logits.shape[0], _ROWS):
        exps = torch.exp(logits[rows], out=buffer[: rows.stop - rows.start])
        sums[0, rows] = exps.sum(-1)
        if entropy:  # exp(s) * s; a product with s = -inf cannot come, the head's logits are finite
            sums[2, rows] = exps.mul_(logits[rows]).sum(-1)
    if logits.shape[-1]:
        sums[1] = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    sums = all_reduce(sums, shard.axis).wait()
    log_norm = sums[0].log()
    logp = (sums[1] - log_norm).masked_fill(targets == IGNORE_INDEX, 0.0)
    return _Scores(logits, log_norm, columns, here, logp, log_norm - sums[2] / sums[0] if entropy else None)


def _gradient(scores: _Scores, d_logp: Tensor, d_entropy: Tensor | None) -> Tensor:
    """dloss/dlogits, written over the chunk's logits.

    With p the softmax and H the entropy: dlogp/dz_j = [j is the target] - p_j and dH/dz_j = -p_j (log p_j + H).
    """
    z = scores.shifted
    buffer = z.new_empty((_ROWS if d_entropy is not None else 0, z.shape[1]))
    for rows in _runs(z.shape[0], _ROWS):
        log_p = z[rows].sub_(scores.log_norm[rows].unsqueeze(-1))
        if d_entropy is None or scores.entropy is None:
            log_p.exp_().mul_(-d_logp[rows].unsqueeze(-1))
        else:
            p = torch.exp(log_p, out=buffer[: rows.stop - rows.start])
            log_p.add_(scores.entropy[rows].unsqueeze(-1)).mul_(-d_entropy[rows].unsqueeze(-1))
            log_p.sub_(d_logp[rows].unsqueeze(-1)).mul_(p)
    if z.shape[-1]:
        z.scatter_add_(-1, scores.columns.unsqueeze(-1), (d_logp * scores.here).unsqueeze(-1))
    return z


def _halves(upstream: float, dtype: torch.dtype) -> tuple[float, float]:
    """The factor on logits' gradients before they are rounded to `dtype`, and the rest, for what is made of them.

    In 16 bits the first is a power of two: it lifts small gradients into fp16's range and rounds none. By any other
    factor f the gradients of all unlikely targets, about -f each, would be off by one common rounding.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return upstream, 1.0
    mantissa, exponent = math.frexp(upstream)
    return math.ldexp(1.0, exponent), mantissa


def _runs(total: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, total)) for begin in range(0, total, size))


def selected(x: Tensor, *, weight: Tensor | None = None, ignored: Tensor) -> Tensor:
    """`x`, times the weight, of tokens with a target; 0 elsewhere, whatever stands there."""
    return (x if weight is None else x * weight).masked_fill(ignored, 0.0)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, rule: TokenRule,
        columns: Columns, options: HeadOptions, reported: tuple[dict[str, Tensor], dict[str, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        need_h, need_w = ctx.needs_input_grad[:2]
        early, late = _halves(options.upstream or 1.0, hidden.dtype)
        ctx.early, ctx.upstream = early, early * late
        wide, tokens = wide_dtype(hidden), hidden.shape[0]
        grad_h = torch.empty_like(hidden) if need_h else None
        taken = gradients_of(weight) if need_w and options.upstream is not None else None
        grad_w = torch.zeros_like(weight, dtype=wide) if need_w and taken is None else None
        real_w, total = weight[: shard.real], hidden.new_zeros((), dtype=wide)
        logprobs = hidden.new_empty(tokens, dtype=wide)
        entropies = hidden.new_empty(tokens if rule.entropy else 0, dtype=wide)
        for rows in _runs(tokens, options.chunk_tokens):
            h, t = hidden[rows], targets[rows]
            scores = _score(h, real_w, t, shard, options.temperature, rule.entropy)
            terms = rule.of(scores.logp, scores.entropy, {k: v[rows] for k, v in columns.items()})
            ignored = t == IGNORE_INDEX
            weight_of = columns["loss_weight"][rows] if "loss_weight" in columns else None
            weigh = partial(selected, weight=weight_of, ignored=ignored)
            total += weigh(terms.loss).sum()
            for sums, found, select in zip(reported, (terms.means, terms.parts), (partial(weigh, weight=None), weigh)):
                for name, values in found.items():
                    sums[name] = sums.get(name, 0.0) + select(values).double().sum()
            logprobs[rows] = scores.logp
            if scores.entropy is not None:
                entropies[rows] = scores.entropy
            if need_h or need_w:
                d_logp, d_entropy = (
                    None if d is None else weigh(d.to(wide)) * (early / options.temperature)
                    for d in (terms.d_logp, terms.d_entropy)
                )
                assert d_logp is not None
                dlogits = _gradient(scores, d_logp, d_entropy).to(weight.dtype)
                if grad_h is not None and late == 1.0 and dlogits.dtype == wide:
                    torch.matmul(dlogits, real_w, out=grad_h[rows])
                elif grad_h is not None:
                    grad_h[rows] = wide_product(dlogits, real_w).mul_(late)
                if taken is not None:
                    taken.product(weight, dlogits, h, late)
                elif grad_w is not None and grad_w.dtype == dlogits.dtype:
                    grad_w[: shard.real].addmm_(dlogits.t(), h)
                elif grad_w is not None:
                    grad_w[: shard.real] += wide_product(dlogits.t(), h)
                del dlogits
            del scores  # before the next chunk's logits are made
        ctx.save_for_backward(grad_h, grad_w)
        ctx.weight_dtype, ctx.done = weight.dtype, taken is not None
        ctx.mark_non_differentiable(logprobs, entropies)
        return total, logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_w = ctx.saved_tensors
        # Not on a GPU, which would have to be waited for.
        if ctx.done and not grads[0].is_cuda and grads[0] != grads[0].new_tensor(ctx.upstream):
            raise RuntimeError(f"backward with {float(grads[0])}, but options.upstream is {ctx.upstream}")
        # A product of a 16-bit tensor and a scalar tensor would round the scalar to 16 bits on CUDA (to inf in fp16).
        # The first quotient is 1 where backward is called with what forward was told.
        dh = None if grad_h is None else (grad_h.to(grads[0].dtype) * (grads[0] / ctx.upstream)).to(grad_h.dtype)
        dw = None if grad_w is None else (grad_w * (grads[0] / ctx.early)).to(ctx.weight_dtype)
        return dh, dw, *[None] * 6


def _entered(hidden: Tensor, targets: Tensor, shard: VocabShard, options: HeadOptions) -> tuple[Tensor, Tensor]:
    """Hidden states of all tokens [T, H], their gradient to be summed over tp, and targets [T]."""
    whole = enter_tp(hidden, shard.axis, options.sequence_parallel)
    if whole.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states of {tuple(whole.shape[:-1])} tokens but targets {tuple(targets.shape)}")
    return whole.reshape(-1, whole.shape[-1]), targets.reshape(-1)


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    rule: TokenRule = CROSS_ENTROPY,
    columns: Columns | None = None,
    options: HeadOptions = HeadOptions(),
) -> TokenLoss:
    """The head `hidden weight^T / temperature` and a loss of its log-probabilities and entropies, fused.

    hidden [..., H], the same on every tp rank ([b, s/n, H] with SP), weight [V/n, H], targets [...] (IGNORE_INDEX = no
    target), columns [...] each. Backward all-reduces the gradient of hidden over tp (reduce-scatters with SP). Without
    a valid target the loss and its gradients are exactly zero. The column `loss_weight` multiplies each token's loss.

    Raises:
        ValueError: the shapes of hidden and targets do not belong together.
    """
    flat, t = _entered(hidden, targets, shard, options)
    flat_columns = {name: c.reshape(-1) for name, c in (columns or {}).items()}
    reported: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    loss, logprobs, entropy = _LinearTokenLoss.apply(flat, weight, t, shard, rule, flat_columns, options, reported)
    shape = targets.shape
    return TokenLoss(loss, logprobs.view(shape), entropy.view(shape) if rule.entropy else None, *reported)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, options: HeadOptions = HeadOptions()
) -> Tensor:
    """Sum of the cross entropy over valid tokens, unweighted; see `linear_token_loss`."""
    return linear_token_loss(hidden, weight, targets, shard, options=options).loss


@torch.no_grad()
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, options: HeadOptions = HeadOptions()
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target (0 where ignored) and entropy of each row; fp32 [...] each, equal on tp ranks.

    hidden, weight, targets as in `linear_token_loss`. No gradient.
    """
    flat, t = _entered(hidden, targets, shard, options)
    results = []
    for rows in _runs(flat.shape[0], options.chunk_tokens):
        scores = _score(flat[rows], weight[: shard.real], t[rows], shard, options.temperature, entropy=True)
        assert scores.entropy is not None
        results.append(torch.stack((scores.logp, scores.entropy)))
        del scores
    logp, entropy = torch.cat(results, 1) if results else flat.new_zeros((2, 0), dtype=wide_dtype(flat))
    return logp.view(targets.shape), entropy.view(targets.shape)
