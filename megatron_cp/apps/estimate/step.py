"""`predict_step`: predicts the time and memory of a job's step on named machines. No torch in here.

`layer_price` prices a layer of one microbatch on one rank, `walk_pipeline` plays the stages over all microbatches,
and sums of gradients, gathers of weights and the optimizer come on top. `docs/planning.md` has the formulas.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.layer_price import (
    AT,
    LAYER_PARTS,
    Seconds,
    layer_seconds,
    product_seconds,
    ring_seconds,
)
from megatron_cp.apps.estimate.mixers import BF16, AttentionMixer, Gemm, LinearMixer
from megatron_cp.apps.estimate.model_layers import FULL, SELECTIVE
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.pipeline import walk_pipeline
from megatron_cp.apps.estimate.step_memory import GRADIENT, PARAMETER, StepMemory, memory_of, on_rank, stage_parameters
from megatron_cp.apps.estimate.together import plan_together
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout
from megatron_cp.plan import DEFAULT, KINDS, SCHEMES, Plan, Transport
from megatron_cp.planner import Machine, Slot, Topology, priced, stage_shapes, timelines

_LOSS = 18, 14  # bytes of a word's logit that the loss reads and writes: to fp32, largest, exponential; gradient, bf16
# Bytes of a parameter that the optimizer reads and writes: the gradient's norm and scale 4 + 8; Adam reads gradient,
# weight and two moments in fp32, and writes the latter three and the weight in bf16: 16 + 14.
_OPTIMIZER_TRAFFIC = 42


@dataclass(frozen=True)
class StepPrice:
    """The predicted time of a step, in milliseconds of the busiest stage's last rank, and its memory.

    Attributes:
        job: the way in which the model is trained.
        parts: milliseconds by part; their sum is the step. attention, linear: inside the layers' operations on the mean
            rank, without transfers and waits; products: of weights; experts: grouped products; dispatch: experts'
            all-to-alls and permutations; tensor: gathers and sums of tensor parallelism; exposed: time by which
            context parallelism's transfers exceed the kernels; imbalance: time by which its busiest rank's kernels
            exceed those of the mean; traffic: all else that reads and writes memory; pipeline: time in which the
            busiest stage waits; shards: gathers of weights and sums of gradients that nothing overlaps; optimizer.
        memory: bytes of a rank.
        tokens: number of tokens of all packs in the step.
        operations: floating-point operations that the model needs for them, without recomputation.
        plans: the plan of each kind of layer, with how often it occurs.
        modules: value of `--recompute-modules` for what selective recomputation computes again.
        schemes: value of `--cp-comm-type` for each of the model's blocks; the default for those without attention.
        head_chunks: value of `--cp-head-chunks`; None to leave it out.
        has_pattern: True if bars in a hybrid pattern end the stages, beside which Megatron refuses their flags.
        has_experts: True if a layer has a mixture of experts.
        documents: number of documents of a microbatch.
    """

    job: Job
    parts: Mapping[str, float]
    memory: StepMemory
    tokens: int
    operations: float
    plans: tuple[tuple[Plan, int], ...]
    modules: tuple[str, ...] = ("layernorm",)
    schemes: tuple[str, ...] = ()
    head_chunks: int | None = None
    has_pattern: bool = False
    has_experts: bool = False
    documents: int = 1

    @property
    def step(self) -> float:
        """Milliseconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The throughput of all ranks, over their number."""
        return self.tokens / self.step * 1e3 / self.job.gpus if self.step else 0.0

    def mfu(self, peak: float) -> float:
        """Returns the operations that the model needs over those possible at `peak` a second on every rank."""
        return self.operations / (self.step / 1e3) / self.job.gpus / peak if self.step else 0.0

    @property
    def flags(self) -> str:
        """Megatron's flags for this job and its plans, but for the bars of a hybrid pattern: see `launch_of`."""
        job = self.job
        found = [f"--context-parallel-size {job.cp}", f"--cp-layout {job.layout}"]
        found += self._scheme_flags()
        modes = {scheme_of(plan) for plan, _ in self.plans if plan.attend is None}
        if len(modes) > 1:  # runs of different lengths can have different modes
            found += ["--linear-cp-mode auto", *([f"--cp-hardware {job.hardware}"] * bool(job.hardware))]
        else:
            found += [f"--linear-cp-mode {mode}" for mode in modes]
        found += [f"--cp-head-chunks {self.head_chunks}"] * (self.head_chunks is not None)
        found += [f"--cp-transport {job.transport}"] * (job.transport != "collective")
        found += [f"--cp-codec {job.codec}"] * (job.codec != "none")
        found += [f"--tensor-model-parallel-size {job.tp} --sequence-parallel"] * (job.tp > 1)
        found += ["--tp-comm-overlap"] * (job.tp > 1 and job.tp_overlap)
        found += [f"--pipeline-model-parallel-size {job.pp}"] * (job.pp > 1)
        *_, (first, end) = job.layer_ranges(len(self.schemes))
        if not self.has_pattern:
            uneven = bool(len(self.schemes) % job.pp)
            found += [f"--decoder-last-pipeline-num-layers {end - first}"] * uneven
            found += [f"--num-virtual-stages-per-pipeline-rank {job.interleave}"] * (job.interleave > 1)
        found += [f"--expert-model-parallel-size {job.ep}"] * (job.ep > 1)
        found += ["--expert-tensor-parallel-size 1"] * (job.tp > 1 and self.has_experts)  # by default it is tp
        found += ["--fp8-format hybrid --fp8-recipe tensorwise"] * (job.precision == "fp8")
        found += ["--fp8-param-gather"] * (job.precision == "fp8" and job.sharding == "zero1")
        found += ["--grad-reduce-in-bf16"] * (job.gradients == "bf16")
        found += [_SHARDING_FLAGS[job.sharding]] if job.sharding in _SHARDING_FLAGS else []
        if job.recompute == FULL:
            how = f"block --recompute-num-layers {job.recompute_layers}"
            how = how if job.recompute_layers else "uniform --recompute-num-layers 1"
            found.append(f"--recompute-granularity full --recompute-method {how}")
        elif job.recompute == SELECTIVE:
            found.append(f"--recompute-granularity selective --recompute-modules {' '.join(self.modules)}")
        return " ".join(found)

    def _scheme_flags(self) -> list[str]:
        """Returns attention's flags: its schemes, the degree that all products share, and its search of tiles."""
        found = []
        attention = [plan for plan, _ in self.plans if plan.attend is not None]
        if attention:
            alike = len({plan.scheme for plan in attention}) == 1
            found.append(f"--cp-comm-type {attention[0].scheme if alike else ' '.join(self.schemes)}")
        for plan in [plan for plan in attention if SCHEMES[plan.scheme].is_product][:1]:
            degrees = f"{plan.ulysses_degree} {plan.cp_size // plan.ulysses_degree}"
            found.append(f"--hierarchical-context-parallel-sizes {degrees}")
        if any(SCHEMES[plan.scheme].assigns_tiles for plan in attention):
            found += [f"--cp-search {self.job.search_seconds:g}"] * bool(self.job.search_seconds)
        return found


_SHARDING_FLAGS = {
    "zero1": "--use-distributed-optimizer",
    "zero3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
}


def scheme_of(plan: Plan) -> str:
    """Returns the name of a plan's scheme or mode, as options spell it."""
    return plan.scheme if plan.redistribution is None else plan.prices[0].scheme if plan.prices else "redistribute"


def predict_step(model: ModelSpec, layout: Layout, job: Job, on: Machine, topology: Topology) -> StepPrice:
    """Returns the price of a step in which each microbatch is one pack.

    Args:
        model: the model, with all layers.
        layout: the tokens of the pack that each context-parallel rank holds, as the job names it.
        job: how the model is trained.
        on: the machine.
        topology: the hosts of the ranks of one context-parallel group.

    Raises:
        ArgumentError: degrees that do not divide, a layout or a topology of another number of ranks, or a scheme that
            cannot run.
    """
    return price_step(model, layout, job, on, plan_layers(model, layout, job, on, topology))


class Planned(NamedTuple):
    """The plans of a model's layers, which depend on a job's tp, cp and packs alone.

    Attributes:
        slots: the slot of each layer with a mixer.
        plans: the plan of each kind of slot, with how often it occurs.
        head_chunks: value of `--cp-head-chunks`; None to leave it out.
        seconds: `[2, parts]` of each kind.
    """

    slots: tuple[Slot, ...]
    plans: tuple[tuple[Plan, int], ...]
    head_chunks: int | None
    seconds: tuple[Seconds, ...]


def plan_layers(model: ModelSpec, layout: Layout, job: Job, on: Machine, topology: Topology) -> Planned:
    """Returns the plans and times of all layers' operations; see `predict_step`."""
    job.check(model, on)
    if layout.cp_size != job.cp:
        raise ArgumentError("layout", f"{layout.cp_size} ranks", f"the {job.cp} ranks of the job")
    slots = divided(model, job.tp).slots(
        scheme=job.scheme, ulysses_degree=job.ulysses_degree, mode=job.mode, head_chunks=job.head_chunks,
        codec=job.codec, search_seconds=job.search_seconds,
        transport=Transport.even_hosts(job.transport, job.cp, topology.num_hosts),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plans, head_chunks = plan_together(Counter(slots), layout, on, topology)
    return Planned(slots, plans, head_chunks, tuple(mixer_seconds(plan, on, topology) for plan, _ in plans))


def price_step(model: ModelSpec, layout: Layout, job: Job, on: Machine, planned: Planned) -> StepPrice:
    """Returns the price of a step whose layers are planned."""
    plans = planned.plans
    times = dict(zip(dict.fromkeys(planned.slots), planned.seconds, strict=True))
    order = iter(planned.slots)
    mixers = [times[next(order)] if block.mixer is not None else None for block in model.blocks]
    parts, held = step_parts(model, mixers, int(layout.token_counts.max(initial=0)), job, on)
    operations = 6.0 * model.active_parameters * layout.packing.total
    operations += sum(job.tp * count * _attention_operations(plan) for plan, count in plans if plan.attend is not None)
    times_a_step = job.replicas * job.microbatches
    return StepPrice(
        job, parts, memory_of(model, layout, job, plans, held), layout.packing.total * times_a_step,
        operations * times_a_step, plans, _modules(model), _schemes(model, planned.slots, plans), planned.head_chunks,
        model.has_pattern, any(block.mlp is not None and block.mlp.experts for block in model.blocks),
        int(np.count_nonzero(layout.packing.lengths)),
    )  # fmt: skip


def divided(model: ModelSpec, tp: int) -> ModelSpec:
    """Returns the model with as many heads as one tensor-parallel rank has."""
    if tp == 1:
        return model
    mixers: dict[Any, Any] = {None: None}
    for mixer in dict.fromkeys(block.mixer for block in model.blocks if block.mixer is not None):
        names = ("heads", "kv_heads" if isinstance(mixer, AttentionMixer) else "key_heads")
        mixers[mixer] = replace(mixer, **{name: getattr(mixer, name) // tp for name in names})
    return replace(model, blocks=tuple(replace(block, mixer=mixers[block.mixer]) for block in model.blocks))


def mixer_seconds(plan: Plan, on: Machine, topology: Topology) -> Seconds:
    """Returns `[2, parts]` the seconds of a layer's operation, forward and backward."""
    found = np.zeros((2, len(LAYER_PARTS)))
    price = priced(plan, on, topology)
    for way, (timeline, total) in enumerate(
        zip(timelines(plan, on, topology), (price.forward, price.backward), strict=True)
    ):
        found[way, AT["linear" if plan.attend is None else "attention"]] = timeline.busy.mean()
        found[way, AT["imbalance"]] = timeline.imbalance
        found[way, AT["exposed"]] = total / 1e3 - timeline.seconds + timeline.exposed
    return found


# -- the step ----------------------------------------------------------------------------------------------------------


def step_parts(
    model: ModelSpec, mixers: Sequence[Seconds | None], tokens: int, job: Job, on: Machine
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Returns the milliseconds of each part of a step, and the chunks in flight of each pipeline stage.

    Args:
        model: the model.
        mixers: for each block the seconds of its attention or linear layer.
        tokens: tokens of a microbatch on a rank.
        job, on: the job and the machine.
    """
    one: dict[tuple[int, int, str], Seconds] = {}
    layers = []
    ranges = job.layer_ranges(len(model.blocks))
    for number, (block, mixer) in enumerate(zip(model.blocks, mixers, strict=True)):
        own = job.of_layer(number % (ranges[0][1] - ranges[0][0]))
        key = model.kinds[number], id(mixer), own.recompute
        if key not in one:
            one[key] = layer_seconds(block, mixer, model.hidden_size, tokens, own, on)
        layers.append(one[key])
    chunks = [np.sum(layers[lo:hi], axis=0) for lo, hi in ranges]
    chunks[-1] = chunks[-1] + _head_seconds(model, tokens, job, on)
    if job.sharding != "zero3":
        for number, (lo, hi) in enumerate(ranges):
            added = sum(on_rank(model, job, lo, hi)) * GRADIENT[job.gradients]  # as many bytes read as written
            chunks[number][1, AT["traffic"]] += added / on.hardware.copy
    seconds = np.stack([chunk.sum(axis=1) for chunk in chunks], axis=1)
    across = job.pp > 1 and job.stage_ranks >= on.ranks_per_host
    nbytes, link = BF16 * model.hidden_size * tokens / job.tp, on.between if across else on.within
    walk = walk_pipeline(seconds, job.pp, job.microbatches, link.latency + nbytes / link.bandwidth)
    stages = [np.sum(chunks[stage :: job.pp], axis=0) for stage in range(job.pp)]
    busiest = max(stages, key=lambda stage: float(stage.sum()))
    parts = {name: 1e3 * job.microbatches * float(busiest[:, number].sum()) for name, number in AT.items()}
    parts["pipeline"] = max(1e3 * walk.seconds - sum(parts.values()), 0.0)
    once = busiest.sum(axis=1)
    parts["shards"], parts["optimizer"] = (1e3 * each for each in _sharded_seconds(model, job, on, once))
    return parts, walk.held


def _head_seconds(model: ModelSpec, tokens: int, job: Job, on: Machine) -> Seconds:
    """Returns `[2, parts]` the seconds of the final norm, the output head in bf16, and the loss."""
    found, head = np.zeros((2, len(LAYER_PARTS))), Gemm(1, model.hidden_size, model.vocab_size)
    found[:, AT["products"]] = product_seconds(head, model.hidden_size, tokens, replace(job, precision="bf16"), on)
    moved = BF16 * model.hidden_size * np.array([2.0, 3.0]) + model.vocab_size * np.array(_LOSS)
    found[:, AT["traffic"]] = moved * tokens / job.tp / (2 * on.hardware.copy)
    if job.tp > 1:  # the embedding's sum, and the gather before the head
        found[:, AT["tensor"]] = 2 * ring_seconds(BF16 * model.hidden_size * tokens, job.tp, 1, on)
    return found


def _sharded_seconds(model: ModelSpec, job: Job, on: Machine, once: Seconds) -> tuple[float, float]:
    """Returns the seconds of gathers and sums that nothing overlaps, and of the optimizer, on the slowest rank.

    Gradients are summed behind the backward of the last microbatch, and weights gathered in bf16 behind the
    first forward; with sharded weights both in every microbatch, and weights once more in backward. The last layer's
    share has nothing left to hide behind.

    Args:
        model, job, on: the model, the job and the machine.
        once: `[2]` seconds of a microbatch's forward and backward on the busiest stage.
    """
    worst = (0.0, 0.0)
    for stage in range(job.pp):
        gather = sums = held = 0.0
        groups = ((job.cp * job.replicas, job.tp), (job.stage_ranks // job.ep, job.ep))
        for count, (ranks, apart) in zip(stage_parameters(model, job, stage), groups, strict=True):
            if not count:
                continue
            sums += ring_seconds(count * GRADIENT[job.gradients], ranks, apart, on) * (
                2 if job.sharding == "none" else 1
            )
            gather += ring_seconds(count * PARAMETER, ranks, apart, on) if job.sharding != "none" else 0.0
            held += count / (ranks if job.sharding != "none" else 1)
        part = 1 / max(len(model.blocks) // job.pp, 1)
        is_full = job.sharding == "zero3"
        exposed = max(gather - once[0], gather * part)
        exposed += max(sums + is_full * gather - once[1], (sums + is_full * gather) * part)
        found = exposed * (job.microbatches if is_full else 1), held * _OPTIMIZER_TRAFFIC / (2 * on.hardware.copy)
        worst = max(worst, found, key=sum)
    return worst


def _schemes(model: ModelSpec, slots: tuple[Slot, ...], plans: tuple[tuple[Plan, int], ...]) -> tuple[str, ...]:
    """Returns a value of `--cp-comm-type` for each block: the default for MLPs and for linear layers."""
    of_kind = dict(zip(dict.fromkeys(slots), (plan for plan, _ in plans), strict=True))
    mixers = iter(slots)
    found = []
    for block in model.blocks:
        plan = of_kind[next(mixers)] if block.mixer is not None else None
        found.append(plan.scheme if plan is not None and plan.attend is not None else DEFAULT.name)
    return tuple(found)


def _modules(model: ModelSpec) -> tuple[str, ...]:
    """Returns the value of `--recompute-modules` for what is priced as computed again."""
    mixers = [block.mixer for block in model.blocks]
    experts = any(block.mlp is not None and block.mlp.experts for block in model.blocks)
    gated = any(isinstance(mixer, LinearMixer) and KINDS[mixer.kind].is_dense for mixer in mixers)
    return ("layernorm", *(["moe_act"] if experts else []), *(["gdn_norm_out"] if gated else []))


def _attention_operations(plan: Plan) -> float:
    """Returns the floating-point operations of an attention's visible pairs: two products forward, four backward."""
    step = plan.attend
    assert step is not None
    pairs = float(stage_shapes(step, 1).pairs.sum())
    heads = sum(hi - lo for lo, hi in step.partition.heads)
    return pairs * heads * 6 * (step.head_dim + step.value_head_dim)
