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
from collections.abc import Iterator
from pathlib import Path

from megatron_cp.apps.train.options import METRICS
from megatron_cp.errors import ArgumentError

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name for it, among the checkpoints


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
        remedy = f"It has saved none: {SAVES}. Start again without --resume, in another --run-dir."
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


SAVES = "a run saves one every --save-interval steps, and one at its end"


def refuse_locked(folder: Path, argument: str) -> None:
    """Refuses a folder that a run uses, without keeping others out of it.

    Raises:
        ArgumentError: names `argument`.
    """
    try:
        with (folder / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _under_way(folder, argument, file.read(200)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        # Nothing is there, or it is no path: making the folder fails then.


def _under_way(folder: Path, argument: str, who: str) -> ArgumentError:
    remedy = f"A run is under way there: {who.strip() or 'it has just started'}."
    return ArgumentError(argument, str(folder), "a folder in which no run is under way", remedy)


def refuse_early(run_dir: str | None, resume: str | None) -> None:
    """Refuses folders before Megatron is imported; they are looked at again where the run locks its own.

    Raises:
        ArgumentError: a run is under way there, has steps there, or has saved no checkpoint to go on from.
    """
    named = run_dir or resume
    # Other ranks of a job would meet the lock of their own first rank.
    if named is not None and os.environ.get("RANK", "0") == "0":
        refuse_locked(Path(named), "resume" if is_resumed(Path(named), resume) else "run_dir")
    if resume is not None:
        latest_checkpoint(Path(resume) / CHECKPOINTS)
    if run_dir is not None:
        refuse_steps(Path(run_dir), resume)


def refuse_steps(folder: Path, resume: str | None) -> None:
    """Refuses a folder with the steps of a run that is not the one to resume.

    Raises:
        ArgumentError: they are there.
    """
    metrics, tracker = folder / METRICS, folder / CHECKPOINTS / TRACKER
    has_steps = tracker.exists() or (metrics.exists() and metrics.stat().st_size)
    if has_steps and not is_resumed(folder, resume):  # not one that ended before a step
        remedy = f"The steps of a run are there; to go on with it: --resume {folder}"
        if not tracker.exists():
            remedy = f"The steps of a run are there, but no checkpoint: {SAVES}."
        raise ArgumentError("run_dir", str(folder), "a new folder", remedy)


def is_resumed(folder: Path, resume: str | None) -> bool:
    """Returns True if the run in `folder` is the one that goes on."""
    return resume is not None and folder.resolve() == Path(resume).resolve()


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
            raise _under_way(folder, argument, file.read(200)) from None
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
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
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
