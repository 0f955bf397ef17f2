"""`SharedHeap`: memory that the ranks of one host read from each other, and the notes that they leave each other.

    board     each rank has one: a ring of notes from each other rank, and a semaphore, its bell
    note      a message's number, bytes, place in its sender's memory, activity, and whether it was read
    bell      rung by whoever has written a note, has read one, or has failed

A sender writes a note and rings. The receiver copies the bytes out of the sender's memory, marks the note as read, and
rings back. Memory is anonymous (`memfd_create`): it needs no mount of a certain size, and ends with its processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import sys
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, PeerError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor.groups.base import RankGroup

_NOTES = 512  # of each pair of ranks and direction that may be unread at a time
# The number and 1, bytes, file, its serial number and size, offset, checksum and text of the activity.
_NOTE = struct.Struct("=qqqqqqI196s")
_READ = struct.Struct("=q")
_NOTE_SIZE = 256
_RING_SIZE = _NOTES * _NOTE_SIZE
_BELL_SIZE = 64  # glibc's sem_t has 32 bytes
_FAILURE_SIZE = 4096 - _BELL_SIZE
_SLICE = 0.2  # seconds of a wait between two looks at the other ranks' processes
_MAPPED = 256  # buffers of one other rank that stay mapped


class Place(NamedTuple):
    """The place of bytes in a process: the number of a file, its serial number and size, and the offset in it."""

    file: int
    serial: int
    size: int
    offset: int


class _Memory:
    """Bytes of a file, mapped."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size = file, size
        self.map = mmap.mmap(file, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    @classmethod
    def new(cls, size: int) -> _Memory:
        file = os.memfd_create("megatron_cp", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        made = cls(file, size)
        weakref.finalize(made.bytes, os.close, file)
        return made

    @classmethod
    def of(cls, pid: int, file: int, size: int) -> _Memory:
        """Maps memory of another process, or of this one."""
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(opened, size)
        finally:
            os.close(opened)  # the map has its own


class SharedPool:
    """Makes a group's buffers in memory that the other ranks can read."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], int, int, int]] = {}  # by address
        self._serial = 0

    def make(self, size: int) -> Tensor:
        """Returns `[size]` bytes."""
        memory = _Memory.new(max(size, 1))
        self._serial += 1
        self._made = {address: known for address, known in self._made.items() if known[0]() is not None}
        self._made[memory.address] = weakref.ref(memory.bytes), memory.file, self._serial, memory.size
        return memory.bytes

    def place(self, tensor: Tensor) -> Place | None:
        """Returns where a tensor is, or None if it is not in such memory."""
        address = tensor.untyped_storage().data_ptr()
        known = self._made.get(address)
        if known is None or known[0]() is None:
            return None
        return Place(*known[1:], tensor.data_ptr() - address)


class Waits(NamedTuple):
    """Arguments of a transfer's waits.

    Attributes:
        patience: seconds to wait for one rank.
    """

    activity: str
    patience: float
    has_failed: Callable[[], bool]


class SharedHeap:
    """The boards of a group's ranks and what is mapped of their memory. Making one is collective.

    Args:
        group: ranks of one Linux host, which are processes, or threads of one.

    Raises:
        ArgumentError: the ranks cannot read each other's memory; on every rank.
    """

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size
        group.activity = "set-up of shared memory"
        remedy = 'Use "collective" or "pairwise", which need no shared memory.'
        systems = group.all_gather_object(system())
        if None in systems or len(set(systems)) > 1:
            raise ArgumentError("transport", "shared_memory", "ranks that are processes of one Linux host", remedy)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._board = _Memory.new(_BELL_SIZE + _FAILURE_SIZE + self.size * _RING_SIZE)
        self._bell = ctypes.c_void_p(self._board.address)
        self._libc.sem_init(self._bell, 1, 0)
        pids, files = zip(*group.all_gather_object((os.getpid(), self._board.file)), strict=True)
        self._pids = pids
        self._boards, unreadable = [], ""
        try:
            self._boards = [_Memory.of(pid, file, self._board.size) for pid, file in zip(pids, files, strict=True)]
        except OSError as error:
            unreadable = f"rank {self.rank}: {error}"
        refusals = "; ".join(filter(None, group.all_gather_object(unreadable)))
        if refusals:
            raise ArgumentError("transport", "shared_memory", f"processes of one user ({refusals})", remedy)
        self.pool = _share(group.buffers)
        self._bells = [ctypes.c_void_p(board.address) for board in self._boards]
        self._mapped: list[OrderedDict[int, _Memory]] = [OrderedDict() for _ in pids]
        self._watched = _Watched({pid for pid in pids if pid != os.getpid()})
        self._sent, self._received = [0] * self.size, [0] * self.size  # numbers of the next notes

    def send(self, place: Place, nbytes: int, peer: int, waits: Waits) -> int:
        """Writes a note to another rank; returns its number."""
        number = self._sent[peer]
        self._sent[peer] += 1
        if number >= _NOTES:
            self.wait_until(partial(self.was_read, peer, number - _NOTES), peer, waits)
        at, text = self._note(self.rank, number), waits.activity.encode()
        fields = nbytes, *place[:4], zlib.crc32(text), text[:196]
        _NOTE.pack_into(self._boards[peer].map, at, 0, *fields)
        self._fence()
        _READ.pack_into(self._boards[peer].map, at, number + 1)
        self._ring(peer)
        return number

    def expect(self, peer: int) -> int:
        """Returns the number of the next note from another rank."""
        self._received[peer] += 1
        return self._received[peer] - 1

    def arrived(self, peer: int, number: int) -> bool:
        """Returns True if a note has been written."""
        return bool(_READ.unpack_from(self._board.map, self._note(peer, number))[0] == number + 1)

    def was_read(self, peer: int, number: int) -> bool:
        """Returns True if another rank has read this rank's note, or a later one in its place."""
        at = self._note(self.rank, number) + _NOTE.size
        return bool(_READ.unpack_from(self._boards[peer].map, at)[0] > number)

    def read(self, into: Tensor, peer: int, number: int, activity: str) -> None:
        """Copies the bytes of a note that has arrived."""
        self._fence()
        at = self._note(peer, number)
        _, nbytes, file, serial, size, offset, checksum, text = _NOTE.unpack_from(self._board.map, at)
        if nbytes != into.numel() or checksum != zlib.crc32(activity.encode()):
            there = text.rstrip(b"\0").decode(errors="replace") or "a transfer of the caller"
            raise self.failure(f"expects {into.numel()} bytes from rank {peer}, which sent {nbytes} in {there}",
                               peer, activity)  # fmt: skip
        into.copy_(self._bytes_of(peer, file, serial, size)[offset : offset + nbytes])
        self._fence()
        _READ.pack_into(self._board.map, at + _NOTE.size, number + 1)
        self._ring(peer)

    def wait_until(self, condition: Callable[[], bool], peer: int, waits: Waits) -> None:
        """Waits for another rank."""
        activity = waits.activity
        since = time.monotonic()
        while not condition():
            if self._hear():
                continue
            for other, board in enumerate(self._boards):
                told = board.map[_BELL_SIZE : _BELL_SIZE + _FAILURE_SIZE].rstrip(b"\0").decode(errors="replace")
                if told:
                    raise self.failure(f"rank {other} failed: {told}", other, activity)
            ended = self._watched.ended()
            if ended and not condition():
                rank = next(rank for rank, pid in enumerate(self._pids) if pid in ended)
                raise self.failure(f"rank {rank} has ended", rank, activity)
            if waits.has_failed():
                raise self.failure("stopped, since another rank of its group failed", peer, activity)
            if time.monotonic() - since > waits.patience:
                raise self.failure(f"rank {peer} did not answer in {waits.patience:.0f} s", peer, activity)

    def failure(self, text: str, peer: int, activity: str) -> PeerError:
        """Tells the other ranks of an error, and returns it."""
        text = f"rank {self.rank} of {self.size}, in {activity or 'a transfer of the caller'}: {text}"
        told = text.encode()[:_FAILURE_SIZE]
        self._board.map[_BELL_SIZE : _BELL_SIZE + len(told)] = told
        for rank in range(self.size):
            self._ring(rank)
        return PeerError(text, rank=self.rank, peer=peer)

    def _bytes_of(self, peer: int, file: int, serial: int, size: int) -> Tensor:
        mapped = self._mapped[peer]
        found = mapped.get(serial)
        if found is None:
            found = mapped[serial] = _Memory.of(self._pids[peer], file, size)
            if len(mapped) > _MAPPED:
                mapped.popitem(last=False)
        return found.bytes

    def _note(self, sender: int, number: int) -> int:
        return _BELL_SIZE + _FAILURE_SIZE + sender * _RING_SIZE + number % _NOTES * _NOTE_SIZE

    def _ring(self, peer: int) -> None:
        self._libc.sem_post(self._bells[peer])

    def _hear(self) -> bool:
        """Waits a moment for the bell; returns True if it rang."""
        until = time.time() + _SLICE
        moment = _Timespec(int(until), int(until % 1 * 1e9))
        return self._libc.sem_timedwait(self._bell, ctypes.byref(moment)) == 0

    def _fence(self) -> None:
        """Orders what is written before it and after it, as other processors see it."""
        self._libc.sem_post(self._bell)
        self._libc.sem_trywait(self._bell)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Watched:
    """Other processes, of which it is known when one has ended."""

    def __init__(self, pids: set[int]) -> None:
        self._pids = {os.pidfd_open(pid): pid for pid in pids}
        self._poll = select.poll()
        for file in self._pids:
            self._poll.register(file, select.POLLIN)
            weakref.finalize(self, os.close, file)

    def ended(self) -> set[int]:
        return {self._pids[file] for file, _ in self._poll.poll(0)}


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
