"""`make gpu-check`: what a machine with GPUs shows of the layouts, in one table. Not yet run on a GPU.

Each check is a process of its own with a limit of a minute, so that one that fails or hangs leaves the others. It finds
how many GPUs there are and runs what they allow. Writes gpu_check.json and gpu_check_profile.json (a Chrome trace).
Exit code 0: all that ran passed; 1: something failed; 2: no GPU here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
LIMIT_S = 60.0
PROFILE = "gpu_check_profile.json"
TOKENS, HIDDEN = 4096, 2048  # of the speed check


@dataclass(frozen=True)
class Check:
    """One line of the table: `words` are the arguments of python, or of torchrun where `ranks` > 1."""

    name: str
    gpus: int
    words: tuple[str, ...]
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """What became of a check: pass, fail or not run, and why."""

    name: str
    result: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Training:
    """A layout that is trained for three steps, and how far its losses may be from one CPU process in fp32."""

    ranks: int
    layout: dict[str, Any]
    bound: float


TRAININGS = {
    "fp32": Training(1, {"precision": "fp32"}, 1e-4),
    "bf16": Training(1, {"precision": "bf16"}, 2e-2),
    "fp16": Training(1, {"precision": "fp16"}, 2e-2),
    "bf16 packed rows": Training(1, {"precision": "bf16", "packing": "documents"}, 2e-2),
    "tp2": Training(2, {"tp": 2, "precision": "bf16"}, 2e-2),
    "tp2 sp": Training(2, {"tp": 2, "sp": True, "precision": "bf16"}, 2e-2),
    "cp2 ring": Training(2, {"cp": 2, "precision": "bf16"}, 2e-2),
    "cp2 Ulysses": Training(2, {"cp": 2, "precision": "bf16", "model": {"cp_comm_type": "a2a"}}, 2e-2),
    "pp2": Training(2, {"pp": 2, "precision": "bf16"}, 2e-2),
    "dp2 ZeRO 1": Training(2, {"dp": 2, "precision": "bf16"}, 2e-2),
    "dp2 ZeRO 2": Training(2, {"dp": 2, "zero": 2, "precision": "bf16"}, 2e-2),
    "dp2 ZeRO 3": Training(2, {"dp": 2, "zero": 3, "precision": "bf16"}, 2e-2),
    "tp2 sp pp2": Training(4, {"tp": 2, "pp": 2, "sp": True, "precision": "bf16"}, 2e-2),
    "tp2 sp pp2 cp2": Training(8, {"tp": 2, "pp": 2, "cp": 2, "sp": True, "precision": "bf16"}, 2e-2),
}
SINGLE = {"host waits of a step": "waits", "speed, memory, profile": "speed"}


def checks() -> list[Check]:
    """All of them, in the order in which they run."""
    me = ("-m", "tests.gpu.check", "--part")
    found = [Check("environment", 1, (*me, "environment"))]
    found.append(Check("attention kernels against fp64", 1, ("-m", "pytest", "-q", "-m", "gpu", "tests/gpu")))
    found.append(Check("the loss's factor in 16 bits", 1, (*me, "loss")))
    found += [Check(f"training: {name}", t.ranks, (*me, "train", "--training", name)) for name, t in TRAININGS.items()]
    found += [Check(name, 1, (*me, part)) for name, part in SINGLE.items()]
    return found


def run(check: Check, gpus: int) -> Outcome:
    """Run a check in processes of its own; its last line of output is the detail."""
    if gpus < check.gpus:
        return Outcome(check.name, "not run", f"needs {check.gpus} GPUs, {gpus} here")
    start = [sys.executable]
    if check.gpus > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(check.gpus)]
    if "--training" in check.words:
        model_folder()
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:  # a file: a hanging grandchild would keep a pipe open
        child = subprocess.Popen([*start, *check.words], stdout=out, stderr=out, cwd=REPO, start_new_session=True)
        try:
            code: int | None = child.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            code = None
        out.seek(0)
        lines = [line.strip() for line in out.read().splitlines() if line.strip()]
    seconds = round(time.monotonic() - started, 1)
    if code is None:
        return Outcome(check.name, "fail", f"not over after {check.limit_s:g} s", seconds)
    told = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
    detail = told[-1] if told else (lines[-1] if lines else "")
    return Outcome(check.name, "pass" if code == 0 else "fail", detail[:200], seconds)


def table(outcomes: Sequence[Outcome]) -> str:
    width = max(len(o.name) for o in outcomes)
    return "\n".join(f"{o.name:<{width}}  {o.result:<7}  {o.seconds:>5.1f} s  {o.detail}" for o in outcomes)


def main(gpus: int, folder: Path, todo: Sequence[Check]) -> int:
    """Run the checks, print the table, write gpu_check.json."""
    if not gpus:
        print("gpu-check: no GPU here (torch.cuda.is_available() is false); nothing was run", file=sys.stderr)
        return 2
    outcomes = []
    for check in todo:
        outcomes.append(run(check, gpus))
        print(table(outcomes[-1:]), flush=True)
    print(f"\n{table(outcomes)}")
    record = {"gpus": gpus, "checks": [asdict(o) for o in outcomes]}
    (folder / "gpu_check.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(o.result == "fail" for o in outcomes))


# --- parts, each in a process of its own ----------------------------------------------------------------------------


def environment() -> str:
    """A CUDA build, and a chip that can run flash attention and bf16."""
    from hybrid5d.launch.env import _gpu

    facts = _gpu()
    assert float(facts["gpu"]["capability"]) >= 8.0, facts
    return ", ".join(f"{k} {v}" for k, v in facts.items())


def loss(device: str = "cuda") -> str:
    """Gradients of the head in bf16 with a factor that has no short binary form, against fp64: off by no common factor.

    A factor that was rounded to bf16 is 1.9e-3.
    """
    import torch

    from hybrid5d.parallel.context import Axis
    from hybrid5d.tensor_parallel import VocabShard, linear_token_loss

    generator, factor = torch.Generator().manual_seed(1), 8195 / 12289
    hidden, weight = (torch.randn(n, 64, generator=generator).to(device, torch.bfloat16) for n in (512, 5003))
    targets = torch.randint(0, 5003, (512,), generator=generator).to(device)
    narrow = [x.clone().requires_grad_(True) for x in (hidden, weight)]
    linear_token_loss(*narrow, targets, VocabShard.of(5003, Axis.single())).loss.mul(factor).backward()
    wide = [x.double().requires_grad_(True) for x in (hidden, weight)]
    total = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), targets, reduction="sum")
    total.mul(factor).backward()
    off = []
    for got, want in zip(narrow, wide):
        assert got.grad is not None and want.grad is not None
        off.append(abs(float((got.grad.double() * want.grad).sum() / want.grad.square().sum()) - 1))
    assert max(off) < 5e-4, off
    return f"common factor off by {max(off):.1e}"


def model_folder() -> Path:
    """A tiny model that all ranks read; `run` makes it before it starts them."""
    folder = Path(tempfile.gettempdir()) / f"gpu_check_{os.getuid()}"
    if not (folder / "model.safetensors").exists():
        from tests.kit import MODELS, save_model

        save_model(MODELS["qwen3"], folder)
    return folder


def _engine(name: str, folder: str) -> tuple[Any, list[Any], Any]:
    from tests.engine_kit import Layout, build_engine
    from tests.kit import Recipe, make_packed_rows, make_rows

    training, recipe = TRAININGS[name], Recipe(lr=0.1, clip=1.0, steps=3)
    packed = "packing" in training.layout
    steps = [(make_packed_rows if packed else make_rows)(8, 24, 101, seed=s) for s in range(recipe.steps)]
    layout = Layout(**training.layout)
    return build_engine(layout, recipe, folder, 8), [layout, *steps], recipe


def train(name: str) -> str:
    """Three steps of a layout; losses against HF transformers in fp32 in one CPU process."""
    from tests.kit import MODELS, hf_model, reference, step_batch

    engine, (layout, *steps), recipe = _engine(name, str(model_folder()))
    results = [engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1)) for rows in steps]
    want = reference(hf_model(MODELS["qwen3"]), steps, recipe).losses
    off = max(abs(r.loss - w) / w for r, w in zip(results, want))
    assert off <= TRAININGS[name].bound, f"losses {[r.loss for r in results]}, wanted {want}"
    return f"losses within {off:.1e} of one CPU process, attention {engine.attention_kernel}, {engine.transport}"


def waits() -> str:
    """Synchronisations of one step with four micro-batches, as torch counts them."""
    import torch

    from tests.kit import step_batch

    engine, (_, *steps), _ = _engine("bf16", str(model_folder()))
    batches = [step_batch(rows, 1, 0, 2) for rows in steps]
    engine.train_batch(batches[0])
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.train_batch(batches[1])
    torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchroniz" in str(w.message)]
    assert len(found) <= 16, [f"{w.filename}:{w.lineno}" for w in found]
    return f"{len(found)} waits in a step of 4 micro-batches"


def speed(device: str = "cuda", tokens: int = TOKENS, hidden: int = HIDDEN, folder: Path = REPO) -> str:
    """Forward and backward of four layers: tokens/s, share of time that the GPU is busy, memory; a Chrome trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from hybrid5d.data.types import Document
    from hybrid5d.engine.collate import SequenceOptions, local_batch
    from hybrid5d.hf.spec import parse_hf_config
    from hybrid5d.models.decoder import decoder_layers
    from hybrid5d.parallel.context import ParallelContext

    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 4,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "vocab_size": 32_000,
        "max_position_embeddings": tokens, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    ctx, spec, where = ParallelContext.single(), parse_hf_config(config), torch.device(device)
    layers = [d.build().to(where, torch.bfloat16) for d in decoder_layers(spec, ctx, lambda: _core(ctx))]
    for p in (p for layer in layers for p in layer.parameters() if p.dim() > 1):
        torch.nn.init.normal_(p, std=0.02)
    ids = torch.arange(tokens).numpy() % 1000
    rows = [(Document(ids, ids, 0),)]
    cuda, sync = where.type == "cuda", torch.cuda.synchronize if where.type == "cuda" else lambda: None

    def step() -> None:
        batch = local_batch(rows, ctx, SequenceOptions(), hidden, where)
        x: Any = None
        for layer in layers:
            x = layer(x, batch)
        (x / tokens).backward()

    for _ in range(3):
        step()
    sync()
    started = time.perf_counter()
    for _ in range(3):
        step()
    sync()
    seconds = (time.perf_counter() - started) / 3
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        sync()
    profiler.export_chrome_trace(str(folder / PROFILE))
    flops = 6.0 * tokens * sum(p.numel() for layer in layers[1:] for p in layer.parameters())
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return f"{tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.1f} TFLOP/s, {memory:.2f} GiB allocated"


def _core(ctx: Any) -> Any:
    from hybrid5d.context_parallel import ContextParallelAttention

    return ContextParallelAttention(ctx.cp)


PARTS: dict[str, Callable[[], str]] = {"environment": environment, "loss": loss, "waits": waits, "speed": speed}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=[*PARTS, "train"])
    parser.add_argument("--training", choices=list(TRAININGS))
    asked = parser.parse_args()
    if asked.part:
        try:
            print("RESULT", train(asked.training) if asked.part == "train" else PARTS[asked.part](), flush=True)
        except Exception as exc:
            print("RESULT", f"{type(exc).__name__}: {exc}".replace("\n", " "), flush=True)
            raise
        os._exit(0)  # groups are not taken down: a peer may be gone
    import torch

    sys.exit(main(torch.cuda.device_count() if torch.cuda.is_available() else 0, Path.cwd(), checks()))
