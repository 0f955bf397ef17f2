"""`Collective`: the backend's own all-to-all and all-gather."""

from __future__ import annotations

from torch import Tensor

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Pending
from megatron_cp.executor.transports.base import GroupTransport


class Collective(GroupTransport):
    """Calls the group's own operations."""

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts) -> Pending:
        rank = self.group.rank
        sent_splits = split_counts.sent_by(rank, sent.numel())
        return self.group.start_all_to_all(received, sent, split_counts.received_by(rank), sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self.group.start_all_gather(received, sent)
