"""All that is exchanged inside modules of Megatron's and of torch's: for as long as a block runs, or for good.

For good is what models call by its name in a module whenever they run: it passes on to Megatron's what is not ours.

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


def exchange_multi_token_prediction(loss: Callable[..., Any], roll: Callable[..., Any]) -> None:
    """Multi-token prediction reads the plans of a batch, in this process from now on.

    What: `process_mtp_loss` of `models.gpt.gpt_model` and `models.hybrid.hybrid_model`, and `roll_tensor` of
    `transformer.multi_token_prediction`.
    Why: the models call the first by its name in their module. It finds what is ahead of a token in Megatron's own
    order alone, and divides by a rank's own number of labels. Megatron's own layers call the second.
    Until: the loss is a method of the multi-token prediction block.
    """
    from megatron.core.models.gpt import gpt_model
    from megatron.core.models.hybrid import hybrid_model
    from megatron.core.transformer import multi_token_prediction

    for module, name, ours in (
        (gpt_model, "process_mtp_loss", loss),
        (hybrid_model, "process_mtp_loss", loss),
        (multi_token_prediction, "roll_tensor", roll),
    ):
        vars(module)[name]  # a KeyError, should it be gone
        setattr(module, name, ours)


def exchange_mtp_block_spec(ours: Callable[[Any, Any], Any]) -> None:
    """GPTModel's builder gives multi-token prediction our layers, in this process from now on.

    What: `get_gpt_mtp_block_spec` of `models.gpt.gpt_layer_specs`. `ours` is given its configuration and its result.
    Why: `GPTModelBuilder` makes these layers anew, of Megatron's kind, whatever spec the model is built of.
    Until: it takes them from the spec, as HybridModel does.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    theirs = vars(gpt_layer_specs)["get_gpt_mtp_block_spec"]
    if hasattr(theirs, "of_megatron"):
        return

    def get_gpt_mtp_block_spec(config: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(config, theirs(config, *args, **kwargs))

    get_gpt_mtp_block_spec.of_megatron = theirs  # type: ignore[attr-defined]
    vars(gpt_layer_specs)["get_gpt_mtp_block_spec"] = get_gpt_mtp_block_spec


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
