"""Copies that must be equal: one flipped bit, two swapped rows or a master apart is named; clean steps are quiet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid5d.checkpoint.manifest import WEIGHT
from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from hybrid5d.engine.replicas import Held, checksum, differing
from hybrid5d.parallel.shard import pieces_of
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import Recipe, make_rows, step_batch

ADAM = Recipe(optimizer="adamw", lr=0.05, clip=0.9)
Plant = tuple[int, str, str]  # rank, what is changed ("weight", "swap", "frozen", "master", moment), tensor


def _param(engine: Any, name: str) -> Any:
    return next(p for p in engine.module.parameters() if name in (piece.name for piece in pieces_of(p)))


def _flip(x: Tensor) -> Callable[[], None]:
    """Flip the lowest bit of the mantissa's highest byte of the last element, and how to undo it."""
    raw = x.detach().view(-1)[-1:].view(torch.uint8)

    def flip() -> None:
        raw[-2] ^= 1

    flip()
    return flip


def _change(engine: Any, what: str, name: str) -> Callable[[], None]:
    param = _param(engine, name)
    state = OptimizerState(engine.ds.optimizer, engine.ctx.dp_cp)
    if what == "swap":
        rows = param.detach()

        def swap() -> None:
            rows[[0, 1]] = rows[[1, 0]]

        swap()
        return swap
    if what == "weight":
        piece = next(p for p in pieces_of(param) if p.name == name)
        return _flip(param.ds_tensor if hasattr(param, "ds_tensor") else piece.local_view(param.detach()).select(0, 0))
    fragment = state.fragment(param, WEIGHT if what == "master" else what)
    assert fragment is not None
    return _flip(fragment.values)


def _faults(rank: int, layout: Layout, folder: str, plants: list[Plant], save: str) -> list[list[str]]:
    """What is said after clean steps, after each change (undone again), and after a resume."""
    engine = build_engine(layout, ADAM, folder, 8)
    said = [engine.replica_faults()]
    for step in range(3):
        rows = make_rows(8, 24, 101, seed=step + 1)
        engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro))
        said.append(engine.replica_faults())
    engine.save_checkpoint(save)
    engine.load_checkpoint(save)
    said.append(engine.replica_faults())
    for where, what, name in plants:
        undo = _change(engine, what, name) if where == rank else lambda: None
        said.append(engine.replica_faults())
        undo()
    return [*said, engine.replica_faults()]


N, K, O = (f"model.layers.0.{x}.weight" for x in ("input_layernorm", "self_attn.k_proj", "self_attn.o_proj"))
E = "model.embed_tokens.weight"
CASES: list[tuple[Layout, list[tuple[Plant, tuple[str, ...]]]]] = [
    (
        Layout(tp=4, sp=True),
        [
            ((2, "weight", N), (f"weight of {N}: rank 2 against ranks 0, 1, 3",)),
            ((3, "exp_avg", N), (f"exp_avg of {N}, elements 0 to ", ": rank 3 against ranks 0 to 2")),
            ((1, "weight", K), (f"weight of {K}: rank 0 against rank 1, and nothing says which is right",)),
            ((1, "weight", O), (f"weight of {O}: rank 1's is not its own master's",)),
        ],
    ),
    (
        Layout(pp=2, dp=2, precision="bf16"),
        [
            ((3, "weight", E), (f"weight of {E}: rank 3 against ranks 0 to 2",)),
            ((0, "swap", O), (f"weight of {O}: rank 0 against rank 1",)),
            ((3, "master", "model.layers.3.mlp.down_proj.weight"), ("rank 3's is not its own master's",)),
        ],
    ),
    (
        Layout(tp=2, dp=2, zero=3, precision="bf16"),
        [
            ((2, "weight", N), (f"weight of {N}, elements ", ": rank 2 against rank 3, and nothing says")),
            ((1, "weight", O), (f"weight of {O}: rank 1's is not its own master's",)),
        ],
    ),
    (Layout(cp=2, zero=2), [((1, "weight", O), (f"weight of {O}: rank 0 against rank 1",))]),
]


@pytest.mark.parametrize(
    "layout,plants",
    [pytest.param(*c, id=str(c[0]), marks=[pytest.mark.full] if c[0].zero > 1 else []) for c in CASES],
)
def test_a_change_on_one_rank_is_named_and_clean_steps_are_quiet(
    layout: Layout, plants: list[tuple[Plant, tuple[str, ...]]], folders: dict[str, Path], tmp_path: Path
) -> None:
    asked = [plant for plant, _ in plants]
    reports = run_ranks(layout.world, _faults, layout, str(folders["qwen3"]), asked, str(tmp_path), timeout=240)
    assert all(report == reports[0] for report in reports)
    assert reports[0][:5] == [[]] * 5 and reports[0][-1] == []
    for said, (plant, expected) in zip(reports[0][5:-1], plants, strict=True):
        assert all(any(word in line for line in said) for word in expected), (plant, said)


def test_the_odd_rank_is_named_only_where_more_agree() -> None:
    x, y = (Held("weight", ((name, None, 0, 3),)) for name in "xy")
    assert differing([{x: 1}, {x: 1, y: 5}, {x: 2, y: 5}]) == ["weight of x: rank 2 against ranks 0 to 1"]
    tie = differing([{x: 1}, {x: 2}, {x: 1}, {x: 2}])
    assert tie == ["weight of x: ranks 0, 2 against ranks 1, 3, and nothing says which is right"]
    assert differing([{x: 1}, {y: 2}]) == []


def test_the_checksum_is_of_bits_in_order() -> None:
    x = torch.tensor([1.0, 2.0, 0.0])
    assert checksum(x) == checksum(x.clone()) != checksum(x[[1, 0, 2]])
    assert checksum(x) != checksum(torch.tensor([1.0, 2.0, -0.0]))
