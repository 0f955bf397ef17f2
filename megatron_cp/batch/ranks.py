"""The ranks of a sum, however many they are."""

from __future__ import annotations

import torch.distributed as dist

from megatron_cp.executor.groups import RankGroup, ThreadGroup, TorchGroup


def ranks_of(group: RankGroup | dist.ProcessGroup | None) -> RankGroup:
    """A `RankGroup` as it is, a process group wrapped, and this rank alone for None.

    Raises:
        ArgumentError: it is no group.
    """
    if group is None:
        return ThreadGroup.create(1)[0]
    return group if isinstance(group, RankGroup) else TorchGroup(group)
