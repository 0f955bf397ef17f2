"""Presets against a few rows of the tables that they come from, copied as numbers.

Rows of aiconfigurator-core 0.12.0 (PyPI, Apache-2.0), milliseconds.
"""

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.kernel_times import attention_seconds, rule_seconds
from megatron_cp.planner.predict.simulate import simulate
from megatron_cp.planner.predict.workload import Edges, Workload

# attention/vllm/0.24.0 of h100_sxm, vllm_flash_attn_fa3; attention/sglang/0.5.14 of b200_sxm, trtllm_mha. Head size
# 128, 32 query heads, 8 of keys: documents and tokens of each.
ATTENTION = [
    ("h100", 1, 16384, 3.3104),
    ("h100", 4, 8192, 3.5917),
    ("h100", 1, 2048, 0.0890),
    ("h100", 64, 512, 0.6428),
    ("h100", 16, 1024, 0.4288),
    ("b200", 1, 16384, 1.7244),
    ("b200", 4, 8192, 1.7711),
    ("b200", 1, 2048, 0.0601),
    ("b200", 64, 512, 0.2847),
    ("b200", 16, 1024, 0.1991),
]
# linear_attention/sglang/0.5.14 of h100_sxm, chunk_gated_delta_rule, and kda/sglang/0.5.16, chunk_kda, head size 128:
# heads, documents and tokens of each. Rows of one shape differ by up to a third.
RULES = [
    ("gdn", 4, 1, 16384, 0.5613),
    ("gdn", 8, 1, 32768, 1.3280),
    ("gdn", 32, 1, 16384, 2.0122),
    ("gdn", 32, 16, 1024, 1.7585),
    ("gdn", 12, 1, 16384, 0.8303),
    ("gdn", 24, 16, 1024, 1.2816),
    ("kda", 12, 1, 16384, 1.2357),
    ("kda", 24, 16, 1024, 1.8505),
    ("kda", 96, 1, 16384, 7.3608),
]
# comm/nccl/2.29.2 of h100_sxm, half precision: ranks, and elements of all ranks.
ALL_TO_ALL = [
    (2, 262144, 0.0144),
    (2, 4194304, 0.0312),
    (2, 33554432, 0.1398),
    (2, 268435456, 0.9589),
    (8, 262144, 0.0149),
    (8, 4194304, 0.0414),
    (8, 33554432, 0.2213),
    (8, 268435456, 1.4904),
]


def attention_ms(on, documents, tokens):
    packing = Packing([tokens] * documents)
    step = plan_attention(packing, Layout.contiguous(packing, 1), heads=32, kv_heads=8, head_dim=128).attend
    seconds = attention_seconds(step, Rates(machine(on).hardware, 2, forward=True), np.array([0]), np.array([32]))
    return 1e3 * seconds[0, 0]


def rule_ms(kind, heads, documents, tokens):
    packing = Packing([tokens] * documents)
    plan = plan_linear(packing, Layout.contiguous(packing, 1), kind, heads=heads, head_dim=128, mode="headwise")
    return 1e3 * rule_seconds(plan, Rates(machine("h100").hardware, 2, forward=True))[0]


def all_to_all_ms(ranks, elements):
    senders, receivers = (each.ravel() for each in np.meshgrid(np.arange(ranks), np.arange(ranks)))
    workload, nbytes = Workload(ranks), np.full(ranks * ranks, 2 * elements // ranks)
    workload.wait(workload.start("all-to-all", Edges.from_messages(senders, receivers, nbytes)))
    return 1e3 * simulate(workload, machine("h100").topology(ranks)).seconds


@pytest.mark.parametrize(
    ("predicted", "rows"),
    [
        *((attention_ms, [row for row in ATTENTION if row[0] == on]) for on in ("h100", "b200")),
        *((rule_ms, [row for row in RULES if row[0] == kind]) for kind in ("gdn", "kda")),
        (all_to_all_ms, ALL_TO_ALL),
    ],
    ids=["attention of h100", "attention of b200", "gdn", "kda", "all-to-all"],
)
def test_times_are_near_the_measured_ones(predicted, rows):
    """Geometric means are within 15 %, and no row is further away than half."""
    ratios = np.array([predicted(*given) / measured for *given, measured in rows])
    assert np.exp(np.log(ratios).mean()) == pytest.approx(1.0, rel=0.15)
    assert 1 / 1.5 < ratios.min() <= ratios.max() < 1.5
