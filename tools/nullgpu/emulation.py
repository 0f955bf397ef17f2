"""Values for the emulated device: what torch would do on CUDA its CPU kernels do, on the same memory.

The emulated runtime (`runtime.cpp`) moves bytes and runs no kernel. A dispatch mode sees every operator on a "cuda"
tensor, lets torch do what is host work there (allocation, copies, checks of arguments), and computes values through
CPU tensors that share the memory. What a GPU would refuse is refused: tensors of two devices in one operator, and a
size that depends on data while waits are forbidden.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tools.nullgpu import ordering, varlen

# torch's own implementation for CUDA has no values in it, or gets them from the runtime's copies.
NATIVE = frozenset({
    "_local_scalar_dense", "_pin_memory", "alias", "detach", "empty", "empty_like", "empty_permuted", "empty_strided",
    "is_pinned", "lift_fresh", "new_empty", "new_empty_strided", "record_stream", "resize_", "set_",
})  # fmt: skip
NATIVE_NAMESPACES = frozenset({"c10d", "prim"})
# Copies between devices wait or do not, as torch decides; a change of type or of strides is a kernel.
COPIES = frozenset({"_to_copy", "clone", "copy_"})
# Their results, or the sizes of these, are data: on CUDA the host waits for it.
OF_DATA = frozenset({
    "_unique2", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive", "unique_dim",
})  # fmt: skip
# Modes of torch that trace. They see an operator after this one, whichever was entered first.
TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
TAKE_HOST_INDICES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class Emulation(TorchDispatchMode):
    """Emulates in the thread that enters it. Backward runs on that thread too."""

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        self._one_thread = torch.autograd.set_multithreading_enabled(False)
        self._one_thread.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._one_thread.__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_traced(types):
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):  # FlexAttention: the operators that torch has it made of eagerly
            with Emulation():
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if device is None and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func._can_decompose():  # below autograd, where `to` comes as such: a view or a copy, as it turns out
            with Emulation():
                return func.decompose(*args, **kwargs)
        aliases = [argument.alias_info for argument in func._schema.arguments]
        writes = [alias is not None and alias.is_write for alias in aliases]
        is_view = any(aliases) and not any(writes)
        is_native = func.namespace in NATIVE_NAMESPACES or name in NATIVE or is_view
        if ordering.active is not None and (not is_native or name == "_local_scalar_dense"):
            ordering.check_operator(func, args, kwargs, _targets(func, writes, args, kwargs))
        if name in COPIES:
            return _copied(func, name, args, kwargs)
        if is_native:
            return func(*args, **kwargs)
        may_differ = name in TAKE_HOST_INDICES and args[0].is_cuda  # indices of the host, but not into the host's
        if not may_differ and any(not tensor.is_cuda and tensor.ndim for tensor in tensors):
            found = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
            raise RuntimeError(f"{func}: expected all tensors on one device, found {found}")
        if name in OF_DATA or (name in TAKE_HOST_INDICES and (_has_mask(args[1]) or _is_of_host(args[1]))):
            _wait(next(tensor for tensor in tensors if tensor.is_cuda))
        if func.namespace == "torch_attn":
            return varlen.run(name, func, args, kwargs)
        if asked is not None:
            kwargs = kwargs | {"device": "cpu"}
        own_args, own_kwargs = tree_map(of_host, (args, kwargs))
        result = _on_cpu(func)(*own_args, **own_kwargs)
        if any(writes):
            return _written(func, writes, args, kwargs)
        target = device if asked is None else asked
        return result if target.type != "cuda" else tree_map(lambda leaf: _to_device(leaf, target), result)


def _on_cpu(func: Any) -> Any:
    """Returns the CPU's kernel, or, for the few operators without one, torch's decomposition."""
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"):
        return func
    return torch._decomp.decomposition_table[func]


def _is_traced(types: Any) -> bool:
    """Returns True if tensors have neither values nor memory."""
    return any(issubclass(kind, FakeTensor) for kind in types) or any(
        torch._C._get_dispatch_mode(kind) is not None for kind in TRACING
    )


def on_host(tensor: Tensor) -> Tensor:
    """Returns a CPU tensor of the same memory."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size:
        memory = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
        base = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        base = torch.empty(0, dtype=torch.uint8, device="cpu")
    found = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return found.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def of_host(leaf: Any) -> Any:
    """Maps a tensor or generator of CUDA to one of the CPU; returns any other value as it is."""
    if isinstance(leaf, Tensor):
        return on_host(leaf) if leaf.is_cuda else leaf
    if isinstance(leaf, torch.Generator) and leaf.device.type == "cuda":
        return _generator(leaf.initial_seed())
    return leaf


_generators: dict[int, torch.Generator] = {}


def _generator(seed: int) -> torch.Generator:
    """Returns a generator for the CPU in place of one for CUDA; its numbers differ."""
    if seed not in _generators:
        _generators[seed] = torch.Generator().manual_seed(seed)
    return _generators[seed]


def _to_device(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor) or leaf.is_cuda:
        return leaf
    found = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
    on_host(found).copy_(leaf)
    return found


def _copied(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)  # waits or does not, as on CUDA
    source = args[1] if name == "copy_" else args[0]
    if source.numel():
        of_host(result).copy_(of_host(source))
    return result


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_of_host(indices: Any) -> bool:
    """Returns True if an index is on the host: it is copied to the device first, which waits."""
    return any(isinstance(index, Tensor) and not index.is_cuda for index in indices)


def _wait(tensor: Tensor) -> None:
    """Waits as the host does before it knows a result's size; raises an error where waits are errors."""
    torch.ops.aten._local_scalar_dense(torch.empty((), dtype=torch.uint8, device=tensor.device))


def _written(func: Any, writes: list[bool], args: Any, kwargs: Any) -> Any:
    """Returns the arguments that an operator writes to, in the form in which the operator returns them."""
    found = tuple(_targets(func, writes, args, kwargs))
    returned = len(func._schema.returns)
    if not returned:
        return None
    if returned != len(found):
        raise NotImplementedError(f"{func} on the emulated device: it returns {returned} and writes {len(found)}")
    return found[0] if returned == 1 else found


def _targets(func: Any, writes: list[bool], args: Any, kwargs: Any) -> list[Any]:
    """Yields the arguments that an operator writes to."""
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
    ]
    return [value for value, is_written in zip(given, writes, strict=True) if is_written and value is not None]


def print_from_host() -> None:
    """Has tensors printed from the host's memory: torch leaves all modes to print, so that kernels would do nothing."""
    show = torch._tensor_str._str

    def shown(tensor: Tensor, **options: Any) -> str:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_cuda:
            return show(tensor, **options)
        return f"{show(on_host(tensor.detach()), **options)[:-1]}, device='{tensor.device}')"

    torch._tensor_str._str = shown


_entered = threading.local()


def enter() -> None:
    """Emulates in this thread for as long as it lives."""
    if not getattr(_entered, "mode", None):
        _entered.mode = Emulation()
        _entered.mode.__enter__()
