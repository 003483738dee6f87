"""Memory of a training step by layout: the most bytes of tensors alive on a rank, beside one process of the plain loop.

python benchmarks/memory.py [--layouts tp2 "tp2 cp2 pp2"] [--seq-length 512] [--precision bf16]
                            [--json FILE]

The model, rows and optimizer of axes.py. Counted by torch's profiler in the second step, from before the model is
built, so the numbers do not depend on what else the machine does; Python, libraries and shared memory come on top.
`planned` is what `hybrid5d plan` says of a step on the rank that takes most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axes import MODEL, Shape, plain_step, rows_of, save_model

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
SP = {"sequence_parallel": True}
# name: ranks, actor.model, ZeRO stage
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one": (1, {}, 1),
    "tp2": (2, {TP: 2}, 1),
    "tp2+sp": (2, {TP: 2, **SP}, 1),
    "pp2": (2, {PP: 2}, 1),
    "pp2 gpipe": (2, {PP: 2, "pipeline_schedule": "gpipe"}, 1),
    "pp2 zbv": (2, {PP: 2, "pipeline_schedule": "zbv"}, 1),
    "cp2": (2, {CP: 2}, 1),
    "dp2 zero1": (2, {}, 1),
    "dp2 zero2": (2, {}, 2),
    "dp2 zero3": (2, {}, 3),
    "tp2+sp pp2 cp2": (8, {TP: 2, PP: 2, CP: 2, **SP}, 1),
    "tp2+sp pp2 dp2 zero1": (8, {TP: 2, PP: 2, **SP}, 1),
}
PLAIN = "plain"


def config_of(folder: str, layout: str, shape: Shape, precision: str) -> dict[str, Any]:
    """The YAML of a layout as a mapping."""
    _, model, zero = LAYOUTS[layout]
    return {
        "runner": {"task_type": "sft", "max_steps": 100, "seq_length": shape.length},
        "data": {"type": "tokens"},
        "actor": {
            "micro_batch_size": 1, "global_batch_size": shape.rows,
            "model": {"model_path": folder, "precision": precision, **model},
            "optim": {"lr": 1e-4}, "lr_sched": {"lr_decay_style": "constant"},
            "deepspeed": {"zero_optimization": {"stage": zero}},
        },
    }  # fmt: skip


def planned(folder: str, layout: str, shape: Shape, precision: str) -> int:
    """Bytes that `plan` says of the fullest rank."""
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.plan.hardware import load_hardware
    from hybrid5d.plan.job import job_of
    from hybrid5d.plan.memory import stage_memory
    from hybrid5d.plan.run import build_plan

    world, model, _ = LAYOUTS[layout]
    config = RunConfig.model_validate(config_of(folder, layout, shape, precision))
    job = job_of(build_plan(config, world, "translate"), 8)
    assert job is not None
    stages = [stage_memory(job, stage, load_hardware("cpu")) for stage in range(model.get(PP, 1))]
    return max(stage.peaks[name] for stage in stages for name in ("step", "optimizer_step"))


def engine_steps(folder: str, layout: str, shape: Shape, precision: str) -> Callable[[], float]:
    """One optimizer step of this rank's engine."""
    from hybrid5d import initialize
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.data.types import Document, StepBatch, shift_labels
    from hybrid5d.plan.run import build_plan

    config = RunConfig.model_validate(config_of(folder, layout, shape, precision))
    engine = initialize(build_plan(config, LAYOUTS[layout][0], "translate"))
    documents = [Document(row, shift_labels(row), i) for i, row in enumerate(rows_of(shape))]
    mine = documents[engine.ctx.dp.rank :: engine.ctx.dp.size]
    batch = StepBatch(tuple(((d,),) for d in mine), tuple(range(shape.rows)))
    return lambda: engine.train_batch(batch).loss


def tensor_bytes(profile: Any) -> tuple[int, int]:
    """(bytes left at the end, most at once) of the CPU tensors that were made under a profile."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return now, most


def measure(rank: int, folder: str, layout: str, shape: Shape, precision: str) -> tuple[int, float]:
    """(most bytes of tensors alive in the second step, its loss) on this rank."""
    import torch

    with torch.profiler.profile(profile_memory=True) as first:
        step = plain_step(folder, shape) if layout == PLAIN else engine_steps(folder, layout, shape, precision)
        step()
    with torch.profiler.profile(profile_memory=True) as second:
        loss = step()
    return tensor_bytes(first)[0] + tensor_bytes(second)[1], loss


def main() -> int:
    """Measure the layouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--rows", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens a row")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="the plain loop is fp32")
    parser.add_argument("--json", type=Path, help="write the numbers to a file")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from hybrid5d.check.ranks import run_ranks

    shape, found = Shape(args.rows, args.seq_length), []
    bound = 1e-4 if args.precision == "fp32" else 1e-2
    print(f"{'layout':<22}{'ranks':>6}{'MiB a rank, most':>18}{'least':>8}{'to plain':>10}{'planned':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for layout in [PLAIN, *args.layouts]:
            world = 1 if layout == PLAIN else LAYOUTS[layout][0]
            answers = run_ranks(world, measure, folder, layout, shape, args.precision, timeout=600)
            most, least = (pick(a for a, _ in answers) for pick in (max, min))
            forecast = None if layout == PLAIN else planned(folder, layout, shape, args.precision)
            found.append({"layout": layout, "ranks": world, "most": most, "least": least, "planned": forecast})
            if abs(answers[-1][1] - (plain := found[0].setdefault("loss", answers[0][1]))) > bound:
                raise SystemExit(f"{layout}: losses differ: {answers[-1][1]} and {plain}")
            text = "" if forecast is None else f"{forecast / 2**20:.0f}"
            print(
                f"{layout:<22}{world:>6}{most / 2**20:>18.0f}{least / 2**20:>8.0f}"
                f"{most / found[0]['most']:>10.2f}{text:>9}",
                flush=True,
            )
    parameters = sum_of_parameters()
    print(f"{parameters:,} parameters, {shape.rows} rows of {shape.length} tokens, {args.precision}, AdamW")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def sum_of_parameters() -> int:
    """Parameters of the model of axes.py."""
    m: dict[str, Any] = MODEL
    hidden, kv = m["hidden_size"], m["num_key_value_heads"] * m["head_dim"]
    layer = 2 * hidden * (hidden + kv) + 3 * hidden * m["intermediate_size"] + 2 * hidden
    return int(m["num_hidden_layers"] * layer + 2 * m["vocab_size"] * hidden + hidden)


if __name__ == "__main__":
    sys.exit(main())
