"""`MemoryLimit`: selects the candidates whose buffers fit in the memory of a rank. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_cp.errors import ArgumentError
from megatron_cp.plan.describe import size
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.choose import CHUNKS, detail_of
from megatron_cp.planner.predict.memory import buffer_bytes

WithChunks = Callable[[Plan, int], Plan | None]


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the buffers of messages on a rank.

    Attributes:
        limit: the limit in bytes; None for no limit.
        item_size: bytes of an activation.
    """

    limit: int | None
    item_size: int

    def check(self, plan: Plan) -> None:
        """Refuses a plan that exceeds the limit.

        Raises:
            ArgumentError: the plan exceeds the limit; the error says how much it needs.
        """
        if self.limit is not None:
            needed = self._needed_bytes(plan)
            if needed > self.limit:
                self._refuse(plan, needed, "")

    def fitting(self, candidates: Sequence[Plan], with_chunks: WithChunks) -> tuple[list[Plan], tuple[str, ...]]:
        """Returns the candidates that fit, with as few head chunks as necessary, and a note about the others.

        Raises:
            ArgumentError: none fits; the error names the one that needs least.
        """
        if (limit := self.limit) is None:
            return list(candidates), ()
        found, missed = list[Plan](), list[tuple[int, Plan]]()
        for plan in candidates:
            needed, best = min(self._attempts(plan, with_chunks), key=lambda pair: (pair[0] > limit, pair[0]))
            if needed <= limit:
                found.append(best)
            else:
                missed.append((needed, best))
        missed.sort(key=lambda pair: pair[0])
        if not found:
            self._refuse(missed[0][1], missed[0][0], ", the candidate that needs least")
        if not missed:
            return found, ()
        needs = ", ".join(f"{plan.scheme}{detail_of(plan)} needs {size(needed)}" for needed, plan in missed)
        return found, (f"over the memory limit of {size(limit)} of buffers a rank: {needs}",)

    def fitting_chunks(self, with_chunks: WithChunks) -> WithChunks:
        """Wraps `with_chunks` so that it returns None for plans that exceed the limit."""
        if self.limit is None:
            return with_chunks

        def with_fitting(plan: Plan, chunks: int) -> Plan | None:
            found = with_chunks(plan, chunks)
            return None if found is None or self._needed_bytes(found) > (self.limit or 0) else found

        return with_fitting

    def _attempts(self, plan: Plan, with_chunks: WithChunks) -> list[tuple[int, Plan]]:
        """Returns the needed bytes and the plan, with more and more head chunks until one fits."""
        attempts = [(self._needed_bytes(plan), plan)]
        for chunks in CHUNKS:
            if attempts[-1][0] <= (self.limit or 0):
                break
            found = with_chunks(plan, chunks)
            if found is not None:
                attempts.append((self._needed_bytes(found), found))
        return attempts

    def _needed_bytes(self, plan: Plan) -> int:
        return max(buffer_bytes(plan, rank, self.item_size) for rank in range(plan.cp_size))

    def _refuse(self, plan: Plan, needed: int, which: str) -> None:
        allowed = f"at least {needed} bytes ({size(needed)}), which {plan.scheme}{detail_of(plan)} needs{which}"
        remedy = "Raise the limit, shorten the pack or use more ranks."
        raise ArgumentError("memory_limit", self.limit, allowed, remedy)
