"""The ranks of a sum, however many they are."""

from __future__ import annotations

import torch.distributed as dist

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, ThreadGroup, TorchGroup


def ranks_of(group: RankGroup | dist.ProcessGroup | None) -> RankGroup:
    """A `RankGroup` as it is, a process group wrapped, and for None this rank alone, where it is.

    Raises:
        ArgumentError: it is no group, or None among several ranks.
    """
    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            remedy = (
                'Pass the ranks that share a batch, mesh["cp"] or dist.group.WORLD; for a rank by itself a group of it '
                'alone, such as mesh["cp"] of init_device_mesh(device, (ranks, 1), mesh_dim_names=("dp", "cp")).'
            )
            raise ArgumentError("group", None, f"a group, in a world of {dist.get_world_size()} ranks", remedy)
        return ThreadGroup.create(1)[0]
    return group if isinstance(group, RankGroup) else TorchGroup(group)
