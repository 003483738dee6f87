"""Tokens a second of `Engine.generate` beside transformers' `generate` with its cache, in one process with 2 threads.

python benchmarks/generation.py [--rounds 3] [--axes one tp2] [--rows 16] [--prompt 64] [--new 64] [--sample]

The model of axes.py; `one` is one process with 2 threads, tp2, dp2 and pp2 are 2 ranks with 1 thread each. All sides
live at the same time and take turns. Greedy, so that tokens can be compared (`--sample`: at temperature 1, they are
not).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from axes import LAYOUTS, MODEL, PLAIN, save_model
from sides import Side, answer


def prompts_of(rows: int, length: int) -> Any:
    """[rows, length] ids."""
    import numpy as np

    return np.random.default_rng(0).integers(0, MODEL["vocab_size"], (rows, length))


def plain_step(folder: str, rows: int, length: int, new: int, sample: bool) -> Callable[[], float]:
    """transformers, all prompts in one batch."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = GenerationConfig(do_sample=sample, max_new_tokens=new, top_k=0, pad_token_id=0, eos_token_id=None)
    ids = torch.from_numpy(prompts_of(rows, length))

    def step() -> float:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return float(found[:, length:].sum())

    return step


def engine_step(
    folder: str, axis: str, backend: str, rows: int, length: int, new: int, sample: bool
) -> Callable[[], float]:
    """The same by this rank's engine."""
    from hybrid5d import initialize
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.generation import Sampling
    from hybrid5d.plan.run import build_plan

    config = RunConfig.model_validate({
        "runner": {"task_type": "sft", "max_steps": 100, "seq_length": length + new, "cpu_backend": backend},
        "data": {"type": "tokens"},
        "actor": {
            "micro_batch_size": 1, "global_batch_size": 2, "model": {"model_path": folder, **LAYOUTS[axis]},
            "optim": {"lr": 1e-4}, "lr_sched": {"lr_decay_style": "constant"},
        },
    })  # fmt: skip
    engine = initialize(build_plan(config, int(os.environ.get("WORLD_SIZE", "1")), "translate"))
    prompts, sampling = list(prompts_of(rows, length)), Sampling(do_sample=sample, max_new_tokens=new)
    return lambda: float(sum(g.tokens.sum() for g in engine.generate(prompts, sampling)))


def main() -> None:
    """Compare the axes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns that count")
    parser.add_argument("--axes", nargs="+", choices=list(LAYOUTS), default=["one", "tp2", "dp2", "pp2"])
    parser.add_argument("--rows", type=int, default=16, help="prompts, all decoded together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of a response")
    parser.add_argument("--sample", action="store_true", help="draw tokens at temperature 1")
    parser.add_argument("--backend", default="shm", choices=("gloo", "shm"), help="of collectives")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = (args.rows, args.prompt, args.new, args.sample)
    if args.rank:
        folder, axis = args.rank
        answer(lambda: plain_step(folder, *sizes) if axis == PLAIN else engine_step(folder, axis, args.backend, *sizes))
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        words = [__file__, "--rows", str(args.rows), "--prompt", str(args.prompt), "--new", str(args.new)]
        words += ["--backend", args.backend]
        words += ["--sample"] if args.sample else []
        sides = {
            axis: Side.start([*words, "--rank", folder, axis], 1 if axis in (PLAIN, "one") else 2)
            for axis in (PLAIN, *args.axes)
        }
        try:
            turns = [{axis: side.step() for axis, side in sides.items()} for _ in range(args.rounds + 1)][1:]
        finally:
            for side in sides.values():
                side.stop()
    tokens = args.rows * args.new
    print(f"{'':<8}{'tok/s':>8}{'beside transformers':>22}{'CPU-s':>8}  same tokens")
    for axis in sides:
        wall, cpu = (statistics.median(t[axis][kind] for t in turns) for kind in ("wall", "cpu"))
        ratio = statistics.median(t[PLAIN]["wall"] / t[axis]["wall"] for t in turns)
        same = "-" if args.sample else all(t[axis]["value"] == t[PLAIN]["value"] for t in turns)
        print(f"{axis:<8}{tokens / wall:>8.0f}{ratio:>22.2f}{cpu:>8.2f}  {same}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
