"""The degrees of two-level schemes: how many neighbouring ranks exchange heads."""

from __future__ import annotations

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Layout
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.planner.choose import VERY_MANY
from megatron_cp.planner.predict.hardware import Topology


def degrees_to_try(scheme: Scheme, layout: Layout, asked: int | None, topology: Topology) -> list[int | None]:
    """Returns the degrees among which "auto" chooses; with very many fragments or tiles, the ranks of a host only."""
    if asked is not None or not scheme.is_product:
        return [asked]
    is_many = layout.starts.size > VERY_MANY or scheme.assigns_tiles
    degrees: list[int | None] = [degree for degree in range(2, layout.cp_size) if layout.cp_size % degree == 0]
    if not is_many:
        return degrees
    host = topology.hosts.count(topology.hosts[0])
    return [degree for degree in degrees if degree == host] or degrees[:1]


def checked_degree(scheme: Scheme, cp_size: int, kv_heads: int, ulysses_degree: int | None) -> int:
    """Returns the degree of a scheme: the number of neighbouring ranks that exchange heads.

    Raises:
        ArgumentError: the scheme has another degree, or the number of ranks no such divisor.
    """
    products = [other.name for other in SCHEMES.values() if other.is_product]
    if not scheme.is_product:
        degree = cp_size if scheme.exchanges_heads else 1
        if ulysses_degree is not None:
            ulysses_degree = checked_integer("ulysses_degree", ulysses_degree, 1)
        if ulysses_degree is not None and ulysses_degree != degree:
            allowed = f"{degree} or None for {scheme.name}"
            raise ArgumentError("ulysses_degree", ulysses_degree, allowed, f"Use {' or '.join(products)}.")
        return degree
    divisors = [degree for degree in range(2, cp_size) if cp_size % degree == 0]
    if not divisors:
        remedy = f"{cp_size} has no other divisor; use a2a, {scheme.kv_schedule} or another number of ranks."
        raise ArgumentError("scheme", scheme.name, "a number of ranks that is a product, such as 4 = 2 * 2", remedy)
    if ulysses_degree is None:
        # The largest degree that shares key/value heads evenly; else the largest that leaves no rank without one.
        even, some = (
            [d for d in divisors if fits(d)] for fits in (lambda d: kv_heads % d == 0, lambda d: d <= kv_heads)
        )
        return max(even or some or divisors[:1])
    if checked_integer("ulysses_degree", ulysses_degree, 1) not in divisors:
        raise ArgumentError("ulysses_degree", ulysses_degree, " or ".join(map(str, divisors)), f"For {scheme.name}.")
    return ulysses_degree
