"""Plans that the tests of `plan_attention` and `plan_linear` share."""

import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear

PACKING = Packing([7, 1, 0, 130, 2])
LAYOUT = Layout.zigzag(PACKING, 3)
ATTENTION = {"packing": PACKING, "layout": LAYOUT, "heads": 6, "kv_heads": 2, "head_dim": 8}
LINEAR = {"packing": PACKING, "layout": LAYOUT, "heads": 6, "key_heads": 2, "head_dim": 8, "mode": "headwise"}
PLANNERS = pytest.mark.parametrize(
    ("planner", "arguments"), [(plan_attention, ATTENTION), (plan_linear, LINEAR)], ids=["attention", "linear"]
)
