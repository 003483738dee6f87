"""A `torch.distributed` backend for the ranks of one host, through shared memory.

    import hybrid5d.shared_memory
    torch.distributed.init_process_group("shm")

Two backends are registered on import: `shm`, which refuses what it cannot do, and `shm_or_gloo`, which takes gloo for
groups whose ranks do not share memory, with a notice. Nothing else of hybrid5d is imported. docs/shared_memory.md.
"""

from __future__ import annotations

import torch.distributed as dist

from hybrid5d.shared_memory.group import SharedMemoryGroup
from hybrid5d.shared_memory.join import create, create_or_gloo, unavailable

SHM, SHM_OR_GLOO = "shm", "shm_or_gloo"

for _name, _create in ((SHM, create), (SHM_OR_GLOO, create_or_gloo)):
    if _name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_name, _create, extended_api=True, devices=["cpu"])


def uses_shared_memory(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group's collectives go through shared memory (None = the default group)."""
    return isinstance(dist.group.WORLD if group is None else group, SharedMemoryGroup)


__all__ = ["SHM", "SHM_OR_GLOO", "SharedMemoryGroup", "unavailable", "uses_shared_memory"]
