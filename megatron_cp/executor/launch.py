"""Local ranks for checks, tests and small runs: threads of this process, or gloo processes on this machine.

At scale ranks come from torchrun; nothing here is for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron_cp.errors import ArgumentError, PeerError, checked_integer
from megatron_cp.executor.groups import ThreadGroup, TorchGroup

RANK_KINDS = ("threads", "processes")
FIRST_STEP = 600.0  # seconds that a rank waits for another while they import and compile: until `set_timeout`
_GRACE = 0.5  # seconds within which what went wrong elsewhere is heard of
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


class RankError(RuntimeError):
    """A rank raised, died or ran out of time. Carries the first failing rank's traceback.

    Attributes:
        in_vain: ranks waited for others in vain, and nothing else is known to have failed.
    """

    in_vain = False


def run_ranks[T](
    function: Callable[..., T], size: int, *args: Any, kind: str = "threads", timeout: float | None = 120.0
) -> list[T]:
    """Calls `function(group, *args)` on `size` local ranks and returns what each returned, in rank order.

    Args:
        function: with processes it and its arguments and result are pickled, so it must be importable by name.
            A rank's process has a device of its own as the current one where there are enough, else a shared one.
        size: the number of ranks.
        kind: "threads" or "processes" (gloo over loopback).
        timeout: seconds until every rank's stack is written to standard error and the call fails; None to wait for
            as long as it takes.

    Raises:
        ArgumentError: raised by a rank process; the others are stopped.
        RankError: a rank raised anything else, died or ran out of time; the others are stopped.
    """
    if kind not in RANK_KINDS:
        raise ArgumentError("kind", kind, " or ".join(RANK_KINDS))
    checked_integer("size", size, 1)
    runner = _run_threads if kind == "threads" else _run_processes
    return runner(function, size, args, timeout)


def _run_threads[T](function: Callable[..., T], size: int, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    timeout = threading.TIMEOUT_MAX if timeout is None else timeout
    groups = ThreadGroup.create(size, timeout)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    grad_enabled = torch.is_grad_enabled()  # a new thread starts with gradients on

    def rank_main(rank: int) -> None:
        try:
            # On CUDA autograd runs backward in one thread per device; ranks that wait for each other there deadlock.
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad_enabled):
                results[rank] = function(groups[rank], *args)
        except BaseException as error:
            failures.append((rank, error))
            groups[rank].abort()

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
    if not failures and any(thread.is_alive() for thread in threads):
        if sys.__stderr__ is not None:  # not sys.stderr, which need not be a file
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        groups[0].abort()
        raise RankError(f"{size} ranks did not finish in {timeout:g} s; their stacks are on standard error")
    if failures:
        rank, error = failures[0]
        raise RankError(f"rank {rank} of {size} failed: {type(error).__name__}: {error}") from error
    return results


def _run_processes[T](function: Callable[..., T], size: int, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_process_main, args=(rank, size, folder, timeout, function, args))
            for rank in range(size)
        ]
        try:
            with _interrupts_held_back():
                for process in processes:
                    process.start()
            return _collected(processes, folder, timeout)
        except RankError as error:
            if error.in_vain:
                _ask_for_stacks(processes)
            raise
        finally:
            with _interrupts_ignored():  # of a second Ctrl-C, which would leave ranks behind
                _stop([process for process in processes if process.pid is not None])
            _show_stacks(folder, size)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Answers a Ctrl-C that arrives within at the end; processes that start within do not hear of it at all.

    Ctrl-C reaches every process of a terminal's job, and the parent alone answers. Ignoring it here would lose it.
    """
    if not _handles_interrupts():
        yield
        return
    resource_tracker.ensure_running()  # what starts it first would have Ctrl-C unblocked again
    arrived = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: arrived.set())
    # Of this thread, so that processes that it starts have it too; a signal can still arrive by another thread.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, previous)
        if arrived.is_set():
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Forgets a Ctrl-C that arrives within."""
    if not _handles_interrupts():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _handles_interrupts() -> bool:
    """Whether this thread may, and Python does: a handler from before Python could not be put back."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is not None


def _collected(processes: list[Any], folder: str, timeout: float | None) -> list[Any]:
    size = len(processes)
    results: dict[int, Any] = {}
    failures: dict[int, BaseException | str] = {}
    # Starting up included; the ranks give up first, with their stacks.
    deadline = float("inf") if timeout is None else time.monotonic() + timeout + 60
    while len(results) < size:
        silent = _take_answers(processes, folder, results, failures)
        if failures and not silent:
            # A rank that ends breaks the others' connections, and their complaints may arrive before its end is seen.
            time.sleep(_GRACE)
            silent = _take_answers(processes, folder, results, failures)
        if silent:
            raise _death(silent[0], size, processes[silent[0]].exitcode)
        if failures:
            raise _first_cause(failures, size)
        if time.monotonic() > deadline:
            raise RankError(f"{size} ranks did not finish in {timeout:g} s")
        time.sleep(0.01)
    return [results[rank] for rank in range(size)]


def _take_answers(
    processes: list[Any], folder: str, results: dict[int, Any], failures: dict[int, BaseException | str]
) -> list[int]:
    """Reads what ranks have answered since the last look, and returns those that ended without an answer."""
    ended = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
    for rank in range(len(processes)):
        answer = _answer_file(folder, rank)
        if rank not in results and rank not in failures and answer.exists():
            ok, payload = pickle.loads(answer.read_bytes())
            (results if ok else failures)[rank] = payload
    return [rank for rank in ended if rank not in results and rank not in failures]


def _answer(folder: str, rank: int, ok: bool, payload: Any) -> None:
    """Leaves what a rank returns or failed with: whole or not at all, at whatever moment the rank is ended.

    A pipe would keep the caller waiting for the rest of an answer whose rank was killed or stopped within it.
    """
    answer = _answer_file(folder, rank)
    part = answer.with_name(f"{answer.name}.part")
    part.write_bytes(pickle.dumps((ok, payload)))
    part.replace(answer)


def _answer_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"answer.{rank}"


def _death(rank: int, size: int, exit_code: int) -> RankError:
    if exit_code == -signal.SIGKILL:
        return RankError(f"rank {rank} of {size} was killed; this machine may be out of memory")
    return RankError(
        f"rank {rank} of {size} ended with exit code {exit_code} and no result; "
        "if it ran out of time its stack is on standard error"
    )


def _first_cause(failures: dict[int, BaseException | str], size: int) -> BaseException:
    """The error that is no complaint about another rank, if there is one."""
    for error in failures.values():
        if isinstance(error, ArgumentError):
            return error
    texts = {rank: str(text) for rank, text in failures.items()}
    # Of gloo, which says it of ranks that it loses: what happened to those is the cause.
    complaints = (f"{PeerError.__name__}: ", "Connection closed by peer", "Timed out waiting", "pair closure")
    causes = [rank for rank, text in texts.items() if not any(complaint in text for complaint in complaints)]
    rank = causes[0] if causes else next(iter(texts))
    text = f"rank {rank} of {size} failed:\n{texts[rank]}"
    others = [_complaint(other) for number, other in texts.items() if number != rank]
    if not causes and others:
        text = "\n".join([text.rstrip(), "Other ranks failed as well:", *others])
    error = RankError(text)
    error.in_vain = not causes
    return error


def _complaint(text: str) -> str:
    """What a rank says of the one that it lost, without the way there."""
    start = text.rfind(f"{PeerError.__name__}: ")
    return text[start:].rstrip() if start >= 0 else text.rstrip().rsplit("\n", 1)[-1]


def _ask_for_stacks(processes: list[Any]) -> None:
    """Has the ranks that still run write what they are at, and gives them a moment to."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    if running:
        time.sleep(_GRACE)


def _stop(processes: list[Any]) -> None:
    """Ends what still runs, after a moment in which ranks that run out of time together can write their stacks."""
    patience = time.monotonic() + 4 * _GRACE
    for process in processes:
        process.join(max(0.0, patience - time.monotonic()))
    for end in ("terminate", "kill"):  # a stopped process hears nothing but the latter
        for process in processes:
            if process.is_alive():
                getattr(process, end)()
        patience = time.monotonic() + 4 * _GRACE
        for process in processes:
            process.join(max(0.0, patience - time.monotonic()))


def _show_stacks(folder: str, size: int) -> None:
    for rank in range(size):
        stack = _stack_file(folder, rank)
        if stack.exists() and stack.stat().st_size:
            print(f"rank {rank} of {size}:\n{stack.read_text()}", file=sys.stderr)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack.{rank}"


def _process_main(rank: int, size: int, folder: str, timeout: float | None, function: Any, args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was blocked so far, and is forgotten now
    _end_with_maker()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stack:
        try:
            # NCCL refuses two ranks on one device; gloo, for device tensors too, does not.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(
                backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size,
                # Within the time limit of all, so that who waits for whom is heard of before that ends them.
                timeout=timedelta(seconds=FIRST_STEP if timeout is None else min(FIRST_STEP, 0.75 * timeout)),
            )  # fmt: skip
            faulthandler.register(signal.SIGUSR1, file=stack)
            # Only now, when all ranks have started, so that all of them run out of time together.
            if timeout is not None:
                faulthandler.dump_traceback_later(timeout, exit=True, file=stack)
            _answer(folder, rank, True, function(_world(), *args))
            _leave_together()
        except ArgumentError as error:
            try:
                _answer(folder, rank, False, error)
            except (pickle.PicklingError, AttributeError, TypeError):  # of what was given, such as a function
                _answer(folder, rank, False, ArgumentError(str(error)))
        except BaseException:
            _answer(folder, rank, False, traceback.format_exc())
            _exit_now()
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGUSR1)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _leave_together() -> None:
    """Waits for the other ranks, whose transfers would fail if this one left before them."""
    try:
        _world().barrier()
    except PeerError:  # what failed there is said there
        _exit_now()


def _exit_now() -> None:
    """Ends a rank that has said all that it has to say.

    What is under way in gloo keeps threads, whose end at the end of the interpreter would abort the process.
    """
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(1)


def _end_with_maker() -> None:
    """Has the kernel kill this process when the one that made it ends, also where it is stopped or holds its lock."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        maker = multiprocessing.parent_process()
        if maker is not None and not maker.is_alive():  # it was gone before
            os._exit(1)


def _end_with_parent() -> None:
    """The same, where another process than the caller made this one, or the kernel does no such thing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # also when it was killed and could not end us
        os._exit(1)


def in_torchrun() -> bool:
    """True if a launcher such as torchrun has set this process's rank and world size."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def start_torchrun_rank(timeout: float | None = None) -> TorchGroup:
    """Joins the job that torchrun started: NCCL where every local rank has a device of its own, gloo elsewhere.

    Waiting for other ranks, now and in any collective, fails after `timeout` seconds, or `FIRST_STEP`.
    """
    # Asked of the whole host, so that its ranks cannot choose differently.
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else None
    if device is None:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # With the device NCCL connects now, and not within the first layer; and a barrier need not guess it.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout or FIRST_STEP), device_id=device
        )
    return _world(dist.new_group(backend="gloo") if cuda else None)


def _world(host_group: dist.ProcessGroup | None = None) -> TorchGroup:
    assert dist.group.WORLD is not None  # only before init_process_group
    return TorchGroup(dist.group.WORLD, host_group)
