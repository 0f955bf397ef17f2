"""Processes that fork from one which has imported torch, Megatron and ours: of most rank processes that is most.

CUDA cannot be used after a fork, so that there they are spawned, as users' ranks are; an emulated device can.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp.executor import launch
from tests.shared import once
from tools.forks import ranks_are_forks

_ROOT = Path(__file__).parents[1]
_ALWAYS = (
    "hypothesis", "megatron_cp.executor.launch", "megatron_cp.testing.parity", "numpy", "pytest", "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # which a process imports in its first backward pass
)  # fmt: skip
# By kind of server. A fork copies the tables of its server's pages: one that has Megatron takes half as long again.
_PRELOADED = {
    # With torch's compiler, which a process imports in its first mode of dispatch.
    "torch": (*_ALWAYS, "torch._dynamo"),
    "megatron": (
        *_ALWAYS, "matplotlib.figure", "megatron.core.distributed", "megatron.core.models.gpt",
        "megatron.core.models.hybrid.hybrid_model", "megatron.core.pipeline_parallel",
        "megatron.core.ssm.gated_delta_net.common", "megatron.training", "megatron_cp.megatron.specs",
        "megatron_cp.apps.train.loop",
    ),
    "trainers": (*_ALWAYS, "tests.trainers_imported"),
    "emulated device": (
        *_ALWAYS, "megatron_cp.exchange.kernels.triton", "megatron_cp.linear.gates.triton_kernels",
    ),
}  # fmt: skip


def start_server(kind: str) -> dict[str, Any]:
    """Starts a server of forks, which lives as long as a process that holds its pipe, and returns how others reach it.

    A fork has the environment of when its server was started. The server's socket has a name and no file, which would
    be in a folder that goes when this process ends.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_PRELOADED[kind], "tests.frozen"])
    with pytest.MonkeyPatch.context() as patch:  # of several checkouts, each tests its own
        patch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)
        patch.setattr("multiprocessing.connection.arbitrary_address", lambda _: f"\0forks-{uuid.uuid4()}")
        server.ensure_running()
    named = ("_forkserver_address", "_forkserver_authkey")
    found = {name: value for name, value in vars(server).items() if name in named}
    return found | {"pipe": f"/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}"}


def forking_context() -> Any:
    """Returns the context of multiprocessing in which a process is a fork of the server that `use_server` chose."""
    if torch.cuda.is_available() and "NULLGPU" not in os.environ:
        return multiprocessing.get_context("spawn")
    used = forkserver._forkserver  # the contexts' own, which would start another server
    used.ensure_running = lambda: None
    vars(used).update(_reach())
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def use_server(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Iterator[None]:
    """Lets `forking_context` fork from a kind of server, started when first needed, one for all workers of a run."""
    kind = "emulated device" if "NULLGPU" in os.environ else kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.forked_ranks._reach", functools.partial(_reach_kind, tmp_path_factory, kind))
        yield


def _reach_kind(tmp_path_factory: pytest.TempPathFactory, kind: str) -> dict[str, Any]:
    if kind in _reached:
        return _reached[kind]
    start = functools.partial(start_server, kind)
    found = once(tmp_path_factory, f"server of forks, {kind}", start)
    try:
        pipe = os.open(found["pipe"], os.O_WRONLY)
    except FileNotFoundError:  # the worker that started it has ended, as they do when no more files are left
        found = start()
        pipe = os.open(found["pipe"], os.O_WRONLY)
    return _reached.setdefault(kind, found | {"_forkserver_alive_fd": pipe})


_reached: dict[str, dict[str, Any]] = {}  # by this process


def _reach() -> dict[str, Any]:
    raise AssertionError("no server of forks was chosen")


def as_launched(world: Any, port: int, **others: str) -> None:
    """Sets what torchrun says to a rank. Of a rank without a number of threads accelerate makes one for each core."""
    os.environ |= {
        "RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", **others,
    }  # fmt: skip


def run_ranks_after(prepare: Callable[[], None], function: Callable[..., Any], size: int, *, timeout: float) -> Any:
    """`run_ranks` with forks of a new process that has called `prepare`: for what must come before any import."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(run_forks, prepare, function, size, timeout).result()


def run_forks(prepare: Callable[[], Any], function: Callable[..., Any], size: int, timeout: float | None) -> Any:
    """`run_ranks` with forks of this process, which calls `prepare` before."""
    prepare()
    gc.collect()
    gc.freeze()  # see `tests.frozen`
    with ranks_are_forks():
        return launch.run_ranks(function, size, kind="processes", timeout=timeout)
