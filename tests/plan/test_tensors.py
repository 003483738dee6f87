"""The list of tensors against transformers' models and our own layers, and the cuts in closed form."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from hybrid5d.hf.spec import ModelSpec, parse_hf_config
from hybrid5d.plan.stages import split_layers
from hybrid5d.plan.tensors import (
    elements_on,
    freeze_errors,
    kv_cut,
    layer_elements,
    legal_degrees,
    on_stage,
    shapes,
    tensors,
    tp_faults,
)
from tests.kit import MODELS


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return parse_hf_config({**MODELS[name], "num_hidden_layers": 3, **changes})


@pytest.mark.parametrize("name", sorted(MODELS))
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    from tests.kit import hf_model

    state = hf_model({**MODELS[name], "num_hidden_layers": 3}).state_dict()
    expected = {n: tuple(t.shape) for n, t in state.items()}
    if MODELS[name]["tie_word_embeddings"]:
        expected.pop("lm_head.weight", None)
    assert shapes(spec_of(name)) == expected


@pytest.mark.parametrize("name", ["llama_bias", "qwen2", "qwen3", "mistral_window"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (1, 3)])
def test_elements_per_rank_are_those_of_the_layers(name: str, tp: int, pp: int) -> None:
    """4 query and 2 kv heads (replicated at tp 4), vocabulary 101 (padded): the real modules of each tp rank."""
    from tests.checkpoint.test_start_weights import build

    spec = spec_of(name)
    stages, at = split_layers(3, pp), 1
    for stage, count in enumerate(stages):
        keep = slice(0 if stage == 0 else at, 3 + 3 if stage == pp - 1 else at + count)
        at += count
        for rank in range(tp):
            module = build(spec, tp, rank, keep)
            held = {id(p): p.numel() for p in module.parameters()}
            if pp == 1 and spec.tie_word_embeddings:  # `build` makes the shared module twice
                held.pop(next(i for i, p in ((id(p), p) for p in module[-1].parameters())))
            assert elements_on(spec, stages, stage, tp) == sum(held.values()), (stage, rank)
    if pp == 3:  # the middle stage is one decoder layer and nothing else
        assert layer_elements(spec, tp) == elements_on(spec, stages, 1, tp)


@pytest.mark.parametrize(("heads", "tp"), [(h, t) for h in (1, 2, 3, 6, 8) for t in (1, 2, 3, 4, 6, 8, 16)])
def test_kv_cut_holds_every_head_equally_often(heads: int, tp: int) -> None:
    if heads % tp and tp % heads:
        with pytest.raises(ValueError, match=f"num_key_value_heads={heads} and tensor-parallel size {tp}"):
            kv_cut(heads, tp)
        return
    cut = kv_cut(heads, tp)
    held = [list(range(*cut.run(rank))) for rank in range(tp)]
    flat = sorted(h for run in held for h in run)
    assert flat == sorted(list(range(heads)) * cut.copies) and all(len(run) == cut.per_rank for run in held)
    assert held == sorted(held)  # copies are neighbours
    for rank in range(tp):  # query head i reads kv head i * heads / queries: it must be on the same rank
        queries = range(rank * 48 // tp, (rank + 1) * 48 // tp)
        assert {q * heads // 48 for q in queries} <= set(held[rank])


def test_every_tensor_is_on_one_stage_and_a_tied_one_on_both_ends() -> None:
    for name in ("llama", "qwen3"):
        spec = spec_of(name)
        for stages in ((3,), (2, 1), (0, 3, 0)):
            held = [t.name for stage in range(len(stages)) for t in on_stage(spec, stages, stage)]
            twice = ["model.embed_tokens.weight"] if spec.tie_word_embeddings and len(stages) > 1 else []
            assert sorted(held) == sorted([t.name for t in tensors(spec)] + twice)


def test_parameter_count_of_a_published_model() -> None:
    """Qwen2.5-0.5B as published: 494,032,768 parameters with the tied head counted once."""
    spec = parse_hf_config(
        {
            "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    assert sum(prod(t.shape) for t in tensors(spec)) == 494_032_768 == elements_on(spec, (24,), 0, 1)


def test_legal_degrees_by_hand() -> None:
    assert legal_degrees(12, 6, None) == [1, 2, 3, 6, 12]  # 4: 6 kv heads over 4 ranks fit no way
    assert legal_degrees(9, 3, 1536) == [1, 3]  # SmolLM2-135M
    assert legal_degrees(None, None, 10) == [1, 2, 5, 10]
    assert len(tp_faults(5, 12, 6, 13)) == 2 and not tp_faults(8, None, 4, None)


@pytest.mark.parametrize(
    "patterns, wrong",
    [
        ([], []),
        (["model.layers.0.*", "lm_head.*"], []),
        (["model.layer.0.*"], ["'model.layer.0.*' matches none of the model's 3 tensors"]),
        (["model.layers.0.*", "x*", "y*"], ["'x*' matches none", "'y*' matches none"]),
        (["*"], ["all 3 tensors are frozen"]),
        (["model.*", "lm_head.weight"], ["all 3 tensors are frozen"]),
    ],
)
def test_freezing_nothing_or_everything_is_refused(patterns: list[str], wrong: list[str]) -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    errors = freeze_errors(patterns, names)
    assert len(errors) == len(wrong) and all(w in e.rule for w, e in zip(wrong, errors))
