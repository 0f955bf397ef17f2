"""A layer's operation between small projections: planned, called, and called otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import megatron_cp as cp
from megatron_cp.planner.linear import linear_shape
from megatron_cp.testing.layers import LAYERS
from tools.faults.cases import Layer

CONV_WIDTH, STATE = 3, 4


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    Attributes:
        run: the operation.
        inputs: this rank's rows, in the order of its arguments.
        named: the parameters, which every rank has, and the options.
    """

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    named: dict[str, Any]


def plan(layer: Layer, packing: cp.Packing, layout: cp.Layout, hidden: int) -> cp.Plan:
    """Makes the plan of a layer."""
    transport = layer.transport
    if transport == "hierarchical":
        transport = cp.Transport.even_hosts("hierarchical", layout.cp_size, min(2, layout.cp_size))
    wire = {"head_chunks": layer.chunks, "transport": transport, "codec": layer.codec}
    if layer.kind == "attention":
        return cp.plan_attention(
            packing, layout, heads=layer.heads, kv_heads=layer.groups, head_dim=layer.head_dim,
            mask=cp.Mask.named(packing, layer.mask), scheme=layer.scheme, **wire,
        )  # fmt: skip
    return cp.plan_linear(
        packing, layout, layer.kind, **_sizes(layer), conv_width=CONV_WIDTH, mode=layer.scheme,
        hidden_size=hidden if layer.scheme == "redistribute" else None, **wire,
    )  # fmt: skip


def _sizes(layer: Layer) -> dict[str, int]:
    """Returns the sizes of a linear layer, as arguments of `plan_linear`."""
    match layer.kind:
        case "conv1d":
            return {"channels": layer.heads * layer.head_dim}
        case "mamba":
            return {"heads": layer.heads, "groups": layer.groups, "head_dim": layer.head_dim, "state": STATE}
    return {"heads": layer.heads, "key_heads": layer.groups, "head_dim": layer.head_dim}


def shapes(layer: Layer) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
    """Returns the shapes of a token's inputs and of the parameters, by name."""
    if layer.kind == "attention":
        heads = {"q": layer.heads, "k": layer.groups, "v": layer.groups}
        sink = {"sink": torch.Size([layer.heads])} if layer.sink else {}
        return {name: torch.Size([count, layer.head_dim]) for name, count in heads.items()}, sink
    sizes = linear_shape(layer.kind, CONV_WIDTH, **_sizes(layer))
    inputs, parameters = LAYERS[layer.kind].draw(sizes, 1, lambda *shape, **_: torch.zeros(shape))
    return {name: x.shape[1:] for name, x in inputs.items()}, {name: x.shape for name, x in parameters.items()}


def weights(layer: Layer, hidden: int) -> dict[str, torch.Size]:
    """Returns the shapes of a layer's weights, by name: projections, parameters, and what follows the operation."""
    inputs, parameters = shapes(layer)
    projections = {f"to_{name}": torch.Size([hidden, shape.numel()]) for name, shape in inputs.items()}
    return {**projections, **parameters, "out": torch.Size([layer.heads * layer.head_dim, hidden])}


def call(layer: Layer, weights: dict[str, Tensor], hidden: Tensor, options: dict[str, Any]) -> Call:
    """Returns the call of a layer on hidden states `[t, hidden]`."""
    inputs, parameters = shapes(layer)
    made = tuple((hidden @ weights[f"to_{name}"]).unflatten(-1, shape) for name, shape in inputs.items())
    named = {name: weights[name] for name in parameters} | options
    if layer.kind != "attention":
        return Call(LAYERS[layer.kind].run, made, named)
    return Call(cp.attention, made, {"softcap": layer.softcap, "dropout": layer.dropout, **named})


def option(layer: Layer, change: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns an argument as the rank gives it that disagrees."""
    match change:
        case "scale" if layer.kind == "attention":
            return {"softmax_scale": 3.0}
        case "scale":
            return {"dt_limit": (0.0, 0.1)} if layer.kind == "mamba" else {"scale": 3.0}
        case "softcap":
            return {"softcap": 0.7}
        case "sink_given" if layer.sink:
            return {"sink": None}
        case "sink_given" | "sink_values":
            return {"sink": torch.ones(layer.heads, dtype=dtype)}
        case "dropout":
            return {"dropout": 0.6}
        case "seed":
            return {"seed": seed + 50_000}
    return {"kernel": "reference"}


def changed(call: Call, change: str, variant: int) -> Call:
    """Returns the call in another type, with a batch of two, or with tensors that need no gradients.

    Args:
        call: the call.
        change: "dtype", "batch" or "requires_grad"; "dropped" for tensors whose gradients are computed and left out.
        variant: which type, or which tensors: the first input, the others, or all with the parameters.
    """
    if change == "dtype":
        here = call.inputs[0].dtype
        others = [dtype for dtype in (torch.bfloat16, torch.float32, torch.float64) if dtype != here]
        return _each(call, lambda x: x.to(others[variant % 2]), call.inputs, named=True)
    if change == "batch":
        return _each(call, lambda x: x.unsqueeze(1).repeat(1, 2, 1, 1), call.inputs, named=False)
    chosen = (call.inputs[:1], call.inputs[1:] or call.inputs, call.inputs)[variant]
    return _each(call, without_gradient if change == "dropped" else Tensor.detach, chosen, named=variant == 2)


def _each(call: Call, change: Callable[[Tensor], Tensor], chosen: tuple[Tensor, ...], *, named: bool) -> Call:
    """Returns the call with the chosen inputs changed, and the parameters as well if `named`."""
    inputs = tuple(change(x) if any(x is each for each in chosen) else x for x in call.inputs)
    others = {name: change(x) if named and isinstance(x, Tensor) else x for name, x in call.named.items()}
    return replace(call, inputs=inputs, named=others)


def without_gradient(x: Tensor) -> Tensor:
    """Returns the tensor; it needs a gradient and passes none on."""
    return _WithoutGradient.apply(x)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(gradients[0])


def run(call: Call, plan: cp.Plan, group: Any, out: Tensor) -> Tensor:
    """Calls the operation, and returns its rows times `out`, `[t, hidden]`, in the type of `out`."""
    found = call.run(*call.inputs, plan, group, **call.named)
    found = found[:, 0] if found.ndim == 4 else found
    return found.to(out.dtype).flatten(1) @ out
