"""Cases of Megatron's entry: a small stack of layers on ranks that are threads, beside the same stack on one rank.

What makes Megatron run on a CPU lasts as long as the process, so `outcomes` runs cases in a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.layout import Packing
from megatron_cp.planner.layouts import layout_by_name
from tests.entries import recorded
from tests.functional_tests import tiny_megatron as tiny

# Of GPTModel by a name; others are patterns of HybridModel: M Mamba, G Gated DeltaNet, D sparse attention, - an MLP.
STACKS = {"gpt": {"num_layers": 1}, "mla": {"num_layers": 1, **tiny.LATENT}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A stack of layers and the options of a job; each is a flag's value.

    Attributes:
        stack: a name of `STACKS`, or a pattern of HybridModel.
        hosts: number of hosts on which the ranks seem to be, for the transport that asks.
    """

    stack: str
    cp_size: int = 2
    lengths: tuple = (52, 1, 21)
    align: int = 1
    comm_type: str | None = "a2a"
    linear_mode: str = "auto"
    layout: str = "zigzag"
    transport: str = "collective"
    hosts: int = 2
    codec: str = "none"
    head_chunks: int | None = None
    latent_mode: str = "heads"

    @property
    def on_one_rank(self):
        return Case(self.stack, 1, self.lengths, comm_type=None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        errors: the largest distances from one rank, as a share of the largest value, of the output, of the input's
            gradient, and of the gradients of all parameters; empty if the case was refused.
        refusal: the error that refused the case, the same on every rank; None if it ran.
        ran: the lines of each plan that rank 0 ran.
        slots: the stack's slots.
    """

    errors: dict
    refusal: ArgumentError | None = None
    ran: frozenset = frozenset()
    slots: tuple = ()

    @property
    def worst(self):
        return max(self.errors.values())


class _Ranks:
    """A process group as Megatron asks for it: the threads' group, or that of one rank."""

    def __init__(self, ranks=None):
        self.ranks = ranks

    def size(self):
        return 1 if self.ranks is None else self.ranks.size

    def rank(self):
        return 0 if self.ranks is None else self.ranks.rank


def outcomes(cases, timeout=300.0):
    """Returns the outcome of each case, all run in one process of their own."""
    return run_ranks(_all_of, 1, list(cases), kind="processes", timeout=timeout)[0]


def _all_of(group, cases):
    tiny.start()
    return [outcome(case) for case in cases]


def outcome(case):
    """Runs a case on threads, in a process with Megatron's groups of one rank."""
    expected = _alone(case.on_one_rank)
    try:
        found = _spread(case)
    except RankError as error:
        if not isinstance(error.__cause__, ArgumentError):
            raise
        return Outcome({}, error.__cause__)
    refusals = [each for each in found if isinstance(each, ArgumentError)]
    if refusals:
        assert len({str(each) for each in refusals}) == 1, refusals
        assert len(refusals) == case.cp_size
        return Outcome({}, refusals[0])
    layout = found[0].layout
    errors = {
        name: tiny.distance(layout.unshard([getattr(each, name) for each in found]), getattr(expected, name))
        for name in ("output", "input_gradient")
    }
    summed = {name: sum(each.gradients[name] for each in found) for name in expected.gradients}
    errors["gradients"] = max(tiny.distances(summed, expected.gradients).values())
    return Outcome(errors, None, found[0].ran, found[0].slots)


@functools.lru_cache(64)
def _alone(case):
    (found,) = _spread(case)
    assert not isinstance(found, ArgumentError), found
    layout = found.layout
    return dataclasses.replace(
        found, output=layout.unshard([found.output]), input_gradient=layout.unshard([found.input_gradient])
    )


def _spread(case):
    from megatron.core.tensor_parallel import random

    from megatron_cp.megatron.layers import communication
    from megatron_cp.megatron.patches import exchanged, gated_delta_net_without_fla, mamba_mixer_without_its_kernels

    hosts = tuple(rank * case.hosts // case.cp_size for rank in range(case.cp_size))
    with (
        exchanged(communication, TorchGroup=lambda group: group.ranks, hosts_of=lambda ranks: hosts),
        exchanged(dist, all_reduce=_all_reduce),
        # Threads build layers at the same time, and each would end the patch of another, or fork the same random state.
        gated_delta_net_without_fla(),
        mamba_mixer_without_its_kernels(),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
    ):
        return run_ranks(_on_rank, case.cp_size, case)


def _all_reduce(tensor, op=None, group=None, async_op=False):
    """torch's, over threads."""
    if group is not None and group.size() > 1:
        gathered = tensor.new_empty(group.size(), tensor.numel())
        group.ranks.all_gather(gathered.view(-1), tensor.detach().reshape(-1).contiguous())
        with torch.no_grad():
            tensor.copy_(gathered.sum(0).view_as(tensor))


@dataclasses.dataclass(frozen=True)
class _Share:
    """A rank's share of a case's result."""

    output: torch.Tensor
    input_gradient: torch.Tensor
    gradients: dict
    layout: object
    ran: frozenset
    slots: tuple


def _on_rank(group, case):
    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    counted = recorded(group)
    try:
        config, stack = _built(counted, case)
        packing = Packing(case.lengths)
        layout = layout_by_name(case.layout, packing, group.size, align=case.align, min_rows=1, seed=4)
        tokens = torch.arange(packing.total)
        batch = shard_batch(tokens, layout, counted, slots=slots_of(stack))
        params, layout = batch.packed_seq_params, batch.packed_seq_params.plans.layout
        generator = torch.Generator().manual_seed(7)
        hidden, gradient = (
            layout.shard(torch.randn(packing.total, 1, config.hidden_size, generator=generator, dtype=torch.float64),
                         group.rank)
            for _ in range(2)
        )  # fmt: skip
        out = stack(hidden.requires_grad_(), None, rotary_pos_emb=_rotary(config), packed_seq_params=params)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(gradient)
    except ArgumentError as error:
        return error
    gradients = {name: _gradient(parameter) for name, parameter in stack.named_parameters()}
    ran, slots = frozenset(counted.agreed.plans), tuple(params.plans.kinds)
    return _Share(out.detach(), hidden.grad, gradients, layout, ran, slots)


def _gradient(parameter):
    return np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()


def _built(group, case):
    """The stack's configuration, and the stack with the parameters that belong to their names."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import validate_segment_layers
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_cp.megatron import specs

    config = _config(case)
    groups = ProcessGroupCollection()
    for field in dataclasses.fields(groups):
        setattr(groups, field.name, _Ranks(group if field.name in ("cp", "tp_cp", "tp_dp_cp", "dp_cp") else None))
    if case.stack in STACKS:
        stack = TransformerBlock(config, specs.gpt_layer_spec(config), pg_collection=groups)
    else:
        spec = specs.hybrid_stack_spec
        stack = spec.module(
            config, spec.submodules, layer_type_list=validate_segment_layers(case.stack), pg_collection=groups
        )
    stack = stack.double()
    for name, parameter in stack.named_parameters():
        parameter.data.copy_(tiny.drawn(name, list(parameter.shape)))
    return config, stack


def _config(case):
    from megatron.core.transformer import MLATransformerConfig

    from megatron_cp.megatron.config import TransformerConfig, with_options

    settings = tiny.SETTINGS | {"context_parallel_size": case.cp_size, "params_dtype": torch.float64}
    settings |= STACKS.get(case.stack) or {"num_layers": len(case.stack)} | (tiny.SPARSE if "D" in case.stack else {})
    settings["cp_comm_type"] = case.comm_type
    own = {
        "cp_layout": case.layout, "linear_cp_mode": case.linear_mode, "cp_head_chunks": case.head_chunks,
        "cp_transport": case.transport, "cp_codec": case.codec, "cp_latent_mode": case.latent_mode,
    }  # fmt: skip
    if settings.get("qk_pos_emb_head_dim") is None:
        return TransformerConfig(**settings, **own)
    return with_options(MLATransformerConfig(**settings), argparse.Namespace(**own))


def _rotary(config):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if getattr(config, "multi_latent_attention", False):
        return None
    table = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=True, cp_group=_Ranks())
    return table(128, packed_seq=True)
