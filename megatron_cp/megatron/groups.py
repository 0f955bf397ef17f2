"""The process groups that are needed to shard a batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_cp.batch.pack import Pack as HostPack
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, TorchGroup
from megatron_cp.megatron.patches import exchanged


@dataclass(frozen=True)
class BatchGroups:
    """Megatron's groups, and groups of the same ranks for host memory where Megatron's own cannot move it.

    Attributes:
        cp: the context-parallel ranks; it can compare plans on the host.
        tp_host: the tensor-parallel ranks, for `broadcast_pack`.
    """

    cp: RankGroup
    tp_host: dist.ProcessGroup
    _number: int = field(default_factory=itertools.count().__next__, repr=False, compare=False)
    _parts: dict[range, RankGroup] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def make(cls) -> BatchGroups:
        """Makes the groups from Megatron's. Every rank of the job calls it once, before training starts."""
        cp, tp = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
        cp_host, tp_host = _host_twin(cp), _host_twin(tp)
        return cls(TorchGroup(cp, cp_host), tp if tp_host is None else tp_host)

    def of(self, pack: HostPack) -> RankGroup:
        """Returns the ranks that hold a pack: those that it names, or the model's context-parallel ranks."""
        ranks: range | None = getattr(pack, "ranks", None)
        return self.cp if ranks is None else self.part(ranks)

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
            group = _made_by_members(global_ranks, f"{self._number}")
            moves_host = dist.get_backend(group) != "nccl"
            twin = None if moves_host else _made_by_members(global_ranks, f"{self._number} host", backend="gloo")
            self._parts[ranks] = TorchGroup(group, twin)
        return self._parts[ranks]


def _made_by_members(ranks: list[int], label: str, backend: str | None = None) -> dist.ProcessGroup:
    """Returns a new group that only its ranks make, under a name that does not depend on what else they have made.

    torch's own name counts the groups of the process, and ranks that made different numbers would wait for ever.
    """
    with exchanged(distributed_c10d, _hash_ranks_to_str=lambda ranks: f"megatron_cp {label}: {ranks}"):
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True)


def _host_twin(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Returns a gloo group of the same ranks if `group` moves device memory only, else None."""
    if dist.get_backend(group) != "nccl":
        return None
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(dist.get_process_group_ranks(group)))
    # Every rank of the job takes part in making every group.
    twins = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in sorted(set(everyone))}
    return twins[everyone[dist.get_rank()]]
