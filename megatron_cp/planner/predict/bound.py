"""`bounds_of_directions`: lower bounds on the time of an attention, without simulating it. No torch in here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.bands import NO_BANDS, areas, cut, cut_up
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.assignment import AssignedTiles
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.by_host import first_hop
from megatron_cp.plan.flows import Fetch, PassOn, owned_fragments
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.kernels import attention_seconds, copy_seconds, pair_rate, rule_seconds
from megatron_cp.planner.predict.program import Seconds
from megatron_cp.planner.predict.walk_base import gathers_over_hosts

# The payloads that go out for remote queries and those that return, by direction.
_REMOTE = {
    True: (Payload.QUERIES, Payload.PARTIALS), False: (Payload.QUERIES_AND_GRADIENTS, Payload.QUERY_GRADIENTS)
}  # fmt: skip


def bounds_of_directions(plan: Plan, on: Machine, topology: Topology, item_size: int) -> tuple[float, float]:
    """Returns lower bounds on the milliseconds of an attention, forward and backward.

    For each rank the bound is its work plus the transfers that nothing can hide: a chunk of the heads that it
    exchanges, of the keys that it fetches, and of their gradients. Where the ports of its keys are busy for longer,
    their time counts instead. With these bounds, candidates that are far from the best need no simulation.

    For assigned tiles the bound holds for any order of them: it is the largest of a rank's work, the time of its ports,
    and the longest path of one tile, whose rows arrive, are computed and return.
    """
    bounds, _ = plan.memo(("bounds", on, topology, item_size), lambda: _bounds(plan, on, topology, item_size))
    return bounds


def bound_in_chunks(plan: Plan, on: Machine, topology: Topology, item_size: int) -> float:
    """Returns a lower bound on the milliseconds of both directions in any number of head chunks.

    It leaves out the transfers that more chunks could hide: those of the first chunk, and of the last one back.
    """
    _, least = plan.memo(("bounds", on, topology, item_size), lambda: _bounds(plan, on, topology, item_size))
    return least


def _bounds(plan: Plan, on: Machine, topology: Topology, item_size: int) -> tuple[tuple[float, float], float]:
    step = plan.attend
    assert step is not None
    exchanged = exchange_seconds(plan, topology, item_size)
    flow = step.stages[-1].keys
    found, least = list[float](), 0.0
    for forward in (True, False):
        path, hidden = 0.0, None
        if step.tiled is not None:
            work = _pair_seconds(plan, step, on, item_size, forward=forward)
            busy = np.maximum(work, _tile_port_seconds(plan, step, on, topology, item_size, forward=forward))
            path = longest_path(plan, step, on, topology, item_size, forward=forward)
        elif flow is None:
            busy = _kernel_seconds(plan, step, on, item_size, forward=forward)
        elif isinstance(flow, PassOn):
            busy = _ring_seconds(plan, step, on, topology, item_size, forward=forward)
        else:
            assert isinstance(flow, Fetch)
            busy, hidden = _fetch_seconds(plan, step, flow, on, topology, item_size, forward=forward)
        rank_seconds = exchanged + busy
        least += 1e3 * max(float((busy if hidden is None else hidden).max(initial=0.0)), path)
        found.append(1e3 * max(float(rank_seconds.max(initial=0.0)), float(exchanged.min(initial=0.0)) + path))
    return (found[0], found[1]), least


class _Load(NamedTuple):
    """The bytes, or rows, `[ranks]`, that each rank sends to and receives from its own host, and other hosts."""

    sent_near: IntArray | Seconds
    sent_far: IntArray | Seconds
    got_near: IntArray | Seconds
    got_far: IntArray | Seconds

    def seconds(self, topology: Topology) -> Seconds:
        """Returns `[ranks]` the time of each rank's busiest port; ranks that share a card wait for one another."""
        near = np.maximum(self.sent_near, self.got_near)
        cards = [np.bincount(topology.rail, each)[topology.rail] * (each > 0) for each in (self.sent_far, self.got_far)]
        ports = ((topology.within, near), (topology.between, np.maximum(*cards)))
        # In several transfers bytes take longer than in one: the sum of their roots is no less than that of the sum.
        times = [moved / link.bandwidth + link.ramp * np.sqrt(moved) for link, moved in ports]
        found: Seconds = np.maximum(*times)
        return found

    def times(self, size: IntArray) -> _Load:
        """Returns the load multiplied by `[ranks]` sizes."""
        return _Load(*(each * size for each in self))

    def plus(self, other: _Load) -> _Load:
        """Returns the sum of two loads."""
        return _Load(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _kernel_seconds(plan: Plan, step: Attend, on: Machine, item_size: int, *, forward: bool) -> Seconds:
    """Returns `[ranks]` the seconds of one stage's kernels."""
    ranks, degree = np.arange(plan.cp_size), plan.ulysses_degree
    heads = np.array([hi - lo for lo, hi in plan.partition.heads])[ranks % degree]
    found: Seconds = attention_seconds(step, on.hardware, item_size, ranks // degree, heads, forward=forward)[0]
    return found


def _pair_seconds(plan: Plan, step: Attend, on: Machine, item_size: int, *, forward: bool) -> Seconds:
    """Returns `[ranks]` the seconds of all pairs of a rank in one call, with no tile cut by the mask."""
    rate = pair_rate(step, on.hardware, item_size, forward=forward)
    work: Seconds = np.array(plan.work_per_rank(forward=forward), dtype=np.float64) / rate
    return work


def _tile_transfers(step: Attend, *, forward: bool) -> list[tuple[Fetch, Payload, bool]]:
    """Returns the fewest transfers of assigned tiles, each row once: the rows, their payload, and if they return."""
    tiles = step.assigned_tiles(forward=forward)

    def make() -> tuple[Fetch, Fetch | None] | tuple[()]:
        part = tiles.far_part
        if part is None:
            return ()
        keys = Fetch(step.keys, part.wanted_keys, "")
        return keys, None if part.remote is None else Fetch(step.queries, part.wanted_queries, "")

    flows = tiles.memo(("rows of tiles",), make)
    if not flows:
        return []
    found = [(flows[0], Payload.KEYS, False)] + [(flows[0], Payload.KEY_GRADIENTS, True)] * (not forward)
    if flows[1] is not None:
        names = _REMOTE[forward]
        found += [(flows[1], names[0], False), (flows[1], names[1], True)]
    return found


def _tile_port_seconds(
    plan: Plan, step: Attend, on: Machine, topology: Topology, item_size: int, *, forward: bool
) -> Seconds:
    """Returns `[ranks]` the seconds in which a rank's ports move the rows of assigned tiles."""
    head_ranks = np.arange(plan.cp_size) % plan.ulysses_degree
    load: _Load | None = None
    for flow, name, back in _tile_transfers(step, forward=forward):
        width = np.array([step.row_bytes(name, rank, item_size) for rank in range(plan.ulysses_degree)])[head_ranks]
        more = _fetch_load(plan, flow, on, topology, back=back).times(width)
        load = more if load is None else load.plus(more)
    return np.zeros(plan.cp_size) if load is None else load.seconds(topology)


def longest_path(plan: Plan, step: Attend, on: Machine, topology: Topology, item_size: int, *, forward: bool) -> float:
    """Returns a lower bound on the seconds from sending the rows of the slowest tile to the return of its results.

    Tiles that need a row of another rank count, for one chunk of heads, cut where owners of rows or keys change.
    """
    tiles, size, degree = step.assigned_tiles(forward=forward), step.num_kv_ranks, plan.ulysses_degree
    names = _REMOTE[forward]
    pieces, owners, readers, moves_queries = _remote_tiles(tiles, step, size)
    if not len(pieces):
        return 0.0
    rows, keys = pieces[:, 1] - pieces[:, 0], pieces[:, 3] - pieces[:, 2]
    pairs, longest = areas(pieces).astype(np.float64), 0.0
    hosts = np.array(topology.hosts).reshape(size, degree)
    rate = pair_rate(step, on.hardware, item_size, forward=forward)
    for rank in range(degree):
        chunks = step.chunks(rank)
        widths = {
            name: min(step.row_bytes(name, rank, item_size, chunk) for chunk in chunks)
            for name in (*names, Payload.KEYS, *(() if forward else (Payload.KEY_GRADIENTS,)))
        }
        heads = min(chunk.heads.stop - chunk.heads.start for chunk in chunks)
        if not heads:
            continue

        def transfer(axis: int, nbytes: IntArray, travels: NDArray[np.bool_], rank: int = rank) -> Seconds:
            far = hosts[owners[:, axis], rank] != hosts[readers, rank]
            near_by, between = topology.within, topology.between
            latency = np.where(far, between.latency, near_by.latency)
            taken: Seconds = travels * (latency + nbytes / np.where(far, between.bandwidth, near_by.bandwidth))
            return taken

        key_travels = owners[:, 1] != readers
        arrival = np.maximum(
            transfer(0, rows * widths[names[0]], moves_queries), transfer(1, keys * widths[Payload.KEYS], key_travels)
        )
        back = transfer(0, rows * widths[names[1]], moves_queries)
        if not forward:
            back = np.maximum(back, transfer(1, keys * widths[Payload.KEY_GRADIENTS], key_travels))
        longest = max(longest, float((arrival + pairs * heads / rate + back).max()))
    return longest


def _remote_tiles(
    tiles: AssignedTiles, step: Attend, size: int
) -> tuple[IntArray, IntArray, IntArray, NDArray[np.bool_]]:
    """Finds the tiles that need a row of another rank.

    Returns:
        The tiles `[n, 6]`, the owners of each one's queries and keys `[n, 2]`, the rank that computes it `[n]`, and
        whether its queries move `[n]`.
    """

    def make() -> tuple[IntArray, IntArray, IntArray, NDArray[np.bool_]]:
        row_owners, key_owners = (owned_fragments(layout) for layout in (step.queries, step.keys))
        pieces, owners, readers, moves_queries = [NO_BANDS], [np.empty((0, 2), dtype=np.int64)], [], []
        for rank in range(size):
            far, key = cut(tiles.remote_key_tiles(rank), key_owners[0][:-1], key_owners[0][1:], queries=False)
            moving, row = cut(tiles.remote_query_tiles(rank), row_owners[0][:-1], row_owners[0][1:], queries=True)
            moving, seen, origin = cut_up(moving, key_owners[0][:-1], key_owners[0][1:], queries=False)
            pieces += [far, moving]
            owners.append(np.stack([np.full(len(far), rank), key_owners[1][key]], axis=1))
            owners.append(np.stack([row_owners[1][row[origin]], key_owners[1][seen]], axis=1))
            readers += [rank] * (len(far) + len(moving))
            moves_queries += [False] * len(far) + [True] * len(moving)
        whole = np.concatenate(pieces), np.concatenate(owners), np.array(readers, dtype=np.int64)
        return (*whole, np.array(moves_queries, dtype=bool))

    found: tuple[IntArray, IntArray, IntArray, NDArray[np.bool_]] = tiles.memo(("remote tiles",), make)
    return found


def _ring_seconds(
    plan: Plan, step: Attend, on: Machine, topology: Topology, item_size: int, *, forward: bool
) -> Seconds:
    """Returns `[ranks]` the seconds of a ring: its work, as all pairs in one call with no tile cut, or its ports.

    Nothing hides the gradients that return last: backward's work includes them.
    """
    hardware, ranks, degree = on.hardware, np.arange(plan.cp_size), plan.ulysses_degree
    kv_ranks, later = ranks // degree, step.num_stages - 1
    heads, groups = (
        np.array([hi - lo for lo, hi in each])[ranks % degree] for each in (plan.partition.heads, plan.partition.groups)
    )
    size, value = step.head_dim, step.value_head_dim
    work = _pair_seconds(plan, step, on, item_size, forward=forward)
    merged = step.queries.token_counts[kv_ranks] * heads * (value * 3 if forward else size) * max(item_size, 4)
    work = work + later * copy_seconds(hardware, merged)
    row, tokens, total = groups * sum(step.key_features) * item_size, step.keys.token_counts, step.keys.packing.total
    coded = groups * step.coded_bytes(item_size)
    sent = np.where(coded > 0, coded, row)
    load = _ring_load(plan, topology, sent, total - tokens[np.roll(kv_ranks, -degree)], total - tokens[kv_ranks])
    if forward:
        return np.maximum(work, load.seconds(topology))
    wide = row * max(4 // item_size, 1)
    work = (
        work
        + copy_seconds(hardware, (total - tokens[kv_ranks]) * wide)
        + copy_seconds(hardware, tokens[kv_ranks] * row)
    )
    all_rows = np.full(ranks.size, total)
    last = _ring_load(
        plan, topology, wide * (plan.head_chunks == 1), tokens[np.roll(kv_ranks, -degree)], tokens[kv_ranks]
    )
    both = load.plus(_ring_load(plan, topology, wide, all_rows, all_rows))
    found: Seconds = np.maximum(work + last.seconds(topology), both.seconds(topology))
    return found


def _ring_load(plan: Plan, topology: Topology, row: IntArray, sent: IntArray, got: IntArray) -> _Load:
    """Returns the load of a ring from `[ranks]` rows that each rank sends to the next and receives."""
    hosts, degree = np.array(topology.hosts), plan.ulysses_degree
    sends_near, gets_near = (hosts == np.roll(hosts, by) for by in (-degree, degree))
    return _Load(sent * row * sends_near, sent * row * ~sends_near, got * row * gets_near, got * row * ~gets_near)


def _fetch_seconds(
    plan: Plan, step: Attend, flow: Fetch, on: Machine, topology: Topology, item_size: int, *, forward: bool
) -> tuple[Seconds, Seconds]:
    """Returns `[ranks]` the seconds of an attention whose keys arrive in chunks of heads, and of one in any chunks.

    This is the work plus the transfer of the smallest chunk, in backward also of its gradients; or all transfers.
    """
    kernels = _kernel_seconds(plan, step, on, item_size, forward=forward)
    degree = plan.ulysses_degree
    groups = [[chunk.num_groups for chunk in step.chunks(rank)] for rank in range(degree)]
    smallest, whole = np.array([[min(each), sum(each)] for each in groups])[np.arange(plan.cp_size) % degree].T
    row = sum(step.key_features) * item_size
    coded = step.coded_bytes(item_size) or row
    first = first_hop(flow)
    keys = _fetch_load(plan, first, on, topology, back=False)
    exposed, moved = keys.times(smallest * coded).seconds(topology), keys.times(whole * coded)
    if not forward:
        back = _fetch_load(plan, first, on, topology, back=True)
        exposed, moved = exposed + back.times(smallest * row).seconds(topology), moved.plus(back.times(whole * row))
    for is_back in (False, True)[: (2 - forward) * (first is not flow)]:  # a second hop, which nothing hides
        within = _fetch_load(plan, flow, on, topology, back=is_back).times(whole * (row if is_back else coded))
        kernels, moved = kernels + within.seconds(topology), moved.plus(within)
    ports = moved.seconds(topology)
    return np.maximum(kernels + exposed, ports), np.maximum(kernels, ports)


def _fetch_load(plan: Plan, flow: Fetch, on: Machine, topology: Topology, *, back: bool) -> _Load:
    """Returns the load of key rows that ranks fetch, or of gradients that return.

    A hierarchical transport needs two hops, of which only the first is counted, and not even that where all rows are
    gathered: they travel once for a host. So they do where the backend gathers them over hosts, which each rank's card
    sends once to every other host.
    """
    shared, counts = flow.equal_shares and not back, flow.split_counts.counts
    columns = np.array(topology.hosts).reshape(-1, plan.ulysses_degree)
    if shared and gathers_over_hosts(plan, on.hardware, topology.hosts):
        nothing = np.zeros(plan.cp_size, dtype=np.int64)
        others = (np.diff(np.sort(columns, axis=0), axis=0) > 0).sum(axis=0)
        return _Load(nothing, np.tile(flow.longest * others, len(columns)), nothing, nothing)
    if shared:
        counts = np.full_like(counts, flow.longest)
    sent, got = (counts.T, counts) if back else (counts, counts.T)
    near = columns[:, None, :] == columns[None, :, :]  # [kv ranks, kv ranks, head ranks]
    far = ~near
    np.einsum("kkh->kh", near)[:] = False
    found = [np.einsum("kj,kjh->kh", rows, where).ravel() for rows in (sent, got) for where in (near, far)]
    if plan.transport.hosts:
        known = 0 if shared else 1
        found = [each * (known if number < 2 else 0) for number, each in enumerate(found)]
    return _Load(*found)


def exchange_seconds(plan: Plan, topology: Topology, item_size: int) -> Seconds:
    """Returns `[ranks]` the seconds in which a rank sends the smallest chunk of each head exchange, there and back."""
    degree = plan.ulysses_degree
    seconds: Seconds = np.zeros(plan.cp_size)
    hosts = np.array(topology.hosts).reshape(-1, degree)
    alike = hosts[:, :, None] == hosts[:, None, :]  # [kv ranks, senders, receivers]
    near, far = (alike & ~np.eye(degree, dtype=bool)).astype(np.float64), (~alike).astype(np.float64)
    nothing = np.zeros(plan.cp_size, dtype=np.int64)
    for exchange, to_heads in plan.exchanges(forward=True):
        if exchange.is_local:
            continue
        sizes = [item_size] * len(exchange.sections.blocks)
        rows = np.array([exchange.row_bytes(part, sizes) for part in range(len(exchange.parts))]).min(axis=0)
        tokens = exchange.layout.token_counts.reshape(-1, degree)
        # Bytes from a holder of tokens to each reader of heads, or from a reader of heads to the owner of each token.
        mine, theirs = (tokens, np.broadcast_to(rows, tokens.shape)) if to_heads else (rows, tokens)
        near_bytes, far_bytes = ((mine * (where @ theirs[:, :, None])[:, :, 0]).ravel() for where in (near, far))
        seconds = seconds + _Load(near_bytes, far_bytes, nothing, nothing).seconds(topology)
    return seconds


def gathering_exposes_less(plan: Plan, scan: Scan, on: Machine, topology: Topology, item_size: int) -> bool:
    """Tells whether an all-gather of a chunkwise layer's maps exposes less time than an all-to-all, in both directions.

    The busiest links are counted. Half of the rule hides one exchange, or the first hop of an all-gather over hosts: a
    message to the counterparts on other hosts. Nothing hides the second hop, to the ranks of the own host.
    """
    hosts, direct, gathered = np.array(topology.hosts), 0.0, 0.0
    near, width, latency = hosts[:, None] == hosts, max(item_size, 4), topology.between.latency
    others = near.sum(axis=1) - 1  # ranks of the same host
    far, came = topology.num_hosts - 1, -(-(hosts.size - 1 - others) // (others + 1))
    for forward in (True, False):
        hidden = float(rule_seconds(plan, on.hardware, item_size, forward=forward).mean()) / 2 - latency
        counts, share = scan.split_counts(forward=forward).counts * width, scan.share(forward=forward) * width
        messages = _Load(*((rows * where).sum(axis=1) for rows in (counts, counts.T) for where in (near, ~near)))
        first = _Load(share * others, np.full(hosts.size, share * far), share * others, share * came)
        second = _Load(share * came * others, 0 * came, share * (hosts.size - 1 - others - came), 0 * came)
        direct += max(float(messages.seconds(topology).max()) - hidden, 0.0)
        gathered += max(float(first.seconds(topology).max()) - hidden, 0.0)
        gathered += float(second.seconds(topology).max()) + topology.within.latency
    return gathered < direct
