"""Memory that context parallelism does not spread: logits, the activations of an MLP, and tensors saved for backward.

Each of these gives the same numbers as without it. They may be used together, and with recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.executor.arguments import DTYPES, accumulation_dtype, check_dense, check_tensor
from megatron_cp.executor.chunks import rows_in_chunks
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.torch_private import version_of

_ROWS = "cp_chunk_rows"  # an attribute of modules that run in chunks
_MIXES_ROWS = (
    nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.SyncBatchNorm, nn.LazyBatchNorm1d,
)  # fmt: skip
_RUN_MLP = "Run MLPs and mixtures of experts in chunks, not attention or whole layers."


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, chunk_rows: int = 1024,
    scale: float = 1.0, softcap: float | None = None, ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # fmt: skip
    """Returns the loss of each row, whose logits `hidden @ weight.T + bias` are made of a few rows at a time.

    It takes the place of a model's head and `cross_entropy(..., reduction="none")`, for `token_loss`. Backward computes
    the logits again: three products with the weights become four.

    Args:
        hidden: `[t, hidden]` rows before the head; differentiable.
        weight: `[vocabulary, hidden]`; differentiable. Its gradient is summed over chunks in at least float32.
        labels: `[t]` tokens that the rows predict; the loss of `ignore_index` is 0.
        bias: `[vocabulary]`, or None; differentiable.
        chunk_rows: rows whose logits are in memory at the same time, in the type of `hidden` and in at least float32.
        scale: the logits are multiplied by it, and then capped: Cohere's `logit_scale`, or 1 / a temperature.
        softcap: the logits become `softcap * tanh(logits / softcap)`, as in Gemma.
        ignore_index: the label of rows without a loss.

    Returns:
        `[t]` in at least float32.

    Raises:
        ArgumentError: tensors of other shapes, types or devices, or numbers that are none.

    Example:
        >>> hidden, weight = torch.eye(2, requires_grad=True), torch.eye(3, 2)
        >>> [round(loss, 3) for loss in linear_cross_entropy(hidden, weight, torch.tensor([0, -100])).tolist()]
        [0.551, 0.0]
    """
    chunk_rows = checked_integer("chunk_rows", chunk_rows, 1)
    _check_head(hidden, weight, labels, bias)
    if not abs(as_number(scale)) < float("inf"):
        raise ArgumentError("scale", scale, "a number")
    if softcap is not None and not 0 < as_number(softcap) < float("inf"):
        raise ArgumentError("softcap", softcap, "a positive number, or None")
    ignore_index = checked_integer("ignore_index", ignore_index, -(2**31), 2**31)

    def losses_of(rows: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(rows, weight, bias)
        logits = logits.to(accumulation_dtype(logits.dtype)) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return functional.cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)

    parameters = [weight] if bias is None else [weight, bias]
    return rows_in_chunks(losses_of, hidden, labels, parameters=parameters, chunk_rows=chunk_rows)


def _check_head(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    for name, each, axes in (("hidden", hidden, "[t, hidden]"), ("weight", weight, "[vocabulary, hidden]")):
        check_dense(name, each)
        if each.ndim != 2 or each.dtype not in DTYPES:
            remedy = "The rows of a batch [1, t, hidden] are hidden[0]."
            raise ArgumentError(name, f"{each.dtype} {list(each.shape)}", f"{axes} of a floating type", remedy)
    same_dtype = not torch.is_autocast_enabled(hidden.device.type)
    check_tensor("weight", weight, (len(weight), hidden.shape[1]), like=hidden, same_dtype=same_dtype)
    if bias is not None:
        check_tensor("bias", bias, (len(weight),), like=hidden, same_dtype=same_dtype)
    check_dense("labels", labels)
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64 or labels.device != hidden.device:
        given = f"{labels.dtype} {list(labels.shape)} on {labels.device}"
        raise ArgumentError("labels", given, f"int64 [{len(hidden)}] on {hidden.device}, one label for each row")


def run_in_chunks(module: nn.Module, chunk_rows: int) -> nn.Module:
    """Makes a module run on so many rows at a time, such as an MLP or a mixture of experts. Returns the module.

    What it saves for backward is that of one chunk: backward runs each chunk again. So its forward costs twice its
    operations. Its parameters, their names and their gradients stay.

    Args:
        module: any module that computes each row from that row, and is called with rows `[t, hidden]`,
            `[1, t, hidden]` or `[t, 1, hidden]` and returns a tensor with as many, or a tuple of such. Beside the rows
            it may get None, numbers and strings. Torch's attention, recurrences, convolutions and batch norms are
            refused; any other module that mixes rows computes something else without an error.
        chunk_rows: the rows of a chunk.

    Raises:
        ArgumentError: here, a module that has a forward of its own already, or one with torch's attention, recurrence,
            convolution or batch norm. When it is called, another shape or result, tensors or caches beside the rows,
            parts that FSDP shards by themselves, or weights that DeepSpeed's ZeRO-3 shards.
    """
    chunk_rows = checked_integer("chunk_rows", chunk_rows, 1)
    if not isinstance(module, nn.Module):
        raise ArgumentError("module", type(module).__name__, "a torch.nn.Module")
    if "forward" in vars(module):
        raise ArgumentError("module", "a module with a forward of its own", "one with the forward of its class")
    mixing = next((each for each in module.modules() if isinstance(each, _MIXES_ROWS)), None)
    if mixing is not None:
        raise ArgumentError("module", f"one with a {type(mixing).__name__}", "one that keeps rows apart", _RUN_MLP)
    setattr(module, _ROWS, chunk_rows)
    vars(module)["forward"] = partial(_forward_in_chunks, module)
    return module


def _forward_in_chunks(module: Any, *given_args: Any, **named: Any) -> Any:
    stock = type(module).forward
    rows, *args = given_args or (None,)
    if not isinstance(rows, Tensor) or rows.ndim not in (2, 3) or (rows.ndim == 3 and 1 not in rows.shape[:2]):
        given = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        allowed = "[t, hidden], [1, t, hidden] or [t, 1, hidden], the first positional argument of a module in chunks"
        raise ArgumentError("rows", given, allowed, _RUN_MLP)
    # A tensor beside the rows would get no gradient, and backward would add to a cache once more.
    for each in (*args, *named.values()):
        if not isinstance(each, bool | int | float | str | None):
            given = f"a {type(module).__name__} that is called with a {type(each).__name__} beside its rows"
            raise ArgumentError("module", given, "one that needs only rows, numbers and strings", _RUN_MLP)
    is_split = any(isinstance(each, FSDPModule) for each in module.modules() if each is not module)
    if is_split or any(hasattr(each, "ds_status") for each in module.parameters()):
        remedy = "Let FSDP shard the whole module; with ZeRO-3, recompute whole layers instead."
        raise ArgumentError("module", "one whose parts gather their own weights", "weights in one place", remedy)
    axis = None if rows.ndim == 2 else 0 if rows.shape[0] == 1 else 1
    shapes: list[bool] = []  # of the first chunk's results: True if the axis of one is beside that of rows

    # It lives until backward, so it must not keep `rows`.
    def of_chunk(chunk: Tensor) -> Any:
        found = stock(module, chunk if axis is None else chunk.unsqueeze(axis), *args, **named)
        parts: list[Tensor] = []
        for number, each in enumerate(found if isinstance(found, tuple) else (found,)):
            shape = list(each.shape) if isinstance(each, Tensor) else []
            is_like = axis is not None and shape[:2] == [1, len(chunk)][:: 1 - 2 * axis]
            if number == len(shapes):
                shapes.append(is_like)
            if not is_like and shape[:1] != [len(chunk)]:
                given = shape if isinstance(each, Tensor) else type(each).__name__
                allowed = "one that returns a result for each row, or several"
                raise ArgumentError("module", f"one that returns {given}", allowed)
            # Results [1, 1] of a last chunk of one row may be either: the first chunk's tell.
            parts.append(each.squeeze(axis) if is_like and shapes[number] else each)
        return tuple(parts) if isinstance(found, tuple) else parts[0]

    flat = rows if axis is None else rows.squeeze(axis)
    found = rows_in_chunks(of_chunk, flat, parameters=list(module.parameters()), chunk_rows=getattr(module, _ROWS))
    several = found if isinstance(found, tuple) else (found,)
    whole = tuple(each.unsqueeze(axis) if is_like else each for each, is_like in zip(several, shapes, strict=True))
    return whole if isinstance(found, tuple) else whole[0]


def saved_on_host(min_bytes: int = 2**20) -> contextlib.AbstractContextManager[None]:
    """Keeps what autograd saves within the context in pinned host memory, until backward needs it.

    Used around a forward with recomputation of each layer, it holds the layers' inputs: one tensor of a layer. Weights
    are not moved, nor are tensors of fewer bytes. Tensors on the host already stay as they are. Backward refuses those
    that stay if they were written to, as it does without this context.

    Args:
        min_bytes: smaller tensors stay on their device.

    Returns:
        A context manager.
    """
    min_bytes = checked_integer("min_bytes", min_bytes, 0)
    return torch.autograd.graph.saved_tensors_hooks(_pack_from(min_bytes), _unpack)


def _pack_from(min_bytes: int) -> Callable[[Tensor], Any]:
    def pack(saved: Tensor) -> Any:
        if _on_host(saved) or _is_weight(saved) or saved.numel() * saved.element_size() < min_bytes:
            return saved, version_of(saved)
        host = torch.empty(saved.shape, dtype=saved.dtype, device="cpu", pin_memory=saved.is_cuda)
        return saved.device, host.copy_(saved, non_blocking=True)

    return pack


def _on_host(saved: Tensor) -> bool:
    return saved.device.type == "cpu"


def _is_weight(saved: Tensor) -> bool:
    """Returns True for a weight, its transpose, or what autocast made of it."""
    base = saved if saved._base is None else saved._base
    node = base.grad_fn
    if node is not None and node.name() == "ToCopyBackward0":
        above = node.next_functions[0][0]
        return above is not None and above.name() == "torch::autograd::AccumulateGrad"
    return base.is_leaf and base.requires_grad


def _unpack(packed: Any) -> Tensor:
    saved: Tensor | torch.device
    saved, value = packed
    if isinstance(saved, torch.device):
        found: Tensor = value.to(saved, non_blocking=True)
        return found
    if isinstance(value, int) and version_of(saved) != value:  # autograd does not check what hooks return
        given = f"a tensor {list(saved.shape)} that was written to after it was saved"
        raise ArgumentError("saved_on_host", given, "tensors that stay as they are until backward")
    return saved
