"""Computes what papers say of balance and bytes, from the lengths that their authors published.

Run `python -m tools.imbalance LONGCA DISTCA`: checkouts of https://github.com/NJUDeepEngine/LongCA-bench, for its
histograms of lengths, and of https://github.com/hao-ai-lab/distca, for its file of the lengths of WLB-LLM. No clock is
read and nothing runs but arithmetic: areas of masks, bytes of plans, and in the part on WLB-LLM predicted times.
"""

from __future__ import annotations

import json
import random
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

import megatron_cp as cp
from megatron_cp.data.even import even_packs
from megatron_cp.layout.slices import Slice
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.pack_cost import PackCost
from megatron_cp.planner.predict.price import priced

A_RANK, HEADS, KV_HEADS, SIZE = 8192, 64, 8, 128  # LongCA-bench's set-up of distributed attention
DRAWS = 10
LAYOUTS = ("contiguous", "zigzag_of_pack", "zigzag", "balanced")
WINDOW, PACKS, BATCHES = 131_072, 4, 24  # WLB-LLM's 7B-128K: four packs in a global batch


# -- LongCA-bench ----------------------------------------------------------------------------------------------------


def histogram(folder: Path, tokens: int) -> tuple[list[tuple[int, int]], list[float]]:
    """Returns the bins of lengths that LongCA-bench takes for so many tokens, and their weights."""
    name = "pile" if tokens <= 12 * 1024 else "prolong64k" if tokens < 64 * 1024 else "prolong512k"
    found = json.loads((folder / "longca_bench/dist_attn/distribution" / f"{name}.json").read_text())
    pairs = [tuple(map(int, re.findall(r"\d+", bounds))) for bounds in found]
    return [(low, high) for low, high in pairs], list(found.values())


def drawn(bins: Sequence[tuple[int, int]], weights: Sequence[float], tokens: int, rng: random.Random) -> list[int]:
    """Draws lengths until they fill so many tokens; the last one is cut."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        low, high = rng.choices(bins, weights)[0]
        lengths.append(max(1, min(rng.randint(low, high), left)))
    return lengths


def masks(folder: Path, tokens: int, rng: random.Random) -> Iterator[tuple[str, cp.Mask]]:
    """Yields LongCA-bench's 14 masks that do not depend on data, of lengths drawn anew for each."""

    def lengths(tokens: int = tokens) -> list[int]:
        return drawn(*histogram(folder, tokens), tokens, rng)

    whole = cp.Packing([tokens])
    yield "full", cp.Mask.full(whole)
    yield "causal", cp.Mask.causal(whole)
    yield "full document", cp.Mask.full(cp.Packing(lengths()))
    yield "causal document", cp.Mask.causal(cp.Packing(lengths()))
    for kind in ("full", "causal"):
        short = int(tokens * 0.4)
        some = lengths(short) + drawn([(8 * 1024, 30 * 1024)], [1.0], tokens - short, rng)
        rng.shuffle(some)
        yield f"{kind} document, long", getattr(cp.Mask, kind)(cp.Packing(some))
    yield "sliding window", cp.Mask.window(whole, 1024, 1024)
    yield "sliding window, causal", cp.Mask.window(whole, 1024, 0)
    edges = np.cumsum([0, *lengths()]).tolist()
    slices: list[Slice] = [(a, b, a, b, "causal") for a, b in pairwise(edges)]
    question: Slice = (edges[1], tokens, 0, edges[1], "full")
    yield "share question", cp.Mask.from_slices(whole, [*slices, question])
    edges = np.cumsum([0, *lengths()]).tolist()
    slices = [(a, b, a, b, "causal") for a, b in pairwise(edges)]
    yield "causal blockwise", cp.Mask.from_slices(whole, [*slices[:-1], (edges[-2], tokens, 0, tokens, "causal")])
    yield "prefix LM, causal", cp.Mask.prefix(whole, rng.randint(1, tokens))
    some = lengths()
    prefix = rng.randint(1, some[0])
    yield "prefix LM, document", cp.Mask.prefix(cp.Packing(some), prefix)
    wide = max(1, rng.randint(1, tokens // 3 - 1))
    yield "global sliding window", cp.Mask.from_slices(whole, [
        (0, tokens, 0, wide, "causal"), (0, wide, wide, tokens, "causal"), *_window(wide, tokens, wide)
    ])  # fmt: skip
    blocks, slices = tokens // 1024, []
    while blocks > 0:
        begin, count = tokens - blocks * 1024, min(rng.randint(1, 8), blocks)
        ends = [begin + 1024 * (number + 1) for number in range(count)]
        slices += [(end - 1024, end, begin, end, "full") for end in ends]
        blocks -= count
    yield "block causal document", cp.Mask.from_slices(whole, slices)


def _window(start: int, end: int, wide: int) -> list[Slice]:
    """Returns the slices of a window of so many tokens to both sides, between two places."""
    cuts = list(range(start, end, wide))
    found: list[Slice] = []
    for a, b in zip(cuts, [*cuts[1:], end], strict=True):
        found += [(a, b, max(start, a - wide), max(start, b - wide), "inverse_causal")]
        found += [(a, b, max(start, b - wide), min(end, a + wide), "full")]
        found += [(a, b, min(end, a + wide), min(end, b + wide), "causal")]
    return [each for each in found if each[2] < each[3]]


def _planned(mask: cp.Mask, layout: cp.Layout, scheme: str, heads: int = HEADS, kv_heads: int = KV_HEADS) -> cp.Plan:
    return cp.plan_attention(
        layout.packing, layout, heads=heads, kv_heads=kv_heads, head_dim=SIZE, mask=mask, scheme=scheme
    )


def _layout(name: str, mask: cp.Mask, ranks: int) -> cp.Layout:
    options = {"mask": mask} if name == "balanced" else {}
    found: cp.Layout = getattr(cp.Layout, name)(mask.packing, ranks, **options)
    return found


def longca(folder: Path, ranks: int) -> Iterator[str]:
    """Yields a table of masks: the area imbalance of layouts, and what the busiest rank sends forward under `exact`."""
    tokens, rng = ranks * A_RANK, random.Random(42)
    found: dict[str, list[list[float]]] = {}
    for _ in range(DRAWS):
        for name, mask in masks(folder, tokens, rng):
            plans = [_planned(mask, _layout(layout, mask, ranks), "exact") for layout in LAYOUTS]
            sent = [max(plan.bytes_sent(2, forward=True)) / 2**20 for plan in plans]
            found.setdefault(name, []).append([*(plan.work_imbalance for plan in plans), *sent])
    gathered = max(_planned(mask, _layout("zigzag", mask, ranks), "all_gather").bytes_sent(2, forward=True)) / 2**20
    yield f"\n### {ranks} ranks, {tokens:,} tokens\n"
    yield f"| mask | {' | '.join(f'{name}, area' for name in LAYOUTS)} | {' | '.join(f'{n}, MiB' for n in LAYOUTS)} |"
    yield "|---|" + "--:|" * 2 * len(LAYOUTS)
    for name, rows in found.items():
        mean = np.mean(rows, axis=0)
        shown = [f"{each:.3f}" for each in mean[: len(LAYOUTS)]] + [f"{each:.1f}" for each in mean[len(LAYOUTS) :]]
        yield f"| {name} | {' | '.join(shown)} |"
    yield f"\n`all_gather` sends {gathered:.1f} MiB whatever the mask."


def volumes() -> Iterator[str]:
    """Yields LongCA-bench's formulas of a rank's elements forward beside those of plans."""
    yield "| ranks | Ulysses, formula | `a2a`, a rank on average | busiest | Ring P2P, formula | `p2p`, each rank |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for ranks in (8, 16, 32, 64, 96):
        mask = cp.Mask.causal(cp.Packing([ranks * A_RANK]))
        layout, share = cp.Layout.zigzag(mask.packing, ranks), (ranks - 1) / ranks * ranks * A_RANK * SIZE * 2 / 1e6
        heads, ring = (_planned(mask, layout, scheme).bytes_sent(2, forward=True) for scheme in ("a2a", "p2p"))
        mega = [np.array(each) / 2e6 for each in (heads, ring)]
        yield (f"| {ranks} | {share / ranks * (HEADS + KV_HEADS):.1f} | {mega[0].mean():.1f} | {mega[0].max():.1f} | "
               f"{share * KV_HEADS:.1f} | {mega[1].max():.1f} |")  # fmt: skip


def padding(folder: Path) -> Iterator[str]:
    """Yields the tokens that padding every document to twice the ranks adds, in per cent."""
    yield "| ranks | tokens | causal document | causal document, long |"
    yield "|--:|--:|--:|--:|"
    for ranks in (8, 16, 32, 64, 96):
        rng, added = random.Random(42), dict[str, list[float]]()
        for _ in range(DRAWS):
            for name, mask in masks(folder, ranks * A_RANK, rng):
                lengths = mask.packing.lengths
                added.setdefault(name, []).append(float((-lengths % (2 * ranks)).sum() / lengths.sum()))
        shown = [f"{100 * np.mean(added[name]):.1f}" for name in ("causal document", "causal document, long")]
        yield f"| {ranks} | {ranks * A_RANK:,} | {' | '.join(shown)} |"


# -- WLB-LLM ---------------------------------------------------------------------------------------------------------


def streams(folder: Path) -> list[list[int]]:
    """Returns the documents of global batches of four windows, as a loader cuts them."""
    lengths = json.loads((folder / "distca/simulator/data/dist_wlbllm.json").read_text())
    batches, batch, room = [], list[int](), PACKS * WINDOW
    for length in lengths:
        part = min(length, WINDOW, room)
        batch.append(part)
        room -= part
        if not room:
            batches.append(batch)
            batch, room = [], PACKS * WINDOW
        if len(batches) == BATCHES:
            break
    return batches


def in_order(batch: Sequence[int]) -> list[list[int]]:
    """Returns four packs of a window each, filled in order; a document that does not fit is cut."""
    packs: list[list[int]] = [[]]
    for length in batch:
        while length:
            part = min(length, WINDOW - sum(packs[-1]))
            packs[-1].append(part)
            length -= part
            if sum(packs[-1]) == WINDOW:
                packs.append([])
    return [pack for pack in packs if pack]


def greedy(
    documents: Sequence[int], count: int, cost: PackCost, most: int = WINDOW
) -> tuple[list[list[int]], list[int]]:
    """Puts the longest document first in the pack with the least work that has room, else where most room is.

    Returns:
        the packs, and the documents that fit nowhere.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    work, room, left = [0.0] * count, [most] * count, []
    for length in documents:
        lightest, emptiest = int(np.argmin(work)), int(np.argmax(room))
        number = lightest if room[lightest] >= length else emptiest
        if room[number] < length:
            left.append(length)
            continue
        packs[number].append(length)
        work[number] += float(cost.of_documents([length])[0])
        room[number] -= length
    return packs, left


def imbalance(packs: Sequence[Sequence[int]], cost: PackCost) -> float:
    """Returns the time of the longest pack over the mean, as WLB-LLM's table 2 does."""
    times = [cost.of(pack) if pack else 0.0 for pack in packs]
    return max(times) * len(times) / sum(times)


def fixed(batches: Sequence[Sequence[int]], together: int, cost: PackCost) -> float:
    """Returns the mean imbalance of packs of a window that are made of some batches together."""
    found = []
    for first in range(0, len(batches), together):
        documents = sorted((each for batch in batches[first : first + together] for each in batch), reverse=True)
        packs, left = greedy(documents, PACKS * together, cost)
        for length in left:  # what fits nowhere is cut
            for pack in packs:
                part = min(length, WINDOW - sum(pack))
                pack += [part] * (part > 0)
                length -= part
        packs.sort(key=cost.of)  # packs of about the same time go together
        found += [imbalance(packs[k : k + PACKS], cost) for k in range(0, len(packs), PACKS)]
    return float(np.mean(found))


def delayed(batches: Sequence[Sequence[int]], floors: Sequence[int], most: int, cost: PackCost) -> float:
    """Returns the mean imbalance of packs of any length up to `most`, with queues for documents from `floors` on."""
    queues: list[list[int]] = [[] for _ in floors]
    found, kept = [], list[int]()
    for batch in batches:
        new = []
        for length in batch:
            level = int(np.searchsorted(floors, length, side="right")) - 1
            (queues[level] if level >= 0 else new).append(length)
        for queue in queues:
            if len(queue) >= PACKS:
                new += queue[:PACKS]
                del queue[:PACKS]
        packs, kept = greedy([*kept, *sorted(new, reverse=True)], PACKS, cost, most)
        found.append(imbalance(packs, cost))
    return float(np.mean(found))


def wlb(folder: Path) -> Iterator[str]:
    """Yields WLB-LLM's table 2, and its comparison of shards of a layer at cp 4."""
    on = machine("h100")
    flops = PackCost.of_flops(active_parameters=6_738_000_000, softmax_features=32 * 32 * SIZE)  # Llama-2 7B
    cost, batches = flops.at_rates_of(on.hardware, SIZE), streams(folder)
    first = float(np.mean([imbalance(in_order(batch), cost) for batch in batches]))
    yield "| packing | published | computed |\n|---|--:|--:|"
    yield f"| original | 1.44 | {first:.2f} |"
    for count, published in ((1, 1.41), (2, 1.22), (4, 1.11), (8, 1.08)):
        yield f"| fixed length, greedy, global batches: {count} | {published} | {fixed(batches, count, cost):.2f} |"
    for floors, published in (((65_536,), 1.24), ((32_768, 65_536), 1.05), ((24_576, 49_152, 81_920), 1.05)):
        found = [f"{delayed(batches, floors, int(room * WINDOW), cost):.2f}" for room in (1.1, 1.25, 2)]
        words = f"WLB-LLM, queues: {len(floors)}; packs of up to 1.1, 1.25, 2 windows"
        yield f"| {words} | {published} | {', '.join(found)} |"
    found = [f"{np.mean([_even(batch, int(room * WINDOW), cost) for batch in batches]):.2f}" for room in (1.1, 1.25, 2)]
    yield f"| `even_packs`, one global batch; packs of up to 1.1, 1.25, 2 windows | | {', '.join(found)} |"
    yield "\n| window | shards | area imbalance, mean | worst | attention ms | layer ms | faster | published |"
    yield "|--:|---|--:|--:|--:|--:|--:|--:|"
    for window in (65_536, 131_072):
        rows = dict[str, list[tuple[float, float]]]()
        for batch in batches:
            mask = cp.Mask.causal(cp.Packing(_cut(batch, window)))
            for name in LAYOUTS[1:]:
                plan = _planned(mask, _layout(name, mask, 4), "all_gather", 32, 32)
                rows.setdefault(name, []).append((plan.work_imbalance, priced(plan, on).total))
        pairs = zip(rows["zigzag_of_pack"], rows["zigzag"], strict=True)
        rows["the faster of both"] = [min(pair, key=lambda each: each[1]) for pair in pairs]
        rest, base = 1e3 * cost.token * window / 32 / 4, np.mean(rows["zigzag_of_pack"], axis=0)[1]
        said = {"zigzag": {65_536: "1.01", 131_072: "1.07"}[window], "the faster of both": "1.075 on average"}
        for name, each in rows.items():
            area, milliseconds = np.mean(each, axis=0)
            layer = rest + milliseconds
            times = f"{milliseconds:.2f} | {layer:.2f} | {(rest + base) / layer:.3f}"
            yield f"| {window:,} | {name} | {area:.3f} | {max(each)[0]:.3f} | {times} | {said.get(name, '')} |"


def _even(batch: Sequence[int], budget: int, cost: PackCost) -> float:
    packs = even_packs(batch, budget=budget, cost=cost, ranks=PACKS, microbatches=1)
    return imbalance([[batch[number] for number in pack] for pack in packs], cost)


def _cut(lengths: Sequence[int], window: int) -> list[int]:
    """Returns the first window of a loader with such a window, in which longer documents are cut."""
    found: list[int] = []
    for length in lengths:
        found.append(min(length, window - sum(found)))
        if sum(found) == window:
            break
    return found


def saved(folder: Path) -> Iterator[str]:
    """Yields the bytes of what FlashCP compares: keys that all ranks gather, and keys that are seen."""
    yield "| ranks | gathered | seen, per document (zigzag) | seen, `balanced` | gathered over least |"
    yield "|--:|--:|--:|--:|--:|"
    for ranks in (4, 8, 16, 32):
        rows = []
        for batch in streams(folder):
            mask = cp.Mask.causal(cp.Packing(in_order(batch)[0]))
            plans = [_planned(mask, _layout("zigzag", mask, ranks), "all_gather", 32, 8)]
            plans += [_planned(mask, _layout(name, mask, ranks), "exact", 32, 8) for name in LAYOUTS[2:]]
            rows.append([max(plan.bytes_sent(2, forward=True)) / 2**20 for plan in plans])
        mean = np.mean(rows, axis=0)
        yield f"| {ranks} | {' | '.join(f'{each:.1f}' for each in mean)} | {mean[0] / mean[1:].min():.1f} |"


def main() -> None:
    """Prints the tables."""
    warnings.simplefilter("ignore", UserWarning)
    if len(sys.argv) != 3:
        sys.exit("name two folders: python -m tools.imbalance LONGCA DISTCA, clones of LongCA-bench and DistCA")
    longca_folder, distca_folder = map(Path, sys.argv[1:])
    parts = {
        "LongCA-bench: masks": [*longca(longca_folder, 8), *longca(longca_folder, 32)],
        "LongCA-bench: elements that a rank sends forward, in millions": volumes(),
        "LongCA-bench: padding, in per cent": padding(longca_folder),
        "WLB-LLM": wlb(distca_folder),
        "FlashCP: MiB of the busiest rank forward": saved(distca_folder),
    }
    for title, lines in parts.items():
        print(f"\n## {title}\n")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
