"""`memory_limit`: what needs more buffers is not taken, and what needs least is named where nothing fits."""

import pytest

import megatron_cp as cp
from megatron_cp.planner.predict.memory import buffer_bytes

PACKING = cp.Packing([5000, 1, 3000, 187])
SHAPE = {"heads": 16, "kv_heads": 4, "head_dim": 64}


def planned(limit=None, scheme="auto", size=4, **more):
    layout = cp.Layout.zigzag(PACKING, size)
    return cp.plan_attention(PACKING, layout, **SHAPE, scheme=scheme, memory_limit=limit, **more)


def needed(plan, item_size=2):
    return max(buffer_bytes(plan, rank, item_size) for rank in range(plan.cp_size))


NAMES = ("a2a", "p2p", "all_gather", "exact")


def test_ways_over_the_limit_are_not_taken():
    free = planned(size=16)
    limit = needed(free) - 1
    plan = planned(limit, size=16)
    assert (plan.scheme, plan.ulysses_degree) != (free.scheme, free.ulysses_degree)
    assert needed(plan) <= limit
    assert plan.prices[0].total > free.prices[0].total
    (note,) = (note for note in plan.notes if "over the memory limit" in note)
    assert f"{free.scheme} (u = {free.ulysses_degree})" in note
    assert "over the memory limit" in plan.explain()
    assert not any("over the memory limit" in note for note in free.notes)


def test_a_limit_that_everything_keeps_changes_nothing():
    free, limited = planned(), planned(1 << 50)
    assert limited == free
    assert limited.prices == free.prices


def test_more_chunks_are_taken_where_that_fits():
    """A byte less than a2a needs, and a2a in chunks needs no less: keys that are gathered in four parts do."""
    limit = needed(planned(scheme="a2a")) - 1
    plan = planned(limit)
    assert (plan.scheme, plan.attend.head_chunks) == ("all_gather", 4)
    assert needed(planned(scheme="all_gather")) > limit >= needed(plan)
    asked = planned(limit, size=4, head_chunks=4)
    assert asked.attend.head_chunks == 4
    with pytest.raises(cp.ArgumentError, match="memory_limit"):
        planned(limit, head_chunks=2)


def test_where_nothing_fits_the_nearest_miss_is_named():
    with pytest.raises(cp.ArgumentError) as caught:
        planned(1000)
    assert caught.value.argument == "memory_limit"
    least = int(str(caught.value).split("at least ")[1].split()[0])
    assert least > 1000
    assert "the candidate that needs least" in str(caught.value)
    assert needed(planned(least)) == least
    with pytest.raises(cp.ArgumentError, match="the candidate that needs least"):
        planned(least - 1)


@pytest.mark.parametrize("scheme", NAMES)
def test_a_named_scheme_over_the_limit_is_refused(scheme):
    least = needed(planned(scheme=scheme))
    assert planned(least, scheme) == planned(scheme=scheme)
    with pytest.raises(cp.ArgumentError, match=f"memory_limit: .*at least {least} bytes .* which {scheme}"):
        planned(least - 1, scheme)


def test_elements_of_four_bytes_need_more():
    least = needed(planned(scheme="a2a"))
    with pytest.raises(cp.ArgumentError, match="memory_limit"):
        planned(least, "a2a", item_size=4)


def test_one_rank_sends_nothing_and_keeps_any_limit():
    assert planned(1, size=1).cp_size == 1


def test_a_slot_has_the_limit_of_its_plan():
    layout = cp.Layout.zigzag(PACKING, 4)
    slot = cp.AttentionSpec(16, 4, 64, 64, memory_limit=1000)
    with pytest.raises(cp.ArgumentError, match="memory_limit: got 1000"):
        slot.plan(layout)
    assert slot != cp.AttentionSpec(16, 4, 64, 64)


def test_limits_are_part_of_what_a_layout_remembers():
    layout, shape = cp.Layout.zigzag(PACKING, 4), dict(SHAPE)
    free = cp.plan_attention(PACKING, layout, **shape)
    with pytest.raises(cp.ArgumentError, match="memory_limit"):
        cp.plan_attention(PACKING, layout, **shape, memory_limit=1000)
    assert cp.plan_attention(PACKING, layout, **shape) == free
