"""Measures the cost of comparing a call: the first call of a plan, later ones, and one with the comparison off.

PYTHONPATH=. python tools/comparison_cost.py
"""

import statistics
import time

import torch

import megatron_cp as cp
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.launch import run_ranks

PLANS, CALLS = 200, 100


def main(group):
    """Medians in microseconds, on one rank."""
    first, later, off = [], [], []
    x = torch.ones(8, 4, 8)
    tensors = {"q": x, "k": x, "v": x, "sink": None}
    options = {"softmax_scale": 0.3, "softcap": 0.0, "dropout": 0.0, "kernel": "auto", "return_lse": False}
    for number in range(PLANS):
        packing = cp.Packing([7 + number, 1, 130, 64])
        plan = cp.plan_attention(packing, cp.Layout.zigzag(packing, group.size), heads=4, head_dim=8)

        def seconds(calls, plan=plan):
            began = time.perf_counter()
            for _ in range(calls):
                agree_on_call(group, [plan], "attention", tensors, options)
            return (time.perf_counter() - began) / calls

        group.barrier()
        first.append(seconds(1))
        later.append(seconds(CALLS))
        cp.compare_calls(group, False)
        off.append(seconds(CALLS))
        cp.compare_calls(group, True)
    return [round(1e6 * statistics.median(times), 2) for times in (first, later, off)]


if __name__ == "__main__":
    for rank, (first, later, off) in enumerate(run_ranks(main, 2, kind="processes", timeout=300)):
        print(f"rank {rank}: first call of a plan {first} us, later {later} us, not compared {off} us")
