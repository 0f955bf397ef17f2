"""Whole models as data: slots and runs, parameters, saved activations."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron_cp.apps.estimate import MODELS, layer_shapes
from megatron_cp.apps.estimate.mixers import AttentionMixer, LinearMixer, gated_delta_net, kimi_delta_attention, mamba2
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.cli.shapes import LayerShape
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.kinds import KINDS
from megatron_cp.planner.batch import AttentionSpec, BatchPlan, LinearSpec
from tests.refusals import rejects

ATTENTION = AttentionMixer(4, 2, 16, 16)
LINEAR = gated_delta_net(heads=4, key_heads=2, head_dim=16, value_head_dim=8)
MIXTURE = MLP(32, experts=8, experts_per_token=2, shared_size=48, shared_gate=True)


def model_of(*blocks, tied=True):
    return ModelSpec("small", 64, 100, tied, blocks)


def test_every_preset_has_its_source_and_the_parameters_counted_elsewhere():
    assert all(model.source and model.name == name for name, model in PRESETS.items())
    assert PRESETS["llama3-70b"].parameters == 70_553_706_496  # of the checkpoint; others are read from their files
    # The counts are of all products and convolutions of Kimi-Linear, and of mixers and mixtures of Qwen3-Next.
    kimi, qwen = PRESETS["kimi-linear"], PRESETS["qwen3-next"]
    norms = (2 * 27 + 1) * 2304 + 7 * 512
    assert kimi.active_parameters - norms - 20 * (32 + 4096 + 128) - 26 * 256 == 3_106_750_464
    norms = (2 * 48 + 1) * 2048
    assert qwen.active_parameters - norms - 151936 * 2048 == 3_252_400_896


def test_shapes_of_single_layers_are_those_of_the_presets():
    assert {name: MODELS[name] for name in ("qwen3-next", "kimi-linear", "nemotron-h", "llama3-8b", "tiny")} == {
        "qwen3-next": {
            "attention": {LayerShape(16, 2, 256, 256): 12},
            "gdn": {LayerShape(32, 16, 128, 128): 36},
            "conv1d": {LayerShape(64, 64, 128, 128): 1},
        },
        "kimi-linear": {
            "attention": {LayerShape(32, 32, 192, 128, latent=(64, 512)): 7}, "kda": {LayerShape(32, 32, 128, 128): 20}
        },
        "nemotron-h": {"attention": {LayerShape(32, 8, 128, 128): 4}, "mamba": {LayerShape(128, 8, 128, 64): 24}},
        "llama3-8b": {"attention": {LayerShape(32, 8, 128, 128): 32}},
        "tiny": {
            **{name: {LayerShape(6, 2, 16, 16): 1} for name in ("attention", *KINDS)},
            "gdp": {LayerShape(6, 2, 16, 16, num_householder=3): 1},
        },
    }  # fmt: skip
    unlike = model_of(Block(ATTENTION), Block(replace(ATTENTION, qk_norm=True)))
    assert layer_shapes(unlike) == {"attention": {LayerShape(4, 2, 16, 16): 2}}  # which differ in norms only


def test_slots_are_in_order_and_know_their_runs():
    slots = PRESETS["qwen3-next"].slots()
    linear = LinearSpec("gdn", 32, 16, 128, 128)
    assert slots[:4] == (*[replace(linear, hidden_size=2048, run=(linear,) * 3)] * 3, AttentionSpec(16, 2, 256, 256))
    assert sorted(Counter(slots).values()) == [12, 36]
    slots = PRESETS["nemotron-h"].slots()
    runs = [
        len(next(run).run)
        for is_linear, run in itertools.groupby(slots, lambda s: isinstance(s, LinearSpec))
        if is_linear
    ]
    assert runs == [4, 5, 5, 5, 5]
    *linear, attention = PRESETS["tiny"].slots()
    assert [slot.kind for slot in linear] == ["gdn", "kda", "mamba"]
    assert all([other.kind for other in slot.run] == ["gdn", "kda", "mamba"] for slot in linear)
    assert attention == AttentionSpec(6, 2, 16, 16)
    layout = Layout.contiguous(Packing([70, 1, 130]), 3)
    plans = BatchPlan(layout, PRESETS["tiny"].slots())
    assert [plan.kind for plan in plans.plans if plan.attend is None] == ["gdn", "kda", "mamba"]
    assert len(plans.plans) == 4


def test_choices_and_masks_are_those_of_their_slots():
    choices = {"head_chunks": 2, "transport": "pairwise", "codec": "fp8"}
    model = model_of(Block(LINEAR), Block(ATTENTION))
    linear, attention = model.slots(scheme="a2a+p2p", ulysses_degree=2, mode="headwise", **choices)
    assert attention == AttentionSpec(4, 2, 16, 16, scheme="a2a+p2p", ulysses_degree=2, **choices)
    own = LinearSpec("gdn", 4, 2, 16, 8, mode="headwise", **choices)
    assert linear == replace(own, hidden_size=64, run=(own,))
    model = model_of(Block(replace(ATTENTION, mask="window:7,0")), Block(ATTENTION))
    assert [slot.mask for slot in model.slots()] == ["window:7,0", "causal"]
    model = PRESETS["qwen3-next"]
    masked = model.with_mask("strided")
    masks = [slot.mask for slot in masked.slots() if isinstance(slot, AttentionSpec)]
    assert masks == ["strided"] * 12
    assert masked.with_mask("causal") == model
    rejects("mask: got 'strided:6'", model.with_mask, "strided:6")
    rejects("scheme: got 'rong'", PRESETS["tiny"].slots, scheme="rong")
    rejects("mode: got 'a2a'", PRESETS["tiny"].slots, mode="a2a")
    rejects("transport: got 'pigeon'", PRESETS["tiny"].slots, transport="pigeon")


class SwiGLU(torch.autograd.Function):
    """Saves its input alone, as Megatron's."""

    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


class RotaryEmbedding(torch.autograd.Function):
    """Saves nothing of its input."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(-1)


def plain_block(x, mixer, size, weights):
    """A block of torch's own operations: norm, attention, norm and MLP, each with its residual."""
    hidden_size = x.shape[1]
    widths = (mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.value_head_dim)
    normed = F.layer_norm(x, (hidden_size,))
    qkv = F.linear(normed, weights(sum(widths), hidden_size))
    q, k, v = (part.unflatten(-1, (-1, mixer.head_dim)).clone() for part in qkv.split(widths, -1))
    if mixer.qk_norm:
        q, k = (F.layer_norm(part, (mixer.head_dim,)) for part in (q, k))
    q, k = RotaryEmbedding.apply(q), RotaryEmbedding.apply(k)
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
    if mixer.output_gate:
        out = out * torch.sigmoid(F.linear(normed, weights(out.shape[1], hidden_size)))
    x = x + F.linear(out, weights(hidden_size, out.shape[1]))
    both = F.linear(F.layer_norm(x, (hidden_size,)), weights(2 * size, hidden_size))
    return x + F.linear(SwiGLU.apply(both), weights(hidden_size, size))


def saved_bytes(function, tokens, hidden_size):
    """Bytes that a function of hidden states saves for backward, but for weights: each storage once."""
    parameters, storages = set(), {}

    def weights(*shape):
        weight = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        parameters.add(weight.untyped_storage().data_ptr())
        kept.append(weight)
        return weight

    def pack(tensor):
        kept.append(tensor)
        if tensor.untyped_storage().data_ptr() not in parameters:
            storages[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    kept = []
    x = torch.zeros(tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept.append(function(x, weights))
    return sum(storages.values())


@pytest.mark.parametrize("output_gate", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (4, 2)])
def test_a_block_saves_what_torch_saves(shape, qk_norm, output_gate):
    mixer = AttentionMixer(*shape, 16, 16, qk_norm=qk_norm, output_gate=output_gate)
    tokens, size = 32, 96
    measured = saved_bytes(lambda x, weights: plain_block(x, mixer, size, weights), tokens, 64)
    # A norm keeps the mean and the deviation of each row; attention its output and log-sum-exp, which its plan counts.
    rows = 2 + (sum(shape) if qk_norm else 0)
    others = rows * 2 * 2 + 64 * 2 + mixer.heads * 4
    assert measured == tokens * (Block(mixer, MLP(size)).saved(64, "none") + others)


@pytest.mark.parametrize(
    ("block", "none", "selective"),
    [
        (Block(ATTENTION), 2 * 64 + 64 + 32 + 32, 64 + 64 + 32 + 32),
        # Queries and keys before their norms too, and the gate beside the output of attention that it multiplies.
        (Block(replace(ATTENTION, qk_norm=True)), 2 * 64 + 128 + 64 + 32, 64 + 128 + 64 + 32),
        (Block(replace(ATTENTION, output_gate=True)), 2 * 64 + 128 + 2 * 64, 64 + 128 + 2 * 64),
        (Block(ATTENTION, post_norms=True), 3 * 64 + 64 + 32 + 32, 2 * 64 + 64 + 32 + 32),
        (Block(replace(ATTENTION, kv_rank=24, shared_key_dim=4)), 2 * 64 + 128 + 24, 64 + 128 + 24),
        (Block(replace(ATTENTION, kv_rank=24, query_rank=20, qk_norm=True)), 2 * 64 + 128 + 2 * 44, 64 + 128 + 2 * 44),
        # q, k, v, beta and alpha, the gate and what the gated norm makes, which the delta rule alone makes again.
        (Block(LINEAR), 2 * 64 + 3 * 32 + 2 * 4 + 2 * 32, 64 + 3 * 32 + 2 * 4 + 32),
        (Block(mamba2(6, 2, 5, 8)), 2 * 64 + 48 + 20 + 6 + 2 * 48, 64 + 48 + 20 + 6 + 2 * 48),
        (
            Block(kimi_delta_attention(4, 4, 16, decay_rank=8, gate_rank=10)),
            2 * 64 + 4 * 64 + 4 + 18 + 2 * 64,
            64 + 4 * 64 + 4 + 18 + 64,
        ),
        (Block(mlp=MLP(32)), 2 * 64 + 3 * 32, 64 + 3 * 32),
        (Block(mlp=MLP(32, gated=False)), 2 * 64 + 2 * 32, 64 + 2 * 32),
        # Scores are of four bytes, two features.
        (Block(mlp=MIXTURE), 2 * 64 + 2 * 8 + 2 * (64 + 3 * 32) + 3 * 48, 64 + 2 * 8 + 2 * (64 + 2 * 32) + 3 * 48),
        (Block(ATTENTION, MLP(32)), 4 * 64 + 128 + 3 * 32, 2 * 64 + 128 + 3 * 32),
    ],
)
def test_saved_features_are_those_of_the_formula(block, none, selective):
    model = model_of(block, block)
    assert [block.saved(64, how) for how in ("none", "selective", "full")] == [2 * none, 2 * selective, 2 * 64]
    assert model.head_bytes == 2 * 2 * 64 + 4 * 100
    assert model.recomputed_bytes("none") == 0
    assert model.recomputed_bytes("selective") == 2 * (none - selective)
    assert model.recomputed_bytes("full") == 2 * (none - 64)


@pytest.mark.parametrize("mlp", [MLP(32), MLP(32, gated=False), MIXTURE])
def test_an_mlp_in_rows_saves_its_input_with_any_recomputation(mlp):
    block, alone = Block(ATTENTION, mlp), Block(ATTENTION)
    for how, features in (("none", 2 * 64), ("selective", 2 * 64), ("full", 0)):
        assert block.saved(64, how, mlp_in_rows=True) == alone.saved(64, how) + 2 * features
    model = model_of(block)
    assert model.recomputed_bytes("full", mlp_in_rows=True) == block.saved(64, "none", mlp_in_rows=True) - 2 * 64


def test_checkpoints_of_operations_save_every_second_product():
    """torchtitan's policy counts q, k, v, o, gate, up and down, and saves the first, the third and so on."""
    block = Block(ATTENTION, MLP(32))
    q, k, v, o, gate, up, down = (64, 64), (64, 32), (64, 32), (64, 64), (64, 32), (64, 32), (32, 64)
    assert sum(n * m for n, m in (q, k, v, o, gate, up, down)) == block.weights(64)
    assert block.saved(64, "ops") == 2 * (64 + sum(m for _, m in (q, v, gate, down)))


def test_rejects_checkpoints_of_operations_in_other_layers():
    gated, latent = (replace(ATTENTION, **given) for given in ({"output_gate": True}, {"query_rank": 8}))
    mlp = MLP(32)
    for other in (Block(ATTENTION), Block(ATTENTION, MIXTURE), Block(LINEAR, mlp), Block(ATTENTION, MLP(8, False)),
                  Block(gated, mlp), Block(latent, mlp), Block(mlp=mlp)):  # fmt: skip
        rejects("^recompute: got 'ops'", other.saved, 64, "ops")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionMixer(0, 1, 16, 16), "heads: got 0"),
        (lambda: AttentionMixer(4, 3, 16, 16), "kv_heads: got 3; allowed: a divisor of heads, 4"),
        (lambda: replace(ATTENTION, mask="strided-ish"), "mask: got 'strided-ish'"),
        (lambda: LinearMixer("gdn", 4, 3, 16, 16), "key_heads: got 3; allowed: a divisor of heads, 4"),
        (lambda: MLP(0), "intermediate_size: got 0"),
        (lambda: MLP(8, experts=4), "experts_per_token: got 0; allowed: an integer from 1 to 4"),
        (lambda: model_of(), "blocks: got 0; allowed: an integer from 1 to 10000"),
        (lambda: replace(PRESETS["tiny"], vocab_size=0), "vocab_size: got 0; allowed: an integer of at least 1"),
    ],
)
def test_rejects_sizes_that_cannot_be(make, message):
    rejects(message, make)
