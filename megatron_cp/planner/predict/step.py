"""`predict_step`: what a whole model's training step takes on named machines, for one way of splitting it.

No torch in here. One pack of one context-parallel group is predicted: every layer's operation by the simulator, its
weights' products and other activations by rates. Data parallelism repeats that, and its sums of gradients are not
counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Layout
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.batch import AttentionSlot, LinearSlot, Slot
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.kernels import stage_shapes
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from megatron_cp.planner.predict.models import ModelSpec
from megatron_cp.planner.predict.price import priced, timelines

SHARDINGS = ("none", "zero1", "zero3")
_PARAMETER, _GRADIENT, _OPTIMIZER = 2, 4, 12  # bytes: bf16, fp32 sums, fp32 weights and two moments of Adam
_BACKWARD = 2  # products of a layer's weights in backward, over those forward


@dataclass(frozen=True)
class StepChoice:
    """One way of splitting a model.

    Attributes:
        cp: context-parallel size.
        layout: "zigzag", "contiguous" or "balanced".
        scheme, ulysses_degree: of attention; "auto" weighs all.
        mode: of linear layers; "auto" weighs all.
        recompute: of `ModelSpec.activation_bytes`.
    """

    cp: int
    layout: str
    scheme: str = "auto"
    ulysses_degree: int | None = None
    mode: str = "auto"
    recompute: str = "selective"


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the rank that holds most.

    Attributes:
        parameters: weights in bf16.
        optimizer: gradients in fp32, and the optimizer's states.
        activations: what the forward of all layers saves, and the worst moment of one.
        buffers: of messages.
    """

    parameters: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Of all."""
        return self.parameters + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class StepPrice:
    """What a step takes, in milliseconds of the rank that is done last, and bytes.

    Attributes:
        choice: of what.
        attention, linear: inside the layers' operations, transfers and waits left out.
        products: of weights, forward, backward and made again.
        exposed: in which layers wait for transfers.
        others: norms, activations and whatever else reads and writes memory.
        memory: of a rank.
        tokens: of the pack.
        operations: floating-point operations of the pack that the model needs, no recomputation counted.
        plans: of each kind of layer, with how often it occurs.
    """

    choice: StepChoice
    attention: float
    linear: float
    products: float
    exposed: float
    others: float
    memory: StepMemory
    tokens: int
    operations: float
    plans: tuple[tuple[Plan, int], ...]

    @property
    def step(self) -> float:
        """Milliseconds of a forward and a backward."""
        return self.attention + self.linear + self.products + self.exposed + self.others

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one context-parallel group."""
        return self.tokens / self.step * 1e3 / self.choice.cp

    def mfu(self, peak: float) -> float:
        """Operations that the model needs, over those that `peak` operations a second of every rank could do."""
        return self.operations / (self.step / 1e3) / self.choice.cp / peak

    @property
    def flags(self) -> str:
        """Megatron's, for this way."""
        found = [f"--context-parallel-size {self.choice.cp}", f"--cp-layout {self.choice.layout}"]
        attention = [plan for plan, _ in self.plans if plan.attend is not None]
        linear = [plan for plan, _ in self.plans if plan.attend is None]
        for plan in attention[:1]:
            found.append(f"--cp-comm-type {plan.scheme}")
            if 1 < plan.ulysses_degree < plan.cp_size:
                degrees = f"{plan.ulysses_degree} {plan.cp_size // plan.ulysses_degree}"
                found.append(f"--hierarchical-context-parallel-sizes {degrees}")
        found += [f"--linear-cp-mode {way_of(plan)}" for plan in linear[:1]]
        chunks = {plan.head_chunks for plan in attention if plan.head_chunks > 1}
        found += [f"--cp-head-chunks {max(chunks)}"] if chunks else []
        if self.choice.recompute == "full":
            found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        elif self.choice.recompute == "selective":
            found.append("--recompute-granularity selective --recompute-modules core_attn layernorm")
        return " ".join(found)


def way_of(plan: Plan) -> str:
    """A plan's scheme or mode, by the name that asks for it."""
    return plan.scheme if plan.redistribution is None else plan.prices[0].scheme if plan.prices else "redistribute"


def predict_step(
    model: ModelSpec, layout: Layout, choice: StepChoice, on: Machine, topology: Topology, *, sharding: str = "zero1",
    replicas: int = 1,
) -> StepPrice:  # fmt: skip
    """The price of one pack.

    Args:
        model: all layers.
        layout: who holds which tokens of the pack, as the choice names it.
        choice: how it is split.
        on: the machine.
        topology: where the group's ranks are.
        sharding: of parameters, gradients and optimizer over all ranks: "none"; "zero1" (optimizer, Megatron's
            distributed optimizer); "zero3" (all of them, FSDP).
        replicas: data-parallel groups that share that sharding.

    Raises:
        ArgumentError: another sharding, a layout of another number of ranks, or a scheme that cannot run.
    """
    if sharding not in SHARDINGS:
        raise ArgumentError("sharding", sharding, " or ".join(SHARDINGS))
    if layout.cp_size != choice.cp:
        raise ArgumentError("layout", f"{layout.cp_size} ranks", f"the {choice.cp} ranks of the choice")
    ranks = choice.cp * checked_integer("replicas", replicas, 1)
    slots = Counter(model.slots(scheme=choice.scheme, ulysses_degree=choice.ulysses_degree, mode=choice.mode))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plans = [(_planned(slot, layout, on), count) for slot, count in slots.items()]
    attention = linear = exposed = operations = 0.0
    for plan, count in plans:
        price = priced(plan, on, topology)
        busy = sum(each.seconds - each.exposed for each in timelines(plan, on, topology)) * 1e3
        again = _forward_again(plan, on, topology) if choice.recompute == "full" else 0.0
        waits = price.total - busy
        exposed += waits * count
        if plan.attend is None:
            linear += (busy + again) * count
        else:
            attention += (busy + again) * count
            operations += count * _attention_operations(plan)
    tokens = int(layout.token_counts.max(initial=0))
    products = 1e3 * _products(model, tokens, choice, on)
    return StepPrice(
        choice, attention, linear, products, exposed, 1e3 * _others(model, tokens, choice, on),
        _memory(model, layout, choice, plans, sharding, ranks), layout.packing.total,
        operations + 6.0 * model.active_parameters * layout.packing.total, tuple(plans),
    )  # fmt: skip


def _planned(slot: Slot, layout: Layout, on: Machine) -> Plan:
    if isinstance(slot, AttentionSlot):
        return replace(slot, hardware=on).plan(layout)
    run = tuple(replace(each, hardware=on) for each in slot.run)
    made: Plan = replace(slot, hardware=on, run=run).plan(layout)
    assert isinstance(slot, LinearSlot)
    return made


def _forward_again(plan: Plan, on: Machine, topology: Topology) -> float:
    """Milliseconds of the forward that recomputing a whole layer does once more, transfers included."""
    return timelines(plan, on, topology)[0].seconds * 1e3


def _attention_operations(plan: Plan) -> float:
    """Floating-point operations of an attention's visible pairs: two products forward, four backward."""
    step = plan.attend
    assert step is not None
    pairs = float(stage_shapes(step).pairs.sum())
    heads = sum(hi - lo for lo, hi in step.partition.heads)
    return pairs * heads * 6 * (step.head_dim + step.value_head_dim)


def _products(model: ModelSpec, tokens: int, choice: StepChoice, on: Machine) -> float:
    """Seconds of the weights' products of a rank's tokens."""
    times = 1 + _BACKWARD + (1 if choice.recompute == "full" else 0)
    rate = on.hardware.matrix / (1 + on.hardware.matrix_rows / max(tokens, 1))
    return 2.0 * sum(gemm.multiply_adds for gemm in model.gemms) * tokens * times / rate


def _others(model: ModelSpec, tokens: int, choice: StepChoice, on: Machine) -> float:
    """Seconds of what reads and writes memory: activations once forward, twice in backward."""
    times = 3 + (1 if choice.recompute == "full" else 0)
    return model.activation_bytes("none") * tokens * times / on.hardware.copy


def _memory(
    model: ModelSpec, layout: Layout, choice: StepChoice, plans: list[tuple[Plan, int]], sharding: str, ranks: int
) -> StepMemory:
    over = {"none": (1, 1, 1), "zero1": (1, 1, ranks), "zero3": (ranks, ranks, ranks)}[sharding]
    parameters, gradients, optimizer = (
        model.parameters * size / share for size, share in zip((_PARAMETER, _GRADIENT, _OPTIMIZER), over, strict=True)
    )
    rank = int(layout.token_counts.argmax())
    tokens = int(layout.token_counts[rank])
    saved = tokens * (model.activation_bytes(choice.recompute) + model.recomputed_bytes(choice.recompute))
    worst = 0
    for plan, count in plans:
        most = peak_bytes(plan, rank, 2, forward=True) if plan.attend else _linear_saved(plan, rank)
        saved += most * (1 if choice.recompute == "full" else count)
        worst = max(worst, peak_bytes(plan, rank, 2, forward=False) if plan.attend else most)
    buffers = max((buffer_bytes(plan, rank, 2) for plan, _ in plans), default=0)
    return StepMemory(parameters, gradients + optimizer, float(saved + worst), float(buffers))


def _linear_saved(plan: Plan, rank: int) -> int:
    """Bytes that a linear layer's operation saves: what is convolved, before and after, and the output."""
    tokens = int(plan.layout.token_counts[rank])
    widths = sum(block.num_heads * block.head_dim for block in plan.sections.blocks)
    return 2 * tokens * (2 * widths + plan.out.num_heads * plan.out.head_dim)
