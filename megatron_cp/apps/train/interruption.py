"""The end of a run that is interrupted, by Ctrl-C or by SIGTERM, which schedulers and torchrun send.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_cp.apps.train.options import Run
from megatron_cp.apps.train.record import RunRecord, entries_of
from megatron_cp.apps.train.run_folder import CHECKPOINTS, SAVES, TRACKER
from megatron_cp.errors import ArgumentError

PATIENCE = 10.0  # seconds; torchrun kills its ranks 30 s after it has told them to end


class Terminated(KeyboardInterrupt):
    """Raised in the main thread by a SIGTERM."""


class Terminations:
    """A context in which a SIGTERM raises `Terminated` in the main thread, as Ctrl-C raises `KeyboardInterrupt`.

    A main thread that waits for other ranks inside of torch, as those of torchrun do, raises nothing. If it has not
    after `patience` seconds, another thread calls `last_words` and ends the process.

    Args:
        patience: the seconds; None where the main thread waits in Python only, and needs no other.

    Attributes:
        last_words: a function to call then; None for none.
    """

    def __init__(self, patience: float | None = None) -> None:
        self.last_words: Callable[[], None] | None = None
        self._patience, self._heard = patience, threading.Event()
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> Terminations:
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is None:
            return self  # Python can set no handler, or not restore the one there is
        self._restore.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, self._raise))
        if self._patience is not None:
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._restore.callback(os.close, write)  # ends the thread
            self._restore.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
            threading.Thread(target=self._watch, args=(read,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._heard.set()
        self._restore.close()

    def _raise(self, *_: object) -> None:
        if not self._heard.is_set():  # a second one would break off what the first has begun
            self._heard.set()
            raise Terminated

    def _watch(self, read: int) -> None:
        """Waits for a SIGTERM, of which the interpreter writes the number to the pipe even while torch waits."""
        with open(read, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGTERM and not self._heard.wait(self._patience):
                    if self.last_words is not None:
                        self.last_words()
                    os._exit(130)


def cause_of(error: BaseException) -> str:
    """Returns the reason of a run's end, as `run.json` has it."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted by {'SIGTERM' if isinstance(error, Terminated) else 'Ctrl-C'}"
    return f"{type(error).__name__}: {error}"


def record_interruption(run: Run, record: RunRecord, error: BaseException) -> str:
    """Writes how far a run came, in `run.json` and the report; returns what was saved."""
    entries = entries_of(run.folder)
    said = f"{cause_of(error)} {_what_is_saved(run, entries)}"
    losses = [entry["loss"] for entry in entries]
    ends = {"first_loss": losses[0], "final_loss": losses[-1], "run_dir": str(run.folder)} if losses else {}
    record.ended({"steps": len(entries), **ends} if losses else None, error=said)
    with contextlib.suppress(ArgumentError):  # a full disk
        record.report((said, False), entries)
    return said


def _what_is_saved(run: Run, entries: Sequence[dict[str, Any]]) -> str:
    tracker = run.folder / CHECKPOINTS / TRACKER
    if tracker.exists():
        done = f"after step {entries[-1]['step']} of {run.options.train_iters}" if entries else "before a step"
        saved = tracker.read_text().strip()
        return f"{done}; the last checkpoint is of step {saved}. To go on from there: --resume {run.folder}"
    if not entries:
        if run.resume is not None:
            return f"before the first step; nothing was saved. To start again: --resume {run.resume.parent.parent}"
        return "before the first step; nothing was saved. To start again, run the same command"
    return (
        f"after step {entries[-1]['step']} of {run.options.train_iters}; no checkpoint was saved: {SAVES}. "
        "To start again, take another --run-dir"
    )
