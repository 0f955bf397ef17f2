"""Layouts by name, as flags and options spell them."""

from __future__ import annotations

import numpy as np

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.capabilities import require


def layout_by_name(
    name: str, packing: Packing, cp_size: int, *, align: int = 1, seed: int = 0, mask: Mask | None = None
) -> Layout:
    """`contiguous`, `zigzag`, `balanced` for `mask` (causal if None), or `random` fragments drawn from `seed`."""
    match require("layout", name):
        case "contiguous":
            return Layout.contiguous(packing, cp_size, align=align)
        case "zigzag":
            return Layout.zigzag(packing, cp_size, align=align)
        case "balanced":
            return Layout.balanced(packing, cp_size, mask=mask, align=align)
        case _:
            return random_layout(packing, cp_size, align=align, seed=seed)


def random_layout(packing: Packing, cp_size: int, *, align: int = 1, seed: int = 0) -> Layout:
    """Fragments of random sizes in random order on random ranks: uneven, unordered, some ranks perhaps empty."""
    random = np.random.default_rng(seed)
    cuts = random.integers(0, packing.total + 1, size=3 * cp_size)
    edges = np.unique(np.concatenate([[0], cuts, [packing.total]]))
    fragments: list[list[tuple[int, int]]] = [[] for _ in range(cp_size)]
    for piece in random.permutation(edges.size - 1).tolist():
        fragments[random.integers(cp_size)].append((int(edges[piece]), int(edges[piece + 1])))
    return Layout.from_fragments(packing, fragments, align=align)
