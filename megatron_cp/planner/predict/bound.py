"""`attention_bound`: what an attention takes at least, without playing it. No torch in here."""

from __future__ import annotations

import numpy as np

from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import PassOn
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.kernels import attention_seconds
from megatron_cp.planner.predict.program import Seconds


def attention_bound(plan: Plan, on: Machine, topology: Topology, item_size: int) -> float:
    """Milliseconds that an attention takes at least, forward and backward.

    Its busiest kernels and, one after the other, what of its transfers nothing hides: heads that are exchanged and keys
    that are fetched, but for those of later chunks. Of a ring the longer of the two. So ways that are far from the best
    are never played.
    """
    step = plan.attend
    assert step is not None
    exchanged = _exchanged(plan, topology, item_size)
    keys, hidden = _keys(plan, step, topology, item_size)
    seconds = 0.0
    for forward in (True, False):
        kernels = float(_kernels(plan, step, on, item_size, forward=forward).max(initial=0.0))
        seconds += exchanged + (max(kernels, keys) if hidden else kernels + keys)
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
    found: Seconds = np.array(plan.work_per_rank(), dtype=np.float64) * operations / rate
    return found


def _exchanged(plan: Plan, topology: Topology, item_size: int) -> float:
    """Seconds of a head exchange there and back, of which the later chunks may hide."""
    blocks = [block for exchange, _ in plan.exchanges(forward=True) for block in exchange.sections.blocks]
    degree = plan.ulysses_degree
    if degree == 1 or not blocks:
        return 0.0
    coded = 0.5 if plan.codec is not None else 1.0
    row = coded * item_size * sum(block.num_heads * block.head_dim for block in blocks) / degree / plan.head_chunks
    hosts = np.array(topology.hosts).reshape(-1, degree)
    near = (hosts[:, :, None] == hosts[:, None, :]).sum(
        axis=2
    ).ravel() - 1  # other ranks of the host, of the same group
    sent = plan.layout.token_counts * row
    return _longest(topology, sent * near, sent * (degree - 1 - near)) + 2 * _latency(topology, near, degree - 1)


def _keys(plan: Plan, step: Attend, topology: Topology, item_size: int) -> tuple[float, bool]:
    """Seconds of keys on their way, of one direction, and whether they hide behind work."""
    flow, degree = step.stages[-1].keys, plan.ulysses_degree
    if flow is None:
        return 0.0, False
    ranks, count = np.arange(plan.cp_size), step.num_kv_ranks
    widths = np.array([hi - lo for lo, hi in step.partition.groups])
    row = widths[ranks % degree] * (step.head_dim + step.value_head_dim) * item_size / step.head_chunks
    hosts = np.array(topology.hosts)
    columns = hosts.reshape(-1, degree)
    if isinstance(flow, PassOn):
        follows = np.roll(columns, -1, axis=0).ravel()
        rows = float(step.keys.packing.total) - step.keys.token_counts[(ranks // degree + 1) % count]
        sent = rows * row
        link = topology.within if (hosts == follows).all() else topology.between
        seconds = _longest(topology, sent * (hosts == follows), sent * (hosts != follows))
        return max(seconds, (count - 1) * min(link.latency, topology.within.latency)), True
    near = (columns[:, None, :] == columns[None, :, :]).sum(axis=1).ravel() - 1
    sent = flow.rows_sent_by_ranks()[ranks // degree] * row
    # Which of the rows go to the same host is not asked: as many as can be.
    share = near / max(count - 1, 1) if getattr(flow, "equal_shares", False) else (near > 0) * 1.0
    return _longest(topology, sent * share, sent * (1 - share)), False


def _longest(topology: Topology, within: Seconds, between: Seconds) -> float:
    """Seconds of the busiest port."""
    cards = np.bincount(topology.rail, between)
    near = float(within.max(initial=0.0)) / topology.within.bandwidth
    return max(near, float(cards.max(initial=0.0)) / topology.between.bandwidth)


def _latency(topology: Topology, near: IntArray, peers: int) -> float:
    return topology.within.latency if (near == peers).any() else min(topology.within.latency, topology.between.latency)
