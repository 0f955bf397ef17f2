"""A run's folder: of one run at a time, with files that are whole whenever a run is killed. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_cp.errors import ArgumentError

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name for it, among the checkpoints


def is_locked(folder: Path) -> bool:
    """Whether a run is under way in the folder. Any number of ranks may ask at once."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # nothing is there, or no path: whoever makes the folder says so
        return False
    return False


@contextlib.contextmanager
def locked(folder: Path, argument: str) -> Iterator[None]:
    """Keeps every other run out of the folder until the block or this process ends, however it ends.

    Args:
        folder: of the run; it is there.
        argument: what the user named it by, for the error.

    Raises:
        ArgumentError: a run is under way there, also one on another machine that shares the folder.
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
    """Says in one line where a block could not write, and how much room is left there.

    Args:
        folder: below which the block writes.
        what: it writes.

    Raises:
        ArgumentError: it could not.
    """
    try:
        yield
    except OSError as error:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        remedy = f"Cannot write {what}: {error}. {free / 1e6:,.1f} MB are free there."
        raise ArgumentError("run_dir", str(folder), "a folder with room for what a run writes", remedy) from None


def write_whole(path: Path, text: str) -> None:
    """Writes a file at once or not at all, also where the power fails.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
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
    """Makes what a file holds, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # of which some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)
