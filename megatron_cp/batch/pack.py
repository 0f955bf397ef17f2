"""`Pack`: one packed microbatch on the host, before it is assigned to ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_cp.layout import Packing


@dataclass(frozen=True)
class Pack:
    """Documents end to end. `shard_batch(pack.tokens, layout, ..., labels=pack.labels, loss_mask=pack.loss_mask)`.

    Attributes:
        packing: their lengths.
        tokens: `[total]` int64.
        labels: `[total]` int64 what each token is to predict, or None for the next token of its document.
        loss_mask: `[total]` float32, or None for all ones.
    """

    packing: Packing
    tokens: Tensor
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
