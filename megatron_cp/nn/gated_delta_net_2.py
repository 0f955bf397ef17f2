"""`GatedDeltaNet2`: the layer of Gated DeltaNet-2, between its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch
from megatron_cp.errors import checked_integer
from megatron_cp.executor.groups import RankGroup
from megatron_cp.linear.gated_delta_net_2 import gdn2_mixer
from megatron_cp.linear.kernels import RULES, LinearKernel
from megatron_cp.nn.base import LinearLayer, checked_factory
from megatron_cp.nn.parts import ConvWeight, GatedRMSNorm, reset_decay
from megatron_cp.planner.batch import BatchPlan, LinearSpec
from megatron_cp.planner.checks import checked_heads


class GatedDeltaNet2(LinearLayer):
    """Gated DeltaNet-2 of a packed batch over ranks (arXiv 2605.22791), with the parameters of Megatron's layer.

    They are `in_proj` (q, k, v, the output gate, then decay and erase gate of each feature of a key, and write gate of
    each feature of a value), `conv1d.weight` `[channels, 1, conv_width]`, `A_log` `[key_heads]`, `dt_bias`
    `[key_heads * head_dim]`, `out_norm.weight` `[value_head_dim]`, and `out_proj`.

    Args:
        hidden_size: features of a hidden state.
        heads: value heads, each with its own state.
        key_heads: query/key heads, a divisor of `heads`; as many if None.
        head_dim: features of a key head.
        value_head_dim: features of a value head; `head_dim` if None.
        conv_width: taps of the convolution.
        eps: the epsilon of the gated norm.
        mode: see `LinearSpec`.
        kernel: see `gdn2_mixer`.
        device, dtype: device and type of the parameters.

    Raises:
        ArgumentError: sizes that do not fit one another, or what `LinearSpec` refuses.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        key_heads: int | None = None,
        *,
        head_dim: int,
        value_head_dim: int | None = None,
        conv_width: int = 4,
        eps: float = 1e-5,
        mode: str = "auto",
        kernel: str | LinearKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, kernel, RULES)
        factory = checked_factory(device, dtype)
        heads, key_heads = checked_heads(heads=heads, key_heads=heads if key_heads is None else key_heads)
        value_dim = head_dim if value_head_dim is None else value_head_dim
        self.slot = LinearSpec("gdn2", heads, key_heads, checked_integer("head_dim", head_dim, 1), value_dim,
                               conv_width=conv_width, mode=mode, hidden_size=hidden_size)  # fmt: skip
        keys, values = key_heads * head_dim, heads * value_dim
        self._widths = [2 * keys + values, values, keys, keys, values]
        self.in_proj = nn.Linear(hidden_size, sum(self._widths), bias=False, **factory)
        self.conv1d = ConvWeight(2 * keys + values, conv_width, False, factory)
        self.A_log = nn.Parameter(torch.empty(key_heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(keys, **factory))
        self.out_norm = GatedRMSNorm(value_dim, value_dim, eps, nn.functional.silu, factory)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)

    def _mixed(self, hidden: Tensor, batch: LocalBatch | BatchPlan, ranks: RankGroup) -> Tensor:
        qkv, z, g, b, w = self.in_proj(hidden).split(self._widths, dim=-1)
        out = self._run(
            gdn2_mixer, (qkv, g, b, w), batch, ranks, conv=self.conv1d.weight, A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        return self.out_proj(self.out_norm(out, z.view(out.shape)).flatten(1))
