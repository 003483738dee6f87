"""A run small enough to start under real launchers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

REPO = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 67, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "max_position_embeddings": 64, "initializer_range": 0.05, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
M = "actor.model."
TP2, PP2, CP2 = (f"{M}{a}_parallel_size=2" for a in ("tensor_model", "pipeline_model", "context"))


def write_run(folder: Path, rows: int = 24) -> Path:
    """A YAML of 4 steps of 8 rows, with model and data beside it; lr warms up, so that steps cannot be mixed up."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    rng = random.Random(0)
    lines = [json.dumps({"input_ids": [rng.randrange(67) for _ in range(rng.randint(5, 24))]}) for _ in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    tree: dict[str, Any] = {
        "runner": {"max_steps": 4, "seq_length": 24, "output_dir": str(folder), "experiment_name": "run"},
        "data": {
            "type": "tokens", "train_data_paths": [str(folder / "rows.jsonl")], "cache_dir": str(folder / "cache"),
        },
        "actor": {
            "micro_batch_size": 1, "global_batch_size": 8,
            "model": {"model_path": str(folder / "model"), "load_weights": False},
            "optim": {"lr": 1e-2},
            "lr_sched": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 4, "min_lr": 1e-3},
        },
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def launcher(name: str, procs: int, entry: str = "examples/train.py") -> list[str]:
    """The command line of a launcher, as the README writes it."""
    if name == "python":
        return [sys.executable, entry]
    count, port = str(procs), str(free_port())
    words = {
        "deepspeed": ["--num_gpus", count, "--master_port", port],
        "accelerate": ["launch", "--use_deepspeed", "--num_processes", count, "--main_process_port", port],
        "torchrun": ["--nproc_per_node", count, "--master_port", port],
    }
    return [str(BIN / name), *words[name], entry]


def free_port() -> int:
    """A port that nobody listens on now."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> list[str]:
        """Lines of standard error that are not a launcher's log."""
        noise = ("[20", "W1", "W2", "E1", "E2", "*", "The following values", "\t`", "To avoid this")
        return [line for line in self.err.splitlines() if line.strip() and not line.startswith(noise)]


def run(words: list[str], timeout: float = 400, **environ: str) -> Ended:
    """Run a command to its end."""
    base = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "DS_ACCELERATOR")}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, cwd=REPO, env={**base, **environ}
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def running(mark: str) -> list[int]:
    """Processes whose command line holds `mark`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        named = any(mark in word for word in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process.pid)
    return found
