"""`Stage`: the tiles that a rank computes with the keys that it has at one time. Pure data; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_cp.plan.assignment import AssignedTiles, TilePart
from megatron_cp.plan.flows import Fetch, KeyFlow, Return, RowFlow


@dataclass(frozen=True, eq=False)
class Stage:
    """Tiles that a rank computes with the keys that are available at one time.

    Attributes:
        number: the stage, from 0; results of later stages are merged into those of the first.
        keys: the flow of the keys; None for a rank's own rows.
        gradients: in backward, the flow of the gradients of these keys; None for own rows.
        remote_queries: the flow of other ranks' queries that see these keys; None if there are none.
        assigned: the tiles of this stage; None if own queries compute all that they see among these keys.
        local: the assignment whose tiles of own queries and own keys are computed here.
        directions: whether forward and backward have this stage; they differ only where tiles are assigned.
    """

    number: int
    keys: KeyFlow | None
    gradients: RowFlow | None
    remote_queries: Fetch | None = None
    assigned: TilePart | None = None
    local: AssignedTiles | None = None
    directions: tuple[bool, bool] = (True, True)

    @property
    def is_first(self) -> bool:
        """True if nothing has been computed before."""
        return self.number == 0

    @cached_property
    def results(self) -> Return | None:
        """The flow that returns partial results of remote queries to their owners."""
        return None if self.remote_queries is None else Return(self.remote_queries)
