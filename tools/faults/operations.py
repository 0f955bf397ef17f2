"""A layer of a job as a case of parity, its operation's call, and the call as a rank makes it that disagrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import megatron_cp as cp
from megatron_cp.testing import parity
from megatron_cp.testing.layers import LAYERS
from tools.faults.cases import Case, Layer


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


def parity_case(layer: Layer, case: Case, lengths: tuple[int, ...]) -> parity.Case:
    """Returns a layer on a batch, which parity draws and plans."""
    return parity.Case(
        layer.kind, case.cp_size, lengths, case.layout, layer.heads, layer.groups, layer.head_dim, layer.head_dim,
        conv_width=3, mask=layer.mask, scheme=layer.scheme, head_chunks=layer.chunks, transport=layer.transport,
        codec=layer.codec, hidden_size=8 if layer.scheme == "redistribute" else None, learned_sink=layer.sink,
        dtype=getattr(torch, case.dtype), seed=case.seed,
    )  # fmt: skip


def call(layer: Layer, inputs: tuple[Tensor, ...], parameters: dict[str, Tensor], seed: int) -> Call:
    """Returns the call of a layer."""
    if layer.kind != "attention":
        return Call(LAYERS[layer.kind].run, inputs, parameters)
    return Call(cp.attention, inputs, {"softcap": layer.softcap, "dropout": layer.dropout, "seed": seed, **parameters})


def changed(call: Call, change: str, layer: Layer, variant: int) -> Call:
    """Returns the call with another argument, in another type, or with tensors that need no gradients.

    Args:
        call: the call.
        change: a kind of fault of a call; "dropped" for tensors whose gradients are computed and left out.
        layer: its layer.
        variant: which type; which tensors: the first input, the others, or all with the parameters.
    """
    first = call.inputs[0]
    match change:
        case "dtype":
            others = [dtype for dtype in (torch.bfloat16, torch.float32, torch.float64) if dtype != first.dtype]
            return _each(call, lambda x: x.to(others[variant % 2]), call.inputs, named=True)
        case "batch":
            return _each(call, lambda x: x.unsqueeze(1).repeat(1, 2, 1, 1), call.inputs, named=False)
        case "requires_grad" | "dropped":
            chosen = (call.inputs[:1], call.inputs[1:] or call.inputs, call.inputs)[variant]
            return _each(call, without_gradient if change == "dropped" else Tensor.detach, chosen, named=variant == 2)
    ones = torch.ones(layer.heads, dtype=first.dtype)
    scale: dict[str, Any] = {"attention": {"softmax_scale": 3.0}, "mamba": {"dt_limit": (0.0, 0.1)}}
    options = {
        "scale": scale.get(layer.kind, {"scale": 3.0}),
        "softcap": {"softcap": 0.7},
        "sink_given": {"sink": None if layer.sink else ones},
        "sink_values": {"sink": ones},
        "dropout": {"dropout": 0.6},
        "seed": {"seed": call.named.get("seed", 0) + 50_000},
        "kernel": {"kernel": "reference"},
    }
    return replace(call, named=call.named | options[change])


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
