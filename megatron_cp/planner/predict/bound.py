"""`attention_bound`: what an attention takes at least, without playing it. No torch in here."""

from __future__ import annotations

import numpy as np

from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import PassOn
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.kernels import attention_seconds
from megatron_cp.planner.predict.program import Seconds


def attention_bound(plan: Plan, on: Machine, topology: Topology, item_size: int) -> float:
    """Milliseconds that an attention takes at least, forward and backward.

    On each rank its kernels and, one after the other, what of its own transfers nothing hides: a chunk of the heads
    that it exchanges, and of the keys that it sends to who fetches them. In a ring the longer of keys and kernels. So
    ways that are far from the best are never played.
    """
    step = plan.attend
    assert step is not None
    exchanged = _exchanged(plan, topology, item_size)
    keys, hidden = _keys(plan, step, topology, item_size)
    seconds = 0.0
    for forward in (True, False):
        kernels = _kernels(plan, step, on, item_size, forward=forward)
        busy = exchanged + (np.maximum(kernels, keys) if hidden else kernels + keys)
        seconds += float(busy.max(initial=0.0))
    return 1e3 * seconds


def _kernels(plan: Plan, step: Attend, on: Machine, item_size: int, *, forward: bool) -> Seconds:
    """`[ranks]` seconds of kernels; of a ring those of all pairs at once, which take no longer than stage by stage."""
    ranks = np.arange(plan.cp_size)
    if step.num_stages == 1:
        heads = np.array([hi - lo for rank in ranks for lo, hi in (plan.heads_of(int(rank)),)])
        return attention_seconds(step, step.stages[0], on.hardware, item_size, forward=forward)(
            ranks // plan.ulysses_degree, heads
        )
    size, value = step.head_dim, step.value_head_dim
    operations = 2 * (size + value) if forward else 2 * (3 * size + 2 * value)
    rate = on.hardware.attention_rate((size + value) // 2, forward=forward) / on.hardware.slower(item_size)
    found: Seconds = np.array(plan.work_per_rank(forward=forward), dtype=np.float64) * operations / rate
    return found


def _exchanged(plan: Plan, topology: Topology, item_size: int) -> Seconds:
    """`[ranks]` seconds in which a rank sends the smallest chunk of each head exchange, there and back."""
    degree = plan.ulysses_degree
    seconds: Seconds = np.zeros(plan.cp_size)
    hosts = np.array(topology.hosts).reshape(-1, degree)
    is_near = hosts[:, :, None] == hosts[:, None, :]  # [kv ranks, senders, receivers]
    np.einsum("kii->ki", is_near)[:] = False
    is_far = hosts[:, :, None] != hosts[:, None, :]
    for exchange, to_heads in plan.exchanges(forward=True):
        if exchange.is_local:
            continue
        sizes = [item_size] * len(exchange.sections.blocks)
        rows = np.array([exchange.row_format(part, sizes).row_bytes for part in range(len(exchange.parts))]).min(axis=0)
        tokens = exchange.layout.token_counts.reshape(-1, degree)
        nbytes = tokens[:, :, None] * rows[None, None, :]  # of a sender of tokens to each reader of heads
        nbytes = nbytes if to_heads else nbytes.transpose(0, 2, 1)
        near, far = ((nbytes * each).sum(axis=2).ravel() for each in (is_near, is_far))
        seconds = seconds + _sending(topology, near, far)
    return seconds


def _keys(plan: Plan, step: Attend, topology: Topology, item_size: int) -> tuple[Seconds, bool]:
    """`[ranks]` seconds of keys on their way, of one direction, and whether they hide behind work."""
    flow, degree = step.stages[-1].keys, plan.ulysses_degree
    nothing: Seconds = np.zeros(plan.cp_size)
    if flow is None:
        return nothing, False
    ranks, count = np.arange(plan.cp_size), step.num_kv_ranks
    groups = np.array([min(each.num_groups for each in step.chunks(rank)) for rank in range(degree)])
    row = groups[ranks % degree] * (step.head_dim + step.value_head_dim) * item_size
    hosts = np.array(topology.hosts)
    columns = hosts.reshape(-1, degree)
    if isinstance(flow, PassOn):
        is_near = hosts == np.roll(columns, -1, axis=0).ravel()
        sent = (step.keys.packing.total - step.keys.token_counts[(ranks // degree + 1) % count]) * row
        return _sending(topology, sent * is_near, sent * ~is_near), True
    near = (columns[:, None, :] == columns[None, :, :]).sum(axis=1).ravel() - 1
    sent = flow.rows_sent_by_ranks()[ranks // degree] * row
    hidden = step.tiled is not None  # behind the tiles at home
    if getattr(flow, "equal_shares", False):
        share = near / max(count - 1, 1)
        return _sending(topology, sent * share, sent * (1 - share)), False
    # Which of the rows go to the same host is not asked: over both ports at a time, at best.
    bandwidth = np.where(near > 0, topology.within.bandwidth, 0.0) + topology.between.bandwidth * (
        topology.num_hosts > 1
    )
    return sent / np.maximum(bandwidth, 1.0), hidden


def _sending(topology: Topology, within: Seconds, between: Seconds) -> Seconds:
    """`[ranks]` seconds in which a rank's ports are busy; ranks that share a card wait for one another."""
    cards = np.bincount(topology.rail, between)[topology.rail] / topology.between.bandwidth
    found: Seconds = np.maximum(within / topology.within.bandwidth, cards * (between > 0))
    return found
