"""Checks of the planning functions' arguments, and parts that these functions share."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer, checked_size
from megatron_cp.exchange.codec import CODECS, Codec
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadPartition, Sections
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.block_masks import is_block_table
from megatron_cp.layout.filled_layout import FilledLayout
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.describe import counted, plural
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import AUTO, SCHEMES, Scheme, alternatives
from megatron_cp.plan.selection import Selection
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.predict.hardware import Machine, Topology


def check_layout(packing: Packing, layout: Layout) -> None:
    """Refuses anything but a layout of the packing."""
    if not isinstance(packing, Packing):
        raise ArgumentError("packing", packing, "a Packing, as in Packing([7, 1, 130])")
    if not isinstance(layout, Layout) or layout.packing != packing:
        raise ArgumentError("layout", layout, f"a layout of the packing that is planned for, {packing!r}")


def check_mask(mask: Mask, layout: Layout, kv_layout: Layout, *, is_cross: bool) -> None:
    """Refuses a mask that shows the rows with which `GraphTables` pads documents."""
    for side in (layout, kv_layout):
        if isinstance(side, FilledLayout):
            _check_filler_is_unseen(side, mask, is_cross=is_cross)


def checked_blocks(mask: Mask, selection: Selection | None) -> Selection | None:
    """Returns the choice after checking, if it is of blocks, that queries see all keys of their document before them.

    Raises:
        ArgumentError: another mask.
    """
    if selection is None or not selection.block:
        return selection
    if not mask.is_cross:
        causal = Mask.causal(mask.packing)
        if mask.packing.branches is None:  # documents may end in pads, which see nothing
            see = np.concatenate([[0], np.cumsum(mask.seen > 0)])[mask.packing.cu_seqlens]
            causal = causal.unpadded(np.diff(see))
        if mask == causal:
            return selection
    given = f"{mask.name} over other documents of keys" if mask.is_cross else mask.name
    raise ArgumentError("mask", given, "causal with block", "Without block, topk keys are chosen under any mask.")


def _check_filler_is_unseen(layout: FilledLayout, mask: Mask, *, is_cross: bool) -> None:
    given, lengths = layout.given.lengths, layout.packing.lengths
    filled = np.flatnonzero(lengths[: given.size] > given)
    if not filled.size:
        return
    own = lengths.copy()
    own[: given.size] = given
    first, bands = filled[0], mask.bands.copy()
    if not is_cross and not is_block_table(mask.name):  # both depend on a document's padded length
        ends = (layout.packing.cu_seqlens[:-1] + own)[layout.packing.documents_of(bands[:, 0])]
        bands[:, 1] = np.minimum(bands[:, 1], ends)
        seen = band.area(bands)
        bands[:, 3] = np.minimum(bands[:, 3], ends)
        if band.area(bands) == seen:
            return
    allowed = "causal, full or a window under which no token sees what fills up its document"
    if is_cross:
        allowed = "one of a pack to itself where documents are filled up"
    remedy = (
        f"Document {first} has {given[first]} tokens and is filled up to {lengths[first]}. With a2a, GraphTables of"
        " align_documents=1 fill up none; p2p needs lengths that are multiples already."
    )
    raise ArgumentError("mask", mask.name, allowed, remedy)


def checked_machine(
    transport: Transport, on: Machine, topology: Topology | None, cp_size: int
) -> tuple[Machine, Topology]:
    """Returns the machine and the ranks for the prices of a transport.

    Args:
        transport: the transport.
        on: the machine.
        topology: the ranks; by default they are on the transport's hosts, or on full hosts of the machine.
        cp_size: the number of ranks.

    Raises:
        ArgumentError: a topology of other ranks, or on other hosts than the transport's.
    """
    if topology is None:
        topology = on.topology(cp_size, transport.hosts or None)
    if transport.hosts and isinstance(topology, Topology) and topology.hosts != transport.hosts:
        raise ArgumentError("topology", topology.hosts, f"the hosts of the transport, {transport.hosts}")
    if not isinstance(topology, Topology) or topology.size != cp_size:
        given = f"{topology.size} ranks" if isinstance(topology, Topology) else topology
        raise ArgumentError("topology", given, f"a Topology of the {cp_size} ranks")
    return on.sharing_memory(topology) if transport.name == "shared_memory" else (on, topology)


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


LARGEST_ON_DEVICES = 256  # features of a head in flash kernels
UNCODED_CHOICE = "Keys among which queries choose travel in their own type: leave the codec out."


def checked_codec(name: str, scheme: str, remedy: str) -> Codec | None:
    """Returns the codec of that name; if `remedy` is not empty, refuses any but "none" with it."""
    known = require("codec", name)
    if known != "none" and remedy:
        raise ArgumentError("codec", name, f"none for {scheme}", remedy)
    return CODECS[known]


def exchange_of(
    layout: Layout,
    sections: Sections,
    partition: HeadPartition,
    chunks: int,
    codec: Codec | None,
    *,
    section_major: bool = True,
) -> Exchange:
    """Makes the exchange of sections made by `partition`, in so many chunks of each rank's heads.

    Attention writes its gradients in the form of its inputs, so its inbound exchanges are row-major.
    """
    parts = tuple(sections.chunk(partition, number, chunks) for number in range(chunks)) if chunks > 1 else ()
    return Exchange(layout, sections, parts, codec if sections.cp_size > 1 else None, section_major)


def notes_of(
    partition: HeadPartition, layout: Layout, head: str, group: str, remedy: str = "", stacklevel: int = 3
) -> tuple[str, ...]:
    """Returns notes about idle ranks and shared heads, and warns of the former at `stacklevel`."""
    notes = []
    if partition.idle_ranks:
        idle = partition.idle_ranks * layout.cp_size // len(partition.heads)
        notes.append(
            f"{idle} of {layout.cp_size} ranks get no {head} and compute nothing here: "
            f"a head exchange uses at most as many ranks as there are heads{remedy}"
        )
        warnings.warn(notes[-1], stacklevel=stacklevel)
    if partition.replicated:
        notes.append(f"some ranks share a {group}: it is sent to each of them and its gradient is summed")
    return tuple(notes)


# A ring makes a kernel call for each pair of fragments of two ranks that see one another; a document cut in zigzag has
# two or three such pairs a stage. These layouts stay far below this many calls for each stage.
_MANY, _AT_LEAST = 8, 1000


def many_bands(attend: Attend, scheme: Scheme) -> tuple[str, ...]:
    """Warns where a ring needs very many kernel calls and other schemes need few; returns the warning as a note."""
    if attend.num_stages == 1 or attend.tiled is not None:
        return ()
    last_rank = attend.num_kv_ranks - 1  # which sees most in stream order
    staged_calls, gathered_calls = attend.count_bands(last_rank)
    if staged_calls < max(_AT_LEAST, _MANY * attend.num_kv_ranks * gathered_calls):
        return ()
    gathering = [
        other.name for other in alternatives(scheme) if replace(attend, kv_schedule=other.kv_schedule).num_stages == 1
    ]
    note = (
        f"{scheme.name} computes {staged_calls} pieces of attention on a rank, a call of the CPU's kernel each, since "
        f"fragments are short or the mask cuts them up: take {' or '.join(gathering)}, which gather keys "
        f"and compute {gathered_calls}"
    )
    warnings.warn(note, stacklevel=5)
    return (note,)


def checked_degree(scheme: Scheme, cp_size: int, kv_heads: int, ulysses_degree: int | None) -> int:
    """Returns the degree of a scheme: the number of neighbouring ranks that exchange heads.

    Raises:
        ArgumentError: the scheme has another degree, or the number of ranks no such divisor.
    """
    products = [other.name for other in SCHEMES.values() if other.is_product]
    if not scheme.is_product:
        degree = cp_size if scheme.exchanges_heads else 1
        if ulysses_degree is not None:
            ulysses_degree = checked_integer("ulysses_degree", ulysses_degree, 1)
        if ulysses_degree is not None and ulysses_degree != degree:
            allowed = f"{degree} or None for {scheme.name}"
            raise ArgumentError("ulysses_degree", ulysses_degree, allowed, f"Use {' or '.join(products)}.")
        return degree
    divisors = [degree for degree in range(2, cp_size) if cp_size % degree == 0]
    if not divisors:
        remedy = f"{cp_size} has no other divisor; use a2a, {scheme.kv_schedule} or another number of ranks."
        raise ArgumentError("scheme", scheme.name, "a number of ranks that is a product, such as 4 = 2 * 2", remedy)
    if ulysses_degree is None:
        # The largest degree that shares key/value heads evenly; else the largest that leaves no rank without one.
        even, some = (
            [d for d in divisors if fits(d)] for fits in (lambda d: kv_heads % d == 0, lambda d: d <= kv_heads)
        )
        return max(even or some or divisors[:1])
    if checked_integer("ulysses_degree", ulysses_degree, 1) not in divisors:
        raise ArgumentError("ulysses_degree", ulysses_degree, " or ".join(map(str, divisors)), f"For {scheme.name}.")
    return ulysses_degree


def checked_latent(latent: object, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns the features of a shared key and of a latent after checking them.

    Raises:
        ArgumentError: other than two numbers of features, or heads that share keys.
    """
    if not isinstance(latent, tuple | list) or len(latent) != 2:
        raise ArgumentError("latent", latent, "features of the shared key and of the latent, such as (64, 512)")
    shared, rank = checked_size("latent[0]", latent[0]), checked_size("latent[1]", latent[1])
    if shared >= head_dim:
        raise ArgumentError("latent", latent, f"a shared key of fewer than head_dim, {head_dim} features")
    if kv_heads != heads:
        raise ArgumentError("kv_heads", kv_heads, f"None with latent: each of {heads} heads has keys of its own")
    return shared, rank


def checked_latent_mode(latent_mode: str | None, latent: object) -> str | None:
    """Returns the spelling of a mode of latents, or None for none.

    Raises:
        ArgumentError: an unknown mode, or one without latents.
    """
    if latent_mode is None:
        return None
    if latent is None:
        raise ArgumentError("latent_mode", latent_mode, "None without latent", "Keys and values are given.")
    return require("latent_mode", latent_mode)


def latent_modes(
    asked: str | None, scheme: str, latent: tuple[int, int] | None, on: Machine, *, selects: bool = False
) -> tuple[str, ...]:
    """Returns the modes of latents to compare: the one that was asked for, or those that "auto" has.

    Raises:
        ArgumentError: keys or absorbed queries where queries select among latents.
    """
    if selects:  # among latents, which no mode changes
        if asked not in (None, AUTO, "expand"):
            raise ArgumentError("latent_mode", asked, "None with topk", "Queries select among latents as they are.")
        return ("expand",)
    if latent is None or (asked is None and scheme != AUTO):
        return ("expand",)
    if asked not in (None, AUTO):
        return (asked,)
    is_possible = on.hardware.cores or sum(latent) <= LARGEST_ON_DEVICES
    return tuple(mode for mode in LATENT_MODES if is_possible or mode != "absorb")
