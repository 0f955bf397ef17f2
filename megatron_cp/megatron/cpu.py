"""Patches of Megatron-Core for a machine without CUDA, which are applied by `run_megatron_on_cpu` only.

Megatron names CUDA in some 200 lines: devices of small buffers, random states, streams, events. Inside Megatron's
modules `torch` is replaced by a substitute whose `cuda` is the CPU; torch itself is not changed.

These patches last as long as the process; those of `patches.py`, which CUDA needs too, as long as a block. They
can be removed when Megatron reads its device from its configuration.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch import Tensor

from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron.patches import exchange_search_for_inference_layers
from megatron_cp.torch_private import multiply_each


def run_megatron_on_cpu(*, pretrain: bool = False) -> None:
    """Makes the Megatron-Core of this process run without CUDA: model, optimizer, data parallelism, checkpoints.

    It is meant for local runs and tests. Call it before Megatron is used; its modules may be imported before or after.
    A second call changes nothing. It also turns off torch.compile in this process, which Megatron uses for small
    fusions and which needs a compiler on the CPU.

    Args:
        pretrain: True to patch Megatron's own training loop too (`megatron.training.pretrain`), which requires a
            device.
    """
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    torch.compiler.set_stance("force_eager")
    _exchange_torch("megatron.core", _torch_without_cuda())
    if pretrain:
        import_module("megatron.training")
        _exchange_torch("megatron.training", _torch_with_a_device())
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # It warns if the CPU's random state changes in a fork of CUDA's, which are the same here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    for embedding in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        embedding.get_pos_emb_on_this_cp_rank = _local_phases
    token_dispatcher.maybe_move_tensor_to_cpu = _keep_on_host
    exchange_search_for_inference_layers()
    for module in (clip_grads, optimizer):  # the second one imports the function by name
        module.clip_grad_by_total_norm_fp32 = _clip_gradients
        # As Megatron does without Transformer Engine and Apex, whose functions and optimizers run on CUDA only.
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_tensor_impl = utils.local_multi_tensor_l2_norm, None
    optimizers.Adam, optimizers.SGD, optimizers.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, torch.optim.SGD, True


def _exchange_torch(package: str, substitute: types.ModuleType) -> None:
    """Replaces `torch` in the modules of a package, and in those that are imported later."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            _exchange_in(module, substitute)
    if not any(isinstance(finder, _Later) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.insert(0, _Later(package, substitute))


def _exchange_in(module: types.ModuleType, substitute: types.ModuleType) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = substitute  # type: ignore[attr-defined]


class _Later(MetaPathFinder):
    """The finder of a package's modules, which replaces `torch` in each after it was imported."""

    def __init__(self, package: str, substitute: types.ModuleType) -> None:
        self.package, self.substitute = package, substitute

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(f"{self.package}.") else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                _exchange_in(module, self.substitute)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _torch_without_cuda() -> types.ModuleType:
    substitute = types.ModuleType("torch")
    substitute.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"):
        setattr(substitute, name, _force_cpu(getattr(torch, name)))
    cuda: Any = types.ModuleType("torch.cuda")
    cuda.__getattr__ = lambda name: getattr(torch.cuda, name)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoOp()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    substitute.cuda = cuda  # type: ignore[attr-defined]
    return substitute


def _torch_with_a_device() -> types.ModuleType:
    """Returns a substitute that reports a Hopper device, for code that does not start without a device."""
    substitute = _torch_without_cuda()
    cuda: Any = substitute.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(major=9, minor=0, total_memory=0)
    return substitute


def _force_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    return made


class _NoOp:
    """A substitute for streams and events. Every method does nothing and returns another `_NoOp`."""

    def __getattr__(self, name: str) -> Callable[..., _NoOp]:
        return lambda *args, **kwargs: _NoOp()


def _local_phases(phases: Tensor, axis: int, group: Any) -> Tensor:
    """Returns this rank's zigzag share of a sequence's rotary angles without Megatron's copy through pinned memory."""
    layout = Layout.zigzag(Packing([phases.shape[axis]]), group.size())
    return phases.index_select(axis, torch.tensor(layout.tokens(group.rank())))


def _keep_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns a tensor for Megatron's dispatcher of experts, sizes of messages as numpy, as Megatron's does on CUDA."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _clip_gradients(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Scales gradients to a norm of at most `max_norm`, which Megatron's function does for CUDA tensors only."""
    coefficient = max_norm / (total_norm + 1e-6)
    if coefficient < 1:
        name = "decoupled_grad" if use_decoupled_grad else "grad"
        gradients = [getattr(parameter, name, None) for parameter in parameters]
        multiply_each([gradient for gradient in gradients if gradient is not None], coefficient)
