"""`hosts_of`: finds the ranks of a group that share a host."""

from __future__ import annotations

import os
import socket

from megatron_cp.executor.groups import Group, as_rank_group, rank_group


def hosts_of(group: Group | None) -> tuple[int, ...]:
    """Returns the host of each rank of a group, numbered from 0: as torchrun numbers its nodes, or by host names.

    It is a collective: all ranks of the group must call it. Call it once at set-up, not for every batch.

    Args:
        group: a torch.distributed group, a mesh of one axis, a `RankGroup`, or None for one rank.

    Example:
        >>> hosts_of(None)
        (0,)
    """
    ranks = as_rank_group(None, 1) if group is None else rank_group(group)
    names = ranks.all_gather_object((os.environ.get("GROUP_RANK", ""), socket.gethostname()))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)
