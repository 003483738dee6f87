"""torch's own parallelisms on the backend, without hybrid5d's engine: the same numbers as on gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import run_ranks

RANKS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))


def rows(step: int, rank: int = 0) -> Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    """Loss of each of three steps, then the norms of what the rank holds."""
    losses = []
    for step in range(3):
        loss = net(rows(step, rank)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
    return losses + [p.detach().norm().item() for p in held]


def ddp(rank: int) -> list[float]:
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=1)
    return train(net, torch.optim.AdamW(net.parameters(), 0.05), rank)


def zero_redundancy(rank: int) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.parallel.DistributedDataParallel(model())
    return train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.05), rank)


def fsdp2(rank: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=init_device_mesh("cpu", (RANKS,)))
    return train(net, torch.optim.AdamW(net.parameters(), 0.05), rank)


def dtensor(rank: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(net, torch.optim.AdamW(net.parameters(), 0.05, foreach=False), 0)


def pipelining(rank: int) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages = [nn.Sequential(*model()[:2]), nn.Sequential(model()[2])]  # type: ignore[index]
    stage = PipelineStage(stages[rank], rank, RANKS, torch.device("cpu"))
    losses: list[Tensor] = []
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer, found = torch.optim.SGD(stages[rank].parameters(), 0.1), []
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(rows(step))
        else:
            losses.clear()
            schedule.step(target=rows(step, 1), losses=losses)
            found.append(float(sum(x.item() for x in losses)))
        optimizer.step()
    return found + [p.detach().norm().item() for p in stages[rank].parameters()]


def ring_context_parallel(rank: int) -> list[float]:
    """torch's ring template around its CPU kernel, forward and backward (its public entry has no strategy for CPUs)."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = False
    assert dist.group.WORLD is not None
    q, k, v = (torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(3))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
    grads = ring._templated_ring_attention_backward(
        dist.group.WORLD, 2, back, out, "grad_out", q, k, v, out, lse,
        is_causal=True, dropout_p=0.0, scale=None,
    )  # fmt: skip
    return [x.norm().item() for x in (out, lse, *grads[:3])]


def distributed_checkpoint(rank: int) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=init_device_mesh("cpu", (RANKS,)))
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    dcp.save({"net": net.state_dict()}, checkpoint_id=folder[0])
    before = [p.to_local().clone() for p in net.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = {"net": net.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    after = [p.to_local() for p in net.parameters()]  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(after, before)) and any(x.any() for x in after)
    return [p.norm().item() for p in after]


def _run(rank: int, job: Callable[[int], list[float]]) -> tuple[str, list[float]]:
    return dist.get_backend(), job(rank)


JOBS = [ddp, zero_redundancy, fsdp2, dtensor, pipelining, ring_context_parallel, distributed_checkpoint]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_torchs_own_parallelism_gives_the_numbers_of_gloo(job: Callable[[int], list[float]]) -> None:
    found = {}
    for backend in ("gloo", "shm"):
        ranks = run_ranks(RANKS, _run, job, backend=backend)
        assert [name for name, _ in ranks] == [backend] * RANKS
        found[backend] = [numbers for _, numbers in ranks]
    assert all(len(numbers) > 1 and any(numbers) for numbers in found["gloo"])
    for mine, theirs in zip(found["shm"], found["gloo"]):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-7)
