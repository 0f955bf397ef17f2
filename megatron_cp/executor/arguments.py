"""Checks that operations make on their tensors before anything is sent, so that all ranks fail or none."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import order_tables
from megatron_cp.executor.kernels import Kernel
from megatron_cp.layout import Layout
from megatron_cp.plan.plan import Plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], *, like: Tensor, same_dtype: bool = False, remedy: str = "",
    layout: Layout | None = None,
) -> None:  # fmt: skip
    """Refuses a tensor of another shape, on another device than `like`, or of a type not in `DTYPES`.

    With `same_dtype` the type must be that of `like`. `layout` is that of its rows, if it has some.
    """
    check_dense(name, tensor)
    fits = (
        tensor.shape == shape
        and tensor.dtype in DTYPES
        and tensor.device == like.device
        and (tensor.dtype == like.dtype or not same_dtype)
    )
    if fits:
        return
    dtype = f"{like.dtype}" if same_dtype and like.dtype in DTYPES else "float64, float32, bfloat16 or float16"
    given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    if not remedy and layout is not None:
        remedy = _rows_remedy(name, tuple(tensor.shape), shape, layout)
    raise ArgumentError(name, given, f"{dtype} {list(shape)} on {like.device}", remedy)


def _rows_remedy(name: str, given: tuple[int, ...], shape: tuple[int, ...], layout: Layout) -> str:
    """Returns what to do with rows of all ranks, or with heads that are not an axis of their own; "" for others."""
    total = layout.packing.total
    remedies = []
    if layout.cp_size > 1 and (given[:1] == (total,) or given[:2] == (1, total)) and total != shape[0]:
        batch = "[0]" * (given[:2] == (1, total) and total > 1)
        remedies.append(f"These are the tokens of all ranks: pass this rank's, layout.shard({name}{batch}, rank).")
    is_flat = len(shape) > 2 and given[-1:] == (shape[-2] * shape[-1],)
    if is_flat and (given[-1] != shape[-1] or len(given) < len(shape)):
        remedies.append(f"Heads are an axis: {name}.unflatten(-1, ({shape[-2]}, {shape[-1]})).")
    return " ".join(remedies)


def check_dense(name: str, tensor: object) -> None:
    """Refuses an object that is no tensor, or a tensor that is sparse, nested or on meta."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, tensor, "a tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        how = "nested" if tensor.is_nested else f"{tensor.layout}"
        raise ArgumentError(name, f"a tensor that is {how}", "a dense tensor", "Its rows are those of the layout.")
    if tensor.device.type == "meta":
        raise ArgumentError(name, "a tensor on meta, which holds no numbers", "one on cpu or cuda")


def narrow(tensor: Tensor, dim: int, part: slice) -> Tensor:
    """Returns `tensor.narrow`, or the tensor itself if `part` is all of it: a view would take host time."""
    size = part.stop - part.start
    return tensor if size == tensor.shape[dim] else tensor.narrow(dim, part.start, size)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which numbers of a type are added up: at least fp32."""
    return dtype if dtype.itemsize > 4 else torch.float32


def check_stream(name: str, device: torch.device, plan: Plan | Layout, *kernels: Kernel) -> None:
    """Refuses captures of plans that no `GraphTables` has loaded; makes the stream wait for tables of other streams.

    A graph would move rows by the tables of the pack that it was captured with, whatever pack it is replayed for.

    Raises:
        ArgumentError: names the argument; or a kernel whose graph would not serve other packs; or a plan whose
            `GraphTables` have since been loaded with another pack's tables.
    """
    tables = plan.tables if isinstance(plan, Plan) else None
    if tables is not None:
        tables.check()
        if device != tables.memory.device:
            raise ArgumentError(
                name, f"a tensor on {device}", f"one on {tables.memory.device}, as the plan's tables are"
            )
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        if tables is None:
            here = "Leave this call out of the graph."
            if isinstance(plan, Plan):
                here = "Shard the batch with into=GraphTables(...), or leave this call out of the graph."
            raise ArgumentError(
                name, "a tensor in a stream that is being captured", "one in any other stream, or plans of GraphTables",
                f"A CUDA graph would move the rows of this pack whenever it is replayed. {here}",
            )  # fmt: skip
        for kernel in kernels:
            if not kernel.serves_graphs:
                raise ArgumentError(
                    "kernel", kernel.name, "one whose graph serves every pack",
                    "Its tables are one pack's: leave the choice to kernel='auto', or this call out of the graph.",
                )  # fmt: skip
    order_tables(device)


def rows_first(tensor: Tensor, rows: int, heads: int) -> tuple[tuple[int, ...], str]:
    """Returns the batch axis of `[t, (b,) h, d]`, if any, and a remedy if the axes are in another order."""
    shape = tuple(tensor.shape)
    if len(shape) == 4 and shape[1:3] == (rows, heads) and shape[0] != rows:
        return shape[:1], "Rows come first, [t, b, h, d]: use transpose(0, 1) of [b, t, h, d]."
    if len(shape) == 4 and shape[1:3] == (heads, rows) and shape[0] != rows:
        return shape[:1], "Rows come first, [t, b, h, d]: use permute(2, 0, 1, 3) of [b, h, t, d]."
    if len(shape) == 3 and shape[:2] == (heads, rows) and heads != rows:
        return (), "Rows come first, [t, h, d]: use transpose(0, 1) of [h, t, d]."
    return shape[1:-2][:1], ""


def check_rows(name: str, tensor: object, layout: Layout, rank: int) -> None:
    """Refuses an object that is no dense tensor with this rank's number of rows."""
    check_dense(name, tensor)
    assert isinstance(tensor, Tensor)
    rows = int(layout.row_counts[rank])
    if tensor.ndim == 0 or len(tensor) != rows:
        given = f"{len(tensor)} rows" if tensor.ndim else "no rows"
        remedy = _rows_remedy(name, tuple(tensor.shape), (rows, *tensor.shape[1:]), layout)
        raise ArgumentError(name, given, f"{rows} on rank {rank}", remedy)


def check_plan(plan: Plan, kind: str, maker: str) -> None:
    """Refuses an object that is no plan of `kind`; the error names `maker`, which makes one.

    Refuses as well a plan whose rows have to be moved first: an operation cannot see whether they were.
    """
    if not isinstance(plan, Plan) or plan.kind != kind:
        given = f"a plan for {plan.kind}" if isinstance(plan, Plan) else f"a {type(plan).__name__}"
        raise ArgumentError("plan", given, f"a plan made by {maker}", "That of a batch is batch.plan(slot).")
    if plan.redistribution is not None:
        raise ArgumentError(
            "plan", "one that redistributes hidden states", "plan.inside, for rows in plan.layout",
            "Move hidden states before the layer with relayout(hidden, plan.hidden_layout, plan.layout, group), and "
            "back after it; or plan without hidden_size, so that nothing is redistributed.",
        )  # fmt: skip
