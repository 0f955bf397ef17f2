"""`best_jobs`: prices jobs for a number of GPUs in the order of lower bounds. No torch in here."""

from __future__ import annotations

import bisect
import heapq
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.layer_price import AT, Seconds
from megatron_cp.apps.estimate.model_layers import FULL, NONE, SELECTIVE
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import (
    Planned,
    StepPrice,
    divided,
    mixer_seconds,
    plan_layers,
    price_step,
    step_parts,
)
from megatron_cp.apps.estimate.step_memory import least_bytes, least_memory
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import MAX_CP_SIZE, Layout, Packing
from megatron_cp.planner import CHOICES, Machine, layout_by_name

_INTERLEAVED, _JOINED = (1, 2, 4), (1, 2, 4)  # chunks of layers a stage, and packs in a microbatch, that are tried


@dataclass(frozen=True)
class Found:
    """The jobs that a search found.

    Attributes:
        rows: the fastest jobs that fit, in order; where none fits, the one that takes least memory.
        tried, counted: number of jobs that were priced, and of all that the degrees allow.
        too_large: number of those that exceed the memory by weights, optimizer and saved activations alone.
        bound: milliseconds that no job which was left out goes below, if only kernels of context parallelism count.
    """

    rows: list[StepPrice]
    tried: int
    counted: int
    too_large: int
    bound: float


def best_jobs(
    model: ModelSpec, packing: Packing, on: Machine, limit: float, base: Job, *, gpus: int, batch: int,
    given: Mapping[str, int], recompute: str | None, layout: str | None, count: int = 5, most: int = 400,
    tell: Callable[[str, int, int], object] = "{} {} {}".format,
) -> Found:  # fmt: skip
    """Returns the fastest jobs: prices them in the order of their lower bounds, until the next bound exceeds the worst.

    The bound is the price with the transfers and the imbalance of context parallelism left out and attention's kernels
    those of one rank, over the ranks.

    Args:
        model, packing, on: the model, one pack, and the machine.
        limit: bytes of a rank.
        base: the choices that are the same for all.
        gpus, batch: the number of GPUs, and of packs in a step.
        given: degrees that are not searched, by the names of `Job`.
        recompute, layout: choices that are not searched; None to search them.
        count: number of jobs to return.
        most: the most jobs to price.
        tell: called after each job with what is done to jobs ("bounded" or "priced"), the number of them for which it
            is done, and of all, as far as that is known.

    Raises:
        ArgumentError: no job has such degrees.
    """
    kinds = (recompute,) if recompute else (NONE, SELECTIVE, FULL)
    for name in ("tp", "pp", "cp"):
        if gpus % given.get(name, 1):
            raise ArgumentError(name, given[name], f"a divisor of {gpus} GPUs")
    jobs = list(_jobs(model, on, base, gpus, batch, given, kinds))
    if not jobs:
        asked = ", ".join(f"{name} {value}" for name, value in given.items())
        remedy = f"{batch} packs a step are dealt to the replicas evenly; --global-batch sets them."
        allowed = f"a number that degrees of {model.name} divide" + f" with {asked}" * bool(asked)
        raise ArgumentError("gpus", gpus, allowed, remedy)
    held_whole = [job for job in jobs if least_bytes(model, job) <= limit]
    alone: dict[tuple[int, int], tuple[list[Seconds | None], int]] = {}

    def bound(job: Job) -> tuple[float, float]:
        """Returns the least milliseconds and bytes."""
        key = job.tp, job.packs
        if key not in alone:
            alone[key] = _alone(model, _joined(packing, job.packs), replace(job, cp=1), on)
        mixers, tokens = alone[key]
        shared = {id(mixer): mixer / job.cp for mixer in mixers if mixer is not None}
        most = -(-tokens // job.cp)
        parts, held = step_parts(model, [shared.get(id(mixer)) for mixer in mixers], most, job, on)
        return sum(parts.values()), least_memory(model, job, most, held)

    fitting, ordered, larger = list[Job](), list[tuple[float, int]](), list[tuple[float, int]]()
    for number, job in enumerate(held_whole):
        low, least = bound(job)
        if least <= limit:
            ordered.append((low, len(fitting)))
            fitting.append(job)
        else:
            larger.append((least, number))
        tell("bounded", number + 1, len(held_whole))
    ordered.sort()
    prices, found = _Priced(model, packing, on, layout), list[StepPrice]()
    tried, left = 0, float("inf")
    for low, number in ordered:
        best = _distinct(found, limit)
        if tried >= most or (len(best) >= count and low > best[count - 1].step):
            left = low
            break
        tried += 1
        found += [row] if (row := prices.row(fitting[number])) else []
        last = best[count - 1].step if len(best) >= count else float("inf")
        tell("priced", tried, min(most, bisect.bisect_right(ordered, (last, len(fitting)))))
    rows = _distinct(found, limit)[:count]
    if not rows:
        sparing = [job for job in jobs if job.recompute == kinds[-1]]
        smallest = [held_whole[number] for _, number in heapq.nsmallest(8, larger)]
        smallest = smallest or heapq.nsmallest(8, sparing, key=lambda job: least_bytes(model, job))
        nearest = [*found, *(row for job in smallest if (row := prices.row(job)))]
        rows = sorted(nearest, key=lambda row: row.memory.total)[:1]
    return Found(rows, tried, len(jobs), len(jobs) - len(fitting), left)


def _distinct(rows: list[StepPrice], limit: float) -> list[StepPrice]:
    """Returns the fastest that fits of each tp, pp, ep and cp, from the fastest on."""
    best: dict[tuple[int, ...], StepPrice] = {}
    for row in sorted(rows, key=lambda row: row.step):
        if row.memory.total <= limit:
            best.setdefault((row.job.tp, row.job.pp, row.job.ep, row.job.cp), row)
    return list(best.values())


def _jobs(
    model: ModelSpec, on: Machine, base: Job, gpus: int, batch: int, given: Mapping[str, int], kinds: tuple[str, ...]
) -> Iterator[Job]:
    """Yields the jobs whose degrees divide; more ways of expert parallelism than one only with experts."""

    def options(name: str, values: list[int]) -> list[int]:
        return [given[name]] if name in given else values

    experts = max((block.mlp.experts for block in model.blocks if block.mlp is not None), default=0)
    for tp, pp, cp in itertools.product(
        options("tp", _divisors(min(gpus, on.ranks_per_host, 8))), options("pp", _divisors(gpus)),
        options("cp", [each for each in _divisors(gpus) if each <= MAX_CP_SIZE]),
    ):  # fmt: skip
        replicas, rest = divmod(gpus, tp * pp * cp)
        if rest or not replicas or batch % replicas:
            continue
        own = batch // replicas
        ranks = tp * cp * replicas
        for ep, interleave, packs in itertools.product(
            options("ep", [each for each in _divisors(ranks) if not experts % each] if experts else [1]),
            options("interleave", list(_INTERLEAVED) if pp > 1 else [1]), options("packs", list(_JOINED)),
        ):  # fmt: skip
            if own % packs:
                continue
            job = replace(
                base, cp=cp, tp=tp, pp=pp, ep=ep, replicas=replicas, interleave=interleave, packs=packs,
                microbatches=own // packs, layout=CHOICES[0] if cp == 1 else base.layout,
            )  # fmt: skip
            try:
                job.check(model, on)
            except ArgumentError as error:
                if error.argument in ("recompute", "precision"):  # which no degree changes
                    raise
                continue
            yield from (replace(job, recompute=kind) for kind in kinds)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _joined(packing: Packing, packs: int) -> Packing:
    return Packing(packing.lengths.tolist() * packs) if packs > 1 else packing


def _alone(model: ModelSpec, packing: Packing, job: Job, on: Machine) -> tuple[list[Seconds | None], int]:
    """Returns for each block the kernels' seconds of its operation on one rank, and the tokens."""
    layout = Layout.contiguous(packing, 1)
    slots = divided(model, job.tp).slots(mode="headwise")
    times: dict[object, Seconds] = {}
    for slot in dict.fromkeys(slots):
        times[slot] = mixer_seconds(slot.plan(layout), on, on.topology(1))
        times[slot][:, [AT["exposed"], AT["imbalance"]]] = 0.0
    order = iter(slots)
    return [times[next(order)] if block.mixer is not None else None for block in model.blocks], packing.total


class _Priced:
    """Prices jobs, and plans layers once for all jobs of the same tp, cp and packs.

    Args:
        model, packing, on: the model, one pack, and the machine.
        layout: the only layout; None to take the best of all.
    """

    def __init__(self, model: ModelSpec, packing: Packing, on: Machine, layout: str | None) -> None:
        self._model, self._packing, self._on, self._layout = model, packing, on, layout
        self._planned: dict[tuple[int, int, int], list[tuple[Layout, str, Planned]]] = {}

    def row(self, job: Job) -> StepPrice | None:
        """Returns the price in the layout in which the job is fastest; None where no scheme can run."""
        key = job.tp, job.cp, job.packs
        if key not in self._planned:
            self._planned[key] = list(self._plans(job))
        rows = [
            price_step(self._model, held, replace(job, layout=name), self._on, planned)
            for held, name, planned in self._planned[key]
        ]
        return min(rows, key=lambda row: row.step, default=None)

    def _plans(self, job: Job) -> Iterator[tuple[Layout, str, Planned]]:
        names = (self._layout,) if self._layout else CHOICES if job.cp > 1 else CHOICES[:1]
        for name in names:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    held = layout_by_name(name, _joined(self._packing, job.packs), job.cp, align=job.tp)
                    placed = replace(job, layout=name)
                    yield held, name, plan_layers(self._model, held, placed, self._on, job.topology(self._on))
            except ArgumentError as error:
                if error.argument not in ("scheme", "ulysses_degree", "head_chunks", "mode"):
                    raise
