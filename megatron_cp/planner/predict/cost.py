"""What a way of running a linear layer takes, predicted from bytes and products. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_cp.layout import Layout
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.recurrence import Scan
from megatron_cp.plan.schemes import CHUNKWISE

CHUNK = 64  # tokens that a chunked kernel takes at once


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank. They only have to order the ways of running a layer, not to be met.

    Attributes:
        host_size: ranks of one host, with fast links among themselves.
        host_bandwidth, network_bandwidth: bytes a second that a rank sends within a host and beyond it.
        latency: seconds that starting a collective takes.
        products: multiply-adds a second of a linear layer's kernels.
        name: what these rates are of, and where they come from.
    """

    host_size: int
    host_bandwidth: float
    network_bandwidth: float
    latency: float
    products: float
    name: str = "rates that were given"

    def describe(self) -> str:
        """The rates in words."""
        return (
            f"{self.name}: {self.host_size} ranks a host, {self.host_bandwidth / 1e9:g} GB/s within it and "
            f"{self.network_bandwidth / 1e9:g} GB/s beyond, {self.latency * 1e6:g} us to start a transfer, "
            f"{self.products / 1e12:g}e12 multiply-adds a second"
        )

    def bandwidth(self, ranks: int) -> float:
        """Bytes a second that a rank of so many sends."""
        return self.host_bandwidth if ranks <= self.host_size else self.network_bandwidth


# Taken from data sheets and rounded down.
H100 = Hardware(
    8,
    host_bandwidth=2.5e11,
    network_bandwidth=4e10,
    latency=3e-5,
    products=1e14,
    name="an H100 as its data sheet says, measured nowhere",
)


def priced(plan: Plan, hardware: Hardware, *, item_size: int) -> Price:
    """What a plan of a linear layer takes on the slowest rank.

    Args:
        plan: of the layer.
        hardware: the rates.
        item_size: bytes of an activation.
    """
    redistributed = starts_of_redistribution = 0.0
    if plan.redistribution is not None:
        redistributed = max(plan.redistribution.bytes_sent(plan.layout, item_size)) / plan.redistribution.layers
        starts_of_redistribution = 2 / plan.redistribution.layers
    times, sent = [], 0
    for forward in (True, False):
        moved = max(plan.bytes_sent(item_size, forward=forward)) + int(redistributed)
        # Of chunks of heads the first start alone: the others, and much of the wire, hide behind the work of the chunks
        # before. As that overlap is not priced, neither are they, or what is meant to save time would cost it here.
        starts = plan.collectives(forward=forward) / plan.head_chunks + starts_of_redistribution
        seconds = (
            moved / hardware.bandwidth(plan.cp_size)
            + starts * hardware.latency
            + products(plan, forward=forward) / hardware.products
        )
        times.append(seconds * 1e3)
        sent = sent or moved
    return Price(plan.scheme, times[0], times[1], sent, hardware=hardware.describe())


def lower_bound(layout: Layout, state_size: int, hardware: Hardware) -> Price:
    """What chunkwise takes at least: the state before each token of a document that another rank's token precedes."""
    ranks, owners = layout.cp_size, layout.located(np.sort(layout.starts))[0]
    changes = np.count_nonzero(owners[1:] != owners[:-1]) - (layout.packing.num_documents - 1)
    sent = max(int(changes), 0) * state_size * 4 // ranks  # by the rank that sends most, which is no less than the mean
    milliseconds = sent / hardware.bandwidth(ranks) * 1e3
    return Price(CHUNKWISE.name, milliseconds, milliseconds, sent, is_bound=True, hardware=hardware.describe())


def products(plan: Plan, *, forward: bool) -> float:
    """Multiply-adds of the busiest rank: the chunked rule's, and those of the maps that its segments leave."""
    kind = KINDS[plan.kind]
    if not kind.has_state:
        return max(plan.work_per_rank()) * plan.conv_width * (1 if forward else 2)
    scan = next((step for step in plan.steps if isinstance(step, Scan)), None)
    blocks = {block.name: block for block in plan.sections.blocks}
    keys, values = (blocks[name].head_dim for name in (kind.keys, kind.values))
    rule = CHUNK * (keys + values) + 2 * keys * values
    if kind.is_dense:
        rule += CHUNK * (keys + (keys + values) // 2) + keys * values
    total = np.array(plan.work_per_rank()) * float(rule if forward else 2 * rule)
    if scan is not None:
        segments = scan.segments
        middle = segments.past & segments.future
        tokens = np.bincount(segments.rank, (segments.end - segments.start) * middle, minlength=plan.cp_size)
        walk = keys * values * (2 if kind.is_dense else 1)
        total += tokens * scan.heads * (walk + (2 * keys * keys if kind.is_dense and forward else 0))
    return float(total.max())
