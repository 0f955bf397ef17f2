"""`MemoryLimit`: which ways of running an attention need no more buffers than a rank may have. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_cp.errors import ArgumentError
from megatron_cp.plan.describe import size
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.predict.memory import buffer_bytes
from megatron_cp.planner.weigh import CHUNKS, detail_of

WithChunks = Callable[[Plan, int], Plan | None]


@dataclass(frozen=True)
class MemoryLimit:
    """The most that buffers of messages may take on a rank.

    Attributes:
        limit: in bytes; None for any.
        item_size: bytes of an activation.
    """

    limit: int | None
    item_size: int

    def check(self, plan: Plan) -> None:
        """Refuses a plan that needs more.

        Raises:
            ArgumentError: with what it needs.
        """
        if self.limit is not None:
            needed = self._needed(plan)
            if needed > self.limit:
                self._refuse(plan, needed, "")

    def keeping(self, ways: Sequence[Plan], with_chunks: WithChunks) -> tuple[list[Plan], tuple[str, ...]]:
        """The ways that fit, each in as few head chunks as that takes, and a note about those that do not.

        Raises:
            ArgumentError: none fits; with the one that needs least.
        """
        if (limit := self.limit) is None:
            return list(ways), ()
        found, missed = list[Plan](), list[tuple[int, Plan]]()
        for plan in ways:
            needed, best = min(self._tried(plan, with_chunks), key=lambda pair: (pair[0] > limit, pair[0]))
            if needed <= limit:
                found.append(best)
            else:
                missed.append((needed, best))
        missed.sort(key=lambda pair: pair[0])
        if not found:
            self._refuse(missed[0][1], missed[0][0], ", the way that needs least")
        if not missed:
            return found, ()
        words = ", ".join(f"{plan.scheme}{detail_of(plan)} needs {size(needed)}" for needed, plan in missed)
        return found, (f"over the memory limit of {size(limit)} of buffers a rank: {words}",)

    def only_fitting(self, with_chunks: WithChunks) -> WithChunks:
        """The same, but for plans that need more."""
        if self.limit is None:
            return with_chunks

        def fitting(plan: Plan, chunks: int) -> Plan | None:
            found = with_chunks(plan, chunks)
            return None if found is None or self._needed(found) > (self.limit or 0) else found

        return fitting

    def _tried(self, plan: Plan, with_chunks: WithChunks) -> list[tuple[int, Plan]]:
        """The plan and, until one fits, the same in more and more chunks, with what they need."""
        tried = [(self._needed(plan), plan)]
        for chunks in CHUNKS:
            if tried[-1][0] <= (self.limit or 0):
                break
            found = with_chunks(plan, chunks)
            if found is not None:
                tried.append((self._needed(found), found))
        return tried

    def _needed(self, plan: Plan) -> int:
        """Bytes on the rank that needs most."""
        return max(buffer_bytes(plan, rank, self.item_size) for rank in range(plan.cp_size))

    def _refuse(self, plan: Plan, needed: int, which: str) -> None:
        allowed = f"at least {needed} bytes ({size(needed)}), which {plan.scheme}{detail_of(plan)} needs{which}"
        remedy = "Raise the limit, shorten the pack or use more ranks."
        raise ArgumentError("memory_limit", self.limit, allowed, remedy)
