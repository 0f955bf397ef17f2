"""`Stage`: the tiles that a rank computes with the keys that it has at one time. Pure data; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_cp.plan.assignment import AssignedTiles, TilePart
from megatron_cp.plan.flows import Fetch, KeyFlow, Return, RowFlow


@dataclass(frozen=True, eq=False)
class Stage:
    """Tiles that a rank computes with the keys that it has at one time.

    Attributes:
        number: of the stage, from 0; results of later ones are merged into those of the first.
        keys: how these keys come; None for the own rows, as they stand.
        gradients: in backward, how the gradients of these keys go on; None for own rows, which they are written to.
        visitors: how queries of other ranks come, which see these keys too; None where none do.
        assigned: the tiles; None where they are all that own queries see among these keys.
        home: of these, the ones of own rows alone.
        directions: that have this stage, where tiles are assigned: forward, backward.
    """

    number: int
    keys: KeyFlow | None
    gradients: RowFlow | None
    visitors: Fetch | None = None
    assigned: TilePart | None = None
    home: AssignedTiles | None = None
    directions: tuple[bool, bool] = (True, True)

    @property
    def is_first(self) -> bool:
        """Whether nothing has been computed before."""
        return self.number == 0

    @cached_property
    def results(self) -> Return | None:
        """How the partial results of visitors go home."""
        return None if self.visitors is None else Return(self.visitors)
