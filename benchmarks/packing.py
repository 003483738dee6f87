"""What packing gains on the chat example: useful tokens/s packed and padded, beside the ratio of their fill rates.

    python benchmarks/packing.py [--rounds 7] [--layers 8] [--rows 4] [--data examples/data/chat.jsonl]

SmolLM2's shape, tokenizer and chat template (make smollm2), the first `layers` decoder layers with random weights. One
step is one epoch: padded, `rows` conversations a micro-batch, filled up to the longest of them; packed, rows of up to
seq_length tokens, one a micro-batch. Both run in one process and take turns. Useful tokens are those of the
conversations; the fill rate is useful tokens over the places that the model computes. A gain that differs from the
ratio of the fill rates by more than 10 % ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOUND = 0.1
HERE = Path(__file__).resolve().parent.parent


@dataclass
class Side:
    """An engine with the one step that it repeats."""

    engine: Any
    batch: Any
    places: int
    tokens: int

    def seconds(self) -> float:
        """Of one step."""
        start = time.perf_counter()
        self.engine.train_batch(self.batch)
        return time.perf_counter() - start


def build(folder: Path, data: Path, packing: str, rows: int) -> Side:
    """The engine and its epoch. The global batch is set to what an epoch has, which the loader says."""
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.data.build import loader_from_plan
    from hybrid5d.engine.build import initialize, sequence_options
    from hybrid5d.engine.collate import real_tokens, sequence_plan
    from hybrid5d.plan.run import build_plan

    def plan(batch: int) -> Any:
        return build_plan(RunConfig.model_validate({
            "runner": {"task_type": "sft", "max_steps": 1000, "seq_length": 256},
            "data": {"type": "chat", "train_data_paths": [str(data)], "packing": packing, "shuffle": False,
                     "cache_dir": str(folder / "cache")},
            "actor": {
                "micro_batch_size": 1 if packing == "documents" else rows, "global_batch_size": batch,
                "model": {"model_path": str(folder), "load_weights": False, "precision": "fp32"},
                "optim": {"lr": 1e-5}, "lr_sched": {"lr_decay_style": "constant"},
            },
        }), 1)  # fmt: skip

    unit = 1 if packing == "documents" else rows
    epoch = loader_from_plan(plan(unit), 0).num_rows
    chosen = plan(-(-epoch // unit) * unit)
    engine = initialize(chosen)
    batch = loader_from_plan(chosen, 0).step(0)
    places = 0
    for micro_batch in batch.micro_batches:
        shape = sequence_plan(micro_batch, engine.ctx, sequence_options(chosen))
        places += shape.batch * shape.local_length
    return Side(engine, batch, places, sum(real_tokens(m) for m in batch.micro_batches))


def model_folder(source: Path, folder: Path, layers: int) -> None:
    """The model's description with fewer layers, and its tokenizer."""
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns that count, after one to warm up")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="conversations of a padded micro-batch")
    parser.add_argument("--model", type=Path, default=HERE / ".cache" / "smollm2")
    parser.add_argument("--data", type=Path, default=HERE / "examples" / "data" / "chat.jsonl")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model_folder(args.model, folder, args.layers)
        padded, packed = (build(folder, args.data, kind, args.rows) for kind in ("none", "documents"))
        assert padded.tokens == packed.tokens, "both sides train on the same conversations"
        turns = [(padded.seconds(), packed.seconds()) for _ in range(args.rounds + 1)][1:]
    fills = [side.tokens / side.places for side in (padded, packed)]
    speeds = [side.tokens / statistics.median(t[i] for t in turns) for i, side in enumerate((padded, packed))]
    gain, expected = statistics.median(a / b for a, b in turns), fills[1] / fills[0]
    print(f"{padded.tokens} useful tokens; fill {fills[0]:.3f} padded, {fills[1]:.3f} packed: ratio {expected:.2f}")
    print(f"useful tokens/s {speeds[0]:.0f} and {speeds[1]:.0f}: gain {gain:.2f}; gain/ratio {gain / expected:.2f}")
    return 0 if abs(gain / expected - 1) <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
