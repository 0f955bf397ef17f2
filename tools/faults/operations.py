"""The library's operations between projections that are small: planned, called, and called otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import megatron_cp as cp
from tools.faults.cases import Layer

CONV_WIDTH, STATE = 3, 4


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    Attributes:
        name: the operation's.
        inputs: this rank's tensors, in the order of its arguments.
        named: the other arguments.
        out: `[features, hidden]`, what follows it.
    """

    name: str
    inputs: tuple[Tensor, ...]
    named: dict[str, Any]
    out: Tensor


def plan(layer: Layer, packing: cp.Packing, layout: cp.Layout, hidden: int) -> cp.Plan:
    """Makes the plan of a layer."""
    transport = (
        cp.Transport.even_hosts("hierarchical", layout.cp_size, min(2, layout.cp_size))
        if layer.transport == "hierarchical"
        else layer.transport
    )
    if layer.kind == "attention":
        return cp.plan_attention(
            packing, layout, heads=layer.heads, kv_heads=layer.groups, head_dim=layer.head_dim,
            mask=cp.Mask.named(packing, layer.mask), scheme=layer.scheme, head_chunks=layer.chunks,
            transport=transport, codec=layer.codec,
        )  # fmt: skip
    shape: dict[str, int] = {
        "conv1d": {"channels": layer.heads * layer.head_dim},
        "mamba": {"heads": layer.heads, "groups": layer.groups, "head_dim": layer.head_dim, "state": STATE},
    }.get(layer.kind, {"heads": layer.heads, "key_heads": layer.groups, "head_dim": layer.head_dim})
    return cp.plan_linear(
        packing, layout, layer.kind, **shape, conv_width=CONV_WIDTH, mode=layer.scheme,
        hidden_size=hidden if layer.scheme == "redistribute" else None, head_chunks=layer.chunks, transport=transport,
        codec=layer.codec,
    )  # fmt: skip


def widths(layer: Layer) -> dict[str, tuple[int, ...]]:
    """The inputs that are made of hidden states, by name: the shape of each token's."""
    heads, groups, dim = layer.heads, layer.groups, layer.head_dim
    keys, values, numbers = (groups, dim), (heads, dim), (heads,)
    convolved = (2 * groups * (STATE if layer.kind == "mamba" else dim) + heads * dim,)
    match layer.kind, layer.mixer:
        case "attention", _:
            return {"q": (heads, dim), "k": keys, "v": keys}
        case "conv1d", _:
            return {"x": (heads * dim,)}
        case "gdn", False:
            return {"q": keys, "k": keys, "v": values, "g": numbers, "beta": numbers}
        case "gdn", True:
            return {"qkv": convolved, "beta": numbers, "alpha": numbers}
        case "kda", False:
            return {"q": keys, "k": keys, "v": values, "g": values, "beta": numbers}
        case "kda", True:
            return {"qkv": convolved, "g": (heads * dim,), "beta": numbers}
        case "mamba", False:
            return {"x": values, "dt": numbers, "B": (groups, STATE), "C": (groups, STATE)}
    return {"xBC": convolved, "dt": numbers}


def shapes(layer: Layer, hidden: int) -> dict[str, tuple[int, ...]]:
    """A layer's weights, by name."""
    made = {f"to_{name}": (hidden, torch.Size(shape).numel()) for name, shape in widths(layer).items()}
    made["out"] = (layer.heads * layer.head_dim, hidden)
    if layer.kind == "attention":
        return made | ({"sink": (layer.heads,)} if layer.sink else {})
    if layer.kind == "conv1d":
        return made | {"conv": (layer.heads * layer.head_dim, CONV_WIDTH)}
    if not layer.mixer:
        return made | ({"A": (layer.heads,)} if layer.kind == "mamba" else {})
    (channels,) = widths(layer)["xBC" if layer.kind == "mamba" else "qkv"]
    bias = layer.heads * (layer.head_dim if layer.kind == "kda" else 1)
    return made | {"conv": (channels, CONV_WIDTH), "A_log": (layer.heads,), "dt_bias": (bias,)}


def call(layer: Layer, weights: dict[str, Tensor], hidden: Tensor, options: dict[str, Any]) -> Call:
    """Returns the call of a layer on hidden states `[t, hidden]`."""
    made = {name: (hidden @ weights[f"to_{name}"]).unflatten(-1, shape) for name, shape in widths(layer).items()}
    named: dict[str, Any] = {}
    if layer.kind == "attention":
        sink, change = weights.get("sink"), options.pop("sink_change", None)
        if change is not None:
            other = None if change == "sink_given" else torch.ones(layer.heads, dtype=hidden.dtype)
            sink = torch.ones(layer.heads, dtype=hidden.dtype) if sink is None else other
        named = {"softcap": layer.softcap, "sink": sink, "dropout": layer.dropout, **options}
        return Call("attention", tuple(made.values()), named, weights["out"])
    if layer.kind == "conv1d":
        return Call("causal_conv1d", (made["x"], weights["conv"]), {"bias": None, **options}, weights["out"])
    if layer.mixer:
        named = {name: weights[name] for name in ("conv", "A_log", "dt_bias")}
        name = {"gdn": "gated_delta_net", "kda": "kda_mixer", "mamba": "mamba2_mixer"}[layer.kind]
        return Call(name, tuple(made.values()), named | options, weights["out"])
    if layer.kind == "mamba":
        inputs = (made["x"], F.softplus(made["dt"]), -weights["A"].exp(), made["B"], made["C"])
        return Call("mamba2", inputs, options, weights["out"])
    made |= {"g": -F.softplus(made["g"]), "beta": torch.sigmoid(made["beta"])}
    name = "gated_delta_rule" if layer.kind == "gdn" else "kda"
    return Call(name, tuple(made.values()), {"use_qk_l2norm_in_kernel": True, **options}, weights["out"])


def option(layer: Layer, change: str, seed: int) -> dict[str, Any]:
    """An argument as a rank gives it that disagrees."""
    match change:
        case "scale" if layer.kind == "attention":
            return {"softmax_scale": 3.0}
        case "scale":
            return {"dt_limit": (0.0, 0.1)} if layer.kind == "mamba" else {"scale": 3.0}
        case "softcap":
            return {"softcap": 0.7}
        case "sink_given" | "sink_values":
            return {"sink_change": change}
        case "dropout":
            return {"dropout": 0.6}
        case "seed":
            return {"seed": seed + 50_000}
    return {"kernel": "reference"}


def changed(call: Call, change: str, variant: int) -> Call:
    """Returns the call with inputs of another type, with a batch of two, or with some that need no gradients."""
    inputs = call.inputs
    if change == "dtype":
        here = inputs[0].dtype
        types = [dtype for dtype in (torch.bfloat16, torch.float32, torch.float64) if dtype != here]
        return replace(call, inputs=tuple(x.to(types[variant % 2]) for x in inputs))
    if change == "batch":
        return replace(call, inputs=tuple(x.unsqueeze(1).repeat(1, 2, 1, 1) for x in inputs))
    leave_out = without_gradient if change == "dropped" else Tensor.detach
    frozen = {0: range(1), 1: range(1, len(inputs)), 2: range(len(inputs))}[variant]
    named = {name: leave_out(x) if variant == 2 and isinstance(x, Tensor) else x for name, x in call.named.items()}
    return replace(call, inputs=tuple(leave_out(x) if n in frozen else x for n, x in enumerate(inputs)), named=named)


def without_gradient(x: Tensor) -> Tensor:
    """Returns the call with an output that needs a gradient and passes none on."""
    return _WithoutGradient.apply(x)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(gradients[0])


def run(call: Call, plan: cp.Plan, group: Any) -> Tensor:
    """Calls the operation, and returns `[t, hidden]`, in the type of what follows it."""
    named = dict(call.named)
    bias = (named.pop("bias"),) if "bias" in named else ()
    out = getattr(cp, call.name)(*call.inputs, *bias, plan, group, **named)
    out = out[:, 0] if out.ndim == 4 else out
    return out.to(call.out.dtype).flatten(1) @ call.out
