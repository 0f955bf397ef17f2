"""Tests of the ranks that share a host: as torchrun numbers its nodes, or by host names."""

from __future__ import annotations

import os
import socket
from argparse import Namespace

import pytest

from megatron_cp.cli import case_options
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.executor.launch import run_ranks
from tests.limits import limit

# Ranks that are processes import these functions by name; what they change is of their process alone.


def by_node_of_torchrun(group: RankGroup) -> tuple[int, ...]:
    os.environ["GROUP_RANK"] = "10210"[group.rank]
    return hosts_of(group)


def by_name(group: RankGroup) -> tuple[int, ...]:
    os.environ.pop("GROUP_RANK", None)
    socket.gethostname = lambda: ("b", "a", "b")[group.rank]
    return hosts_of(group)


def test_hosts_are_numbered_in_the_order_of_ranks():
    assert hosts_of(None) == (0,)
    assert run_ranks(by_node_of_torchrun, 5, kind="processes", timeout=limit(120)) == [(0, 1, 2, 0, 1)] * 5
    assert run_ranks(by_name, 3, kind="processes", timeout=limit(120)) == [(0, 1, 0)] * 3


@pytest.mark.parametrize(
    ("found", "transport", "hosts", "expected"),
    [
        ((0, 1, 1, 0), "hierarchical", None, (0, 1, 1)),
        ((0, 1, 1, 0), "hierarchical", 2, ()),  # as asked
        ((0, 1, 1, 0), "pairwise", None, ()),
        ((0, 0, 0, 1), "hierarchical", None, ()),  # of these three, one host: made up
    ],
)
def test_commands_know_the_hosts_of_a_job(found, transport, hosts, expected, monkeypatch):
    monkeypatch.setattr("megatron_cp.executor.hosts.hosts_of", lambda group: found)
    args = Namespace(transport=transport, hosts=hosts)
    assert case_options.hosts_of_job(args, ThreadGroup.create(4)[0], 3) == expected
    assert case_options.hosts_of_job(args, None, 3) == ()
