"""Plans attention of documents that begin with rows that every rank holds."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.mask import MaskLike, mask_over
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import checked_packing
from megatron_cp.layout.tiles import bands_of_held_keys, bands_of_queries
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.transport import COLLECTIVE, Transport
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.capabilities import hints_keywords

_HELD, _REST = 0, 1


class HeldPlan(Memo):
    """A plan of `held_attention`. Make it with `plan_held_attention`.

    Attributes:
        plan: the plan between rows that are spread over ranks, of any scheme.
        held: for each document the number of rows that every rank holds, which come before the others.
        mask: the mask over documents of both kinds of rows.
    """

    def __init__(self, plan: Plan, held: Packing, mask: Mask, sizes: dict[str, Any]) -> None:
        self.plan, self.held, self.mask, self._sizes = plan, held, mask, sizes

    @cached_property
    def mark(self) -> str:
        """A digest of held rows and mask, by which ranks compare plans."""
        return hashlib.blake2b(self.held.value + self.mask.bands.tobytes(), digest_size=8).hexdigest()

    def bands(self, queries: int, keys: int) -> IntArray:
        """Returns the bands between two kinds of rows, 0 for held ones, 1 for others, each numbered by itself."""
        return self.memo(("bands", queries, keys), lambda: _bands(self.mask, self._both, queries, keys))

    @property
    def moves_partials(self) -> bool:
        """True if held queries see keys that are spread over ranks, so that partial results are gathered."""
        return len(self.bands(_HELD, _REST)) > 0

    def held_keys_plan(self, rank: int) -> Plan | None:
        """Returns the plan of a rank's own queries and held keys; None if they see none on any rank."""
        bands = self.bands(_REST, _HELD)
        layout = self.plan.layout
        return self._alone(("to held", rank), bands, rank, None, bands_of_queries(bands, layout, rank))

    def held_queries_plan(self, rank: int) -> Plan | None:
        """Returns the plan of held queries and a rank's own keys; None if they see none on any rank."""
        bands = self.bands(_HELD, _REST)
        return self._alone(("from held", rank), bands, None, rank, bands_of_held_keys(bands, self.plan.layout, rank))

    def held_plan(self) -> Plan:
        """Returns the plan of held queries and held keys."""
        found = self._alone(("among held",), None, None, None, self.bands(_HELD, _HELD))
        assert found is not None
        return found

    def _alone(
        self, key: tuple[Any, ...], whole: IntArray | None, queries: int | None, keys: int | None, bands: IntArray
    ) -> Plan | None:
        """Returns a plan without other ranks; rows are those of a rank, or held ones if it is None."""
        if whole is not None and not len(whole):
            return None

        def made() -> Plan:
            counts = self.plan.layout.token_counts
            query_packing, key_packing = (
                Packing([self.held.total if rank is None else int(counts[rank])]) for rank in (queries, keys)
            )
            return plan_attention(
                query_packing, Layout.contiguous(query_packing, 1), kv_packing=key_packing,
                kv_layout=Layout.contiguous(key_packing, 1),
                mask=Mask(query_packing, key_packing, bands, self.mask.name),
                **self._sizes,
            )  # fmt: skip

        return self.memo(key, made)

    @cached_property
    def partials(self) -> Layout:
        """The layout of the partial results of held queries as one stream: each rank's are a range of it."""
        rows, ranks = self.held.total, range(self.plan.cp_size)
        return Layout.from_fragments(Packing([rows] * len(ranks)), [[(r * rows, (r + 1) * rows)] for r in ranks])

    @cached_property
    def _both(self) -> Layout:
        return _kinds(self.held, self.plan.layout.packing)


@hints_keywords
def plan_held_attention(
    layout: Layout, held: Packing, *, heads: int, kv_heads: int | None = None, head_dim: int,
    value_head_dim: int | None = None, mask: MaskLike = "causal", scheme: str = "auto",
    ulysses_degree: int | None = None, head_chunks: int | None = None, transport: Transport | str = COLLECTIVE,
    codec: str = "none",
) -> HeldPlan:  # fmt: skip
    """Plans attention of documents whose first rows every rank holds; `held_attention` computes it.

    Args:
        layout: the rows that are spread over ranks; its packing has those rows of each document alone.
        held: for each document the number of its rows that every rank holds, before the others: 0 for none.
        heads, kv_heads, head_dim, value_head_dim: as in `plan_attention`.
        mask: the keys that each query sees, over documents of both kinds of rows, the held ones first: a `Mask`, a
            spelling of `Mask.named`, or a function of the packing.
        scheme, ulysses_degree, head_chunks, transport, codec: as in `plan_attention`, for the rows that are spread.

    Raises:
        ArgumentError: an argument that does not fit the others, or documents that branch.

    Example:
        >>> rest = Packing([6, 2])
        >>> plan = plan_held_attention(
        ...     Layout.zigzag(rest, 2), Packing([3, 0]), heads=2, head_dim=4, mask="full", scheme="p2p"
        ... )
        >>> plan.moves_partials, plan.mask.packing.lengths.tolist()
        (True, [9, 2])
    """
    if not isinstance(layout, Layout):
        raise ArgumentError("layout", layout, "a layout, such as Layout.zigzag(packing, cp_size)")
    rest = layout.packing
    for name, packing in (("layout", rest), ("held", checked_packing(held, "held"))):
        if packing.branches is not None:
            raise ArgumentError(name, "documents that branch", "others: a tree has no held rows")
    if len(held.lengths) != len(rest.lengths):
        raise ArgumentError("held", f"{len(held.lengths)} documents", f"{len(rest.lengths)}, as the layout has")
    packing = Packing(held.lengths + rest.lengths)
    whole = mask_over(packing, mask, packing)
    bands = _bands(whole, _kinds(held, rest), _REST, _REST)
    sizes: dict[str, Any] = {
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim,
    }  # fmt: skip
    plan = plan_attention(
        rest, layout, mask=Mask(rest, rest, bands, whole.name), scheme=scheme, ulysses_degree=ulysses_degree,
        head_chunks=head_chunks, transport=transport, codec=codec, **sizes,
    )  # fmt: skip
    return HeldPlan(plan, held, whole, sizes)


def _kinds(held: Packing, rest: Packing) -> Layout:
    """Returns documents of both kinds of rows as a layout of two ranks: one has the held rows, the other the rest."""
    ends = np.cumsum(held.lengths + rest.lengths)
    middles = ends - rest.lengths
    ranges = (middles - held.lengths, middles), (middles, ends)
    fragments = [[(a, b) for a, b in zip(*each, strict=True) if b > a] for each in ranges]
    return Layout.from_fragments(Packing(held.lengths + rest.lengths), fragments)


def _bands(mask: Mask, kinds: Layout, queries: int, keys: int) -> IntArray:
    return band.shrink(bands_of_held_keys(bands_of_queries(mask.bands, kinds, queries), kinds, keys))
