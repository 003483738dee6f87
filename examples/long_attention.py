"""Attend over 64k tokens on 4 CPU ranks: no rank ever holds more than a quarter of the sequence.

torchrun --nproc_per_node 4 examples/long_attention.py [tokens]
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from hybrid5d.context_parallel import ContextParallelAttention, SequencePlan
from hybrid5d.parallel.context import Axis


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 65536
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis = Axis.from_group(None)  # or any process group

    plan = SequencePlan.build(documents=[[tokens]], cp=axis.size, method="p2p")
    positions = torch.from_numpy(plan.source_index(axis.rank))  # [1, S/cp]: which tokens live here (zigzag)

    torch.manual_seed(axis.rank)
    q = torch.randn(1, plan.local_length, 2, 64, requires_grad=True)  # [b, S/cp, heads, d]
    k, v = (torch.randn(1, plan.local_length, 1, 64, requires_grad=True) for _ in range(2))  # one kv head

    attention = ContextParallelAttention(axis, method="p2p")
    start = time.perf_counter()
    out = attention(q, k, v, plan)
    out.square().mean().backward()
    seconds = time.perf_counter() - start

    sent = sum(attention.traffic.bytes.values()) / 2**20
    held = f"{out.shape[1]} of {tokens} tokens, from {positions[0, 0]} to {positions[0, -1]}"
    # One write: print sends its newline apart, and lines of several ranks would run into each other.
    os.write(1, f"rank {axis.rank}: {held}; {sent:.0f} MiB sent; {seconds:.1f} s\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
