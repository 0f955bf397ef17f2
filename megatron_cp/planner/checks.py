"""Checks of arguments and parts of plans that the planning functions share."""

from __future__ import annotations

from pathlib import Path

from megatron_cp.errors import ArgumentError, checked_integer, checked_size
from megatron_cp.exchange.codec import CODECS, Codec
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadPartition, Sections
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.describe import counted, plural
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.predict.hardware import Machine, Setting, Topology
from megatron_cp.planner.predict.machine_files import machine


def check_layout(packing: Packing, layout: Layout) -> None:
    """Refuses anything but a layout of the packing."""
    if not isinstance(packing, Packing):
        raise ArgumentError("packing", packing, "a Packing, as in Packing([7, 1, 130])")
    if not isinstance(layout, Layout) or layout.packing != packing:
        raise ArgumentError("layout", layout, f"a layout of the packing that is planned for, {packing!r}")


def checked_setting(
    transport: Transport, hardware: Machine | str | Path | None, topology: Topology | None, item_size: object,
    cp_size: int,
) -> Setting:  # fmt: skip
    """Returns the setting of the prices of a transport.

    Args:
        transport: the transport.
        hardware: the machine, its preset or its file.
        topology: the hosts of the ranks; by default the transport's hosts, or full hosts of the machine.
        item_size: bytes of an activation.
        cp_size: the number of ranks.

    Raises:
        ArgumentError: an unknown machine, or a topology of other ranks, or on other hosts than the transport's.
    """
    item_size, on = checked_item_size(item_size), machine(hardware)
    if topology is None:
        topology = on.topology(cp_size, transport.hosts or None)
    if transport.hosts and isinstance(topology, Topology) and topology.hosts != transport.hosts:
        raise ArgumentError("topology", topology.hosts, f"the hosts of the transport, {transport.hosts}")
    if not isinstance(topology, Topology) or topology.size != cp_size:
        given = f"{topology.size} ranks" if isinstance(topology, Topology) else topology
        raise ArgumentError("topology", given, f"a Topology of the {cp_size} ranks")
    if transport.name == "shared_memory":
        on, topology = on.sharing_memory(topology)
    return Setting(on, topology, item_size)


def checked_heads(**counts: int) -> tuple[int, int]:
    """Returns the numbers of heads and of groups; errors use the names of the two keyword arguments, heads first."""
    (heads_name, heads), (groups_name, groups) = ((name, checked_size(name, count)) for name, count in counts.items())
    if heads % groups:
        raise ArgumentError(groups_name, groups, f"a divisor of {heads_name}, {heads}")
    return heads, groups


def checked_item_size(value: object) -> int:
    """Returns the bytes of an activation after checking them."""
    return checked_integer("item_size", value, 1, 16)


def checked_chunks(asked: int, partition: HeadPartition, group: str) -> int:
    """Returns the number of parts of a rank's heads; each has at least one group, which errors call `group`."""
    asked, most, ranks = checked_integer("head_chunks", asked, 1), partition.most_groups, len(partition.groups)
    if asked > most:
        count = max(hi for _, hi in partition.groups)
        found = counted(count, group) + (f" over {ranks} ranks" if ranks > 1 else "")
        fewer = f" of a rank: use more {plural(group)} or fewer ranks" if ranks > 1 else ""
        allowed = f"{'1' if most == 1 else f'1 to {most}'}, for {found}"
        raise ArgumentError("head_chunks", asked, allowed, f"A chunk is at least one {group}{fewer}.")
    return asked


def no_chunks(asked: int, scheme: str, remedy: str) -> int:
    """Returns 1, the only number of chunks of a scheme that has none."""
    if checked_integer("head_chunks", asked, 1) > 1:
        raise ArgumentError("head_chunks", asked, f"1 or None for {scheme}", remedy)
    return 1


def checked_codec(name: str, scheme: str, remedy: str) -> Codec | None:
    """Returns the codec of that name; if `remedy` is not empty, refuses any but "none" with it."""
    known = require("codec", name)
    if known != "none" and remedy:
        raise ArgumentError("codec", name, f"none for {scheme}", remedy)
    return CODECS[known]


def exchange_of(
    layout: Layout, sections: Sections, partition: HeadPartition, chunks: int, codec: Codec | None
) -> Exchange:
    """Makes the exchange of sections made by `partition`, in so many chunks of each rank's heads."""
    parts = tuple(sections.chunk(partition, number, chunks) for number in range(chunks)) if chunks > 1 else ()
    return Exchange(layout, sections, parts, codec if sections.cp_size > 1 else None)


def notes_on_heads(partition: HeadPartition, cp_size: int, head: str, group: str, remedy: str) -> tuple[str, ...]:
    """Returns a note on ranks that compute nothing, which comes first, and one on heads that several ranks have.

    Args:
        partition: the heads of each rank.
        cp_size: the number of ranks.
        head, group: the nouns for a head, and for what heads share.
        remedy: a clause on what uses all ranks.
    """
    notes = []
    if partition.idle_ranks:
        idle = partition.idle_ranks * cp_size // len(partition.heads)
        notes.append(
            f"{idle} of {cp_size} ranks get no {head} and compute nothing here: "
            f"a head exchange uses at most as many ranks as there are heads; {remedy}"
        )
    if partition.replicated:
        notes.append(f"some ranks share a {group}: it is sent to each of them and its gradient is summed")
    return tuple(notes)
