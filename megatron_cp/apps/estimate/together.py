"""`plan_together`: plans each kind of a model's layers, such that one set of Megatron's flags asks for all plans.

No torch in here. Megatron has a value of `--cp-comm-type` for each layer, but one value for all layers of
`--hierarchical-context-parallel-sizes` and of `--cp-head-chunks`.
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
    """Plans for which one set of flags asks.

    Attributes:
        plans: the plan of each kind of layer, in the order of their slots, and how often it occurs.
        head_chunks: the value of `--cp-head-chunks`; None to leave it out.
    """

    plans: tuple[tuple[Plan, int], ...]
    head_chunks: int | None


def plan_together(slots: Counter[Slot], layout: Layout, on: Machine, topology: Topology) -> Together:
    """Returns the cheapest plan of each kind of layer, or the cheapest with a common degree and number of chunks.

    The second holds if no single set of flags asks for all of the first.

    Args:
        slots: the kinds of layers, with how often each occurs.
        layout: the layout of every layer.
        on: the machine.
        topology: the hosts of the ranks.

    Raises:
        ArgumentError: a layer that cannot be planned.
    """
    asked = next((slot.head_chunks for slot in slots if isinstance(slot, AttentionSpec)), None)
    slots = Counter({_placed(slot, on, topology): count for slot, count in slots.items()})
    best = {slot: slot.plan(layout) for slot in slots}
    attention = [plan for plan in best.values() if plan.attend is not None]
    degrees = sorted({plan.ulysses_degree for plan in attention if SCHEMES[plan.scheme].is_product})
    chunks = sorted({plan.num_chunks for plan in attention if SCHEMES[plan.scheme].takes_chunks})
    found, refused = list[tuple[float, Together]](), None
    parts_of_all: Sequence[int | None] = [None, *chunks] if asked is None else [asked]
    degree_of_all: Sequence[int | None] = degrees or [None]
    for degree, parts in itertools.product(degree_of_all, parts_of_all):
        try:
            plans = {slot: _like(slot, plan, layout, degree, parts) for slot, plan in best.items()}
        except ArgumentError as error:  # a kind has too few heads for so many chunks
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


def _counted(plans: dict[Slot, Plan], slots: Counter[Slot]) -> tuple[tuple[Plan, int], ...]:
    return tuple((plan, slots[slot]) for slot, plan in plans.items())


def _placed(slot: Slot, on: Machine, topology: Topology) -> Slot:
    """Returns the slot, and the other layers of its run, on that machine."""
    if isinstance(slot, AttentionSpec):
        return replace(slot, hardware=on, topology=topology)
    run = tuple(replace(each, hardware=on, topology=topology) for each in slot.run)
    return replace(slot, hardware=on, topology=topology, run=run)


def _like(slot: Slot, best: Plan, layout: Layout, degree: int | None, parts: int | None) -> Plan:
    """Returns the plan that flags with this degree and number of chunks give a layer, in its best plan's scheme."""
    if isinstance(slot, LinearSpec):
        if parts == slot.head_chunks:
            return best
        return replace(slot, head_chunks=parts, run=tuple(replace(each, head_chunks=parts) for each in slot.run)).plan(
            layout
        )
    scheme = SCHEMES[best.scheme]
    search: dict[str, Any] = {} if scheme.assigns_tiles else {"search_seconds": 0.0}
    given = replace(
        slot, scheme=scheme.name, ulysses_degree=degree if scheme.is_product else None,
        head_chunks=parts if scheme.takes_chunks else None, **search,
    )  # fmt: skip
    return replace(given.plan(layout), prices=best.prices)


def _is_alike(plan: Plan, other: Plan) -> bool:
    candidates = [(x.scheme, x.layout, x.ulysses_degree, x.num_chunks) for x in (plan, other)]
    return candidates[0] == candidates[1]
