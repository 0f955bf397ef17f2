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
        self.fault: dict[str, Any] = {}
        self.asked = False
        self.began = time.monotonic()

    def start(self) -> None:
        """Forks the job's processes."""
        case, folder = self.case, self.folder
        if case.train:
            training.prepare(folder)
        if case.launch == "launcher":
            self.pids[-1] = forked(partial(launches.call_launcher, case, folder), folder / f"{LOG}.-1")
            return
        launches.choose_port()
        begin = launches.become_fresh_rank if case.fresh else launches.independent_rank
        for rank in range(case.cp_size):
            self.pids[rank] = forked(partial(begin, case, rank, folder), folder / f"{LOG}.{rank}")

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
            left = descendants()
            if not left:
                return [], time.monotonic()
            if time.monotonic() > until:
                return list(map(str, left)), None
            time.sleep(0.01)

    def _stacks(self) -> str:
        for process in descendants():
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


def watch(case: Case, folder: Path, limit: float) -> None:
    """Runs one case in this process, a fork, and leaves its record in the folder."""
    watched = Watch(case, folder, limit)

    def leave(*_: Any) -> None:
        watched.end_all()
        os._exit(1)

    adopt(leave)
    watched.start()
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
    _, status = os.waitpid(forked(lambda: launches.write(answer, work()), folder / f"{LOG}.after"), 0)
    return _read(answer) if answer.exists() else f"ended with {os.waitstatus_to_exitcode(status)}"


def forked(run: Callable[[], Any], log: Path | None = None) -> int:
    """Runs a function in a fork, which then ends without the interpreter's end, which takes longer than the job.

    Args:
        run: the function.
        log: a file for the fork's standard output and error.

    Returns:
        The number of the fork's process.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if log is not None:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
        run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def descendants() -> list[psutil.Process]:
    """Returns the processes below this one that have not ended, those that were adopted too."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}
