"""`priced`: what a plan takes on a machine, forward and backward, on the rank that is done last. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megatron_cp.layout.route import pieces_between
from megatron_cp.plan.flows import Fetch, PassOn
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.predict.hardware import Hardware, Machine, Topology
from megatron_cp.planner.predict.program import Edges, Program
from megatron_cp.planner.predict.simulate import Timeline, simulate
from megatron_cp.planner.predict.walk import program_of


def timelines(
    plan: Plan, on: Machine, topology: Topology | None = None, *, item_size: int = 2
) -> tuple[Timeline, Timeline]:
    """What each rank does when, forward and backward.

    Args:
        plan: of one layer.
        on: the machine.
        topology: where the ranks are; the machine's own hosts if None.
        item_size: bytes of an activation.

    Raises:
        ArgumentError: a topology of another number of ranks.
    """
    topology = on.topology(plan.cp_size) if topology is None else topology
    forward, backward = (
        simulate(program_of(plan, on.hardware, item_size, forward=way), topology, cores=on.hardware.cores)
        for way in (True, False)
    )
    return forward, backward


def priced(plan: Plan, on: Machine, topology: Topology | None = None, *, item_size: int = 2) -> Price:
    """What a plan takes, by `simulate`; a redistribution's share included.

    See `timelines`.
    """
    topology = on.topology(plan.cp_size) if topology is None else topology
    forward, backward = timelines(plan, on, topology, item_size=item_size)
    moved, seconds = 0, 0.0
    if plan.redistribution is not None:
        moved = max(plan.redistribution.bytes_sent(plan.layout, item_size)) // plan.redistribution.layers
        seconds = simulate(redistribution_of(plan, on.hardware, item_size), topology).seconds
        seconds /= plan.redistribution.layers
    return Price(
        plan.scheme,
        forward=1e3 * (forward.seconds + seconds),
        backward=1e3 * (backward.seconds + seconds),
        bytes_sent=max(plan.bytes_sent(item_size, forward=True)) + moved,
        exposed=1e3 * (forward.exposed + backward.exposed + 2 * seconds),
        hardware=described(on, topology),
    )


def described(on: Machine, topology: Topology) -> str:
    """A machine and how many of its ranks and hosts, in words."""
    hosts = "1 host" if topology.num_hosts == 1 else f"{topology.num_hosts} hosts"
    return f"{on.describe()}; {topology.size} ranks on {hosts}"


def redistribution_of(plan: Plan, hardware: Hardware, item_size: int) -> Program:
    """Hidden states that are moved to a plan's layout, and back after a run of layers."""
    assert plan.redistribution is not None
    program, ranks = Program(plan.cp_size), plan.cp_size
    before, after, sizes = pieces_between(plan.redistribution.hidden_layout, plan.layout)
    counts = np.zeros((ranks, ranks), dtype=np.int64)
    np.add.at(counts, (before, after), sizes)
    senders, receivers = (x.ravel() for x in np.meshgrid(np.arange(ranks), np.arange(ranks), indexing="ij"))
    row = plan.redistribution.hidden_size * item_size
    edges = Edges.of(senders, receivers, counts.ravel() * row)
    for way in (edges, edges.reversed()):
        for moved in (counts.sum(axis=1), counts.sum(axis=0)):
            program.work("order hidden states", "copy", moved * row / hardware.copy + hardware.launch)
        program.wait(program.start("hidden states", way))
    return program


def attention_bound(plan: Plan, on: Machine, topology: Topology, item_size: int) -> float:
    """Milliseconds that an attention takes at least, forward and backward.

    Its busiest kernels and, one after the other, what of its transfers nothing hides: heads that are exchanged and keys
    that are fetched, but for those of later chunks. Of a ring the longer of the two. Without any table, so that ways
    that are far from the best are never played.
    """
    step = plan.attend
    assert step is not None
    areas = np.array(plan.work_per_rank(), dtype=np.float64)
    size, value = step.head_dim, step.value_head_dim
    exchanged, keys, hidden = _transfers_at_least(plan, topology, item_size)
    seconds = 0.0
    for forward, operations in ((True, 2 * (size + value)), (False, 2 * (3 * size + 2 * value))):
        rate = on.hardware.attention_rate((size + value) // 2, forward=forward) / on.hardware.slower(item_size)
        kernels = float(areas.max(initial=0.0)) * operations / rate
        seconds += exchanged + (max(kernels, keys) if hidden else kernels + keys)
    return 1e3 * seconds


def _transfers_at_least(plan: Plan, topology: Topology, item_size: int) -> tuple[float, float, bool]:
    """Seconds of a head exchange there and back, and of keys, in one direction; and whether keys hide behind work."""
    step, degree = plan.attend, plan.ulysses_degree
    assert step is not None
    hosts = np.array(topology.hosts)
    fewest = float(plan.layout.token_counts.min(initial=0)) * item_size
    blocks = [block for exchange, _ in plan.exchanges(forward=True) for block in exchange.sections.blocks]
    coded = 0.5 if plan.codec is not None else 1.0
    sent = fewest * coded * sum(block.num_heads * block.head_dim for block in blocks) / degree / plan.head_chunks
    groups = hosts.reshape(-1, degree)
    near = float((groups[:, :, None] == groups[:, None, :]).sum(axis=2).max()) - 1  # peers of the same host, at most
    exchanged = max(sent * (degree - 1 - near) / topology.between.bandwidth, sent * near / topology.within.bandwidth)
    flow = step.stages[-1].keys
    if flow is None:
        return exchanged, 0.0, False
    row = (step.head_dim + step.value_head_dim) * item_size / step.head_chunks
    row *= min(hi - lo for lo, hi in step.partition.groups)
    columns = hosts.reshape(-1, degree).T  # of ranks with the same heads
    if isinstance(flow, PassOn):
        crosses = bool((columns != np.roll(columns, 1, axis=1)).any())
        rows = float(step.keys.token_counts.min(initial=0)) * (step.num_kv_ranks - 1)
        link = topology.between if crosses else topology.within
        return exchanged, rows * row / link.bandwidth, True
    if isinstance(flow, Fetch) and flow.equal_shares:
        near = float((columns[:, :, None] == columns[:, None, :]).sum(axis=2).max()) - 1
        each = float(flow.longest) * row
        far = (step.num_kv_ranks - 1 - near) * each / topology.between.bandwidth
        return exchanged, max(far, near * each / topology.within.bandwidth), False
    return exchanged, 0.0, False


def state_bounds(plan: Plan, on: Machine, topology: Topology, item_size: int) -> Iterator[Price]:
    """What a chunkwise plan takes at least, in bounds that rise, and take longer to find: its messages alone.

    First one state for each token of a document that another rank's token precedes, which takes no table of segments;
    then the maps that are really sent.
    """
    bandwidth = topology.within.bandwidth + (topology.between.bandwidth if topology.num_hosts > 1 else 0.0)
    words, layout = described(on, topology), plan.layout
    scan = next((step for step in plan.recurrent_steps if isinstance(step, Scan)), None)
    if scan is None:
        return
    owners = layout.located(np.sort(layout.starts))[0]
    changes = np.count_nonzero(owners[1:] != owners[:-1]) - (layout.packing.num_documents - 1)
    few = max(int(changes), 0) * scan.state_size * 4 // plan.cp_size  # by the rank that sends most: at least the mean
    finds: tuple[Callable[[bool], int], ...] = (
        lambda _: few,
        lambda forward: max(plan.bytes_sent(item_size, forward=forward)),
    )
    for find in finds:
        sent = find(True), find(False)
        forward, backward = (each / bandwidth * 1e3 for each in sent)
        yield Price(plan.scheme, forward, backward, sent[0], is_bound=True, hardware=words)
