"""Gated DeltaNet-2 and Gated DeltaProduct of Megatron-Core 0.20: ours of a packed batch, over ranks, is Megatron's own
layer of each document alone. Without such layers, their specs and options are refused by name.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import FLOOR_SHARE, relative_error
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

gdn = pytest.importorskip("megatron.core.ssm.gated_delta_net")
HAS_LAYERS = hasattr(gdn, "GatedDeltaNet2")
LENGTHS = (7, 1, 40, 0, 12, 2)
WAYS = [("headwise", "zigzag"), ("chunkwise", "zigzag"), ("chunkwise", "balanced"), ("headwise", "contiguous")]
KINDS = {"gdn2": {"experimental_attention_variant": "gdn2"}, "gdp": {"gdp_num_householder": 2, "mamba_state_dim": 8}}


@pytest.mark.skipif(not HAS_LAYERS, reason="Megatron-Core before 0.20 has no such layers")
@pytest.mark.parametrize("cp", [2, 3])
def test_a_packed_batch_over_ranks_is_each_document_through_megatrons_layer(cp):
    for found in run_ranks(distances, cp, kind="processes", timeout=limit(300)):
        for case, errors in found.items():
            assert all(error <= 1e-5 for error in errors.values()), (case, errors)  # not max: NaN must fail


def distances(group):
    tiny.start(cp=group.size)
    found = {}
    for kind in KINDS:
        stock, hidden = built(kind, "stock", context_parallel_size=1), drawn(sum(LENGTHS))
        outputs = [stock(document[:, None].contiguous())[0] for document in hidden.split([n for n in LENGTHS if n])]
        expected = results(stock, torch.cat(outputs)[:, 0], hidden)
        for mode, layout in WAYS:
            found[kind, mode, layout] = over_ranks(kind, mode, layout, stock, expected, group)
    return found


def over_ranks(kind, mode, layout, stock, expected, group):
    from megatron.core import parallel_state

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    layer = built(kind, "ours", linear_cp_mode=mode)
    layer.load_state_dict(stock.state_dict(), strict=True)
    assigned, ranks = tiny.layout_of(layout, LENGTHS, group.size), parallel_state.get_context_parallel_group()
    tokens = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    batch = shard_batch(tokens, assigned, ranks, slots=slots_of(torch.nn.ModuleList([layer])))
    whole = drawn(sum(LENGTHS)).detach()
    hidden = assigned.shard(whole, group.rank).requires_grad_()
    out = layer(hidden[:, None], packed_seq_params=batch.packed_seq_params)[0][:, 0]
    mine = results(layer, out, hidden, assigned.shard(gradient(), group.rank))
    for name, value in mine.items():
        if name in ("out", "d_hidden"):
            shards = [None] * group.size
            dist.all_gather_object(shards, value)
            mine[name] = assigned.unshard(shards)
        else:
            dist.all_reduce(value)
    return {name: relative_error(mine[name], value, FLOOR_SHARE) for name, value in expected.items()}


def built(kind, which, **changes):
    """Returns a layer, ours or Megatron's with torch's operators in place of its kernels."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet2
    from megatron_cp.megatron.layers.gated_delta_product import GatedDeltaProductMixer
    from megatron_cp.megatron.layers.norms import Norm
    from megatron_cp.megatron.packed_seq_params import OneRank
    from megatron_cp.megatron.patches import (
        gated_delta_net_without_fla,
        gated_delta_product_without_its_kernels,
    )

    is_ours = which == "ours"
    config = tiny.configure("hybrid", deterministic_mode=not is_ours and kind == "gdn2", **KINDS[kind], **changes)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if not is_ours:
        groups.cp = OneRank()
    projections = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    if kind == "gdn2":
        theirs, own = gdn.GatedDeltaNet2, GatedDeltaNet2
        parts, arguments = gdn.GatedDeltaNetSubmodules(**projections, out_norm=Norm), {}
        without = gated_delta_net_without_fla
    else:
        from megatron.core.ssm import gated_delta_product

        theirs, own = gated_delta_product.GatedDeltaProductMixer, GatedDeltaProductMixer
        parts = gated_delta_product.GatedDeltaProductMixerSubmodules(**projections)
        arguments, without = {"d_model": config.hidden_size}, gated_delta_product_without_its_kernels
    with without():
        layer = (own if is_ours else theirs)(config, parts, layer_number=1, pg_collection=groups, **arguments)
    if is_ours:
        return layer
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(tiny.drawn(name, parameter.shape))
    return _Stock(layer)


class _Stock(torch.nn.Module):
    """Megatron's layer, whose CUDA kernels are torch's operators while it runs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def state_dict(self):
        return self.layer.state_dict()

    def named_parameters(self):
        return self.layer.named_parameters()

    def forward(self, hidden):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gdn.common, "l2norm", unit)
            patch.setattr(gdn.gdn2, "l2norm", unit)
            if hasattr(self.layer, "num_householder"):
                from megatron.core.ssm import gated_delta_product

                patch.setattr(gated_delta_product, "l2_norm", unit)
                patch.setattr(gated_delta_product, "causal_conv1d_fn", None)
                self.layer.gdp_kernel = delta_product
                return self.layer(hidden)
            return self.layer(hidden, None)


def unit(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)


def delta_product(q, k, v, g, beta, num_householder, **_):
    """The recurrence of DeltaProduct, arXiv 2502.10297, with a decay, of `[1, t * n, h, d]`."""
    state, outputs = q.new_zeros(q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = g[0, t].exp()[:, None, None] * state
        for step in range(t * num_householder, (t + 1) * num_householder):
            read = torch.einsum("hk,hkv->hv", k[0, step], state)
            state = state + torch.einsum("h,hk,hv->hkv", beta[0, step], k[0, step], v[0, step] - read)
        outputs.append(torch.einsum("hk,hkv->hv", q[0, t] * q.shape[3] ** -0.5, state))
    return torch.stack(outputs)[None], None


def drawn(tokens):
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()


def gradient():
    return torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(6))


def results(layer, out, hidden, output_gradient=None):
    """The output, and the gradients of the hidden states and of each parameter."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(out, [hidden, *parameters], gradient() if output_gradient is None else output_gradient)
    return {"out": out.detach(), **dict(zip(("d_hidden", *names), found, strict=True))}


@pytest.mark.skipif(HAS_LAYERS, reason="Megatron-Core has these layers")
def test_rejects_layers_that_this_megatron_does_not_have():
    from megatron_cp.megatron import specs
    from megatron_cp.megatron.rules import unsupported_spec

    stack = specs.gated_delta_product_stack_spec
    with pytest.raises(ArgumentError, match=r"--spec: got .*gated_delta_product_stack_spec.* since 0\.20"):
        stack.module(None, stack.submodules)
    config = tiny.argparse.Namespace(experimental_attention_variant="gdn2", transformer_impl="local")
    (error,) = unsupported_spec(config)
    assert error.argument == "--experimental-attention-variant"
    assert "0.20" in str(error)
