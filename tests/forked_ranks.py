"""Processes that fork from one which has imported torch, Megatron and ours: of most rank processes that is most.

CUDA cannot be used after a fork, so that there they are spawned, as users' ranks are; an emulated device can.
"""

import functools
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp.executor import launch

_ROOT = Path(__file__).parents[1]
_PRELOADED = (
    "hypothesis", "matplotlib.figure", "megatron.core.distributed", "megatron.core.models.gpt",
    "megatron.core.models.hybrid.hybrid_model", "megatron.core.pipeline_parallel",
    "megatron.core.ssm.gated_delta_net.common", "megatron.training", "megatron_cp.cli.main",
    "megatron_cp.executor.launch", "megatron_cp.megatron.specs", "megatron_cp.apps.train.loop",
    "megatron_cp.testing.parity", "numpy", "pytest", "torch.distributed", "tests.frozen",
)  # fmt: skip
# Tests of the emulated device need no Megatron, whose import takes its time there.
_PRELOADED_FOR_CUDA = (
    "hypothesis", "megatron_cp.executor.launch", "megatron_cp.exchange.kernels.triton",
    "megatron_cp.linear.gates.triton_kernels", "megatron_cp.testing.parity", "numpy", "pytest", "torch.distributed",
    "tests.frozen",
)  # fmt: skip


def forking_context():
    """The context of multiprocessing in which a process is a fork; one server of forks lives as long as this process.

    A fork has the environment of when the first one was made.
    """
    if torch.cuda.is_available() and "NULLGPU" not in os.environ:
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(list(_PRELOADED_FOR_CUDA if "NULLGPU" in os.environ else _PRELOADED))
    with pytest.MonkeyPatch.context() as patch:  # of several checkouts, each tests its own
        patch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def import_trainers() -> None:
    """Imports transformers, its trainers and TRL's: the files whose ranks need them share a process that has."""
    torch.set_num_threads(1)
    import datasets  # noqa: F401
    import trl
    from peft import LoraConfig  # noqa: F401

    import megatron_cp.transformers.generation
    import megatron_cp.transformers.preference
    import megatron_cp.transformers.trainer  # noqa: F401
    from tests.transformers_cases import class_of

    class_of("Llama"), class_of("Qwen3Next")
    trl.DPOTrainer, trl.KTOTrainer, trl.GRPOTrainer, trl.RLOOTrainer, trl.SFTTrainer  # noqa: B018


def as_launched(world: Any, port: int, **others: str) -> None:
    """Sets what torchrun says to a rank. Of a rank without a number of threads accelerate makes one for each core."""
    os.environ |= {
        "RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", **others,
    }  # fmt: skip


def run_ranks_after(prepare: Callable[[], None], function: Callable[..., Any], size: int, *, timeout: float) -> Any:
    """`run_ranks` with forks of a new process that has called `prepare`: for what must come before any import."""
    return run_worlds_after(prepare, function, (size,), timeout=timeout)[size]


def run_worlds_after(
    prepare: Callable[[], None], function: Callable[..., Any], sizes: Iterable[int], *, timeout: float
) -> dict[int, Any]:
    """`run_ranks_after` for several numbers of ranks, all of them forks of one process, which imports once."""
    process = _process_after(prepare)
    return {size: process.submit(_run_forks, prepare, function, size, timeout).result() for size in sizes}


@functools.lru_cache(maxsize=1)
def _process_after(prepare: Callable[[], None]) -> ProcessPoolExecutor:
    """The process that has called `prepare`; it serves until another is asked for."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _run_forks(prepare: Callable[[], None], function: Callable[..., Any], size: int, timeout: float) -> Any:
    prepare()
    gc.collect()
    gc.freeze()  # see `tests.frozen`
    launch.multiprocessing = SimpleNamespace(
        get_context=lambda _: multiprocessing.get_context("fork"), parent_process=multiprocessing.parent_process
    )
    return launch.run_ranks(function, size, kind="processes", timeout=timeout)
