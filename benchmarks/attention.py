"""Attention alone: context parallelism on 2 ranks with 1 thread each against one process with 2 threads.

    python benchmarks/attention.py [--lengths 8192 16384] [--heads 8] [--kv-heads 8] [--dtype float32] [--rounds 7]

Causal, forward + backward, head dim 64. All contenders run interleaved, A B C A B C ..., and the medians of one run are
compared: tokens/s as a ratio to the single process, and CPU-seconds (all ranks) likewise. `torch ring` is torch's own
ring attention template, run where the installed torch has it for CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from hybrid5d.context_parallel import ContextParallelAttention, SequencePlan
from hybrid5d.parallel.context import Axis

HEAD_DIM = 64
METHODS = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}


def ours(method: str, length: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    plan = SequencePlan.build(((length,),), dist.get_world_size(), method)
    attention = ContextParallelAttention(Axis.from_group(None), method)
    return lambda: attention(q, k, v, plan)


def torch_ring(length: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """torch's zigzag ring over aten's CPU flash op, wrapped so that it is differentiable."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as peer

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *qkv: Tensor) -> Tensor:
            out, lse, *_ = peer._templated_ring_attention(mesh.get_group(), 2, forward, *qkv, is_causal=True)
            ctx.save_for_backward(*qkv, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv, *_ = peer._templated_ring_attention_backward(
                mesh.get_group(), 2, backward, grads[0], "grad_out", q, k, v, out, lse,
                is_causal=True, dropout_p=0.0,
            )  # fmt: skip
            return dq, dk, dv

    return lambda: Ring.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def single(length: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def timed(run: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> tuple[float, float]:
    for x in inputs:
        x.grad = None
    wall, cpu = time.perf_counter(), time.process_time()
    run().backward(dout)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    return time.perf_counter() - wall, time.process_time() - cpu


def tensors(length: int, args: argparse.Namespace) -> tuple[tuple[Tensor, ...], Tensor]:
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    q = torch.randn(1, length, args.heads, HEAD_DIM, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, length, args.kv_heads, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    return (q, k, v), torch.randn(1, length, args.heads, HEAD_DIM, dtype=dtype)


def worker(rank: int, folder: str, args: argparse.Namespace, turns: Any, results: Any) -> None:
    """Ranks 0, 1 are the parallel contenders; rank 2 is the single process. They take turns, never overlap."""
    torch.set_num_threads(2 if rank == 2 else 1)
    if rank < 2:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for length in args.lengths:
        inputs, dout = tensors(length if rank == 2 else length // 2, args)
        runs = {"single": single(length, *inputs)} if rank == 2 else contenders(length, inputs)
        for round_ in range(args.rounds + 1):  # the first warms up
            for name in ["single", *METHODS, "torch ring"]:
                turns.wait()
                if name in runs:
                    try:
                        measured = timed(runs[name], inputs, dout)
                    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
                        if name != "torch ring":
                            raise
                        measured = None
                        if rank == 0 and round_ == 0:
                            print(f"torch ring does not run here: {error}")
                    if round_ and measured:
                        results.put((length, name, round_, *measured))
                turns.wait()


def contenders(length: int, inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], Tensor]]:
    runs = {name: ours(method, length, *inputs) for name, method in METHODS.items()}
    try:
        runs["torch ring"] = torch_ring(length, *inputs)
    except (ImportError, AttributeError) as error:
        print(f"torch ring is not in this torch: {error}")
    return runs


def report(samples: list[tuple[int, str, int, float, float]]) -> None:
    print(f"{'S':>7} {'method':<12} {'median s':>9} {'tokens/s':>10} {'CPU-s':>8}   (ratios to the single process)")
    for length in sorted({s[0] for s in samples}):
        base = None
        for name in ["single", *METHODS, "torch ring"]:
            rounds: dict[int, list[tuple[float, float]]] = {}
            for _, _, round_, wall, cpu in (s for s in samples if s[:2] == (length, name)):
                rounds.setdefault(round_, []).append((wall, cpu))
            if not rounds:
                continue
            wall = statistics.median(max(w for w, _ in r) for r in rounds.values())
            cpu = statistics.median(sum(c for _, c in r) for r in rounds.values())
            base = base or (wall, cpu)
            print(f"{length:>7} {name:<12} {wall:>9.3f} {base[0] / wall:>9.2f}x {cpu / base[1]:>7.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = mp.get_context("spawn")
    turns, results = context.Barrier(3), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=worker, args=(r, folder, args, turns, results)) for r in range(3)]
        for p in processes:
            p.start()
        samples = []
        while any(p.is_alive() for p in processes) or not results.empty():
            while not results.empty():
                samples.append(results.get())
            if any(p.exitcode for p in processes):
                for p in processes:
                    p.terminate()
                raise SystemExit("a benchmark process failed")
            time.sleep(0.05)
        for p in processes:
            p.join()
    report(samples)


if __name__ == "__main__":
    main()
