"""Against Megatron's own modules: a packed batch through ours is each document alone through Megatron's, and the sums.

Megatron's attention, Gated DeltaNet and stack are what a user of Megatron without this package has, in the form that
knows no packing: one document at a time, `[s, b, h]`.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.batch import LinearSpec
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit
from tests.shared import selected
from tests.stable_topk import first_of_equal

pytest.importorskip("megatron.core")

# By name: what is not as usual in the model's arguments, in its configuration, and set on that afterwards.
MODELS = {
    "gpt": ({}, {}, {}),
    "gpt without rope": ({"position_embedding_type": "learned_absolute"}, {}, {}),
    "gpt with half of rope": ({"rotary_percent": 0.5}, {"rotary_interleaved": True, "softmax_scale": 0.5}, {}),
    "gpt with yarn": (
        {"position_embedding_type": "yarn"},
        {},
        {
            "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32, "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": True,
        },
    ),
    "gpt with a layer without rope": ({}, {}, {"no_rope_freq": [0, 1]}),
    # Megatron's core attention takes the size of values from kv_channels, so that it can differ from that of keys.
    "mla": ({}, {}, {}),
    "mla without a rank of queries": ({}, {"q_lora_rank": None, "qk_layernorm": False}, {}),
    "mla with yarn": (
        {},
        {
            "rope_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale_all_dim": 0.5,
        },
        {},
    ),
    # The second of three layers takes the choice of the first.
    "dsa_mla": ({}, {"cp_comm_type": "all_gather", "dsa_indexer_topk_freq": 2}, {}),
    "hybrid": ({}, {}, {}),
}  # fmt: skip
# One layer of GatedDeltaNet, and its arguments.
LAYERS = {"gdn": {}, "gdn with biases": {"bias": True, "conv_bias": True}}
PLACES = [("cp1", "contiguous"), ("cp2", "zigzag"), ("cp2", "random")]
# Rotary positions are relative: that they start anew in each document shows in absolute ones alone.
FAULTS = {
    "gpt": ["rows as positions", "labels of the next row", "labels of the next document", "leaking attention"],
    "gpt without rope": ["positions of the stream"],
    "mla": ["rows as positions", "leaking attention"],
    "mla with yarn": ["rows as positions"],
    "hybrid": [
        "rows as positions", "labels of the next row", "labels of the next document", "leaking attention",
        "leaking gdn",
    ],
}  # fmt: skip
TOLERANCE = 1e-5
HIDDEN = 32


@pytest.fixture(scope="module")
def ranks(request):
    chosen = selected(request, test_a_packed_batch_is_each_document_alone_through_megatrons_modules)
    chosen = {(case["kind"], case["place"], case["layout"]) for case in chosen}
    return run_ranks(compare, 2, chosen, kind="processes", timeout=limit(200))


def compare(group, chosen):
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        tiny.start()
        replace_cuda_kernels(patch)
        stock = {kind: stock_model(kind) for kind in MODELS}
        found["states"] = {kind: exchanged_states(our_model(kind), stock[kind]) for kind in MODELS}
        layers = {name: stock_layer(name) for name in LAYERS}
        found["states"] |= {name: exchanged_states(our_layer(name), layers[name]) for name in LAYERS}
        alone = {}
        if group.rank == 0:
            alone = {kind: each_document_alone(stock[kind]) for kind in MODELS}
            alone |= {name: layer_on_each_document(layers[name]) for name in LAYERS}
    dist.broadcast_object_list(given := [alone])
    (expected,) = given
    for place, layout in PLACES:
        tiny.start(cp=int(place[2:]))
        if place == "cp1" and group.rank > 0:  # which would do what the first does
            continue
        for kind in (*MODELS, *LAYERS):
            if (kind, place, layout) in chosen:
                step = packed if kind in MODELS else packed_layer
                found[kind, place, layout] = errors(step(kind, layout), expected[kind])
    for kind, faults in FAULTS.items():
        for fault in faults:
            found[kind, fault] = errors(packed(kind, "zigzag", fault), expected[kind])
    return found


def errors(actual, expected):
    """The largest of the losses or outputs, and the largest of the gradients."""
    by_name = tiny.distances(actual, expected)
    rows = {name: by_name.pop(name) for name in ("losses", "out") if name in by_name}
    return max(rows.values()), max(by_name.values())


def replace_cuda_kernels(patch):
    """Replaces the CUDA code of Megatron's modules that our patch does not: fla's normalisation is a Triton kernel."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patch.setattr(common, "l2norm", lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6))
    patch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
    patch.setattr(torch.Tensor, "topk", first_of_equal(torch.Tensor.topk))


def stock_model(name):
    qk_norm = MODELS[name][1].get("qk_layernorm", True)
    spec = stock_stack() if name == "hybrid" else stock_layer_spec(qk_norm, name.startswith(("mla", "dsa")))
    if name.startswith("dsa"):
        spec.submodules.self_attention = stock_sparse_attention()
    return our_model(name, spec=spec, deterministic_mode=True, transformer_impl="local")


def stock_layer_spec(qk_norm=False, latent=False):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Core(DotProductAttention):
        """A core without the two sizes that Megatron's layer passes, with which it would be right."""

        def __init__(self, config, *args, k_channels=None, v_channels=None, **kwargs):
            super().__init__(config, *args, **kwargs)
            assert v_channels in (None, config.kv_channels)

    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm", multi_latent_attention=latent)
    if latent:
        spec.submodules.self_attention.submodules.core_attention = Core
    return spec


def stock_sparse_attention():
    """Megatron's own layer, of local parts."""
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa

    from megatron_cp.megatron.specs import hybrid_stack_spec

    spec = copy.deepcopy(hybrid_stack_spec.submodules.dsa_layer.submodules.self_attention)
    spec.module, spec.submodules.core_attention.module = absorbed_mla.AbsorbedMLASelfAttention, dsa.DSAttention
    return spec


def stock_gdn():
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=parts)


def stock_stack():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def mixer(attention):
        parts = TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
        )
        return ModuleSpec(module=TransformerLayer, submodules=parts)

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=partial(MLP.as_mlp_submodule, submodules=linears),
        mlp_bda=get_bias_dropout_add,
    )
    layers = HybridStackSubmodules(
        gdn_layer=mixer(stock_gdn()),
        attention_layer=mixer(stock_layer_spec().submodules.self_attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    return ModuleSpec(module=HybridStack, submodules=layers)


def each_document_alone(model):
    """Losses in the order of the stream, 0 where there is nothing to predict, and gradients of their sum."""
    packing = Packing(tiny.RAGGED)
    tokens, _ = tiny.stream(0, packing.total)
    losses = torch.zeros(packing.total)
    for start, end in packing.spans():
        if end - start < 2:
            continue
        document = tokens[None, start:end]
        places = torch.arange(end - start)
        hidden = places[None, :] > places[:, None]
        found = model(document, places[None], hidden[None, None], labels=document.roll(-1, 1))[0, :-1]
        found.sum().backward()
        losses[start : end - 1] = found.detach()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, **gradients}


def our_model(name, spec=None, **changes):
    kind, (arguments, settings, attributes) = name.split()[0], MODELS[name]
    config = tiny.configure(kind, **settings | changes)
    for attribute, value in attributes.items():
        setattr(config, attribute, value)
    return tiny.build(kind, config=config, spec=spec, arguments=arguments)


def packed(kind, layout, fault=None):
    """Returns the results of the packed batch, from all ranks; with a fault, to test the comparison."""
    model = our_model(kind)
    batch = tiny.shards(model, tiny.RAGGED, layout, 0)
    params, labels, positions, mask = batch.packed_seq_params, batch.labels, batch.position_ids, batch.loss_mask
    layout = params.plans.layout
    if fault == "rows as positions":
        params.positions = torch.arange(len(params.positions))
    elif fault == "positions of the stream":
        positions = torch.tensor(layout.tokens(dist.get_rank() % layout.cp_size))[None]
    elif fault == "labels of the next row":
        labels = batch.tokens.roll(-1, 1)
    elif fault == "labels of the next document":
        mask = torch.ones_like(mask)
    elif fault:
        forget_boundaries(params.plans, gdn=fault == "leaking gdn")
    losses = model(batch.tokens, positions, None, labels=labels, packed_seq_params=params) * mask
    losses.sum().backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": stream_of(losses[0], layout), **summed(own, layout.cp_size)}


def forget_boundaries(plans, gdn):
    """Plans the layers of one kind as if the batch were one document, over the same ranks and rows."""
    layout = plans.layout
    fragments = [layout.fragments_of(rank) for rank in range(layout.cp_size)]
    one_document = Layout.from_fragments(Packing([layout.packing.total]), fragments)
    for slot in plans._plans:
        if isinstance(slot, LinearSpec) == gdn:
            plans._plans[slot] = slot.plan(one_document)


def stream_of(own, layout):
    """The rows of all ranks in the order of the stream."""
    from megatron.core import parallel_state

    if layout.cp_size == 1:
        return layout.unshard([own.detach()])
    everyone = [None] * layout.cp_size
    dist.all_gather_object(everyone, own.detach(), group=parallel_state.get_context_parallel_group())
    return layout.unshard(everyone)


def summed(gradients, cp_size):
    from megatron.core import parallel_state

    if cp_size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return gradients


def build_layer(name, spec, **changes):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    config = tiny.configure("hybrid", **changes)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups, **LAYERS[name])
    tiny.fill(layer, config)
    return layer


def stock_layer(name):
    return build_layer(name, stock_gdn(), deterministic_mode=True)


def our_layer(name):
    from megatron_cp.megatron.specs import hybrid_stack_spec

    return build_layer(name, hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention)


def rows_and_gradient():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(sum(tiny.RAGGED), 1, HIDDEN, generator=generator) for _ in range(2)]


def layer_on_each_document(layer):
    rows, gradient = rows_and_gradient()
    rows.requires_grad_()
    pieces = [layer(rows[start:end], None) for start, end in Packing(tiny.RAGGED).spans() if end > start]
    return layer_results(layer, torch.cat([out for out, _ in pieces]), pieces[0][1], rows, gradient)


def packed_layer(name, layout):
    rows, gradient = rows_and_gradient()
    layer = our_layer(name)
    params = tiny.shards(layer, tiny.RAGGED, layout, 0).packed_seq_params
    layout, rank = params.plans.layout, dist.get_rank() % params.plans.cp_size
    own = layout.shard(rows, rank).requires_grad_()
    out, bias = layer(own, None, packed_seq_params=params)
    found = layer_results(layer, out, bias, own, layout.shard(gradient, rank))
    placed = {name: stream_of(found.pop(name), layout) for name in ("out", "rows")}
    return placed | summed(found, layout.cp_size)


def layer_results(layer, out, bias, rows, gradient):
    """The output, with the bias that the layer leaves to others, and all gradients."""
    out = out if bias is None else out + bias
    out.backward(gradient)
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "rows": rows.grad, **gradients}


def exchanged_states(ours, stock):
    """Loads each other's states, and says what either would save in Megatron's distributed checkpoints."""
    mine, theirs = ours.state_dict(), stock.state_dict()
    stock.load_state_dict(mine, strict=True)
    ours.load_state_dict(theirs, strict=True)
    shapes = [{name: getattr(value, "shape", None) for name, value in state.items()} for state in (mine, theirs)]
    return shapes, [stored(module) for module in (ours, stock)]


def stored(module):
    """Returns, by name in a distributed checkpoint, the shape of every tensor and this rank's part of it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = module.sharded_state_dict()
    apply_factories(sharded)
    tensors = [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]
    return sorted((t.key, t.global_shape, t.global_offset, t.replica_id) for t in tensors)


@pytest.mark.few
@pytest.mark.parametrize(("place", "layout"), [pytest.param(*PLACES[0], marks=pytest.mark.thorough), *PLACES[1:]])
@pytest.mark.parametrize("kind", [*MODELS, *LAYERS])
def test_a_packed_batch_is_each_document_alone_through_megatrons_modules(ranks, kind, place, layout):
    for found in ranks[: int(place[2:])]:
        rows, gradients = found[kind, place, layout]
        assert rows <= TOLERANCE
        assert gradients <= TOLERANCE


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in FAULTS.items() for fault in faults])
def test_the_comparison_would_see(ranks, kind, fault):
    for found in ranks:
        assert min(found[kind, fault]) > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", [*MODELS, *LAYERS])
def test_states_and_distributed_checkpoints_are_megatrons(ranks, kind):
    for found in ranks:
        (mine, theirs), _ = found["states"][kind]
        assert mine == theirs
    for found in ranks:
        _, (mine, theirs) = found["states"][kind]
        fused = FUSED if kind == "hybrid" else {}
        assert len(mine) > 10, kind
        assert mine == sorted((fused.get(name, name), *rest) for name, *rest in theirs)


# Megatron's names are those of Transformer Engine, which has these norms inside the linear layers after them.
FUSED = {
    "decoder.layers.0.input_layernorm.weight": "decoder.layers.0.self_attention.in_proj.layer_norm_weight",
    "decoder.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.in_proj.layer_norm_weight",
    "decoder.layers.2.input_layernorm.weight": "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.3.pre_mlp_layernorm.weight": "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
}
