"""Many jobs at a time, each watched by a fork of this process, which has imported everything."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

# Forks have these then.
from megatron_cp.executor.groups import ThreadGroup
from tools.faults.cases import Case, draw
from tools.faults.classify import Verdict, classify
from tools.faults.faulty import FAULT_FILE
from tools.faults.job import Job
from tools.faults.watch import RECORD, forked, watch

_SETTLED = 1.5  # seconds after its fault from which on a job mostly waits
_WAITING = 24  # jobs that do nothing else


@dataclass
class Campaign:
    """Runs cases and keeps what came of them.

    Args:
        home: a folder, for a folder of each job while it runs.
        jobs: how many run at a time; those whose fault is some time ago do not count.
        limit: seconds after a fault until what is still there counts as hanging.
        tell: is called with each case when it has ended.
    """

    home: Path
    jobs: int
    limit: float
    tell: Any
    results: list[tuple[Case, Verdict, dict[str, Any]]] = field(default_factory=list)

    def run(self, cases: Iterable[Case]) -> None:
        """Runs all, until they have ended."""
        running: dict[int, Case] = {}
        ahead: Iterator[Case] = iter(cases)
        try:
            while True:
                case = next(ahead, None) if self._has_room(running) else None
                if case is not None:
                    folder = self._folder(case)
                    folder.mkdir()
                    running[forked(partial(watch, case, folder, self.limit))] = case
                elif not running:
                    break
                else:
                    self._collect(running)
                    time.sleep(0.01)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGTERM)  # which ends its job too
        self.results.sort(key=lambda result: result[0].number)

    def _has_room(self, running: dict[int, Case]) -> bool:
        busy = sum(not self._is_waiting(case) for case in running.values())
        return busy < self.jobs and len(running) < self.jobs + _WAITING

    def _is_waiting(self, case: Case) -> bool:
        try:
            return time.time() - (self._folder(case) / FAULT_FILE).stat().st_mtime > _SETTLED
        except FileNotFoundError:
            return False

    def _folder(self, case: Case) -> Path:
        return self.home / str(case.number)

    def _collect(self, running: dict[int, Case]) -> None:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            case = running.pop(pid)
            if status:
                raise RuntimeError(f"what watched case {case.number} ended with {status}: --case '{case.text()}'")
            record = json.loads((self._folder(case) / RECORD).read_text())
            shutil.rmtree(self._folder(case))
            self.results.append((case, classify(record), record))
            self.tell(*self.results[-1][:2])


def warm_up() -> None:
    """Imports and makes all that an operation's first use would, so that forks have it. Starts no thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module("megatron_cp.apps.train.checkpoint")  # Megatron's, by which all jobs save
    cases = [case for case in (draw(0, number) for number in range(60)) if case.cp_size == 2][:20]
    for case in cases:
        (group,) = ThreadGroup.create(1)
        Job(dataclasses.replace(case, cp_size=1), group, group, None).run()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("this process has threads, which forks would not have")
    gc.collect()
    gc.freeze()
