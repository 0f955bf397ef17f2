"""`plan_model`: plans all layers of a model in a job, with their predicted time and the memory. No torch in here.

One set of Megatron's flags asks for all plans. Megatron has a value of `--cp-comm-type` for each layer, but one value
for all layers of `--hierarchical-context-parallel-sizes` and of `--cp-head-chunks`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.job_memory import RankMemory, memory_of
from megatron_cp.apps.estimate.mixers import AttentionMixer
from megatron_cp.apps.estimate.model_layers import FULL
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout
from megatron_cp.plan import DEFAULT, SCHEMES, Plan, Transport
from megatron_cp.planner import AttentionSpec, LinearSpec, Machine, Slot, Topology, priced, timelines


class _FlaggedPlans(NamedTuple):
    """Plans for which one set of flags asks.

    Attributes:
        plans: the plan of each kind of layer, in the order of their slots, and how often it occurs.
        head_chunks: the value of `--cp-head-chunks`; None to leave it out.
    """

    plans: tuple[tuple[Plan, int], ...]
    head_chunks: int | None


def _plan_together(slots: Counter[Slot], layout: Layout, on: Machine, topology: Topology) -> _FlaggedPlans:
    """Returns the cheapest plan of each kind of layer, or the cheapest with a common degree and number of chunks.

    The second holds if no single set of flags asks for all of the first.

    Args:
        slots: the kinds of layers, with how often each occurs.
        layout: the layout of every layer.
        on: the machine.
        topology: the hosts of the ranks.

    Raises:
        ArgumentError: a layer that cannot be planned.
    """
    asked = next((slot.head_chunks for slot in slots if isinstance(slot, AttentionSpec)), None)
    slots = Counter({_placed(slot, on, topology): count for slot, count in slots.items()})
    best = {slot: slot.plan(layout) for slot in slots}
    attention = [plan for plan in best.values() if plan.attend is not None]
    degrees = sorted({plan.ulysses_degree for plan in attention if SCHEMES[plan.scheme].is_product})
    chunks = sorted({plan.num_chunks for plan in attention if SCHEMES[plan.scheme].takes_chunks})
    found, refused = list[tuple[float, _FlaggedPlans]](), None
    parts_of_all: Sequence[int | None] = [None, *chunks] if asked is None else [asked]
    degree_of_all: Sequence[int | None] = degrees or [None]
    for degree, parts in itertools.product(degree_of_all, parts_of_all):
        try:
            plans = {slot: _like(slot, plan, layout, degree, parts) for slot, plan in best.items()}
        except ArgumentError as error:  # a kind has too few heads for so many chunks
            refused = error
            continue
        if all(_is_alike(plans[slot], best[slot]) for slot in slots):
            return _FlaggedPlans(_counted(best, slots), parts)
        total = sum(count * priced(plans[slot], on, topology).total for slot, count in slots.items())
        found.append((total, _FlaggedPlans(_counted(plans, slots), parts)))
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda pair: pair[0])[1]


def _counted(plans: dict[Slot, Plan], slots: Counter[Slot]) -> tuple[tuple[Plan, int], ...]:
    return tuple((plan, slots[slot]) for slot, plan in plans.items())


def _placed(slot: Slot, on: Machine, topology: Topology) -> Slot:
    """Returns the slot, and the other layers of its run, on that machine."""
    if isinstance(slot, AttentionSpec):
        return replace(slot, hardware=on, topology=topology)
    run = tuple(replace(each, hardware=on, topology=topology) for each in slot.run)
    return replace(slot, hardware=on, topology=topology, run=run)


def _like(slot: Slot, best: Plan, layout: Layout, degree: int | None, parts: int | None) -> Plan:
    """Returns the plan that flags with this degree and number of chunks give a layer, in its best plan's scheme."""
    if isinstance(slot, LinearSpec):
        if parts == slot.head_chunks:
            return best
        return replace(slot, head_chunks=parts, run=tuple(replace(each, head_chunks=parts) for each in slot.run)).plan(
            layout
        )
    scheme = SCHEMES[best.scheme]
    search: dict[str, Any] = {} if scheme.assigns_tiles else {"search_seconds": 0.0}
    given = replace(
        slot, scheme=scheme.name, ulysses_degree=degree if scheme.is_product else None,
        head_chunks=parts if scheme.takes_chunks else None, **search,
    )  # fmt: skip
    return replace(given.plan(layout), prices=best.prices)


def _is_alike(plan: Plan, other: Plan) -> bool:
    candidates = [(x.scheme, x.layout, x.ulysses_degree, x.num_chunks) for x in (plan, other)]
    return candidates[0] == candidates[1]


@dataclass(frozen=True)
class ModelPlan:
    """The plans of a model's layers in a job.

    Attributes:
        job: the job.
        parts: milliseconds of all attention and linear layers for one pack, forward and backward, by part. attention,
            linear: kernels of the mean rank; exposed: time by which transfers exceed the kernels; imbalance: time by
            which the busiest rank's kernels exceed those of the mean.
        memory: bytes of a rank.
        plans: the plan of each kind of layer, with how often it occurs.
        layout: the tokens of the pack that each context-parallel rank holds.
        schemes: value of `--cp-comm-type` for each of the model's blocks; the default for those without attention.
        head_chunks: value of `--cp-head-chunks`; None to leave it out.
    """

    job: Job
    parts: Mapping[str, float]
    memory: RankMemory
    plans: tuple[tuple[Plan, int], ...]
    layout: Layout
    schemes: tuple[str, ...] = ()
    head_chunks: int | None = None

    @property
    def milliseconds(self) -> float:
        """The time of all attention and linear layers for one pack."""
        return sum(self.parts.values())

    @property
    def flags(self) -> str:
        """Megatron's flags that ask for these plans, and for the recomputation and chunks of logits of the job."""
        job = self.job
        found = [f"--context-parallel-size {job.cp}", f"--cp-layout {job.layout}"]
        attention = [plan for plan, _ in self.plans if plan.attend is not None]
        if attention:
            alike = len({plan.scheme for plan in attention}) == 1
            found.append(f"--cp-comm-type {attention[0].scheme if alike else ' '.join(self.schemes)}")
        for plan in [plan for plan in attention if SCHEMES[plan.scheme].is_product][:1]:
            degrees = f"{plan.ulysses_degree} {plan.cp_size // plan.ulysses_degree}"
            found.append(f"--hierarchical-context-parallel-sizes {degrees}")
        if any(SCHEMES[plan.scheme].assigns_tiles for plan in attention):
            found += [f"--cp-search {job.search_seconds:g}"] * bool(job.search_seconds)
        modes = {plan.strategy for plan, _ in self.plans if plan.attend is None}
        if len(modes) > 1:  # runs of different lengths can have different modes
            found += ["--linear-cp-mode auto", *([f"--cp-hardware {job.hardware}"] * bool(job.hardware))]
        else:
            found += [f"--linear-cp-mode {mode}" for mode in modes]
        found += [f"--cp-head-chunks {self.head_chunks}"] * (self.head_chunks is not None)
        found += [f"--cp-transport {job.transport}"] * (job.transport != "collective")
        found += [f"--cp-codec {job.codec}"] * (job.codec != "none")
        found += [f"--logit-rows {job.logit_rows}"] * (job.logit_rows is not None)
        found += ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"] * (
            job.recompute == FULL
        )
        return " ".join(found)


def plan_model(model: ModelSpec, layout: Layout, job: Job, on: Machine, topology: Topology) -> ModelPlan:
    """Returns the plans of all layers for a pack.

    Args:
        model: the model, with all layers.
        layout: the tokens of the pack that each context-parallel rank holds, as the job names it.
        job: the sizes of the job, and the choices that are given.
        on: the machine.
        topology: the hosts of the ranks of one context-parallel group.

    Raises:
        ArgumentError: degrees that do not divide, a layout or a topology of another number of ranks, or a scheme that
            cannot run.
    """
    job.check(model, on)
    if layout.cp_size != job.cp:
        raise ArgumentError("layout", f"{layout.cp_size} ranks", f"the {job.cp} ranks of the job")
    slots = _divided(model, job.tp).slots(
        scheme=job.scheme, ulysses_degree=job.ulysses_degree, mode=job.mode, head_chunks=job.head_chunks,
        codec=job.codec, search_seconds=job.search_seconds,
        transport=Transport.even_hosts(job.transport, job.cp, topology.num_hosts),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plans, head_chunks = _plan_together(Counter(slots), layout, on, topology)
    parts = dict.fromkeys(("attention", "linear", "exposed", "imbalance"), 0.0)
    for plan, count in plans:
        for name, milliseconds in _parts(plan, job, on, topology).items():
            parts[name] += count * milliseconds
    memory = memory_of(model, layout, job, plans)
    return ModelPlan(job, parts, memory, plans, layout, _schemes(model, slots, plans), head_chunks)


def _parts(plan: Plan, job: Job, on: Machine, topology: Topology) -> dict[str, float]:
    """Returns the milliseconds of a layer by part, its forward twice where backward computes it again."""
    kernels = "linear" if plan.attend is None else "attention"
    found, price = dict.fromkeys((kernels, "exposed", "imbalance"), 0.0), priced(plan, on, topology)
    repeats = (2 if job.recompute == FULL else 1, 1)
    totals = (price.forward, price.backward)
    for times, timeline, total in zip(repeats, timelines(plan, on, topology), totals, strict=True):
        found[kernels] += times * 1e3 * float(timeline.busy.mean())
        found["imbalance"] += times * 1e3 * timeline.imbalance
        found["exposed"] += times * (total - 1e3 * (timeline.seconds - timeline.exposed))
    return found


def _divided(model: ModelSpec, tp: int) -> ModelSpec:
    """Returns the model with as many heads as one tensor-parallel rank has."""
    if tp == 1:
        return model
    mixers: dict[Any, Any] = {None: None}
    for mixer in dict.fromkeys(block.mixer for block in model.blocks if block.mixer is not None):
        names = ("heads", "kv_heads" if isinstance(mixer, AttentionMixer) else "key_heads")
        mixers[mixer] = replace(mixer, **{name: getattr(mixer, name) // tp for name in names})
    return replace(model, blocks=tuple(replace(block, mixer=mixers[block.mixer]) for block in model.blocks))


def _schemes(model: ModelSpec, slots: tuple[Slot, ...], plans: tuple[tuple[Plan, int], ...]) -> tuple[str, ...]:
    """Returns a value of `--cp-comm-type` for each block: the default for MLPs and for linear layers."""
    of_kind = dict(zip(dict.fromkeys(slots), (plan for plan, _ in plans), strict=True))
    mixers = iter(slots)
    found = []
    for block in model.blocks:
        plan = of_kind[next(mixers)] if block.mixer is not None else None
        found.append(plan.scheme if plan is not None and plan.attend is not None else DEFAULT.name)
    return tuple(found)
