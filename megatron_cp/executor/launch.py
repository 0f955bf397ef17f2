"""Starts local ranks for checks, tests and small runs: threads of this process, or gloo processes on this machine.

Large jobs are started by torchrun; `start_torchrun_rank` joins one.
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron_cp.errors import ArgumentError, PeerError, checked_integer
from megatron_cp.executor.groups import ThreadGroup, TorchGroup

T = TypeVar("T")

RANK_KINDS = ("threads", "processes")
FIRST_STEP = 600.0  # seconds that a rank waits for another until `set_timeout`, while ranks import and compile
_GRACE = 0.5  # seconds for errors of other ranks to arrive
_PR_SET_PDEATHSIG = 1  # Linux's option for the signal that a process gets when its parent ends


class RankError(RuntimeError):
    """Raised if a rank raised an error, died or ran out of time. It has the first failing rank's traceback.

    Attributes:
        is_peer_failure: True if ranks failed only because other ranks did not answer.
    """

    is_peer_failure = False


def run_ranks(
    function: Callable[..., T], size: int, *args: Any, kind: str = "threads", timeout: float | None = 120.0
) -> list[T]:
    """Calls `function(group, *args)` on `size` local ranks and returns their results in rank order.

    Args:
        function: the function. With processes it, its arguments and its result are pickled, so it must be importable
            by name, and the current device of a rank is its own if there are enough devices, else a shared one.
        size: the number of ranks.
        kind: "threads" or "processes" (gloo over loopback).
        timeout: seconds until every rank's stack is written to standard error and the call fails; None for no limit.

    Raises:
        ArgumentError: a rank process raised it; the others are stopped.
        RankError: a rank raised another error, died or ran out of time; the others are stopped.
    """
    if kind not in RANK_KINDS:
        raise ArgumentError("kind", kind, " or ".join(RANK_KINDS))
    checked_integer("size", size, 1)
    runner = _run_threads if kind == "threads" else _run_processes
    return runner(function, size, args, timeout)


def _run_threads(function: Callable[..., T], size: int, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    timeout = threading.TIMEOUT_MAX if timeout is None else timeout
    groups = ThreadGroup.create(size, timeout)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    grad_enabled = torch.is_grad_enabled()  # a new thread starts with gradients on

    def rank_main(rank: int) -> None:
        try:
            # On CUDA autograd runs backward in one thread per device, in which ranks that wait for each other deadlock.
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
        if sys.__stderr__ is not None:  # sys.stderr need not be a file
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        groups[0].abort()
        raise RankError(f"{size} ranks did not finish in {timeout:g} s; their stacks are on standard error")
    if failures:
        rank, error = failures[0]
        raise RankError(f"rank {rank} of {size} failed: {type(error).__name__}: {error}") from error
    return results


def _run_processes(function: Callable[..., T], size: int, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_process_main, args=(rank, size, folder, timeout, function, args))
            for rank in range(size)
        ]
        try:
            with _interrupts_deferred():
                for process in processes:
                    process.start()
            return _collect(processes, folder, timeout)
        except RankError as error:
            if error.is_peer_failure:
                _request_stacks(processes)
            raise
        finally:
            with _interrupts_ignored():  # a second Ctrl-C would leave ranks running
                _stop([process for process in processes if process.pid is not None])
            _show_stacks(folder, size)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raises a Ctrl-C or a SIGTERM that arrives inside the context at its end; processes that start inside block it.

    Ctrl-C reaches every process of a terminal's job, but only the parent must handle it.
    """
    numbers = _handled()
    if not numbers:
        yield
        return
    resource_tracker.ensure_running()  # if it is started later, Ctrl-C is unblocked again
    arrived: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers}
    # This blocks them for this thread and the processes that it starts; a signal can still arrive by another thread.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for each in dict.fromkeys(arrived):
            signal.raise_signal(each)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignores a Ctrl-C that arrives inside the context, and a SIGTERM that would raise an exception."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _handled()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _handled() -> list[signal.Signals]:
    """Returns the signals that may raise an exception in this thread, and whose handlers can be restored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    # None is a handler that was set outside of Python. By default a SIGTERM ends the process.
    interrupts = [] if signal.getsignal(signal.SIGINT) is None else [signal.SIGINT]
    return [*interrupts, *([signal.SIGTERM] if callable(signal.getsignal(signal.SIGTERM)) else [])]


def _collect(processes: list[Any], folder: str, timeout: float | None) -> list[Any]:
    size = len(processes)
    results: dict[int, Any] = {}
    failures: dict[int, BaseException | str] = {}
    # The extra time is for starting up, and lets the ranks time out first and write their stacks.
    deadline = float("inf") if timeout is None else time.monotonic() + timeout + 60
    while len(results) < size:
        silent = _read_results(processes, folder, results, failures)
        if failures and not silent:
            # A rank that ends breaks the others' connections, whose errors may be read before its end is noticed.
            time.sleep(_GRACE)
            silent = _read_results(processes, folder, results, failures)
        if silent and processes[silent[0]].exitcode == -signal.SIGTERM:
            time.sleep(_GRACE)  # sent to all processes of a job: this one's own comes too
        if silent:
            raise _exit_error(silent[0], size, processes[silent[0]].exitcode)
        if failures:
            raise _first_cause(failures, size)
        if time.monotonic() > deadline:
            raise RankError(f"{size} ranks did not finish in {timeout:g} s")
        time.sleep(0.01)
    return [results[rank] for rank in range(size)]


def _read_results(
    processes: list[Any], folder: str, results: dict[int, Any], failures: dict[int, BaseException | str]
) -> list[int]:
    """Reads new results of ranks, and returns the ranks that ended without a result."""
    ended = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
    for rank in range(len(processes)):
        answer = _result_file(folder, rank)
        if rank not in results and rank not in failures and answer.exists():
            ok, payload = pickle.loads(answer.read_bytes())
            (results if ok else failures)[rank] = payload
    return [rank for rank in ended if rank not in results and rank not in failures]


def _write_result(folder: str, rank: int, ok: bool, payload: Any) -> None:
    """Writes a rank's result or error to its file atomically, in case the rank is killed meanwhile.

    With a pipe the caller would wait for the rest of a result whose rank was killed or stopped while it wrote.
    """
    answer = _result_file(folder, rank)
    part = answer.with_name(f"{answer.name}.part")
    part.write_bytes(pickle.dumps((ok, payload)))
    part.replace(answer)


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"answer.{rank}"


def _exit_error(rank: int, size: int, exit_code: int) -> RankError:
    if exit_code == -signal.SIGKILL:
        return RankError(f"rank {rank} of {size} was killed; this machine may be out of memory")
    return RankError(
        f"rank {rank} of {size} ended with exit code {exit_code} and no result; "
        "if it ran out of time its stack is on standard error"
    )


def _first_cause(failures: dict[int, BaseException | str], size: int) -> BaseException:
    """Returns the first error that is not about another rank, if there is one, else the first of all."""
    for error in failures.values():
        if isinstance(error, ArgumentError):
            return error
    texts = {rank: str(text) for rank, text in failures.items()}
    # These are errors of ranks whose peer was lost; the cause is on the peer.
    complaints = (f"{PeerError.__name__}: ", "Connection closed by peer", "Timed out waiting", "pair closure")
    causes = [rank for rank, text in texts.items() if not any(complaint in text for complaint in complaints)]
    rank = causes[0] if causes else next(iter(texts))
    text = f"rank {rank} of {size} failed:\n{texts[rank]}"
    others = [_peer_error_text(other) for number, other in texts.items() if number != rank]
    if not causes and others:
        text = "\n".join([text.rstrip(), "Other ranks failed as well:", *others])
    error = RankError(text)
    error.is_peer_failure = not causes
    return error


def _peer_error_text(text: str) -> str:
    """Returns the text of a rank's error about a lost peer, without the traceback."""
    start = text.rfind(f"{PeerError.__name__}: ")
    return text[start:].rstrip() if start >= 0 else text.rstrip().rsplit("\n", 1)[-1]


def _request_stacks(processes: list[Any]) -> None:
    """Asks the ranks that still run to write their stacks, and waits a moment for them."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    if running:
        time.sleep(_GRACE)


def _stop(processes: list[Any]) -> None:
    """Ends the processes that still run, after a moment in which ranks that have timed out can write their stacks."""
    patience = time.monotonic() + 4 * _GRACE
    for process in processes:
        process.join(max(0.0, patience - time.monotonic()))
    for end in ("terminate", "kill"):  # a stopped process reacts to the latter only
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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # they were blocked so far
    _kill_with_creator()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stack:
        try:
            # NCCL refuses two ranks on one device; gloo does not, and moves device tensors too.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(
                backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size,
                # Shorter than the time limit of all ranks, so that errors of waits are reported before it ends them.
                timeout=timedelta(seconds=FIRST_STEP if timeout is None else min(FIRST_STEP, 0.75 * timeout)),
            )  # fmt: skip
            faulthandler.register(signal.SIGUSR1, file=stack)
            # Started after all ranks have started, so that all of them time out together.
            if timeout is not None:
                faulthandler.dump_traceback_later(timeout, exit=True, file=stack)
            _write_result(folder, rank, True, function(_world(), *args))
            _wait_for_all()
        except ArgumentError as error:
            try:
                _write_result(folder, rank, False, error)
            except (pickle.PicklingError, AttributeError, TypeError):  # the error holds a value such as a function
                _write_result(folder, rank, False, ArgumentError(str(error)))
        except BaseException:
            _write_result(folder, rank, False, traceback.format_exc())
            _exit_now()
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGUSR1)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _wait_for_all() -> None:
    """Waits for the other ranks, whose transfers would fail if this rank ended before them."""
    try:
        _world().barrier()
    except PeerError:  # the rank that failed reports its error itself
        _exit_now()


def _exit_now() -> None:
    """Ends a rank's process without the interpreter's shutdown.

    Unfinished operations of gloo have threads that would abort the process at the shutdown of the interpreter.
    """
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(1)


def _kill_with_creator() -> None:
    """Makes Linux kill this process when its creator ends, also if this process is stopped or holds the GIL."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        creator = multiprocessing.parent_process()
        if creator is not None and not creator.is_alive():  # it ended before the call
            os._exit(1)


def _exit_with_parent() -> None:
    """Ends this process after its parent, where another process created it, or the system has no such option."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # returns also if the parent was killed
        os._exit(1)


def in_torchrun() -> bool:
    """True if a launcher such as torchrun has set this process's rank and world size."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def start_torchrun_rank(timeout: float | None = None) -> TorchGroup:
    """Joins the job that torchrun started, with NCCL if every local rank has a device of its own, else with gloo.

    Waiting for other ranks, now and in any collective, fails after `timeout` seconds, or `FIRST_STEP`.
    """
    # The counts are those of the whole host, so that its ranks cannot choose differently.
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else None
    if device is None:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Given the device, NCCL connects now and not in the first layer, and a barrier need not guess the device.
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout or FIRST_STEP), device_id=device
        )
    return _world(dist.new_group(backend="gloo") if cuda else None)


def _world(host_group: dist.ProcessGroup | None = None) -> TorchGroup:
    assert dist.group.WORLD is not None  # it is None before init_process_group only
    return TorchGroup(dist.group.WORLD, host_group)
