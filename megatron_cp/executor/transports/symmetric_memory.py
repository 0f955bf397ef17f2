"""`SymmetricMemory`: ranks of one host copy what they receive out of the sender's device. On CUDA.

    stage   the sender copies a piece to its own window, and signals each reader
    read    the reader waits for that signal, copies the piece out of the sender's window, and signals back
    again   a slot of the window is written once all readers of its last pieces have signalled

A start queues all of it on one stream beside the caller's, in the same order on all ranks, so the host waits for
nothing; a wait lets the caller's stream wait for that one. Copies between devices are plain ones, which copy engines
do: no kernel of a collective takes processors meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, Wire
from megatron_cp.executor.groups.base import Done, check_peers
from megatron_cp.executor.transports.shared_memory import system
from megatron_cp.plan.transport import Transport
from megatron_cp.torch_private import is_capturing, symmetric_backend, symmetric_memory

# Bytes of a slot. Larger pieces take several rounds: about 16 MiB of 8 ranks, which a link carries in some 40 us, take
# the host as long to queue.
SLOT = 128 << 20
_REMEDY = 'Use "collective" or "pairwise", which need no symmetric memory.'
_SLOTS = 2  # a piece is staged while the one before is read


class SymmetricMemory(Wire):
    """Lets each receiver copy its piece out of the sender's window. Making the first of a group is collective."""

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        self.group, self.buffers = group, group.buffers
        self.window = None if group.size == 1 and not group.path else window_of(group)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        pieces = sent.split(sent_splits), received.split(received_splits)
        sends, receives = ([Message(piece, peer) for peer, piece in enumerate(each)] for each in pieces)
        return self._start(sends, receives)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        size = self.group.size
        receives = [Message(piece, peer) for peer, piece in enumerate(received.split([sent.numel()] * size))]
        return self._start([Message(sent, peer) for peer in range(size)], receives, to_all=True)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        check_peers((*sends, *receives), self.group.rank)
        return self._start(sends, receives)

    def _start(self, sends: Sequence[Message], receives: Sequence[Message], *, to_all: bool = False) -> Pending:
        window, rank, size = self.window, self.group.rank, self.group.size
        self._check(tensor for tensor, _ in (*sends, *receives))
        outgoing, incoming = (_by_peer(messages, size) for messages in (sends, receives))
        own = list(zip(incoming[rank], outgoing[rank], strict=False))

        def work() -> None:
            for received, sent in own:
                received.copy_(sent)
            if window is None:
                return
            after = [(rank + step) % size for step in range(1, size)]
            if to_all:
                shares = [(outgoing[after[0]], [self._whole(peer) for peer in after])] if after else []
            else:
                shares = [(outgoing[peer], [self._whole(peer)]) for peer in after]
            arriving = [(incoming[peer], self._whole(peer)) for peer in reversed(after)]
            window.exchange(shares, arriving, self.group.patience, to_all=to_all)

        if window is None:
            work()
            return Done()
        return window.queue(work, [tensor for tensor, _ in (*sends, *receives)])

    def _check(self, tensors: Iterable[Tensor]) -> None:
        if self.window is None:
            return
        for tensor in tensors:
            if tensor.device != self.window.device:
                allowed = f"tensors of the rank's device {self.window.device}, not of {tensor.device}"
                raise ArgumentError("transport", "symmetric_memory", allowed, _REMEDY)

    def _whole(self, rank: int) -> int:
        """Returns a rank's number in the whole group, to which the window belongs."""
        for ranks in reversed(self.group.path):
            rank = ranks[rank]
        return rank


def _by_peer(messages: Sequence[Message], size: int) -> list[list[Tensor]]:
    """Returns the bytes of the messages to or from each rank, in order."""
    found: list[list[Tensor]] = [[] for _ in range(size)]
    for tensor, peer in messages:
        found[peer].append(tensor.detach().view(-1).view(torch.uint8))
    return found


class DeviceWindow:
    """A rank's memory on its device that the other ranks of its host read, and the signals between them.

    No size is agreed upon: a piece that is larger than its region of a slot is cut in the same way by the rank that
    sends it and the one that receives it, and takes more rounds. A slot is chosen by the number of the operation and of
    the round, which are the same on both.

    Args:
        handle: torch's handle of symmetric memory of `SLOT * 2` bytes.
        keep: what must live as long as the window.
    """

    def __init__(self, handle: Any, device: torch.device, keep: Any = None) -> None:
        self.rank, self.size, self.device = handle.rank, handle.world_size, device
        self._handle, self._keep = handle, keep
        self._slot = handle.buffer_size // _SLOTS
        with torch.inference_mode(False):  # written by later operations in any mode
            shape = (_SLOTS * self._slot,)
            self._bytes = [handle.get_buffer(rank, shape, torch.uint8, 0) for rank in range(self.size)]
        self._number = 0  # of the next operation
        self._unread: list[list[int]] = [[] for _ in range(_SLOTS)]  # the ranks that may not have read a slot yet
        self._stream = self._new_stream()

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self.device, priority=-1)  # small kernels that others wait for

    def queue(self, work: Callable[[], None], tensors: Sequence[Tensor]) -> Pending:
        """Queues work on tensors beside the current stream, after what the current stream has been given so far.

        Raises:
            ArgumentError: the current stream is being captured: replays would take signals of other calls.
        """
        if is_capturing():
            raise ArgumentError("transport", "symmetric_memory", "operations that no CUDA graph captures", _REMEDY)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            work()
        return _Queued(self._stream.record_event(), self.device, tensors)

    def exchange(
        self, sends: Sequence[tuple[Sequence[Tensor], Sequence[int]]], receives: Sequence[tuple[Sequence[Tensor], int]],
        seconds: float, *, to_all: bool = False,
    ) -> None:  # fmt: skip
        """Queues one operation, in which other ranks read what this rank sends, and it what they send.

        Args:
            sends: flat tensors of bytes and the ranks that read them; the rank, if not `to_all`.
            receives: flat tensors of bytes, and the rank that sends them.
            seconds: the time after which a wait for a signal makes the device fail.
            to_all: True if each rank sends the same to all that read from it, which takes the whole slot.
        """
        limit, region = int(1e3 * seconds), self._slot if to_all else self._slot // self.size // 16 * 16
        number, self._number = self._number, self._number + 1
        outgoing = [
            (_pieces(tensors, region), readers, 0 if to_all else readers[0] * region) for tensors, readers in sends
        ]
        incoming = [(_pieces(tensors, region), peer, 0 if to_all else self.rank * region) for tensors, peer in receives]
        for turn in range(max((len(pieces) for pieces, *_ in (*outgoing, *incoming)), default=0)):
            slot = (number + turn) % _SLOTS
            staged = [(pieces[turn], readers, at) for pieces, readers, at in outgoing if turn < len(pieces)]
            if staged:
                self._await_readers(slot, limit)
            for piece, readers, at in staged:
                self._stage(piece, readers, slot, at, limit)
            for pieces, peer, at in incoming:
                if turn < len(pieces):
                    self._read(pieces[turn], peer, slot, at, limit)

    def _await_readers(self, slot: int, limit: int) -> None:
        for reader in self._unread[slot]:
            self._handle.wait_signal(reader, _SLOTS + slot, limit)
        self._unread[slot] = []

    def _stage(self, piece: Tensor, readers: Sequence[int], slot: int, at: int, limit: int) -> None:
        self._place(self.rank, slot, at, piece).copy_(piece)
        for reader in readers:
            self._handle.put_signal(reader, slot, limit)
        self._unread[slot] += readers

    def _read(self, piece: Tensor, peer: int, slot: int, at: int, limit: int) -> None:
        self._handle.wait_signal(peer, slot, limit)
        piece.copy_(self._place(peer, slot, at, piece))
        self._handle.put_signal(peer, _SLOTS + slot, limit)

    def _place(self, rank: int, slot: int, at: int, piece: Tensor) -> Tensor:
        start = slot * self._slot + at
        return self._bytes[rank][start : start + piece.numel()]


class _Queued(Pending):
    """Work beside the caller's stream, with the tensors that must live until it is done."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, tensors: Sequence[Tensor]) -> None:
        self._event, self._device, self._tensors = event, device, tensors

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()


def _pieces(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    return [piece for tensor in tensors for piece in tensor.split(size) if piece.numel()]


_windows: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceWindow] = weakref.WeakKeyDictionary()


def window_of(group: RankGroup) -> DeviceWindow:
    """Returns the window of a group's ranks; the first call is collective.

    Raises:
        ArgumentError: the ranks cannot read each other's memory; on every rank.
    """
    found = None if group.process_group is None else _windows.get(group.process_group)
    if found is None:
        group.activity = "set-up of symmetric memory"
        obstacle = _obstacle(group)
        _refuse(group, (obstacle, system()), apart="the ranks are on several hosts, or in several containers")
        device, lacking = torch.device("cuda", torch.cuda.current_device()), ""
        try:
            memory, handle = symmetric_memory(_SLOTS * SLOT, device, group.process_group)
            found = DeviceWindow(handle, device, memory)
        except RuntimeError as error:
            lacking = str(error).splitlines()[0]
        _refuse(group, (lacking, ""))
        assert found is not None
        _windows[group.process_group] = found  # by all ranks or none
    return found


def _obstacle(group: RankGroup) -> str:
    """Names what this rank can tell by itself, or returns an empty string."""
    if group.process_group is None:
        return "it is no rank of a torch.distributed group"
    if not torch.cuda.device_count():
        return "it has no CUDA device"
    backend = symmetric_backend(torch.device("cuda"))
    return "" if backend == "CUDA" else f'torch has the backend {backend} of symmetric memory, and not "CUDA"'


def _refuse(group: RankGroup, own: tuple[str, Any], apart: str = "") -> None:
    """Refuses on every rank if one names an obstacle, or if they are not in one place."""
    said = group.all_gather_object(own)
    found = [f"rank {rank}: {obstacle}" for rank, (obstacle, _) in enumerate(said) if obstacle]
    if not found and len({place for _, place in said}) > 1:
        found = [apart]
    if found:
        allowed = f"processes of one host, each with a CUDA device that the others reach ({'; '.join(found)})"
        raise ArgumentError("transport", "symmetric_memory", allowed, _REMEDY)
