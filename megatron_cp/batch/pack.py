"""`Pack`: one packed microbatch on the host, before it is sharded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_cp.layout import Packing


@dataclass(frozen=True)
class Pack:
    """Documents end to end. `shard_batch(pack.tokens, layout, ..., labels=pack.labels, loss_mask=pack.loss_mask)`.

    Attributes:
        packing: the documents' lengths.
        tokens: `[total]` int64.
        labels: `[total]` int64 target of each token, or None for the next token of its document.
        loss_mask: `[total]` float32, or None for all ones.
    """

    packing: Packing
    tokens: Tensor
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
