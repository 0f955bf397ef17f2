"""Tests that waiting ranks find out about each other, and whether their messages can still come."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_cp.executor.groups.base import unshared_lines
from megatron_cp.executor.groups.stalls import Board, ExitReport, Stall, StallReport, Started, verdict


def message(number: int, activity: str = "forward") -> Started:
    return Started(number, hash((number, activity)), 8, activity)


def report(
    way: str, peer: int, awaited: Started, *, sent: dict[int, list[Started]] | None = None,
    received: dict[int, list[Started]] | None = None, size: int = 4,
) -> StallReport:  # fmt: skip
    """Makes the report of a rank that waits for a message; others that it has started are numbered from it on."""

    def of(started: dict[int, list[Started]] | None) -> list[tuple[int, list[Started]]]:
        lists = [(started or {}).get(peer, []) for peer in range(size)]
        return [(ones[-1].number + 1 if ones else 0, ones) for ones in lists]

    return StallReport(Stall(1, way, peer, awaited, (), 0.0), {"send": of(sent), "recv": of(received)})


def test_a_message_may_still_come():
    assert verdict(0, report("recv", 1, message(0)), lambda rank: None) is None
    reports = {0: report("recv", 1, message(3)), 1: report("recv", 0, message(9), sent={0: [message(3)]})}
    assert verdict(0, reports[0], reports.get) is None
    reports = {0: report("send", 1, message(0)), 1: report("recv", 0, message(0), received={0: [message(0)]})}
    assert verdict(0, reports[0], reports.get) is None
    reports = {0: report("recv", 1, message(0)), 1: report("recv", 2, message(0), sent={0: [message(70)]})}
    assert verdict(0, reports[0], reports.get) is None
    reports = {0: report("recv", 1, message(0)), 1: report("recv", 2, message(0))}
    assert verdict(0, reports[0], reports.get) is None
    # Their reports may be old, and only a rank of the circle knows that its own is not.
    reports = {0: report("recv", 1, message(0)), 1: report("recv", 2, message(0)), 2: report("recv", 1, message(0))}
    assert verdict(0, reports[0], reports.get) is None
    assert verdict(1, reports[1], reports.get) is not None


def test_another_message_in_its_place_means_that_it_never_comes():
    odd = message(3, "backward")
    reports = {0: report("recv", 1, message(3)), 1: report("send", 0, odd, sent={0: [odd]})}
    said = verdict(0, reports[0], reports.get)
    assert "rank 0 is in forward, waiting for 8 bytes from rank 1" in said
    assert "rank 1 is in backward, waiting for 8 bytes to rank 0" in said


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_wait_for_one_another_in_a_circle_wait_for_ever(size: int):
    reports = {rank: report("recv", (rank + 1) % size, message(0, f"call {rank}")) for rank in range(size)}
    for rank in range(size):
        said = verdict(rank, reports[rank], reports.get)
        assert all(f"call {other}" in said for other in range(size))


def test_only_lines_that_differ_are_said():
    lines = [("operation: attention", "softcap: 0.0", "dropout: 0.0"), ("operation: attention", "softcap: 0.7")]
    assert unshared_lines(lines) == [["softcap: 0.0", "dropout: 0.0"], ["softcap: 0.7"]]
    unlike = [["operation: attention", "dropout: 0.0"], ["operation: kda", "dropout: 0.0"], []]
    assert unshared_lines(unlike) == unlike


def test_what_was_written_on_a_board_is_not_read_by_the_groups_that_are_made_anew():
    store = dist.HashStore()
    first = [Board(store, rank, 2) for rank in range(2)]
    first[1].publish_exit(ExitReport("of the first", None))
    assert [words.waiting for words in first[0].exchange_exit_reports(ExitReport("", None))] == ["of the first"]
    again = [Board(store, rank, 2) for rank in range(2)]
    assert again[0].exchange_exit_reports(ExitReport("", None)) == []


def test_a_board_that_is_gone_is_no_error():
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("connection closed")

    board = Board(Gone(), 0, 2)
    assert board.exchange_exit_reports(ExitReport("", None)) == []
    assert board.report(1) is None
