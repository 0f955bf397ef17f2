"""Every private name of torch that the package uses, and what it does without each.

torch may rename or drop a private name in any release. So each is asked for here, when this module is imported, and
other modules import public names from here: `tests/unit_tests/test_house_torch.py` refuses private names elsewhere.
Where a name is missing, the package computes the same results by a slower public function, or an option refuses with
the reason. `lacking()` lists missing names, and `megatron-cp doctor` prints them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, reduce
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.versions import warn_if_untested

Function = TypeVar("Function", bound=Callable[..., Any])
_LACKING: set[str] = set()
_DEVICES = ("cpu", "cuda")  # those on which the package computes

warn_if_untested(torch=torch.__version__, numpy=np.__version__)  # here, since whatever computes imports this module


def lacking() -> list[str]:
    """Returns the private names that this torch does not have, of those that were asked for so far."""
    return sorted(_LACKING)


def _find(path: str, otherwise: Any) -> Any:
    """Returns what torch has at a dotted path, or `otherwise`, and then remembers the path as missing."""
    try:
        return reduce(getattr, path.split("."), torch)
    except (AttributeError, RuntimeError):  # RuntimeError: torch.ops for an operator that is not registered
        _LACKING.add(f"torch.{path}")
        return otherwise


# -- autocast, profilers, compilers ------------------------------------------------------------------------------------

# A single question, which saves host time in every operation where autocast is off.
is_any_autocast_enabled: Callable[[], bool] = _find(
    "_C._is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, _DEVICES))
)

# True under torch.profiler.profile, and under torch.autograd.profiler.emit_nvtx. Without it ranges are made always.
profiler_enabled: Callable[[], bool] = _find("autograd._profiler_enabled", lambda: True)

_eval_frame = _find("_C._dynamo.eval_frame", None)
_set_strategy = getattr(_eval_frame, "set_code_exec_strategy", None)
_skip = getattr(getattr(_eval_frame, "_FrameAction", None), "SKIP", None)
_strategy_of = getattr(_eval_frame, "_FrameExecStrategy", None)
if _eval_frame is not None and None in (_set_strategy, _skip, _strategy_of):
    _LACKING.add("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def skip_when_compiling(function: Function, reason: str) -> Function:
    """Marks a function that `torch.compile` calls without tracing it, nor what it calls.

    `torch.compiler.disable` does the same, but imports torch._dynamo, which adds 0.7 s and 79 MB to every process that
    only evaluates or checks. The marks here are the ones that it sets: a compiler that traces a call reads the
    attributes, and the interpreter applies the strategy to the call and to all frames under it. Where this torch has no
    such strategy, `torch.compiler.disable` is called.
    """
    if _set_strategy is None or _strategy_of is None or _skip is None:
        disabled: Function = torch.compiler.disable(function, reason=reason)
        return disabled
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
    _set_strategy(marked.__code__, _strategy_of(_skip, _skip))  # the frame, and those that it calls
    return function


# -- CUDA --------------------------------------------------------------------------------------------------------------

is_capturing: Callable[[], bool] = _find("_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

# The handle of a device's current stream. torch's own object takes ten times as long.
raw_stream: Callable[[int], int] = _find(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

current_device: Callable[[], int] = _find("_C._cuda_getDevice", torch.cuda.current_device)


def occupy_device(cycles: int) -> None:
    """Keeps the current stream busy for a number of cycles, so that calls are queued meanwhile; benchmarks use it.

    Without torch's function it does nothing: device times then contain the host's time for the first calls.
    """
    _sleep(cycles)


_sleep: Callable[[int], None] = _find("cuda._sleep", lambda _: None)


def symmetric_backend(device: torch.device) -> str | None:
    """Returns the name of torch's backend of symmetric memory, or None without one, or without torch's functions."""
    find = _find("_C._distributed_c10d._SymmetricMemory.get_backend", None)
    return None if find is None else find(device)


def symmetric_memory(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Returns `[size]` bytes of a device and the handle by which all ranks of a group reach each other's.

    It is collective. The memory is none of torch's pool, whose blocks may come back with signals of an earlier use.
    """
    symmetric = _find("_C._distributed_c10d._SymmetricMemory", None)
    with torch.inference_mode(False):
        memory = symmetric.empty_strided_p2p((size,), (1,), torch.uint8, device)
    return memory, symmetric.rendezvous(memory, group.group_name)


# -- groups ------------------------------------------------------------------------------------------------------------


def store_of(group: dist.ProcessGroup) -> Any:
    """Returns the key-value store of a process group.

    Without torch's function it is an empty store in this process: ranks learn nothing of each other's waits, which are
    then ended by their time limits only.
    """
    find = _find("distributed.distributed_c10d._get_process_group_store", None)
    return dist.HashStore() if find is None else find(group)


def limit_waits(limit: timedelta) -> list[dist.ProcessGroup]:
    """Sets the time limit of all process groups of this process, and returns them.

    Without torch's functions it warns and returns no group: the limits given to `init_process_group` and `new_group`
    stay.
    """
    known = _find("distributed.distributed_c10d._world.pg_map", None)
    set_limit = _find("distributed.distributed_c10d._set_pg_timeout", None)
    if known is None or set_limit is None:
        text = f"torch {torch.__version__} cannot change the time limit of process groups, which stays as it was"
        warnings.warn(text, stacklevel=3)
        return []
    groups = list(known)
    for group in groups:
        set_limit(limit, group)
    return groups


def wait_limit(group: dist.ProcessGroup) -> float:
    """Returns the time limit in seconds of a group's waits on host tensors, or 600 where torch does not tell it."""
    try:
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        _LACKING.add("torch.distributed.ProcessGroup._get_backend")
        return 600.0
    return limit.total_seconds()


# -- operators ---------------------------------------------------------------------------------------------------------

# The operators behind `scaled_dot_product_attention` on a CPU: only they return the log-sum-exp and take one. The
# kernel "cpu" refuses without them, and "auto" then takes "reference".
cpu_flash: Any = _find("ops.aten._scaled_dot_product_flash_attention_for_cpu", None)
cpu_flash_backward: Any = _find("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", None)

# The arguments that kernel "varlen" gives to the operators, by position.
_VARLEN = (
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size",
)  # fmt: skip
_VARLEN_BACKWARD = (
    "grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal",
    "rng_state", "scale", "window_size",
)  # fmt: skip


@cache
def varlen_operators() -> tuple[Any, Any] | None:
    """Returns the operators behind `torch.nn.attention.varlen`, forward and backward.

    None where this torch has none, as 2.9, or they take other arguments, as in 2.10: kernel "varlen" then refuses.
    """
    try:
        import_module("torch.nn.attention.varlen")  # registers the operators; absent on builds without it
    except ImportError:
        _LACKING.add("torch.nn.attention.varlen")
        return None
    forward = _find("ops.torch_attn._varlen_attn", None)
    backward = _find("ops.torch_attn._varlen_attn_backward", None)
    if not (_takes(forward, _VARLEN) and _takes(backward, _VARLEN_BACKWARD)):
        return None
    return forward, backward


# The name that `torch.nn.attention.activate_flash_attention_impl` was given; public, but not in every torch.
current_flash_attention_impl: Callable[[], str | None] = getattr(
    torch.nn.attention, "current_flash_attention_impl", lambda: None
)


def _takes(operator: Any, names: Sequence[str]) -> bool:
    """Returns True if an operator takes arguments of these names first, and needs no others."""
    if operator is None:
        return False
    taken = operator.default._schema.arguments
    first, rest = taken[: len(names)], taken[len(names) :]
    return [each.name for each in first] == list(names) and all(each.has_default_value() for each in rest)


def multiply_each(tensors: Sequence[Tensor], factor: Any) -> None:
    """Multiplies tensors in place; without torch's function, one after another."""
    multiply = _find("_foreach_mul_", None)
    if multiply is not None:
        multiply(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def version_of(tensor: Tensor) -> Any:
    """Returns what differs after each write to a tensor; without torch's counter, it differs at every call."""
    return getattr(tensor, "_version", object())


# -- modes that see every operator -------------------------------------------------------------------------------------

# A context in which modes that count or poison see nothing. Without it they see the package's own transfers too.
no_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _find(
    "utils._python_dispatch._disable_current_modes", contextlib.nullcontext
)


class _NoMode:
    """Stands for `TorchDispatchMode` where torch has none: counting, measuring memory and poisoning are refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"torch {torch.__version__} has no TorchDispatchMode, by which operators are counted")


DispatchMode: Any = _find("utils._python_dispatch.TorchDispatchMode", _NoMode)


def leaves(values: Any) -> list[Any]:
    """Returns what nested tuples, lists and dictionaries hold, in order; torch's own function for it is private."""
    if not isinstance(values, dict | tuple | list):
        return [values]
    return [leaf for value in (values.values() if isinstance(values, dict) else values) for leaf in leaves(value)]


# Tells FSDP2 which tensors an object holds. Without it FSDP2 does not see them, and its outermost weights must stay.
register_node: Callable[..., None] = _find("utils._pytree.register_pytree_node", lambda *_: None)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operators are dispatched as under autograd's own; without it, one with no effect."""
    return _find("_C._AutoDispatchBelowAutograd", contextlib.nullcontext)()


def operators(namespace: str) -> list[tuple[Any, Any]]:
    """Returns a namespace's operators, each with its schema's arguments; without torch's list, none.

    A mode sees any of them: those with an implicit composite kernel where no argument is a tensor that autograd knows.
    """
    found = []
    for name in _find("_C._dispatch_get_all_op_names", list)():
        own, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if own == namespace:
            operator = getattr(getattr(getattr(torch.ops, own), packet), overload or "default")
            found.append((operator, operator._schema.arguments))
    return found
