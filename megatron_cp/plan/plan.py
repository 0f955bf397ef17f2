"""`Plan`: what the ranks of a group do for one layer on one batch. Pure data, made on the host; no torch in here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_cp.errors import checked_integer
from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import ROW_ALIGNMENT, HeadPartition, Section, Sections
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.route import pieces_between
from megatron_cp.plan import words
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.schemes import REDISTRIBUTE
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE, Transport

_SHOWN = 7  # ways in words, the chosen one among them


@dataclass(frozen=True)
class Price:
    """What one way of running a layer was predicted to take.

    Attributes:
        scheme: the way.
        forward, backward: milliseconds of the slowest rank, its share of a relayout included.
        bytes_sent: at most by a rank, forward, that share included.
        is_bound: these are lower bounds, which were enough to rule it out.
        hardware: on what, in words.
        exposed: milliseconds of both in which that rank waits for others and computes nothing.
        detail: of the way, beside its name.
        rule: of the way that was taken, why it was though another one is predicted to be faster; else empty.
    """

    scheme: str
    forward: float
    backward: float
    bytes_sent: int
    is_bound: bool = False
    hardware: str = ""
    exposed: float = 0.0
    detail: str = ""
    rule: str = ""

    @property
    def total(self) -> float:
        """Milliseconds of both directions."""
        return self.forward + self.backward

    def describe(self, which: str) -> str:
        """A line about it."""
        name = f"{self.scheme}{self.detail}"
        if self.is_bound:
            times = f"predicted at least {self.forward:.3f} ms forward, {self.backward:.3f} ms backward"
            sent = f"; ranks send at least {words.size(self.bytes_sent)} forward" if self.bytes_sent else ""
            return f"{which} {name:<20} {times}{sent}"
        return (
            f"{which} {name:<20} predicted {self.forward:.3f} ms forward, {self.backward:.3f} ms backward, "
            f"{self.exposed:.3f} ms of it waiting; a rank sends at most {words.size(self.bytes_sent)} forward"
        )


@dataclass(frozen=True)
class Redistribution:
    """Hidden states that are moved to a plan's layout around a run of linear layers, and back after it.

    Attributes:
        hidden_layout: the layout that they have outside the run.
        hidden_size: features of a token.
        layers: linear layers in the run.
    """

    hidden_layout: Layout
    hidden_size: int
    layers: int

    def bytes_sent(self, inner: Layout, item_size: int) -> list[int]:
        """For each rank, in and out together; the same forward and backward."""
        before, after, sizes = pieces_between(self.hidden_layout, inner)
        moved, counts = before != after, np.zeros(inner.cp_size, dtype=np.int64)
        for owners in (before, after):
            np.add.at(counts, owners[moved], sizes[moved])
        return [count * self.hidden_size * item_size for count in counts.tolist()]


@dataclass(frozen=True)
class Plan(Memo):
    """The ordered steps of one layer on one batch, with who sends what to whom.

    Hashable and compared by value. Made by `plan_attention` and `plan_linear`, run by the operation of its kind.

    Attributes:
        kind: the operation: "attention" or a kind of linear layer, one of `kinds.KINDS`.
        scheme: how it is spread: a value of `--cp-comm-type` for attention, of `--linear-cp-mode` for a linear layer.
        layout: who holds which tokens, before and after.
        sections: what the operation takes, and which of its heads each `head_rank` computes.
        partition: the same heads, those that read and those that are shared.
        mask: which keys a query sees; None for a linear layer.
        steps: what happens, in order; backward runs their adjoints in reverse.
        notes: what the user should know about this plan.
        conv_width: taps of a linear layer's convolution.
        redistribution: how hidden states come to `layout`, where they are redistributed. A plan's bytes and collectives
            are the layer's; those of the redistribution, which a run of layers shares, are its own.
        transport: how its messages travel.
        prices: of the ways that were weighed, the chosen one first; not part of a plan's value.
    """

    kind: str
    scheme: str
    layout: Layout
    sections: Sections
    partition: HeadPartition
    mask: Mask | None
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    conv_width: int = 1
    redistribution: Redistribution | None = None
    transport: Transport = COLLECTIVE
    prices: tuple[Price, ...] = field(default=(), compare=False)

    @property
    def hidden_layout(self) -> Layout | None:
        """The layout of hidden states outside the run of layers, where they are redistributed; else None."""
        return None if self.redistribution is None else self.redistribution.hidden_layout

    @property
    def packing(self) -> Packing:
        return self.layout.packing

    @cached_property
    def cp_size(self) -> int:
        return self.layout.cp_size

    @cached_property
    def ulysses_degree(self) -> int:
        """The number of ranks that exchange heads with one another."""
        return len(self.partition.heads)

    @cached_property
    def kv_layout(self) -> Layout:
        """Who holds the keys: `layout` but for cross-attention."""
        inbound = [step.exchange.layout for step in self.steps if isinstance(step, ToHeads)]
        return inbound[-1] if inbound else self.attend.keys if self.attend else self.layout

    @cached_property
    def attend(self) -> Attend | None:
        """The softmax of the plan; None for a linear layer."""
        return next((step for step in self.steps if isinstance(step, Attend)), None)

    def attend_of(self, chunk: int) -> Attend:
        """The softmax of one chunk of heads."""
        assert self.attend is not None
        if self.head_chunks == 1:
            return self.attend
        return self.memo(("attend", chunk), lambda: self._attend_of(chunk))

    def _attend_of(self, chunk: int) -> Attend:
        assert self.attend is not None
        part = replace(self.attend, partition=self.partition_of(chunk))
        part.share_memo(self.attend)
        return part

    @cached_property
    def out(self) -> Section:
        """The heads of what the operation returns."""
        match self.steps[-1]:
            case ToTokens(exchange):
                return exchange.sections.blocks[0]
            case Scan(heads=heads, value_dim=size):
                return Section("out", heads, size, ((0, heads),))
            case Halo(channels=channels):
                return Section("out", channels, 1, ((0, channels),))
            case Attend(partition=partition, value_head_dim=size):
                heads = partition.heads[-1][1]
                return Section("out", heads, size, partition.heads)
        raise AssertionError(f"a plan that ends in {self.steps[-1]}")

    @cached_property
    def head_chunks(self) -> int:
        """Into how many parts a head exchange cuts each rank's heads."""
        return max((len(exchange.parts) for exchange, _ in self.exchanges(forward=True)), default=1)

    @property
    def codec(self) -> Codec | None:
        """How activations are coded in a head exchange."""
        return next((exchange.codec for exchange, _ in self.exchanges(forward=True)), None)

    def partition_of(self, chunk: int) -> HeadPartition:
        """Which heads each `head_rank` computes in one chunk."""
        return self.memo(("partition", chunk), lambda: self.partition.chunk(chunk, self.head_chunks))

    def numbers_of(self, chunk: int) -> tuple[list[int], list[int]]:
        """The heads that some rank computes in one chunk, and those that they share; each rising."""
        partition = self.partition_of(chunk)
        heads, groups = (
            sorted({head for lo, hi in ranges for head in range(lo, hi)})
            for ranges in (partition.heads, partition.groups)
        )
        return heads, groups

    @cached_property
    def recurrent_steps(self) -> tuple[Halo | Scan, ...]:
        """The steps by which segments continue one another."""
        return tuple(step for step in self.steps if isinstance(step, Halo | Scan))

    def exchanges(self, *, forward: bool) -> Iterator[tuple[Exchange, bool]]:
        """Each head exchange of one direction, in order, with whether it goes to the head side."""
        moves = [
            (step.exchange, isinstance(step, ToHeads)) for step in self.steps if isinstance(step, ToHeads | ToTokens)
        ]
        return iter(moves) if forward else ((exchange, not to_heads) for exchange, to_heads in reversed(moves))

    def collectives(self, *, forward: bool) -> int:
        """What a rank starts: collectives, and the messages to and from its neighbours of a ring."""
        count = sum(len(exchange.parts) for exchange, _ in self.exchanges(forward=forward) if not exchange.is_local)
        count += sum(step.crosses for step in self.recurrent_steps)
        return count + (self.head_chunks * self.attend.collectives(forward=forward) if self.attend else 0)

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """For each rank the bytes that it sends to others in one direction, every element `item_size` bytes long."""
        item_size = checked_integer("item_size", item_size, 1)
        sent = self._along_segments(
            self._exchanged(item_size, forward=forward, alignment=ROW_ALIGNMENT), item_size, forward=forward
        )
        if self.attend is not None:
            along = self.attend.bytes_sent(item_size, forward=forward).tolist()
            sent = [sum(pair) for pair in zip(sent, along, strict=True)]
        return sent

    def bytes_needed(self, item_size: int, *, forward: bool) -> list[int]:
        """`bytes_sent` without the alignment of rows and the keys that no query sees.

        What this assignment of tokens and heads cannot do without.
        """
        item_size = checked_integer("item_size", item_size, 1)
        sent = self._along_segments(
            self._exchanged(item_size, forward=forward, alignment=1), item_size, forward=forward
        )
        if self.attend is not None:
            along = self.attend.bytes_needed(item_size, forward=forward).tolist()
            sent = [sum(pair) for pair in zip(sent, along, strict=True)]
        return sent

    def _along_segments(self, sent: list[int], item_size: int, *, forward: bool) -> list[int]:
        for step in self.recurrent_steps:
            sent = [sum(pair) for pair in zip(sent, step.bytes_sent(item_size, forward=forward), strict=True)]
        return sent

    def _exchanged(self, item_size: int, *, forward: bool, alignment: int) -> list[int]:
        sent = [
            exchange.bytes_sent(item_size, to_heads=to_heads, alignment=alignment)
            for exchange, to_heads in self.exchanges(forward=forward)
        ]
        return [sum(of_rank) for of_rank in zip(*sent, strict=True)] if sent else [0] * self.cp_size

    def work_per_rank(self, *, forward: bool = True) -> list[int]:
        """The local work of each rank: query-key pairs times heads for attention, tokens times heads for a rule.

        Args:
            forward: the direction; they differ where tiles are assigned one by one.
        """
        degree, tokens = self.ulysses_degree, self.layout.token_counts
        areas = [
            self.attend.area(kv_rank, forward=forward)
            if self.attend
            else int(tokens[kv_rank * degree : (kv_rank + 1) * degree].sum())
            for kv_rank in range(self.cp_size // degree)
        ]
        return [area * (hi - lo) for area in areas for lo, hi in self.partition.heads]

    def heads_of(self, rank: int) -> tuple[int, int]:
        """The query (or value) heads that a rank computes, as a range."""
        return self.partition.heads[checked_integer("rank", rank, 0, self.cp_size - 1) % self.ulysses_degree]

    def groups_of(self, rank: int) -> tuple[int, int]:
        """The key/value (or key) heads that a rank reads, as a range."""
        return self.partition.groups[checked_integer("rank", rank, 0, self.cp_size - 1) % self.ulysses_degree]

    @property
    def work_imbalance(self) -> float:
        """The busiest rank's work over the mean; 1.0 is even."""
        work = self.work_per_rank()
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    def fingerprint(self) -> bytes:
        """16 bytes that differ where two ranks' plans differ, up to hash collisions.

        Or where they were asked for in other words: a window without limits is equal to a causal mask.
        """
        return hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).digest()

    def describe(self) -> list[str]:
        """The plan's value as lines of text: what two ranks compare when their plans differ."""
        lines = [
            f"kind: {self.kind}",
            f"scheme: {self.scheme}",
            f"transport: {self.transport.describe()}",  # always: ranks compare line by line
            *self.layout.describe(),
            f"mask: {self.mask.describe() if self.mask else 'none'}",
            *([f"conv width: {self.conv_width}"] if self.mask is None else []),
            *([f"outside the run: {line}" for line in self.hidden_layout.describe()] if self.hidden_layout else []),
        ]
        for number, step in enumerate(self.steps):
            match step:
                case Compute(name):
                    lines.append(f"step {number}: compute {name}")
                case Attend():
                    lines.extend(f"step {number}: {line}" for line in step.describe())
                case Halo() | Scan():
                    lines.append(f"step {number}: {step.describe()}")
                case ToHeads(exchange) | ToTokens(exchange):
                    if exchange.layout is not self.layout and exchange.layout != self.layout:
                        lines.extend(f"step {number}: {line}" for line in exchange.layout.describe())
                    blocks = ", ".join(
                        f"{b.name} {b.num_heads} x {b.head_dim} {b.ranges}" for b in exchange.sections.blocks
                    )
                    how = f", {len(exchange.chunks)} chunks" if exchange.chunks else ""
                    how += f", coded as {exchange.codec.name}" if exchange.codec else ""
                    lines.append(f"step {number}: {type(step).__name__} {blocks}{how}")
        return lines

    def explain(self, item_size: int = 2) -> str:
        """Who owns what and what it costs, as text, with elements of `item_size` bytes."""
        item_size, ranks = checked_integer("item_size", item_size, 1), range(self.cp_size)
        about = self.mask.describe() if self.mask else "the state starts anew with each document"
        way = self.scheme if self.redistribution is None else REDISTRIBUTE.name
        group = KINDS[self.kind].shared if self.kind in KINDS else "kv heads"
        heads, groups = ([of(rank) for rank in ranks] for of in (self.heads_of, self.groups_of))
        lines = [
            f"{self.kind} by {way} over {words.counted(self.cp_size, 'rank')}: "
            f"{words.counted(self.packing.num_documents, 'document')}, "
            f"{words.counted(self.packing.total, 'token')}, {about}",
            "",
            *words.ownership(self.layout),
            "",
            *words.table_of_ranks(self.layout, group, heads, groups, self.work_per_rank()),
            "",
        ]
        for number, step in enumerate(self.steps, start=1):
            described = words.words_of(step, self.cp_size, item_size, chunkwise=bool(self.recurrent_steps))
            lines.extend(f"step {number}: {line}" for line in described)
        lines += ["", *self._explain_costs(item_size), *self._explain_redistribution(item_size)]
        lines += self._explain_prices()
        lines.extend(f"predicted for {price.hardware}" for price in self.prices[:1])
        lines.extend(f"note: {note}" for note in self.notes)
        return "\n".join(lines)

    def _explain_prices(self) -> list[str]:
        """The way that was taken, the others from the fastest on, and by which rule a slower one was taken."""
        others = sorted(self.prices[1:], key=lambda price: (price.is_bound, price.total))
        lines = [price.describe("chosen") for price in self.prices[:1]]
        lines += [price.describe("other ") for price in others[: _SHOWN - 1]]
        more = len(self.prices) - _SHOWN
        lines += [f"and {words.counted(more, 'way')} more"] * (more > 0)
        if others and not others[0].is_bound and others[0].total < self.prices[0].total:
            gain = f"{self.prices[0].total / others[0].total - 1:.1%}"
            lines.append(
                f"{others[0].scheme}{others[0].detail} is predicted to be {gain} faster; {self.prices[0].rule}: see "
                "docs/planning.md"
            )
        return lines

    def _explain_costs(self, item_size: int) -> list[str]:
        lines = []
        spare = "alignment and keys that nobody sees" if self.attend else "alignment"
        for name, forward in (("forward", True), ("backward", False)):
            sent, needed = (f(item_size, forward=forward) for f in (self.bytes_sent, self.bytes_needed))
            lines.append(
                f"{name}: a rank starts {words.counted(self.collectives(forward=forward), 'transfer')} and sends "
                f"at most {words.size(max(sent))}; {words.size(max(needed))} without {spare}; "
                f"at {item_size} bytes an element"
            )
        lines += self._explain_assignment()
        if self.transport != COLLECTIVE:
            lines.append(f"transport: {self.transport.describe()}")
        return [*lines, f"busiest rank: {self.work_imbalance:.3f} x the mean work"]

    def _explain_assignment(self) -> list[str]:
        """How near assigned tiles are to the least that any assignment sends."""
        tiled = self.attend.tiled if self.attend else None
        lines = []
        for name, found in zip(("forward", "backward"), tiled.solutions if tiled else (), strict=False):
            most, bound = words.size(found.bytes_on_the_way), words.size(found.bound)
            beside = "which is the least" if found.is_optimal else f"no assignment of these needs less than {bound}"
            lines.append(
                f"{name}: the busiest rank sends or receives {most} for tiles, {beside}, if no rank computes more than "
                f"{found.load_cap} pairs; found in {found.seconds:.2f} s"
            )
        for name, schedule, rounds in zip(
            ("forward", "backward"), tiled.schedules if tiled else (), tiled.rounds if tiled else (), strict=False
        ):
            lines.append(
                f"{name}: rows of tiles come in {words.counted(rounds, 'round')}, predicted "
                f"{schedule.milliseconds:.3f} ms; in any order these tiles take at least {schedule.bound:.3f} ms"
            )
        return lines

    def _explain_redistribution(self, item_size: int) -> list[str]:
        if self.redistribution is None:
            return []
        layers = f"{self.redistribution.layers} linear layers" if self.redistribution.layers > 1 else "this layer"
        most = words.size(max(self.redistribution.bytes_sent(self.layout, item_size)))
        return [
            f"around a run of {layers} hidden states are redistributed: 2 transfers more forward and 2 backward, of at "
            f"most {most} a rank together; outside the run tokens are held so:",
            *words.ownership(self.redistribution.hidden_layout),
        ]

    def __hash__(self) -> int:
        return hash((self.kind, self.scheme, self.layout, self.partition, self.mask, self.steps))
