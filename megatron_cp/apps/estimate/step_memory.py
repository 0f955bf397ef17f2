"""`memory_of`: predicts the memory of a job's step on the rank that holds most. No torch in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.model_layers import FULL, NONE
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.layout import Layout
from megatron_cp.plan import Plan
from megatron_cp.planner import buffer_bytes, peak_bytes

PARAMETER, _OPTIMIZER = 2, 12  # bytes: bf16, fp32 weights and two moments of Adam
GRADIENT = {"fp32": 4, "bf16": 2}  # bytes of a sum; Adam reads fp32, so sums in bf16 are copied for it
# Bytes of a word's logit while the loss is computed, beside the probability that is saved: Megatron's forward keeps the
# logit in bf16 and makes the probability in place, its backward the gradient; PyTorch's holds another one in fp32.
_LOGITS = {"zero3": 6}
RUNTIME_BYTES = 3e9  # bytes that CUDA, NCCL and libraries keep for themselves: an estimate, measured nowhere


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the rank that holds most.

    Attributes:
        parameters: weights in bf16, or in FP8 along rows and along columns; both of them without sharding.
        optimizer: gradients, in the type of their sums, and the optimizer's states.
        activations: bytes that the forwards of all layers and microbatches in flight save, and the largest working set
            of one layer or the loss.
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


def on_rank(model: ModelSpec, job: Job, lo: int, hi: int) -> tuple[float, float]:
    """Returns the parameters of blocks on a rank: outside of routed experts, and of its experts."""
    sizes = model.block_parameters[lo:hi]
    return sum(dense for dense, _ in sizes) / job.tp, sum(routed for _, routed in sizes) / job.ep


def stage_parameters(model: ModelSpec, job: Job, stage: int) -> tuple[float, float]:
    """Returns the parameters of a stage's rank, embedding and output head included."""
    pairs = [on_rank(model, job, lo, hi) for lo, hi in job.layer_ranges(len(model.blocks))[stage :: job.pp]]
    words = model.vocab_size * model.hidden_size / job.tp
    tables = (stage == 0) + (stage == job.pp - 1) * (not model.tied_embeddings or job.pp > 1)
    norm = model.hidden_size if stage == job.pp - 1 else 0
    return sum(dense for dense, _ in pairs) + tables * words + norm, sum(routed for _, routed in pairs)


def memory_of(
    model: ModelSpec, layout: Layout, job: Job, plans: Sequence[tuple[Plan, int]], held: tuple[int, ...]
) -> StepMemory:
    """Returns the bytes of the rank that holds most, of the stage that holds most."""
    rank = int(layout.token_counts.argmax())
    kept = [
        (peak_bytes(plan, rank, 2, forward=True) if plan.attend else _linear_saved(plan, rank)) for plan, _ in plans
    ]
    worst = max([peak_bytes(plan, rank, 2, forward=False) for plan, _ in plans if plan.attend] + kept, default=0)
    operation = sum(count * most for (_, count), most in zip(plans, kept, strict=True)) / len(model.blocks)
    buffers = max((buffer_bytes(plan, rank, 2) for plan, _ in plans), default=0)
    tokens = int(layout.token_counts[rank])
    return _memory(model, job, tokens, held, _Operations(operation, max(kept, default=0), worst, buffers))


class _Operations(NamedTuple):
    """Bytes of the layers' operations: saved by the mean and by the largest one, its working set, message buffers."""

    saved: float = 0.0
    largest: float = 0.0
    working: float = 0.0
    buffers: float = 0.0


def least_memory(model: ModelSpec, job: Job, tokens: int, held: tuple[int, ...]) -> float:
    """Returns the bytes of a rank with so many tokens of a microbatch, without what the layers' operations take."""
    return _memory(model, job, tokens, held, _Operations()).total


def _memory(model: ModelSpec, job: Job, tokens: int, held: tuple[int, ...], operations: _Operations) -> StepMemory:
    found, tokens_of_rank = [], tokens / job.tp
    for stage in range(job.pp):
        saved = 0.0
        ranges = job.layer_ranges(len(model.blocks))[stage :: job.pp]
        blocks = Counter(
            (kind, job.of_layer(place).recompute) for lo, hi in ranges for place, kind in enumerate(model.kinds[lo:hi])
        )
        fp8 = job.precision == "fp8" and job.sharding != "zero3"
        for (kind, recompute), count in blocks.items():
            saved += count * tokens_of_rank * model.blocks[kind].saved(model.hidden_size, recompute, fp8=fp8)
        whole = sum(count for (_, recompute), count in blocks.items() if recompute != FULL)
        saved += operations.saved * whole if whole else operations.largest
        saved *= held[stage] / job.interleave
        saved += tokens_of_rank * model.recomputed_bytes(job.recompute)
        most = float(operations.working)
        if stage == job.pp - 1:
            saved += tokens_of_rank * (model.activation_bytes(NONE) - model.activation_bytes(NONE, output_head=False))
            most = max(most, tokens_of_rank * model.vocab_size * _LOGITS.get(job.sharding, 2))
        state = _state_bytes(model, job, stage)
        found.append(StepMemory(*state, saved + most, operations.buffers + RUNTIME_BYTES))
    return max(found, key=lambda memory: memory.total)


def _state_bytes(model: ModelSpec, job: Job, stage: int) -> tuple[float, float]:
    """Returns the bytes of weights, and of gradients and optimizer, of a rank of a stage.

    With zero3 the weights of the optimizer are the only ones that stay. A block and the one that is gathered ahead are
    whole in bf16, a block's gradients too, and the tables of words from the first forward to the last backward.
    """
    parameters = states = 0.0
    each, full = GRADIENT[job.gradients], job.sharding == "zero3"
    held = _OPTIMIZER + (4 if each < 4 and not full else 0)
    groups = (job.cp * job.replicas, job.stage_ranks // job.ep)
    for count, ranks in zip(stage_parameters(model, job, stage), groups, strict=True):
        parameters += PARAMETER * count * (not full)
        states += each * count / (ranks if full else 1) + held * count / (1 if job.sharding == "none" else ranks)
    if full:
        largest = max(dense / job.tp + routed / job.ep for dense, routed in model.block_parameters)
        tables = model.vocab_size * model.hidden_size / job.tp * (1 if model.tied_embeddings else 2)
        parameters, states = (2 * largest + tables) * PARAMETER, states + largest * each
    return parameters * (2 if job.precision == "fp8" and job.sharding == "none" else 1), states


def least_bytes(model: ModelSpec, job: Job) -> float:
    """Returns the bytes of weights, gradients and optimizer on the rank that holds most."""
    return max(sum(_state_bytes(model, job, stage)) for stage in range(job.pp))


def _linear_saved(plan: Plan, rank: int) -> int:
    """Returns the bytes that a linear layer saves: the convolution's input and output, and the layer's output."""
    tokens = int(plan.layout.token_counts[rank])
    widths = sum(block.num_heads * block.head_dim for block in plan.sections.blocks)
    return 2 * tokens * (2 * widths + plan.out.num_heads * plan.out.head_dim)
