"""Parts of the linear layers: the convolution's weight, the gated norm, and the initialisation of decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.linear.gated_norm import gated_norm

Gate = Callable[[Tensor], Tensor]


def checked_eps(value: object) -> float:
    """Returns the epsilon of a norm after checking it."""
    number = as_number(value)
    if not 0 < number <= 1:
        raise ArgumentError("eps", value, "a number above 0, such as 1e-6")
    return number


class GatedRMSNorm(nn.Module):
    """Computes `weight * x / rms(x) * gate(z)`, or with the gate first, `weight * y / rms(y)` with `y = x * silu(z)`.

    Args:
        features: the size of the weight.
        group_size: the number of features that share a mean of squares.
        eps: added to that mean.
        gate: the function of z that multiplies the normalised values; None to apply silu first, as in Mamba-2.
        factory: device and type of the weight.
    """

    def __init__(self, features: int, group_size: int, eps: float, gate: Gate | None, factory: dict[str, Any]) -> None:
        super().__init__()
        self.group_size, self.eps, self.gate = group_size, checked_eps(eps), gate
        self.weight = nn.Parameter(torch.empty(features, **factory))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Maps two `[..., features]` to one, in the type of x; computes in at least float32."""
        if self.gate is None:
            return gated_norm(x, z, self.weight, self.eps, self.group_size)
        acc_dtype = accumulation_dtype(x.dtype)
        groups = x.to(acc_dtype).unflatten(-1, (-1, self.group_size))
        scale = (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        values = (groups * scale).flatten(-2) * self.weight.to(acc_dtype)
        return (values * self.gate(z.to(acc_dtype))).to(x.dtype)


class ConvWeight(nn.Module):
    """The parameters of a causal convolution over channels: `weight` `[channels, 1, width]`, and `bias` `[channels]`.

    They are those of `torch.nn.Conv1d(groups=channels)`. The operation computes it, so there is no forward.
    """

    def __init__(self, channels: int, width: int, bias: bool, factory: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory)) if bias else None

    def reset_parameters(self) -> None:
        """Initialises like torch's convolutions."""
        bound = self.weight.shape[-1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


@torch.no_grad()
def reset_decay(A_log: Tensor, dt_bias: Tensor) -> None:  # noqa: N803 - the parameter's name everywhere
    """Initialises like Mamba-2: decay rates uniform in [1, 16], steps log-uniform in [0.001, 0.1] after softplus."""
    A_log.copy_(torch.empty_like(A_log).uniform_(1, 16).log())
    steps = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp().clamp(min=1e-4)
    dt_bias.copy_(steps + (-(-steps).expm1()).log())  # the inverse of softplus


def reset_children(module: nn.Module) -> None:
    """Reinitialises every child module that can."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
