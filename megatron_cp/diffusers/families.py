"""Families of diffusion transformers: where each has rows of its image and of its text, and which layers mix rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from megatron_cp.errors import ArgumentError

IMAGE, TEXT = "image", "text"


@dataclass(frozen=True)
class RowAxis:
    """The dimension of a tensor along which it has a row for each token of a stream.

    Attributes:
        ndim: the tensor has rows only if it has so many dimensions; None if it always has.
    """

    stream: str
    dim: int
    ndim: int | None = None


@dataclass(frozen=True)
class Family:
    """A class of models. Module names are paths; `*` in one stands for every module of a list.

    Attributes:
        attentions: the attention modules whose queries and keys are rows of the streams.
        streams: the streams in the order in which these attentions concatenate them.
        inputs: arguments of modules that are split before the call.
        outputs: results of modules, by position, that are split after the call.
        text_mask: the model's argument that tells which rows of text are real; None if it takes none.
        any_mask: True if real rows of text may be anywhere, False if they come first.
        refused: arguments of the model that would add rows or tensors which are not split.
        refused_settings: configuration entries that must be false.
        gathered: the module whose output is gathered.
    """

    attentions: tuple[str, ...]
    streams: tuple[str, ...]
    inputs: Mapping[str, Mapping[str, RowAxis]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, RowAxis]] = field(default_factory=dict)
    text_mask: str | None = None
    any_mask: bool = False
    refused: tuple[str, ...] = ()
    refused_settings: Mapping[str, str] = field(default_factory=dict)
    gathered: str = "proj_out"


_IMAGE, _TEXT = RowAxis(IMAGE, 1), RowAxis(TEXT, 1)
_STEP_OF_ROW = {"timestep": RowAxis(IMAGE, 1, ndim=2)}  # video models may give every row a step of its own

FAMILIES = {
    "FluxTransformer2DModel": Family(
        ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        (TEXT, IMAGE),
        inputs={
            "": {
                "hidden_states": _IMAGE, "encoder_hidden_states": _TEXT, "img_ids": RowAxis(IMAGE, -2),
                "txt_ids": RowAxis(TEXT, -2),
            }
        },
        refused=("controlnet_block_samples", "controlnet_single_block_samples", "joint_attention_kwargs.ip_adapter*"),
    ),
    "WanTransformer3DModel": Family(
        ("blocks.*.attn1",),
        (IMAGE,),
        inputs={"": _STEP_OF_ROW, "blocks.0": {"hidden_states": _IMAGE}},
        outputs={"rope": {0: RowAxis(IMAGE, 1), 1: RowAxis(IMAGE, 1)}},
    ),
    "QwenImageTransformer2DModel": Family(
        ("transformer_blocks.*.attn",),
        (TEXT, IMAGE),
        inputs={
            "transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT},
            "transformer_blocks.*": {"modulate_index": _IMAGE},
        },
        outputs={"pos_embed": {0: RowAxis(IMAGE, 0), 1: RowAxis(TEXT, 0)}},
        text_mask="encoder_hidden_states_mask",
        any_mask=True,
        refused=("controlnet_block_samples", "attention_kwargs.attention_mask"),
    ),
    "LTXVideoTransformer3DModel": Family(
        ("transformer_blocks.*.attn1",),
        (IMAGE,),
        inputs={"": _STEP_OF_ROW, "transformer_blocks.0": {"hidden_states": _IMAGE}},
        outputs={"rope": {0: _IMAGE, 1: _IMAGE}},
    ),
    "HunyuanVideoTransformer3DModel": Family(
        ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        (IMAGE, TEXT),
        inputs={"transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}},
        outputs={"rope": {0: RowAxis(IMAGE, 0), 1: RowAxis(IMAGE, 0)}},
        text_mask="encoder_attention_mask",
        refused_settings={"image_condition_type": "Its first frame's rows have a modulation of their own."},
    ),
    "CogVideoXTransformer3DModel": Family(
        ("transformer_blocks.*.attn1",),
        (TEXT, IMAGE),
        inputs={
            "": {"image_rotary_emb": RowAxis(IMAGE, 0)},
            "transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT},
        },
    ),
}  # fmt: skip


def family_of(model: nn.Module) -> Family:
    """Returns the family of a model's class."""
    name = type(model).__name__
    if name not in FAMILIES:
        remedy = (
            "megatron_cp does not know the rows of other classes. For a model of your own, use "
            "megatron_cp.attention and gather."
        )
        raise ArgumentError("model", name, f"a model of diffusers: {', '.join(FAMILIES)}", remedy)
    family = FAMILIES[name]
    for setting, remedy in family.refused_settings.items():
        if (value := getattr(model.config, setting, None)) is not None:
            raise ArgumentError(f"model.config.{setting}", value, "None", remedy)
    return family


def modules_at(model: nn.Module, path: str) -> list[nn.Module]:
    """Returns the modules that a path names; none where it names a list without modules."""
    found = [model]
    for name in path.split(".") if path else ():
        if name == "*":
            found = [child for module in found for child in module.children()]
        elif name.isdigit():
            found = [module[int(name)] for module in found if len(module) > int(name)]  # type: ignore[index, arg-type]
        else:
            found = [module.get_submodule(name) for module in found]
    return found
