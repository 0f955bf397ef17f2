"""Shapes of single layers of the known models, for `--model` of other commands. No torch in here."""

from __future__ import annotations

import math
from collections import Counter

from megatron_cp.apps.estimate.mixers import AttentionMixer, LinearMixer, Mixer
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.cli import LayerShape
from megatron_cp.plan import CONV1D


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
# size of the state. A convolution alone is a layer of no model: Qwen3-Next's is the one within Gated DeltaNet.
_CONVOLUTIONS = {"qwen3-next": LayerShape(64, 64, 128, 128), "tiny": LayerShape(6, 2, 16, 16)}
MODELS = {
    name: layer_shapes(model) | ({CONV1D.name: {_CONVOLUTIONS[name]: 1}} if name in _CONVOLUTIONS else {})
    for name, model in PRESETS.items()
}
