"""Functions that draw and run each kind of linear layer in a parity case: a record each, beside `plan/kinds.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_cp.executor.groups import RankGroup
from megatron_cp.linear.causal_conv1d import causal_conv1d
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.gated_delta_net_2 import gdn2_mixer
from megatron_cp.linear.gated_delta_product import gated_delta_product_mixer
from megatron_cp.linear.kimi_delta_attention import kda_mixer
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.linear import LinearShape

Tensors = dict[str, Tensor]
Draw = Callable[..., Tensor]  # takes a shape, and `scale=`, the standard deviation


@dataclass(frozen=True)
class LinearLayer:
    """The functions of a whole mixer.

    Attributes:
        draw: maps the layer's shape, the number of tokens and a source of normal numbers to the inputs, which are
            sharded, and the parameters, which every rank has whole.
    """

    draw: Callable[[LinearShape, int, Draw], tuple[Tensors, Tensors]]
    run: Callable[..., Tensor]


def _taps(shape: LinearShape, normal: Draw) -> Tensors:
    width = shape.conv_width
    return {"conv": normal(shape.channels, width, scale=width**-0.5), "conv_bias": normal(shape.channels)}


def _decay(shape: LinearShape, normal: Draw) -> Tensors:
    """Draws decays between 0.5 and 1 a token."""
    return {"A_log": normal(shape.heads, scale=0.3) - 1, "dt_bias": normal(shape.heads, scale=0.3) - 1}


def _gated_delta_net(shape: LinearShape, total: int, normal: Draw) -> tuple[Tensors, Tensors]:
    parameters = _taps(shape, normal) | _decay(shape, normal)
    del parameters["conv_bias"]  # no published model has it
    inputs = {"qkv": normal(total, shape.channels)} | {name: normal(total, shape.heads) for name in ("beta", "alpha")}
    return inputs, parameters


def _kimi_delta_attention(shape: LinearShape, total: int, normal: Draw) -> tuple[Tensors, Tensors]:
    parameters, width = _taps(shape, normal) | _decay(shape, normal), shape.heads * shape.key_dim
    inputs = {"qkv": normal(total, shape.channels), "g": normal(total, width), "beta": normal(total, shape.heads)}
    return inputs, parameters | {"dt_bias": normal(width, scale=0.3) - 1}


def _gated_delta_net_2(shape: LinearShape, total: int, normal: Draw) -> tuple[Tensors, Tensors]:
    keys, values = shape.groups * shape.key_dim, shape.heads * shape.value_dim
    parameters = _taps(shape, normal)
    parameters |= {"A_log": normal(shape.groups, scale=0.3) - 1, "dt_bias": normal(keys, scale=0.3) - 1}
    inputs = {"qkv": normal(total, shape.channels), "g": normal(total, keys), "b": normal(total, keys)}
    return inputs | {"w": normal(total, values)}, parameters


def _gated_delta_product(shape: LinearShape, total: int, normal: Draw) -> tuple[Tensors, Tensors]:
    parameters = _taps(shape, normal) | _decay(shape, normal)
    inputs = {"vkq": normal(total, shape.channels), "beta": normal(total, shape.steps * shape.heads)}
    return inputs | {"alpha": normal(total, shape.heads)}, parameters


def _mamba2(shape: LinearShape, total: int, normal: Draw) -> tuple[Tensors, Tensors]:
    parameters = _taps(shape, normal) | _decay(shape, normal)
    inputs = {"xBC": normal(total, shape.channels), "dt": normal(total, shape.heads)}
    return inputs, parameters | {"D": normal(shape.heads)}


def _conv1d(shape: LinearShape, total: int, normal: Draw) -> tuple[Tensors, Tensors]:
    parameters = _taps(shape, normal)
    return {"x": normal(total, shape.channels)}, parameters


def _run_conv1d(x: Tensor, plan: Plan, group: RankGroup, *, conv: Tensor, conv_bias: Tensor, **options: Any) -> Tensor:
    return causal_conv1d(x, conv, conv_bias, plan, group, activation="silu", **options)


LAYERS = {
    "gdn": LinearLayer(_gated_delta_net, gated_delta_net),
    "kda": LinearLayer(_kimi_delta_attention, kda_mixer),
    "gdn2": LinearLayer(_gated_delta_net_2, gdn2_mixer),
    "gdp": LinearLayer(_gated_delta_product, gated_delta_product_mixer),
    "mamba": LinearLayer(_mamba2, mamba2_mixer),
    "conv1d": LinearLayer(_conv1d, _run_conv1d),
}


def run_mixer(
    layer: str, tensors: Sequence[Tensor], parameters: Tensors, plan: Plan, group: RankGroup, scale: float | None,
    kernel: str,
) -> Tensor:  # fmt: skip
    """Returns a layer's output on a rank."""
    scaled = {"scale": scale} if KINDS[layer].scales_queries else {}
    return LAYERS[layer].run(*tensors, plan, group, **parameters, **scaled, kernel=kernel)
