"""Checks that operations make on their tensors before anything is sent, so that all ranks fail or none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.plan import Plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *, like: Tensor, same_dtype: bool = False) -> None:
    """Refuses a tensor of a type not in `DTYPES`, not of `shape`, or not where (and of the type that) `like` is.

    Raises:
        ArgumentError: naming the argument, with what it is and what it must be.
    """
    fits = (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.dtype in DTYPES
        and tensor.device == like.device
        and (tensor.dtype == like.dtype or not same_dtype)
    )
    if fits:
        return
    dtype = f"{like.dtype}" if same_dtype and like.dtype in DTYPES else "float64, float32, bfloat16 or float16"
    given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else tensor
    raise ArgumentError(name, given, f"{dtype} {list(shape)} on {like.device}")


def checked_scale(name: str, scale: float | None, head_dim: int) -> float:
    """The scale as a finite float; `head_dim ** -0.5` if None."""
    if scale is None:
        return head_dim**-0.5
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ArgumentError(name, scale, "a finite number, or None for head_dim ** -0.5")
    return float(scale)


def check_plan(plan: Plan, kind: str, maker: str) -> None:
    """Refuses what is not a plan of `kind`, which `maker` makes."""
    if not isinstance(plan, Plan) or plan.kind != kind:
        given = f"a plan for {plan.kind}" if isinstance(plan, Plan) else plan
        raise ArgumentError("plan", given, f"a plan made by {maker}")
