"""Megatron's own CUDA graphs beside our layers: routers of experts are captured, attention runs eagerly between them.

A replay's kernels are counted on the emulated device, and not run, so that losses of steps that replay are no numbers
of the model.
"""

from __future__ import annotations

import copy
import ctypes
import os

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.refusals import rejects

pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
pytestmark = pytest.mark.skipif(os.environ.get("NULLGPU") != "1", reason="counts of the emulated device")

PACKS = ([10, 7, 15], [20, 12], [1, 1, 30])


def model_with(**changes):
    """Returns a HybridModel whose layers of experts are those of Megatron's spec for Transformer Engine."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    from megatron_cp.megatron import specs
    from megatron_cp.megatron.config import TransformerConfig
    from megatron_cp.megatron.layers.experts import mask_pads
    from tests.functional_tests import tiny_megatron as tiny

    settings = tiny.SETTINGS | {
        "num_layers": 2, "cp_comm_type": "a2a", "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none", "bf16": True,
        "params_dtype": torch.bfloat16, "cp_layout": "contiguous",
        "context_parallel_size": torch.distributed.get_world_size(),
    }  # fmt: skip
    spec = copy.deepcopy(specs.local_hybrid_stack_spec)
    spec.submodules.moe_layer.module = mask_pads(MoETransformerLayer)
    sizes = {"vocab_size": 64, "max_sequence_length": 64, "position_embedding_type": "rope"}
    torch.manual_seed(1)
    model = HybridModel(TransformerConfig(**settings | changes), spec, hybrid_layer_pattern="*E", **sizes)
    for parameter in model.to("cuda", torch.bfloat16).parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # as Megatron's data parallelism has it
    return model.train()


def steps_of(model, group, packs):
    """Trains on packs; returns the losses of this rank."""
    from megatron.core.transformer.cuda_graphs import create_cudagraphs

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    losses = []
    for lengths in packs:
        layout = cp.Layout.contiguous(cp.Packing(lengths), group.size)
        tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, sum(lengths)))
        batch = shard_batch(tokens, layout, group, slots=slots_of(model), device="cuda")
        out = model(
            batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed_seq_params
        )
        loss = (out * batch.loss_mask).sum()
        loss.backward()
        losses.append(loss.item())
        create_cudagraphs()  # as Megatron's schedules do at the end of a step
    return losses


def train_on_rank(group):
    """Returns the losses without graphs and with them, the methods that were captured, and kernels of each replay."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer import cuda_graphs

    parallel_state.initialize_model_parallel(context_parallel_size=group.size)
    initialize_rng_tracker(use_cudagraphable_rng=True)
    model_parallel_cuda_manual_seed(1)
    torch.autograd.set_multithreading_enabled(False)
    eager = steps_of(model_with(), group, PACKS[:1])
    model = model_with(cuda_graph_impl="local", cuda_graph_modules=["moe_router"], cuda_graph_warmup_steps=1)
    captured, replayed, replay = [], [], torch.cuda.CUDAGraph.replay
    create = cuda_graphs._CudaGraphRunner.create_fwd_graph

    def creating(runner, *args, **options):
        captured.append(runner.func.__name__)
        return create(runner, *args, **options)

    def counting(graph):
        before = launches()
        replay(graph)
        replayed.append(launches() - before)

    cuda_graphs._CudaGraphRunner.create_fwd_graph, torch.cuda.CUDAGraph.replay = creating, counting
    losses = steps_of(model, group, PACKS)
    rejects(r"--cuda-graph-impl: got '\[8, 9\] rows on the ranks", steps_of, model, group, [[10, 7]])
    return eager + losses[:1], captured, replayed


def launches():
    return int(ctypes.CDLL(None).nullgpu_launches())


@pytest.mark.timeout(300)
def test_routers_of_experts_are_captured_beside_our_attention():
    for losses, captured, replayed in run_ranks(train_on_rank, 2, kind="processes", timeout=280.0):
        assert losses[0] == losses[1] != 0
        assert captured == ["_forward_mlp_router", "_forward_mlp_postprocess"]
        assert len(replayed) == 2 * 4  # two steps, forward and backward of both
        assert replayed[:4] == replayed[4:]
        assert replayed[0] > 0
