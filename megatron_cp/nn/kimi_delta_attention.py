"""`KimiDeltaAttention`: the linear layer of Kimi Linear, between its projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch
from megatron_cp.executor.groups import RankGroup
from megatron_cp.linear.kernels import RULES, LinearKernel
from megatron_cp.linear.kimi_delta_attention import kda_mixer
from megatron_cp.nn.base import LinearLayer, checked_factory
from megatron_cp.nn.parts import ConvWeight, GatedRMSNorm, reset_children, reset_decay
from megatron_cp.planner.batch import BatchPlan, LinearSpec


class KimiDeltaAttention(LinearLayer):
    """Kimi Delta Attention of a packed batch over ranks (Kimi Linear, arXiv 2510.26692).

    Parameters are those of transformers' `KimiLinearDeltaAttention`, whose state dict loads unchanged: `q_proj`,
    `k_proj`, `v_proj`, `conv1d.weight` `[3 * heads * head_dim, 1, conv_width]`; the decay's `forget_gate` (`f_a_proj`,
    `f_b_proj`, `A_log` `[1, 1, heads, 1]`, `dt_bias` `[heads * head_dim]`); the write strength's `b_proj`; the output
    gate's `g_a_proj` and `g_b_proj`; `o_norm.weight` `[head_dim]` and `o_proj`.

    Args:
        hidden_size: features of a hidden state.
        heads: heads of queries, keys and values.
        head_dim: features of a head, and between the two projections of each gate.
        conv_width: taps of the convolution.
        eps: the epsilon of the gated norm.
        mode: see `LinearSpec`.
        kernel: see `kda_mixer`.
        device, dtype: device and type of the parameters.

    Raises:
        ArgumentError: sizes that are none, or what `LinearSpec` refuses.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int,
        conv_width: int = 4,
        eps: float = 1e-5,
        mode: str = "auto",
        kernel: str | LinearKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, kernel, RULES)
        factory = checked_factory(device, dtype)
        self.slot = LinearSpec("kda", heads, heads, head_dim, head_dim, conv_width=conv_width, mode=mode,
                               hidden_size=hidden_size)  # fmt: skip
        width = heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden_size, width, bias=False, **factory) for _ in range(3)
        )  # fmt: skip
        self.conv1d = ConvWeight(3 * width, conv_width, False, factory)
        self.forget_gate = _ForgetGate(hidden_size, heads, head_dim, factory)
        self.b_proj = nn.Linear(hidden_size, heads, bias=False, **factory)
        self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False, **factory)
        self.g_b_proj = nn.Linear(head_dim, width, bias=False, **factory)
        self.o_norm = GatedRMSNorm(head_dim, head_dim, eps, torch.sigmoid, factory)
        self.o_proj = nn.Linear(width, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def _mixed(self, hidden: Tensor, batch: LocalBatch | BatchPlan, ranks: RankGroup) -> Tensor:
        decay = self.forget_gate
        qkv = torch.cat([project(hidden) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        out = self._run(
            kda_mixer, (qkv, decay(hidden), self.b_proj(hidden)), batch, ranks, conv=self.conv1d.weight,
            A_log=decay.A_log.flatten(), dt_bias=decay.dt_bias,
        )  # fmt: skip
        z = self.g_b_proj(self.g_a_proj(hidden)).unflatten(-1, (self.slot.heads, self.slot.head_dim))
        return self.o_proj(self.o_norm(out, z).flatten(1))


class _ForgetGate(nn.Module):
    """The decay's projection, and two parameters that the operation takes."""

    def __init__(self, hidden_size: int, heads: int, head_dim: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False, **factory)
        self.f_b_proj = nn.Linear(head_dim, heads * head_dim, bias=False, **factory)
        self.A_log = nn.Parameter(torch.empty(1, 1, heads, 1, **factory))
        self.dt_bias = nn.Parameter(torch.empty(heads * head_dim, **factory))

    def reset_parameters(self) -> None:
        reset_children(self)
        reset_decay(self.A_log, self.dt_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[t, hidden]` to `[t, heads * head_dim]`, before the activation."""
        out: Tensor = self.f_b_proj(self.f_a_proj(hidden))
        return out
