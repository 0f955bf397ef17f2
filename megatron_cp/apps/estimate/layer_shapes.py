"""Shapes of single layers of the known models, for `--model` of other commands. No torch in here."""

from __future__ import annotations

from megatron_cp.apps.estimate.mixers import AttentionMixer, LinearMixer
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.cli import LayerShape
from megatron_cp.plan import CONV1D


def layer_shapes(model: ModelSpec) -> dict[str, LayerShape]:
    """Returns the shape of the first layer of each kind."""
    shapes: dict[str, LayerShape] = {}
    for mixer in dict.fromkeys(block.mixer for block in model.blocks):
        match mixer:
            case AttentionMixer(heads=heads, kv_heads=groups):
                shape = LayerShape(heads, groups, mixer.head_dim, mixer.value_head_dim)
            case LinearMixer(heads=heads, key_heads=groups):
                shape = LayerShape(heads, groups, mixer.head_dim, mixer.value_head_dim, mixer.conv_width)
            case _:
                continue
        shapes.setdefault(mixer.layer, shape)
    return shapes


# Shapes of single layers of the known models. Of mamba the groups are those of B and C, and the second number is the
# size of the state. A convolution alone is a layer of no model: Qwen3-Next's is the one within Gated DeltaNet.
_CONVOLUTIONS = {"qwen3-next": LayerShape(64, 64, 128, 128), "tiny": LayerShape(6, 2, 16, 16)}
MODELS = {
    name: layer_shapes(model) | ({CONV1D.name: _CONVOLUTIONS[name]} if name in _CONVOLUTIONS else {})
    for name, model in PRESETS.items()
}
