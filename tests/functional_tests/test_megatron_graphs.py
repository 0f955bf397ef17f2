"""Modules that `--cuda-graph-impl transformer_engine` captures: what Megatron calls for them, beside our layers.

Transformer Engine is not installed, and captures nothing here: in place of its graphs are Megatron's own methods for
the capture, called with what a graph gets.
"""

import sys
import types

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.functional_tests import tiny_megatron as tiny
from tests.refusals import rejects

pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")

PACKS = ([10, 7, 15], [1, 1, 30])
EXPERTS = {
    "num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
}  # fmt: skip
GRAPHS = {
    "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp", "moe_router", "moe_preprocess"]
}  # fmt: skip


def graph_of(layer):
    """Returns what stands for a layer's graph: it takes tensors alone, always of one shape."""
    from megatron.core.transformer import cuda_graphs

    shapes = set()

    def graph(hidden, is_first_microbatch):
        shapes.add(hidden.shape)
        assert len(shapes) == 1
        cuda_graphs._set_capture_start()
        try:
            return layer._te_cuda_graph_capture(hidden)
        finally:
            cuda_graphs._set_capture_end()

    return graph


def step(model, group, lengths):
    """Returns this rank's loss, and the gradients of the model."""
    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    model.zero_grad()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, tiny.VOCABULARY, sum(lengths)))
    layout = cp.Layout.contiguous(cp.Packing(lengths), group.size)
    batch = shard_batch(tokens, layout, group, slots=slots_of(model))
    out = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed_seq_params)
    loss = (out * batch.loss_mask).sum()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def run_on_rank(group, pattern):
    """Returns the number of layers with a graph, and the largest difference of losses and gradients from none."""
    tiny.start(cp=group.size)
    from megatron.core.transformer import cuda_graphs, transformer_layer

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = types.ModuleType(name)
    transformer_layer.is_te_min_version = lambda *_: True
    common = {"pattern": pattern, "cp_layout": "contiguous", "params_dtype": torch.float64, **EXPERTS}
    plain, model = tiny.build("hybrid", **common).train(), tiny.build("hybrid", **common, **GRAPHS).train()
    graphed = [layer for layer in model.decoder.layers if cuda_graphs._layer_is_graphable(layer, model.config)]
    for layer in graphed:
        layer.cuda_graphs = [graph_of(layer)]
    worst = 0.0
    for lengths in PACKS:
        (loss, gradients), (expected, wanted) = step(model, group, lengths), step(plain, group, lengths)
        worst = max(worst, tiny.distance(loss, expected), *tiny.distances(gradients, wanted).values())
    rejects(r"--cuda-graph-impl: got '\[8, 9\] rows on the ranks", step, model, group, [10, 7])
    return len(graphed), worst


@pytest.mark.thorough
@pytest.mark.parametrize("pattern", ["*-*E", "G-GE"])
def test_modules_that_transformer_engine_captures_leave_our_layers_alone(pattern):
    for count, worst in run_ranks(run_on_rank, 2, pattern, kind="processes", timeout=280.0):
        assert count == 2
        assert worst <= 1e-12
