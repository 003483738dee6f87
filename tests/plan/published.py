"""Published runs (shared/reference: planning/*.tsv, published.tsv) as jobs, and how far the forecast is from them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

from hybrid5d.hf.rope import RopeSpec
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan.hardware import Hardware, load_hardware
from hybrid5d.plan.job import Job
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.plan.run import RecomputePlan
from hybrid5d.plan.stages import split_layers
from hybrid5d.plan.timing import step_time
from tests.config_kit import REPO

REFERENCE = next((p / "shared/reference" for p in REPO.parents if (p / "shared/reference").is_dir()), REPO / "none")
Row = dict[str, str]


@cache
def table(name: str) -> tuple[Row, ...]:
    """Rows of a table, by their `id` column's name; comments left out."""
    lines = [x for x in (REFERENCE / name).read_text().splitlines() if not x.startswith("#")]
    return tuple(csv.DictReader(lines, delimiter="\t"))


def spec_of_row(row: Row) -> ModelSpec:
    """A Llama-shaped decoder with as many weights: `gelu2`'s two matrices of 4h are three of 8h/3."""
    heads, hidden, inner = int(row["heads"]), int(row["hidden"]), int(row["ffn"])
    gelu = row.get("mlp", "gelu2" if inner == 4 * hidden else "swiglu3") == "gelu2"
    return ModelSpec(
        model_type="llama", vocab_size=int(row["vocab"]), hidden_size=hidden,
        intermediate_size=2 * inner // 3 if gelu else inner, num_layers=int(row["layers"]), num_attention_heads=heads,
        num_key_value_heads=int(row["kv_heads"] or heads), head_dim=hidden // heads, rms_norm_eps=1e-5,
        max_position_embeddings=int(row["seq"]), tie_word_embeddings=row.get("tied") == "yes", rope=RopeSpec(),
    )  # fmt: skip


# nanotron's balancing gives stage 0 so many of 24 layers (README of the tables); the rest as even as it goes
NANOTRON = {2: (14, 10), 4: (7, 6, 6, 5), 8: (4, 3, 3, 3, 3, 3, 3, 2), 16: (2,) * 8 + (1,) * 8}


def job_of_row(row: Row) -> Job:
    """The run of a row: blank recomputation, chunks and ZeRO mean none, 1 and 1; fp8 rows are not for this."""
    axes = {a: int(row[a] or 1) for a in ("tp", "cp", "pp", "dp")}
    spec, chunks = spec_of_row(row), int(row["chunks"] or 1)
    micro = int(row["micro_batch"] or 1)
    kind = "interleaved" if chunks > 1 else "1f1b"
    recompute = {"full": RecomputePlan("full", "uniform", 1), "selective": RecomputePlan("selective")}
    stages = split_layers(spec.num_layers, axes["pp"] * chunks)
    if row["source"].startswith("nanotron") and axes["pp"] > 1:
        stages = NANOTRON[axes["pp"]]
    granularity = (row["recompute"] or "none").split(",")[0].split()[0]
    return Job(
        spec, ParallelLayout(**axes), stages,
        Schedule(kind, axes["pp"], chunks), max(int(row["global_batch"]) // (micro * axes["dp"]), 1), micro,
        int(row["seq"]), sp=row["sp"].lower() == "true", zero=max(int(row.get("zero") or 1), 1),
        recompute=recompute.get(granularity, RecomputePlan()), node=8,
    )  # type: ignore[arg-type]  # fmt: skip


def machine(row: Row) -> Hardware:
    """The card; a800 and h800 have NVLink of 400 GB/s both ways, InternEvo 4 x 100 Gb/s a node, torchtitan 2.4 TB/s."""
    name = row["gpu"].lower()
    base = load_hardware({"a800": "a100", "h800": "h100"}.get(name, name))
    if name in ("a800", "h800"):
        return replace(base, link_gbps=200.0)
    if row["source"].startswith("InternEvo"):
        return replace(base, network_gbps=6.25)
    if row["source"].startswith("torchtitan"):
        return replace(base, memory_tbps=2.4, memory_gib=96)
    return base


def short(source: str) -> str:
    """A source's pages are one system: its first word decides, FlagPerf by its framework."""
    if source.startswith("FlagPerf"):
        return "FlagPerf paddle" if "addle" in source else "FlagPerf deepspeed" if "deepspeed" in source else "FlagPerf"
    return source.split()[0].split("/")[0] if not source.startswith("NVIDIA dgxc") else "dgxc"


def throughput() -> list[Row]:
    """16-bit rows with a step time."""
    return [r for r in table("planning/throughput.tsv") if r["precision"] in ("bf16", "fp16") and r["step_s"]]


def ratios(rows: Iterable[Row]) -> dict[str, float]:
    """Planned over published seconds, by row."""
    return {r["id"]: step_time(job_of_row(r), machine(r)).total / float(r["step_s"]) for r in rows}


ATTENTION = "mpt-a100-7b-65536-8"  # a100's attention_efficiency was fitted on it: no test


def fitted(rows: list[Row]) -> tuple[str, float, list[float]]:
    """One factor, fitted on the row in the middle of the source's list; the errors of the others with it."""
    named = rows[len(rows) // 2]["id"]
    found = ratios(rows)
    factor = 1 / found[named]
    return named, factor, [found[r["id"]] * factor - 1 for r in rows if r["id"] not in (named, ATTENTION)]


def tau(a: list[float], b: list[float]) -> float:
    """Kendall's rank correlation; pairs that are equal in either count for nothing."""
    signs = [(x1 - x2) * (y1 - y2) for (x1, y1), (x2, y2) in combinations(zip(a, b), 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def sources() -> dict[str, list[Row]]:
    """Rows by system and card."""
    found: dict[str, list[Row]] = {}
    for row in throughput():
        card = {"a800": "a100", "h800": "h100"}.get(row["gpu"].lower(), row["gpu"].lower())
        found.setdefault(f"{short(row['source'])} {card}", []).append(row)
    return found


def report() -> dict[str, dict[str, Any]]:
    """Per source: rows, the row that was fitted and its factor, part of the others within 15 %, median error, tau."""
    out = {}
    for name, rows in sources().items():
        named, factor, errors = fitted(rows)
        if not errors:
            continue
        per_token = [_per_token(r, float(r["step_s"])) for r in rows]
        planned = [_per_token(r, step_time(job_of_row(r), machine(r)).total) for r in rows]
        out[name] = {
            "rows": len(rows),
            "fitted": named,
            "factor": factor,
            "within": sum(abs(e) <= 0.15 for e in errors) / len(errors),
            "median": statistics.median(map(abs, errors)),
            "tau": tau(per_token, planned),
        }
    return out


def _per_token(row: Row, seconds: float) -> float:
    return seconds * int(row["gpus"]) / (int(row["global_batch"]) * int(row["seq"]))


def grids(key: Callable[[Row], str]) -> dict[str, float]:
    """Tau of the layouts of one model and number of cards."""
    found: dict[str, list[Row]] = {}
    for row in throughput():
        found.setdefault(key(row), []).append(row)
    return {
        name: tau(
            [_per_token(r, float(r["step_s"])) for r in rows],
            [_per_token(r, step_time(job_of_row(r), machine(r)).total) for r in rows],
        )
        for name, rows in found.items()
        if len(rows) >= 4
    }


def main() -> None:
    for name, numbers in report().items():
        shown = " ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        print(f"{name}: {shown}")
    for name, value in grids(lambda r: f"{short(r['source'])} {r['name']} {r['gpus']} {r['gpu']}").items():
        print(f"grid {name}: tau {value:.2f}")


if __name__ == "__main__":
    main()
