"""Both kinds of rank group say the same things: threads stand for processes in the rest of the suite."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.errors import PeerError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor.groups import Message, RankGroup, ThreadGroup, TorchGroup, as_rank_group
from megatron_cp.executor.groups.base import Done
from megatron_cp.executor.groups.tagged import is_peer_failure
from megatron_cp.executor.groups.torch_group import _Unpacked, _Works
from megatron_cp.executor.launch import RANK_KINDS, run_ranks
from tests.limits import limit
from tests.refusals import rejects

SIZE = 3
COUNTS = [[2, 0, 5], [1, 3, 0], [0, 0, 0]]  # elements from each rank to each rank; rank 2 sends nothing
DTYPES = (torch.float64, torch.bfloat16, torch.uint8)


def _all_to_all(group: RankGroup, dtype: torch.dtype) -> list[float]:
    """Element i from rank s to rank r is 100 s + 10 r + i."""
    sent_splits = COUNTS[group.rank]
    received_splits = [row[group.rank] for row in COUNTS]
    sent = [100 * group.rank + 10 * peer + i for peer, count in enumerate(sent_splits) for i in range(count)]
    received = torch.empty(sum(received_splits), dtype=dtype)
    group.all_to_all(received, torch.tensor(sent, dtype=dtype), received_splits, sent_splits)
    return received.tolist()


def _all_gather(group: RankGroup, dtype: torch.dtype, count: int) -> list[float]:
    received = torch.empty(group.size * count, dtype=dtype)
    group.all_gather(received, torch.full((count,), 10 + group.rank, dtype=dtype))
    return received.tolist()


def _messages(group: RankGroup) -> list[tuple[int, list[float]]]:
    """To every other rank three messages of 1, 0 and 4 elements and of different types, all under way at once."""
    shapes = [(1, torch.float64), (0, torch.float64), (4, torch.float64), (4, torch.float64)]
    others = [peer for peer in range(group.size) if peer != group.rank]
    sends = [
        Message(torch.full((count,), 100.0 * group.rank + 10 * peer + number, dtype=dtype), peer)
        for peer in others
        for number, (count, dtype) in enumerate(shapes)
    ]
    receives = [Message(torch.empty(count, dtype=dtype), peer) for peer in others for count, dtype in shapes]
    group.send_and_receive(sends, receives)
    return [(message.peer, message.tensor.tolist()) for message in receives]


def _no_messages(group: RankGroup) -> None:
    """Sends and receives no messages, also without host tensors, as over NCCL: a rank may be idle in a round."""
    group.send_and_receive([], [])
    if isinstance(group, TorchGroup):
        tagged, group._tagged = group._tagged, None
        group.send_and_receive([], [])
        group._tagged = tagged


def _under_another_default_device(group: RankGroup) -> list[bytes]:
    with torch.device("meta"):
        group.barrier()
        return group.all_gather_bytes(bytes([group.rank]))


def _one_way(group: RankGroup) -> list[float]:
    """Rank 0 only sends, rank 1 only receives, rank 2 does neither."""
    arrived = torch.zeros(2)
    group.send_and_receive(
        [Message(torch.tensor([1.0, 2.0]), 1)] if group.rank == 0 else [],
        [Message(arrived, 0)] if group.rank == 1 else [],
    )
    return arrived.tolist()


def _barrier(group: RankGroup, folder: Path) -> list[str]:
    """Returns the ranks that have come when this one leaves."""
    if group.rank == 1:
        time.sleep(0.2)
    (folder / str(group.rank)).touch()
    group.barrier()
    return sorted(path.name for path in folder.iterdir())


def _by_host(group: RankGroup) -> list[Any]:
    """`_messages` as device tensors would go over gloo, twice; and the buffers that the second time allocates."""
    if isinstance(group, TorchGroup):
        group.start_messages = group._start_staged_messages
    heard, before = _messages(group), group.buffers.allocations
    again = _messages(group)
    if isinstance(group, TorchGroup):
        assert before > 0
        del group.start_messages
    return [heard, again, group.buffers.allocations - before]


def _together(group: RankGroup) -> list[Any]:
    """`_messages` as NCCL would send them, twice; what the second time allocates; and one a rank, as in a ring."""
    if isinstance(group, TorchGroup):
        group.start_messages = group._start_fused_messages
    heard, before = _messages(group), group.buffers.allocations
    again = _messages(group)
    made = group.buffers.allocations - before
    # From a buffer, which stays its owner's.
    block = group.buffers.acquire_like(torch.empty(0), 3).fill_(group.rank)
    following = torch.empty(3)
    group.send_and_receive(
        [Message(block, (group.rank + 1) % group.size)], [Message(following, (group.rank - 1) % group.size)]
    )
    assert len(group.buffers._taken) == 1
    group.buffers.release(block)
    if isinstance(group, TorchGroup):
        assert before > 0
        del group.start_messages
    return [heard, again, made, following.tolist()]


def conversation(group: RankGroup, folder: Path) -> dict[str, Any]:
    """Runs every operation of a group. It is at module level, so that processes can import it."""
    return {
        "place": (type(group).__name__, group.rank, group.size),
        "all_to_all": [_all_to_all(group, dtype) for dtype in DTYPES],
        "all_gather": [_all_gather(group, dtype, count=2) for dtype in DTYPES],
        "all_gather of nothing": _all_gather(group, torch.float32, count=0), "messages": _messages(group),
        "messages by the host": _by_host(group), "messages together": _together(group),
        "no messages": _no_messages(group), "one way": _one_way(group), "meta": _under_another_default_device(group),
        "barrier": _barrier(group, folder), "bytes": group.all_gather_bytes(bytes([0, 255, group.rank])),
        "objects": group.all_gather_object({"rank": group.rank, "text": "é" * 50 * group.rank}),
    }  # fmt: skip


@pytest.fixture(scope="module", params=RANK_KINDS)
def answers(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("barrier")
    return run_ranks(conversation, SIZE, folder, kind=request.param, timeout=limit(60))


def test_all_to_all_and_all_gather_have_the_order_of_ranks(answers, request):
    kind = {"threads": "ThreadGroup", "processes": "TorchGroup"}[request.node.callspec.params["answers"]]
    assert [answer["place"] for answer in answers] == [(kind, rank, SIZE) for rank in range(SIZE)]
    received = [[0, 1, 100], [110, 111, 112], [20, 21, 22, 23, 24]]
    assert [answer["all_to_all"] for answer in answers] == [[pieces] * len(DTYPES) for pieces in received]
    assert all(answer["all_gather"] == [[10, 10, 11, 11, 12, 12]] * len(DTYPES) for answer in answers)
    assert all(answer["all_gather of nothing"] == [] for answer in answers)
    for answer in answers:
        assert answer["bytes"] == [b"\x00\xff\x00", b"\x00\xff\x01", b"\x00\xff\x02"]
        assert answer["objects"] == [{"rank": rank, "text": "é" * 50 * rank} for rank in range(SIZE)]
    assert [answer["meta"] for answer in answers] == [[b"\0", b"\1", b"\2"]] * SIZE
    assert [answer["barrier"] for answer in answers] == [["0", "1", "2"]] * SIZE


def test_messages_of_a_pair_stay_in_order_staged_or_in_one_collective(answers):
    for rank, answer in enumerate(answers):
        expected = []
        for peer in (peer for peer in range(SIZE) if peer != rank):
            first = 100.0 * peer + 10 * rank
            expected += [(peer, [first]), (peer, []), (peer, [first + 2] * 4), (peer, [first + 3] * 4)]
        assert answer["messages"] == expected
    for answer in answers:
        assert answer["messages by the host"] == [answer["messages"]] * 2 + [0]
    for rank, answer in enumerate(answers):
        assert answer["messages together"] == [answer["messages"]] * 2 + [0, [(rank - 1) % SIZE] * 3]
    assert [answer["one way"] for answer in answers] == [[0, 0], [1, 2], [0, 0]]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("[/b/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("call torch._dynamo.reset() and mind the timeout"), False),
        (RuntimeError("step() takes a closure, Connection"), False),
        (RuntimeError("[enforce fail at /b/gloo/transport/tcp/pair.cc:416] op.preamble.length <= op.nbytes"), False),
    ],
)
def test_only_errors_of_the_transport_are_taken_for_lost_ranks(error, is_lost):
    assert is_peer_failure(error) is is_lost


def test_threads_send_copies():
    def rank_main(group: RankGroup) -> list[float]:
        sent, received = torch.full((2,), float(group.rank)), torch.empty(2)
        group.all_to_all(received, sent, [1, 1], [1, 1])
        sent.fill_(9.0)
        group.barrier()
        return received.tolist()

    assert run_ranks(rank_main, 2) == [[0, 1], [0, 1]]


def test_threads_refuse_a_message_of_another_size_than_expected():
    def rank_main(group: RankGroup) -> None:
        count = 1 + group.rank
        group.all_to_all(torch.empty(2 * count), torch.zeros(2 * count), [count, count], [count, count])

    with pytest.raises(RuntimeError, match="expects"):
        run_ranks(rank_main, 2)


def test_waiting_rank_gives_up_after_its_timeout():
    first, _ = ThreadGroup.create(2, timeout=0.05)
    with pytest.raises(PeerError, match=r"rank 0 of 2, .*: waited 0\.05 s for rank 1"):
        first.barrier()


def test_abort_wakes_a_rank_that_waits():
    first, second = ThreadGroup.create(2, timeout=60)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            first.barrier()
        except PeerError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    second.abort()
    thread.join(limit(10))
    assert "another rank of its group failed" in str(caught[0])


def test_rejects_splits_that_do_not_add_up():
    group = ThreadGroup.create(2)[0]
    three, two = torch.zeros(3), torch.zeros(2)
    for received, sent, received_splits, sent_splits, argument in (
        (two, three, [1, 1], [1, 1], "sent_splits"),
        (three, two, [2, 2], [1, 1], "received_splits"),
        (two, two, [1, 1, 0], [1, 1], "received_splits"),
        (two, two, [1, 1], [2], "sent_splits"),
    ):
        rejects(f"^{argument}: got ", group.all_to_all, received, sent, received_splits, sent_splits)


def test_no_group_stands_for_the_only_rank():
    group = ThreadGroup.create(3)[1]
    assert as_rank_group(group, 3) is group
    group = as_rank_group(None, 1)
    assert (group.rank, group.size) == (0, 1)
    rejects(r"^size: got ", ThreadGroup.create, 0)
    rejects(r"^group: got ", as_rank_group, ThreadGroup.create(3)[0], 2)
    rejects(r"^group: got ", as_rank_group, None, 2)


def test_who_waits_again_changes_nothing_of_others():
    """Buffers that a message took are someone else's after the first wait."""
    buffers, cpu = Buffers(), torch.device("cpu")
    arrived, targets = buffers.acquire(16, cpu), [torch.zeros(2), torch.zeros(2)]
    arrived.view(torch.float32).copy_(torch.arange(4.0))
    pending = _Unpacked(Done(), arrived, [Message(target, 1) for target in targets], [arrived], buffers)
    pending.wait()
    assert torch.cat(targets).tolist() == [0, 1, 2, 3]
    other = buffers.acquire(16, cpu).fill_(0xFF)
    assert other.data_ptr() == arrived.data_ptr()
    pending.wait()
    assert torch.cat(targets).tolist() == [0, 1, 2, 3]
    assert buffers.acquire(16, cpu).data_ptr() != other.data_ptr()


def test_a_collective_may_be_waited_for_again():
    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    work = Work()
    pending = _Works(work, (), ThreadGroup.create(1)[0])
    pending.wait()
    pending.wait()
    assert work.waits == 1
