"""`megatron-cp` commands, and modules of tests, in forks of a process that has imported what they need.

A new process as users have it, and each of its ranks, imports for seconds. A fork differs in how it starts alone: its
output, its process group, its exit code and what it does with signals are those of a command in a shell.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.commands import ROOT
from tests.forked_ranks import forking_context
from tests.limits import limit


@contextlib.contextmanager
def forked(
    arguments: Sequence[str], out: Path, err: Path, *, environment: Mapping[str, str], folder: Path,
    before: Callable[[], None] | None = None,
) -> Iterator[Any]:  # fmt: skip
    """A command under way, as a `multiprocessing.Process`; it and its process group are killed at the end.

    Args:
        arguments: of `megatron-cp`.
        out: the file of its standard output, and `err` that of its standard error. They may be the same.
        environment: added to that of the process that forks.
        folder: that it runs in.
        before: called in the command's process first.
    """
    process = forking_context().Process(target=_command, args=(arguments, out, err, dict(environment), folder, before))
    process.start()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it had not come to have a group
        process.join()


def run_forked(
    arguments: Sequence[str], prints: Path, *, timeout: float, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a fork and returns its result; its output is kept in the folder `prints`.

    Raises:
        AssertionError: it had not ended after `timeout` seconds.
    """
    out, err = prints / "stdout", prints / "stderr"
    with forked(arguments, out, err, **more) as process:
        process.join(timeout)
        assert process.exitcode is not None, f"not ended after {timeout} s: {err.read_text()}"
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def run_module(module: str, *arguments: str, **environment: str) -> str:
    """Runs a module of the tests as the main one of a fork, without Triton so far, and returns what it prints."""
    return _printed_by(functools.partial(runpy.run_module, module, run_name="__main__"), arguments, environment)


def run_script(path: Path, *arguments: str, **environment: str) -> str:
    """Runs a script in a fork and returns what it prints."""
    return _printed_by(functools.partial(runpy.run_path, str(path), run_name="__main__"), arguments, environment)


def run_code(code: str) -> str:
    """Runs code in a fork, which has imported torch and no other framework, and returns what it prints."""
    return _printed_by(functools.partial(exec, code, {}), (), {})


def _printed_by(main: Callable[[], Any], arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        done = run_forked(
            arguments, Path(folder), timeout=limit(240), environment=environment, folder=ROOT,
            before=functools.partial(_run_alone, main, arguments),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_alone(main: Callable[[], Any], arguments: Sequence[str]) -> None:
    sys.argv = ["", *arguments]
    main()
    sys.exit()


def _command(
    arguments: Sequence[str],
    out: Path,
    err: Path,
    environment: Mapping[str, str],
    folder: Path,
    before: Callable[[], None] | None,
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for path, descriptor in ((out, 1), (err, 2)):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    if before is not None:
        before()
    from megatron_cp.cli.main import console
    from megatron_cp.executor import launch

    launch.multiprocessing = SimpleNamespace(get_context=_fork, parent_process=multiprocessing.parent_process)
    sys.argv = ["megatron-cp", *arguments]
    console()


class _Rank(ForkProcess):
    """A rank with its command's process group and limits, which a server's forks have not."""

    def run(self) -> None:
        super().run()
        gc.collect()  # as the end of an interpreter does, which ends the line of a progress bar; a fork has no such end


def _fork(_: str) -> Any:
    """The context of `multiprocessing` that the launcher asks for."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    assert not others, f"forks would lack the threads {others}, and may wait for their locks"
    return SimpleNamespace(Process=_Rank)
