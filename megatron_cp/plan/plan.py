"""`Plan`: the work of a group's ranks for one layer on one batch. Pure data, made on the host; no torch in here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_cp.errors import checked_flag, checked_integer
from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import ROW_ALIGNMENT, HeadPartition, Section, Sections
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.memo import Memo, remembered
from megatron_cp.layout.packing import lengthened
from megatron_cp.layout.route import rows_between
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.describe import counted, describe_step, ownership, rank_table, size
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.layer_program import LayerProgram, layer_program
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.schemes import REDISTRIBUTE
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens
from megatron_cp.plan.tile_assignment import AssignmentQuality
from megatron_cp.plan.transport import COLLECTIVE, Transport

if TYPE_CHECKING:
    from megatron_cp.exchange.device import CallTables

_SHOWN = 7  # candidates that `explain` prints, the chosen one among them


@dataclass(frozen=True)
class Price:
    """The predicted cost of one candidate for running a layer.

    Attributes:
        forward, backward: milliseconds of the slowest rank, its share of a redistribution included.
        bytes_sent: the most that a rank sends in forward, that share included.
        is_bound: True if the times are lower bounds, which were enough to rule the candidate out.
        is_sum: True if the times are sums of work and transfers, which were enough to rule the candidate out.
        exposed: milliseconds of both directions by which transfers exceed the work of the busiest rank.
        detail: the candidate's options, printed after its scheme.
        reason: the reason why this candidate was chosen although another is predicted to be faster; else empty.
        imbalance: milliseconds of both directions by which the busiest rank's work exceeds that of the mean rank.
        by_link: the bytes that all ranks send within hosts and between them, both directions; None for a bound and
            where all ranks are on one host. The way of a backend's all-gather is counted as it is predicted.
    """

    scheme: str
    forward: float
    backward: float
    bytes_sent: int
    is_bound: bool = False
    hardware: str = ""
    exposed: float = 0.0
    detail: str = ""
    reason: str = ""
    imbalance: float = 0.0
    by_link: tuple[int, int] | None = None
    is_sum: bool = False

    @property
    def is_played(self) -> bool:
        """True if the simulator has played the candidate."""
        return not self.is_bound and not self.is_sum

    @property
    def total(self) -> float:
        """Milliseconds of both directions."""
        return self.forward + self.backward

    @property
    def parts(self) -> dict[str, float]:
        """The milliseconds of both directions by cause."""
        work = self.total - self.exposed - self.imbalance
        return {"work": work, "exposed transfers": self.exposed, "imbalance": self.imbalance}

    def describe_links(self) -> str:
        """Returns a clause on the bytes within and between hosts; nothing for one host."""
        if self.by_link is None:
            return ""
        within, between = map(size, self.by_link)
        return f"; all ranks send {within} within hosts and {between} between hosts, both directions"

    def describe(self, which: str) -> str:
        """Returns a line of text."""
        name = f"{self.scheme}{self.detail}"
        if not self.is_played:
            roughly = "roughly" if self.is_sum else "at least"
            times = f"predicted {roughly} {self.forward:.3f} ms forward, {self.backward:.3f} ms backward"
            sent = f"; ranks send {roughly} {size(self.bytes_sent)} forward" if self.bytes_sent else ""
            return f"{which} {name:<20} {times}{sent}"
        return (
            f"{which} {name:<20} predicted {self.forward:.3f} ms forward, {self.backward:.3f} ms backward, "
            f"{self.exposed:.3f} ms of it exposed transfers and {self.imbalance:.3f} ms imbalance; a rank sends at "
            f"most {size(self.bytes_sent)} forward{self.describe_links()}"
        )


@dataclass(frozen=True)
class Redistribution:
    """Hidden states, of `hidden_size` features a token, that have another layout in a run of `layers` linear layers.

    They are moved from `hidden_layout` to the plan's layout before the run, and back after it.
    """

    hidden_layout: Layout
    hidden_size: int
    layers: int

    def bytes_sent(self, inner: Layout, item_size: int) -> list[int]:
        """Returns the bytes that each rank sends, in and out together; forward and backward send the same."""
        rows = rows_between(self.hidden_layout, inner)
        np.fill_diagonal(rows, 0)
        return [count * self.hidden_size * item_size for count in (rows.sum(axis=0) + rows.sum(axis=1)).tolist()]


@dataclass(frozen=True)
class Plan(Memo):
    """The ordered steps of one layer on one batch, with senders and receivers.

    Hashable and compared by value. Made by `plan_attention` and `plan_linear`, run by the operation of its kind.

    Attributes:
        kind: the operation: "attention" or a kind of linear layer, one of `kinds.KINDS`.
        scheme: a value of `--cp-comm-type` for attention, of `--linear-cp-mode` for a linear layer.
        layout: the ranks that hold each token, before and after the layer.
        sections: the tensors that the operation takes, and the heads that each `head_rank` computes.
        partition: the same heads as ranges of query (or value) heads and of the key heads that they share.
        mask: the keys that each query sees; None for a linear layer.
        steps: the work in order; backward runs the adjoints in reverse.
        notes: remarks for the user.
        conv_width: taps of a linear layer's convolution.
        redistribution: the move of hidden states to `layout`, if they are redistributed. A plan's bytes and collectives
            are the layer's; those of the redistribution, which a run of layers shares, are its own.
        transport: the algorithm that carries its messages.
        prices: of the candidates that were compared, the chosen one first; not part of a plan's value.
        tables: the tables that this rank's calls read; None if operations make them.
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
    tables: CallTables | None = None

    @property
    def hidden_layout(self) -> Layout | None:
        """The layout of hidden states outside the run of layers, where they are redistributed; else None."""
        return None if self.redistribution is None else self.redistribution.hidden_layout

    @property
    def inside(self) -> Plan:
        """The plan that operations take for rows that are in `layout` already: without the redistribution."""
        if self.redistribution is None:
            return self
        inside: Plan = self.memo(("inside",), lambda: replace(self, redistribution=None))
        return inside

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
    def steps_a_token(self) -> int:
        """The steps of the recurrence that a token makes: the Householder steps of Gated DeltaProduct, else 1."""
        kind = KINDS.get(self.kind)
        return 1 if kind is None else max(kind.counts(len(self.sections.blocks)))

    @property
    def rule_packing(self) -> Packing:
        """The packing of the recurrence's steps, for plans whose ranks have whole documents."""
        return lengthened(self.packing, self.steps_a_token)

    @cached_property
    def kv_layout(self) -> Layout:
        """The layout of the keys; `layout` except for cross-attention."""
        inbound = [step.exchange.layout for step in self.steps if isinstance(step, ToHeads)]
        return inbound[-1] if inbound else self.attend.keys if self.attend else self.layout

    @cached_property
    def attend(self) -> Attend | None:
        """The softmax step; None for a linear layer."""
        return next((step for step in self.steps if isinstance(step, Attend)), None)

    @remembered
    def chunk_attend(self, chunk: int) -> Attend:
        """Returns the softmax step of one chunk of heads."""
        attend = self.attend
        assert attend is not None
        if self.head_chunks == 1:
            return attend
        part = replace(attend, partition=self.chunk_partition(chunk))
        part.share_memo(attend)
        return part

    @cached_property
    def out(self) -> Section:
        """The heads of the operation's result."""
        match self.steps[-1]:
            case ToTokens(exchange):
                return exchange.sections.blocks[0]
            case Scan(heads=heads, value_dim=value_dim):
                return Section("out", heads, value_dim, ((0, heads),))
            case Halo(channels=channels):
                return Section("out", channels, 1, ((0, channels),))
            case Attend(partition=partition, value_head_dim=value_dim, latent=latent):
                heads = partition.heads[-1][1]
                if latent is not None and latent.mode == "absorb":  # values are latents
                    value_dim = latent.made + latent.shared - self.sections.blocks[0].head_dim
                return Section("out", heads, value_dim, partition.heads)
        raise AssertionError(f"a plan that ends in {self.steps[-1]}")

    @cached_property
    def head_chunks(self) -> int:
        """The number of parts into which a head exchange cuts each rank's heads."""
        return max((len(exchange.parts) for exchange, _ in self.exchanges(forward=True)), default=1)

    @property
    def num_chunks(self) -> int:
        """The number of chunks in which heads are exchanged, or keys are gathered, whichever is more."""
        return max(self.head_chunks, self.attend.head_chunks if self.attend else 1)

    @property
    def strategy(self) -> str:
        """The name of the scheme or mode: chunkwise between two redistributions of hidden states is "redistribute"."""
        return self.scheme if self.redistribution is None else REDISTRIBUTE.name

    @property
    def codec(self) -> Codec | None:
        """The codec of exchanged heads, or of keys that travel; None without one."""
        of_heads = next((exchange.codec for exchange, _ in self.exchanges(forward=True)), None)
        return of_heads if self.attend is None else of_heads or self.attend.codec

    @property
    def solutions(self) -> tuple[AssignmentQuality, ...]:
        """The answers of the search for tiles, forward and backward; empty where no tiles are assigned."""
        tiled = self.attend.tiled if self.attend else None
        return tiled.solutions if tiled else ()

    @remembered
    def chunk_partition(self, chunk: int) -> HeadPartition:
        """Returns the heads that each `head_rank` computes in one chunk."""
        return self.partition.chunk(chunk, self.head_chunks)

    def chunk_heads(self, chunk: int) -> tuple[list[int], list[int]]:
        """Returns the heads that some rank computes in one chunk, and the key heads that they share; both rising."""
        partition = self.chunk_partition(chunk)
        heads, groups = (
            sorted({head for lo, hi in ranges for head in range(lo, hi)})
            for ranges in (partition.heads, partition.groups)
        )
        return heads, groups

    @cached_property
    def recurrent_steps(self) -> tuple[Halo | Scan, ...]:
        """The steps that continue a segment from the one before it."""
        return tuple(step for step in self.steps if isinstance(step, Halo | Scan))

    @remembered
    def program(self, *, forward: bool, projected: bool = False) -> LayerProgram:
        """Returns the instructions of one direction, the same on every rank; see `layer_program`."""
        return layer_program(self.steps, self.head_chunks, forward=forward, projected=projected)

    def exchanges(self, *, forward: bool) -> Iterator[tuple[Exchange, bool]]:
        """Yields each head exchange of one direction, in order, with True if it goes to the head side."""
        moves = [
            (step.exchange, isinstance(step, ToHeads)) for step in self.steps if isinstance(step, ToHeads | ToTokens)
        ]
        return iter(moves) if forward else ((exchange, not to_heads) for exchange, to_heads in reversed(moves))

    def collectives(self, *, forward: bool) -> int:
        """Returns the number of transfers that a rank starts: collectives, and messages to and from ring neighbours."""
        count = sum(len(exchange.parts) for exchange, _ in self.exchanges(forward=forward) if not exchange.is_local)
        count += sum(step.crosses for step in self.recurrent_steps)
        return count + (self.head_chunks * self.attend.collectives(forward=forward) if self.attend else 0)

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """Returns the bytes that each rank sends to others in one direction, with elements of `item_size` bytes."""
        return [*self._bytes(checked_integer("item_size", item_size, 1), forward=forward, needed=False)]

    def bytes_needed(self, item_size: int, *, forward: bool) -> list[int]:
        """Returns `bytes_sent` without the alignment of rows and without keys that no query sees.

        It is the least that this assignment of tokens and heads can send.
        """
        return [*self._bytes(checked_integer("item_size", item_size, 1), forward=forward, needed=True)]

    @remembered
    def _bytes(self, item_size: int, *, forward: bool, needed: bool) -> tuple[int, ...]:
        alignment = 1 if needed else ROW_ALIGNMENT
        sent = [
            exchange.bytes_sent(item_size, to_heads=to_heads, alignment=alignment)
            for exchange, to_heads in self.exchanges(forward=forward)
        ]
        for step in self.recurrent_steps:
            least = replace(step, gathers=False) if needed and isinstance(step, Scan) and step.gathers else step
            sent.append(least.bytes_sent(item_size, forward=forward))
        if self.attend is not None:
            along = self.attend.bytes_needed if needed else self.attend.bytes_sent
            sent.append(along(item_size, forward=forward).tolist())
        return tuple(sum(by_step) for by_step in zip([0] * self.cp_size, *sent, strict=True))

    def work_per_rank(self, *, forward: bool = True) -> list[int]:
        """Returns each rank's local work: query-key pairs times heads for attention, tokens times heads for a rule.

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
        """Returns the range of query (or value) heads that a rank computes."""
        return self.partition.heads[checked_integer("rank", rank, 0, self.cp_size - 1) % self.ulysses_degree]

    def groups_of(self, rank: int) -> tuple[int, int]:
        """Returns the range of key/value (or key) heads that a rank reads."""
        return self.partition.groups[checked_integer("rank", rank, 0, self.cp_size - 1) % self.ulysses_degree]

    @property
    def work_imbalance(self) -> float:
        """The busiest rank's work divided by the mean; 1.0 is even."""
        work = self.work_per_rank()
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    def fingerprint(self) -> bytes:
        """Returns 16 bytes that differ where two ranks' plans differ, up to hash collisions.

        They also differ where equal masks were given in different terms: a window without limits equals a causal mask.
        """
        return hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).digest()

    def describe(self, *, beside: Layout | None = None) -> list[str]:
        """Returns the plan's value as lines of text, `name: value`, by which two ranks' plans are compared.

        Args:
            beside: a layout that the caller describes, and the lines leave out.
        """
        hidden = self.hidden_layout
        lines = [
            f"kind: {self.kind}",
            f"scheme: {self.scheme}",
            f"transport: {self.transport.describe()}",
            f"heads: {', '.join(f'{b.name} {b.num_heads} x {b.head_dim}' for b in self.sections.blocks)}",
            *([] if self.layout == beside else self.layout.describe()),
            f"mask: {self.mask.describe() if self.mask else 'none'}",
            *([f"conv width: {self.conv_width}"] if self.mask is None else []),
            *([] if hidden in (None, beside) else [f"outside the run, {line}" for line in hidden.describe()]),
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

    def explain(self, item_size: int = 2, *, candidates: bool = True) -> str:
        """Returns the owners, steps and costs as text, for elements of `item_size` bytes.

        `candidates` lists the chosen and the other candidates with their predicted times, and the notes.
        """
        item_size, ranks = checked_integer("item_size", item_size, 1), range(self.cp_size)
        candidates = checked_flag("candidates", candidates)
        about = self.mask.describe() if self.mask else "the state starts anew with each document"
        group = KINDS[self.kind].shared if self.kind in KINDS else "kv heads"
        heads, groups = ([of(rank) for rank in ranks] for of in (self.heads_of, self.groups_of))
        # The machine of the choice need not be this one.
        machine = f", chosen for {self.prices[0].hardware.partition(':')[0]}," if len(self.prices) > 1 else ""
        lines = [
            f"{self.kind} by {self.strategy}{machine} over {counted(self.cp_size, 'rank')}: {self.packing.describe()}, "
            f"{about}",
            "",
            *ownership(self.layout),
            "",
            *rank_table(self.layout, group, heads, groups, self.work_per_rank()),
            "",
        ]
        for number, step in enumerate(self.steps, start=1):
            described = describe_step(step, self.cp_size, item_size, chunkwise=bool(self.recurrent_steps))
            lines.extend(f"step {number}: {line}" for line in described)
        lines += ["", *self._explain_costs(item_size), *self._explain_redistribution(item_size)]
        if candidates:
            lines += [*self._explain_prices(), *(f"predicted for {price.hardware}" for price in self.prices[:1])]
            lines.extend(f"note: {note}" for note in self.notes)
        return "\n".join(lines)

    def _explain_prices(self) -> list[str]:
        """Lists the chosen candidate and the others from the fastest on, with the reason for choosing a slower one."""
        others = sorted(self.prices[1:], key=lambda price: (not price.is_played, price.total))
        lines = [price.describe("chosen") for price in self.prices[:1]]
        lines += [price.describe("other ") for price in others[: _SHOWN - 1]]
        more = len(self.prices) - _SHOWN
        lines += [f"and {counted(more, 'candidate')} more"] * (more > 0)
        if others and others[0].is_played and others[0].total < self.prices[0].total:
            gain = f"{self.prices[0].total / others[0].total - 1:.1%}"
            lines.append(
                f"{others[0].scheme}{others[0].detail} is predicted to be {gain} faster, but {self.prices[0].reason}: "
                "see docs/planning.md"
            )
        return lines

    def _explain_costs(self, item_size: int) -> list[str]:
        lines = []
        for name, forward in (("forward", True), ("backward", False)):
            sent, needed = (f(item_size, forward=forward) for f in (self.bytes_sent, self.bytes_needed))
            lines.append(
                f"{name}: {counted(self.collectives(forward=forward), 'transfer')}; the busiest rank will send "
                f"{size(max(sent))} (this scheme needs {size(max(needed))}), at {item_size} bytes an element"
            )
        lines += self._explain_assignment()
        if self.transport != COLLECTIVE:
            lines.append(f"transport: {self.transport.describe()}")
        return [*lines, f"busiest rank: {self.work_imbalance:.3f} x the mean work"]

    def _explain_assignment(self) -> list[str]:
        """Compares assigned tiles with the least that any assignment sends."""
        lines = []
        for name, found in zip(("forward", "backward"), self.solutions, strict=False):
            most, bound = size(found.busiest_bytes), size(found.bound)
            beside = "which is the least" if found.is_optimal else f"no assignment of these needs less than {bound}"
            lines.append(
                f"{name}: the busiest rank sends or receives {most} for tiles, {beside}, if no rank computes more than "
                f"{found.load_cap} pairs; found in {found.seconds:.2f} s"
            )
        return lines

    def _explain_redistribution(self, item_size: int) -> list[str]:
        if self.redistribution is None:
            return []
        layers = f"{self.redistribution.layers} linear layers" if self.redistribution.layers > 1 else "this layer"
        most = size(max(self.redistribution.bytes_sent(self.layout, item_size)))
        return [
            f"around a run of {layers} hidden states are redistributed: 2 transfers more forward and 2 backward, of at "
            f"most {most} a rank together; outside the run tokens are held so:",
            *ownership(self.redistribution.hidden_layout),
        ]

    def __hash__(self) -> int:
        return hash((self.kind, self.scheme, self.layout, self.partition, self.mask, self.steps))
