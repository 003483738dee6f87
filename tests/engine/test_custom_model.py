"""The bring-your-own-model example: every layout of it trains as a plain torch model of the same kind does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine_kit import assemble, shards
from tests.harness import run_ranks
from tests.kit import Recipe, reference

ROOT = Path(__file__).parents[2]
RECIPE = Recipe("adamw", lr=1e-2, clip=1.0, weight_decay=0.1, eps=1e-3, steps=4)
HIDDEN, HEADS, LAYERS, VOCAB, PLACES = 256, 8, 4, 259, 2048  # of examples/models/tiny-qwen3


class Block(nn.Module):
    """A GPT-2 block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN) for name in ("q", "k", "v", "out")})
        self.mlp = nn.ModuleDict({"up": nn.Linear(HIDDEN, 4 * HIDDEN), "down": nn.Linear(4 * HIDDEN, HIDDEN)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        q, k, v = (self.attn[n](y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        scores = (q @ k.transpose(-1, -2)) / (HIDDEN // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        x = x + self.attn["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.ln_2(x))))


class Twin(nn.Module):
    """The example's model in torch's own layers, with its names."""

    def __init__(self, weights: dict[str, Any]):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(PLACES, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})

    def forward(self, ids: Tensor, position_ids: Tensor | None) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]) if position_ids is None else position_ids)
        for block in self.h:
            x = block(x)
        return SimpleNamespace(logits=self.lm_head(self.ln_f(x)))


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("custom_model", ROOT / "examples/custom_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_model"] = module
    spec.loader.exec_module(module)
    return module


def _rank(rank: int, words: list[str]) -> Any:
    """The example's `main`, watched: start weights, every batch's documents, every result."""
    import hybrid5d

    seen: dict[str, Any] = {"rows": [], "results": []}
    initialize = hybrid5d.initialize

    def watched(*args: Any, **options: Any) -> Any:
        engine = initialize(*args, **options)
        seen["start"], train = shards(engine.module, lambda p: p), engine.train_batch

        def train_batch(batch: Any) -> Any:
            seen["rows"].append([d for mb in batch.micro_batches for row in mb for d in row])
            seen["results"].append(train(batch))
            return seen["results"][-1]

        engine.train_batch = train_batch
        return engine

    hybrid5d.initialize = watched
    assert _example().main(str(ROOT / "examples/quickstart.yaml"), *words) == [r.loss for r in seen["results"]]
    return seen


def _words(cache_dir: Path, tp: int, pp: int, cp: int, sp: bool) -> list[str]:
    optim = {"lr": RECIPE.lr, "adam_eps": RECIPE.eps, "weight_decay": RECIPE.weight_decay, "clip_grad": RECIPE.clip}
    return [
        f"actor.model.tensor_model_parallel_size={tp}", f"actor.model.pipeline_model_parallel_size={pp}",
        f"actor.model.context_parallel_size={cp}", f"actor.model.sequence_parallel={str(sp).lower()}",
        f"runner.max_steps={RECIPE.steps}", "runner.seq_length=48", "actor.lr_sched.lr_warmup_iters=0",
        "actor.lr_sched.lr_decay_style=constant", f"data.cache_dir={cache_dir}",
        f"data.train_data_paths=[{ROOT}/hybrid5d/plan/*.py]", *(f"actor.optim.{k}={v}" for k, v in optim.items()),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    "tp,pp,cp,dp,sp",
    [(1, 1, 1, 1, False), (2, 2, 2, 1, True), (1, 1, 1, 2, False), (2, 1, 1, 1, False), (4, 1, 1, 1, True)],
)
def test_a_custom_model_trains_as_its_plain_twin(tp: int, pp: int, cp: int, dp: int, sp: bool, cache_dir: Path) -> None:
    ranks = run_ranks(tp * pp * cp * dp, _rank, _words(cache_dir, tp, pp, cp, sp))
    twin = Twin(assemble([r["start"] for r in ranks]))
    unique = [{d.row_id: d for r in ranks for d in r["rows"][step]} for step in range(RECIPE.steps)]
    want = reference(twin, [list(rows.values()) for rows in unique], RECIPE)
    assert want.losses[-1] < want.losses[0] - 0.1  # it learns
    for rank in ranks:
        assert [r.loss for r in rank["results"]] == pytest.approx(want.losses, abs=2e-5)
        assert [r.grad_norm for r in rank["results"]] == pytest.approx(want.norms, rel=2e-5)
