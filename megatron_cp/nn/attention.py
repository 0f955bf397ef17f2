"""`Attention`: grouped-query softmax attention with rotary positions, between its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch
from megatron_cp.errors import ArgumentError, as_number, checked_flag, checked_integer
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.groups import Group
from megatron_cp.layout.mask import MaskLike
from megatron_cp.nn.base import Layer, checked_factory, checked_rows, positions_of
from megatron_cp.nn.parts import checked_eps
from megatron_cp.planner.batch import AttentionSpec, BatchPlan
from megatron_cp.planner.checks import checked_heads
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.kernels import KERNELS, AttentionKernel


class Attention(Layer):
    """Grouped-query attention of a packed batch over ranks, with rotary positions (RoFormer, arXiv 2104.09864).

    Parameters have the names of Qwen3 and Llama: `q_proj`, `k_proj`, `v_proj`, `o_proj`, and with `qk_norm` the weights
    `[head_dim]` of `q_norm` and `k_norm`. Phases rotate the first half of a head's features against the second.

    Args:
        hidden_size: features of a hidden state.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; as many if None.
        head_dim: features of a head; `hidden_size // heads` if None.
        rotary_dim: the number of leading features of a head that phases rotate: even, 0 for no positions; all if None.
        rope_theta: base of the phases' frequencies.
        qk_norm: True to divide the queries and keys of each head by their rms, before the phases.
        bias: True for projections of queries, keys and values with a bias.
        eps: the epsilon of the norms.
        mask, scheme: see `AttentionSpec`.
        kernel: see `attention`.
        device, dtype: device and type of the parameters.

    Raises:
        ArgumentError: sizes that do not fit one another, or what `AttentionSpec` refuses.

    Example:
        >>> from megatron_cp.layout import Layout, Packing
        >>> layer = Attention(hidden_size=32, heads=4, kv_heads=2)
        >>> layout = Layout.contiguous(Packing([3, 1]), cp_size=1)
        >>> layer(torch.ones(4, 32), BatchPlan(layout, [layer.slot])).shape
        torch.Size([4, 32])
    """

    slot: AttentionSpec

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rotary_dim: int | None = None,
        rope_theta: float = 10000.0,
        qk_norm: bool = False,
        bias: bool = False,
        eps: float = 1e-6,
        mask: MaskLike = "causal",
        scheme: str = "auto",
        kernel: str | AttentionKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, kernel, KERNELS)
        factory = checked_factory(device, dtype)
        heads, kv_heads = checked_heads(heads=heads, kv_heads=heads if kv_heads is None else kv_heads)
        if head_dim is None and hidden_size % heads:
            raise ArgumentError("heads", heads, f"a divisor of hidden_size {hidden_size}, or give head_dim")
        dim = hidden_size // heads if head_dim is None else checked_integer("head_dim", head_dim, 1)
        self.rotary_dim = _checked_rotary(rotary_dim, dim)
        if not 1 < as_number(rope_theta) < float("inf"):
            raise ArgumentError("rope_theta", rope_theta, "a finite number above 1")
        self.rope_theta, self.head_dim = float(rope_theta), dim
        self.slot = AttentionSpec(heads, kv_heads, dim, dim, mask=mask, scheme=scheme)
        checked_flag("bias", bias), checked_flag("qk_norm", qk_norm), checked_eps(eps)
        self.q_proj = nn.Linear(hidden_size, heads * dim, bias=bias, **factory)
        self.k_proj, self.v_proj = (nn.Linear(hidden_size, kv_heads * dim, bias=bias, **factory) for _ in range(2))
        self.o_proj = nn.Linear(heads * dim, hidden_size, bias=False, **factory)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps, **factory) if qk_norm else None for _ in range(2))

    def forward(self, hidden: Tensor, batch: LocalBatch | BatchPlan, group: Group | None = None) -> Tensor:
        ranks = checked_rows(hidden, self.hidden_size, batch, group)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden).unflatten(-1, (-1, self.head_dim)) for project in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_dim:
            cos, sin = self._phases(positions_of(batch, ranks.rank, hidden.device), q.dtype)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return self.o_proj(self._run(attention, (q, k, v), batch, ranks).flatten(1))

    def _phases(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines `[t, 1, rotary_dim / 2]` in at least float32: bfloat16 has no integers above
        256.
        """
        dtype = accumulation_dtype(dtype)
        powers = torch.arange(0, self.rotary_dim, 2, dtype=dtype, device=positions.device) / self.rotary_dim
        angles = positions.to(dtype)[:, None, None] * self.rope_theta**-powers
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `2 * cos.shape[-1]` features of `[t, h, d]`, half against half; the result has the type of
    x.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1)


def _checked_rotary(rotary_dim: int | None, head_dim: int) -> int:
    if rotary_dim is None and head_dim % 2:
        raise ArgumentError("head_dim", head_dim, "an even number, or give rotary_dim")
    number = head_dim if rotary_dim is None else checked_integer("rotary_dim", rotary_dim, 0, head_dim)
    if number % 2:
        raise ArgumentError("rotary_dim", rotary_dim, f"an even number from 0 to head_dim {head_dim}")
    return number
