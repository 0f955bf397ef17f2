"""Measures a step on documents with common beginnings, held once as trees and held as documents.

    python -m tools.tree_steps [--ranks 1,4] [--branching 2,8,32] [--shared 0.5,0.9] [--length 1024] [--repeat 5]

A group of `branching` documents of `length` tokens begins with the same `shared` part; groups are added up to 32
documents. The model is a layer of softmax attention and one of Gated DeltaNet with their projections, in fp32 on CPU
ranks, which are processes over gloo. Steps of both kinds alternate; medians are printed. Memory is the most
that a step's tensors take on the busiest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import megatron_cp as cp
from megatron_cp.executor import RankGroup, run_ranks
from megatron_cp.testing.memory import PeakMemory

DOCUMENTS, HIDDEN, HEADS = 32, 256, 8


def packings(branching: int, shared: float, length: int) -> dict[str, cp.Packing]:
    """Returns the same documents as trees and by themselves."""
    prefix = round(shared * length)
    segments, parents = [], []
    for _ in range(DOCUMENTS // branching):
        root = len(segments)
        segments += [prefix, *[length - prefix] * branching]
        parents += [-1, *[root] * branching]
    return {"tree": cp.Packing.tree(segments, parents), "documents": cp.Packing([length] * DOCUMENTS)}


def measure(group: RankGroup, branching: int, shared: float, length: int, repeat: int) -> dict[str, tuple[float, int]]:
    """Returns the median seconds of a step and the peak bytes on this rank, as trees and as documents."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    attention = cp.nn.Attention(HIDDEN, HEADS, kv_heads=2)
    linear = cp.nn.GatedDeltaNet(HIDDEN, heads=HEADS, key_heads=4, head_dim=32)
    batches = {}
    for name, packing in packings(branching, shared, length).items():
        layout = cp.Layout.balanced(packing, group.size)
        tokens = torch.zeros(packing.total, dtype=torch.int64)
        batch = cp.shard_batch(tokens, layout, group, slots=[attention.slot, linear.slot])
        batches[name] = (batch, torch.randn(int(layout.row_counts[group.rank]), HIDDEN))
    times: dict[str, list[float]] = {name: [] for name in batches}
    peaks = {}

    def step(batch: cp.LocalBatch, x: torch.Tensor) -> None:
        hidden = x.clone().requires_grad_()
        out = hidden + attention(hidden, batch, group)
        out = out + linear(out, batch, group)
        out.square().sum().backward()

    for name, given in batches.items():
        with PeakMemory() as memory:
            step(*given)
        peaks[name] = memory.peak
    for _ in range(repeat):
        for name, given in batches.items():
            began = time.perf_counter()
            step(*given)
            times[name].append(time.perf_counter() - began)
    return {name: (statistics.median(found), peaks[name]) for name, found in times.items()}


def main() -> None:
    """Prints a row for each number of ranks, branching and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", "1,4"), ("branching", "2,8,32"), ("shared", "0.5,0.9")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    heads = ("ranks", "branching", "shared", "tokens", "seconds of a step", "peak MiB")
    print("as trees / as documents (ratio)")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for ranks in map(int, args.ranks.split(",")):
        for branching in map(int, args.branching.split(",")):
            for shared in map(float, args.shared.split(",")):
                totals = [each.total for each in packings(branching, shared, args.length).values()]
                found = run_ranks(
                    measure, ranks, branching, shared, args.length, args.repeat, kind="processes", timeout=900
                )
                times, peaks = (
                    [max(rank[name][place] for rank in found) for name in ("tree", "documents")] for place in (0, 1)
                )
                pairs = (totals, times, [peak / 2**20 for peak in peaks])
                cells = [
                    f"{tree:{form}} / {documents:{form}} ({documents / tree:.2f})"
                    for (tree, documents), form in zip(pairs, (",", ".2f", ".0f"), strict=True)
                ]
                print(f"| {ranks} | {branching} | {shared:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
