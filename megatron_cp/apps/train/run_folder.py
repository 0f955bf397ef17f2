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

from megatron_cp.errors import ArgumentError

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name for it, among the checkpoints


def is_locked(folder: Path) -> bool:
    """Returns True if a run uses the folder. Several ranks may ask at the same time."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # nothing is there, or it is no path: making the folder fails then
        return False
    return False


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
