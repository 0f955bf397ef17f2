"""Reports to look at: who holds what and who sends what by real plans; times are made up.

    python -m tests.page_sample 4 16 64 1024 --to FOLDER

writes a page for each size into a folder.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import megatron_cp as cp
from megatron_cp.page.page import page_of, save_page
from megatron_cp.planner.picture import shapes_by_rank
from tests.random_tiles import random_assignment

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KINDS = {"exact, headwise, balanced": 1.0, "a2a, headwise, contiguous": 1.12, "p2p, chunkwise, zigzag": 1.3}


def sample(cp_size, *, events=400, name="Qwen3-Next"):
    """A whole report of a step of `cp_size` ranks, with about `events` events in its timeline, seven for each stage."""
    draw = np.random.default_rng(cp_size)
    lengths = np.sort(np.rint(draw.lognormal(7.5, 1.4, size=max(5, min(2000, 2 * cp_size)))).astype(int) + 1)
    draw.shuffle(lengths)
    packing = cp.Packing(lengths)
    layout = cp.Layout.balanced(packing, cp_size)
    plan = cp.plan_attention(packing, layout, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, scheme="exact")
    work = np.array(plan.work_per_rank())
    matrix = bytes_between(plan)
    return {
        "title": f"{name}, {packing.total:,} tokens, cp {cp_size}",
        "summary": f"Take this: --context-parallel-size {cp_size} --cp-comm-type exact.",
        "facts": [
            ["hardware", "H100 SXM, 989 TFLOP/s dense bf16, 80 GB; times on this page are made up"],
            ["documents", f"{lengths.size}, longest {lengths.max():,}"],
            ["command", f"megatron-cp plan --whole --model qwen3-next --cp {cp_size} --report step.html"],
            ["version", "0.1.0"],
        ],
        "candidates": candidates_about(cp_size, draw),
        "ownership": {
            "lengths": lengths.tolist(),
            "starts": layout.starts.tolist(),
            "ends": layout.ends.tolist(),
            "ranks": np.repeat(np.arange(cp_size), np.diff(layout.fragment_offsets)).tolist(),
        },
        "tiles": tiles_of(plan),
        "work": {"unit": "pairs", "values": work.tolist()},
        "timeline": timeline_of(work, matrix, max(1, events // (7 * cp_size))),
        "traffic": {"unit": "bytes", "matrix": matrix.tolist()},
        "hosts": [rank // 8 for rank in range(cp_size)],
        "notes": ["Work is even within 1 %.", "Transfers share 8 links of 50 GB/s a host."],
    }


def tiles_of(plan):
    """Puts each part of the mask on a random rank."""
    found = []
    for seed, way in enumerate(("forward", "backward")):
        shapes, ranks, count = shapes_by_rank(random_assignment(plan.attend, seed))
        sizes = {"queries": plan.packing.total, "keys": plan.packing.total}
        found.append(
            {"name": f"attention {way}", "text": f"{count} pieces.", **sizes, "ranks": ranks, "shapes": shapes}
        )
    return found


def bytes_between(plan):
    """Bytes of keys and values that each rank sends to each in the forward pass of one layer."""
    (stage,) = [stage for stage in plan.attend.stages if stage.keys is not None]
    matrix = stage.keys.split_counts.counts * (2 * KV_HEADS * HEAD_DIM * 2)
    np.fill_diagonal(matrix := matrix.copy(), 0)
    return matrix


def candidates_about(cp_size, draw):
    sizes = [size for size in (cp_size // 4, cp_size // 2, cp_size, 2 * cp_size) if size]
    found = []
    for size in sizes:
        for kind, factor in KINDS.items():
            share = 16 / size
            parts = {
                "attention": 31.0 * share * factor, "linear": 20.1 * share * draw.uniform(0.95, 1.1),
                "products": 44.0 * share, "exposed transfers": 3.1 * factor**4, "waits": 2.0 * draw.uniform(0.5, 2),
            }  # fmt: skip
            step = sum(parts.values())
            is_chosen = size == cp_size and factor == 1.0
            memory = {"parameters": 1.0e10, "optimizer": 2e10, "activations": 3.5e10 * cp_size / size, "buffers": 1e9}
            over = sum(memory.values()) > 8e10
            found.append(
                {
                    "name": f"cp {size}, {kind}", "cp": size,
                    "flags": f"--context-parallel-size {size} --cp-comm-type {kind.split(',')[0]}",
                    "milliseconds": {**parts, "step": step}, "tokens_per_second_per_gpu": 131072 / step * 1e3 / size,
                    "mfu": min(1.0, 0.41 / factor * 60 / (step * size / 16)), "bytes": memory, "limit_bytes": 8.0e10,
                    "chosen": is_chosen,
                    "why_not": "" if is_chosen else "does not fit in memory" if over else f"{step:.1f} ms a step",
                }
            )  # fmt: skip
    return found


def timeline_of(work, matrix, stages):
    """Makes a timeline: each rank receives keys while it computes, then multiplies, then waits for the slowest."""
    events = []
    micro = work / max(work.max(), 1) * 900
    for rank in range(len(work)):
        at = 0.0
        peers = np.flatnonzero(matrix[:, rank])
        for stage in range(stages):
            span = micro[rank] * (1 + 0.2 * ((rank * 7 + stage * 3) % 5))
            peer = int(peers[stage % len(peers)]) if len(peers) else None
            end, target = at + span, (rank + stage + 1) % len(work)
            for stream, begin, until, name, kind, other in (
                ("compute", at, end, f"attend stage {stage}", "kernel", None),
                ("compute", end, end + 40, "merge", "copy", None),
                ("compute", end + 40, end + 200, "out projection", "product", None),
                ("compute", end + 200, at + 2000, "for the slowest rank", "wait", None),
                ("receive", at, at + 0.4 * span, "keys and values", "transfer", peer),
                ("receive", at + 0.4 * span, at + 0.5 * span, "for a slot", "wait", None),
                ("send", at + 30, at + 0.35 * span + 30, "keys and values", "transfer", target),
            ):
                event = {"rank": rank, "stream": stream, "start": begin, "end": until, "name": name, "kind": kind}
                events.append(event if other is None else {**event, "peer": other})
            at += 2000
    return {"unit": "us", "layers": ["attention", "gated delta net"], "events": events}


def main():
    parser = argparse.ArgumentParser(description="Write pages to look at.")
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--to", type=Path, default=Path())
    parser.add_argument("--events", type=int, default=50_000)
    args = parser.parse_args()
    for size in args.sizes:
        report = sample(size, events=min(args.events, 400 * size))
        begun = time.perf_counter()
        page = page_of(report)
        seconds = time.perf_counter() - begun
        save_page(report, args.to / f"step_{size}.html")
        events = len(report["timeline"]["events"])
        print(f"cp {size}: {events:,} events, {len(page) / 1e6:.2f} MB, joined in {seconds:.2f} s")


if __name__ == "__main__":
    main()
