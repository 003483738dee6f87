"""Time to load a model's weights into N ranks, against one safetensors read of the same file.

    python benchmarks/load_weights.py [--model .cache/smollm2] [--layouts tp3-pp2 tp3 pp6 dp6] [--repeat 5]

The reference is what a single process must do to have the weights in memory of its own: open the file with safetensors,
get every tensor, copy it. Ranks run at the same time and are timed from a barrier to the last one's end; the model is
built before, as in a run. Memory is first touched inside the timed part and the file is in the page cache in both.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.harness import run_ranks  # noqa: E402


def _reference(rank: int, folder: str, repeat: int) -> list[float]:
    import torch
    from safetensors import safe_open

    path, times = Path(folder) / "model.safetensors", []
    for _ in range(repeat):
        started = time.perf_counter()
        with safe_open(path, framework="pt") as f:
            held = {name: torch.clone(f.get_tensor(name)) for name in f.keys()}  # noqa: SIM118
        times.append(time.perf_counter() - started)
        del held
    return times


def _load(rank: int, folder: str, degrees: dict[str, int], repeat: int) -> list[tuple[float, int]]:
    import torch.distributed as dist
    from torch import nn

    from hybrid5d.checkpoint.start_weights import load_hf_weights
    from hybrid5d.context_parallel import ContextParallelAttention
    from hybrid5d.hf.spec import parse_hf_config
    from hybrid5d.models.decoder import decoder_layers
    from hybrid5d.parallel.context import ParallelContext
    from hybrid5d.plan.layout import ParallelLayout

    spec = parse_hf_config(json.loads((Path(folder) / "config.json").read_text()))
    ctx = ParallelContext.create(ParallelLayout(**degrees))
    layers = decoder_layers(spec, ctx, lambda: ContextParallelAttention(ctx.cp))
    share = len(layers) / ctx.pp.size
    mine = layers[round(ctx.pp.rank * share) : round((ctx.pp.rank + 1) * share)]
    found = []
    for _ in range(repeat):
        tied: dict[str, nn.Module] = {}
        built = [tied.setdefault(layer.tied or f"{i}", layer.build()) for i, layer in enumerate(mine)]
        module = nn.ModuleList(built)
        dist.barrier()
        started = time.perf_counter()
        report = load_hf_weights(module, folder, spec)
        dist.barrier()
        found.append((time.perf_counter() - started, report.bytes_read))
    return found


def measure(folder: Path, degrees: dict[str, int], repeat: int) -> dict[str, Any]:
    """Best of `repeat` for the reference and the ranks, and the bytes ranks read."""
    world = 1
    for n in degrees.values():
        world *= n
    reference = min(run_ranks(1, _reference, str(folder), repeat)[0])
    ranks = run_ranks(world, _load, str(folder), degrees, repeat)
    best = min(max(r[i][0] for r in ranks) for i in range(repeat))
    read = [r[0][1] for r in ranks]
    size = (folder / "model.safetensors").stat().st_size
    return {
        "read_s": reference, "load_s": best, "ratio": best / reference,
        "largest_share": max(read) / size, "all_reads": sum(read) / size,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2")
    parser.add_argument("--layouts", nargs="+", default=["tp3-pp2", "tp3", "pp6", "dp6"])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    if not (args.model / "model.safetensors").is_file():
        raise SystemExit(f"{args.model} has no model.safetensors: make smollm2")
    print(f"{'layout':>10} {'one read':>10} {'all ranks':>10} {'ratio':>6}  largest share of a rank, sum of shares")
    for text in args.layouts:
        degrees = {axis: int(n) for axis, n in re.findall(r"(tp|pp|cp|dp)(\d+)", text)}
        r = measure(args.model, degrees, args.repeat)
        numbers = f"{r['read_s']:9.3f}s {r['load_s']:9.3f}s {r['ratio']:6.2f}"
        print(f"{text:>10} {numbers}  {r['largest_share']:.2f}, {r['all_reads']:.2f}")


if __name__ == "__main__":
    main()
