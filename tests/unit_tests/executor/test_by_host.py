"""Tests of `exact_by_host` over emulated hosts: dense attention's results, one copy a host, and fixed bits."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_cp.executor import agreement
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.flows import ByHost
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import timelines
from megatron_cp.testing.parity import Case
from tests.counting_group import CountingGroup
from tests.scheme_cases import check, over_ranks, run_rank

H100 = machine("h100")


def case(cp, hosts, **changes):
    found = Case(
        "attention", cp, (37, 1, 0, 53, 20), layout="zigzag", heads=6, groups=2, head_dim=8, value_head_dim=5,
        scheme="exact_by_host", machine=H100, machine_hosts=hosts,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


CASES = [
    case(2, 2), case(3, 2), case(4, 2, mask="full"), case(5, 2, layout="random", head_chunks=1), case(5, 1),
    case(6, 3, mask="window:20,3", align=4), case(6, 2, layout="balanced", groups=1), case(8, 2, layout="contiguous"),
    case(8, 3, learned_sink=True), case(4, 2, kv_lengths=(5, 40, 3, 1, 90), mask="full"), case(6, 4, lengths=(3, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_dense_attention_however_ranks_lie_on_hosts(case):
    flow = case.plan().attend.stages[0].keys
    assert isinstance(flow, ByHost) == (1 < case.machine_hosts < case.cp)
    check(case)


def test_results_have_exacts_bits_and_sums_of_key_gradients_their_own_every_time():
    mine = case(6, 2, dtype=torch.float32, heads=4, groups=2)
    first, again, direct = (over_ranks(each) for each in (mine, mine, dataclasses.replace(mine, scheme="exact")))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(first["out"], direct["out"])
    assert torch.equal(first["d_q"], direct["d_q"])
    assert not torch.equal(first["d_k"], direct["d_k"])


class ByLink(CountingGroup):
    """Counts bytes to ranks of the own host and of other hosts."""

    def __init__(self, inner, hosts):
        super().__init__(inner)
        self.far = np.array(hosts) != hosts[inner.rank]
        self.sent = np.zeros(2, dtype=np.int64)  # within hosts, between them

    def start_all_to_all(self, received, sent, received_splits, sent_splits, split_counts=None):
        others = np.array(sent_splits) * sent.itemsize * (np.arange(self.size) != self.rank)
        self.sent += others[~self.far].sum(), others[self.far].sum()
        return super().start_all_to_all(received, sent, received_splits, sent_splits)


def sent_by_link(group, made, hosts):
    agreement.compare_calls(group, False)
    counted = ByLink(group, hosts)
    run_rank(counted, made)
    return counted.sent


@pytest.mark.parametrize(("cp", "hosts"), [(4, 2), (8, 2)])
def test_a_key_crosses_once_to_each_other_host_and_so_does_the_sum_of_its_gradients(cp, hosts):
    """Every query sees every key, so each key crosses once there, and once back."""
    for scheme, copies in (("exact_by_host", hosts - 1), ("exact", cp - cp // hosts)):
        made = case(cp, hosts, scheme=scheme, mask="full", lengths=(64,), value_head_dim=8, dtype=torch.float32)
        plan, topology = made.plan(), H100.topology(cp, hosts)
        sent = np.sum(run_ranks(sent_by_link, cp, made, topology.hosts), axis=0)
        row = 2 * 2 * 8 * 4  # key and value of two heads
        assert sent[1] == 2 * row * 64 * copies + row * 64 * copies  # keys twice, gradients once
        lines = timelines(plan, H100, topology, item_size=4)
        far = 0
        for span in (span for line in lines for span in line.spans if span.kind == "send"):
            hosts_of = np.array(topology.hosts)
            far += span.edges.nbytes[hosts_of[span.edges.senders] != hosts_of[span.edges.receivers]].sum()
        assert far == sent[1]
        assert sent.sum() == sum(sum(plan.bytes_sent(4, forward=forward)) for forward in (True, False))
