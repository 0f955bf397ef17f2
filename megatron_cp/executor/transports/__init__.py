"""Transports: they move messages between ranks and provide the memory that receives them. `base.py` has the interface.

`plan/transport.py` has the names, which are data of a plan. Only a `Communicator` calls transports.
"""

from __future__ import annotations

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.transports.base import GroupTransport
from megatron_cp.executor.transports.collective import Collective
from megatron_cp.executor.transports.hierarchical import Hierarchical
from megatron_cp.executor.transports.pairwise import Pairwise
from megatron_cp.executor.transports.shared_memory import SharedMemory
from megatron_cp.executor.transports.symmetric_memory import SymmetricMemory
from megatron_cp.plan.transport import Transport

TRANSPORTS: dict[str, type[GroupTransport]] = {
    "collective": Collective,
    "pairwise": Pairwise,
    "hierarchical": Hierarchical,
    "shared_memory": SharedMemory,
    "symmetric_memory": SymmetricMemory,
}


def transport_over(group: RankGroup, transport: Transport) -> GroupTransport:
    """Returns the transport that a plan names, for the ranks of a group.

    Raises:
        ArgumentError: the transport has the hosts of another number of ranks.
    """
    if transport.hosts and len(transport.hosts) != group.size:
        raise ArgumentError("hosts", transport.hosts, f"the host of each of the {group.size} ranks")
    return TRANSPORTS[transport.name](group, transport)


__all__ = [
    "TRANSPORTS",
    "Collective",
    "GroupTransport",
    "Hierarchical",
    "Pairwise",
    "SharedMemory",
    "SymmetricMemory",
    "transport_over",
]
