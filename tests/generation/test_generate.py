"""Responses in every layout: greedy as transformers', samples as one process's, log-probabilities as the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import Document, shift_labels
from hybrid5d.errors import ConfigErrors, DataError
from hybrid5d.generation import Generated, Sampling, group
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, hf_model, make_rows, reference, step_batch
from tests.layouts import SCHEDULES

SGD = Recipe(lr=0.5)
STOPS = tuple(range(6, 101, 3))
GREEDY = Sampling(do_sample=False, repetition_penalty=1.4, max_new_tokens=20, min_new_tokens=4, stop_ids=STOPS)
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, max_new_tokens=12, stop_ids=STOPS, seed=5)
EARLY = Sampling(do_sample=False, repetition_penalty=1.4, max_new_tokens=16)
PLAIN = Sampling(
    temperature=0.7, top_k=30, repetition_penalty=1.2, max_new_tokens=9, min_new_tokens=2, stop_ids=STOPS, seed=1
)
ZERO3 = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}


def prompts(count: int = 7, longest: int = 23) -> list[np.ndarray]:
    """Ragged; one of a single token; stop ids and pads inside."""
    rng = np.random.default_rng(4)
    found = [rng.integers(0, 101, int(n)) for n in rng.integers(2, longest, count)]
    found[1] = found[1][:1]
    found[2][-1] = STOPS[1]
    return found


def transformers_greedy(model: Any, prompt: np.ndarray, sampling: Sampling) -> list[int]:
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=2,
    )
    ids = torch.from_numpy(prompt)[None]
    return model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()


def as_documents(asked: Sequence[np.ndarray], answers: Sequence[Generated], samples: int) -> list[Document]:
    """Prompt and response as rows, of which the responses' tokens have labels."""
    rows = []
    for i, answer in enumerate(answers):
        prompt = asked[i // samples]
        ids = np.concatenate((prompt, answer.tokens))
        labels = np.concatenate((np.full(len(prompt), -100), answer.tokens))
        rows.append(Document(ids, shift_labels(labels), i))
    return rows


def fill_padding(engine: Any) -> None:
    """Rows that pad the vocabulary get weights that would win every softmax."""
    for p in engine.module.parameters():
        pieces = getattr(p, "shard", None) and p.shard.pieces
        if pieces and pieces[0].full_shape[0] == 101 and p.shape[0] > pieces[0].length:
            with torch.no_grad():
                p[pieces[0].length :] = 50.0


def _rank(rank: int, layout: Layout, folder: str) -> dict[str, Any]:
    engine = build_engine(layout, SGD, folder, 8)
    if layout.world > 1:  # caches grow, and prompts take several passes; in one process neither happens
        group._FIRST_COLUMNS, group._PREFILL_TOKENS = 4, 40
    if layout.zero < 3:
        fill_padding(engine)
    asked = prompts()
    ended: list[tuple[int, int]] = []
    found = {
        "greedy": engine.generate(asked, GREEDY, progress=lambda done, total: ended.append((done, total))),
        "sampled": engine.generate(asked, SAMPLED, samples=3, step=2),
        "batches": engine.generate(asked, SAMPLED, samples=3, step=2, batch_size=4),
        "plain": engine.generate(asked, PLAIN, samples=2),
    }
    assert ended[-1][0] == ended[-1][1] if ended else len(asked) < layout.dp * layout.cp
    logprobs = engine.compute_logprobs(as_documents(asked, found["plain"], 2), 2, PLAIN.temperature)
    found["logprobs"] = [r.logprobs for r in logprobs]
    return found


@cache
def one_process(model: str, folder: str) -> dict[str, Any]:
    return run_ranks(1, _rank, Layout(), folder)[0]


@cache
def expected(model: str) -> list[list[int]]:
    theirs = hf_model(MODELS[model])
    return [transformers_greedy(theirs, p, GREEDY) for p in prompts()]


def same(got: Sequence[Generated], want: Sequence[Generated]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.finished == b.finished


def check(found: dict[str, Any], model: str, folder: str) -> None:
    for got, want in zip(found["greedy"], expected(model), strict=True):
        assert got.tokens.tolist() == want
        assert got.finished == (want[-1] in STOPS)
        assert got.tokens.dtype == np.int64 and got.logprobs.dtype == np.float32
    alone = one_process(model, folder)
    same(found["sampled"], alone["sampled"])
    same(found["batches"], alone["sampled"])
    same(found["plain"], alone["plain"])
    for got, row, prompt in zip(found["plain"], found["logprobs"], np.repeat(np.arange(7), 2)):
        begin = len(prompts()[prompt]) - 1
        np.testing.assert_allclose(got.logprobs, row[begin : begin + len(got.tokens)], atol=1e-5)


@pytest.mark.parametrize("model", ["llama", "llama_bias", "qwen2", "qwen3", "mistral_window", "qwen2_window", "yarn"])
def test_one_process(model: str, folders: dict[str, Path]) -> None:
    """Greedy token by token; and the cases are what they are meant to be."""
    folder = str(folders[model])
    check(one_process(model, folder), model, folder)
    lengths = {len(want) for want in expected(model)}
    assert len(lengths) > 1 and max(lengths) == GREEDY.max_new_tokens, "some end, some are cut"


LAYOUTS = [
    (Layout(tp=2), "qwen3"),
    (Layout(tp=4), "llama_bias"),
    (Layout(tp=2, sp=True), "mistral_window"),
    (Layout(pp=2), "qwen2"),
    (Layout(pp=4), "qwen2_window"),
    (Layout(cp=2), "yarn"),
    (Layout(dp=2), "llama"),
    (Layout(dp=2, zero=3, extra=ZERO3), "qwen2"),
    (Layout(tp=2, dp=2, zero=3, extra=ZERO3), "llama_bias"),
    (Layout(tp=2, pp=2, cp=2, sp=True), "qwen2_window"),
    (Layout(tp=2, pp=2, dp=2, sp=True), "qwen3"),
]


@pytest.mark.parametrize("layout, model", LAYOUTS, ids=lambda x: str(x))
def test_layouts(layout: Layout, model: str, folders: dict[str, Path]) -> None:
    """R19, R20: tokens of transformers, of one process, of another batch; log-probabilities of `compute_logprobs`."""
    for found in run_ranks(layout.world, _rank, layout, str(folders[model]), timeout=200):
        check(found, model, str(folders[model]))


def test_samples_differ(folders: dict[str, Path]) -> None:
    """R19: of one prompt, of the same prompt elsewhere in the step, of another step and another seed."""

    found = run_ranks(1, _sample_rank, str(folders["llama"]))[0]
    assert len({tuple(g.tokens) for g in found}) == len(found) == 16


def _sample_rank(rank: int, folder: str) -> list[Generated]:
    engine = build_engine(Layout(), SGD, folder, 8)
    prompt = np.arange(5)
    draws = [(1, 1), (1, 2), (2, 1)]
    found = engine.generate([prompt, prompt], Sampling(max_new_tokens=20, seed=1), samples=4, step=0)
    for seed, step in draws[1:]:
        found += engine.generate([prompt], Sampling(max_new_tokens=20, seed=seed), samples=4, step=step)
    return found


def letters(ids: Sequence[int]) -> str:
    """A tokenizer whose every other id is two characters and which lacks ids above 90."""
    return "".join(chr(200 + i) * (1 + i % 2) for i in ids if i <= 90)


def _alone_rank(rank: int, folder: str, stop: tuple[str, ...]) -> Any:
    engine = build_engine(Layout(), SGD, folder, 8)
    plain = Sampling(do_sample=False, repetition_penalty=1.4, max_new_tokens=20)
    stopping = Sampling(do_sample=False, repetition_penalty=1.4, max_new_tokens=20, stop=stop)
    together = engine.generate(prompts(), plain)
    each = [engine.generate([p], plain)[0] for p in prompts()]
    return together, each, engine.generate(prompts(), stopping, decode=letters), engine.generate([], plain)


def test_neighbours_and_stop_texts(folders: dict[str, Path]) -> None:
    """R20: a prompt alone and beside others; a stop text ends a response with the token that completes it."""
    model = hf_model(MODELS["qwen3"])
    plain = Sampling(do_sample=False, repetition_penalty=1.4, max_new_tokens=20)
    full = [transformers_greedy(model, p, plain) for p in prompts()]
    stop = (letters(full[0][5:7])[1:], letters(full[3][9:10]), "no such text")
    together, each, stopped, nothing = run_ranks(1, _alone_rank, str(folders["qwen3"]), stop)[0]
    same(together, each)
    assert [g.tokens.tolist() for g in together] == full and nothing == []
    for got, tokens in zip(stopped, full, strict=True):
        ends = [n for n in range(1, 21) if any(s in letters(tokens[:n]) for s in stop)]
        assert got.tokens.tolist() == tokens[: min(ends, default=20)]
        assert got.finished == bool(ends)
    assert len(stopped[0].tokens) <= 7 and not all(g.finished for g in stopped)


def _zero3_rank(rank: int, layout: Layout, folder: str, asked: list[np.ndarray], stop: int) -> Any:
    engine = build_engine(layout, SGD, folder, 8)
    rows = make_rows(8, 16, 101)
    batch = step_batch(rows, layout.dp, engine.ctx.dp.rank, 1)
    sampling = replace(EARLY, stop_ids=(stop,))
    losses, found = [], []
    for _ in range(2):
        found.append(engine.generate(asked, sampling))
        losses.append(engine.train_batch(batch).loss)
    return found, losses


@pytest.mark.parametrize("layout, count", [(Layout(dp=2, zero=3, extra=ZERO3), 2), (Layout(dp=4, zero=3), 3)], ids=str)
def test_replicas_that_end_early(layout: Layout, count: int, folders: dict[str, Path]) -> None:
    """R25: one rank ends after 1 token, another after 16, one has none; training goes on undisturbed."""
    asked, rows = [prompts()[i] for i in (3, 0, 1)[:count]], make_rows(8, 16, 101)
    model = hf_model(MODELS["llama"])
    stop = transformers_greedy(model, asked[0], EARLY)[0]
    sampling = replace(EARLY, stop_ids=(stop,))
    want, losses = [], []
    for _ in range(2):
        want.append([transformers_greedy(model, p, sampling) for p in asked])
        losses += reference(model, [rows], SGD).losses
    assert len(want[0][0]) == 1 and len(want[0][1]) == 16 and want[0] != want[1]
    for found, got in run_ranks(layout.world, _zero3_rank, layout, str(folders["llama"]), asked, stop):
        assert [[g.tokens.tolist() for g in step] for step in found] == want
        np.testing.assert_allclose(got, losses, atol=1e-5)


def _fault_rank(rank: int, folder: str) -> list[str]:
    engine = build_engine(Layout(dp=2), SGD, folder, 8)
    good, texts = np.arange(3), []
    for asked in ([good, good[:0]], [good, np.array([4, 101])], [good + rank]):
        with pytest.raises(DataError) as caught:
            engine.generate(asked, PLAIN)
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="stop"):
        engine.generate([good], Sampling(stop=("x",)))
    return texts


def _several_runs_rank(rank: int, layout: Layout, folder: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        build_engine(layout, SGD, folder, 8).generate([np.arange(3)], PLAIN)
    (error,) = caught.value.errors
    return f"{error.key}={error.value}: {error.rule}"


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_ranks_with_several_runs_of_layers_refuse_by_the_key_that_asks_for_them(
    schedule: str, folders: dict[str, Path]
) -> None:
    model = SCHEDULES[schedule]
    asked = "virtual_pipeline_model_parallel_size=2" if schedule == "interleaved" else "pipeline_schedule=zbv"
    given = {key: value for key, value in model.items() if key in asked}  # interleaved by its number alone
    for text in run_ranks(2, _several_runs_rank, Layout(pp=2, model=given), str(folders["llama"])):
        assert text == f"actor.model.{asked}: generation goes through one run of layers a rank"


def test_refusals(folders: dict[str, Path]) -> None:
    for empty, unknown, different in run_ranks(2, _fault_rank, str(folders["llama"])):
        assert empty == "prompt 1: empty"
        assert unknown == "prompt 1: prompt[1]=101 is outside the vocabulary (0..100)"
        assert "different prompts" in different
