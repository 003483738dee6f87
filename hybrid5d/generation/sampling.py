"""The next token of each row, from logits cut over the vocabulary: what is asked for, and the choice.

Legend: B rows, v this rank's real columns of the vocabulary, n = tp size. Logits are never gathered, but for top_p
without top_k, whose threshold needs all of them in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid5d.generation.noise import log_survival
from hybrid5d.parallel.collectives import all_gather_seq
from hybrid5d.tensor_parallel import VocabShard

_BLOCK = 1 << 17  # numbers of noise made at a time, so that they stay in the cache


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Names and order of the steps as in transformers' `generate`.

    Attributes:
        do_sample: False = the most likely token (the lowest id among equals).
        temperature: what logits are divided by, for sampling and in the log-probabilities that are returned.
        top_k: keep the k most likely tokens; off at 0, -1 and at the vocabulary's size and above.
        top_p: keep the fewest most likely tokens that together have this probability; off at 1.
        repetition_penalty: on every token of prompt and response so far (Keskar et al. 2019); off at 1.
        max_new_tokens, min_new_tokens: length of a response; the shortest holds off `stop_ids` only.
        stop_ids: a response ends with the first of these ids; it belongs to it.
        stop: a response ends with the token that completes one of these texts.
        seed: of the noise, with the RL step, the prompt's place, the sample and the position.

    Raises:
        ValueError: a number out of range.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "temperature": not (self.temperature > 0 and math.isfinite(self.temperature)),
            "top_k": self.top_k < -1,
            "top_p": not 0 < self.top_p <= 1,
            "repetition_penalty": not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)),
            "max_new_tokens": self.max_new_tokens < 1,
            "min_new_tokens": not 0 <= self.min_new_tokens <= self.max_new_tokens,
            "stop": "" in self.stop,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"sampling_params.{name}={getattr(self, name)!r} is out of range")


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [B, v] of seen tokens (bool [B, v]) made less likely: divided where positive, multiplied where not."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def lowest_kept(scores: Tensor, shard: VocabShard, top_k: int, top_p: float) -> Tensor:
    """The score [B, 1] below which top_k, then top_p, drop a token of this row; equal scores are kept together.

    All-gathers the k best scores of each shard over tp (all scores with top_p alone).
    """
    k = top_k if 0 < top_k < shard.vocab_size else shard.vocab_size
    width, here = min(k, shard.size), min(k, scores.shape[1])
    best = scores.new_full((scores.shape[0], width), -math.inf)
    best[:, :here] = scores.topk(here, -1).values
    ordered = all_gather_seq(best, shard.axis).wait().sort(-1, descending=True).values
    lowest = ordered[:, k - 1 : k]
    if top_p < 1:
        probs = ordered.masked_fill(ordered < lowest, -math.inf).softmax(-1)
        kept = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True).clamp_(min=1)
        lowest = torch.maximum(lowest, ordered.gather(-1, kept - 1))
    return lowest


def filtered(scores: Tensor, shard: VocabShard, sampling: Sampling) -> Tensor:
    """Scores at the temperature [B, v] with -inf where top_k or top_p drop the token; the same tensor with both off."""
    if not (0 < sampling.top_k < shard.vocab_size or sampling.top_p < 1):
        return scores
    return scores.masked_fill(scores < lowest_kept(scores, shard, sampling.top_k, sampling.top_p), -math.inf)


def race(probs: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(column [B], log of its probability over its exponential draw [B]): the column with the largest quotient.

    That is a draw from probs [B, v] (of any scale): exponential draws with these rates, the earliest one; the
    Gumbel-max trick in other words. rows, ids: `noise`.
    """
    columns, values = [], []
    block = max(1, _BLOCK // max(probs.shape[1], 1))
    for at in range(0, probs.shape[0], block):
        quotient = probs[at : at + block] / log_survival(rows[at : at + block], ids)
        value, column = quotient.min(-1)
        columns.append(column)
        values.append(value.neg_().log_())
    return torch.cat(columns), torch.cat(values)


@dataclass(frozen=True)
class Draw:
    """What one choice is made under.

    Attributes:
        rows, ids: `noise.position_words` of each row, `noise.id_words` of this rank's columns; None without sampling.
        seen: bool [B, v], for the repetition penalty; None without.
        barred: this rank's columns that may not be chosen yet (`min_new_tokens`); None without.
    """

    rows: Tensor | None = None
    ids: Tensor | None = None
    seen: Tensor | None = None
    barred: Tensor | None = None


def choose(logits: Tensor, shard: VocabShard, sampling: Sampling, draw: Draw) -> tuple[Tensor, Tensor]:
    """(token id int64 [B], its log-probability fp32 [B]) of each row; the same on every tp rank.

    logits: fp32 [B, v]. The log-probability is of the whole distribution at the temperature, before every filter. One
    all-gather of 4B numbers over tp, and `lowest_kept`'s.
    """
    raw = logits if sampling.temperature == 1 else logits / sampling.temperature
    if logits.shape[1] == 0:  # tp beyond the vocabulary's size: nothing here
        local = logits.new_full((logits.shape[0], 4), -math.inf, dtype=torch.float64)
        if sampling.do_sample:
            filtered(raw, shard, sampling)
    else:
        local = _best(logits, raw, shard, sampling, draw)
    everyone = all_gather_seq(local.unsqueeze(1), shard.axis).wait()
    winner = everyone[:, :, 0].argmax(-1)
    mine = everyone[torch.arange(len(winner), device=winner.device), winner]
    return mine[:, 1].long(), (mine[:, 2] - everyone[:, :, 3].logsumexp(-1)).float()


def _best(logits: Tensor, raw: Tensor, shard: VocabShard, sampling: Sampling, draw: Draw) -> Tensor:
    """fp64 [B, 4]: this shard's best value, its id, its raw score, and the log-sum-exp of the shard's raw scores."""
    plain = draw.seen is None and draw.barred is None
    scores = logits if draw.seen is None else penalised(logits, draw.seen, sampling.repetition_penalty)
    if draw.barred is not None:
        scores = scores.index_fill(1, draw.barred, -math.inf)
    if not sampling.do_sample:
        value, column = scores.max(-1)
        log_sum = raw.logsumexp(-1)
    else:
        assert draw.rows is not None and draw.ids is not None
        tempered = raw if plain else scores / sampling.temperature
        kept = filtered(tempered, shard, sampling)
        peak = kept.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -math.inf, 0.0)  # nothing kept in this shard
        probs = (kept - peak).exp_()
        log_sum = peak[:, 0] + probs.sum(-1).log_() if kept is raw else raw.logsumexp(-1)
        column, value = race(probs, draw.rows, draw.ids)
        value = value.add_(peak[:, 0])
    picked = raw.gather(1, column.unsqueeze(1))[:, 0]
    return torch.stack((value.double(), (column + shard.start).double(), picked.double(), log_sum.double()), 1)
