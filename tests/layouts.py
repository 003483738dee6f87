"""The layouts that are trained: what may vary, what may go together, and how much of it each make target takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tests.covering import Row, covering
from tests.engine_kit import Layout
from tests.kit import Recipe

RECIPES = {
    "sgd": Recipe(lr=0.5),
    "sgd-clip": Recipe(lr=0.5, clip=0.4),
    "adamw": Recipe("adamw", lr=1e-2, eps=1e-3, weight_decay=0.1, clip=1.0),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "cp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4),
    "sp": (False, True),
    "zero": (1, 0, 2, 3),
    "method": ("-", "p2p", "a2a", "a2a+p2p", "all_gather"),
    "micro": (1, 2, 4),
    "recipe": tuple(RECIPES),
    "model": ("llama_bias", "qwen2", "qwen3", "mistral_window", "llama3"),
    "precision": ("fp32", "bf16"),
    "packing": ("none", "documents"),
    "recompute": tuple(RECOMPUTE),
    "schedule": ("1f1b", "wide", "gpipe", "interleaved", "zb-h1", "zbv"),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "wide": {"pipeline_warmup": "wide"},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved": {"pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv"},
}
STEADY = {"fp32": 1.0, "bf16": 0.2}  # of the learning rate: at 0.5 SGD swings, which enlarges rounding step by step
HEADS = 4  # of every test model, with 2 kv heads and 4 layers


def recipe_of(name: str, precision: str) -> Recipe:
    """The optimizer of a run in a precision."""
    return replace(RECIPES[name], lr=RECIPES[name].lr * STEADY[precision])


def rows_per_batch(dp: int) -> int:
    """Global batch size: 8, or two rows a dp rank where 8 is no multiple."""
    return 8 if 8 % dp == 0 else 2 * dp


def allowed(row: Row) -> bool:
    """May these values go together? A row may lack factors; what is missing forbids nothing."""
    tp, pp, cp, dp = (row.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    if tp * pp * cp * dp > 8:
        return False
    if row.get("sp") and row.get("tp") == 1:
        return False  # SP shares the tp group
    if row.get("zero", 1) >= 2 and pp > 1:
        return False  # ZeRO 2 and 3 reduce while backward runs
    schedule = row.get("schedule", "1f1b")
    if schedule not in ("1f1b", "wide") and row.get("zero", 1) >= 2:
        return False  # they run micro-batches one by one
    if schedule in ("interleaved", "zbv") and pp > 3:
        return False  # 4 layers, embedding and head are 6 stages
    if "method" in row and "cp" in row and (row["method"] == "-") != (cp == 1):
        return False
    if row.get("method") == "a2a" and HEADS % (tp * cp):
        return False  # Ulysses deals the heads of a tp rank to cp ranks
    if row.get("method") == "a2a+p2p" and (row.get("cp", 4) != 4 or tp > 2):
        return False  # [2, 2]: a real hybrid
    return not ("micro" in row and "dp" in row) or rows_per_batch(dp) // dp % row["micro"] == 0


@dataclass(frozen=True)
class Case:
    """One training run: a layout, a model family, a recipe."""

    layout: Layout
    model: str
    recipe: str

    def __str__(self) -> str:
        return f"{self.layout}-{self.model}-{self.recipe}"


def case(row: Row) -> Case:
    """The run that a row of values stands for."""
    model = {**RECOMPUTE[row["recompute"]], **SCHEDULES[row["schedule"]]}
    if row["cp"] > 1:
        model["cp_comm_type"] = row["method"]
    if row["method"] == "a2a+p2p":
        model["hierarchical_context_parallel_sizes"] = [2, 2]
    same = ("tp", "pp", "cp", "dp", "sp", "micro", "zero", "precision", "packing")
    return Case(Layout(**{name: row[name] for name in same}, model=model), row["model"], row["recipe"])


@cache
def rows(strength: int) -> tuple[Row, ...]:
    """Rows in which every allowed pair (2) or triple (3) of values occurs."""
    return tuple(covering(FACTORS, allowed, strength, tries={2: 8, 3: 2}[strength]))


def cases(strength: int) -> list[Case]:
    """The runs of `rows`."""
    return [case(row) for row in rows(strength)]


def axes() -> list[Layout]:
    """Every (tp, pp, cp, dp, sp) of up to 8 ranks that 4 heads and 4 layers allow (a stage may hold no layer)."""
    found = []
    for tp in (1, 2, 4):
        for pp in range(1, 7):
            for cp in range(1, 9):
                for dp in range(1, 9):
                    if tp * pp * cp * dp <= 8:
                        micro = 2 if 8 % (2 * dp) == 0 else 1
                        found += [Layout(tp, pp, cp, dp, sp, micro) for sp in ((False, True) if tp > 1 else (False,))]
    return found
