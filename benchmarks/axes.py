"""What each axis costs: the plain loop, hybrid5d and the peers of that axis, same weights, same rows, taking turns.

    python benchmarks/axes.py [--axes tp pp] [--peers-on gloo shm] [--rounds 5] [--rows 8] [--seq-length 512]
                              [--json FILE] [--quick]

The plain loop is transformers' Llama and torch's AdamW in one process with 2 threads; every other side is 2 ranks with
1 thread each (axis `one`: one process with 2). 8 layers, hidden 512, 8 heads, 4 kv heads, MLP 1408, vocabulary 8192, 8
rows of 512 tokens in 8 micro-batches, fp32, AdamW. Long rows: --axes cp --rows 1 --seq-length 4096.

All sides of an axis live at the same time and take turns, one optimizer step each, in an order that moves on by one
each round, so that a machine that slows down does so for all. Losses and norms must be equal. Ratios are medians over
rounds of a side's step beside the plain loop's in the same round; the range is that of the rounds. CPU-seconds are
those of all threads of all ranks, memory is the highest of a rank's step less what its imports took. hybrid5d's ranks
talk over its shared memory, as they do by default; peers over what `--peers-on` says, one run for each. A peer that
does not run is listed with its error. `--json` keeps what a file has of other axes; report.py makes a page of it.
`--quick` is a small model for one round: it shows that everything runs and is equal, its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from peers import PEERS
from sides import Side, SideFailed, answer

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 65536, "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
QUICK = {**MODEL, "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 8}

# Imported by every side before memory counts: what some of them would import during their first step.
LATE = (
    "torch._dynamo", "deepspeed.runtime.zero.muon.original_muon", "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops", "hybrid5d.engine.build",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip

PLAIN = "plain"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2-wide": {"pipeline_model_parallel_size": 2, "pipeline_warmup": "wide"},
    "pp2-cost": {"pipeline_model_parallel_size": 2, "pipeline_partition": "cost"},
    "pp2-gpipe": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "gpipe"},
    "pp2-interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp2-zb-h1": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "pp2-zbv": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "pipeline_partition": "cost"},
    "cp2": {"context_parallel_size": 2},
    "cp2-a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "cp2-gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "dp2": {},
}


@dataclass(frozen=True)
class Axis:
    """Sides of a table: layouts of ours, peers."""

    ours: tuple[str, ...]
    peers: tuple[str, ...] = ()


AXES = {
    "one": Axis(("one",)),
    "tp": Axis(("tp2",), ("torch-dtensor", "deepspeed-autotp", "megatron-tp")),
    "sp": Axis(("tp2+sp",), ("torch-dtensor-sp", "megatron-sp")),
    "pp": Axis(
        ("pp2", "pp2-wide", "pp2-interleaved", "pp2-zb-h1", "pp2-zbv"),
        ("torch-1f1b", "torch-interleaved", "torch-zbv", "deepspeed-1f1b"),
    ),
    "cp": Axis(("cp2", "cp2-a2a", "cp2-gather"), ("torch-ring", "deepspeed-ulysses")),
    "dp": Axis(("dp2",), ("torch-zero1", "deepspeed-zero1")),
}
LOSS, NORM = 1e-4, 1e-3  # absolute, relative


@dataclass(frozen=True)
class Shape:
    """Rows of the global batch, one a micro-batch, and their length."""

    rows: int = 8
    length: int = 512


# --- one rank -------------------------------------------------------------------------------------------------------


def rows_of(vocabulary: int, shape: Shape) -> Any:
    """The global batch, [rows, length] ids."""
    import numpy as np

    return np.random.default_rng(0).integers(0, vocabulary, (shape.rows, shape.length))


def plain_step(folder: str, rows: Any) -> Callable[[], tuple[float, float]]:
    """The loop anyone would write: a micro-batch a row, token mean over the batch, clipping, AdamW as in the YAML."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    rows = torch.from_numpy(rows)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        total, tokens = 0.0, rows.shape[0] * (rows.shape[1] - 1)
        for row in rows:
            logits = model(row[None]).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total, norm.item()

    return step


def engine_step(folder: str, layout: str, rows: Any) -> Callable[[], tuple[float, float]]:
    """One optimizer step of this rank's engine."""
    from hybrid5d import initialize
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.data.types import Document, StepBatch, shift_labels
    from hybrid5d.plan.run import build_plan

    count, length = rows.shape
    config = RunConfig.model_validate({
        "runner": {"task_type": "sft", "max_steps": 100, "seq_length": length},
        "data": {"type": "tokens"},
        "actor": {
            "micro_batch_size": 1, "global_batch_size": count,
            "model": {"model_path": folder, **LAYOUTS[layout]},
            "optim": {"lr": 1e-4}, "lr_sched": {"lr_decay_style": "constant"},
        },
    })  # fmt: skip
    engine = initialize(build_plan(config, int(os.environ.get("WORLD_SIZE", "1")), "translate"))
    documents = [Document(row, shift_labels(row), i) for i, row in enumerate(rows)]
    mine = documents[engine.ctx.dp.rank :: engine.ctx.dp.size]
    batch = StepBatch(tuple(((d,),) for d in mine), tuple(range(count)))

    def step() -> tuple[float, float]:
        result = engine.train_batch(batch)
        return result.loss, result.grad_norm

    return step


def peer_step(folder: str, name: str, rows: Any) -> Callable[[], tuple[float, float]]:
    """One optimizer step of a peer, over the backend in PEER_BACKEND."""
    import torch
    import torch.distributed as dist

    import hybrid5d.shared_memory  # noqa: F401  registers its backend

    dist.init_process_group(os.environ["PEER_BACKEND"])
    module = importlib.import_module(f"peers.{PEERS[name].module}")
    return module.build(folder, PEERS[name].variant, torch.from_numpy(rows))


def rank_main(folder: str, side: str, shape: Shape) -> None:
    """Answer lines of standard input with steps."""
    rows = rows_of(json.loads(Path(folder, "config.json").read_text())["vocab_size"], shape)
    build = plain_step if side == PLAIN else engine_step if side in LAYOUTS else peer_step
    for name in (*LATE, *([f"peers.{PEERS[side].module}"] if side in PEERS else ())):
        importlib.import_module(name)
    answer(lambda: build(folder, side, rows) if build is not plain_step else plain_step(folder, rows))


# --- all sides ------------------------------------------------------------------------------------------------------


def save_model(folder: str, model: dict[str, Any] = MODEL) -> None:
    """Random weights that every side reads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def start(folder: str, name: str, shape: Shape, transport: str) -> Side:
    """A side's ranks; a peer's talk over `transport`."""
    words = [__file__, "--rank", folder, name, str(shape.rows), str(shape.length)]
    return Side.start(words, 1 if name in (PLAIN, "one") else 2, {"PEER_BACKEND": transport})


def compare(folder: str, axis: Axis, transport: str, rounds: int, shape: Shape) -> dict[str, Any]:
    """What each side took over `rounds` turns after one to warm up, by side; `error` where it did not run."""
    sides: dict[str, Side] = {}
    turns: dict[str, list[dict[str, Any]]] = {}
    errors: dict[str, str] = {}

    def turn(name: str) -> None:
        try:
            took = sides[name].step()
        except SideFailed as error:
            if name == PLAIN or name in LAYOUTS:
                raise
            errors[name] = str(error)
            sides.pop(name).stop()
            return
        turns.setdefault(name, []).append(took)
        (loss, norm), (loss_1, norm_1) = took["value"], turns[PLAIN][len(turns[name]) - 1]["value"]
        if abs(loss - loss_1) > LOSS or abs(norm / norm_1 - 1) > NORM:
            errors.setdefault(name, f"loss and norm {loss}, {norm} instead of {loss_1}, {norm_1}")

    try:
        for name in (PLAIN, *axis.ours, *axis.peers):
            sides[name] = start(folder, name, shape, transport)
            turn(name)
        for i in range(rounds):
            others = [name for name in sides if name != PLAIN]
            turn(PLAIN)
            for name in others[i % len(others) :] + others[: i % len(others)]:
                turn(name)
    finally:
        for side in sides.values():
            side.stop()
    plain = turns[PLAIN][1:]
    return {
        name: {"error": errors[name]}
        if name in errors
        else summary(turns[name][1:], plain, _transport(name, transport))
        for name in (PLAIN, *axis.ours, *axis.peers)
    }


def _transport(name: str, peers_on: str) -> str:
    return "none" if name in (PLAIN, "one") else "shm" if name in LAYOUTS else peers_on


def summary(turns: list[dict[str, Any]], plain: list[dict[str, Any]], transport: str) -> dict[str, Any]:
    """Medians of a side's turns, and of their ratios to the plain loop's turns of the same rounds."""
    speed = sorted(p["wall"] / t["wall"] for t, p in zip(turns, plain))
    cpu = sorted(t["cpu"] / p["cpu"] for t, p in zip(turns, plain))
    return {
        "transport": transport,
        "speed": round(statistics.median(speed), 3),
        "speed_range": [round(speed[0], 3), round(speed[-1], 3)],
        "cpu": round(statistics.median(cpu), 3),
        "cpu_range": [round(cpu[0], 3), round(cpu[-1], 3)],
        "wall_s": round(statistics.median(t["wall"] for t in turns), 3),
        "cpu_s": round(statistics.median(t["cpu"] for t in turns), 3),
        "peak_mb": round(max(t["peak"] for t in turns)),
        "faults": round(statistics.median(t["faults"] for t in turns)),
    }


def label(name: str) -> str:
    """A side's name in tables."""
    if name == PLAIN:
        return "plain loop"
    return PEERS[name].label if name in PEERS else f"hybrid5d {name}"


def show(axis: str, transport: str, sides: dict[str, Any]) -> None:
    """The table of one run."""
    print(f"\n{axis}, peers on {transport}")
    print(f"{'':<38}{'speed':>7}{'range':>15}{'CPU':>7}{'range':>15}{'MB':>7}{'faults':>9}  transport")
    for name, r in sides.items():
        if "error" in r:
            print(f"{label(name):<38}{r['error']}")
            continue
        ranges = [f"{low:.2f}-{high:.2f}" for low, high in (r["speed_range"], r["cpu_range"])]
        print(
            f"{label(name):<38}{r['speed']:>7.3f}{ranges[0]:>15}{r['cpu']:>7.3f}{ranges[1]:>15}"
            f"{r['peak_mb']:>7}{r['faults']:>9}  {r['transport']}",
            flush=True,
        )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for name in ("torch", "deepspeed", "transformers", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"cores": os.cpu_count(), **versions}


def keep(file: Path, shape: Shape, run: dict[str, Any]) -> None:
    """Put a run into a file in the place of the one of the same axis, transport and shape."""
    results = json.loads(file.read_text()) if file.exists() else {"runs": []}
    same = ("axis", "peers_on", "shape")
    run = {**run, "shape": asdict(shape), "machine": machine()}
    results["runs"] = [r for r in results["runs"] if any(r[k] != run[k] for k in same)] + [run]
    results["runs"].sort(key=lambda r: (list(AXES).index(r["axis"]), r["peers_on"], r["shape"]["length"]))
    file.write_text(json.dumps(results, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Words of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="turns that count (5; --quick: 1)")
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--peers-on", nargs="+", choices=["gloo", "shm"], default=["gloo", "shm"])
    parser.add_argument("--rows", type=int, help="rows of the global batch")
    parser.add_argument("--seq-length", type=int, help="tokens a row")
    parser.add_argument("--json", type=Path, help="keep the numbers in a file")
    parser.add_argument("--quick", action="store_true", help="a small model, for one round")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Compare the sides of each axis; 1 where one of ours has other numbers than the plain loop."""
    args = parse()
    if args.rank:
        folder, side, rows, length = args.rank
        rank_main(folder, side, Shape(int(rows), int(length)))
        return 0
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    shape = Shape(args.rows or 8, args.seq_length or (64 if args.quick else 512))
    rounds, wrong = args.rounds or (1 if args.quick else 5), []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, QUICK if args.quick else MODEL)
        for axis in args.axes:
            for transport in args.peers_on if AXES[axis].peers else args.peers_on[:1]:
                load = os.getloadavg()[0]
                sides = compare(folder, AXES[axis], transport, rounds, shape)
                show(axis, transport, sides)
                wrong += [name for name in AXES[axis].ours if "error" in sides[name]]
                if args.json:
                    keep(
                        args.json,
                        shape,
                        {
                            "axis": axis,
                            "peers_on": transport,
                            "rounds": rounds,
                            "load": [load, os.getloadavg()[0]],
                            "sides": sides,
                        },
                    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
