"""`plan_together`: a plan for each kind of a model's layers, such that one set of Megatron's flags asks for all.

No torch in here. Megatron has a value of `--cp-comm-type` for each layer, and one of
`--hierarchical-context-parallel-sizes` and of `--cp-head-chunks` for all.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout
from megatron_cp.plan import SCHEMES, Plan
from megatron_cp.planner import AttentionSpec, LinearSpec, Machine, Slot, Topology, priced


class Together(NamedTuple):
    """Plans that one set of flags asks for.

    Attributes:
        plans: of each kind of layer, in the order of their slots, with how often it occurs.
        head_chunks: of `--cp-head-chunks`; None to leave it out.
    """

    plans: tuple[tuple[Plan, int], ...]
    head_chunks: int | None


def plan_together(slots: Counter[Slot], layout: Layout, on: Machine, topology: Topology) -> Together:
    """Each kind of layer by its cheapest way; where no flags ask for all of those, by the degree and chunks of one.

    Args:
        slots: the kinds of layers, with how often each occurs.
        layout: of all.
        on: the machine.
        topology: where the ranks are.

    Raises:
        ArgumentError: a layer that cannot be planned.
    """
    asked = next((slot.head_chunks for slot in slots if isinstance(slot, AttentionSpec)), None)
    slots = Counter({_placed(slot, on, topology): count for slot, count in slots.items()})
    best = {slot: slot.plan(layout) for slot in slots}
    attention = [plan for plan in best.values() if plan.attend is not None]
    degrees = sorted({plan.ulysses_degree for plan in attention if SCHEMES[plan.scheme].is_product})
    chunks = sorted({chunks_of(plan) for plan in attention if SCHEMES[plan.scheme].takes_chunks})
    found, refused = list[tuple[float, Together]](), None
    parts_of_all: Sequence[int | None] = [None, *chunks] if asked is None else [asked]
    degree_of_all: Sequence[int | None] = degrees or [None]
    for degree, parts in itertools.product(degree_of_all, parts_of_all):
        try:
            plans = {slot: _like(slot, plan, layout, degree, parts) for slot, plan in best.items()}
        except ArgumentError as error:  # of a kind with too few heads for so many chunks
            refused = error
            continue
        if all(_is_alike(plans[slot], best[slot]) for slot in slots):
            return Together(_counted(best, slots), parts)
        total = sum(count * priced(plans[slot], on, topology).total for slot, count in slots.items())
        found.append((total, Together(_counted(plans, slots), parts)))
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda pair: pair[0])[1]


def chunks_of(plan: Plan) -> int:
    """Head chunks of a plan: of heads that change places, or of keys that are gathered."""
    return max(plan.head_chunks, plan.attend.head_chunks if plan.attend else 1)


def _counted(plans: dict[Slot, Plan], slots: Counter[Slot]) -> tuple[tuple[Plan, int], ...]:
    return tuple((plan, slots[slot]) for slot, plan in plans.items())


def _placed(slot: Slot, on: Machine, topology: Topology) -> Slot:
    """The slot on that machine; of a run of linear layers all of them."""
    if isinstance(slot, AttentionSpec):
        return replace(slot, hardware=on, topology=topology)
    run = tuple(replace(each, hardware=on, topology=topology) for each in slot.run)
    return replace(slot, hardware=on, topology=topology, run=run)


def _like(slot: Slot, best: Plan, layout: Layout, degree: int | None, parts: int | None) -> Plan:
    """A layer by the scheme of its best plan, as flags with this degree and so many head chunks have it."""
    if isinstance(slot, LinearSpec):
        if parts == slot.head_chunks:
            return best
        return replace(slot, head_chunks=parts, run=tuple(replace(each, head_chunks=parts) for each in slot.run)).plan(
            layout
        )
    way = SCHEMES[best.scheme]
    search: dict[str, Any] = {} if way.assigns_tiles else {"search_seconds": 0.0, "search_cache": None}
    given = replace(
        slot, scheme=way.name, ulysses_degree=degree if way.is_product else None,
        head_chunks=parts if way.takes_chunks else None, **search,
    )  # fmt: skip
    return replace(given.plan(layout), prices=best.prices)


def _is_alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a layer, of one layout, run in the same way."""
    ways = [(x.scheme, x.layout, x.ulysses_degree, chunks_of(x)) for x in (plan, other)]
    return ways[0] == ways[1]
