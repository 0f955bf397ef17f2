"""`megatron-cp bench attention`: compares every scheme with one rank's kernel, and its memory with the formula."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp import attention
from megatron_cp.apps.bench.defaults import with_defaults
from megatron_cp.apps.bench.on_ranks import measured_on_ranks
from megatron_cp.apps.bench.spread import formatted, spread, table
from megatron_cp.apps.bench.timing import (
    DIRECTIONS,
    Measure,
    Timing,
    Watch,
    WatchedGroup,
    interleaved,
    with_progress,
)
from megatron_cp.apps.bench.watched_kernels import WatchedAttentionKernel
from megatron_cp.cli import Report, case_of, hosts_of_job
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange import Buffers
from megatron_cp.executor import RankGroup, ThreadGroup, TorchGroup, choose_kernel
from megatron_cp.plan import counted
from megatron_cp.planner import buffer_bytes, checked_search, peak_bytes, working
from megatron_cp.softmax import KERNELS, AttentionKernel, attention_call
from megatron_cp.testing import Case, PeakMemory, Problem, draw

SHAPES = {"attention": {"heads": 8, "kv_heads": 2, "head_dim": 64}}

LEGEND = """\
compute: time inside kernels on the slowest rank, over the time of the same kernel on one rank with the whole batch,
divided by cp (all ranks run that at once, so that cores and memory are as busy). outside: the share of the busiest
rank's time, without transfers, that is not inside kernels: merging, packing, copying. wait: the share of all ranks'
wall-clock time spent starting and awaiting transfers. Medians [quartiles] over the repeats. On the CPU times are those
of a rank's own thread, which others on the same core do not change; on CUDA they are those of its stream.
peak: the most bytes of all tensors at a time, over the plan's formula; + kernel: including the kernel's own tensors.
Both leave out messages. buffers: MiB that the group keeps for messages, which all layers share, and over their formula.
sent: MiB to other ranks, by the rank that sends most.
kernel ms, rank ms: the slowest rank's time inside kernels, and its time without transfers; wall ms: by the clock, with
transfers and with all else that shares the cores."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Measures every scheme and returns the report."""
    args = with_defaults(args, world, ("attention",), SHAPES)
    cases, not_run = _cases(args, world)
    compared = (case.plan() for case in cases.values())
    ranks: list[Seen] = measured_on_ranks(
        measure, cases, args.repeats, plans=compared, cp=args.cp, args=args, world=world
    )
    plans = {scheme: case.plan() for scheme, case in cases.items()}
    item_size = next(iter(cases.values())).dtype.itemsize
    data = {
        **_ratios(cases, ranks, args.cp),
        "bytes_sent_per_rank": _each(
            cases, lambda scheme, way: plans[scheme].bytes_sent(item_size, forward=way == "forward")
        ),
        "work_imbalance": {scheme: plan.work_imbalance for scheme, plan in plans.items()},
        "cp": args.cp,
        "lengths": list(next(iter(cases.values())).lengths),
        "repeats": args.repeats,
        "device": args.device,
        "kernel": ranks[0].kernel,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "not_run": not_run,
    }
    return Report(_text(next(iter(cases.values())), data), data, quiet=world is not None and world.rank != 0)


def _cases(args: argparse.Namespace, world: TorchGroup | None) -> tuple[dict[str, Case], dict[str, str]]:
    """Returns the case of each scheme, and why others cannot be run; raises that for a scheme that was asked for."""
    asked = [args.scheme] if args.scheme else [scheme for scheme in working("scheme") if scheme != "auto"]
    hosts = hosts_of_job(args, world, args.cp)
    base = case_of(args, args.cp, kernel=args.kernel, device=args.device, hosts=hosts)
    checked_search(base.search_seconds, asked)
    cases, not_run = {}, {}
    for scheme in asked:
        case = base.with_scheme(scheme)
        try:
            case.refuse_early()
        except ArgumentError as error:
            if args.scheme or error.argument not in ("scheme", "ulysses_degree", "head_chunks"):
                raise
            not_run[scheme] = str(error)
        else:
            cases[scheme] = case
    if not cases:
        raise ArgumentError("--scheme", None, " or ".join(asked), " ".join(not_run.values()))
    return cases, not_run


@dataclass
class Seen:
    """The measurements of one rank.

    Attributes:
        spent: timings of every repeat, by scheme and direction; scheme "" is one rank with the whole batch.
        peaks: the most bytes, without and with the kernel's own tensors, by scheme and direction.
        buffers: bytes of the buffers that one step needs, by scheme.
    """

    kernel: str
    spent: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    peaks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)


def measure(group: RankGroup, cases: dict[str, Case], repeats: int) -> Seen:
    """Measures on one rank: memory first, which also makes the batch's tables, then times, with schemes in turn."""
    whole = replace(
        next(iter(cases.values())),
        cp=1, layout="contiguous", align=1, scheme="a2a", ulysses_degree=None, head_chunks=None,
    )  # fmt: skip
    problem = draw(whole)
    watch = Watch(torch.device(whole.device).type)
    runs = {scheme: _Run(case, problem, group, watch) for scheme, case in cases.items()}
    runs[""] = _Run(whole, problem, ThreadGroup.create(1)[0], watch)
    seen = Seen(runs[""].kernel.name)
    for name, each in with_progress(runs.items(), "measurements of memory", group.rank):
        group.buffers = Buffers()
        each.step(lambda _, call: call(), group)
        if name:
            seen.buffers[name] = group.buffers.size
            without, with_kernel = (each.peaks(group, hides=hides) for hides in (True, False))
            seen.peaks |= {(name, way): (without[way], with_kernel[way]) for way in DIRECTIONS}
    steps = {name: partial(run.step, group=WatchedGroup(group, watch)) for name, run in runs.items()}
    seen.spent = interleaved(steps, repeats, watch, group)
    return seen


class _Run:
    """A case on one rank, which may be run repeatedly."""

    def __init__(self, case: Case, problem: Problem, group: RankGroup, watch: Watch) -> None:
        self.case, self.plan, self.alone = case, case.plan(), group if case.cp == 1 else None
        self.inputs = [self._own(x, group.rank).requires_grad_() for x in problem.inputs.values()]
        call = attention_call(self.plan, case.dtype, torch.device(case.device), **case.softmax_options)
        self._watch, self._unwatched = watch, choose_kernel(KERNELS, case.kernel, call)
        self.kernel = WatchedAttentionKernel(self._unwatched, watch)
        self.sink = problem.parameters.get("sink")
        self.gradient = self._own(problem.output_gradient, group.rank)

    def step(self, measure: Measure, group: RankGroup, kernel: AttentionKernel | None = None) -> None:
        """Runs forward and backward, both through `measure(direction, call)`, with the watched kernel or another."""
        q, k, v = self.inputs
        out = measure(
            "forward",
            lambda: attention(
                q, k, v, self.plan, self.alone or group, sink=self.sink, kernel=kernel or self.kernel,
                **self.case.softmax_options,
            ),
        )  # fmt: skip
        # Engine threads of its own would not be on this thread's clock.
        with torch.autograd.set_multithreading_enabled(False):
            measure("backward", lambda: torch.autograd.grad(out, self.inputs, self.gradient))

    def peaks(self, group: RankGroup, *, hides: bool) -> dict[str, int]:
        """Returns the most bytes of each direction; `hides` leaves out the tensors that kernels make."""
        kernel = WatchedAttentionKernel(self._unwatched, self._watch, hides_tensors=hides)
        memory, peaks = PeakMemory(), {}

        def tracked(way: str, call: Callable[[], Any]) -> Any:
            memory.restart()
            result = call()
            peaks[way] = memory.peak
            return result

        with memory:
            self.step(tracked, memory.watch(group), kernel)
        return peaks

    def _own(self, stream: Tensor, rank: int) -> Tensor:
        return self.plan.layout.shard(stream, rank).detach().clone()


def _ratios(cases: dict[str, Case], ranks: list[Seen], cp: int) -> dict[str, Any]:
    def spent(scheme: str, way: str, what: str) -> Any:
        return np.array([[getattr(each, what) for each in rank.spent[scheme, way]] for rank in ranks])

    def over_ideal(scheme: str, way: str) -> dict[str, float]:
        return spread(spent(scheme, way, "kernel").max(0) * cp / spent("", way, "kernel").mean(0))

    def outside(scheme: str, way: str) -> dict[str, float]:
        busy, kernel = spent(scheme, way, "busy"), spent(scheme, way, "kernel")
        shares = 1 - kernel / busy
        return spread(np.take_along_axis(shares, busy.argmax(0)[None], 0)[0])

    def waiting(scheme: str, way: str) -> dict[str, float]:
        return spread(spent(scheme, way, "wall_wire").sum(0) / spent(scheme, way, "wall").sum(0))

    def over_formula(scheme: str, way: str, which: int) -> float:
        plan, item_size = cases[scheme].plan(), cases[scheme].dtype.itemsize
        formulas = [peak_bytes(plan, rank, item_size, forward=way == "forward") for rank in range(plan.cp_size)]
        return max(rank.peaks[scheme, way][which] / most for rank, most in zip(ranks, formulas, strict=True) if most)

    def milliseconds(what: str) -> Callable[[str, str], dict[str, float]]:
        return lambda scheme, way: spread(spent(scheme, way, what).max(0) * 1e3)

    def peak(scheme: str, way: str) -> int:
        return max(rank.peaks[scheme, way][0] for rank in ranks)

    def buffers_over_formula(scheme: str) -> float | None:
        plan, item_size = cases[scheme].plan(), cases[scheme].dtype.itemsize
        formulas = [buffer_bytes(plan, rank, item_size) for rank in range(plan.cp_size)]
        return max((r.buffers[scheme] / most for r, most in zip(ranks, formulas, strict=True) if most), default=None)

    return {
        "compute_over_ideal": _each(cases, over_ideal),
        "outside_kernel_share": _each(cases, outside),
        "peak_over_formula": _each(cases, lambda scheme, way: over_formula(scheme, way, 0)),
        "peak_with_kernel_over_formula": _each(cases, lambda scheme, way: over_formula(scheme, way, 1)),
        "buffers_over_formula": {scheme: buffers_over_formula(scheme) for scheme in cases},
        "wait_share": _each(cases, waiting),
        "kernel_ms": _each(cases, milliseconds("kernel")),
        "busy_ms": _each(cases, milliseconds("busy")),
        "wall_ms": _each(cases, milliseconds("wall")),
        "one_rank_kernel_ms": {way: milliseconds("kernel")("", way) for way in DIRECTIONS},
        "peak_bytes": _each(cases, peak),
        "buffer_bytes": {scheme: max(rank.buffers[scheme] for rank in ranks) for scheme in cases},
    }


def _each(cases: dict[str, Case], value: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
    return {scheme: {way: value(scheme, way) for way in DIRECTIONS} for scheme in cases}


def _text(case: Case, data: dict[str, Any]) -> str:
    columns = (
        "compute", "outside", "wait", "peak", "+ kernel", "kernel ms", "rank ms", "wall ms", "peak MiB",
        "buffers", "sent",
    )  # fmt: skip
    rows = []
    held = {
        scheme: f"{size / 2**20:.1f}" + (f" ({ratio:.2f})" if ratio else "")
        for (scheme, size), ratio in zip(
            data["buffer_bytes"].items(), data["buffers_over_formula"].values(), strict=True
        )
    }
    for scheme in data["compute_over_ideal"]:
        for way in DIRECTIONS:

            def of(name: str, scheme: str = scheme, way: str = way) -> Any:
                return data[name][scheme][way]

            rows.append([
                scheme, way, formatted(of("compute_over_ideal")), formatted(of("outside_kernel_share"), percent=True),
                formatted(of("wait_share"), percent=True), f"{of('peak_over_formula'):.2f}",
                f"{of('peak_with_kernel_over_formula'):.2f}",
                *(f"{of(name)['median']:.1f}" for name in ("kernel_ms", "busy_ms", "wall_ms")),
                f"{of('peak_bytes') / 2**20:.1f}", held[scheme], f"{max(of('bytes_sent_per_rank')) / 2**20:.1f}",
            ])  # fmt: skip
    alone = ", ".join(f"{way} {data['one_rank_kernel_ms'][way]['median']:.1f} ms" for way in DIRECTIONS)
    tokens = f"{sum(data['lengths'])} tokens in {counted(len(data['lengths']), 'document')}"
    heads = f"heads {case.heads}/{case.groups} of {case.head_dim}/{case.value_head_dim}"
    dtype = str(case.dtype).removeprefix("torch.")
    return "\n".join([
        f"attention cp={data['cp']} {case.layout} {case.mask}, {tokens}, {heads}, {dtype} on {data['device']}, "
        f"kernel {data['kernel']}, {data['repeats']} repeats; torch {data['torch']}, {data['cores']} cores",
        "",
        *table(("scheme", ""), columns, rows),
        "",
        f"The whole batch on one rank, inside the kernel: {alone}.",
        *(f"{scheme} was not run: {reason}" for scheme, reason in data["not_run"].items()),
        LEGEND,
    ])  # fmt: skip
