"""The process groups that are needed to shard a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, TorchGroup


@dataclass(frozen=True)
class BatchGroups:
    """Megatron's groups, and groups of the same ranks for host memory where Megatron's own cannot move it.

    Attributes:
        cp: the context-parallel ranks; it can compare plans on the host.
        tp_host: the tensor-parallel ranks, for `broadcast_pack`.
    """

    cp: RankGroup
    tp_host: dist.ProcessGroup
    _parts: dict[range, RankGroup] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def make(cls) -> BatchGroups:
        """Makes the groups from Megatron's. Every rank of the job calls it once, before training starts."""
        cp, tp = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
        cp_host, tp_host = _host_twin(cp), _host_twin(tp)
        return cls(TorchGroup(cp, cp_host), tp if tp_host is None else tp_host)

    def part(self, ranks: range) -> RankGroup:
        """Returns a group of some of the data- and context-parallel ranks, for batches with a group of their own.

        It is made by the first call and kept. All ranks of the group call it, and make their groups in the same order.

        Args:
            ranks: ranks within `get_data_parallel_group(with_context_parallel=True)`, from 0 on, with this one.

        Raises:
            ArgumentError: ranks that do not exist, or do not include this one.
        """
        everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if (
            not isinstance(ranks, range)
            or everyone.rank() not in ranks
            or not set(ranks) <= set(range(everyone.size()))
        ):
            allowed = f"a range within 0 to {everyone.size() - 1}, rank {everyone.rank()} in it"
            raise ArgumentError("ranks", ranks, allowed)
        if ranks not in self._parts:
            global_ranks = [dist.get_process_group_ranks(everyone)[rank] for rank in ranks]
            group = dist.new_group(global_ranks, use_local_synchronization=True)
            moves_host = dist.get_backend(group) != "nccl"
            twin = None if moves_host else dist.new_group(global_ranks, backend="gloo", use_local_synchronization=True)
            self._parts[ranks] = TorchGroup(group, twin)
        return self._parts[ranks]


def _host_twin(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Returns a gloo group of the same ranks if `group` moves device memory only, else None."""
    if dist.get_backend(group) != "nccl":
        return None
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(dist.get_process_group_ranks(group)))
    # Every rank of the job takes part in making every group.
    twins = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in sorted(set(everyone))}
    return twins[everyone[dist.get_rank()]]
