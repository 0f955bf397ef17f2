"""All patches of Megatron's and torch's modules, which last as long as a `with` block, or as long as the process.

Patches last as long as the process where models look up a function by its name in a module whenever they run; the new
function calls Megatron's for batches that are not ours.

`cpu.py` has the patches for a machine without CUDA, which last as long as the process. Subclasses and specs that name
our classes patch nothing; they are in `layers/` and `specs.py`. All names are in the releases of Megatron-Core that
`compat.py` names, and in torch 2.11; a name that does not exist is a `KeyError` when the block begins.

A patch affects all threads of the process. This module imports Megatron only when it is used.
"""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def exchanged(module: ModuleType, **values: Any) -> Iterator[None]:
    """Sets names of a module to other values inside the block, and restores them after it.

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
    """Lets Megatron's Gated DeltaNet be built without flash-linear-attention.

    What: `HAVE_FLA` of `ssm.gated_delta_net.common`, and `chunk_gated_delta_rule` of `ssm.gated_delta_net.gdn`, where
    Megatron's own rule in torch takes its place.
    Why: the constructor raises `ImportError` without fla, whose kernels our forward does not call, and refuses a layer
    without a rule.
    Since Megatron-Core 0.20 likewise `chunk_gdn2` of `ssm.gated_delta_net.gdn2`.
    Until: Megatron looks for its kernels in `forward`.
    """
    from megatron.core.ssm import gated_delta_net
    from megatron.core.ssm.gated_delta_net import common, gdn

    rule = gdn.chunk_gated_delta_rule or gdn.torch_chunk_gated_delta_rule
    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged(common, HAVE_FLA=True))
        stack.enter_context(exchanged(gdn, chunk_gated_delta_rule=rule))
        if second := getattr(gated_delta_net, "gdn2", None):
            stack.enter_context(exchanged(second, chunk_gdn2=second.chunk_gdn2 or second.torch_chunk_gdn2))
        yield


@contextlib.contextmanager
def gated_delta_net_2_is(ours: Any) -> Iterator[None]:
    """Lets HybridModel's stack build our Gated DeltaNet-2, if Megatron has one.

    What: `GatedDeltaNet2` of `ssm.gated_delta_net`.
    Why: with `experimental_attention_variant="gdn2"` the stack takes Megatron's class in place of the spec's.
    Until: the stack leaves a spec with another class than its own alone.
    """
    from megatron.core.ssm import gated_delta_net

    with exchanged(gated_delta_net, GatedDeltaNet2=ours) if ours is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def gated_delta_product_without_its_kernels() -> Iterator[None]:
    """Lets Megatron's Gated DeltaProduct mixer be built without mamba_ssm, flash-linear-attention and einops.

    What: `HAVE_MAMBA_SSM`, `HAVE_FLA`, `ExtendedRMSNorm`, `chunk_gated_delta_product` and
    `check_fla_sequence_packing_support` of `ssm.gated_delta_product`, and `HAVE_EINOPS` of `ssm.gdp_context_parallel`.
    Why: as for Mamba's mixer.
    Until: Megatron looks for its kernels in `forward`, and the submodules have the norm.
    """
    from megatron.core.ssm import gated_delta_product, gdp_context_parallel

    from megatron_cp.megatron.layers.norms import GatedRMSNorm

    kernel = getattr(gated_delta_product, "chunk_gated_delta_product", None) or _no_kernel
    vars(gated_delta_product).setdefault("chunk_gated_delta_product", kernel)
    with (
        exchanged(gated_delta_product, HAVE_MAMBA_SSM=True, HAVE_FLA=True, ExtendedRMSNorm=GatedRMSNorm),
        exchanged(gated_delta_product, check_fla_sequence_packing_support=lambda: (True, "")),
        exchanged(gdp_context_parallel, HAVE_EINOPS=True),
    ):
        yield


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    """Stands for a kernel that our forward does not call."""
    raise NotImplementedError


@contextlib.contextmanager
def mamba_mixer_without_its_kernels() -> Iterator[None]:
    """Lets Megatron's Mamba mixer be built without mamba_ssm, causal_conv1d and einops.

    What: `HAVE_MAMBA_SSM`, `MAMBA_HAS_STATE_DTYPE`, `HAVE_EINOPS` and `ExtendedRMSNorm` of `ssm.mamba_mixer`, and
    `HAVE_EINOPS` of `ssm.mamba_context_parallel`.
    Why: the constructors raise `ImportError` without them, and our forward calls none of them. The norm is a mock
    without mamba_ssm and runs on CUDA only with it; the constructor looks it up by its name in the module, so that no
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
    """Makes multi-token prediction read the plans of a batch, for the rest of the process.

    What: `process_mtp_loss` of `models.gpt.gpt_model` and `models.hybrid.hybrid_model`, and `roll_tensor` of
    `transformer.multi_token_prediction`.
    Why: the models call the first by its name in their module. It finds the tokens ahead of a token in Megatron's own
    order only, and divides by a rank's own number of labels. Megatron's own layers call the second.
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
        vars(module)[name]  # raises a KeyError if the name no longer exists
        setattr(module, name, ours)


def exchange_search_for_inference_layers() -> None:
    """Lets multi-token prediction be built without Transformer Engine, for the rest of the process.

    What: `is_inference_column_parallel_linear` of `transformer.multi_token_prediction`, which main has.
    Why: it asks whether a layer is of classes that are no classes without Transformer Engine, a `TypeError`.
    Until: it asks only where Transformer Engine is installed.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_token_prediction

    name = "is_inference_column_parallel_linear"
    if not HAVE_TE and hasattr(multi_token_prediction, name):
        setattr(multi_token_prediction, name, lambda _: False)


def exchange_mtp_block_spec(ours: Callable[[Any, Any], Any]) -> None:
    """Makes GPTModel's builder use our layers for multi-token prediction, for the rest of the process.

    What: `get_gpt_mtp_block_spec` of `models.gpt.gpt_layer_specs`. `ours` is given its configuration and its result.
    Why: `GPTModelBuilder` builds these layers from Megatron's own spec, for any spec of the model.
    Until: it takes them from the spec, as HybridModel does.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    theirs = vars(gpt_layer_specs)["get_gpt_mtp_block_spec"]
    if hasattr(theirs, "original"):
        return

    def get_gpt_mtp_block_spec(config: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(config, theirs(config, *args, **kwargs))

    get_gpt_mtp_block_spec.original = theirs  # type: ignore[attr-defined]
    vars(gpt_layer_specs)["get_gpt_mtp_block_spec"] = get_gpt_mtp_block_spec


@contextlib.contextmanager
def checkpoint_results_in_this_process() -> Iterator[None]:
    """Makes threads of this process write a checkpoint that is saved synchronously, without starting a process.

    What: `_results_queue` of `dist_checkpointing.strategies.filesystem_async`, the queue of its writers' results.
    Why: Megatron's own queue is one more process for each rank, which takes seconds to start and outlives a rank that
    is killed. Synchronous saving does not need it.
    Until: Megatron makes a queue of processes for asynchronous saving only.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with exchanged(filesystem_async, _results_queue=queue.SimpleQueue()):
        yield


@contextlib.contextmanager
def gradients_reduced_one_by_one() -> Iterator[None]:
    """Lets ranks that share a CUDA device, over gloo, reduce their gradients.

    What: `_coalescing_manager` of `distributed.param_and_grad_buffer`.
    Why: gloo reduces CUDA tensors, but has no coalesced reduction, which Megatron uses even for one buffer. Groups of
    another backend, and reductions that overlap the backward pass, are not changed.
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
def silent_destructors() -> Iterator[None]:
    """Suppresses the tracebacks that Python prints when a destructor fails.

    What: `sys.unraisablehook`.
    Why: `datasets.indexed_dataset` has destructors that fail if the constructor did, on a damaged file, and Python
    would print a traceback of each before our one line about the file.
    Until: Megatron's `IndexedDataset` can be deleted after its constructor failed.
    """
    with exchanged(sys, unraisablehook=lambda _: None):
        yield
