"""`PeakMemory`: the peak of the bytes that an operation's tensors take on one rank, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.testing.modes import OneThreadMode
from megatron_cp.torch_private import leaves, no_modes


class PeakMemory(OneThreadMode):
    """Follows the tensors that this thread makes within `with memory:`, forward and backward, until they are freed.

    It counts the storage of every tensor that an operator returned and that did not exist before. It does not count
    memory that an operator allocates and frees internally, operations of a group that `watch` wrapped, and the buffers
    that the group keeps for all layers.

    Attributes:
        live: bytes of such storages that are in use after the latest operator.
        peak: the largest `live` since the beginning, or since `restart`.

    Example:
        >>> memory = PeakMemory()
        >>> with memory:
        ...     x = torch.ones(4) + torch.ones(4)
        >>> memory.live, memory.peak
        (16, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        # By the address of the storage, which is not reused while a weak reference exists.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._found: dict[int, StorageWeakRef] = {}  # existed before; results may be views of it
        self.peak = 0

    @property
    def live(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())

    def restart(self) -> None:
        """Resets the peak to what is in use."""
        self.peak = self.live

    def watch(self, group: RankGroup) -> RankGroup:
        """Returns the same group, acting like a network: its copies are not counted, and sent tensors live until they
        are sent.

        Ranks that are threads copy what they send at once and release it; a real transport reads it until the wait.
        """
        return _WatchedGroup(group)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage, _ in _sized_storages((args, kwargs)):
            if storage.cdata not in self._made:
                self._found.setdefault(storage.cdata, storage)
        result = func(*args, **(kwargs or {}))
        for storage, size in _sized_storages(result):
            if func.overloadpacket is torch.ops.aten.resize_:
                self._found[storage.cdata] = storage  # taken from a group's buffers
            elif storage.cdata not in self._found:
                self._made[storage.cdata] = storage, size
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def _sized_storages(values: Any) -> Iterable[tuple[StorageWeakRef, int]]:
    for leaf in leaves(values):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()


class _WatchedGroup(RankGroup):
    """Transfers copies, which the transport may release at any time, like gloo's threads."""

    def __init__(self, group: RankGroup) -> None:
        self.group, self.buffers = group, group.buffers
        self.rank, self.size = group.rank, group.size
        self.agreed.compares_calls = False  # the comparison of ranks' first calls is not part of a layer

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        return _Moving(
            [sent], [received], lambda sent, received: self.group.start_all_to_all(
                received[0], sent[0], received_splits, sent_splits
            )
        )  # fmt: skip

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return _Moving(
            [sent], [received], lambda sent, received: self.group.start_all_gather(received[0], sent[0])
        )  # fmt: skip

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        def start(sent: list[Tensor], received: list[Tensor]) -> Pending:
            copies = zip((sends, receives), (sent, received), strict=True)
            return self.group.start_messages(
                *([Message(x, m.peer) for x, m in zip(xs, ms, strict=True)] for ms, xs in copies)
            )

        return _Moving([message.tensor for message in sends], [message.tensor for message in receives], start)

    def barrier(self) -> None:
        with no_modes():
            self.group.barrier()

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        with no_modes():
            self.group.host_all_gather(received, sent)


class _Moving(Pending):
    """A transfer of copies, with the tensors to send and receive, which must live until it is complete."""

    def __init__(
        self, sent: list[Tensor], received: list[Tensor], start: Callable[[list[Tensor], list[Tensor]], Pending]
    ) -> None:
        with no_modes():
            self._arriving = [torch.empty_like(x) for x in received]
            self._pending = start([x.clone() for x in sent], self._arriving)
        self._sent, self._received = sent, received

    def wait(self) -> None:
        with no_modes():
            self._pending.wait()
            for target, source in zip(self._received, self._arriving, strict=True):
                target.detach().copy_(source)
        self._sent, self._received, self._arriving = [], [], []
