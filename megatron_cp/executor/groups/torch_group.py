"""`TorchGroup`: the ranks of a torch.distributed process group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_cp.errors import ArgumentError, PeerError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups.base import (
    Agreed,
    Done,
    Message,
    Pending,
    RankGroup,
    check_peers,
    check_splits,
    keep_own,
)
from megatron_cp.executor.groups.tagged import TaggedMessages, is_peer_failure
from megatron_cp.executor.groups.thread_group import ThreadGroup
from megatron_cp.torch_private import limit_waits, wait_limit

Group = RankGroup | dist.ProcessGroup | DeviceMesh  # the types that operations accept; a mesh must have one axis


class _GroupState:
    """State that lives as long as a process group, while every operation wraps the group in a new `TorchGroup`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.buffers, self.agreed = Buffers(), Agreed()
        # Host tensors are sent by tagged messages where gloo moves them.
        self.tagged = TaggedMessages(group, self.agreed) if "cpu:gloo" in dist.get_backend_config(group) else None


_states: WeakKeyDictionary[dist.ProcessGroup, _GroupState] = WeakKeyDictionary()


def _state_of(group: dist.ProcessGroup) -> _GroupState:
    found = _states.get(group)
    if found is None:
        found = _states[group] = _GroupState(group)
    return found


def set_timeout(seconds: float) -> None:
    """Limits the time that this process waits for another rank, in all of its process groups.

    Call it after the first step of a job, in which ranks import and compile at different speeds.
    """
    for group in limit_waits(timedelta(seconds=seconds)):
        tagged = _state_of(group).tagged
        if tagged is not None:
            tagged.timeout = seconds  # torch keeps a group's first limit for messages from rank to rank


@contextlib.contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Turns errors of gloo and NCCL about other ranks inside the context into a `PeerError` that says what was done."""
    since = time.monotonic()
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        seconds, rank = time.monotonic() - since, dist.get_rank()
        text = (
            f"rank {rank} of {dist.get_world_size()}, in {doing}, after {seconds:.0f} s: another rank did not answer, "
        )
        raise PeerError(f"{text}has ended, or does something else. {error}", rank=rank) from error


class TorchGroup(RankGroup):
    """A torch.distributed process group, on any backend.

    Args:
        group: the process group.
        host_group: a group of the same ranks that can move host tensors (gloo), for work outside of steps. None if
            `group` can do so itself.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(group, dist.ProcessGroup):
            allowed = "a torch.distributed group, a mesh of one axis, a RankGroup, or None for one rank"
            raise ArgumentError("group", group, allowed)
        self.group = self.process_group = group
        self.host_group = host_group
        state = _state_of(group)
        self.buffers, self.agreed, self._tagged = state.buffers, state.agreed, state.tagged
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    @property
    def patience(self) -> float:
        given = None if self._tagged is None else self._tagged.timeout
        return wait_limit(self.group) if given is None else given

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        check_splits(received, received_splits, "received_splits", self.size)
        check_splits(sent, sent_splits, "sent_splits", self.size)
        if self._tagged is not None and not sent.is_cuda:
            return self._start_pieces(received.split(received_splits), sent.split(sent_splits))
        work = dist.all_to_all_single(received, sent, received_splits, sent_splits, group=self.group, async_op=True)
        return _Works(work, (received, sent), self)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        if self._tagged is not None and not sent.is_cuda:
            return self._start_pieces(received.split([sent.numel()] * self.size), [sent] * self.size)
        work = dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True)
        return _Works(work, (received, sent), self)

    def _start_pieces(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        """Starts a collective over gloo as messages to and from each rank, beginning with the next rank."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        pending = self._start_plain_messages(
            [Message(sent[peer], peer) for peer in others], [Message(received[peer], peer) for peer in others]
        )
        keep_own(received[self.rank], sent[self.rank])
        return pending

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        check_peers((*sends, *receives), self.rank)
        if not sends and not receives:
            return Done()
        if any(message.tensor.is_cuda for message in (*sends, *receives)):
            if "cuda:gloo" in dist.get_backend_config(self.group):
                return self._start_staged_messages(sends, receives)
            return self._start_fused_messages(sends, receives)
        return self._start_plain_messages(sends, receives)

    def _start_plain_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self._tagged is None:
            backend = dist.get_backend_config(self.group)
            raise ArgumentError(
                "group", backend, "a group with gloo for tensors of the host", "Such as cpu:gloo,cuda:nccl."
            )
        return self._tagged.start(sends, receives, self.activity, self.details)

    def _start_fused_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts messages as one all-to-all of bytes, for NCCL.

        NCCL sends nothing for splits of zero, and needs every rank in its first operation. torch's debugging tools
        (TORCH_DISTRIBUTED_DEBUG=DETAIL, the flight recorder) compare the numbers of the collectives that ranks have
        started, so an idle rank starts an empty one too.
        """
        sent, received = (sorted(messages, key=lambda message: message.peer) for messages in (sends, receives))
        device = (*sends, *receives)[0].tensor.device
        taken: list[Tensor] = []

        def fused(messages: list[Message]) -> Tensor:
            if len(messages) == 1:  # in a ring: the message's own tensor is used
                return _bytes_of(messages[0].tensor)
            taken.append(self.buffers.acquire(sum(message.tensor.nbytes for message in messages), device))
            return taken[-1]

        arrived, outgoing = fused(received), fused(sent)
        if len(sent) > 1:
            torch.cat([_bytes_of(message.tensor) for message in sent], out=outgoing)
        received_splits, sent_splits = (
            [sum(m.tensor.nbytes for m in messages if m.peer == peer) for peer in range(self.size)]
            for messages in (received, sent)
        )
        pending = self.start_all_to_all(arrived, outgoing, received_splits, sent_splits)
        return _Unpacked(pending, arrived, received if len(received) > 1 else [], taken, self.buffers)

    def _start_staged_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts messages of device tensors through pinned host memory, since gloo sends host tensors only.

        Empty messages are not sent.
        """
        sends, receives = ([message for message in both if message.tensor.numel()] for both in (sends, receives))
        staged = [
            [Message(self._staged(message.tensor), message.peer) for message in messages]
            for messages in (sends, receives)
        ]
        for message, copy in zip(sends, staged[0], strict=True):
            copy.tensor.copy_(_bytes_of(message.tensor), non_blocking=True)
        if any(message.tensor.is_cuda for message in sends):
            torch.cuda.current_stream(sends[0].tensor.device).synchronize()  # gloo reads at once
        pending = self._start_plain_messages(*staged)
        return _StagedOnHost(pending, receives, staged, self.buffers)

    def _staged(self, tensor: Tensor) -> Tensor:
        return self.buffers.acquire(tensor.nbytes, tensor.device, pinned=tensor.is_cuda)

    def barrier(self) -> None:
        self.activity = "barrier"
        if self._tagged is None:
            dist.barrier(group=self.group)
            return
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self.all_gather(token.new_empty(self.size), token)

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        if self.host_group is not None:
            host = TorchGroup(self.host_group)
            host.activity, host.details = self.activity, self.details
            host.all_gather(received, sent)
        elif dist.get_backend(self.group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            gathered = received.to(device)
            dist.all_gather_into_tensor(gathered, sent.to(device), group=self.group)
            received.copy_(gathered)
        else:
            self.all_gather(received, sent)


class _Works(Pending):
    """torch.distributed's handle of a collective, with the tensors that must live until it is done."""

    def __init__(self, work: Any, tensors: tuple[Tensor, ...], group: TorchGroup) -> None:
        self._work, self._tensors = work, tensors
        self._description = f"rank {group.rank} of {group.size}, in {group.activity or 'a collective of the caller'}"

    def wait(self) -> None:
        if self._work is None:
            return
        since = time.monotonic()
        try:
            self._work.wait()
        except RuntimeError as error:
            seconds = time.monotonic() - since
            raise PeerError(f"{self._description}: other ranks did not answer in {seconds:.0f} s. {error}") from error
        self._work, self._tensors = None, ()


class _Unpacked(Pending):
    """Copies the bytes of an all-to-all to the tensors of messages, and releases the buffers."""

    def __init__(
        self, pending: Pending, arrived: Tensor, messages: list[Message], taken: list[Tensor], buffers: Buffers
    ) -> None:
        self._pending, self._arrived, self._messages = pending, arrived, messages
        self._taken, self._buffers = taken, buffers

    def wait(self) -> None:
        self._pending.wait()
        if self._messages:
            pieces = self._arrived.split([message.tensor.nbytes for message in self._messages])
            for message, piece in zip(self._messages, pieces, strict=True):
                _bytes_of(message.tensor).copy_(piece)
        self._buffers.release(*self._taken)
        self._messages, self._taken = [], []  # a second wait must not touch the released buffers


class _StagedOnHost(Pending):
    """Copies messages that arrive on the host to the device, and releases the buffers."""

    def __init__(
        self, pending: Pending, receives: Sequence[Message], staged: list[list[Message]], buffers: Buffers
    ) -> None:
        self._pending, self._receives, self._staged, self._buffers = pending, receives, staged, buffers

    def wait(self) -> None:
        self._pending.wait()
        for message, arrived in zip(self._receives, self._staged[1], strict=True):
            _bytes_of(message.tensor).copy_(arrived.tensor)  # blocking, since the buffer is released below
        self._buffers.release(*(message.tensor for messages in self._staged for message in messages))
        self._receives, self._staged = (), [[], []]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def rank_group(group: Group) -> RankGroup:
    """Returns a `RankGroup` unchanged, and wraps a process group, or that of a mesh of one axis.

    Raises:
        ArgumentError: it is no group, or a mesh of several axes.
    """
    if isinstance(group, RankGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            axes = ", ".join(map(repr, group.mesh_dim_names or ())) or "without names"
            remedy = "Say which axis the ranks of the group lie along."
            given = f"a mesh of {group.ndim} dimensions ({axes})"
            raise ArgumentError("group", given, 'one of its dimensions, such as mesh["cp"]', remedy)
        group = group.get_group()
    return TorchGroup(group)


def as_rank_group(group: Group | None, cp_size: int) -> RankGroup:
    """Returns the `RankGroup` for a plan over `cp_size` ranks; see `rank_group`. None means this rank only.

    Raises:
        ArgumentError: it is no group, has another number of ranks, or is None for several ranks.
    """
    if group is None:
        if cp_size > 1:
            remedy = 'Pass the ranks that share a batch, such as mesh["cp"] or dist.group.WORLD.'
            raise ArgumentError("group", None, f"a group of the plan's {cp_size} ranks", remedy)
        return ThreadGroup.create(1)[0]
    ranks = rank_group(group)
    if ranks.size != cp_size:
        raise ArgumentError("group", f"{ranks.size} ranks", f"the {cp_size} ranks that the plan is for")
    return ranks
