"""The only owner of process groups. Everything else receives an `Axis` or the `ParallelContext` as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hybrid5d.plan.layout import ParallelLayout


@dataclass(frozen=True)
class Axis:
    """One communicator as seen by this rank: its process group (None where it has one member), size and own index.

    `ranks` are the global ranks in group order.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    ranks: tuple[int, ...]

    @classmethod
    def single(cls, rank: int = 0) -> Axis:
        """An axis of one member: every collective over it is the identity."""
        return cls(None, 1, 0, (rank,))

    @classmethod
    def of(cls, group: Axis | dist.ProcessGroup | None) -> Axis:
        """An axis as it is, a process group wrapped (None = the default group)."""
        return group if isinstance(group, Axis) else cls.from_group(group)

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> Axis:
        """Wrap a torch process group (None = the default group)."""
        group = dist.group.WORLD if group is None else group
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return cls.single(ranks[0])
        return cls(group, len(ranks), dist.get_rank(group), ranks)


def build_axis(groups: list[list[int]], rank: int) -> Axis:
    """Create every group of `groups` (each rank must call this with the same list) and return the one with `rank`.

    torch needs all ranks to create all groups in one order, members or not. Groups of one member get no communicator.
    """
    mine: Axis | None = None
    for ranks in groups:
        if len(ranks) == 1:
            if rank in ranks:
                mine = Axis.single(rank)
            continue
        group = dist.new_group(ranks=ranks)
        if rank in ranks:
            mine = Axis(group, len(ranks), ranks.index(rank), tuple(ranks))
    if mine is None:
        raise ValueError(f"rank {rank} is in none of the groups {groups}")
    return mine


@dataclass(frozen=True)
class ParallelContext:
    """All axes of one layout on this rank.

    Attributes:
        tp: tensor parallel (and sequence parallel) axis.
        cp: context parallel axis.
        dp: data parallel axis: ranks that read different rows.
        pp: pipeline axis: ranks that share the layers.
        pp_back: the same ranks, for messages to lower ones: on NCCL messages of one communicator wait for each other.
        dp_cp: ranks that hold the same weight shard; gradients are reduced over it.
        pp_tp: the ranks that together hold one copy of the model; grad norms are reduced over it.
        sequence_parallel: whether the residual stream is cut over tp.
    """

    layout: ParallelLayout
    rank: int
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    pp_tp: Axis
    pp_back: Axis
    sequence_parallel: bool = False

    @classmethod
    def create(cls, layout: ParallelLayout, sequence_parallel: bool = False) -> ParallelContext:
        """Build all groups; collective over the world.

        Raises:
            ValueError: the job's world size is not the layout's, or SP is asked for at tp 1.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if world != layout.world_size:
            raise ValueError(f"world size {world} but pp*dp*cp*tp = {layout.world_size}")
        if sequence_parallel and layout.tp == 1:
            raise ValueError("sequence_parallel shares the tensor-parallel group and needs tp > 1")
        names: dict[str, tuple[str, ...]] = {
            "tp": ("tp",),
            "cp": ("cp",),
            "dp": ("dp",),
            "pp": ("pp",),
            "dp_cp": ("dp", "cp"),
            "pp_tp": ("pp", "tp"),
        }
        built: dict[tuple[tuple[int, ...], ...], Axis] = {}
        axes = {}
        for name, moving in names.items():
            groups = layout.groups(*moving)
            key = tuple(tuple(g) for g in groups)
            if key not in built:  # cp == dp_cp at dp 1: one communicator serves both
                built[key] = build_axis(groups, rank)
            axes[name] = built[key]
        two = layout.pp > 1 and dist.get_backend() == "nccl"
        axes["pp_back"] = build_axis(layout.groups("pp"), rank) if two else axes["pp"]
        return cls(layout=layout, rank=rank, sequence_parallel=sequence_parallel, **axes)

    @classmethod
    def single(cls) -> ParallelContext:
        """The context of one process without torch.distributed."""
        one = Axis.single()
        return cls(ParallelLayout(), 0, one, one, one, one, one, one, one)
