"""Workers of a run are forks of the process that starts them, which has imported the modules that they collect.

xdist would start new interpreters, each of which imports and rewrites all modules of tests: ten seconds and more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.python import importtestmodule
from execnet import gateway_io
from execnet.gateway_base import Popen2IO


def fork_workers(config: pytest.Config, count: int) -> None:
    """Makes forks that xdist takes for its first workers; what replaces a worker that died is a new interpreter."""
    if torch.cuda.is_available() or "NULLGPU" in os.environ:  # which cannot be used after a fork
        return
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        for module in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            import_if_it_can_be(module, config)
    with contextlib.suppress(ImportError):
        importlib.import_module("ortools.sat.python.cp_model")  # which tests import when they search
    if threading.active_count() > 1:
        return
    gc.collect()
    gc.freeze()
    forks: list[_Fork] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that numpy and pyarrow end and begin at a fork
        for _ in range(count):
            forks.append(_Fork(forks))
    create_io = gateway_io.create_io

    def take_fork(spec: Any, execmodel: Any) -> Any:
        if not forks:
            return create_io(spec, execmodel)
        fork = forks.pop(0)
        fork.execmodel = execmodel
        return fork

    gateway_io.create_io = take_fork


def import_if_it_can_be(path: Path, config: pytest.Config) -> None:
    """Imports a module of tests; of one that fails or skips itself nothing is kept, so that the workers say so."""
    known = set(sys.modules)
    try:
        importtestmodule(path, config)
    except (Exception, pytest.skip.Exception):  # after which pytest would find, and run, the first half of the module
        for name in set(sys.modules) - known:
            if getattr(sys.modules[name], "__file__", None) == str(path):
                del sys.modules[name]


class _Fork(Popen2IO):
    """A worker as execnet sees it: pipes to a process that runs the line of code it is sent."""

    def __init__(self, earlier: list[_Fork]) -> None:
        (stdin, to_stdin), (from_stdout, stdout) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for other in earlier:  # whose pipes would not end with this process's parent
                other.close_read(), other.close_write()
            for end, descriptor in ((stdin, 0), (stdout, 1)):
                os.dup2(end, descriptor)
            for end in (stdin, to_stdin, from_stdout, stdout):
                os.close(end)
            torch.set_num_threads(1)  # makes torch's pool anew, in which threads of a test would be in each other's way
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
            try:
                exec(eval(sys.stdin.readline()))
            finally:
                os._exit(0)
        os.close(stdin), os.close(stdout)
        super().__init__(os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb"), None)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
