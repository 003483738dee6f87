"""The bring-your-own-model example: every layout of it computes what one process computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("custom_model", ROOT / "examples/custom_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_model"] = module
    spec.loader.exec_module(module)
    return module


def _rank(rank: int, words: list[str]) -> list[float]:
    return _example().main(str(ROOT / "examples/quickstart.yaml"), *words)


def _words(tmp_path: Path, tp: int, pp: int, cp: int, sp: bool) -> list[str]:
    return [
        f"actor.model.tensor_model_parallel_size={tp}", f"actor.model.pipeline_model_parallel_size={pp}",
        f"actor.model.context_parallel_size={cp}", f"actor.model.sequence_parallel={str(sp).lower()}",
        "runner.max_steps=4", "runner.seq_length=48", "actor.lr_sched.lr_warmup_iters=0", "actor.optim.lr=1e-3",
        f"data.cache_dir={tmp_path / 'cache'}", f"data.train_data_paths=[{ROOT / 'hybrid5d/plan'}]",
    ]  # fmt: skip


@pytest.mark.parametrize("tp,pp,cp,dp,sp", [(2, 2, 2, 1, True), (1, 1, 1, 2, False), (2, 1, 1, 1, False)])
def test_layouts_of_a_custom_model(tp: int, pp: int, cp: int, dp: int, sp: bool, tmp_path: Path) -> None:
    (want,) = run_ranks(1, _rank, _words(tmp_path, 1, 1, 1, False))
    assert want[-1] < want[0] - 0.1  # it learns
    for got in run_ranks(tp * pp * cp * dp, _rank, _words(tmp_path, tp, pp, cp, sp)):
        assert got == pytest.approx(want, abs=2e-5)
