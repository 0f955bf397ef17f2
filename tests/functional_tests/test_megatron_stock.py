"""Against Megatron's own modules: a packed batch through ours is each document alone through Megatron's, and the sums.

Megatron's attention, Gated DeltaNet, Mamba-2 and stack are what a user of Megatron without this package has, in the
form that knows no packing: one document at a time, `[s, b, h]`. mamba_ssm is for CUDA alone: Megatron's mixer gets the
recurrence of `tests/linear_oracle.py` in its place.
"""

import copy
import importlib.machinery
import sys
import types
from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels.base import StateSpace
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit
from tests.linear_oracle import convolution, state_space
from tests.shared import selected
from tests.stable_topk import first_of_equal

pytest.importorskip("megatron.core")


# What is not as usual in a model: its arguments, its configuration, what is set on that afterwards, and the arguments
# of its linear layers.
Model = namedtuple("Model", ["arguments", "settings", "attributes", "gdn", "mamba"], defaults=[{}] * 5)
YARN = {
    "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32, "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True,
}  # fmt: skip
YARN_OF_LATENTS = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 0.5,
}  # fmt: skip
MODELS = {
    "gpt": Model(),
    "gpt without rope": Model({"position_embedding_type": "learned_absolute"}),
    "gpt with half of rope": Model({"rotary_percent": 0.5}, {"rotary_interleaved": True, "softmax_scale": 0.5}),
    "gpt with yarn": Model({"position_embedding_type": "yarn"}, attributes=YARN),
    "gpt with a layer without rope": Model(attributes={"no_rope_freq": [0, 1]}),
    "gpt with positions of three axes": Model({"position_embedding_type": "mrope"}, {"mrope_section": [2, 1, 1]}),
    # Megatron's core attention takes the size of values from kv_channels, so that it can differ from that of keys.
    "mla": Model(),
    "mla without a rank of queries": Model({}, {"q_lora_rank": None, "qk_layernorm": False}),
    "mla with yarn": Model({}, YARN_OF_LATENTS),
    # The second of three layers takes the choice of the first.
    "dsa_mla": Model({}, {"cp_comm_type": "all_gather", "dsa_indexer_topk_freq": 2}),
    "dsa_mla with a sparse loss": Model({}, {"cp_comm_type": "all_gather", "dsa_indexer_use_sparse_loss": True}),
    "hybrid_both": Model(),
    "hybrid_both with biases, three taps, and D for each feature": Model(
        gdn={"bias": True, "conv_bias": True}, mamba={"d_conv": 3, "D_has_hdim": True}
    ),
    "hybrid_mamba with one group and no norm": Model(
        {}, {"mamba_num_groups": 1, "params_dtype": torch.float64}, mamba={"rmsnorm": False}
    ),
}
SPLIT = ["hybrid_both", "hybrid_both with biases, three taps, and D for each feature"]  # over tensor-parallel ranks
PLACES = [("cp1", "contiguous"), ("cp2", "zigzag"), ("cp2", "random")]
# Of linear layers, by the layout of two ranks.
MODES = {"zigzag": "headwise", "random": "chunkwise"}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(request):
    chosen = selected(request, test_a_packed_batch_is_each_document_alone_through_megatrons_modules)
    chosen = {(case["kind"], case["place"], case["layout"]) for case in chosen}
    return run_ranks(compare, 2, chosen, kind="processes", timeout=limit(200))


def compare(group, chosen):
    found = {}
    stand_in_for_mamba_ssm()
    with pytest.MonkeyPatch.context() as patch:
        replace_cuda_kernels(patch)
        tiny.start(tp=2)
        found["tensor parallel"] = {name: [stored(our_model(name)), stored(stock_model(name))] for name in SPLIT}
        tiny.start()
        stock = {name: stock_model(name) for name in MODELS}
        found["states"] = {name: exchanged_states(our_model(name), stock[name]) for name in MODELS}
        found["inference"] = [infer()]
        alone = {name: each_document_alone(stock[name]) for name in list(MODELS)[group.rank :: group.size]}
    everyone = [None] * group.size
    dist.all_gather_object(everyone, alone)
    expected = {name: results for one in everyone for name, results in one.items()}
    for place, layout in PLACES:
        tiny.start(cp=int(place[2:]))
        if place == "cp1" and group.rank > 0:  # which would do what the first does
            continue
        for kind in MODELS:
            if (kind, place, layout) in chosen:
                found[kind, place, layout] = tiny.distances(packed(kind, layout), expected[kind])
    try:
        infer()
    except NotImplementedError as error:
        found["inference"].append(str(error))
    return found


def replace_cuda_kernels(patch):
    """Replaces the CUDA code of Megatron's modules that our patch does not: fla's normalisation is a Triton kernel."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patch.setattr(common, "l2norm", lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6))
    patch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
    patch.setattr(torch.Tensor, "topk", first_of_equal(torch.Tensor.topk))


def stand_in_for_mamba_ssm():
    """Has Megatron's mixer imported anew, with packages by the names that it imports."""
    from megatron.core.ssm import mamba_mixer

    assert not mamba_mixer.HAVE_MAMBA_SSM
    contents = {
        "mamba_ssm": {"__version__": "2.3.2"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_split_conv1d_scan_combined": split_conv1d_scan,
            "mamba_chunk_scan_combined": None,
        },
        "causal_conv1d": {"__version__": "1.7.0", "causal_conv1d_fn": None},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
    from megatron.core.utils import get_mamba_version, is_causal_conv1d_min_version

    importlib.reload(mamba_mixer)  # classes that are derived from the old one have its functions, and these its names
    mamba_mixer.MAMBA_HAS_STATE_DTYPE = False
    assert mamba_mixer.HAVE_MAMBA_SSM
    # Megatron remembers the versions. Nothing else is to take these for the packages.
    get_mamba_version()
    is_causal_conv1d_min_version("1.4.0")
    for name in contents:
        del sys.modules[name]


class RMSNorm(nn.Module):
    """mamba_ssm's, without the gate, which its fused kernel has applied."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def split_conv1d_scan(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups, norm_before_gate,  # noqa: N803
    seq_idx,
):  # fmt: skip
    """`mamba_split_conv1d_scan_combined` of one document: `[1, l, z | x | B | C | dt]` to y silu(z)."""
    assert (activation, norm_before_gate, len(zxbcdt), seq_idx) == ("silu", False, 1, None)
    heads = len(A)
    inner = heads * (D.shape[1] if D.ndim == 2 else headdim)
    z, xbc, dt = zxbcdt[0].split([inner, zxbcdt.shape[2] - inner - heads, heads], -1)
    xbc = convolution(xbc, conv1d_weight, conv1d_bias, [len(xbc)], silu=True)
    x, b, c = xbc.tensor_split([inner, (inner + xbc.shape[1]) // 2], -1)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
    inputs = StateSpace(x, F.softplus(dt + dt_bias), A, b, c)
    y = state_space(inputs, torch.arange(heads) // (heads // ngroups), 1.0, [len(x)])
    return ((y + (D if D.ndim == 2 else D[:, None]) * x).flatten(1) * F.silu(z))[None]


def stock_model(name):
    if name.startswith("hybrid"):
        spec = stock_stack()
    else:
        spec = stock_layer_spec(MODELS[name].settings.get("qk_layernorm", True), name.startswith(("mla", "dsa")))
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
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_cp.megatron.specs import hybrid_stack_spec

    spec = copy.deepcopy(hybrid_stack_spec.submodules.dsa_layer.submodules.self_attention)
    spec.module, spec.submodules.core_attention.module = absorbed_mla.AbsorbedMLASelfAttention, dsa.DSAttention
    spec.submodules.q_layernorm = spec.submodules.kv_layernorm = WrappedTorchNorm  # which dev does not choose itself
    return spec


def stock_gdn():
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=parts)


def stock_mamba():
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(module=MambaMixer, submodules=parts)


def stock_stack():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
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
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=stock_mamba(), mamba_bda=get_bias_dropout_add)
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
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
        positions = places[None] if axes_of(model) is None else axes_of(model)[:, None, start:end]
        hidden = places[None, :] > places[:, None]
        found = model(document, positions, hidden[None, None], labels=document.roll(-1, 1))[0, :-1]
        found.sum().backward()
        losses[start : end - 1] = found.detach()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, **gradients}


def axes_of(model):
    """Positions of three axes for all tokens, or None for a model that has one."""
    if getattr(model, "position_embedding_type", None) != "mrope":
        return None
    return torch.randint(90, (3, sum(tiny.RAGGED)), generator=torch.Generator().manual_seed(0))


def our_model(name, spec=None, **changes):
    from megatron_cp.megatron.specs import hybrid_stack_spec

    kind, model = name.split()[0], MODELS[name]
    config = tiny.configure(kind, **model.settings | changes)
    for attribute, value in model.attributes.items():
        setattr(config, attribute, value)
    if kind.startswith("hybrid"):
        spec = copy.deepcopy(hybrid_stack_spec if spec is None else spec)
        spec.submodules.gdn_layer.submodules.self_attention.params = model.gdn
        spec.submodules.mamba_layer.submodules.mixer.params = model.mamba
    return tiny.build(kind, config=config, spec=spec, arguments=model.arguments)


def packed(name, layout):
    """Returns the results of the packed batch, from all ranks."""
    mode = {"linear_cp_mode": MODES[layout]} if name.startswith("hybrid") and layout in MODES else {}
    model = our_model(name, **mode)
    batch = tiny.shards(model, tiny.RAGGED, layout, 0, position_ids=axes_of(model))
    params, layout = batch.packed_seq_params, batch.packed_seq_params.plans.layout
    losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=params)
    losses = losses * batch.loss_mask
    losses.sum().backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": stream_of(losses[0], layout), **summed(own, layout.cp_size)}


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


def infer():
    """True if both mixers infer the same bits."""
    from megatron.core.inference.contexts import StaticInferenceContext

    context, rows = StaticInferenceContext(1, 8), torch.randn(5, 1, tiny.SETTINGS["hidden_size"])
    with torch.no_grad():
        makes = our_model, stock_model
        return torch.equal(*(make("hybrid_both").decoder.layers[0].mixer(rows, context)[0] for make in makes))


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
@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_batch_is_each_document_alone_through_megatrons_modules(ranks, kind, place, layout):
    for found in ranks[: int(place[2:])]:
        errors = found[kind, place, layout]
        assert all(error <= TOLERANCE for error in errors.values()), list(errors.items())[:4]


# Megatron's names are those of Transformer Engine, which has these norms inside the linear layers after them.
FUSED = {
    "decoder.layers.0.norm.weight": "decoder.layers.0.mixer.in_proj.layer_norm_weight",
    "decoder.layers.1.norm.weight": "decoder.layers.1.mixer.in_proj.layer_norm_weight",
    "decoder.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.in_proj.layer_norm_weight",
    "decoder.layers.2.input_layernorm.weight": "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.3.pre_mlp_layernorm.weight": "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
}


@pytest.mark.parametrize("kind", MODELS)
def test_states_and_distributed_checkpoints_are_megatrons(ranks, kind):
    for found in ranks:
        (mine, theirs), checkpoints = found["states"][kind]
        assert mine == theirs
        fused = FUSED if kind.startswith("hybrid") else {}
        for own, stock in (checkpoints, *([found["tensor parallel"][kind]] if kind in SPLIT else [])):
            assert len(own) > 10, kind
            assert own == sorted((fused.get(name, name), *rest) for name, *rest in stock)


def test_mambas_inference_is_megatrons_on_one_rank_and_refused_on_others(ranks):
    for found in ranks:
        assert found["inference"] == [True, "Mamba has inference only at --context-parallel-size 1"]
