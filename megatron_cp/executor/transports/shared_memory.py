"""`SharedMemory`: ranks of one host copy what they receive out of the sender's memory. On the CPU.

    start   writes a note to each receiver, with the place of its piece
    wait    copies each piece when its note is there, and waits until the own pieces have been read

The group's buffers are in memory that the other ranks map; what is sent from elsewhere is copied to a buffer first.
This memory is anonymous (`memfd_create`): it needs no mount of a certain size, and ends with its processes.

Each rank has a pipe, from which it reads the notes of all others. The pipe also orders the accesses of the memory, on
every processor: the kernel locks it for each write and each read, so whoever has read a note sees all that its writer
wrote before it. A note is no longer than `PIPE_BUF`, so it is written and read whole, whoever else writes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import sys
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, PeerError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, Wire, keep_own
from megatron_cp.plan.transport import Transport
from megatron_cp.torch_private import no_modes

# Kind, writer and number of the piece; bytes and `FilePlace` of the piece; checksum and text of an activity. 512 bytes,
# of which a page, and so a full pipe, has a whole number.
_NOTE = struct.Struct("=iiqqqqqqI452s")
_SENT, _READ, _FAILED = range(3)  # kinds: a piece is there; a piece has been read; the writer has failed
_PIPE_SIZE = 1 << 20  # bytes: 2,048 notes, which Linux allows every user
_NOTES_AT_ONCE = 128  # that are read
_SLICE = 0.2  # seconds of a wait between two looks at the other ranks' processes
_MAPPED = 256  # buffers of one other rank that stay mapped
_REMEDY = 'Use "collective" or "pairwise", which need no shared memory.'


class SharedMemory(Wire):
    """Lets each receiver copy its piece out of the sender's memory. Making the first of a group is collective."""

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        self.group, self.buffers = group, group.buffers
        self.heap = heap_of(group)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        staged = list[Tensor]()
        return self._exchange(received.split(received_splits), self._readable(sent, staged).split(sent_splits), staged)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        size, staged = self.group.size, list[Tensor]()
        return self._exchange(received.split([sent.numel()] * size), [self._readable(sent, staged)] * size, staged)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        staged = list[Tensor]()
        sent = [Message(self._readable(tensor, staged), peer) for tensor, peer in sends]
        return _Copies(self, sent, receives, staged)

    def _exchange(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], staged: list[Tensor]) -> Pending:
        keep_own(incoming[self.group.rank], outgoing[self.group.rank])
        others = [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]
        sent, received = ([Message(pieces[peer], peer) for peer in others] for pieces in (outgoing, incoming))
        return _Copies(self, sent, received, staged)

    def _readable(self, sent: Tensor, staged: list[Tensor]) -> Tensor:
        """Returns the tensor, or a copy of it in shared memory, which is added to `staged`."""
        if not sent.is_cpu:
            remedy = 'Use "collective" or "pairwise" for tensors of a device.'
            raise ArgumentError("transport", "shared_memory", f"tensors of the host, not of {sent.device}", remedy)
        if not sent.numel() or self.heap.pool.place(sent) is not None:
            return sent
        copy = self.buffers.acquire_like(sent, sent.numel())
        staged.append(copy)
        with no_modes():
            copy.copy_(sent.detach())
        return copy


class _Copies(Pending):
    """Pieces that this rank copies from others, and pieces that others copy from it."""

    def __init__(
        self, wire: SharedMemory, sends: Sequence[Message], receives: Sequence[Message], staged: list[Tensor]
    ) -> None:
        group, heap = wire.group, wire.heap
        self._heap, self._buffers = heap, wire.buffers
        self._waits = _Waits(group.activity, group.patience, group.has_failed)
        self._staged = staged
        self._tensors = [message.tensor for message in (*sends, *receives)]  # they live until they have been read
        self._sent, self._awaited = list[tuple[int, int]](), dict[tuple[int, int], Tensor]()  # by peer and number
        for tensor, peer in receives:
            if tensor.numel():
                self._awaited[peer, heap.expect(peer)] = tensor.detach().view(torch.uint8)
        for tensor, peer in sends:
            if tensor.numel():
                place = heap.pool.place(tensor)
                assert place is not None
                self._sent.append((peer, heap.send(place, tensor.nbytes, peer, self._waits)))

    def wait(self) -> None:
        heap, waits = self._heap, self._waits
        while self._awaited:
            heap.wait_until(self._some_arrived, next(iter(self._awaited))[0], waits)
            with no_modes():  # counters of copied activations must not count the transfer itself
                for peer, number in [key for key in self._awaited if heap.arrived(*key)]:
                    heap.read(self._awaited.pop((peer, number)), peer, number, waits)
        for peer, number in self._sent:
            heap.wait_until(partial(heap.was_read, peer, number), peer, waits)
        self._buffers.release(*self._staged)
        self._sent, self._staged = [], []
        self._tensors.clear()

    def _some_arrived(self) -> bool:
        return any(self._heap.arrived(peer, number) for peer, number in self._awaited)


class _Waits(NamedTuple):
    """Arguments of a transfer's waits.

    Attributes:
        patience: seconds to wait for one rank.
    """

    activity: str
    patience: float
    has_failed: Callable[[], bool]


class FilePlace(NamedTuple):
    """The place of bytes in a process: the number of a file, its serial number and size, and the offset in it."""

    file: int
    serial: int
    size: int
    offset: int


class _MappedFile:
    """The bytes of a file, mapped."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size = file, size
        self.bytes = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    @classmethod
    def new(cls, size: int) -> _MappedFile:
        file = os.memfd_create("megatron_cp", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        made = cls(file, size)
        weakref.finalize(made.bytes, os.close, file)
        return made

    @classmethod
    def of(cls, pid: int, file: int, size: int) -> _MappedFile:
        """Maps memory of another process, or of this one."""
        opened = _open_in(pid, file, os.O_RDWR)
        try:
            return cls(opened, size)
        finally:
            os.close(opened)  # the map has its own


def _open_in(pid: int, file: int, flags: int) -> int:
    """Opens what another process of this user, or this one, has open by a number."""
    return os.open(f"/proc/{pid}/fd/{file}", flags | os.O_CLOEXEC)


_NOWHERE = FilePlace(0, 0, 0, 0)


class SharedPool:
    """Makes a group's buffers in memory that the other ranks can read."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], int, int, int]] = {}  # by address
        self._serial = 0

    def make(self, size: int) -> Tensor:
        """Returns `[size]` bytes."""
        memory = _MappedFile.new(max(size, 1))
        self._serial += 1
        self._made = {address: known for address, known in self._made.items() if known[0]() is not None}
        self._made[memory.address] = weakref.ref(memory.bytes), memory.file, self._serial, memory.size
        return memory.bytes

    def place(self, tensor: Tensor) -> FilePlace | None:
        """Returns where a tensor is, or None if it is not in such memory."""
        address = tensor.untyped_storage().data_ptr()
        known = self._made.get(address)
        if known is None or known[0]() is None:
            return None
        return FilePlace(*known[1:], tensor.data_ptr() - address)


class _Piece(NamedTuple):
    """A piece that another rank has sent: its bytes and place there, and checksum and text of the activity there."""

    nbytes: int
    place: FilePlace
    checksum: int
    text: bytes


class SharedHeap:
    """The notes between a group's ranks, and what is mapped of their memory. Making one is collective.

    Pieces are numbered for each pair of ranks and direction.

    Args:
        group: ranks of one Linux host, which are processes, or threads of one.

    Raises:
        ArgumentError: the ranks cannot read each other's memory; on every rank.
    """

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size
        group.activity = "set-up of shared memory"
        systems = group.all_gather_object(system())
        if None in systems or len(set(systems)) > 1:
            raise ArgumentError("transport", "shared_memory", "ranks that are processes of one Linux host", _REMEDY)
        # Its own end for writing stays open, too: a pipe that nobody can write to counts as ended.
        self._pipe, end = os.pipe()
        with suppress(OSError):  # a pipe of the usual size will do
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        pids, ends = zip(*group.all_gather_object((os.getpid(), end)), strict=True)
        self._pids, self._ends = pids, list[int]()  # ends for writing to each rank's pipe
        self._processes, unreadable = dict[int, int](), ""
        try:
            for pid, number in zip(pids, ends, strict=True):
                self._ends.append(_open_in(pid, number, os.O_WRONLY | os.O_NONBLOCK))
            for pid in {*pids} - {os.getpid()}:
                self._processes[os.pidfd_open(pid)] = pid
        except OSError as error:
            unreadable = f"rank {self.rank}: {error}"
        refusals = "; ".join(filter(None, group.all_gather_object(unreadable)))
        for file in (self._pipe, end, *self._ends, *self._processes):
            weakref.finalize(self, os.close, file)
        if refusals:
            raise ArgumentError("transport", "shared_memory", f"processes of one user ({refusals})", _REMEDY)
        self._poll = select.poll()
        for file in (self._pipe, *self._processes):
            self._poll.register(file, select.POLLIN)
        self.pool = _share(group.buffers)
        self._mapped: list[OrderedDict[int, _MappedFile]] = [OrderedDict() for _ in pids]
        self._started, self._expected = [0] * self.size, [0] * self.size  # the numbers of the next pieces
        self._arrived = dict[tuple[int, int], _Piece]()  # by sender and number; not yet read
        self._unread = set[tuple[int, int]]()  # by receiver and number
        self._failures = dict[int, str]()  # of other ranks
        self._ended = set[int]()  # processes

    def send(self, place: FilePlace, nbytes: int, peer: int, waits: _Waits) -> int:
        """Writes a note to another rank; returns the number of the piece. It waits only if the rank's pipe is full."""
        number = self._started[peer]
        self._started[peer] += 1
        self._unread.add((peer, number))
        self.wait_until(partial(self._write, peer, _SENT, number, nbytes, place, waits.activity), peer, waits)
        return number

    def expect(self, peer: int) -> int:
        """Returns the number of the next piece from another rank."""
        self._expected[peer] += 1
        return self._expected[peer] - 1

    def arrived(self, peer: int, number: int) -> bool:
        """Returns True if the note of a piece has arrived."""
        return (peer, number) in self._arrived

    def was_read(self, peer: int, number: int) -> bool:
        """Returns True if another rank has read this rank's piece."""
        return (peer, number) not in self._unread

    def read(self, into: Tensor, peer: int, number: int, waits: _Waits) -> None:
        """Copies the bytes of a piece whose note has arrived."""
        piece = self._arrived.pop((peer, number))
        if piece.nbytes != into.numel() or piece.checksum != zlib.crc32(waits.activity.encode()):
            there = _decoded(piece.text) or "a transfer of the caller"
            raise self.failure(f"expects {into.numel()} bytes from rank {peer}, which sent {piece.nbytes} in {there}",
                               peer, waits.activity)  # fmt: skip
        into.copy_(self._bytes_of(peer, piece.place)[piece.place.offset :][: piece.nbytes])
        self.wait_until(partial(self._write, peer, _READ, number), peer, waits)

    def wait_until(self, condition: Callable[[], bool], peer: int, waits: _Waits) -> None:
        """Waits for another rank."""
        activity, since = waits.activity, time.monotonic()
        while not condition():
            if self._listen():
                continue
            if self._failures:
                rank, text = next(iter(self._failures.items()))
                raise self.failure(f"rank {rank} failed: {text}", rank, activity)
            if self._ended:
                rank = next(rank for rank, pid in enumerate(self._pids) if pid in self._ended)
                raise self.failure(f"rank {rank} has ended", rank, activity)
            if waits.has_failed():
                raise self.failure("stopped, since another rank of its group failed", peer, activity)
            if time.monotonic() - since > waits.patience:
                raise self.failure(f"rank {peer} did not answer in {waits.patience:.0f} s", peer, activity)

    def failure(self, text: str, peer: int, activity: str) -> PeerError:
        """Tells the other ranks of an error, and returns it."""
        text = f"rank {self.rank} of {self.size}, in {activity or 'a transfer of the caller'}: {text}"
        for rank in set(range(self.size)) - {self.rank}:
            self._write(rank, _FAILED, text=text)  # a rank whose pipe is full learns it when this one ends
        return PeerError(text, rank=self.rank, peer=peer)

    def _write(
        self, peer: int, kind: int, number: int = 0, nbytes: int = 0, place: FilePlace = _NOWHERE, text: str = "",
    ) -> bool:  # fmt: skip
        """Writes a note to another rank; returns False if its pipe is full."""
        said = text.encode()
        note = _NOTE.pack(kind, self.rank, number, nbytes, *place, zlib.crc32(said), said)  # cut to its length
        try:
            os.write(self._ends[peer], note)
        except BlockingIOError:
            return False
        except BrokenPipeError:  # the rank has ended, which a wait for it finds out
            pass
        return True

    def _listen(self) -> bool:
        """Waits a moment for notes, which it takes in, and for processes that end; returns True if any came."""
        heard = self._poll.poll(1e3 * _SLICE)
        for file, _ in heard:
            if file in self._processes:
                self._ended.add(self._processes[file])
                self._poll.unregister(file)
                continue
            notes = os.read(file, _NOTES_AT_ONCE * _NOTE.size)
            for kind, peer, number, nbytes, *place, checksum, text in _NOTE.iter_unpack(notes):
                if kind == _SENT:
                    self._arrived[peer, number] = _Piece(nbytes, FilePlace(*place), checksum, text)
                elif kind == _READ:
                    self._unread.discard((peer, number))
                else:
                    self._failures[peer] = _decoded(text)
        return bool(heard)

    def _bytes_of(self, peer: int, place: FilePlace) -> Tensor:
        mapped = self._mapped[peer]
        found = mapped.get(place.serial)
        if found is None:
            found = mapped[place.serial] = _MappedFile.of(self._pids[peer], place.file, place.size)
            if len(mapped) > _MAPPED:
                mapped.popitem(last=False)
        return found.bytes


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


_pools: weakref.WeakKeyDictionary[Buffers, SharedPool] = weakref.WeakKeyDictionary()
_heaps: weakref.WeakKeyDictionary[Buffers, dict[Any, SharedHeap]] = weakref.WeakKeyDictionary()


def heap_of(group: RankGroup) -> SharedHeap:
    """Returns the heap of a group's ranks; the first call is collective."""
    heaps = _heaps.setdefault(group.buffers, {})
    key = group.rank, group.size, group.path
    if key not in heaps:
        heaps[key] = SharedHeap(group)
    return heaps[key]


def _share(buffers: Buffers) -> SharedPool:
    pool = _pools.get(buffers)
    if pool is None:
        pool = _pools[buffers] = SharedPool()
        buffers.make_host_memory_by(pool.make)
    return pool


def system() -> str | None:
    """Names the system in which this process can be found, or returns None where there is no such memory."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
