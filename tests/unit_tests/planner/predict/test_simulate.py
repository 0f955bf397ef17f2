"""Workloads whose end can be worked out by hand, and bounds that hold for any."""

import dataclasses

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict import Link, Topology, machine
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.simulate import simulate
from megatron_cp.planner.predict.walk import workload_of
from megatron_cp.planner.predict.workload import Edges, Workload
from tests.refusals import rejects

SLOW, FAST = Link(1.0, 0.0, 10.0), Link(0.5, 0.0, 100.0)
TWO_HOSTS = Topology((0, 0, 1, 1), FAST, SLOW, rails=1)


def edges(*messages):
    return Edges.from_messages(*(np.array(each) for each in zip(*messages, strict=True)))


def test_a_transfer_waits_for_its_sender_or_hides_behind_work():
    workload = Workload(4)
    workload.work("kernel", "kernel", np.array([3.0, 0.0, 0.0, 0.0]))
    workload.wait(workload.start("x", edges((0, 1, 200))))
    timeline = simulate(workload, TWO_HOSTS)
    assert timeline.end.tolist() == [5.0, 5.5, 0.0, 0.0]  # 3 + 200 / 100, and half a second later there
    assert timeline.waited.tolist() == [2.0, 5.5, 0.0, 0.0]
    assert timeline.seconds == 5.5
    assert timeline.busy.tolist() == [3.0, 0.0, 0.0, 0.0]
    assert (timeline.exposed, timeline.imbalance) == (2.5, 2.25)  # beyond rank 0's work, and that beyond the mean
    workload = Workload(2)
    key = workload.start("x", edges((0, 1, 200), (1, 0, 200)))
    workload.work("kernel", "kernel", 10.0)
    workload.wait(key)
    timeline = simulate(workload, Topology((0, 0), FAST, SLOW))
    assert timeline.end.tolist() == [10.0, 10.0]
    assert timeline.exposed == 0.0


@pytest.mark.parametrize(("overlap", "end"), [(1.0, 10.0), (0.5, 11.25), (0.0, 12.5)])
def test_a_transfer_overlaps_in_part(overlap, end):
    """A message takes 2.5 seconds; the part that does not overlap with 10 seconds of work is added to them."""
    workload = Workload(2)
    key = workload.start("x", edges((0, 1, 200), (1, 0, 200)), overlap=overlap)
    workload.work("kernel", "kernel", 10.0)
    workload.wait(key)
    timeline = simulate(workload, Topology((0, 0), FAST, SLOW))
    assert timeline.end.tolist() == [end, end]
    assert timeline.exposed == end - 10.0


def test_a_device_waits_for_its_host_where_that_takes_longer():
    """Three operations of 2 seconds each for the host, and a message; an operation that no rank has is not issued."""
    for seconds, end in ((1.0, 8.0), (5.0, 17.5)):
        workload = Workload(2, issue=2.0)
        for work in (seconds, seconds, seconds, 0.0):
            workload.work("kernel", "kernel", work)
        workload.wait(workload.start("x", edges((0, 1, 200), (1, 0, 200))))
        timeline = simulate(workload, Topology((0, 0), FAST, SLOW))
        assert workload.host == 8.0
        assert timeline.seconds == end
        assert timeline.exposed == end - 3 * seconds


def test_a_ring_of_little_work_takes_its_hops():
    """A hop takes a host 0.29 ms, for its start, attention and a merge, and there are seven."""
    layout, on = Layout.zigzag(Packing([800]), 8), machine("h100")
    plan = plan_attention(layout.packing, layout, heads=8, kv_heads=8, head_dim=64, scheme="p2p")
    operation, hop, _ = on.hardware.host
    found = simulate(workload_of(plan, Rates(on.hardware, 2, forward=True)), on.topology(8))
    assert found.seconds == found.host >= 7 * (hop + 2 * operation)
    graph = dataclasses.replace(on.hardware, host=(0.0, 0.0, 0.0))
    assert simulate(workload_of(plan, Rates(graph, 2, forward=True)), on.topology(8)).seconds < found.seconds / 3


def test_a_ring_overlaps_as_its_machine_does_and_an_exchange_in_full():
    layout, hardware = Layout.zigzag(Packing([600]), 3), machine("h100").hardware
    for scheme, forward, overlap in (("p2p", True, 0.0), ("p2p", False, 1.0), ("a2a", True, 1.0)):
        plan = plan_attention(layout.packing, layout, heads=6, kv_heads=3, head_dim=64, scheme=scheme)
        assert {each.overlap for each in workload_of(plan, Rates(hardware, 2, forward)).transfers} == {overlap}


def test_ranks_share_cards_ports_and_cores():
    workload = Workload(4)
    workload.wait(workload.start("x", edges((0, 2, 100), (1, 3, 100))))
    assert simulate(workload, TWO_HOSTS).seconds == 21.0  # both over one card of 10 bytes a second
    two_cards = Topology((0, 0, 1, 1), FAST, SLOW, rails=2)
    assert simulate(workload, two_cards).seconds == 11.0
    workload = Workload(2)
    first, second = (workload.start(name, edges((0, 1, 1000))) for name in ("x", "y"))
    workload.wait(second)
    workload.wait(first)
    assert simulate(workload, Topology((0, 0), FAST, SLOW)).seconds == 20.5
    workload = Workload(4)
    workload.work("kernel", "kernel", 1.0)
    topology = Topology((0, 0, 0, 1), FAST, SLOW)
    assert simulate(workload, topology, cores=2).end.tolist() == [1.5, 1.5, 1.5, 1.0]


def test_a_rank_that_waits_leaves_its_core_to_others():
    """Two ranks on one core: while rank 1 waits a second for a message, rank 0 computes at full speed."""
    workload = Workload(4)
    workload.wait(workload.start("x", edges((2, 1, 1))))
    workload.work("kernel", "kernel", np.array([3.0, 3.0, 0.0, 0.0]))
    link = Link(1.0, 0.0, 1e30)
    timeline = simulate(workload, Topology((0, 0, 1, 1), link, link), cores=1)
    # Alone for the first second, then half as fast each for four, then alone for the last.
    assert timeline.end[:2] == pytest.approx([5.0, 6.0], rel=1e-3)
    assert simulate(workload, Topology((0, 0, 1, 1), link, link)).end[:2].tolist() == [3.0, 4.0]


def test_emulated_hosts_share_the_cores_of_one_computer():
    workload = Workload(4)
    workload.work("kernel", "kernel", 1.0)
    hosts = (0, 0, 1, 1)
    assert simulate(workload, Topology(hosts, FAST, SLOW), cores=2).end.tolist() == [1.0] * 4
    assert simulate(workload, Topology(hosts, FAST, SLOW, shares_cores=True), cores=2).end.tolist() == [2.0] * 4


def test_a_core_that_moves_bytes_computes_less():
    """100 bytes out and 100 in at 100 a second are 2 seconds of the core: nothing while it only waits for them."""
    both = edges((0, 1, 100), (1, 0, 100))
    topology = Topology((0, 0), Link(0.0, 0.0, 50.0), SLOW)
    waiting, hiding = (Workload(2, transfer=100.0) for _ in range(2))
    waiting.wait(waiting.start("x", both))
    assert simulate(waiting, topology, cores=2).end.tolist() == [2.0, 2.0]
    key = hiding.start("x", both)
    hiding.work("kernel", "kernel", 10.0)
    hiding.wait(key)
    assert simulate(hiding, topology, cores=2).end.tolist() == [12.0, 12.0]
    assert simulate(hiding, topology, cores=3).end.tolist() == [10.0, 10.0]  # a core to spare does it


def test_a_host_that_starts_a_transfer_computes_nothing_meanwhile():
    workload = Workload(3, collective=0.25)
    key = workload.start("x", edges((0, 1, 100)))
    workload.work("kernel", "kernel", 10.0)
    workload.wait(key)
    assert simulate(workload, Topology((0, 0, 0), FAST, SLOW)).end.tolist() == [10.25, 10.25, 10.0]


def test_what_a_rank_keeps_is_no_message():
    kept = edges((0, 0, 5), (0, 1, 0), (1, 0, 7))
    assert (kept.senders.tolist(), kept.receivers.tolist(), kept.nbytes.tolist()) == ([1], [0], [7])
    rejects("the 2 ranks of the plan", simulate, Workload(2), TWO_HOSTS)


@pytest.mark.parametrize("forward", [True, False])
def test_an_empty_batch_takes_no_time(forward):
    packing = Packing([0])
    layout = Layout.contiguous(packing, 6)
    made = [plan_attention(packing, layout, heads=8, head_dim=64, scheme=scheme) for scheme in ("a2a", "p2p", "exact")]
    made += [plan_linear(packing, layout, heads=8, head_dim=64, mode=mode) for mode in ("headwise", "chunkwise")]
    for plan in made:
        assert simulate(workload_of(plan, Rates(machine().hardware, 2, forward)), machine().topology(6)).seconds == 0.0
