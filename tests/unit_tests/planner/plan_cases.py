"""Plans that the tests of `plan_attention` and `plan_linear` share."""

import warnings

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear

ragged = settings(max_examples=60)
PACKING = Packing([7, 1, 0, 130, 2])
LAYOUT = Layout.zigzag(PACKING, 3)
ATTENTION = {"packing": PACKING, "layout": LAYOUT, "heads": 6, "kv_heads": 2, "head_dim": 8}
LINEAR = {"packing": PACKING, "layout": LAYOUT, "heads": 6, "key_heads": 2, "head_dim": 8, "mode": "headwise"}
PLANNERS = pytest.mark.parametrize(
    ("planner", "arguments"), [(plan_attention, ATTENTION), (plan_linear, LINEAR)], ids=["attention", "linear"]
)


@st.composite
def plans(draw):
    """A plan of either layer, with uneven heads, idle ranks and pad rows."""
    packing = Packing(draw(st.lists(st.sampled_from([0, 1, 2, 5, 13, 97]), min_size=1, max_size=6)))
    layout = draw(st.sampled_from([Layout.contiguous, Layout.zigzag]))(
        packing, draw(st.integers(1, 9) | st.just(31)), align=draw(st.sampled_from([1, 1, 4]))
    )
    groups = draw(st.integers(1, 6))
    heads = groups * draw(st.integers(1, 5))
    dims = {"head_dim": draw(st.sampled_from([3, 8, 64])), "value_head_dim": draw(st.sampled_from([None, 5, 128]))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if draw(st.booleans()):
            mask = draw(st.sampled_from([Mask.causal, Mask.full]))(packing)
            return plan_attention(packing, layout, heads=heads, kv_heads=groups, mask=mask, scheme="a2a", **dims)
        return plan_linear(packing, layout, heads=heads, key_heads=groups, mode="headwise", **dims)
