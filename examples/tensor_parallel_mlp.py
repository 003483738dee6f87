"""A two-layer MLP trained with tensor and sequence parallelism on plain process groups, and beside it in one piece.

torchrun --nproc_per_node 4 examples/tensor_parallel_mlp.py

Each rank holds 1/n of both matrices and, outside of them, 1/n of the sequence. The losses are those of one process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid5d.tensor_parallel import Axis, ColumnParallelLinear, RowParallelLinear, replicated, split_seq


def parallel_mlp(axis: Axis, hidden: int, features: int) -> nn.Sequential:
    """norm, columns, GELU, rows: [b, s/n, H] -> [b, s/n, H]."""
    norm = nn.LayerNorm(hidden)
    for param in norm.parameters():  # sees 1/n of the sequence: its gradient is summed over the group
        replicated(param, axis, partial=True)
    up = ColumnParallelLinear(hidden, features, axis, sequence_parallel=True)
    down = RowParallelLinear(features, hidden, axis, sequence_parallel=True)
    return nn.Sequential(norm, up, nn.GELU(), down)


def train(model: nn.Module, x: Tensor, y: Tensor, elements: int, steps: int = 5) -> Tensor:
    """Losses [steps] of this part of the sequence; a whole loss is the mean over `elements`."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), []
    for _ in range(steps):
        loss = (model(x) - y).square().sum() / elements
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    dist.init_process_group("gloo")
    axis = Axis.of(dist.group.WORLD)
    x, y = torch.randn(2, 3, 8 * axis.size, 16, generator=torch.Generator().manual_seed(1))  # [b, s, H] each
    torch.manual_seed(0)  # on every rank: the layers draw whole matrices and keep their part
    losses = train(parallel_mlp(axis, 16, 64), split_seq(x, axis), split_seq(y, axis), y.numel())
    dist.all_reduce(losses)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    torch.testing.assert_close(losses, train(plain, x, y, y.numel()), rtol=1e-5, atol=1e-6)
    if axis.rank == 0:
        print(f"losses on {axis.size} ranks, as in one process: {' '.join(f'{x:.6f}' for x in losses.tolist())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
