"""`priced`: predicts the time of a plan on a machine, on the rank that finishes last. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.route import rows_between
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.predict.hardware import Hardware, Machine, Setting, Topology
from megatron_cp.planner.predict.simulate import Timeline, simulate
from megatron_cp.planner.predict.walk import workload_of
from megatron_cp.planner.predict.workload import Edges, TimedWork, Transfer, Workload

Workloads = tuple[Workload, Workload]  # forward and backward


def workload_in(setting: Setting, plan: Plan, *, forward: bool) -> Workload:
    """Returns the workload of one direction of a plan in a setting."""
    return workload_of(plan, setting.rates(forward=forward), setting.topology.hosts)


def summed(workload: Workload, setting: Setting, parts: float = 1) -> float:
    """Returns the seconds of a workload as a sum, without playing it.

    They are the busiest rank's work and the exposed transfers of the busiest ports. Of transfers of one name, which are
    parts of the same rows, all but one are hidden behind work, as far as the machine hides them; all of them
    together take at least the time of the rank's busier port. With `parts`, the sum is that of the same rows in so
    many times as many parts, without what these take to start.
    """
    topology, cores = setting.topology, setting.machine.hardware.cores
    hosts, ranks = np.array(topology.hosts), workload.ranks
    cards = ranks + topology.rail  # the numbers of ports: first each rank's own within its host, then the cards
    links = [(each.latency, each.message, each.bandwidth, each.ramp) for each in (topology.within, topology.between)]
    latency, message, bandwidth, ramp = np.repeat(links, (ranks, int(cards.max()) + 1 - ranks), axis=0).T
    by_name: dict[tuple[str, bool], list[Transfer]] = {}
    work, moved, exposed = np.zeros(ranks), np.zeros(ranks), 0.0
    for operation in workload.operations:
        if isinstance(operation, TimedWork):
            work += operation.seconds
        elif isinstance(operation, Transfer):
            work += operation.handling
            by_name.setdefault((operation.name, operation.is_second), []).append(operation)
    for starts in by_name.values():
        senders, receivers, nbytes = (
            np.concatenate([getattr(start.edges, end) for start in starts])
            for end in ("senders", "receivers", "nbytes")
        )
        far, count = hosts[senders] != hosts[receivers], len(starts)
        taken = np.zeros(ranks)
        for ends in (senders, receivers):
            ports = np.where(far, cards[ends], ends)
            sizes = np.bincount(ports, nbytes, minlength=latency.size)
            seconds = sizes / bandwidth + ramp * np.sqrt(sizes * count)
            seconds += np.bincount(ports, minlength=latency.size) * message + (sizes > 0) * latency
            taken = np.maximum(taken, np.maximum(seconds[:ranks], seconds[cards]))
        moved += taken
        hidden = 0.0 if starts[0].is_second else (1 - 1 / (count * parts)) * starts[0].overlap
        exposed += float(taken.max()) * (1 - hidden)  # every rank waits for the busiest one, which sends to it
    if cores:
        computers = np.zeros(ranks, dtype=np.int64) if topology.shares_cores else hosts
        work = np.maximum(work, (np.bincount(computers, work) / cores)[computers])
    return max(float(work.max(initial=0.0)) + exposed, float(moved.max(initial=0.0)), workload.host)


def timelines(
    plan: Plan, on: Machine, topology: Topology | None = None, *, item_size: int = 2, workloads: Workloads | None = None
) -> tuple[Timeline, Timeline]:
    """Simulates a plan, forward and backward.

    Args:
        plan: the plan of one layer.
        on: the machine.
        topology: the hosts of the ranks; the machine's own if None.
        item_size: bytes of an activation.
        workloads: those of the plan, if they are known.

    Raises:
        ArgumentError: a topology of another number of ranks.
    """
    topology = on.topology(plan.cp_size) if topology is None else topology
    if plan.transport.name == "shared_memory":
        on, topology = on.sharing_memory(topology)
    setting = Setting(on, topology, item_size)
    found = workloads or [workload_in(setting, plan, forward=forward) for forward in (True, False)]
    forward, backward = (simulate(workload, topology, cores=on.hardware.cores) for workload in found)
    return forward, backward


def priced(
    plan: Plan, on: Machine, topology: Topology | None = None, *, item_size: int = 2, workloads: Workloads | None = None
) -> Price:
    """Predicts the time of a plan by `simulate`, including its share of a redistribution; see `timelines`."""
    topology = on.topology(plan.cp_size) if topology is None else topology
    forward, backward = timelines(plan, on, topology, item_size=item_size, workloads=workloads)
    moved, seconds = 0, 0.0
    if plan.redistribution is not None:
        moved = max(plan.redistribution.bytes_sent(plan.layout, item_size)) // plan.redistribution.layers
        seconds = simulate(redistribution_of(plan, on.hardware, item_size), topology, cores=on.hardware.cores).seconds
        seconds /= plan.redistribution.layers
    return Price(
        plan.scheme,
        forward=1e3 * (forward.seconds + seconds),
        backward=1e3 * (backward.seconds + seconds),
        bytes_sent=max(plan.bytes_sent(item_size, forward=True)) + moved,
        exposed=1e3 * (forward.exposed + backward.exposed + 2 * seconds),
        imbalance=1e3 * (forward.imbalance + backward.imbalance),
        hardware=described(on, topology),
        by_link=_bytes_by_link((forward, backward), topology),
    )


def _bytes_by_link(directions: tuple[Timeline, ...], topology: Topology) -> tuple[int, int] | None:
    """Returns the bytes that all ranks send within hosts and between them; None if there is one host."""
    if topology.num_hosts == 1:
        return None
    spans = (span for timeline in directions for span in timeline.spans)
    edges = [span.edges for span in spans if span.kind == "send" and span.edges is not None]
    hosts = np.array(topology.hosts)
    messages = [np.stack([each.senders, each.receivers, each.nbytes]) for each in edges]
    senders, receivers, nbytes = np.concatenate([np.zeros((3, 0), dtype=np.int64), *messages], axis=1)
    far = hosts[senders] != hosts[receivers]
    return int(nbytes[~far].sum()), int(nbytes[far].sum())


def described(on: Machine, topology: Topology) -> str:
    """Describes a machine and the numbers of its ranks and hosts."""
    hosts = "1 host" if topology.num_hosts == 1 else f"{topology.num_hosts} hosts"
    return f"{on.describe()}; {topology.size} rank{'s' * (topology.size > 1)} on {hosts}"


def redistribution_of(plan: Plan, hardware: Hardware, item_size: int) -> Workload:
    """Returns the workload that moves hidden states to a plan's layout, and back after a run of layers."""
    assert plan.redistribution is not None
    counts = rows_between(plan.redistribution.hidden_layout, plan.layout)
    return there_and_back(counts, plan.redistribution.hidden_size * item_size, hardware)


def there_and_back(counts: IntArray, row: int, hardware: Hardware, name: str = "hidden states") -> Workload:
    """Returns the workload that moves rows to another layout and back, or their gradients.

    Args:
        counts: `[ranks, ranks]` the rows that go from each rank to each, as `rows_between` returns them.
        row: bytes of a row.
        hardware: the rates of a rank.
        name: what the rows are.
    """
    workload, edges = Workload.on(hardware, len(counts)), Edges.from_counts(counts * row)
    for messages in (edges, edges.reversed()):
        for moved in (counts.sum(axis=1), counts.sum(axis=0)):
            workload.work(f"order {name}", "copy", moved * row / hardware.copy + hardware.launch)
        workload.wait(workload.start(name, messages))
    return workload


def state_bounds(plan: Plan, setting: Setting) -> Iterator[Price]:
    """Yields lower bounds on the time of a chunkwise plan from its messages alone; each is higher and slower to find.

    The first one counts a state for each token whose predecessor in the document is on another rank, which needs no
    table of segments; the second one counts the maps that are sent.
    """
    on, topology, item_size = setting
    bandwidth = topology.within.bandwidth + (topology.between.bandwidth if topology.num_hosts > 1 else 0.0)
    machine_words, layout = described(on, topology), plan.layout
    scan = next((step for step in plan.recurrent_steps if isinstance(step, Scan)), None)
    if scan is None:
        return
    owners = layout.located(np.sort(layout.starts))[0]
    changes = np.count_nonzero(owners[1:] != owners[:-1]) - (layout.packing.run_lengths.size - 1)
    few = max(int(changes), 0) * scan.state_size * 4 // plan.cp_size  # the rank that sends most sends at least the mean
    finds: tuple[Callable[[bool], int], ...] = (
        lambda _: few,
        lambda forward: max(plan.bytes_sent(item_size, forward=forward)),
    )
    for find in finds:
        sent = find(True), find(False)
        forward, backward = (each / bandwidth * 1e3 for each in sent)
        yield Price(plan.scheme, forward, backward, sent[0], is_bound=True, hardware=machine_words)
