"""The ranks that a sum runs over, from a group or from None."""

from __future__ import annotations

import torch.distributed as dist

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import Group, RankGroup, ThreadGroup, rank_group


def ranks_of(group: Group | None) -> RankGroup:
    """Returns the ranks of a group, see `rank_group`; this rank alone for None, if it is the only one of the job.

    Raises:
        ArgumentError: it is no group, or None among several ranks: each would sum what it has, without a word.
    """
    if group is not None:
        return rank_group(group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        remedy = (
            'Pass the ranks that share a batch, mesh["cp"] or dist.group.WORLD; to run each rank by itself, pass a '
            'group of one rank, such as mesh["cp"] of init_device_mesh(device, (ranks, 1), mesh_dim_names=("dp", '
            '"cp")).'
        )
        raise ArgumentError("group", None, f"a group, in a world of {dist.get_world_size()} ranks", remedy)
    return ThreadGroup.create(1)[0]
