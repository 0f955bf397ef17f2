"""Tests of the transfers of an all-gather over several hosts, counted by hand."""

import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.walk import workload_of


def bytes_between_hosts(name, hosts, scheme="all_gather"):
    """Returns the bytes of the messages from host to host, forward, and the names of the transfers."""
    packing = Packing([64])
    plan = plan_attention(
        packing, Layout.contiguous(packing, len(hosts)), heads=2, head_dim=8, scheme=scheme, head_chunks=1
    )
    workload = workload_of(plan, Rates(machine(name).hardware, 2, forward=True), hosts)
    far = 0
    for each in workload.transfers:
        edges = each.edges
        pairs = zip(edges.senders.tolist(), edges.receivers.tolist(), edges.nbytes.tolist(), strict=True)
        far += sum(nbytes for sender, receiver, nbytes in pairs if hosts[sender] != hosts[receiver])
    return far, [each.name for each in workload.transfers]


@pytest.mark.parametrize(("hosts", "copies"), [((0, 0, 1, 1), 4), ((0,) * 4 + (1,) * 4, 8), ((0, 0, 1, 1, 2, 2), 12)])
def test_a_gather_of_devices_sends_a_share_once_to_each_other_host(hosts, copies):
    share = 64 // len(hosts) * 2 * 2 * 8 * 2  # tokens, heads, keys and values, head size, bytes
    sent, names = bytes_between_hosts("h100", hosts)
    if 64 % len(hosts) == 0:
        assert sent == copies * share
    assert names == ["keys and values", "keys and values, within hosts"]
    # A gather of CPUs, and keys that only some ranks want, go from every rank to every rank that wants them.
    assert bytes_between_hosts("cpu", hosts)[0] > sent
    assert len(bytes_between_hosts("h100", hosts, "exact")[1]) == 1


def test_a_gather_within_a_host_is_one_transfer():
    assert bytes_between_hosts("h100", (0, 0, 0, 0)) == (0, ["keys and values"])
