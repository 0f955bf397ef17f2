"""`python -m benchmarks planner`: measures the rates that predictions take from a machine file, on these ranks.

All ranks measure at the same time, so that shared cores, memory and links are shared as in a step. Rates of local work
are those of a rank's own thread by its own clock, which stands still while another thread has its core: predictions
account for how ranks take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.layer_step import LayerStep
from benchmarks.ranks import measured_on_ranks, with_defaults
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import Message, RankGroup, ThreadGroup, TorchGroup, hosts_of
from megatron_cp.plan import CONV1D, GDN, KINDS, MODES
from megatron_cp.planner import (
    Hardware,
    Link,
    Machine,
    machine,
    priced,
    rule_products,
    stage_shapes,
    timelines,
    written,
)
from megatron_cp.testing import Case

HEAD_DIMS = (64, 128)
_TOKENS, _FEW, _CHUNK = 2048, 8, 64
_SHORT, _MORE = 256, 5  # a layer of at most 256 tokens is timed 5 times as often, since it takes so little
_HEADS, _GROUPS = 4, 2
_SMALL, _LARGE = 1 << 12, 1 << 23  # bytes of the messages of a link
_IN_A_ROW = 20, 4  # small and large messages that follow one another
_UNMEASURED = ("memory", "units", "rule_floor", "matrix_rows")
_STATES = tuple(kind for kind in KINDS.values() if kind.has_state and kind.measured_rule == kind.name)
_SLOWEST_LAUNCH = 1e-2  # seconds


def report(args: argparse.Namespace, world: TorchGroup | None) -> tuple[str, dict[str, Any]]:
    """Measures the machine, and writes its file if that is asked for."""
    if args.calibrate is not None and not Path(args.calibrate).resolve().parent.is_dir():
        raise ArgumentError("--calibrate", args.calibrate, "a file in a folder that exists")
    args = with_defaults(args, world, ("attention",), {"attention": {}})
    if args.cp == 1:
        raise ArgumentError("--cp", 1, "at least 2 ranks, between which there are links to measure")
    dtype, repeats = getattr(torch, args.dtype), args.repeats
    found: Machine = measured_on_ranks(calibrated, dtype, repeats, plans=(), cp=args.cp, args=args, world=world)[0]
    if args.calibrate is not None and (world is None or world.rank == 0):
        Path(args.calibrate).write_text(written(found))
    saved = f"machine written to {args.calibrate}" if args.calibrate else written(found)
    return f"{found.describe()}\n{saved}", {"machine": found.describe(), "cp": args.cp}


@dataclass(frozen=True)
class Bench:
    """Measures how long a call takes on all ranks at the same time, in medians over repeats.

    Attributes:
        dtype: type in which layers compute.
        crowd: number of ranks for each core that they share; at least 1.
    """

    group: RankGroup
    repeats: int
    dtype: torch.dtype
    crowd: float = 1.0

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """Returns the slowest rank's seconds, by the clock, for one of `times` calls one after another."""
        return self.slowest(self._timed(call, times, time.perf_counter))[0]

    def work(self, call: Callable[[], object], times: int = 1) -> float:
        """Returns the mean seconds of a rank's own thread."""
        return self._mean(self._timed(call, times, time.thread_time))[0]

    def _timed(self, call: Callable[[], object], times: int, clock: Callable[[], float]) -> list[tuple[float, ...]]:
        call()
        taken: list[tuple[float, ...]] = []
        for _ in range(self.repeats):
            self.group.barrier()
            began = clock()
            for _ in range(times):
                call()
            taken.append(((clock() - began) / times,))
        return taken

    def slowest(self, taken: Sequence[tuple[float, ...]]) -> list[float]:
        """Returns the median over repeats of the slowest rank's time, for each of the things timed."""
        return self._median(taken, np.max)

    def _mean(self, taken: Sequence[tuple[float, ...]]) -> list[float]:
        """Returns the median over repeats of the ranks' mean time, for each of the things timed."""
        return self._median(taken, np.mean)

    def _median(self, taken: Sequence[tuple[float, ...]], of_ranks: Callable[..., Any]) -> list[float]:
        everyone = np.array(self.group.all_gather_object(taken))  # [ranks, repeats, n]
        found: list[float] = np.median(of_ranks(everyone, axis=0), axis=0).tolist()
        return found

    def layer(self, case: Case) -> tuple[float, float]:
        """Returns the seconds of a rank's own thread in a layer that each runs for itself, forward and backward."""
        step = LayerStep(case, ThreadGroup.create(1)[0])
        times = self.repeats * (1 if sum(case.lengths) > _SHORT else _MORE)
        taken = [step.timed(self.group, time.thread_time) for _ in range(times + 1)][1:]
        forward, backward = self._mean(taken)
        return forward, backward

    def step(self, step: LayerStep) -> tuple[float, float]:
        """Returns the seconds of a layer that the ranks compute together, forward and backward."""
        forward, backward = self.slowest([step.timed(self.group) for _ in range(self.repeats + 1)][1:])
        return forward, backward

    def attention(self, lengths: Sequence[int], head_dim: int = HEAD_DIMS[0], mask: str = "causal") -> Case:
        """Returns an attention on one rank."""
        return Case(
            "attention", 1, tuple(lengths), heads=_HEADS, groups=_GROUPS, head_dim=head_dim, value_head_dim=head_dim,
            mask=mask, dtype=self.dtype,
        )  # fmt: skip

    def linear(self, kind: str, tokens: int, head_dim: int = HEAD_DIMS[0]) -> Case:
        """Returns a linear layer on one rank and one document."""
        return Case(
            kind, 1, (tokens,), heads=_HEADS, groups=_GROUPS, head_dim=head_dim, value_head_dim=head_dim,
            dtype=self.dtype,
        )  # fmt: skip


def calibrated(group: RankGroup, dtype: torch.dtype, repeats: int) -> Machine:
    """Returns a machine with the rates of these ranks, the same on every rank, in medians over `repeats`."""
    hosts, (cores, shares_cores) = hosts_of(group), _cores(group)
    together = len(hosts) if shares_cores else max(map(hosts.count, hosts))
    bench = Bench(group, repeats, dtype, max(1.0, together / cores))
    matrix, collective, transfer = _matrix_rate(bench), *_handling(bench, hosts)
    rates = replace(
        machine("cpu").hardware, name="measured",
        about=f"{group.size} ranks on {cores * (1 if shares_cores else len(set(hosts)))} cores ({platform.machine()})",
        copy=_copy_rate(bench), launch=_launch(bench), matrix=matrix, matrix_rows=16.0, units=0.0,
        cores=cores, wider=(1.0, 2.0), rule_floor=0.0, collective=collective, transfer=transfer,
    )  # fmt: skip
    rates = _with_attention(rates, bench)
    within, between = _links(bench, hosts, collective)
    found = Machine(rates, max(map(hosts.count, hosts)), within, between, 1, shares_cores)
    found = replace(found, hardware=_with_linear(found, bench))
    found = replace(found, hardware=replace(found.hardware, launch=_fitted_launch(found, bench, hosts)))
    words = f"measured by `python -m benchmarks planner --calibrate`, {torch.__version__}, {dtype}".replace(
        "torch.", ""
    )
    given = "not measured: as of the preset cpu, or what leaves predictions as they are"
    names = [each.name for each in fields(Hardware) if each.name not in ("name", "about", "sources")]
    sources = {name: given if name in _UNMEASURED else words for name in (*names, "within", "between")}
    sources["wider"] = f"the rates are those of {dtype}".replace("torch.", "")
    if len(set(hosts)) == 1:
        sources["between"] = "not measured: as within the host"
    return replace(found, hardware=replace(found.hardware, sources=sources))


def _cores(group: RankGroup) -> tuple[int, bool]:
    """Returns the fewest cores of a rank's computer, and True if ranks of several hosts are on one computer."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    own = boot.read_text().strip() if boot.is_file() else platform.node()
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    everyone = group.all_gather_object((own, count))
    return min(cores for _, cores in everyone), len({name for name, _ in everyone}) < len(set(hosts_of(group)))


def _copy_rate(bench: Bench) -> float:
    source = torch.zeros(1 << 13, 1 << 10, dtype=torch.uint8)
    target, order = torch.empty_like(source), torch.randperm(1 << 13)
    return source.nbytes / bench.work(lambda: torch.index_select(source, 0, order, out=target))


def _launch(bench: Bench) -> float:
    small = torch.zeros(16)
    return bench.work(lambda: small.add_(1.0), times=100)


def _matrix_rate(bench: Bench) -> float:
    left, right = torch.zeros(512, 1024, dtype=bench.dtype), torch.zeros(1024, 1024, dtype=bench.dtype)
    return 2 * 512 * 1024 * 1024 / bench.work(lambda: left @ right)


def _with_attention(rates: Hardware, bench: Bench) -> Hardware:
    """Adds the times of a call, a band, a query and a pair, from batches with many of one and few of the others.

    All pairs are visible except in the last two batches, which show how many more a causal mask computes.
    """
    count, short, size = 64, 128, HEAD_DIMS[0]
    calls = bench.layer(bench.attention([_FEW], mask="full"))
    bands = bench.layer(bench.attention([_FEW] * count, mask="full"))
    rows = bench.layer(bench.attention([short] * (_TOKENS // short), mask="full"))
    longs = {each: bench.layer(bench.attention([_TOKENS], each, "full")) for each in HEAD_DIMS}
    cuts = [bench.attention([_TOKENS // count] * count) for count in (1, 2)]
    causal = [bench.layer(cut) for cut in cuts]
    band: list[float] = []
    row: list[float] = []
    tiles: list[float] = []
    rate: dict[int, list[float]] = {each: [] for each in HEAD_DIMS}
    visible = [_pairs(cut, 1) for cut in cuts]
    for way, (products, call) in enumerate(zip((4, 10), calls, strict=True)):
        band.append(max((bands[way] - call) / (count - 1), 0.0))
        long = longs[size][way] - call
        few = rows[way] - call - band[way] * (_TOKENS // short - 1)
        pair = max((long - few) / (_TOKENS * (_TOKENS - short)), long / _TOKENS**2 / 2)
        row.append(max(long / _TOKENS - pair * _TOKENS, 0.0))
        for each in HEAD_DIMS:
            seconds = longs[each][way] - call - row[way] * _TOKENS
            rate[each].append(_TOKENS**2 * _HEADS * products * each / max(seconds, 1e-9))
        for number, (taken, pairs) in enumerate(zip(causal, visible, strict=True)):
            inner = taken[way] - call - number * band[way] - row[way] * _TOKENS
            tiles.append(2 * (inner / pair - pairs) / _TOKENS)
    return replace(
        rates, attention=tuple((each, ahead, back) for each, (ahead, back) in rate.items()), band=(band[0], band[1]),
        call=max(mean(calls) - mean(band), 0.0), row=((size, row[0] / _HEADS, row[1] / _HEADS),),
        tile=int(np.clip(round(mean(tiles)), 1, _TOKENS)),
    )  # fmt: skip


def _pairs(case: Case, tile: int) -> int:
    step = case.plan().attend
    assert step is not None
    return int(stage_shapes(step, tile).pairs[0, 0])


def _with_linear(found: Machine, bench: Bench) -> Hardware:
    """Adds the rates of the convolution, and of each kind's rule without convolution and gates, which are predicted.

    A rate is the difference between many tokens and few; the time that few tokens take as well belongs to the host.
    """
    few, many = (bench.layer(bench.linear(CONV1D.name, tokens)) for tokens in (_FEW, _TOKENS))
    channels = bench.linear(CONV1D.name, _FEW).linear_shape.heads
    elements = (_TOKENS - _FEW) * channels
    ahead, back = (elements / max(b - a, 1e-9) for a, b in zip(few, many, strict=True))
    rates = replace(found.hardware, convolution=(ahead, back))
    free = replace(found, hardware=replace(rates, rule=tuple((kind.name, 1, 1e30, 1e30, 0.0) for kind in _STATES)))
    rows = []
    for kind, size in itertools.product(_STATES, HEAD_DIMS):
        cases = [bench.linear(kind.name, tokens, size) for tokens in (_CHUNK, _TOKENS)]
        beside = []
        for case in cases:
            others = timelines(case.plan(), free, item_size=bench.dtype.itemsize)
            beside.append([taken - each.seconds for taken, each in zip(bench.layer(case), others, strict=True)])
        products = _HEADS * rule_products(cases[0].plan())
        each = [max(many - few, 1e-9) / (_TOKENS - _CHUNK) for few, many in zip(*beside, strict=True)]
        host = mean(max(few - _CHUNK * one, 0.0) for few, one in zip(beside[0], each, strict=True))
        rows.append((kind.name, size, products / each[0], 2 * products / each[1], host))
    return replace(rates, rule=tuple(rows))


def _fitted_launch(found: Machine, bench: Bench, hosts: tuple[int, ...]) -> float:
    """Returns the time to launch an operation that explains how long layers of few tokens take beyond their bytes."""
    size, topology = bench.group.size, found.topology(bench.group.size, hosts)
    sizes = {"heads": 2 * size, "groups": size, "head_dim": 8, "value_head_dim": 8}
    shape: dict[str, Any] = {**sizes, "dtype": bench.dtype}
    cases = [
        Case("attention", size, (_FEW * size,), "contiguous", scheme=scheme, **shape)
        for scheme in ("a2a", "p2p", "all_gather")
    ]
    for mode, of in MODES.items():  # hidden states as wide as the output, where they move
        layout = "zigzag" if of.redistributes else "contiguous"
        cases.append(Case(GDN.name, size, (_FEW * size,), layout, scheme=mode, hidden_size=16 * size, **shape))
    taken = sum(sum(bench.step(LayerStep(case, bench.group))) for case in cases)
    plans = [case.plan() for case in cases]

    def predicted(launch: float) -> float:
        machine_with = replace(found, hardware=replace(found.hardware, launch=launch))
        return sum(priced(plan, machine_with, topology, item_size=bench.dtype.itemsize).total for plan in plans) / 1e3

    least, most = found.hardware.launch, _SLOWEST_LAUNCH
    for _ in range(20):
        middle = (least + most) / 2
        least, most = (middle, most) if predicted(middle) < taken else (least, middle)
    return least


def _handling(bench: Bench, hosts: tuple[int, ...]) -> tuple[float, float]:
    """Returns the seconds of a rank's thread for a small message, and the bytes a second that its process transfers.

    The message goes to a rank of its own host, if any host has two: over a slow link threads wake up for every few
    packets.
    """
    group, found = bench.group, []
    same = any(hosts.count(host) > 1 for host in hosts)
    peer = _partner(hosts, group.rank, same=same)
    for nbytes, clock in ((_SMALL, time.thread_time), (_LARGE, time.process_time)):
        message = _message(group, peer, nbytes)
        taken = []
        for _ in range(bench.repeats + 1):
            group.barrier()
            began = clock()
            message()
            taken.append((clock() - began,))
        found.append(bench.slowest(taken[1:])[0])
    return found[0], 2 * _LARGE / max(found[1], 1e-9)


def _links(bench: Bench, hosts: tuple[int, ...], collective: float) -> tuple[Link, Link]:
    """Returns the links within a host and between hosts, from small and large messages between neighbours, all at once.

    Several messages follow one another, since flows that share a link are not served evenly, nor do ranks begin at
    once. The ranks of a host share its card between hosts, so a card's rate is that of a rank times their number.
    """
    group, links = bench.group, {}
    place = {way: _partner(hosts, group.rank, same=way) for way in (True, False)}
    known = [group.all_gather_object(place[way] is not None) for way in (True, False)]
    for way, everyone in zip((True, False), known, strict=True):
        if not any(everyone):
            continue
        large = _LARGE if way else _LARGE // 8
        first, last = (
            bench.seconds(_message(group, place[way], nbytes), times)
            for nbytes, times in zip((_SMALL, large), _IN_A_ROW, strict=True)
        )
        at_a_time = (
            1 if way else max(sum(of for of, at in zip(everyone, hosts, strict=True) if at == host) for host in hosts)
        )
        rate = at_a_time * (large - _SMALL) / max(last - first, 1e-9)
        beside = at_a_time * _SMALL / rate + collective * bench.crowd
        links[way] = Link(max(first - beside, 1e-7), 0.0, rate)
    within = links.get(True) or links[False]
    return within, links.get(False, within)


def _partner(hosts: tuple[int, ...], rank: int, *, same: bool) -> int | None:
    """Returns the rank with which a rank exchanges messages: the next one in disjoint pairs."""
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
