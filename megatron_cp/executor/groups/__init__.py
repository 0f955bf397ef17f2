"""Groups of ranks and their communication: `RankGroup`, which is a `Wire`, and its implementations.

`TorchGroup` uses any torch.distributed backend. Over gloo its messages are tagged (`tagged`), and a rank whose wait can
never end is told why (`stalls`). `ThreadGroup` has threads of one process as ranks; most tests use it because it starts
in microseconds. `Subgroup` is a part of the ranks of either.
"""

from megatron_cp.executor.groups.base import (
    Agreed,
    Message,
    Pending,
    RankGroup,
    Subgroup,
    Wire,
    empty_message,
    keep_own,
)
from megatron_cp.executor.groups.thread_group import ThreadGroup
from megatron_cp.executor.groups.torch_group import (
    Group,
    TorchGroup,
    as_rank_group,
    naming_lost_ranks,
    rank_group,
    set_timeout,
)

__all__ = [
    "Agreed",
    "Group",
    "Message",
    "Pending",
    "RankGroup",
    "Subgroup",
    "ThreadGroup",
    "TorchGroup",
    "Wire",
    "as_rank_group",
    "empty_message",
    "keep_own",
    "naming_lost_ranks",
    "rank_group",
    "set_timeout",
]
