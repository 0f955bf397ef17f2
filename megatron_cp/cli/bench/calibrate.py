"""Measures the rates that predictions take from a preset, on the ranks at hand: `bench planner --calibrate`.

All ranks measure at a time, so that what they share (cores, memory, links) is shared as in a step.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from megatron_cp.cli.bench.layer_step import LayerStep
from megatron_cp.executor.groups import Message, RankGroup, ThreadGroup
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.plan.kinds import GDN
from megatron_cp.planner.predict import Hardware, Link, Machine, machine
from megatron_cp.planner.predict.kernels import rule_products, stage_shapes
from megatron_cp.planner.predict.price import timelines
from megatron_cp.testing.parity import Case

HEAD_DIMS = (64, 128)
_TOKENS, _HEADS = 2048, 2
_SMALL, _LARGE = 1 << 12, 1 << 23  # bytes of the messages of a link


def calibrated(group: RankGroup, dtype: torch.dtype, repeats: int) -> Machine:
    """A machine of the ranks at hand, the same on every rank: medians over `repeats`, of the slowest rank."""
    slowest = Slowest(group, repeats)
    base = machine("cpu")
    rates = replace(
        base.hardware, name="measured", about=f"{group.size} ranks on {os.cpu_count()} cores ({platform.machine()})",
        copy=_copy_rate(slowest), launch=_launch(slowest), matrix=_matrix_rate(slowest, dtype), matrix_rows=16.0,
        matrix_peak=1.0,
        units=0.0, cores=0, wider=(1.0, 2.0), rule_floor=0.0, tile=32,
    )  # fmt: skip
    rates = replace(rates, matrix_peak=rates.matrix)
    rates = _with_attention(rates, slowest, dtype)
    within, between = _links(group, slowest)
    hosts = hosts_of(group)
    found = Machine(rates, max(map(hosts.count, hosts)), within, between, 1)
    found = replace(found, hardware=_with_rule(found, slowest, dtype))
    words = f"measured by `megatron-cp bench planner --calibrate`, {torch.__version__}, {dtype}".replace("torch.", "")
    given = "not measured: as of the preset cpu, or what leaves predictions as they are"
    unmeasured = ("memory", "tile", "units", "rule_floor", "call", "matrix_rows", "matrix_peak")
    rates_of = [name for name in vars(rates) if name not in ("name", "about", "sources", "cores", "wider")]
    sources = {name: given if name in unmeasured else words for name in (*rates_of, "within", "between")}
    if len(set(hosts)) == 1:
        sources["between"] = "not measured: as within the host"
    return replace(found, hardware=replace(found.hardware, sources=sources))


class Slowest:
    """Seconds of a call: the median over repeats of the slowest rank's."""

    def __init__(self, group: RankGroup, repeats: int) -> None:
        self.group, self.repeats = group, repeats

    def __call__(self, call: Callable[[], object], times: int = 1) -> float:
        call()
        taken = []
        for _ in range(self.repeats):
            self.group.barrier()
            began = time.perf_counter()
            for _ in range(times):
                call()
            taken.append((time.perf_counter() - began) / times)
        everyone = np.array(self.group.all_gather_object(taken))
        return float(median(everyone.max(axis=0)))


def _copy_rate(slowest: Slowest) -> float:
    source = torch.zeros(1 << 13, 1 << 10, dtype=torch.uint8)
    target, order = torch.empty_like(source), torch.randperm(1 << 13)
    return source.nbytes / slowest(lambda: torch.index_select(source, 0, order, out=target))


def _launch(slowest: Slowest) -> float:
    small = torch.zeros(16)
    return slowest(lambda: small.add_(1.0), times=100)


def _matrix_rate(slowest: Slowest, dtype: torch.dtype) -> float:
    left, right = torch.zeros(512, 1024, dtype=dtype), torch.zeros(1024, 1024, dtype=dtype)
    return 2 * 512 * 1024 * 1024 / slowest(lambda: left @ right)


def _steps(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward alone, and forward and backward, of a layer on one rank."""
    step = LayerStep(case, ThreadGroup.create(1)[0])
    return step.forward, step.both


def _with_attention(rates: Hardware, slowest: Slowest, dtype: torch.dtype) -> Hardware:
    """Rates by head size; and what each band costs, from many short documents."""
    rows = []
    for size in HEAD_DIMS:
        whole = Case(
            "attention", 1, (_TOKENS,), heads=_HEADS, groups=1, head_dim=size, value_head_dim=size, dtype=dtype
        )
        step = whole.plan().attend
        assert step is not None
        shapes = stage_shapes(step)
        computed = int(shapes.pairs[0, 0] + shapes.rows[0, 0] * rates.tile // 2) * _HEADS
        forward, both = (slowest(call) for call in _steps(whole))
        rows.append((size, computed * 4 * size / forward, computed * 10 * size / max(both - forward, 1e-9)))
    count, short = 64, 8
    many = Case("attention", 1, (short,) * count, heads=_HEADS, groups=1, head_dim=64, value_head_dim=64, dtype=dtype)
    band = slowest(_steps(many)[1]) / (2 * count)  # of both directions, whose bands cost alike
    return replace(rates, attention=tuple(rows), band=band, call=0.0)


def _with_rule(found: Machine, slowest: Slowest, dtype: torch.dtype) -> Hardware:
    """What a Gated DeltaNet layer takes beside its convolution and gates, whose copies are predicted."""
    case = Case(GDN.name, 1, (_TOKENS,), heads=_HEADS, groups=_HEADS, head_dim=64, value_head_dim=64, dtype=dtype)
    forward, both = (slowest(call) for call in _steps(case))
    plan = case.plan()
    products = _TOKENS * _HEADS * rule_products(plan)
    free = replace(found, hardware=replace(found.hardware, rule=(1e30, 1e30)))
    beside = [each.seconds for each in timelines(plan, free, item_size=dtype.itemsize)]
    rates = products / max(forward - beside[0], 1e-9), 2 * products / max(both - forward - beside[1], 1e-9)
    return replace(found.hardware, rule=rates)


def _links(group: RankGroup, slowest: Slowest) -> tuple[Link, Link]:
    """Between ranks of one host and of two, by messages of two sizes between neighbours, all at a time.

    Between hosts the ranks of a host share its card, so that has as many times the rate of a rank.
    """
    hosts = hosts_of(group)
    place = {way: _partner(hosts, group.rank, same=way) for way in (True, False)}
    known = [group.all_gather_object(place[way] is not None) for way in (True, False)]
    links = {}
    for way, everyone in zip((True, False), known, strict=True):
        if not any(everyone):
            continue
        small, large = _SMALL, _LARGE if way else _LARGE // 16
        first, second = (slowest(_message(group, place[way], nbytes)) for nbytes in (small, large))
        at_a_time = (
            1 if way else max(sum(of for of, at in zip(everyone, hosts, strict=True) if at == host) for host in hosts)
        )
        rate = at_a_time * (large - small) / max(second - first, 1e-9)
        links[way] = Link(max(first - at_a_time * small / rate, 1e-7), 0.0, rate)
    within = links.get(True) or links[False]
    return within, links.get(False, within)


def _partner(hosts: tuple[int, ...], rank: int, *, same: bool) -> int | None:
    """Whom a rank exchanges messages with: the next one in pairs that are disjoint."""
    free = list(range(len(hosts)))
    while free:
        first = free.pop(0)
        other = next((peer for peer in free if (hosts[peer] == hosts[first]) == same), None)
        if other is not None:
            free.remove(other)
            if rank in (first, other):
                return other if rank == first else first
    return None


def _message(group: RankGroup, peer: int | None, nbytes: int) -> Callable[[], object]:
    if peer is None:
        return lambda: None
    sent, received = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    return lambda: group.send_and_receive([Message(sent, peer)], [Message(received, peer)])
