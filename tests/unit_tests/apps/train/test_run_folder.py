"""A run's folder: one run at a time, and no file that is half written."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_cp.apps.train import run_folder
from megatron_cp.apps.train.run_folder import LOCK, locked, write_whole, writing
from megatron_cp.errors import ArgumentError
from tests.refusals import rejects


def test_rejects_a_folder_in_which_a_run_is_under_way(tmp_path):
    with locked(tmp_path, "run_dir"):
        with pytest.raises(ArgumentError, match=r"resume: got .*A run is under way there: process") as caught:
            locked(tmp_path, "resume").__enter__()
        assert f"process {os.getpid()} on " in str(caught.value)
    with locked(tmp_path, "run_dir"):
        pass


@pytest.mark.timeout(60)
def test_a_run_that_is_killed_leaves_its_folder_to_the_next(tmp_path):
    source = (
        "import sys, time; from pathlib import Path; from megatron_cp.apps.train.run_folder import locked\n"
        "with locked(Path(sys.argv[1]), 'run_dir'): print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        rejects(f"process {holder.pid} on ", locked(tmp_path, "run_dir").__enter__)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with locked(tmp_path, "run_dir"):
            assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    finally:
        holder.kill()
        holder.wait()


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    with locked(tmp_path, "run_dir"):
        assert "(Function not implemented): do not start another run in it" in capsys.readouterr().err


def test_rejects_a_full_disk_by_the_room_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_234_567))
    with pytest.raises(ArgumentError) as caught, writing(tmp_path / "not" / "made", "loss.png"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value) == (
        f"run_dir: got '{tmp_path}/not/made'; allowed: a folder with room for what a run writes. "
        "Cannot write loss.png: [Errno 28] No space left on device. 1.2 MB are free there."
    )


def test_a_file_is_written_at_once_or_not_at_all(tmp_path):
    path = tmp_path / "tracker"
    write_whole(path, "7")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "8" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "7"
    assert [found.name for found in tmp_path.iterdir()] == ["tracker"]
    assert shutil.disk_usage(tmp_path).free > 0


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name thereafter: else a power cut leaves a name without what it names."""
    done = []
    monkeypatch.setattr(run_folder.os, "fsync", lambda descriptor: done.append("sync"))
    replace = type(tmp_path).replace
    monkeypatch.setattr(type(tmp_path), "replace", lambda self, to: (done.append("replace"), replace(self, to)))
    write_whole(tmp_path / "tracker", "7")
    assert done == ["sync", "replace", "sync"]
