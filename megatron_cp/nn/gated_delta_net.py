"""`GatedDeltaNet`: the layer of Qwen3-Next, between its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch
from megatron_cp.errors import checked_integer
from megatron_cp.executor.groups import RankGroup
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.kernels import RULES, LinearKernel
from megatron_cp.nn.base import LinearLayer, checked_factory
from megatron_cp.nn.parts import ConvWeight, GatedRMSNorm, reset_decay
from megatron_cp.planner.batch import BatchPlan, LinearSpec
from megatron_cp.planner.checks import checked_heads


class GatedDeltaNet(LinearLayer):
    """Gated DeltaNet of a packed batch over ranks (arXiv 2412.06464), with the parameters of Qwen3-Next.

    They are, by key head, `in_proj_qkvz` (q, k, v and the output gate z) and `in_proj_ba` (write strength and decay);
    `conv1d.weight` `[channels, 1, conv_width]`, `A_log` and `dt_bias` `[heads]`, `norm.weight` `[value_head_dim]`, and
    `out_proj`. A state dict of transformers' `Qwen3NextGatedDeltaNet` loads unchanged.

    Args:
        hidden_size: features of a hidden state.
        heads: value heads, each with its own state.
        key_heads: query/key heads, a divisor of `heads`; as many if None.
        head_dim: features of a key head.
        value_head_dim: features of a value head; `head_dim` if None.
        conv_width: taps of the convolution.
        eps: the epsilon of the gated norm.
        mode: see `LinearSpec`.
        kernel: see `gated_delta_net`.
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
        eps: float = 1e-6,
        mode: str = "auto",
        kernel: str | LinearKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, kernel, RULES)
        factory = checked_factory(device, dtype)
        heads, key_heads = checked_heads(heads=heads, key_heads=heads if key_heads is None else key_heads)
        value_dim = head_dim if value_head_dim is None else value_head_dim
        self.slot = slot = LinearSpec("gdn", heads, key_heads, checked_integer("head_dim", head_dim, 1), value_dim,
                                      conv_width=conv_width, mode=mode, hidden_size=hidden_size)  # fmt: skip
        keys, values = key_heads * slot.head_dim, heads * slot.value_head_dim
        self.in_proj_qkvz = nn.Linear(hidden_size, 2 * keys + 2 * values, bias=False, **factory)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * heads, bias=False, **factory)
        self.conv1d = ConvWeight(2 * keys + values, conv_width, False, factory)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(heads, **factory)) for _ in range(2))
        self.norm = GatedRMSNorm(value_dim, value_dim, eps, nn.functional.silu, factory)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)

    def _mixed(self, hidden: Tensor, batch: LocalBatch | BatchPlan, ranks: RankGroup) -> Tensor:
        slot = self.slot
        shared = slot.heads // slot.key_heads  # value heads that share a key head
        values = shared * slot.value_head_dim
        by_key_head = self.in_proj_qkvz(hidden).unflatten(-1, (slot.key_heads, -1))
        q, k, v, z = by_key_head.split([slot.head_dim, slot.head_dim, values, values], dim=-1)
        qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        beta, alpha = self.in_proj_ba(hidden).unflatten(-1, (slot.key_heads, -1)).split([shared, shared], dim=-1)
        out = self._run(
            gated_delta_net, (qkv, beta.flatten(1), alpha.flatten(1)), batch, ranks, conv=self.conv1d.weight,
            A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        gate = z.flatten(1).unflatten(-1, (slot.heads, slot.value_head_dim))
        return self.out_proj(self.norm(out, gate).flatten(1))
