"""Compares what can be done with the latents of multi-latent attention: predicted by the planner, and measured.

    python -m tools.latent_modes [--sizes deepseek-v3 kimi-k2] [--ranks 8,64] [--tokens 131072]
    python -m tools.latent_modes --measure [--ranks 2] [--repeat 5]

The first prints bytes, peak memory and predicted times of every scheme and mode on `h100`, for one causal document in
the balanced layout, all computed from plans. The second measures the rates of CPU ranks, which are processes over gloo,
and then steps of one layer in fp32 beside what is predicted for these ranks; steps of the three modes alternate. Under
torchrun, as `tools/cluster` starts it, its ranks are measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence

import torch

import megatron_cp as cp
from benchmarks.calibrate import calibrated
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.predict.hardware import Machine
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from megatron_cp.planner.predict.price import priced

SIZES = {"deepseek-v3": 128, "kimi-k2": 64}  # heads, of the sizes below
SHAPE = {"head_dim": 192, "value_head_dim": 128, "latent": (64, 512)}
# Heads, documents and scheme of what is measured: one document, many, and a window's worth of heads.
MEASURED = [
    (heads, lengths, scheme)
    for heads, lengths in ((8, [1024]), (8, [64] * 16), (2, [1024]))
    for scheme in ("a2a", "all_gather", "exact", "p2p")
]


def print_predicted(name: str, ranks: int, tokens: int) -> None:
    """Prints a table of one model on so many ranks."""
    packing, on = cp.Packing([tokens]), machine("h100")
    layout = cp.Layout.balanced(packing, ranks)
    print(f"\n### {name}, {SIZES[name]} heads, cp {ranks}, {tokens:,} tokens\n")
    print("| scheme | mode | sends MiB, forward + backward | peak GiB, forward, backward | predicted ms |")
    print("| --- | --- | --: | --: | --: |")
    for scheme in SCHEMES:
        for mode in LATENT_MODES:
            plan = cp.plan_attention(
                packing, layout, heads=SIZES[name], scheme=scheme, latent_mode=mode, hardware=on, **SHAPE
            )
            sent, peaks = list[float](), list[int]()
            for forward in (True, False):
                sent.append(max(plan.bytes_sent(2, forward=forward)) / 2**20)
                peaks.append(peak_bytes(plan, 0, 2, forward=forward) + buffer_bytes(plan, 0, 2))
            price = priced(plan, on)
            moved, kept = f"{sent[0]:,.0f} + {sent[1]:,.0f}", ", ".join(f"{peak / 2**30:.1f}" for peak in peaks)
            print(
                f"| `{scheme}` | {mode} | {moved} | {kept} | {price.forward:.0f} + {price.backward:.0f} |", flush=True
            )


def measure(group: RankGroup, repeat: int) -> tuple[Machine, list[list[tuple[float, float]]]]:
    """Returns the measured machine, and for each case and mode the predicted and the measured seconds of a step."""
    torch.set_num_threads(1)
    on, found = calibrated(group, torch.float32, repeat), []
    for heads, lengths, scheme in MEASURED:
        packing = cp.Packing(lengths)
        layout = cp.Layout.zigzag(packing, group.size)
        options = {"heads": heads, "scheme": scheme, "hardware": on, "item_size": 4, **SHAPE}
        plans = [cp.plan_attention(packing, layout, latent_mode=mode, **options) for mode in LATENT_MODES]
        taken = [[_step(plan, group, heads) for plan in plans] for _ in range(repeat + 1)][1:]
        everyone = torch.tensor(group.all_gather_object(taken)).amax(0)  # [repeats, modes]
        medians = everyone.median(0).values.tolist()
        predicted = [priced(plan, on, item_size=4).total / 1e3 for plan in plans]
        found.append(list(zip(predicted, medians, strict=True)))
    return on, found


def _step(plan: cp.Plan, group: RankGroup, heads: int) -> float:
    """Returns the seconds of forward and backward on this rank."""
    shared, rank = SHAPE["latent"]
    rows, made = int(plan.layout.row_counts[group.rank]), SHAPE["head_dim"] - shared + SHAPE["value_head_dim"]
    shapes = ((rows, heads, SHAPE["head_dim"]), (rows, rank), (rows, shared), (heads, made, rank))
    tensors = [torch.randn(shape).div_(8).requires_grad_() for shape in shapes]
    group.barrier()
    began = time.perf_counter()
    out = cp.latent_attention(*tensors, plan, group)
    out.backward(torch.ones_like(out))
    return time.perf_counter() - began


def print_measured(ranks: int, repeat: int) -> None:
    """Prints measured beside predicted times, and how often the fastest mode is named."""
    if in_torchrun():
        group = start_torchrun_rank(900.0)
        on, rows = measure(group, repeat)
        if group.rank:
            return
    else:
        on, rows = run_ranks(measure, ranks, repeat, kind="processes", timeout=900.0)[0]
    print(f"\n### {on.describe()}, torch {torch.__version__}\n")
    print(
        "| heads | documents | scheme | " + " | ".join(f"{mode} ms, predicted" for mode in LATENT_MODES) + " | named |"
    )
    print("| --: | --- | --- |" + " --: |" * len(LATENT_MODES) + " --- |")
    named = []
    for (heads, lengths, scheme), row in zip(MEASURED, rows, strict=True):
        predicted, taken = zip(*row, strict=True)
        best, chosen = (min(range(len(row)), key=each.__getitem__) for each in (taken, predicted))
        named.append(taken[chosen] / taken[best])
        cells = [f"{1e3 * b:.0f}, {1e3 * a:.0f}" for a, b in row]
        cells[best] = f"**{cells[best]}**"
        verdict = "the fastest" if chosen == best else f"{LATENT_MODES[chosen]}, {named[-1]:.2f} times it"
        print(f"| {heads} | {len(lengths)} of {lengths[0]} | `{scheme}` | {' | '.join(cells)} | {verdict} |")
    fastest, mean = sum(each == 1 for each in named), statistics.mean(named)
    print(f"\nThe fastest mode is named in {fastest} of {len(named)} cells.", end=" ")
    print(f"The named one took {mean:.2f} times as long as it in the mean, {max(named):.2f} at most.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure on CPU ranks")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models")
    parser.add_argument("--ranks", default=None, help="numbers of ranks; 8,64 by default, or 2 to measure")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of the document")
    parser.add_argument("--repeat", type=int, default=5, help="measured steps")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore", UserWarning)
    if args.measure:
        print_measured(int(args.ranks or 2), args.repeat)
        return
    for name in args.sizes:
        for ranks in (args.ranks or "8,64").split(","):
            print_predicted(name, int(ranks), args.tokens)


if __name__ == "__main__":
    main()
