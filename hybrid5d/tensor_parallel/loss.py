"""Cross entropy, log-probabilities and entropy over a vocabulary cut over the tensor-parallel axis.

Legend: T tokens, H hidden, V padded vocabulary, n = tp size. Logits are never gathered: a row's maximum and its sums
cross the tp axis as T numbers. Padding columns of the vocabulary are -inf before the softmax, so they take no
probability and no gradient. After Shoeybi et al. 2019; the head and its loss are fused and worked through in chunks of
tokens, gradients computed in the forward pass as in Liger-Kernel (Hsu et al. 2024): one chunk of logits is alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid5d.parallel.collectives import all_reduce, all_reduce_max
from hybrid5d.parallel.context import Axis

CHUNK_TOKENS = 1024
IGNORE_INDEX = -100  # no target; the value HF and torch use


@dataclass(frozen=True)
class VocabShard:
    """The columns this rank holds: [start, start + size); those at or past `vocab_size` are padding."""

    axis: Axis
    start: int
    vocab_size: int


def _mask_padding(logits: Tensor, shard: VocabShard) -> Tensor:
    real = shard.vocab_size - shard.start
    if real < logits.shape[-1]:
        logits[..., max(real, 0) :] = float("-inf")
    return logits


def _targets_here(targets: Tensor, shard: VocabShard, size: int) -> tuple[Tensor, Tensor]:
    """Local column of each target and whether the target is valid and in this shard."""
    local = targets - shard.start
    here = (local >= 0) & (local < size) & (targets != IGNORE_INDEX)
    return local.masked_fill(~here, 0), here


def _softmax_parts(logits: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turn fp32 logits [T, V/n] into exp(logit - max), in place.

    One max and one sum all-reduce of T numbers each over tp.
    Returns:
        exps [T, V/n], normaliser [T], the target's shifted logit [T] (0 where ignored), local columns, here.
    """
    _mask_padding(logits, shard)
    peak = all_reduce_max(logits.amax(-1), shard.axis)
    logits.sub_(peak.unsqueeze(-1))
    columns, here = _targets_here(targets, shard, logits.shape[-1])
    target = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    exps = logits.exp_()
    sums = all_reduce(torch.stack((exps.sum(-1), target)), shard.axis).wait()
    return exps, sums[0], sums[1], columns, here


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, chunk: int) -> Tensor:
        need_h, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_h = torch.empty_like(hidden) if need_h else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if need_w else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, hidden.shape[0], chunk):
            end = min(begin + chunk, hidden.shape[0])
            h, t = hidden[begin:end], targets[begin:end]
            logits = h.matmul(weight.t()).float()
            valid = t != IGNORE_INDEX
            exps, norm, target, columns, here = _softmax_parts(logits, t, shard)
            total += ((norm.log() - target) * valid).sum()
            if not (need_h or need_w):
                continue
            exps.mul_((valid / norm).unsqueeze(-1))  # softmax, zero rows where ignored
            exps.scatter_add_(-1, columns.unsqueeze(-1), -here.to(exps.dtype).unsqueeze(-1))
            dlogits = exps.to(weight.dtype)
            if grad_h is not None:
                torch.matmul(dlogits, weight, out=grad_h[begin:end])
            if grad_w is not None:
                if grad_w.dtype == dlogits.dtype:
                    grad_w.addmm_(dlogits.t(), h)
                else:
                    grad_w += dlogits.t().matmul(h)
        ctx.save_for_backward(grad_h, grad_w)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_h, grad_w = ctx.saved_tensors
        scale = grads[0]
        dh = None if grad_h is None else (grad_h * scale).to(grad_h.dtype)
        dw = None if grad_w is None else (grad_w * scale).to(ctx.weight_dtype)
        return dh, dw, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Sum over valid tokens of the cross entropy of `hidden weight^T`; fp32 scalar, equal on every tp rank.

    hidden [T, H] (replicated over tp), weight [V/n, H], targets [T] (IGNORE_INDEX = no target). The gradient of hidden
    is this rank's partial one: put `enter_tp` in front, which sums it. Without a valid target the loss and its
    gradients are exactly zero.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, shard, chunk_tokens)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
        work = logits.float()
        work = work.clone() if work is logits or work.data_ptr() == logits.data_ptr() else work
        exps, norm, target, columns, here = _softmax_parts(work, targets, shard)
        ctx.save_for_backward(exps.div_(norm.unsqueeze(-1)), columns, here, targets)
        ctx.dtype = logits.dtype
        return (norm.log() - target) * (targets != IGNORE_INDEX)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probs, columns, here, targets = ctx.saved_tensors
        d = probs.clone()
        d.scatter_add_(-1, columns.unsqueeze(-1), -here.to(d.dtype).unsqueeze(-1))
        d.mul_((grads[0] * (targets != IGNORE_INDEX)).unsqueeze(-1))
        return d.to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Per-token cross entropy of sharded logits [..., V/n] against targets [...]; 0 where ignored; fp32."""
    return _CrossEntropy.apply(logits, targets, shard)


@torch.no_grad()
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target (0 where ignored) and entropy of each row; fp32 [T] each, equal on every tp rank.

    hidden [T, H], weight [V/n, H]. Two all-reduces of T numbers and one for the entropy over tp.
    """
    logprobs, entropies = [], []
    for begin in range(0, hidden.shape[0], chunk_tokens):
        h, t = hidden[begin : begin + chunk_tokens], targets[begin : begin + chunk_tokens]
        logits = h.matmul(weight.t()).float()
        _mask_padding(logits, shard)
        peak = all_reduce_max(logits.amax(-1), shard.axis)
        shifted = logits - peak.unsqueeze(-1)
        columns, here = _targets_here(t, shard, logits.shape[-1])
        target = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        exps = shifted.exp()
        weighted = (exps * shifted.masked_fill(exps == 0, 0.0)).sum(-1)
        sums = all_reduce(torch.stack((exps.sum(-1), target, weighted)), shard.axis).wait()
        log_norm = sums[0].log()
        logprobs.append((sums[1] - log_norm) * (t != IGNORE_INDEX))
        entropies.append(log_norm - sums[2] / sums[0])
    return torch.cat(logprobs), torch.cat(entropies)


def vocab_parallel_argmax(logits: Tensor, shard: VocabShard) -> Tensor:
    """Index of the largest real column of sharded logits [..., V/n]; the lowest on a tie. Two max over tp."""
    work = _mask_padding(logits.float().clone(), shard)
    value, index = work.max(-1)
    best = all_reduce_max(value.clone(), shard.axis)
    candidate = torch.where(value == best, index + shard.start, torch.iinfo(torch.int64).max)
    return -all_reduce_max(-candidate, shard.axis)
