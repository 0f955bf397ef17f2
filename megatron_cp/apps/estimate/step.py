"""`predict_step`: predicts the time and memory of a whole model's training step on named machines. No torch in here.

The step is that of one pack in one context-parallel group. The simulator predicts the operation of every layer; rates
predict the products of weights and other activations; and the bytes that enter a host predict the transfers of sharded
weights and gradients.
"""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cp.apps.estimate.model_layers import FULL, LinearMixer
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.together import plan_together
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Layout
from megatron_cp.plan import DEFAULT, KINDS, SCHEMES, Plan, Transport
from megatron_cp.planner import Machine, Slot, Topology, buffer_bytes, peak_bytes, priced, stage_shapes, timelines

SHARDINGS = ("none", "zero1", "zero3")
_PARAMETER, _GRADIENT, _OPTIMIZER = 2, 4, 12  # bytes: bf16, fp32 sums, fp32 weights and two moments of Adam
_BACKWARD = 2  # products of a layer's weights in backward, over those forward
_LOGITS = 6  # bytes of a word's logit and gradient while the loss is computed, beside the probability that is saved
RUNTIME_BYTES = 3e9  # bytes that CUDA, NCCL and libraries keep for themselves: an estimate, measured nowhere
_EXPERT_TILE = 128  # rows that a grouped product of experts takes at once


@dataclass(frozen=True)
class StepChoice:
    """A choice of how a model is split over ranks.

    Attributes:
        cp: context-parallel size.
        layout: "zigzag", "contiguous" or "balanced".
        scheme, ulysses_degree: attention's; "auto" compares all.
        mode: the mode of linear layers; "auto" compares all.
        recompute: as `ModelSpec.activation_bytes` takes it.
        head_chunks, transport, codec: for attention and linear layers; see `plan_attention`.
        sharding: how parameters, gradients and optimizer are sharded over all ranks: "none"; "zero1" (optimizer:
            Megatron's distributed optimizer); "zero3" (all of them: FSDP).
        replicas: number of data-parallel groups that share that sharding.
        hardware: value of `--cp-hardware` if flags leave a mode to "auto"; None for its default.
        search_seconds, search_cache: for tiles of attention; see `plan_attention`.
    """

    cp: int
    layout: str
    scheme: str = "auto"
    ulysses_degree: int | None = None
    mode: str = "auto"
    recompute: str = "selective"
    head_chunks: int | None = None
    transport: str = "collective"
    codec: str = "none"
    sharding: str = "zero1"
    replicas: int = 1
    hardware: str | None = None
    search_seconds: float = 0.0
    search_cache: str | None = None


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the rank that holds most.

    Attributes:
        parameters: weights in bf16.
        optimizer: gradients in fp32, and the optimizer's states.
        activations: bytes that the forward of all layers saves, and the largest working set of one layer or the loss.
        buffers: message buffers, and the memory that CUDA and its libraries keep.
    """

    parameters: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """The sum of all four."""
        return self.parameters + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class StepPrice:
    """The predicted time of a step, in milliseconds of the rank that ends last, and its memory.

    Attributes:
        choice: how the model is split.
        attention, linear: time inside the layers' operations, without transfers and waits.
        products: time of the weights' products: forward, backward and recomputed.
        exposed: time by which layers' transfers exceed the work of their busiest rank.
        imbalance: time by which the busiest rank's kernels of layers exceed those of the mean rank.
        others: time of norms, activations and all else that reads and writes memory.
        shards: time by which sums of gradients and gathers of weights exceed all of that, behind which they hide.
        memory: bytes of a rank.
        tokens: number of tokens in the pack.
        operations: floating-point operations of the pack that the model needs, without recomputation.
        plans: the plan of each kind of layer, with how often it occurs.
        modules: value of `--recompute-modules` for what selective recomputation computes again.
        schemes: value of `--cp-comm-type` for each of the model's blocks; the default for those without attention.
        head_chunks: value of `--cp-head-chunks`; None to leave it out.
    """

    choice: StepChoice
    attention: float
    linear: float
    products: float
    exposed: float
    imbalance: float
    others: float
    shards: float
    memory: StepMemory
    tokens: int
    operations: float
    plans: tuple[tuple[Plan, int], ...]
    modules: tuple[str, ...] = ("layernorm",)
    schemes: tuple[str, ...] = ()
    head_chunks: int | None = None

    @property
    def step(self) -> float:
        """Milliseconds of a forward and a backward."""
        return self.attention + self.linear + self.products + self.exposed + self.imbalance + self.others + self.shards

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The throughput of one context-parallel group, over its ranks."""
        return self.tokens / self.step * 1e3 / self.choice.cp if self.step else 0.0

    def mfu(self, peak: float) -> float:
        """Returns the operations that the model needs over those possible at `peak` a second on every rank."""
        return self.operations / (self.step / 1e3) / self.choice.cp / peak if self.step else 0.0

    @property
    def flags(self) -> str:
        """Megatron's flags for this choice and its plans."""
        found = [f"--context-parallel-size {self.choice.cp}", f"--cp-layout {self.choice.layout}"]
        found += self._scheme_flags()
        modes = {scheme_of(plan) for plan, _ in self.plans if plan.attend is None}
        if len(modes) > 1:  # runs of different lengths can have different modes
            found += [
                "--linear-cp-mode auto",
                *([f"--cp-hardware {self.choice.hardware}"] * bool(self.choice.hardware)),
            ]
        else:
            found += [f"--linear-cp-mode {mode}" for mode in modes]
        if self.head_chunks is not None:
            found.append(f"--cp-head-chunks {self.head_chunks}")
        if self.choice.transport != "collective":
            found.append(f"--cp-transport {self.choice.transport}")
        if self.choice.codec != "none":
            found.append(f"--cp-codec {self.choice.codec}")
        found += [_SHARDING_FLAGS[self.choice.sharding]] if self.choice.sharding in _SHARDING_FLAGS else []
        if self.choice.recompute == FULL:
            found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        elif self.choice.recompute == "selective":
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
            found += [f"--cp-search {self.choice.search_seconds:g}"] * bool(self.choice.search_seconds)
            found += [f"--cp-search-cache {shlex.quote(str(self.choice.search_cache))}"] * bool(
                self.choice.search_cache
            )
        return found


_SHARDING_FLAGS = {
    "zero1": "--use-distributed-optimizer",
    "zero3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
}


def scheme_of(plan: Plan) -> str:
    """Returns the name of a plan's scheme or mode, as options spell it."""
    return plan.scheme if plan.redistribution is None else plan.prices[0].scheme if plan.prices else "redistribute"


def predict_step(model: ModelSpec, layout: Layout, choice: StepChoice, on: Machine, topology: Topology) -> StepPrice:
    """Returns the price of a step on one pack.

    Args:
        model: the model, with all layers.
        layout: the tokens of the pack that each rank holds, as the choice names it.
        choice: how the model is split.
        on: the machine.
        topology: the hosts of the group's ranks.

    Raises:
        ArgumentError: another sharding, a layout or a topology of another number of ranks, or a scheme that cannot run.
    """
    if choice.sharding not in SHARDINGS:
        raise ArgumentError("sharding", choice.sharding, " or ".join(SHARDINGS))
    if layout.cp_size != choice.cp:
        raise ArgumentError("layout", f"{layout.cp_size} ranks", f"the {choice.cp} ranks of the choice")
    checked_integer("replicas", choice.replicas, 1)
    slots = model.slots(
        scheme=choice.scheme, ulysses_degree=choice.ulysses_degree, mode=choice.mode,
        head_chunks=choice.head_chunks, codec=choice.codec, search_seconds=choice.search_seconds,
        search_cache=choice.search_cache,
        transport=Transport.even_hosts(choice.transport, choice.cp, topology.num_hosts),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plans, head_chunks = plan_together(Counter(slots), layout, on, topology)
    attention = linear = exposed = imbalance = operations = 0.0
    for plan, count in plans:
        directions = timelines(plan, on, topology)
        waits = priced(plan, on, topology).total - 1e3 * sum(each.seconds - each.exposed for each in directions)
        busy = [1e3 * float(each.busy.mean()) for each in directions]
        uneven = [1e3 * each.imbalance for each in directions]
        if choice.recompute == FULL:  # the forward once more, with its waits
            busy.append(busy[0])
            uneven.append(uneven[0])
            waits += 1e3 * directions[0].exposed
        exposed += waits * count
        imbalance += sum(uneven) * count
        if plan.attend is None:
            linear += sum(busy) * count
        else:
            attention += sum(busy) * count
            operations += count * _attention_operations(plan)
    tokens = int(layout.token_counts.max(initial=0))
    products, others = 1e3 * _products(model, tokens, choice, on), 1e3 * _others(model, tokens, choice, on)
    busy_in_all = attention + linear + products + others + exposed + imbalance
    return StepPrice(
        choice, attention, linear, products, exposed, imbalance, others,
        max(1e3 * _shard_seconds(model, choice, topology) - busy_in_all, 0.0),
        _memory(model, layout, choice, plans), layout.packing.total,
        operations + 6.0 * model.active_parameters * layout.packing.total, plans, _modules(model),
        _schemes(model, slots, plans), head_chunks,
    )  # fmt: skip


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


def _shard_seconds(model: ModelSpec, choice: StepChoice, topology: Topology) -> float:
    """Returns the seconds of a sharding's transfers: the bytes that enter a host, over its ranks' cards.

    Gradients are summed in fp32 and scattered, and weights gathered in bf16: once with a sharded optimizer, in forward
    and in backward with sharded weights. Without sharding every rank sums all gradients.
    """
    ranks, hosts = choice.cp * choice.replicas, topology.num_hosts * choice.replicas
    if ranks == 1:
        return 0.0
    gathers = {"none": 0, "zero1": 1, "zero3": 2}[choice.sharding]
    sums = 2 if choice.sharding == "none" else 1
    nbytes = model.parameters * float(sums * _GRADIENT + gathers * _PARAMETER)
    if hosts == 1:
        return nbytes * (1 - 1 / ranks) / topology.within.bandwidth
    cards = min(topology.rails, -(-topology.size // topology.num_hosts))
    return nbytes * (1 - 1 / hosts) / (topology.between.bandwidth * cards)


def _attention_operations(plan: Plan) -> float:
    """Returns the floating-point operations of an attention's visible pairs: two products forward, four backward."""
    step = plan.attend
    assert step is not None
    pairs = float(stage_shapes(step, 1).pairs.sum())
    heads = sum(hi - lo for lo, hi in step.partition.heads)
    return pairs * heads * 6 * (step.head_dim + step.value_head_dim)


def _products(model: ModelSpec, tokens: int, choice: StepChoice, on: Machine) -> float:
    """Returns the seconds of the weights' products for a rank's tokens.

    An expert has as many rows as tokens are routed to it, rounded up to whole tiles.
    """
    times = 1 + _BACKWARD + (1 if choice.recompute == FULL else 0)
    rate = on.hardware.matrix / (1 + on.hardware.matrix_rows / max(tokens, 1))
    adds = float(sum(gemm.multiply_adds for gemm in model.gemms))
    for block, count in Counter(model.blocks).items():
        if block.mlp is not None and block.mlp.experts and tokens:
            rows = tokens * block.mlp.experts_per_token / block.mlp.experts
            tiles = -(-rows // _EXPERT_TILE) * _EXPERT_TILE
            adds += count * block.mlp.experts_per_token * block.mlp.expert(model.hidden_size) * (tiles / rows - 1)
    return 2.0 * adds * tokens * times / rate


def _others(model: ModelSpec, tokens: int, choice: StepChoice, on: Machine) -> float:
    """Returns the seconds of reading and writing memory: activations once forward, twice in backward."""
    times = 3 + (1 if choice.recompute == FULL else 0)
    return model.activation_bytes("none") * tokens * times / on.hardware.copy


def _memory(model: ModelSpec, layout: Layout, choice: StepChoice, plans: Sequence[tuple[Plan, int]]) -> StepMemory:
    ranks = choice.cp * choice.replicas
    over = {"none": (1, 1, 1), "zero1": (1, 1, ranks), "zero3": (ranks, ranks, ranks)}[choice.sharding]
    parameters, gradients, optimizer = (
        model.parameters * size / share for size, share in zip((_PARAMETER, _GRADIENT, _OPTIMIZER), over, strict=True)
    )
    if choice.sharding == "zero3" and ranks > 1:  # one block's weights and gradients are whole while it is computed
        largest = max(model.block_parameters)
        parameters, gradients = parameters + largest * _PARAMETER, gradients + largest * _GRADIENT
    rank = int(layout.token_counts.argmax())
    tokens = int(layout.token_counts[rank])
    saved = tokens * (model.activation_bytes(choice.recompute) + model.recomputed_bytes(choice.recompute))
    worst = tokens * model.vocab_size * _LOGITS
    for plan, count in plans:
        most = peak_bytes(plan, rank, 2, forward=True) if plan.attend else _linear_saved(plan, rank)
        saved += most * (1 if choice.recompute == FULL else count)
        worst = max(worst, peak_bytes(plan, rank, 2, forward=False) if plan.attend else most)
    buffers = max((buffer_bytes(plan, rank, 2) for plan, _ in plans), default=0)
    return StepMemory(parameters, gradients + optimizer, float(saved + worst), buffers + RUNTIME_BYTES)


def _linear_saved(plan: Plan, rank: int) -> int:
    """Returns the bytes that a linear layer saves: the convolution's input and output, and the layer's output."""
    tokens = int(plan.layout.token_counts[rank])
    widths = sum(block.num_heads * block.head_dim for block in plan.sections.blocks)
    return 2 * tokens * (2 * widths + plan.out.num_heads * plan.out.head_dim)
