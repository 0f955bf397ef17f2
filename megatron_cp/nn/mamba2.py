"""`Mamba2`: the mixer of Mamba-2, between its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch
from megatron_cp.errors import checked_flag, checked_integer
from megatron_cp.executor.groups import RankGroup
from megatron_cp.linear.kernels import RULES, LinearKernel
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.nn.base import LinearLayer, checked_factory
from megatron_cp.nn.parts import ConvWeight, GatedRMSNorm, reset_decay
from megatron_cp.planner.batch import BatchPlan, LinearSpec
from megatron_cp.planner.checks import checked_heads


class Mamba2(LinearLayer):
    """Mamba-2 of a packed batch over ranks (arXiv 2405.21060), with the parameters of mamba_ssm's `Mamba2`.

    They are `in_proj` (the gate z, then x, B and C, then the step sizes), `conv1d.weight` `[channels, 1, conv_width]`
    and `conv1d.bias`, `A_log`, `D` and `dt_bias` `[heads]`, `norm.weight` `[heads * head_dim]` and `out_proj`. The
    gated norm is over the features of each group. A state dict of transformers' `Mamba2Mixer` without biases of its
    projections loads unchanged.

    Args:
        hidden_size: features of a hidden state.
        heads: heads of x.
        head_dim: features of a head of x.
        state: features of B and C: the size of the state.
        groups: groups of B and C, a divisor of `heads`.
        conv_width: taps of the convolution.
        conv_bias: True for a convolution with a bias.
        eps: the epsilon of the gated norm.
        mode: see `LinearSpec`.
        kernel: see `mamba2_mixer`.
        device, dtype: device and type of the parameters.

    Raises:
        ArgumentError: sizes that do not fit one another, or what `LinearSpec` refuses.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int = 64,
        state: int = 128,
        groups: int = 1,
        conv_width: int = 4,
        conv_bias: bool = True,
        eps: float = 1e-5,
        mode: str = "auto",
        kernel: str | LinearKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, kernel, RULES)
        factory = checked_factory(device, dtype)
        heads, groups = checked_heads(heads=heads, groups=groups)
        head_dim, state = checked_integer("head_dim", head_dim, 1), checked_integer("state", state, 1)
        checked_flag("conv_bias", conv_bias)
        self.slot = LinearSpec("mamba", heads, groups, state, head_dim, conv_width=conv_width, mode=mode,
                               hidden_size=hidden_size)  # fmt: skip
        self._widths = inner, channels, _ = [heads * head_dim, heads * head_dim + 2 * groups * state, heads]
        self.in_proj = nn.Linear(hidden_size, sum(self._widths), bias=False, **factory)
        self.conv1d = ConvWeight(channels, conv_width, conv_bias, factory)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(heads, **factory)) for _ in range(3))
        self.norm = GatedRMSNorm(inner, inner // groups, eps, None, factory)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)

    def _mixed(self, hidden: Tensor, batch: LocalBatch | BatchPlan, ranks: RankGroup) -> Tensor:
        z, x, dt = self.in_proj(hidden).split(self._widths, dim=-1)
        out = self._run(
            mamba2_mixer, (x, dt), batch, ranks, conv=self.conv1d.weight, conv_bias=self.conv1d.bias,
            A_log=self.A_log, D=self.D, dt_bias=self.dt_bias,
        )  # fmt: skip
        return self.out_proj(self.norm(out.flatten(1), z))
