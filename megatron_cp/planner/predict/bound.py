"""`attention_bound`: what an attention takes at least, without playing it. No torch in here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import Fetch, PassOn
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.kernels import attention_seconds, copy_seconds
from megatron_cp.planner.predict.program import Seconds


def attention_bound(plan: Plan, on: Machine, topology: Topology, item_size: int) -> float:
    """Milliseconds that an attention takes at least, forward and backward.

    On each rank its work and, one after the other, what of its own transfers nothing hides: a chunk of the heads that
    it exchanges, of the keys that it fetches, and of their gradients. Or the ports of its keys, where those are busy
    for longer. So ways that are far from the best are never played.
    """
    step = plan.attend
    assert step is not None
    exchanged = _exchanged(plan, topology, item_size)
    flow = step.stages[-1].keys
    seconds = 0.0
    for forward in (True, False):
        if step.tiled is not None:
            busy = _of_pairs(plan, step, on, item_size, forward=forward)
        elif flow is None:
            busy = _kernels(plan, step, on, item_size, forward=forward)
        elif isinstance(flow, PassOn):
            busy = _ring(plan, step, on, topology, item_size, forward=forward)
        else:
            assert isinstance(flow, Fetch)
            busy = _fetched(plan, step, flow, on, topology, item_size, forward=forward)
        seconds += float((exchanged + busy).max(initial=0.0))
    return 1e3 * seconds


class _Load(NamedTuple):
    """`[ranks]` bytes, or rows, that each rank sends to and gets from its own host, and other hosts."""

    sent_near: IntArray | Seconds
    sent_far: IntArray | Seconds
    got_near: IntArray | Seconds
    got_far: IntArray | Seconds

    def seconds(self, topology: Topology) -> Seconds:
        """`[ranks]` in which the busiest of a rank's ports is busy; ranks that share a card wait for one another."""
        near = np.maximum(self.sent_near, self.got_near) / topology.within.bandwidth
        cards = [np.bincount(topology.rail, each)[topology.rail] * (each > 0) for each in (self.sent_far, self.got_far)]
        found: Seconds = np.maximum(near, np.maximum(*cards) / topology.between.bandwidth)
        return found

    def times(self, size: IntArray) -> _Load:
        """As many of `[ranks]` bytes each."""
        return _Load(*(each * size for each in self))

    def and_then(self, other: _Load) -> _Load:
        """Both."""
        return _Load(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _kernels(plan: Plan, step: Attend, on: Machine, item_size: int, *, forward: bool) -> Seconds:
    """`[ranks]` seconds of the kernels of one stage."""
    ranks, degree = np.arange(plan.cp_size), plan.ulysses_degree
    heads = np.array([hi - lo for lo, hi in plan.partition.heads])[ranks % degree]
    found: Seconds = attention_seconds(step, on.hardware, item_size, ranks // degree, heads, forward=forward)[0]
    return found


def _of_pairs(plan: Plan, step: Attend, on: Machine, item_size: int, *, forward: bool) -> Seconds:
    """`[ranks]` seconds of all pairs of a rank at once, no tile of them cut."""
    size, value = step.head_dim, step.value_head_dim
    operations = 2 * (size + value) if forward else 2 * (3 * size + 2 * value)
    rate = on.hardware.attention_rate((size + value) // 2, forward=forward) / on.hardware.slower(item_size)
    work: Seconds = np.array(plan.work_per_rank(forward=forward), dtype=np.float64) * operations / rate
    return work


def _ring(plan: Plan, step: Attend, on: Machine, topology: Topology, item_size: int, *, forward: bool) -> Seconds:
    """`[ranks]` seconds of a ring: of its work, all pairs at once and no tile cut, or of its ports.

    Of the work nothing hides the gradients that go home last.
    """
    hardware, ranks, degree = on.hardware, np.arange(plan.cp_size), plan.ulysses_degree
    kv_ranks, later = ranks // degree, step.num_stages - 1
    heads, groups = (
        np.array([hi - lo for lo, hi in each])[ranks % degree] for each in (plan.partition.heads, plan.partition.groups)
    )
    size, value = step.head_dim, step.value_head_dim
    work = _of_pairs(plan, step, on, item_size, forward=forward)
    merged = step.queries.token_counts[kv_ranks] * heads * (value * 3 if forward else size) * max(item_size, 4)
    work = work + later * copy_seconds(hardware, merged)
    row, tokens, total = groups * (size + value) * item_size, step.keys.token_counts, step.keys.packing.total
    load = _passed(plan, topology, row, total - tokens[np.roll(kv_ranks, -degree)], total - tokens[kv_ranks])
    if forward:
        return np.maximum(work, load.seconds(topology))
    wide = row * max(4 // item_size, 1)
    work = (
        work
        + copy_seconds(hardware, (total - tokens[kv_ranks]) * wide)
        + copy_seconds(hardware, tokens[kv_ranks] * row)
    )
    all_rows = np.full(ranks.size, total)
    home = _passed(plan, topology, wide * (plan.head_chunks == 1), tokens[np.roll(kv_ranks, -degree)], tokens[kv_ranks])
    both = load.and_then(_passed(plan, topology, wide, all_rows, all_rows))
    found: Seconds = np.maximum(work + home.seconds(topology), both.seconds(topology))
    return found


def _passed(plan: Plan, topology: Topology, row: IntArray, sent: IntArray, got: IntArray) -> _Load:
    """What goes round a ring: `[ranks]` rows that each passes on, and gets."""
    hosts, degree = np.array(topology.hosts), plan.ulysses_degree
    to_near, from_near = (hosts == np.roll(hosts, by) for by in (-degree, degree))
    return _Load(sent * row * to_near, sent * row * ~to_near, got * row * from_near, got * row * ~from_near)


def _fetched(
    plan: Plan, step: Attend, flow: Fetch, on: Machine, topology: Topology, item_size: int, *, forward: bool
) -> Seconds:
    """`[ranks]` seconds of keys that come in chunks of heads.

    Their work, the first chunk on its way and in backward the gradients of the last; or all chunks on their way.
    """
    kernels = _kernels(plan, step, on, item_size, forward=forward)
    degree = plan.ulysses_degree
    groups = [[chunk.num_groups for chunk in step.chunks(rank)] for rank in range(degree)]
    rows = np.array([[min(each), sum(each)] for each in groups]) * (step.head_dim + step.value_head_dim) * item_size
    few, all_of_it = rows[np.arange(plan.cp_size) % degree].T
    keys = _fetch_load(plan, flow, topology, back=False)
    exposed, moved = keys.times(few).seconds(topology), keys.times(all_of_it)
    if not forward:
        back = _fetch_load(plan, flow, topology, back=True)
        exposed, moved = exposed + back.times(few).seconds(topology), moved.and_then(back.times(all_of_it))
    found: Seconds = np.maximum(kernels + exposed, moved.seconds(topology))
    return found


def _fetch_load(plan: Plan, flow: Fetch, topology: Topology, *, back: bool) -> _Load:
    """Rows of keys that ranks fetch, or of gradients that go back.

    Over hosts in two hops, of which only the first is counted, and not even that where all rows are gathered: they
    travel once for a host.
    """
    counts = flow.split_counts.counts
    if flow.equal_shares and not back:
        counts = np.full_like(counts, flow.longest)
    sent, got = (counts.T, counts) if back else (counts, counts.T)
    columns = np.array(topology.hosts).reshape(-1, plan.ulysses_degree)
    near = columns[:, None, :] == columns[None, :, :]  # [kv ranks, kv ranks, head ranks]
    np.einsum("kkh->kh", near)[:] = False
    far = columns[:, None, :] != columns[None, :, :]
    found = [np.einsum("kj,kjh->kh", rows, where).ravel() for rows in (sent, got) for where in (near, far)]
    if plan.transport.hosts:
        known = 0 if flow.equal_shares and not back else 1
        found = [each * (known if number < 2 else 0) for number, each in enumerate(found)]
    return _Load(*found)


def _exchanged(plan: Plan, topology: Topology, item_size: int) -> Seconds:
    """`[ranks]` seconds in which a rank sends the smallest chunk of each head exchange, there and back."""
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
        # Of a sender of tokens to each reader of heads, and of heads to the owner of each token.
        mine, theirs = (tokens, np.broadcast_to(rows, tokens.shape)) if to_heads else (rows, tokens)
        to_near, to_far = ((mine * (where @ theirs[:, :, None])[:, :, 0]).ravel() for where in (near, far))
        seconds = seconds + _Load(to_near, to_far, nothing, nothing).seconds(topology)
    return seconds
