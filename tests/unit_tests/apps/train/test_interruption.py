"""A run that is interrupted says what was saved and how to go on, by Ctrl-C and by SIGTERM alike."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_cp.apps.train.command import OPTIONS_FILE
from megatron_cp.apps.train.interruption import Terminated, Terminations, cause_of, record_interruption
from megatron_cp.apps.train.options import Run, TrainingOptions
from megatron_cp.apps.train.record import RunRecord
from megatron_cp.apps.train.run_folder import CHECKPOINTS, SAVES, TRACKER
from tests.limits import limit

ROOT = Path(__file__).parents[4]
ENTRY = {"loss": 3.5, "grad_norm": 1.0, "tokens_per_second": 9.0, "context_parallel_size": 2}


@pytest.mark.parametrize("steps", [0, 3], ids=["before a step", "after steps"])
@pytest.mark.parametrize("saved", [None, 2], ids=["nothing saved", "saved"])
@pytest.mark.parametrize("error", [Terminated(), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def test_an_interrupted_run_is_recorded(steps, saved, error, tmp_path):
    run = Run(TrainingOptions(train_iters=9), tmp_path, name="CP=2")
    (tmp_path / OPTIONS_FILE).touch()
    if steps:
        lines = [json.dumps({**ENTRY, "step": step + 1}) for step in range(steps)]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    if saved:
        (tmp_path / CHECKPOINTS).mkdir()
        (tmp_path / CHECKPOINTS / TRACKER).write_text(f"{saved}")
    said = record_interruption(run, RunRecord(tmp_path, run.options, "train"), error)
    name = "SIGTERM" if isinstance(error, Terminated) else "Ctrl-C"
    progress = "after step 3 of 9" if steps else "before a step" if saved else "before the first step"
    assert said.startswith(f"interrupted by {name} {progress}; ")
    assert said.endswith(
        f"the last checkpoint is of step 2. To go on from there: --resume {tmp_path}"
        if saved
        else f"no checkpoint was saved: {SAVES}. To start again, take another --run-dir"
        if steps
        else "nothing was saved. To start again, run the same command"
    )
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["ended"] is not None
    assert found["error"] == said
    assert (found["result"] or {}).get("steps") == (steps or None)


def terminated_twice(done):
    with Terminations(patience=limit(60)):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(limit(10))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # breaks nothing off
            threading.Event().wait(0.01)
            done.append("what the first one began")


def test_a_sigterm_raises_once_and_its_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    done = []
    with pytest.raises(Terminated):
        terminated_twice(done)
    assert done == ["what the first one began"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert cause_of(Terminated()) == "interrupted by SIGTERM"
    assert cause_of(ValueError("x")) == "ValueError: x"


def test_another_thread_has_no_handler():
    seen = []

    def enter():
        with Terminations():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


_WAITS_FOR_EVER = """
import ctypes, os, threading
from tests.unit_tests.apps.train.test_interruption import wait_in_c
from megatron_cp.apps.train.interruption import Terminations
with Terminations(patience=0.1) as terminations:
    terminations.last_words = lambda: os.write(1, b"last words")
    wait_in_c()
"""


def wait_in_c():
    """Waits as a collective of a lost rank does, and says so from inside: no signal's handler of Python runs."""
    ctypes.CDLL(None).system(b"echo waiting; exec sleep 600 > /dev/null")


def test_a_rank_that_waits_inside_of_torch_has_last_words():
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS_FOR_EVER], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=limit(30))[0] == "last words"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
