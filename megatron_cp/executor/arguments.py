"""Checks that operations make on their tensors before anything is sent, so that all ranks fail or none."""

from __future__ import annotations

from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.plan import Plan


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *, like: Tensor, same_dtype: bool = False) -> None:
    """Refuses a tensor that is not floating-point, not of `shape`, or not on the device (and of the type) of `like`.

    Raises:
        ArgumentError: naming the argument, with what it is and what it must be.
    """
    fits = (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.is_floating_point()
        and tensor.device == like.device
        and (tensor.dtype == like.dtype or not same_dtype)
    )
    if fits:
        return
    dtype = f"{like.dtype}" if same_dtype and like.is_floating_point() else "floating-point"
    given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else tensor
    raise ArgumentError(name, given, f"{dtype} {list(shape)} on {like.device}")


def check_plan(plan: Plan, kind: str, maker: str) -> None:
    """Refuses what is not a plan of `kind`, which `maker` makes."""
    if not isinstance(plan, Plan) or plan.kind != kind:
        given = f"a plan for {plan.kind}" if isinstance(plan, Plan) else plan
        raise ArgumentError("plan", given, f"a plan made by {maker}")
