"""The forms in which a mask is given: its name, a `Mask`, or a function of the packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeGuard, Union

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.mask import Mask
from megatron_cp.layout.packing import Packing

MaskLike: TypeAlias = Union[Mask, str, Callable[[Packing], Mask]]  # noqa: UP007  # evaluated in Python 3.10
MASKS_ALLOWED = (
    "a mask over the same packing, such as Mask.causal(packing), a function of the packing that returns one, or a "
    'name, such as "window:128"'
)
_MASKS_REMEDY = "It is over another packing: a function makes one for each batch."


def mask_over(packing: Packing, mask: MaskLike, kv_packing: Packing | None = None) -> Mask:
    """Returns the mask that is given as such, by its spelling, or by a function of the packing."""
    if isinstance(mask, str):
        return Mask.named(packing, mask, kv_packing)
    made = mask(packing) if is_mask_function(mask) else mask
    if isinstance(made, Mask) and (made.packing, made.kv_packing) == (packing, kv_packing or packing):
        return made
    shown = made if made is mask else f"a function that returns {made!r}"
    raise ArgumentError("mask", shown, MASKS_ALLOWED, _MASKS_REMEDY if isinstance(made, Mask) else "")


def mask_of_queries(packing: Packing, mask: MaskLike) -> Mask:
    """Returns the mask as `mask_over` does, with keys of any documents: a layout is of a mask's queries."""
    return mask_over(packing, mask, mask.kv_packing if isinstance(mask, Mask) else None)


def is_mask_function(mask: object) -> TypeGuard[Callable[[Packing], Mask]]:
    """Returns True if a mask is given by a function; a class is none."""
    return callable(mask) and not isinstance(mask, type)


def is_named(mask: Mask) -> bool:
    """Returns True if the mask's name is a spelling, which makes the same mask over other documents."""
    try:
        Mask.named(Packing([1]), mask.name)
    except ArgumentError:
        return False
    return True
