"""The layers that a command's options describe: the shapes of a model's layers, with given options in their place."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.cli.applications import application
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask, Packing
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import REDISTRIBUTE
from megatron_cp.planner.capabilities import require

TINY = "tiny"  # the model of layers for which no model is given


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer, and what its softmax does.

    Attributes:
        heads, groups: query or value heads, and the groups of keys that they read.
        head_dim, value_dim: features of a key and of a value head.
        conv_width: taps of a linear layer's convolution.
        num_householder: steps of a token of gdp.
        mask, learned_sink, softcap, softmax_scale: of attention; see `attention`.
        latent: features of the shared key and of the latent from which keys and values are made, where these could
            travel in their place; else None.
        layout_mask: the mask that the balanced layout is made for; None for `mask`.
    """

    heads: int
    groups: int
    head_dim: int
    value_dim: int
    conv_width: int = 4
    mask: str = "causal"
    learned_sink: bool = False
    softcap: float = 0.0
    softmax_scale: float | None = None
    latent: tuple[int, int] | None = None
    layout_mask: str | None = None
    num_householder: int = 1

    @property
    def softmax(self) -> list[str]:
        """The mask, and what else differs from a plain softmax, in words."""
        return [
            self.mask,
            *(["learned sink"] if self.learned_sink else []),
            *([f"softcap {self.softcap:g}"] if self.softcap else []),
            *([f"softmax-scale {self.softmax_scale:.4g}"] if self.softmax_scale is not None else []),
        ]


def known_shapes(model: str) -> dict[str, dict[LayerShape, int]]:
    """Returns the shapes of a model's layers of each kind, with the number of the layers that have each.

    Args:
        model: a preset's name, a `config.json`, or Megatron's flags in one string or a file.

    Raises:
        ArgumentError: an unknown model, or one that cannot be read.
    """
    estimate = application("estimate")
    found: dict[str, dict[LayerShape, int]]
    found = estimate.MODELS.get(model) or estimate.layer_shapes(estimate.read_model(model))
    return found


def hidden_size_of(model: str) -> int:
    """Returns the number of features of a token in a model."""
    size: int = application("estimate").read_model(model).hidden_size
    return size


def layers_of(args: argparse.Namespace) -> dict[LayerShape, int]:
    """Returns the shapes of the layers that the options describe, with the number of layers of each.

    They are those of `--layer` in `--model`, one after another as in the model, with given options in place of the
    model's values.

    Raises:
        ArgumentError: a model without such a layer, or options that such layers do not have.
    """
    found: dict[LayerShape, int] = {}
    for known, layers in _known(args).items():
        shape = _with_options(args, known)
        found[shape] = found.get(shape, 0) + layers
    if len({shape.mask for shape in found}) > 1:  # one batch has one layout, which jobs make for causal layers
        found = {replace(shape, layout_mask="causal"): layers for shape, layers in found.items()}
    return found


def _known(args: argparse.Namespace) -> dict[LayerShape, int]:
    require("layer", args.layer)
    model = args.model or TINY
    shapes = known_shapes(model)
    if args.layer not in shapes:
        models = application("estimate").MODELS
        with_one = sorted(name for name, layers in models.items() if args.layer in layers)
        raise ArgumentError("--model", model, " or ".join(with_one) or f"none, since no known model has {args.layer}")
    for name in _not_of(args.layer):
        if getattr(args, name) not in (None, False):
            groups = _groups_of(args.layer)
            raise ArgumentError(
                f"--{name.replace('_', '-')}",
                getattr(args, name),
                f"nothing, since {args.layer} has none",
                f"What its heads share is --{groups.replace('_', '-')}." if groups and name in _SHARED else "",
            )
    return shapes[args.layer]


def _groups_of(layer: str) -> str | None:
    """Returns the option with the number of groups that a layer's heads share; None if they share nothing."""
    return KINDS[layer].argument("groups") if layer in KINDS else "kv_heads"


def _with_options(args: argparse.Namespace, known: LayerShape) -> LayerShape:
    """Returns the shape with the given options in place of its values."""
    groups = _groups_of(args.layer)
    heads = args.heads or known.heads
    # Heads that are given alone are their own groups, unless the model's groups divide them.
    fallback = known.groups if heads % known.groups == 0 else heads
    shared = (getattr(args, groups) or fallback) if groups else heads
    head_dim = args.head_dim or known.head_dim
    value_dim = args.value_dim or (head_dim if args.head_dim else known.value_dim)
    if args.layer in KINDS and KINDS[args.layer].argument("value_dim") == "head_dim":
        head_dim, value_dim = args.state or known.head_dim, args.head_dim or known.value_dim
    softmax = {name: value for name in _OF_SOFTMAX if (value := getattr(args, name)) is not None}
    if args.latent_mode is not None and known.latent is None:
        allowed = "only with a --model whose keys and values are made of latents, such as kimi-linear"
        raise ArgumentError("--latent-mode", args.latent_mode, allowed)
    width = args.conv_width or known.conv_width
    return replace(
        known, heads=heads, groups=shared, head_dim=head_dim, value_dim=value_dim, conv_width=width,
        num_householder=args.num_householder or known.num_householder, **softmax,
    )  # fmt: skip


def hidden_size_for(args: argparse.Namespace, shape: LayerShape) -> int | None:
    """Returns the model's hidden size; None if it is unknown, or if the layer cannot be redistributed."""
    if args.layer == "attention":
        return None
    known = hidden_size_of(args.model) if args.model else None
    return args.hidden_size or known or (shape.heads * shape.value_dim if args.scheme == REDISTRIBUTE.name else None)


def described_layer(args: argparse.Namespace, shape: LayerShape, layers: dict[LayerShape, int]) -> str:
    """Returns the sizes of one of the layers that the options describe, and where they come from."""
    fields = {"heads": shape.heads, "groups": shape.groups, "key_dim": shape.head_dim, "value_dim": shape.value_dim}
    fields["steps"] = shape.num_householder
    flags = {"heads": "heads", "groups": "kv_heads", "key_dim": "head_dim", "value_dim": "value_dim"}
    if args.layer in KINDS:
        spelled = {name: flag for flag, name in _SIZES.items()}
        flags = {each.field: spelled.get(each.name, each.name) for each in KINDS[args.layer].arguments}
        if not KINDS[args.layer].has_state:  # its channels are those of all heads
            flags = {"heads": "heads", "value_dim": "head_dim"}
    sizes = {flag: fields[field] for field, flag in flags.items()}
    if args.layer in KINDS:
        sizes["conv_width"] = shape.conv_width
    text = ", ".join(f"{flag.replace('_', '-')} {value}" for flag, value in sizes.items())
    softmax = "".join(f", {word}" for word in shape.softmax if word != "causal")
    which = f"; {layers[shape]} of the model's {sum(layers.values())} such layers" if len(layers) > 1 else ""
    lines = [f"layer: {args.layer}, {text}{softmax}{_origin(args, sizes, which)}", *_replaced(args)]
    if shape.latent is not None and args.latent_mode is None:
        shared, rank = shape.latent
        lines.append(
            f"latents: keys and values travel, made of {rank} + {shared} features a token, as in jobs that do not ask "
            "for latents; --latent-mode auto lets latents travel where that is faster"
        )
    return "\n".join(lines)


def _origin(args: argparse.Namespace, sizes: Collection[str], which: str) -> str:
    """Returns where the sizes come from, in brackets; the empty string if all are given."""
    given = [flag for flag in sizes if getattr(args, flag)]
    missing = [flag.replace("_", "-") for flag in sizes if flag not in given]
    if args.model:
        typed = " and ".join(f"--{flag.replace('_', '-')}" for flag in given)
        return f" (from --model{which}{f', with {typed} as given' if given else ''})"
    if not given:
        return f" (the default; pass --{' --'.join(missing)} or --model)"
    return f" ({', '.join(missing)} not given)" if missing else ""


def _replaced(args: argparse.Namespace) -> list[str]:
    """Returns a line on the given options that contradict what the model's softmax does; nothing if none does."""
    if not args.model or args.layer != "attention":
        return []
    said = []
    for name in _OF_SOFTMAX:
        given = getattr(args, name)
        known = list(dict.fromkeys(getattr(shape, name) for shape in _known(args)))
        if given is not None and any(_value(name, each) != _value(name, given) for each in known):
            flag = f"--{name.replace('_', '-')}"
            flag = flag.replace("--", "--no-") if given is False else flag
            typed = flag if isinstance(given, bool) else f"{flag} {_text(given)}"
            said.append(f"{typed} in place of the model's {' and '.join(map(_text, known))}")
    return [f"as given: {'; '.join(said)}"] if said else []


def _value(name: str, value: Any) -> Any:
    return Mask.named(Packing([1]), value).name if name == "mask" else value


def _text(value: Any) -> str:
    if value is None:
        return "head_dim ** -0.5"
    if isinstance(value, bool):
        return "learned sink" if value else "softmax without a sink"
    return value if isinstance(value, str) else f"{value:g}"


_SHARED = ("kv_heads", "key_heads", "groups")
_SIZES = {
    "key_heads": "key_heads",
    "groups": "groups",
    "state": "state",
    "value_dim": "value_head_dim",
    "num_householder": "num_householder",
}  # by flags
_OF_SOFTMAX = ("mask", "learned_sink", "softcap", "softmax_scale")
_OF_ATTENTION = ("mask", "learned_sink", "softcap", "dropout", "ulysses_degree", "latent_mode")


def _not_of(layer: str) -> tuple[str, ...]:
    """Returns the names of the options that do not apply to a layer."""
    if layer not in KINDS:
        return ("key_heads", "groups", "state", "num_householder", "conv_width", "hidden_size")
    kind = KINDS[layer]
    sizes = {argument.name for argument in kind.arguments}
    lacking = tuple(flag for flag, name in _SIZES.items() if name not in sizes)
    return ("kv_heads", *lacking, *(() if kind.scales_queries else ("softmax_scale",)), *_OF_ATTENTION)
