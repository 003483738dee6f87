"""The choice of a token: numbers of cases R07, R18 and R19, transformers' processors, and shards against the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.generation.noise import id_words, log_survival, position_words, sequence_keys
from hybrid5d.generation.sampling import Draw, Sampling, choose, filtered, penalised
from hybrid5d.parallel.context import Axis
from hybrid5d.tensor_parallel import VocabShard
from tests.harness import run_ranks


def whole(vocab: int) -> VocabShard:
    return VocabShard.of(vocab, Axis.single())


def only(token: int, vocab: int) -> Draw:
    """Nothing but one token may be chosen."""
    keys = sequence_keys(0, 0, [(0, 0)])
    barred = torch.tensor([i for i in range(vocab) if i != token])
    return Draw(position_words(keys, 0), id_words(0, vocab), None, barred)


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("temperature, wanted", [(1.0, -1.440190), (0.5, -2.145078), (0.7, -1.699245)])
def test_log_probability_at_the_temperature_whatever_is_barred(temperature: float, wanted: float, sample: bool) -> None:
    """R07; and the filters of a token that is forced do not show in its log-probability (R18)."""
    sampling = Sampling(do_sample=sample, temperature=temperature, top_k=2, top_p=0.5)
    ids, logprobs = choose(torch.tensor([[2.0, 1, 0, -1]]), whole(4), sampling, only(1, 4))
    assert ids.tolist() == [1]
    np.testing.assert_allclose(logprobs, [wanted], atol=1e-6)


def test_order_of_the_filters() -> None:
    """R18: penalty, temperature, top_k, top_p."""
    logits, seen = torch.tensor([[2, 1, 0.5, -1]]), torch.tensor([[True, False, False, True]])
    scores = penalised(logits, seen, 1.3) / 0.5
    some = filtered(scores, whole(4), Sampling(top_k=3)).softmax(-1)
    np.testing.assert_allclose(some[0], [0.682148, 0.232368, 0.085484, 0], atol=1e-6)
    few = filtered(scores, whole(4), Sampling(top_k=3, top_p=0.9)).softmax(-1)
    np.testing.assert_allclose(few[0], [0.745911, 0.254089, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 7, "top_p": 0.4},
        {"top_k": 7, "top_p": 1e-6},
        {"top_k": 4, "top_p": 0.9, "repetition_penalty": 1.3, "temperature": 0.6},
        {"repetition_penalty": 0.8},
        {"top_k": 1_000_000},
    ],
    ids=str,
)
def test_filters_are_those_of_transformers(keys: dict[str, Any]) -> None:
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as hf

    torch.manual_seed(1)
    logits, ids = torch.randn(6, 101) * 3, torch.randint(0, 101, (6, 9))
    theirs = LogitsProcessorList()
    if "repetition_penalty" in keys:
        theirs.append(hf.RepetitionPenaltyLogitsProcessor(keys["repetition_penalty"]))
    theirs.append(hf.TemperatureLogitsWarper(keys.get("temperature", 1.0)))
    if "top_k" in keys:
        theirs.append(hf.TopKLogitsWarper(keys["top_k"]))
    if "top_p" in keys:
        theirs.append(hf.TopPLogitsWarper(keys["top_p"]))
    sampling, seen = Sampling(**keys), torch.zeros(6, 101, dtype=torch.bool).scatter_(1, ids, True)
    scores = penalised(logits, seen, sampling.repetition_penalty) / sampling.temperature
    torch.testing.assert_close(filtered(scores, whole(101), sampling), theirs(ids, logits.clone()))


@pytest.mark.parametrize("top_k", [0, -1, 4, 1_000_000])
def test_top_k_off(top_k: int) -> None:
    scores = torch.randn(3, 4)
    assert filtered(scores, whole(4), Sampling(top_k=top_k)) is scores


def _draws(logits: torch.Tensor, sampling: Sampling, count: int, barred: list[int] | None = None) -> Any:
    """`count` draws from one row of logits, as so many prompts."""
    keys = sequence_keys(3, 1, [(place, 0) for place in range(count)])
    bars = None if barred is None else torch.tensor(barred)
    draw = Draw(position_words(keys, 5), id_words(0, len(logits)), None, bars)
    return choose(logits.expand(count, -1), whole(len(logits)), sampling, draw)


def _chi_square(ids: torch.Tensor, probs: list[float]) -> float:
    """Pearson's statistic over the possible ids, in standard deviations above its mean."""
    possible = [i for i, p in enumerate(probs) if p > 0]
    counts = np.bincount(ids.numpy(), minlength=len(probs))
    assert counts.sum() == counts[possible].sum(), "an impossible id was drawn"
    expected = np.array([probs[i] * len(ids) for i in possible])
    degrees = len(possible) - 1
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


def test_frequencies() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50) * 1.5
    ids, logprobs = _draws(logits, Sampling(temperature=0.8), 60_000)
    probs = (logits.double() / 0.8).softmax(-1)
    assert _chi_square(ids, probs.tolist()) < 4
    np.testing.assert_allclose(logprobs, probs.log()[ids], atol=1e-5)


def test_min_new_tokens_is_silent_in_the_log_probability() -> None:
    """R18: drawn without EOS, log-probability with it."""
    ids, logprobs = _draws(torch.tensor([1.0, 0, 2]), Sampling(), 20_000, barred=[2])
    assert _chi_square(ids, [0.731059, 0.268941, 0]) < 4
    np.testing.assert_allclose(logprobs[ids == 0], -1.407606, atol=1e-6)


def test_noise_is_uniform_and_independent() -> None:
    """Over ids, rows, positions, samples, steps and seeds: moments, and no correlation of any with any."""
    variants = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1)]
    n = 1 << 16
    ids = id_words(0, n)
    uniforms = []
    for seed, step, place, sample, position in variants:
        rows = position_words(sequence_keys(seed, step, [(place, sample)]), position)
        uniforms.append(-torch.expm1(log_survival(rows, ids).double())[0])
    u = torch.stack(uniforms)
    assert (u > 0).all() and (u < 1).all()
    np.testing.assert_allclose(u.mean(1), 0.5, atol=5 * math.sqrt(1 / 12 / n))
    counts = torch.stack([torch.histc(row, 256, 0, 1) for row in u])
    assert (((counts - n / 256) ** 2 / (n / 256)).sum(1) < 255 + 5 * math.sqrt(2 * 255)).all()
    small = torch.histc(u[u < 2**-8] * 2**8, 16, 0, 1)  # the small ones decide
    assert ((small - small.mean()) ** 2 / small.mean()).sum() < 15 + 5 * math.sqrt(30)
    correlations = torch.corrcoef(torch.cat((u, u.roll(1, 1), u.roll(64, 1))))
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(n)


def test_rows_do_not_share_noise() -> None:
    """65536 rows, one id: as independent as ids are."""
    keys = sequence_keys(0, 0, [(place, sample) for place in range(1024) for sample in range(64)])
    u = -torch.expm1(log_survival(position_words(keys, 0), id_words(7, 2)).double()).T
    assert len(np.unique(u.numpy())) > 0.99 * u.numel()  # of 24 bits near 1
    correlations = torch.corrcoef(torch.cat((u, u.roll(1, 1), u.roll(64, 1)))).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(u.shape[1])


SHARDED = [
    Sampling(),
    Sampling(do_sample=False, repetition_penalty=1.2),
    Sampling(temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.3),
    Sampling(top_p=0.6),
]


def _choose(rank: int, logits: torch.Tensor, seen: torch.Tensor, group: bool) -> Any:
    shard = VocabShard.of(logits.shape[1], None) if group else whole(logits.shape[1])
    columns = slice(min(shard.start, shard.vocab_size), min(shard.start, shard.vocab_size) + shard.real)
    keys = sequence_keys(3, 1, [(place, 0) for place in range(len(logits))])
    rows, ids = position_words(keys, 5), id_words(shard.start, shard.real)
    barred = torch.tensor([i - shard.start for i in (0, logits.shape[1] - 1) if shard.start <= i < columns.stop])
    found = []
    for sampling in SHARDED:
        draw = Draw(rows, ids, seen[:, columns], barred.long())
        found.append([x.numpy() for x in choose(logits[:, columns], shard, sampling, draw)])
    return found


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", [101, 5])
def test_shards_choose_what_the_whole_chooses(tp: int, vocab: int) -> None:
    """R19: an odd vocabulary, and one of 5 over 4 ranks, the last of which holds nothing."""
    torch.manual_seed(2)
    logits, seen = torch.randn(300, vocab) * 2, torch.rand(300, vocab) < 0.2
    wanted = _choose(0, logits, seen, False)
    for per_rank in run_ranks(tp, _choose, logits, seen, True):
        for (ids, logprobs), (all_ids, all_logprobs) in zip(per_rank, wanted, strict=True):
            np.testing.assert_array_equal(ids, all_ids)
            np.testing.assert_allclose(logprobs, all_logprobs, atol=1e-6)


@pytest.mark.parametrize("sample", [True, False])
def test_ties_go_to_the_lowest_id(sample: bool) -> None:
    """What float ties may do: equal greedy scores take the lowest id; equal scores at top_k's edge are kept together.

    A sampled tie needs two equal quotients of 31-bit noise; within rounding (about 1e-7) of one, layouts may differ.
    """
    logits = torch.tensor([[1.0, 3, 3, 3, 0]])
    if sample:
        kept = filtered(logits, whole(5), Sampling(top_k=2))
        assert torch.isfinite(kept).tolist() == [[False, True, True, True, False]]
    else:
        assert choose(logits, whole(5), Sampling(do_sample=False), Draw())[0].tolist() == [1]


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 0.0}, {"temperature": math.nan}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1},
        {"repetition_penalty": 0.0}, {"max_new_tokens": 0}, {"min_new_tokens": 9, "max_new_tokens": 8}, {"stop": ("",)},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        Sampling(**keys)
