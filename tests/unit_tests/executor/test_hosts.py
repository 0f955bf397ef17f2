"""Which ranks share a host: torchrun's nodes, or the hosts' names."""

from __future__ import annotations

import os
import socket

from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import hosts_of, run_ranks

# Ranks that are processes import these functions by name; what they change is of their process alone.


def by_node_of_torchrun(group: RankGroup) -> tuple[int, ...]:
    os.environ["GROUP_RANK"] = "10210"[group.rank]
    return hosts_of(group)


def by_name(group: RankGroup) -> tuple[int, ...]:
    os.environ.pop("GROUP_RANK", None)
    socket.gethostname = lambda: ("b", "a", "b")[group.rank]
    return hosts_of(group)


def test_hosts_are_numbered_in_the_order_of_ranks():
    assert run_ranks(by_node_of_torchrun, 5, kind="processes", timeout=120) == [(0, 1, 2, 0, 1)] * 5
    assert run_ranks(by_name, 3, kind="processes", timeout=120) == [(0, 1, 0)] * 3
