"""The head exchange of a linear layer in megatron-core's own functions.

They are called as `GatedDeltaNet.forward` of megatron-core 0.19.2 does, and as megatron-core did before: with a call
for every document and section.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.ssm.gated_delta_net import common
from torch import Tensor

from megatron_cp.layout import Packing


class StockExchange:
    """Gated DeltaNet's exchanges of a packed batch, differentiable.

    Shapes: `t` a rank's tokens in Megatron's zigzag order, `T` all tokens, `f` features of all sections.

    Args:
        packing: documents whose lengths are multiples of `2 * cp`, all at least that long.
        widths: features of each section, in Megatron's order.
    """

    def __init__(
        self, packing: Packing, widths: Sequence[int], size: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.packing, self.widths, self.size, self.group = packing, tuple(widths), size, group
        self.cu_seqlens = torch.from_numpy(packing.cu_seqlens.astype(np.int32)).to(device)
        _, self._from_stream = self._orders()

    def to_heads(self, local: Tensor) -> Tensor:
        """Returns `[T, 1, f / cp]` of `[t, 1, f]`, as the layer does: it computes the order of tokens each time."""
        heads = common._build_head_perm_for_split_sections(self.widths, self.size, local.device)
        by_rank = local.index_select(-1, heads)
        arrived = common.tensor_a2a_cp2hp(by_rank, 0, -1, self.group, undo_attention_load_balancing=False)
        to_stream, _ = self._orders()
        return arrived.index_select(0, to_stream)

    def to_tokens(self, own: Tensor) -> Tensor:
        """Returns `[t, 1, f]` of `[T, 1, f / cp]` of one section, in the order that `to_heads` has computed."""
        rows = own.index_select(0, self._from_stream)
        return common.tensor_a2a_hp2cp(rows, 0, -1, self.group, redo_attention_load_balancing=False)

    def to_heads_in_loops(self, local: Tensor) -> Tensor:
        """Does the same as `to_heads`, document by document and section by section."""
        lengths = [length // self.size for length in self.packing.lengths.tolist()]
        return torch.cat([
            common.tensor_a2a_cp2hp(rows, 0, -1, self.group, split_sections=list(self.widths))
            for rows in local.split(lengths)
        ])  # fmt: skip

    def to_tokens_in_loops(self, own: Tensor) -> Tensor:
        """Does the same as `to_tokens`, document by document."""
        return torch.cat([
            common.tensor_a2a_hp2cp(rows, 0, -1, self.group) for rows in own.split(self.packing.lengths.tolist())
        ])  # fmt: skip

    def _orders(self) -> tuple[Tensor, Tensor]:
        orders: tuple[Tensor, Tensor] = common._build_thd_cp_a2a_perm(self.cu_seqlens, self.size, self.packing.total)
        return orders
