"""`memory_of`: predicts the memory of a job on the rank that holds most. No torch in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.mixers import BF16, FP32
from megatron_cp.apps.estimate.model_layers import FULL
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.layout import Layout
from megatron_cp.plan import Plan
from megatron_cp.planner import buffer_bytes, peak_bytes

_PARAMETER, _OPTIMIZER = 2, 12  # bytes: bf16, fp32 weights and two moments of Adam
_GRADIENT = {"fp32": 4, "bf16": 2}  # bytes of a sum; Adam reads fp32, so sums in bf16 are copied for it
# Bytes of a word's logit while the loss is computed, beside the probability that is saved: Megatron's forward keeps the
# logit in bf16 and makes the probability in place, its backward the gradient; PyTorch's holds another one in fp32.
_LOGITS = {"zero3": 6}
# Bytes of a logit while those of a few rows and their gradients are computed: log-probability and two gradients in
# fp32. Measured in tests/functional_tests/test_plan_levers.py, where a model in bf16 or in fp32 takes the same.
_LOGITS_OF_ROWS = 12
RUNTIME_BYTES = 3e9  # bytes that CUDA, NCCL and libraries keep for themselves: an estimate, measured nowhere
# The part of the memory that must stay free: predictions for published jobs were up to 11 % too low.
MARGIN = 0.1


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most.

    Attributes:
        parameters: weights in bf16.
        optimizer: gradients, in the type of their sums, and the optimizer's states.
        activations: bytes that the forwards of all layers and microbatches in flight save, and the largest working set
            of one layer or the loss.
        buffers: message buffers, and the memory that CUDA and its libraries keep.
        host: bytes of the host's memory, in which inputs of layers wait for backward; no part of the total.
    """

    parameters: float
    optimizer: float
    activations: float
    buffers: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all four on the device."""
        return self.parameters + self.optimizer + self.activations + self.buffers

    def fits(self, limit: float) -> bool:
        """True if so many bytes hold it, of which a tenth stays free."""
        return self.total <= (1 - MARGIN) * limit


def memory_of(model: ModelSpec, layout: Layout, job: Job, plans: Sequence[tuple[Plan, int]]) -> RankMemory:
    """Returns the bytes of the rank that holds most, of the stage that holds most."""
    rank, layers = int(layout.token_counts.argmax()), len(model.blocks)
    kept = [
        (peak_bytes(plan, rank, 2, forward=True) if plan.attend else _linear_saved(plan, rank)) for plan, _ in plans
    ]
    working = max([peak_bytes(plan, rank, 2, forward=False) for plan, _ in plans if plan.attend] + kept, default=0)
    of_mean_layer = sum(count * most for (_, count), most in zip(plans, kept, strict=True)) / layers
    buffers = max((buffer_bytes(plan, rank, 2) for plan, _ in plans), default=0) + RUNTIME_BYTES
    found, tokens, in_rows = [], int(layout.token_counts[rank]) / job.tp, job.mlp_rows is not None
    recomputed = tokens * model.recomputed_bytes(job.recompute, mlp_in_rows=in_rows)
    for stage in range(job.pp):
        held = job.layers_of(stage, layers)
        kinds = Counter(model.kinds[number] for number in held)
        of_layers = tokens * sum(
            count * model.blocks[kind].saved(model.hidden_size, job.recompute, mlp_in_rows=in_rows)
            for kind, count in kinds.items()
        )
        host, in_flight = 0.0, job.pp - stage  # microbatches, as one forward, one backward (1F1B) has them
        if job.saved_on_host:  # but for the input of the layer that runs, and what it makes
            host, of_layers = in_flight * of_layers, 2 * tokens * BF16 * model.hidden_size / in_flight
        saved = of_layers + (max(kept, default=0) if job.recompute == FULL else of_mean_layer * len(held))
        saved *= in_flight
        most = max(float(working), *(_mlp_bytes(model, kind, job, tokens) for kind in kinds))
        if stage < job.pp - 1:
            saved += recomputed
        elif job.logit_rows is None:
            # Backward recomputes after the loss. That the sum counts both is nearer to published jobs.
            saved += recomputed + tokens * model.head_bytes
            most = max(most, tokens * model.vocab_size * _LOGITS.get(job.sharding, 2))
        else:
            saved += 3 * tokens * BF16 * model.hidden_size  # input and output of the norm, and the output's gradient
            most = max(recomputed + most, _chunked_loss_bytes(model, job, tokens))
        if job.saved_on_host and stage == job.pp - 1:  # the head's too, if the loss is computed in the forward
            host += tokens * (model.head_bytes if job.logit_rows is None else BF16 * model.hidden_size)
        found.append(RankMemory(*_state_bytes(model, job, stage), saved + most, buffers, host))
    return max(found, key=lambda memory: memory.total)


def _chunked_loss_bytes(model: ModelSpec, job: Job, tokens: float) -> float:
    """Returns the bytes of a loss of a few rows at a time: logits, and the weight's gradient, which chunks add to."""
    assert job.logit_rows is not None
    weights = model.vocab_size * model.hidden_size / job.tp
    rows = min(job.logit_rows / job.tp, tokens)
    of_chunk = max(rows * model.vocab_size * _LOGITS_OF_ROWS, BF16 * weights)
    return of_chunk + (FP32 * weights if rows < tokens else 0)


def _mlp_bytes(model: ModelSpec, kind: int, job: Job, tokens: float) -> float:
    """Returns the bytes that the backward of a block's MLP makes: gradients, and in rows also what was not saved."""
    mlp, hidden_size = model.blocks[kind].mlp, model.hidden_size
    if mlp is None:
        return 0.0
    if job.mlp_rows is None:
        return tokens * mlp.gradient_bytes
    rows = min(job.mlp_rows / job.tp, tokens)
    met, expert = mlp.weights(hidden_size) + mlp.vectors(hidden_size), mlp.expert(hidden_size)
    weights = (met - mlp.experts_per_token * expert) / job.tp + mlp.experts * expert / job.ep
    of_chunk = rows * (mlp.saved(hidden_size, selective=False) + mlp.gradient_bytes)
    sums = FP32 * weights if rows < tokens else 0
    return tokens * BF16 * hidden_size + max(of_chunk, BF16 * weights) + sums


def _parameters(model: ModelSpec, job: Job, stage: int) -> tuple[float, float]:
    """Returns the parameters of a stage's rank outside of routed experts, word tables included, and of its experts."""
    pairs = [model.block_parameters[number] for number in job.layers_of(stage, len(model.blocks))]
    tables = (stage == 0) + (stage == job.pp - 1) * (not model.tied_embeddings or job.pp > 1)
    dense = sum(dense for dense, _ in pairs) + tables * model.vocab_size * model.hidden_size
    norm = model.hidden_size if stage == job.pp - 1 else 0
    return dense / job.tp + norm, sum(routed for _, routed in pairs) / job.ep


def _state_bytes(model: ModelSpec, job: Job, stage: int) -> tuple[float, float]:
    """Returns the bytes of weights, and of gradients and optimizer, of a rank of a stage.

    With zero3 the weights of the optimizer are the only ones that stay. A block and the one that is gathered ahead are
    whole in bf16, a block's gradients too, and the tables of words from the first forward to the last backward.
    """
    parameters = states = 0.0
    each, full = _GRADIENT[job.gradients], job.sharding == "zero3"
    held = _OPTIMIZER + (4 if each < 4 and not full else 0)
    groups = (job.cp * job.replicas, job.stage_ranks // job.ep)
    for count, ranks in zip(_parameters(model, job, stage), groups, strict=True):
        parameters += _PARAMETER * count * (not full)
        states += each * count / (ranks if full else 1) + held * count / (1 if job.sharding == "none" else ranks)
    if full:
        largest = max(dense / job.tp + routed / job.ep for dense, routed in model.block_parameters)
        tables = model.vocab_size * model.hidden_size / job.tp * (1 if model.tied_embeddings else 2)
        parameters, states = (2 * largest + tables) * _PARAMETER, states + largest * each
    return parameters, states


def _linear_saved(plan: Plan, rank: int) -> int:
    """Returns the bytes that a linear layer saves: the convolution's input and output, and the layer's output."""
    tokens = int(plan.layout.token_counts[rank])
    widths = sum(block.num_heads * block.head_dim for block in plan.sections.blocks)
    return 2 * tokens * (2 * widths + plan.out.num_heads * plan.out.head_dim)
