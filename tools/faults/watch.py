"""Runs a job from outside: starts its processes, sends signals, measures, ends hanging processes, counts the rest."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_cp.executor.launch import run_ranks
from tools.faults import launches, saves, training
from tools.faults.cases import PARENT, Case
from tools.faults.faulty import FAULT_FILE
from tools.faults.job import Job

RECORD, LOG = "record.json", "log"
_START = 90.0  # seconds until the fault, on a machine that is busy
_GRACE = 6.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Next = Callable[[], Any] | None  # what a process does next: a fork does it with nothing below it on the stack


class Watch:
    """A job under way.

    Args:
        limit: seconds after the fault until what is still there counts as hanging.
        grace: seconds in which processes end whose parent has ended.
    """

    def __init__(self, case: Case, folder: Path, limit: float, grace: float = _GRACE) -> None:
        self.case, self.folder, self.limit, self.grace = case, folder, limit, grace
        self.pids: dict[int, int] = {}  # of ranks; of the launcher's caller, -1
        self.ended: dict[int, tuple[int, float]] = {}  # by number: exit code, moment
        self.helpers: list[int] = []
        self.fault: dict[str, Any] = {}
        self.asked = False
        self.began = time.monotonic()

    def start(self) -> Next:
        """Forks the job's processes. What it returns is for the fork; None for the one that watches."""
        case, folder = self.case, self.folder
        if case.train:
            training.prepare(folder)
        if case.launch == "launcher":
            return self._fork(-1, partial(_then_leave, partial(launches.call_launcher, case, folder)))
        if case.store == "agent" and not case.train:
            pid = os.fork()
            if pid == 0:
                return partial(launches.agent, folder)
            self.helpers.append(pid)
        for rank in range(case.cp_size):
            begin = launches.become_fresh_rank if case.fresh else launches.independent_rank
            run: Callable[[], Any] = partial(begin, case, rank, folder)
            found = self._fork(rank, run if case.fresh else partial(_then_leave, run))
            if found is not None:
                return found
        return None

    def _fork(self, number: int, run: Callable[[], Any]) -> Next:
        pid = os.fork()
        if pid == 0:
            _write_to(self.folder / f"{LOG}.{number}")
            return run
        self.pids[number] = pid
        return None

    def follow(self) -> dict[str, Any]:
        """Watches until everything has ended or hangs, and returns what was seen."""
        hung = False
        while not self._is_over() and not hung:
            self._reap()
            self._look_for_fault()
            hung = time.monotonic() > self.fault.get("at", self.began + _START) + self.limit
            time.sleep(0.01)
        alive = sorted(number for number in self.pids if number not in self.ended and not self._is_stopped(number))
        last = max((at for _, at in self.ended.values()), default=None)
        stacks = self._stacks() if hung else ""
        orphans, gone = ([], None) if hung else self._orphans()
        codes = {str(number): code for number, (code, _) in self.ended.items()}
        self.end_all()
        return {
            "case": dataclasses.asdict(self.case), "fault": self.fault, "hung": alive if hung else [],
            "stacks": stacks, "orphans": orphans, "last": gone if self.case.fault.kind in PARENT else last,
            "codes": codes,
        }  # fmt: skip

    def _is_over(self) -> bool:
        return all(number in self.ended or self._is_stopped(number) for number in self.pids)

    def _is_stopped(self, number: int) -> bool:
        """Returns True for a rank that has stopped by itself and that no process would end."""
        return bool(self.fault) and self.case.fault.kind == "stop" and number == self.case.fault.rank

    def _reap(self) -> None:
        numbers = {pid: number for number, pid in self.pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in numbers:
                self.ended[numbers[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic())

    def _look_for_fault(self) -> None:
        if not self.fault and (self.folder / FAULT_FILE).exists():
            self.fault = json.loads((self.folder / FAULT_FILE).read_text())
        ask = self.fault.get("ask")
        if not ask or self.asked or time.monotonic() < self.fault["at"] + self.case.fault.seconds:
            return
        self.asked = True
        pid = self.pids[-1] if ask[1] == "caller" else self.fault["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, ask[0]))

    def _orphans(self) -> tuple[list[str], float | None]:
        """Processes that are there some seconds after those that should have ended them; or since when none is."""
        for number, pid in self.pids.items():
            if number not in self.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + self.grace
        while True:
            self._reap()
            left = [process for process in descendants() if process.pid not in self.helpers]
            if not left:
                return [], time.monotonic()
            if time.monotonic() > until:
                return list(map(str, left)), None
            time.sleep(0.01)

    def _stacks(self) -> str:
        for process in descendants():
            if process.pid not in self.helpers:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("stacks.*")
                         if path.stat().st_size)  # fmt: skip

    def end_all(self) -> None:
        while left := descendants():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._reap()
            time.sleep(0.005)


def watch(case: Case, folder: Path, limit: float) -> Next:
    """Runs one case in this process, a fork, and leaves its record in the folder; or what a fork of it does."""
    watched = Watch(case, folder, limit)

    def leave(*_: Any) -> None:
        watched.end_all()
        os._exit(1)

    adopt(leave)
    found = watched.start()
    if found is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        return found
    record = watched.follow()
    record["ranks"] = [_read(launches.result_file(folder, rank)) for rank in range(case.cp_size)]
    record["caller"] = _read(folder / launches.CALLER)
    record["checkpoint"] = ""
    if case.save != "none":
        record["checkpoint"] = str(_in_fork(partial(saves.problem, folder), folder))
    if any("numbers" in rank for rank in record["ranks"]):
        record["reference"] = _in_fork(partial(_without_fault, case), folder)
    record["log"] = {path.suffix[1:]: path.read_text(errors="replace")[-40_000:] for path in folder.glob(f"{LOG}.*")}
    launches.write(folder / RECORD, record)
    os._exit(0)


def adopt(leave: Callable[..., None]) -> None:
    """Makes this process the parent of all orphans below it, and has it `leave` when its own parent ends."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no process outlives the campaign
    if os.getppid() != parent:
        leave()
    os.setpgid(0, 0)


def _without_fault(case: Case) -> list[list[list[float]]]:
    torch.set_num_threads(1)  # makes torch's pool before there are threads, which a fork may not do in several
    return run_ranks(_thread, case.cp_size, case)


def _thread(group: Any, case: Case) -> list[list[float]]:
    return Job(case, group, group, None).run()


def _in_fork(work: Callable[[], Any], folder: Path) -> Any:
    """Returns the result of `work`, which runs in a forked process."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _write_to(folder / f"{LOG}.after")
            launches.write(answer, work())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return _read(answer) if answer.exists() else f"ended with {os.waitstatus_to_exitcode(status)}"


def _then_leave(run: Callable[[], Any]) -> None:
    """Ends at once after `run`, without the interpreter's end, which takes longer than the job."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stderr.flush()
        os._exit(code)


def descendants() -> list[psutil.Process]:
    """Returns the processes below this one that have not ended, those that were adopted too."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _write_to(path: Path) -> None:
    """Redirects standard output and error of this process to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}
