"""What each axis costs beside the plain loop: transformers' Llama and torch's AdamW in one process with 2 threads, and
hybrid5d on 2 ranks with 1 thread each (`one`: on one process with 2 threads), on the same weights and rows.

python benchmarks/axes.py [--rounds 5] [--axes tp2 pp2] [--rows 8] [--seq-length 512] [--json FILE]

8 layers, hidden 512, 8 heads, 4 kv heads, MLP 1408, vocabulary 8192, 8 rows of 512 tokens in 8 micro-batches, fp32,
AdamW. Long rows, for the methods of context parallelism: --axes cp2 cp2-a2a cp2-gather --rows 1 --seq-length 4096.
Both sides live at the same time and take turns, one optimizer step each, so that a machine that slows down does so for
both; their losses are compared. CPU-seconds are those of all threads of all ranks. A ratio of them above the bound of
1.35 ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOUND = 1.35
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 65536, "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Rows of the global batch, one a micro-batch, and their length."""

    rows: int = 8
    length: int = 512


PLAIN = "plain"
AXES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "pp2-wide": {"pipeline_model_parallel_size": 2, "pipeline_warmup": "wide"},
    "pp2-cost": {"pipeline_model_parallel_size": 2, "pipeline_partition": "cost"},
    "pp2-gpipe": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "gpipe"},
    "pp2-interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp2-zb-h1": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "pp2-zbv": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "pipeline_partition": "cost"},
    "cp2-a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "cp2-gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
}
USUAL = ("one", "tp2", "tp2+sp", "pp2", "cp2", "dp2")


# --- one rank -------------------------------------------------------------------------------------------------------


def rows_of(shape: Shape) -> Any:
    """The global batch, [rows, length] ids."""
    import numpy as np

    return np.random.default_rng(0).integers(0, MODEL["vocab_size"], (shape.rows, shape.length))


def plain_step(folder: str, shape: Shape) -> Callable[[], float]:
    """The loop anyone would write: a micro-batch a row, token mean over the batch, clipping, AdamW as in the YAML."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    rows = torch.from_numpy(rows_of(shape))

    def step() -> float:
        optimizer.zero_grad()
        total, tokens = 0.0, shape.rows * (shape.length - 1)
        for row in rows:
            logits = model(row[None]).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def engine_step(folder: str, axis: str, world: int, shape: Shape) -> Callable[[], float]:
    """One optimizer step of this rank's engine."""
    from hybrid5d import initialize
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.data.types import Document, StepBatch, shift_labels
    from hybrid5d.plan.run import build_plan

    config = RunConfig.model_validate({
        "runner": {"task_type": "sft", "max_steps": 100, "seq_length": shape.length},
        "data": {"type": "tokens"},
        "actor": {
            "micro_batch_size": 1, "global_batch_size": shape.rows,
            "model": {"model_path": folder, **AXES[axis]},
            "optim": {"lr": 1e-4}, "lr_sched": {"lr_decay_style": "constant"},
        },
    })  # fmt: skip
    engine = initialize(build_plan(config, world, "translate"))
    documents = [Document(row, shift_labels(row), i) for i, row in enumerate(rows_of(shape))]
    mine = documents[engine.ctx.dp.rank :: engine.ctx.dp.size]
    batch = StepBatch(tuple(((d,),) for d in mine), tuple(range(shape.rows)))
    return lambda: engine.train_batch(batch).loss


def rank_main(folder: str, axis: str, shape: Shape) -> None:
    """Answer lines of standard input with steps."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    answer(lambda: plain_step(folder, shape) if axis == PLAIN else engine_step(folder, axis, world, shape))


def answer(build: Callable[[], Callable[[], float]]) -> None:
    """Answer each line of standard input with one step: `{"wall": s, "cpu": s, "loss": x}`."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; the pipe is for answers
    step = build()
    for _ in sys.stdin:
        cpu, wall = _cpu_seconds(), time.perf_counter()
        loss = step()
        took = {"wall": time.perf_counter() - wall, "cpu": _cpu_seconds() - cpu, "loss": loss}
        print(json.dumps(took), file=answers, flush=True)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- both sides -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """The ranks of one layout, waiting for their turn."""

    ranks: list[subprocess.Popen[str]]

    @classmethod
    def start(cls, words: list[str], world: int) -> Side:
        """Start `world` ranks of a Python command that share two threads."""
        port = _free_port()
        common = {
            **os.environ, "OMP_NUM_THREADS": str(2 // world), "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_LOG_LEVEL": "error",
        }  # fmt: skip
        ranks = []
        for rank in range(world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} if world > 1 else {}
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(
                [sys.executable, *words], env={**common, **place}, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL,
                text=True,
            ))  # fmt: skip
        return cls(ranks)

    def step(self) -> dict[str, float]:
        """One optimizer step; CPU-seconds of all ranks, wall time of the slowest."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        answers = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise SystemExit(f"a rank ended with code {rank.wait()}")
            answers.append(json.loads(line))
        return {
            "wall": max(a["wall"] for a in answers),
            "cpu": sum(a["cpu"] for a in answers),
            "loss": answers[0]["loss"],
        }

    def stop(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def save_model(folder: str) -> None:
    """Random weights that every side reads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def compare(folder: str, axis: str, rounds: int, shape: Shape) -> dict[str, Any]:
    """Medians of both sides over `rounds` turns after one to warm up."""

    def start(which: str, world: int) -> Side:
        return Side.start([__file__, "--rank", folder, which, str(shape.rows), str(shape.length)], world)

    one, two = start(PLAIN, 1), start(axis, 1 if axis == "one" else 2)
    try:
        turns = [(one.step(), two.step()) for _ in range(rounds + 1)]
    finally:
        one.stop()
        two.stop()
    for single, ranks in turns:
        if abs(single["loss"] - ranks["loss"]) > 1e-4:
            raise SystemExit(f"{axis}: losses differ: {single['loss']} and {ranks['loss']}")
    middle = {
        f"{side}_{kind}": statistics.median(turn[i][kind] for turn in turns[1:])
        for i, side in enumerate(("one", "two"))
        for kind in ("cpu", "wall")
    }
    cpu = statistics.median(t[1]["cpu"] / t[0]["cpu"] for t in turns[1:])
    speed = statistics.median(t[0]["wall"] / t[1]["wall"] for t in turns[1:])
    return {"axis": axis, "cpu_ratio": cpu, "speed_ratio": speed, **middle}


def main() -> int:
    """Compare the axes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(USUAL))
    parser.add_argument("--rows", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens a row")
    parser.add_argument("--json", type=Path, help="write the numbers to a file")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        folder, axis, rows, length = args.rank
        rank_main(folder, axis, Shape(int(rows), int(length)))
        return 0
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found, shape = [], Shape(args.rows, args.seq_length)
    print(f"{'axis':<12}{'CPU-s/step':>12}{'plain':>8}{'ratio':>8}{'tok/s':>10}{'plain':>8}{'ratio':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for axis in args.axes:
            r = compare(folder, axis, args.rounds, shape)
            found.append(r)
            tokens = shape.rows * shape.length
            print(
                f"{axis:<12}{r['two_cpu']:>12.2f}{r['one_cpu']:>8.2f}{r['cpu_ratio']:>8.2f}"
                f"{tokens / r['two_wall']:>10.0f}{tokens / r['one_wall']:>8.0f}{r['speed_ratio']:>8.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    over = [r["axis"] for r in found if r["cpu_ratio"] > BOUND]
    print(f"above the bound of {BOUND}: {', '.join(over)}" if over else f"all within the bound of {BOUND}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
