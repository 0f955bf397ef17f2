"""Transports: wires that are laid over a group, which deliver the same bytes by other messages or memory.

`groups/base.py` has their interface and contract, `Wire`. `plan/transport.py` has the names, which are data of a plan.
Only a `Communicator` makes transports.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_cp.executor.groups import RankGroup, Wire
from megatron_cp.executor.transports.hierarchical import Hierarchical
from megatron_cp.executor.transports.pairwise import Pairwise
from megatron_cp.executor.transports.shared_memory import SharedMemory
from megatron_cp.executor.transports.symmetric_memory import SymmetricMemory
from megatron_cp.plan.transport import Transport

# By name. "collective" is not among them: it is the group itself.
LAID_OVER_GROUP: dict[str, Callable[[RankGroup, Transport], Wire]] = {
    "pairwise": Pairwise,
    "hierarchical": Hierarchical,
    "shared_memory": SharedMemory,
    "symmetric_memory": SymmetricMemory,
}

__all__ = ["LAID_OVER_GROUP", "Hierarchical", "Pairwise", "SharedMemory", "SymmetricMemory"]
