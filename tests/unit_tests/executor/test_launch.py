"""Local ranks: what they return, and that one that fails, dies or hangs is an error soon and with its name."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from megatron_cp.errors import ArgumentError
from megatron_cp.executor import launch
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.launch import RankError, _first_cause, run_ranks
from tests.forked_ranks import forking_context, run_forks
from tests.limits import limit
from tests.refusals import rejects

T = TypeVar("T")


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are spawned, as users' are, where a test is about how they start."""
    monkeypatch.setattr(launch, "multiprocessing", torch.multiprocessing)


# Ranks that are processes import these functions by name.


def raise_on_last_rank(group: RankGroup) -> None:
    if group.rank == group.size - 1:
        raise KeyError("the last rank's own fault")
    group.barrier()


def exit_on_rank_1(group: RankGroup) -> None:
    if group.rank == 1:
        os._exit(3)
    group.barrier()


def kill_rank_1(group: RankGroup) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def end_without_a_word(group: RankGroup) -> None:
    if group.rank == 1:
        os._exit(0)
    never_come()


def stop_rank_1(group: RankGroup, folder: str) -> None:
    (Path(folder) / str(group.rank)).write_text(str(os.getpid()))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    never_come()


def refuse_on_rank_1(group: RankGroup) -> None:
    if group.rank == 1:
        raise ArgumentError("heads", 3, "even numbers", "Use 4.")
    group.barrier()


def refuse_a_function(group: RankGroup) -> None:
    raise ArgumentError("mask", lambda: None, "a mask")


def answer_slowly(group: RankGroup, seconds: float) -> tuple[int, float]:
    group.barrier()
    time.sleep(seconds)
    return group.rank, seconds


def is_deaf_to_ctrl_c(group: RankGroup, argument: object = None) -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    return True


def hang_on_rank_1(group: RankGroup) -> None:
    if group.rank == 1:
        never_come()
    group.barrier()


def never_come() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_threads_return_in_rank_order(size: int):
    answers = run_ranks(lambda group, word: (type(group), group.rank, word), size, "word")
    assert answers == [(ThreadGroup, rank, "word") for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no_grad"])
def test_threads_inherit_the_grad_mode(enabled: bool, size: int):
    with torch.set_grad_enabled(enabled):
        assert run_ranks(lambda group: torch.is_grad_enabled(), size) == [enabled] * size


def test_a_thread_that_raises_or_does_not_come_is_named():
    with pytest.raises(RankError, match=r"rank 2 of 3 failed: KeyError: .the last rank's own fault") as caught:
        run_ranks(raise_on_last_rank, 3, timeout=None)  # although the others wait
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RankError, match="rank 0 of 1 failed"):
        run_ranks(lambda group: [][0], 1)
    with pytest.raises(RankError, match=r"waited|did not finish"):
        run_ranks(lambda group: group.rank or group.barrier(), 2, timeout=0.3)


def test_thread_that_hangs_has_its_stack_shown(capfd):
    end = threading.Event()

    def stuck_here(group: RankGroup) -> None:
        if group.rank == 1:
            end.wait(60)

    with pytest.raises(RankError, match=r"2 ranks did not finish in 0\.3 s"):
        run_ranks(stuck_here, 2, timeout=0.3)
    end.set()
    shown = capfd.readouterr().err
    assert "Thread" in shown
    assert "in stuck_here" in shown


def test_rejects_an_unknown_kind_of_rank():
    rejects(r"^kind: got ", run_ranks, lambda group: None, 2, kind="fibres")


@pytest.mark.parametrize("start", ["spawned", "forked_ranks"])
def test_process_that_raises_is_named_with_its_traceback(start: str, request: pytest.FixtureRequest):
    request.getfixturevalue(start)
    size = 1 if start == "spawned" else 2
    with pytest.raises(RankError, match=f"rank {size - 1} of {size} failed") as caught:
        run_ranks(raise_on_last_rank, size, kind="processes", timeout=limit(60))
    assert "in raise_on_last_rank" in str(caught.value)
    assert 'KeyError: "the last rank\'s own fault"' in str(caught.value)


def test_where_all_ranks_complain_of_others_all_are_heard():
    complaint = "Traceback\n  way\nmegatron_cp.errors.PeerError: rank {} of 3, in attention, waiting for rank {}"
    texts = {rank: complaint.format(rank, (rank + 1) % 3) for rank in (2, 0, 1)}
    error = _first_cause(texts, 3)
    assert str(error).splitlines()[0] == "rank 2 of 3 failed:"
    assert str(error).splitlines()[-3:] == [
        "Other ranks failed as well:",
        "PeerError: rank 0 of 3, in attention, waiting for rank 1",
        "PeerError: rank 1 of 3, in attention, waiting for rank 2",
    ]
    assert str(_first_cause(texts | {1: "KeyError: 'x'"}, 3)) == "rank 1 of 3 failed:\nKeyError: 'x'"


@pytest.mark.parametrize(
    ("rank_main", "says"),
    [
        (exit_on_rank_1, "ended with exit code 3"), (end_without_a_word, "ended with exit code 0 and no result"),
        (kill_rank_1, "was killed; this machine may be out of memory"),
    ],
)  # fmt: skip
def test_processes_that_end_are_named(rank_main: Callable[[RankGroup], None], says: str):
    with pytest.raises(RankError, match=f"rank 1 of 2 {says}"):
        run_ranks(rank_main, 2, kind="processes", timeout=None)


def test_process_that_hangs_has_its_stack_shown(capfd):
    with pytest.raises(RankError):
        run_ranks(hang_on_rank_1, 2, kind="processes", timeout=limit(3))
    shown = capfd.readouterr().err
    assert "Thread" in shown
    assert "in never_come" in shown  # the rank that hangs, not only those that wait for it


def test_a_refusal_of_a_process_arrives_as_itself():
    with pytest.raises(ArgumentError) as caught:
        run_ranks(refuse_on_rank_1, 2, kind="processes", timeout=None)  # although rank 0 waits
    error = caught.value
    assert str(error) == "heads: got 3; allowed: even numbers. Use 4."
    assert (error.argument, error.given, error.allowed, error.remedy) == ("heads", 3, "even numbers", "Use 4.")
    rejects(r"mask: got .*lambda.*; allowed: a mask\.", run_ranks, refuse_a_function, 2, kind="processes", timeout=None)


def test_no_rank_outlives_the_process_that_started_it_even_stopped(tmp_path):
    stop = functools.partial(stop_rank_1, folder=str(tmp_path))
    caller = forking_context().Process(target=run_forks, args=(list, stop, 2, None))
    caller.start()
    try:
        notes = [tmp_path / str(rank) for rank in range(2)]
        ranks = [int(_soon(note.read_text)) for note in notes]
        _soon(lambda: _state(ranks[1]) == "T")
    finally:
        caller.kill()
        caller.join()
    _soon(lambda: all(_state(rank) in ("", "Z") for rank in ranks))


def _soon(look: Callable[[], T], seconds: float = 120.0) -> T:
    """Returns the result of `look` as soon as there is one."""
    deadline = time.monotonic() + limit(seconds)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = look()
            if found:
                return found
        time.sleep(0.05)
    raise AssertionError("nothing came in time")


def _state(process: int) -> str:
    """The letter that Linux has for it: T where it is stopped, Z where it has ended, nothing where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_timeout_is_for_ranks_that_need_longer(kind: str):
    assert run_ranks(answer_slowly, 2, 0.5, kind=kind, timeout=None) == [(0, 0.5), (1, 0.5)]
    assert run_ranks(answer_slowly, 2, 0.5, kind=kind, timeout=limit(30)) == [(0, 0.5), (1, 0.5)]


def test_ctrl_c_is_the_parents_and_its_handler_stays():
    handler = signal.getsignal(signal.SIGINT)
    assert run_ranks(is_deaf_to_ctrl_c, 2, kind="processes", timeout=limit(60)) == [True, True]
    assert signal.getsignal(signal.SIGINT) is handler


class CtrlC:
    """Sends it to this process while a rank's process is being started with it."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return CtrlC, ()


class Sigterm:
    """Sends it to this process while a rank's process is being started with it, and counts them."""

    started = 0

    def __reduce__(self):
        Sigterm.started += 1
        os.kill(os.getpid(), signal.SIGTERM)
        return Sigterm, ()


def hears_sigterm(group, *_: object) -> bool:
    """True if a SIGTERM would end this rank, though it was deferred while the rank was started."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return signal.SIGTERM not in blocked and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("spawned")
def test_a_sigterm_that_raises_is_not_lost_while_ranks_are_started():
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(hears_sigterm, 2, Sigterm(), kind="processes", timeout=limit(60))
        assert Sigterm.started == 2  # it is raised once no process is half started
        assert multiprocessing.active_children() == []
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert run_ranks(hears_sigterm, 2, kind="processes", timeout=limit(60)) == [True, True]
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["heeded", "ignored"])
def test_ctrl_c_while_ranks_are_started_is_not_lost(ignored: bool):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        if ignored:  # as in a shell's background job
            assert run_ranks(is_deaf_to_ctrl_c, 2, CtrlC(), kind="processes", timeout=limit(60)) == [True, True]
        else:
            with pytest.raises(KeyboardInterrupt):
                run_ranks(is_deaf_to_ctrl_c, 2, CtrlC(), kind="processes", timeout=limit(60))
        assert multiprocessing.active_children() == []
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
    finally:
        signal.signal(signal.SIGINT, handler)
