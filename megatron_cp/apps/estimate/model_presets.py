"""`PRESETS`: known models by name, with the source of their numbers; `MODELS`: the shapes of their single layers.

No torch in here.

The sizes are those of the published configurations. A test proves that all parameters of the published checkpoints are
counted, and no others.
"""

from __future__ import annotations

import math
from collections import Counter

from megatron_cp.apps.estimate.mixers import (
    AttentionMixer,
    LinearMixer,
    Mixer,
    gated_delta_net,
    kimi_delta_attention,
    mamba2,
)
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.cli import LayerShape
from megatron_cp.plan import CONV1D, GDN2, GDP


def _llama3(name: str, hidden_size: int, layers: int, heads: int, intermediate_size: int) -> ModelSpec:
    block = Block(AttentionMixer(heads, 8, 128, 128), MLP(intermediate_size))
    source = f"published config.json of meta-llama/Meta-Llama-3-{name.rpartition('-')[2].upper()}"
    return ModelSpec(name, hidden_size, 128256, False, (block,) * layers, source)


def _qwen3_8b() -> ModelSpec:
    block = Block(AttentionMixer(32, 8, 128, 128, qk_norm=True), MLP(12288))
    return ModelSpec("qwen3-8b", 4096, 151936, False, (block,) * 36, "published config.json of Qwen/Qwen3-8B")


def _qwen3_next() -> ModelSpec:
    experts = MLP(512, experts=512, experts_per_token=10, shared_size=512, shared_gate=True)
    linear = Block(gated_delta_net(heads=32, key_heads=16, head_dim=128, value_head_dim=128), experts)
    full = Block(AttentionMixer(16, 2, 256, 256, output_gate=True, qk_norm=True), experts)
    source = "published config.json of Qwen/Qwen3-Next-80B-A3B-Instruct; multi-token prediction left out"
    return ModelSpec("qwen3-next", 2048, 151936, False, (linear, linear, linear, full) * 12, source)


def _kimi_linear() -> ModelSpec:
    experts = MLP(1024, experts=256, experts_per_token=8, shared_size=1024, router_bias=True)
    # A key is 128 features of its own and 64 that all heads share.
    latent = AttentionMixer(32, 32, 192, 128, qk_norm=True, kv_rank=512, shared_key_dim=64)
    linear = kimi_delta_attention(heads=32, key_heads=32, head_dim=128, decay_rank=128, gate_rank=128)
    full_layers = {4, 8, 12, 16, 20, 24, 27}  # counted from 1, as full_attn_layers is
    blocks = tuple(
        Block(latent if layer in full_layers else linear, MLP(9216) if layer == 1 else experts)
        for layer in range(1, 28)
    )
    source = "published config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct"
    return ModelSpec("kimi-linear", 2304, 163840, False, blocks, source)


def _nemotron_h() -> ModelSpec:
    layers = {
        "M": Block(mamba2(heads=128, groups=8, state=128, head_dim=64)),
        "*": Block(AttentionMixer(32, 8, 128, 128)),
        "-": Block(mlp=MLP(21504, gated=False)),
    }
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # hybrid_override_pattern
    source = "published config.json of nvidia/Nemotron-H-8B-Base-8K"
    return ModelSpec("nemotron-h", 4096, 131072, False, tuple(layers[symbol] for symbol in pattern), source)


def _tiny() -> ModelSpec:
    mlp = MLP(256)
    linear = (
        gated_delta_net(heads=6, key_heads=2, head_dim=16, value_head_dim=16),
        kimi_delta_attention(heads=6, key_heads=2, head_dim=16, decay_rank=16, gate_rank=16),
        mamba2(heads=6, groups=2, state=16, head_dim=16),
    )
    blocks = (*(Block(mixer, mlp) for mixer in linear), Block(AttentionMixer(6, 2, 16, 16), mlp))
    return ModelSpec("tiny", 96, 256, True, blocks, "made up, for trying things out: a layer of every kind")


_MODELS = (
    _qwen3_next(),
    _kimi_linear(),
    _nemotron_h(),
    _llama3("llama3-8b", hidden_size=4096, layers=32, heads=32, intermediate_size=14336),
    _llama3("llama3-70b", hidden_size=8192, layers=80, heads=64, intermediate_size=28672),
    _qwen3_8b(),
    _tiny(),
)

PRESETS = {model.name: model for model in _MODELS}


def layer_shapes(model: ModelSpec) -> dict[str, dict[LayerShape, int]]:
    """Returns the shapes of the layers of each kind in order, with the number of the layers that have each."""
    shapes: dict[str, dict[LayerShape, int]] = {}
    for mixer, layers in Counter(block.mixer for block in model.blocks).items():
        if mixer is not None:
            of_kind = shapes.setdefault(mixer.layer, {})
            shape = _shape(mixer)  # mixers that differ in their projections alone have one
            of_kind[shape] = of_kind.get(shape, 0) + layers
    return shapes


def _shape(mixer: Mixer) -> LayerShape:
    if isinstance(mixer, LinearMixer):
        return LayerShape(mixer.heads, mixer.key_heads, mixer.head_dim, mixer.value_head_dim, mixer.conv_width)
    assert isinstance(mixer, AttentionMixer)
    scale = mixer.softmax_scale
    if scale is not None and math.isclose(scale, mixer.head_dim**-0.5):
        scale = None
    return LayerShape(
        mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.value_head_dim, mask=mixer.mask, learned_sink=mixer.sink,
        softcap=mixer.softcap, softmax_scale=scale, latent=mixer.latent,
    )  # fmt: skip


# Shapes of single layers of the known models. Of mamba the groups are those of B and C, and the second number is the
# size of the state. Some kinds are layers of no known model; the convolution alone of Qwen3-Next is that within its
# Gated DeltaNet.
_OF_NO_MODEL = {
    "qwen3-next": {CONV1D.name: {LayerShape(64, 64, 128, 128): 1}},
    "tiny": {
        **{kind.name: {LayerShape(6, 2, 16, 16): 1} for kind in (CONV1D, GDN2)},
        GDP.name: {LayerShape(6, 2, 16, 16, num_householder=3): 1},
    },
}
MODELS = {name: layer_shapes(model) | _OF_NO_MODEL.get(name, {}) for name, model in PRESETS.items()}
