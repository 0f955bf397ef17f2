"""All that is exchanged inside modules of Megatron's and of torch's, each for as long as a block runs.

Beside it is `cpu.py`, whose exchanges are for a machine without CUDA and last as long as the process. A subclass or a
spec that names a class of ours exchanges nothing: those are in `layers/` and `specs.py`. All names are those of
Megatron-Core 0.19.2 and torch 2.11; a name that is no longer there is a `KeyError` when the block begins.

What a block exchanges is seen by every thread of the process. Imports no Megatron before it is used.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import IO, Any


@contextlib.contextmanager
def exchanged(module: ModuleType, **values: Any) -> Iterator[None]:
    """Other values for names of a module while the block runs, and the ones from before after it.

    Raises:
        KeyError: the module has no such name.
    """
    had = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(had)


@contextlib.contextmanager
def gated_delta_net_without_fla() -> Iterator[None]:
    """Megatron's Gated DeltaNet can be built where flash-linear-attention is not installed.

    What: `HAVE_FLA` of `ssm.gated_delta_net.common`.
    Why: the constructor raises `ImportError` without fla, whose kernels our forward does not call.
    Until: Megatron looks for its kernels in `forward`.
    """
    from megatron.core.ssm.gated_delta_net import common

    with exchanged(common, HAVE_FLA=True):
        yield


@contextlib.contextmanager
def mamba_mixer_without_its_kernels() -> Iterator[None]:
    """Megatron's Mamba mixer can be built where mamba_ssm, causal_conv1d and einops are not installed.

    What: `HAVE_MAMBA_SSM`, `MAMBA_HAS_STATE_DTYPE`, `HAVE_EINOPS` and `ExtendedRMSNorm` of `ssm.mamba_mixer`, and
    `HAVE_EINOPS` of `ssm.mamba_context_parallel`.
    Why: the constructors raise `ImportError` without them, and our forward calls none of them. The norm is a mock
    without mamba_ssm and runs on CUDA alone with it; the constructor finds it by its name in the module, so that no
    spec can name another.
    Until: Megatron looks for its kernels in `forward`, and `MambaMixerSubmodules` has the norm.
    """
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    from megatron_cp.megatron.layers.norms import GatedRMSNorm

    with (
        exchanged(mamba_mixer, HAVE_MAMBA_SSM=True, MAMBA_HAS_STATE_DTYPE=True, HAVE_EINOPS=True),
        exchanged(mamba_mixer, ExtendedRMSNorm=GatedRMSNorm),
        exchanged(mamba_context_parallel, HAVE_EINOPS=True),
    ):
        yield


@contextlib.contextmanager
def checkpoint_results_in_this_process() -> Iterator[None]:
    """A checkpoint that is saved at once is written by threads of this process, and starts no other.

    What: `_results_queue` of `dist_checkpointing.strategies.filesystem_async`, where Megatron keeps the queue that its
    writers answer in.
    Why: Megatron's own queue is a process more for each rank, which takes seconds to start and outlives a rank that is
    killed. What is saved at once needs none.
    Until: Megatron makes a queue of processes for asynchronous saving alone.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with exchanged(filesystem_async, _results_queue=queue.SimpleQueue()):
        yield


_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's own switch, also for calls that say otherwise


@contextlib.contextmanager
def gradients_reduced_one_by_one() -> Iterator[None]:
    """Ranks that share a CUDA device, over gloo, can reduce their gradients.

    What: `_coalescing_manager` of `distributed.param_and_grad_buffer`.
    Why: gloo reduces CUDA tensors, but has no coalesced reduction of them, which Megatron asks for even of one buffer.
    Groups of another backend, and reductions that overlap the backward pass, are left as they are.
    Until: torch's gloo has `allreduce_coalesced` for CUDA tensors.
    """
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer

    coalescing = param_and_grad_buffer._coalescing_manager

    def each_by_itself(group: Any, *args: Any, async_ops: bool = False, **more: Any) -> Any:
        if async_ops or "cuda:gloo" not in dist.get_backend_config(group):
            return coalescing(group, *args, async_ops=async_ops, **more)
        return contextlib.nullcontext()

    with exchanged(param_and_grad_buffer, _coalescing_manager=each_by_itself):
        yield


@contextlib.contextmanager
def checkpoints_unpickled_by(load: Callable[[IO[bytes]], Any]) -> Iterator[None]:
    """torch reads the metadata of a checkpoint by `load`, and everything else of it with `weights_only=True`.

    What: `pickle` of `torch.distributed.checkpoint.filesystem`, through which Megatron loads, and the environment
    variable that torch looks at in every `torch.load`.
    Why: `FileSystemReader.read_metadata` calls `pickle.load`, and torch's planner calls `torch.load` with
    `weights_only=False`. Neither takes another loader, and both are called anew for every file.
    Until: torch opens both with `weights_only=True`, or lets its caller say so.
    """
    from torch.distributed.checkpoint import filesystem

    switch = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        with exchanged(filesystem, pickle=SimpleNamespace(load=load, dump=pickle.dump)):
            yield
    finally:
        if switch is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = switch


@contextlib.contextmanager
def silent_destructors() -> Iterator[None]:
    """Python prints nothing about objects whose destructor fails.

    What: `sys.unraisablehook`.
    Why: `datasets.indexed_dataset` has destructors that fail where the constructor did, on a damaged file, and Python
    would print a traceback of each before our one line about the file.
    Until: Megatron's `IndexedDataset` can be dropped half made.
    """
    with exchanged(sys, unraisablehook=lambda _: None):
        yield
