"""`Plan`: what the ranks of a group do for one layer on one batch. Pure data, made on the host; no torch in here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import ROW_ALIGNMENT, HeadDeal, Sections
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.tables import Tables


@dataclass(frozen=True)
class ToHeads:
    """One collective: all sections of the exchange, from own tokens to own heads."""

    exchange: Exchange


@dataclass(frozen=True)
class Compute:
    """Local work between collectives, by the name under which the operation hands it to the executor."""

    name: str


@dataclass(frozen=True)
class ToTokens:
    """One collective: back from own heads to own tokens."""

    exchange: Exchange


Step = ToHeads | Compute | ToTokens


def describe_layout(layout: Layout) -> list[str]:
    """A layout's value, and its documents', as lines of text."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (layout.starts, layout.ends, layout.fragment_offsets):
        digest.update(array.tobytes())
    lengths = hashlib.blake2b(layout.packing.lengths.tobytes(), digest_size=8)
    return [
        f"documents: {layout.packing!r}, lengths hash {lengths.hexdigest()}",
        f"layout: cp_size {layout.cp_size}, align {layout.align}, at least {layout.min_rows} rows, "
        f"fragments hash {digest.hexdigest()}",
        f"tokens per rank: {layout.token_counts.tolist()}",
    ]


@dataclass(frozen=True)
class Plan(Tables):
    """The ordered steps of one layer on one batch, with who sends what to whom.

    Hashable and compared by value. Made by `plan_attention` and `plan_linear`, run by the operation of its kind.

    Attributes:
        kind: the operation: "attention" or "gdn".
        scheme: how it is spread: "a2a" for attention, "headwise" for a linear layer.
        layout: who holds which tokens, before and after.
        deal: which heads each rank computes.
        mask: which keys a query sees; None for a linear layer.
        steps: what happens, in order; backward runs their adjoints in reverse.
        notes: what the user should know about this plan.
    """

    kind: str
    scheme: str
    layout: Layout
    deal: HeadDeal
    mask: Mask | None
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()

    @property
    def packing(self) -> Packing:
        return self.layout.packing

    @property
    def cp_size(self) -> int:
        return self.layout.cp_size

    @property
    def sections(self) -> Sections:
        """What the plan's operation takes: the sections of its first exchange."""
        return next(step.exchange.sections for step in self.steps if isinstance(step, ToHeads))

    @property
    def heads_per_group(self) -> int:
        return max(hi for _, hi in self.deal.heads) // max(hi for _, hi in self.deal.groups)

    def exchanges(self, *, forward: bool) -> Iterator[tuple[Exchange, bool]]:
        """Each collective of one direction, in order, with whether it goes to the head side."""
        moves = [(step.exchange, isinstance(step, ToHeads)) for step in self.steps if not isinstance(step, Compute)]
        return iter(moves) if forward else ((exchange, not to_heads) for exchange, to_heads in reversed(moves))

    def collectives(self, *, forward: bool) -> int:
        return sum(not exchange.is_local for exchange, _ in self.exchanges(forward=forward))

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """For each rank the bytes that it sends to others in one direction, every element `item_size` bytes long."""
        return self._bytes(item_size, forward=forward, alignment=ROW_ALIGNMENT)

    def bytes_needed(self, item_size: int, *, forward: bool) -> list[int]:
        """`bytes_sent` without the alignment of rows: what this dealing of heads cannot do without."""
        return self._bytes(item_size, forward=forward, alignment=1)

    def _bytes(self, item_size: int, *, forward: bool, alignment: int) -> list[int]:
        sent = [
            exchange.bytes_sent(item_size, to_heads=to_heads, alignment=alignment)
            for exchange, to_heads in self.exchanges(forward=forward)
        ]
        return [sum(of_rank) for of_rank in zip(*sent, strict=True)]

    def work_per_rank(self) -> list[int]:
        """The local work of each rank: query-key pairs times heads for attention, tokens times heads for a rule."""
        per_head = self.packing.total if self.mask is None else self.mask.area
        return [per_head * (hi - lo) for lo, hi in self.deal.heads]

    @property
    def work_imbalance(self) -> float:
        """The busiest rank's work over the mean; 1.0 is even."""
        work = self.work_per_rank()
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    def fingerprint(self) -> bytes:
        """16 bytes that are equal on two ranks exactly when their plans are (up to hash collisions)."""
        return hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).digest()

    def describe(self) -> list[str]:
        """The plan's value as lines of text: what two ranks compare when their plans differ."""
        lines = [
            f"kind: {self.kind}",
            f"scheme: {self.scheme}",
            *describe_layout(self.layout),
            f"mask: {self.mask.describe() if self.mask else 'none'}",
        ]
        for number, step in enumerate(self.steps):
            if isinstance(step, Compute):
                lines.append(f"step {number}: compute {step.name}")
            else:
                blocks = ", ".join(
                    f"{b.name} {b.num_heads} x {b.head_dim} {b.ranges}" for b in step.exchange.sections.blocks
                )
                lines.append(f"step {number}: {type(step).__name__} {blocks}")
        return lines

    def explain(self, item_size: int = 2) -> str:
        """Who owns what and what it costs, as text, with elements of `item_size` bytes."""
        from megatron_cp.executor.explain import explain

        return explain(self, item_size)

    def __hash__(self) -> int:
        return hash((self.kind, self.scheme, self.layout, self.deal, self.mask, self.steps))
