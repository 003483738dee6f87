"""One-rank views of layouts on CUDA tensors without data: `python -m tests.fake_cuda.views SHIM` prints their counts.

Every operator's shapes, types and devices are computed, no values: a mixture of devices, a read of a value and an
argument that a CUDA operator refuses are errors. Process groups are torch's fake ones, whose collectives do nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from tests.fake_cuda.load import load

    load(Path(sys.argv[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid5d.context_parallel import ContextParallelAttention, choose_kernel, hybrid_axes
from hybrid5d.context_parallel.kernels.flash_attn import FlashAttnKernel
from hybrid5d.data.types import Document
from hybrid5d.engine.collate import SequenceOptions, local_batch
from hybrid5d.engine.objective import SUPERVISED, Objective
from hybrid5d.hf.spec import parse_hf_config
from hybrid5d.models.decoder import decoder_layers
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.sequence import _build
from hybrid5d.tensor_parallel import Place, TokenRule, TokenTerms, WeightGradients

TOKENS = 512
MODEL = {
    "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1001, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class View:
    """One rank of a layout, and what it trains on."""

    tp: int = 1
    cp: int = 1
    sp: bool = False
    method: str = "p2p"
    dtype: str = "bf16"
    rows: int = 1
    documents: int = 1
    window: int | None = None
    recompute: bool = False
    rl: bool = False
    qk_norm: bool = False
    tied: bool = False
    kernel: str = "auto"
    in_place: bool = False  # weight gradients are added to an fp32 buffer by the layers, as in ZeRO 0 and 1

    def __str__(self) -> str:
        plain = View()
        return " ".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)) or "one"


VIEWS = [
    View(), View(dtype="fp16"), View(dtype="fp32"), View(tied=True), View(qk_norm=True), View(rows=2),
    View(recompute=True), View(recompute=True, documents=64), View(kernel="chunked"), View(kernel="aten_efficient"),
    View(documents=2), View(documents=16), View(documents=64), View(documents=64, dtype="fp16"), View(window=64),
    View(window=64, documents=64), View(window=64, rows=2), View(rl=True), View(rl=True, documents=64, dtype="fp16"),
    View(tp=2), View(tp=2, sp=True), View(tp=2, sp=True, rows=2), View(tp=8), View(tp=2, sp=True, documents=64),
    View(cp=2), View(cp=2, documents=16), View(cp=2, documents=64), View(cp=2, window=64),
    View(cp=2, window=64, documents=16), View(cp=2, method="a2a"), View(cp=2, method="a2a", documents=64),
    View(kernel="flash_attn"), View(kernel="flash_attn", documents=64), View(kernel="flash_attn", cp=2, documents=64),
    View(cp=2, method="all_gather"), View(cp=4, method="a2a+p2p"), View(tp=2, cp=2, sp=True, dtype="fp16"),
    View(in_place=True),
    View(in_place=True, tp=2, sp=True),
    View(in_place=True, dtype="fp16", documents=64),
]  # fmt: skip


@dataclass
class Counts:
    """Of one micro-batch."""

    launches: int = 0
    copies: int = 0
    reads: int = 0
    scalars: list[str] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)


SKIPPED = {
    "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default", "aten.empty_strided.default",
    "aten.detach.default", "aten.new_empty_strided.default", "aten.lift_fresh.default", "prim.device.default",
    "aten._unsafe_view.default", "aten._reshape_alias.default", "aten.alias.default",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts kernels, copies between host and device, reads of values, and products that CUDA rounds to 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, counts = str(func), self.counts
        if name.startswith("c10d"):
            counts.collectives[name.split(".")[1]] += 1
        elif name == "aten._local_scalar_dense.default":
            counts.reads += 1
        elif name not in SKIPPED and not func.is_view:
            tensors = [x for x in (*args, *(kwargs or {}).values(), out) if isinstance(x, Tensor)]
            devices = {x.device.type for x in tensors}
            counts.copies += devices == {"cpu", "cuda"}
            counts.launches += "cuda" in devices
            if name.startswith(("aten.mul", "aten.div", "aten.add")):
                wide = [x for x in tensors if x.dim() == 0 and x.dtype == torch.float32]
                if wide and any(x.dim() and x.dtype in (torch.float16, torch.bfloat16) for x in tensors):
                    counts.scalars.append(name)
        return out


def _context(view: View) -> tuple[ParallelContext, tuple[Axis, ...]]:
    layout = ParallelLayout(tp=view.tp, cp=view.cp)
    if dist.is_initialized():
        dist.destroy_process_group()
    if layout.world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=FakeStore())
    ctx = ParallelContext.create(layout, view.sp)
    return ctx, hybrid_axes(layout, 0, 2) if view.method == "a2a+p2p" else ()


def _on_cuda(layer: nn.Module, dtype: torch.dtype) -> None:
    for module in layer.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                there = nn.Parameter(torch.empty(p.shape, device="cuda", dtype=dtype))
                for key in ("pieces", "tensor_model_parallel", "partial_over_tp"):
                    if hasattr(p, key):
                        setattr(there, key, getattr(p, key))
                module._parameters[name] = there


def _documents(view: View, micro: int) -> list[tuple[Document, ...]]:
    """Rows of TOKENS tokens; documents of two lengths, other ones in every micro-batch."""
    size, odd = TOKENS // view.documents, micro + 1 if view.documents > 1 else 0
    row = []
    for i in range(view.documents):
        ids = np.arange(size + (odd if i % 2 else -odd)) % 7
        columns = {"advantages": np.ones(len(ids), np.float32)} if view.rl else {}
        row.append(Document(ids, ids, 0, columns=columns))
    return [tuple(row)] * view.rows


def _stand_in() -> FlashAttnKernel:
    """flash-attn's kernel with aten's operators behind the package's signatures."""
    op = torch.ops.aten

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int,
        dropout: float, scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float = 0,
    ) -> Any:  # fmt: skip
        window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        return op._flash_attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout, causal, False, scale=scale, **window
        )

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, dropout: float, scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None, deterministic: bool,
    ) -> None:  # fmt: skip
        window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        op._flash_attention_backward(
            dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout, causal, unused, unused[0],
            scale=scale, **window,
        )  # fmt: skip

    kernel = object.__new__(FlashAttnKernel)
    kernel._forward, kernel._backward = forward, backward
    return kernel


def _rl_rule(logp: Tensor, entropy: Tensor | None, columns: Any) -> TokenTerms:
    assert entropy is not None
    advantages = columns["advantages"]
    return TokenTerms(-logp * advantages, -advantages, torch.full_like(logp, -0.1), {"entropy": entropy})


RL = Objective(rule=TokenRule(_rl_rule, entropy=True, needs=("advantages",), means=("entropy",)))


def count(view: View, layers: int) -> Counts:
    """Counts of the second micro-batch: forward and backward of embedding, `layers` layers, norm, head."""
    _build.cache_clear()  # plans of earlier views have their tensors already
    ctx, hybrid = _context(view)
    config: dict[str, Any] = {**MODEL, "num_hidden_layers": layers, "tie_word_embeddings": view.tied}
    if not view.qk_norm:
        config |= {"model_type": "mistral", "sliding_window": view.window}
    spec = parse_hf_config(config)
    kernel = _stand_in() if view.kernel == "flash_attn" else view.kernel
    device, ulysses = torch.device("cuda", 0), 2 if hybrid else view.cp if view.method == "a2a" else 1
    chosen = choose_kernel(kernel, device, TYPES[view.dtype]) if isinstance(kernel, str) else kernel
    windows = frozenset(spec.window(i) for i in range(layers))
    options = SequenceOptions(view.method, "zigzag", ulysses, view.documents > 1, chosen, windows)
    counting = Counting()

    def attention() -> ContextParallelAttention:
        return ContextParallelAttention(ctx.cp, view.method, *hybrid, kernel=kernel)

    with FakeTensorMode(allow_non_fake_inputs=True):
        defs = decoder_layers(spec, ctx, attention, selective_recompute=view.recompute)
        built: dict[str, nn.Module] = {}
        modules = [built.setdefault(d.tied, d.build()) if d.tied else d.build() for d in defs]
        for module in {id(m): m for m in modules}.values():
            _on_cuda(module, TYPES[view.dtype])
        if view.in_place:
            params = [p for m in modules for p in m.parameters()]
            totals = {p: torch.empty(p.shape, device="cuda", dtype=torch.float32) for p in params}
            WeightGradients(lambda p: Place(totals[p], False)).attach(params)
        for micro in range(2):
            with counting:
                counting.counts = Counts()
                objective = RL if view.rl else SUPERVISED
                batch = local_batch(_documents(view, micro), ctx, options, spec.hidden_size, device, objective)
                batch.upstream = 2.0**16 / 12289
                x: Any = None
                for definition, module in zip(defs, modules):
                    x = definition.call(module, x, batch) if definition.call else module(x, batch)
                (x * batch.upstream).backward()
            assert micro == 0 or view.in_place or all(p.grad is not None for m in modules for p in m.parameters())
    return counting.counts


def main() -> None:
    found: dict[str, Any] = {}
    for view in VIEWS:
        try:
            one, three = count(view, 1), count(view, 3)
        except Exception:
            found[str(view)] = {"error": traceback.format_exc()}
            continue
        found[str(view)] = {
            "launches_per_layer": (three.launches - one.launches) / 2, "launches": one.launches, "copies": three.copies,
            "reads": three.reads, "scalars": three.scalars, "collectives": dict(three.collectives - one.collectives),
        }  # fmt: skip
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of autograd for a device that is none


if __name__ == "__main__":
    main()
