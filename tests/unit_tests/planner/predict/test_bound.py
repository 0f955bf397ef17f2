"""What a way takes at least is never more than what it is predicted to take, so that `auto` misses none."""

import warnings

import numpy as np
import pytest

import megatron_cp as cp
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.predict import machine, presets
from megatron_cp.planner.predict.bound import attention_bound
from megatron_cp.planner.predict.price import priced


def ways(layout, mask, heads, groups):
    for name, scheme in SCHEMES.items():
        for degree in [u for u in range(2, layout.cp_size) if layout.cp_size % u == 0] if scheme.is_product else [None]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                yield cp.plan_attention(
                    layout.packing, layout, heads=heads, kv_heads=groups, head_dim=64, mask=mask, scheme=name,
                    ulysses_degree=degree,
                )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_a_bound_is_no_more_than_the_price(seed):
    random = np.random.default_rng(seed)
    size = int(random.choice([2, 3, 4, 6, 8, 16]))
    lengths = np.maximum(random.lognormal(5, 2, int(random.integers(1, 20))).astype(int), 1)
    packing = cp.Packing(lengths.tolist())
    layout = getattr(cp.Layout, str(random.choice(["zigzag", "balanced", "contiguous"])))(packing, size)
    mask = cp.Mask.named(packing, str(random.choice(["causal", "full", "window:63,0"])))
    groups = int(random.choice([1, 2, 4, 8]))
    on = machine(str(random.choice(presets())))
    topology = on.topology(size, int(random.integers(1, size + 1)))
    for plan in ways(layout, mask, groups * int(random.choice([1, 4])), groups):
        bound, price = attention_bound(plan, on, topology, 2), priced(plan, on, topology).total
        assert bound <= price * (1 + 1e-9), (plan.scheme, plan.ulysses_degree)


def test_auto_finds_the_fastest_of_all_ways():
    """But for what is gained by another preferred way; see `weigh`."""
    for seed, size in ((0, 8), (1, 16), (2, 32)):
        lengths = np.maximum(np.random.default_rng(seed).lognormal(6, 1.5, 12).astype(int), 1)
        packing = cp.Packing(lengths.tolist())
        for name in ("zigzag", "balanced", "contiguous"):
            layout = getattr(cp.Layout, name)(packing, size)
            mask, on = cp.Mask.causal(packing), machine("a100")
            best = min(priced(plan, on).total for plan in ways(layout, mask, 16, 4))
            chosen = cp.plan_attention(packing, layout, heads=16, kv_heads=4, head_dim=64, hardware=on)
            assert chosen.prices[0].total <= best * 1.04 + 0.1
            assert chosen.prices[0].total == pytest.approx(priced(chosen, on).total)
