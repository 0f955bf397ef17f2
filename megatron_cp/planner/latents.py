"""Checks of latents, and the modes among which "auto" chooses. No torch in here."""

from __future__ import annotations

from megatron_cp.errors import ArgumentError, checked_size
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import AUTO
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.predict.hardware import Machine

LARGEST_ON_DEVICES = 256  # features of a head in flash kernels


def checked_latent(latent: object, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns the features of a shared key and of a latent after checking them.

    Raises:
        ArgumentError: other than two numbers of features, or heads that share keys.
    """
    if not isinstance(latent, tuple | list) or len(latent) != 2:
        raise ArgumentError("latent", latent, "features of the shared key and of the latent, such as (64, 512)")
    shared, rank = checked_size("latent[0]", latent[0]), checked_size("latent[1]", latent[1])
    if shared >= head_dim:
        raise ArgumentError("latent", latent, f"a shared key of fewer than head_dim, {head_dim} features")
    if kv_heads != heads:
        raise ArgumentError("kv_heads", kv_heads, f"None with latent: each of {heads} heads has keys of its own")
    return shared, rank


def checked_latent_mode(latent_mode: str | None, latent: object) -> str | None:
    """Returns the spelling of a mode of latents, or None for none.

    Raises:
        ArgumentError: an unknown mode, or one without latents.
    """
    if latent_mode is None:
        return None
    if latent is None:
        raise ArgumentError("latent_mode", latent_mode, "None without latent", "Keys and values are given.")
    return require("latent_mode", latent_mode)


def latent_modes(
    asked: str | None, scheme: str, latent: tuple[int, int] | None, on: Machine, *, selects: bool = False
) -> tuple[str, ...]:
    """Returns the modes of latents to compare: the one that was asked for, or those that "auto" has.

    Raises:
        ArgumentError: keys or absorbed queries where queries select among latents.
    """
    if selects:  # among latents, which no mode changes
        if asked not in (None, AUTO, "expand"):
            raise ArgumentError("latent_mode", asked, "None with topk", "Queries select among latents as they are.")
        return ("expand",)
    if latent is None or (asked is None and scheme != AUTO):
        return ("expand",)
    if asked not in (None, AUTO):
        return (asked,)
    is_possible = on.hardware.cores or sum(latent) <= LARGEST_ON_DEVICES
    return tuple(mode for mode in LATENT_MODES if is_possible or mode != "absorb")
