"""Several jobs at a time, each watched by a fork of this process, which has imported everything."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

# Forks have these then.
from megatron_cp.executor.groups import ThreadGroup
from tools.faults.cases import Case, draw
from tools.faults.classify import Verdict, classify
from tools.faults.job import Job
from tools.faults.watch import RECORD, forked, watch


def run(cases: Iterator[Case], home: Path, jobs: int, limit: float) -> Iterator[tuple[Case, Verdict, dict[str, Any]]]:
    """Runs cases, and yields each with its verdict and its record when it has ended.

    Args:
        cases: the cases, which are drawn as they begin.
        home: a folder, for a folder of each job while it runs.
        jobs: how many run at a time.
        limit: seconds after a fault until what is still there counts as hanging.
    """
    running: dict[int, Case] = {}
    try:
        while True:
            while len(running) < jobs and (case := next(cases, None)) is not None:
                (home / str(case.number)).mkdir()
                running[forked(partial(watch, case, home / str(case.number), limit))] = case
            if not running:
                return
            pid, status = os.wait()
            case = running.pop(pid)
            if status:
                raise RuntimeError(f"what watched case {case.number} ended with {status}: --case '{case.text()}'")
            record = json.loads((home / str(case.number) / RECORD).read_text())
            shutil.rmtree(home / str(case.number))
            yield case, classify(record), record
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)  # which ends its job too


def warm_up() -> None:
    """Imports and makes all that an operation's first use would, so that forks have it. Starts no thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module("megatron_cp.apps.train.checkpoint")  # Megatron's, by which all jobs save
    cases = [case for case in (draw(0, number) for number in range(60)) if case.cp_size == 2]
    for case in cases[:20]:
        (group,) = ThreadGroup.create(1)
        Job(dataclasses.replace(case, cp_size=1), group, group, None).run()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("this process has threads, which forks would not have")
    gc.collect()
    gc.freeze()
