"""The folder of a run: used by one run at a time, with files that are whole whenever a run is killed.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_cp.apps.train.options import METRICS
from megatron_cp.errors import ArgumentError
from megatron_cp.files import whole_file

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name for it, among the checkpoints
SAVES = "a run saves one every --save-interval steps, and one at its end"


def checkpoint_folder(folder: Path, iteration: int) -> Path:
    """Returns the folder of a checkpoint among those of a run."""
    return folder / f"iter_{iteration:07d}"


def latest_checkpoint(folder: Path) -> Path:
    """Returns the checkpoint from which a run in `folder` can go on.

    Raises:
        ArgumentError: the run has saved none, or it is not there.
    """
    tracker = folder / TRACKER
    allowed = "a run that has saved a checkpoint"
    if not tracker.exists():
        remedy = f"The run saved no checkpoint: {SAVES}. Start again without --resume, in another --run-dir."
        raise ArgumentError("resume", str(folder.parent), allowed, remedy)
    try:
        iteration = int(tracker.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError("resume", str(folder.parent), allowed, f"Cannot read {tracker}: {error}.") from None
    found = checkpoint_folder(folder, iteration)
    if not found.is_dir():
        remedy = f"{tracker} names {found.name}, which is not there."
        raise ArgumentError("resume", str(folder.parent), allowed, remedy)
    return found


def claimed(run_dir: str | None, resume: str | None, held: contextlib.ExitStack) -> Path:
    """Makes the folder of a run, if it is not there, and keeps others out of it for as long as `held` is open.

    Args:
        run_dir: the folder that was named; None for a new one below `runs/`, or for that of the run that goes on.
        resume: the folder of the run that goes on; None for none.
        held: what holds the lock.

    Raises:
        ArgumentError: a run is under way there, has steps there, or has saved no checkpoint to go on from.
    """
    named = run_dir or resume
    folder = Path(named) if named else Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    goes_on = resume is not None and folder.resolve() == Path(resume).resolve()
    if resume is not None:
        latest_checkpoint(Path(resume) / CHECKPOINTS)
    try:
        folder.mkdir(parents=True, exist_ok=named is not None)
        held.enter_context(locked(folder, "resume" if goes_on else "run_dir"))
    except OSError as error:
        raise ArgumentError("run_dir", str(folder), "a folder that can be written", f"{error.strerror}.") from None
    metrics, tracker = folder / METRICS, folder / CHECKPOINTS / TRACKER
    has_steps = tracker.exists() or (metrics.exists() and metrics.stat().st_size)
    if has_steps and not goes_on:  # not one that ended before a step
        remedy = f"The folder has the steps of a run; to continue it: --resume {folder}"
        if not tracker.exists():
            remedy = f"The folder has the steps of a run, but no checkpoint: {SAVES}."
        raise ArgumentError("run_dir", str(folder), "a new folder", remedy)
    return folder


@contextlib.contextmanager
def locked(folder: Path, argument: str) -> Iterator[None]:
    """Keeps every other run out of the folder until the block or this process ends, in whichever way.

    Raises:
        ArgumentError: names `argument`; a run uses the folder, perhaps on another machine that shares it.
    """
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            remedy = f"A run is under way there: {file.read(200).strip() or 'it has just started'}."
            raise ArgumentError(argument, str(folder), "a folder in which no run is under way", remedy) from None
        except OSError as error:  # a file system that has no locks
            print(f"Cannot lock {folder} ({error.strerror}): do not start another run in it.", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextlib.contextmanager
def writing(folder: Path, what: str) -> Iterator[None]:
    """Turns a failure to write into an error of one line, with the free space that is left."""
    try:
        yield
    except OSError as error:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        remedy = f"Cannot write {what}: {error}. {free / 1e6:,.1f} MB are free there."
        raise ArgumentError("run_dir", str(folder), "a folder with room for what a run writes", remedy) from None


def write_whole(path: Path, text: str) -> None:
    """Writes a file completely or not at all, even if the power fails."""
    with whole_file(path) as new:
        new.write_text(text)
        sync(new)
    sync(path.parent)


def sync(path: Path) -> None:
    """Writes a file's content, or a folder's names, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
