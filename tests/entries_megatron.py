"""Rows of Megatron's entry: a small stack of layers on ranks that are threads, beside the same stack on one rank.

What makes Megatron run on a CPU lasts as long as the process, so `outcomes` runs rows in a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections import namedtuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.layout import Packing
from tests.entries import LENGTHS, MEGATRON, recorded
from tests.functional_tests import tiny_megatron as tiny

# Of GPTModel by a name; others are patterns of HybridModel: M Mamba, G Gated DeltaNet, D sparse attention, - an MLP.
STACKS = {"gpt": {"num_layers": 1}, "mla": {"num_layers": 1, **tiny.LATENT}}


class _Ranks:
    """A process group as Megatron asks for it: the threads' group, or that of one rank."""

    def __init__(self, ranks=None):
        self.ranks = ranks

    def size(self):
        return 1 if self.ranks is None else self.ranks.size

    def rank(self):
        return 0 if self.ranks is None else self.ranks.rank


def outcomes(rows, timeout=300.0):
    """Returns what `outcome` does of each row, all run in one process of their own."""
    return run_ranks(_all_of, 1, list(rows), kind="processes", timeout=timeout)[0]


def _all_of(group, rows):
    tiny.start()
    return [outcome(row) for row in rows]


def outcome(row):
    """Runs a row on threads, in a process with Megatron's groups of one rank.

    Returns the refusal, which is the same on every rank; or the largest distances from one rank of the output and of
    gradients, as a share of the largest value, the lines of each plan that rank 0 ran, and the stack's slots.
    """
    expected = _alone(row.alone())
    try:
        found = _spread(row)
    except RankError as error:
        if not isinstance(error.__cause__, ArgumentError):
            raise
        return error.__cause__
    refusals = [each for each in found if isinstance(each, ArgumentError)]
    if refusals:
        assert len({str(each) for each in refusals}) == 1, refusals
        assert len(refusals) == row.cp
        return refusals[0]
    output, input_gradient, gradients = _whole(found)
    errors = {
        "output": tiny.distance(output, expected[0]),
        "input_gradient": tiny.distance(input_gradient, expected[1]),
        "gradients": max(tiny.distances(gradients, expected[2]).values()),
    }
    return errors, found[0].ran, found[0].slots


@functools.lru_cache(64)
def _alone(row):
    return _whole(_spread(row))


def _whole(shares):
    """Returns the output and the input's gradient over the stream, and the sums of the parameters' gradients."""
    layout = shares[0].layout
    rows = (layout.unshard([getattr(each, name) for each in shares]) for name in ("output", "input_gradient"))
    return *rows, {name: sum(each.gradients[name] for each in shares) for name in shares[0].gradients}


def _spread(row):
    from megatron.core.tensor_parallel import random

    from megatron_cp.megatron.layers import communication
    from megatron_cp.megatron.patches import exchanged, gated_delta_net_without_fla, mamba_mixer_without_its_kernels

    hosts = tuple(rank * min(2, row.cp) // row.cp for rank in range(row.cp))
    with (
        exchanged(communication, TorchGroup=lambda group: group.ranks, hosts_of=lambda ranks: hosts),
        exchanged(dist, all_reduce=_all_reduce),
        # Threads build layers at the same time, and each would end the patch of another, or fork the same random state.
        gated_delta_net_without_fla(),
        mamba_mixer_without_its_kernels(),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
    ):
        return run_ranks(_on_rank, row.cp, row)


def _all_reduce(tensor, op=None, group=None, async_op=False):
    """torch's, over threads."""
    if group is not None and group.size() > 1:
        gathered = tensor.new_empty(group.size(), tensor.numel())
        group.ranks.all_gather(gathered.view(-1), tensor.detach().reshape(-1).contiguous())
        with torch.no_grad():
            tensor.copy_(gathered.sum(0).view_as(tensor))


# A rank's share of a result.
_Share = namedtuple("_Share", ["output", "input_gradient", "gradients", "layout", "ran", "slots"])


def _on_rank(group, row):
    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    counted = recorded(group)
    try:
        config, stack = _built(counted, row)
        packing = Packing(LENGTHS)
        layout = row.layout_of(packing, min_rows=1)
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


def _built(group, row):
    """The stack's configuration, and the stack with the parameters that belong to their names."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import validate_segment_layers
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_cp.megatron import specs

    config, layers = _config(row), MEGATRON[row.layer]
    groups = ProcessGroupCollection()
    for field in dataclasses.fields(groups):
        setattr(groups, field.name, _Ranks(group if field.name in ("cp", "tp_cp", "tp_dp_cp", "dp_cp") else None))
    if layers in STACKS:
        stack = TransformerBlock(config, specs.gpt_layer_spec(config), pg_collection=groups)
    else:
        spec = specs.hybrid_stack_spec
        types = validate_segment_layers(layers)
        stack = spec.module(config, spec.submodules, layer_type_list=types, pg_collection=groups)
    stack = stack.double()
    for name, parameter in stack.named_parameters():
        parameter.data.copy_(tiny.drawn(name, list(parameter.shape)))
    return config, stack


def _config(row):
    from megatron.core.transformer import MLATransformerConfig

    from megatron_cp.megatron.config import TransformerConfig, with_options

    layers, scheme = MEGATRON[row.layer], row.scheme if row.cp > 1 else None
    settings = tiny.SETTINGS | {"context_parallel_size": row.cp, "params_dtype": torch.float64}
    settings |= STACKS.get(layers) or {"num_layers": len(layers)} | (tiny.SPARSE if "D" in layers else {})
    settings["cp_comm_type"] = scheme if row.is_softmax else "a2a"
    own = {
        "cp_layout": row.layout, "linear_cp_mode": "auto" if row.is_softmax else scheme or "auto",
        "cp_head_chunks": row.chunks, "cp_transport": row.transport, "cp_codec": row.codec,
        "cp_latent_mode": row.latent_mode if scheme and row.latent_mode else "heads",
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
