"""Compares `auto` with every fixed way in 20 cells, in the simulator: `python -m tools.regret [--all] [--json]`.

A cell is a layer, a number of ranks, a batch and a number of hosts. The 20 cells have every layer with every number of
ranks; batches and hosts take turns, so that every batch and every number of hosts meets every layer and, where hosts
have a rank each, every number of ranks. A fixed way is a scheme or mode with one degree, number of head chunks and
transport, from the lists that the planner has. `auto` is given the default transport. Its regret is its predicted time
over that of the fastest fixed way: in zigzag, which is the default layout, and, where `auto` chooses the layout too,
over the fastest way in any layout that it chooses from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import MODES, SCHEMES
from megatron_cp.plan.transport import TRANSPORTS, Transport, knows_hosts
from megatron_cp.planner.batch import AttentionSpec, LinearSpec, Slot
from megatron_cp.planner.choose import CHUNKS
from megatron_cp.planner.layouts import CHOICES, choose_layout, layout_by_name
from megatron_cp.planner.predict.bound import bounds_of_directions
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.price import priced

DEFAULT = "zigzag"
MUCH = 1.5  # from which on `plan` names the faster layout
LAYERS: dict[str, Slot] = {
    "gqa": AttentionSpec(32, 8, 128),  # Llama-3 8B
    "mla": AttentionSpec(128, 128, 192, 128),  # DeepSeek-V3, expanded as Megatron does
    "mqa": AttentionSpec(48, 1, 128),  # StarCoder
    "gdn": LinearSpec("gdn", 32, 16, 128, 128, hidden_size=2048),  # Qwen3-Next
    "mamba": LinearSpec("mamba", 128, 8, 128, 64, hidden_size=4096),  # Nemotron-H 8B
}
RANKS = (2, 8, 16, 64)
BATCHES = ("1 long", "64 heavy-tailed", "1,000 short")
HOSTS = (1, 2, 8)


class Cell(NamedTuple):
    """A cell of the table."""

    layer: str
    cp: int
    batch: str
    hosts: int


def cells() -> list[Cell]:
    """Returns the cells; a number of hosts above that of ranks becomes two hosts."""
    found = []
    for number, layer in enumerate(LAYERS):
        for place, cp in enumerate(RANKS):
            hosts = HOSTS[(number + 2 * place) % 3]
            found.append(Cell(layer, cp, BATCHES[(number + place) % 3], hosts if hosts <= cp else 2))
    return found


def all_cells() -> list[Cell]:
    """Returns every combination in which each host has a rank."""
    found = (Cell(*each) for each in itertools.product(LAYERS, RANKS, BATCHES, HOSTS))
    return [cell for cell in found if cell.hosts <= cell.cp]


def lengths_of(batch: str, cp: int) -> list[int]:
    """Returns the lengths of a batch of 131,072 tokens, or of 16,384 tokens a rank where that is more."""
    count, total = int(batch.split()[0].replace(",", "")), max(131_072, 16_384 * cp)
    drawn = np.random.default_rng(count).lognormal(0.0, 1.5 if "heavy" in batch else 0.5, count)
    lengths = np.maximum((drawn / drawn.sum() * total).astype(np.int64), 1)
    lengths[int(lengths.argmax())] += total - int(lengths.sum())
    return lengths.tolist()


def ways(slot: Slot, cp: int, hosts: int) -> Iterator[tuple[str, Slot]]:
    """Yields the fixed ways of a layer by name; some of them cannot be planned.

    Schemes that assign tiles are left out: `auto` tries them only if it is given seconds to search.
    """
    for transport in TRANSPORTS:
        if knows_hosts(transport) and hosts == 1:
            continue
        sent = Transport.even_hosts(transport, cp, hosts) if knows_hosts(transport) else Transport(transport)
        if isinstance(slot, LinearSpec):
            for mode in MODES.values():
                for chunks in CHUNKS if mode.exchanges_heads else (None,):
                    name = f"{mode.name} x{chunks or 1}, {transport}"
                    yield name, replace(slot, mode=mode.name, head_chunks=chunks, transport=sent)
            continue
        for scheme in SCHEMES.values():
            degrees = [u for u in range(2, cp) if cp % u == 0] if scheme.is_product else [None]
            for degree in degrees if not scheme.assigns_tiles else ():
                way = replace(slot, scheme=scheme.name, ulysses_degree=degree, transport=sent)
                for chunks in CHUNKS if scheme.takes_chunks else (None,):
                    name = f"{scheme.name} {f'(u = {degree}) ' if degree else ''}x{chunks or 1}, {transport}"
                    yield name, replace(way, head_chunks=chunks)


def fastest(slot: Slot, layout: Layout, cell: Cell, on: Machine) -> tuple[float, str]:
    """Returns the milliseconds and the name of the fastest fixed way in a layout.

    A way whose lower bound is above what is known is not played.
    """
    topology, best = on.topology(cell.cp, cell.hosts), (float("inf"), "")
    for name, way in ways(slot, cell.cp, cell.hosts):
        try:
            plan = way.plan(layout)
        except ArgumentError:
            continue
        if _bound(plan, on, topology) < best[0]:
            milliseconds = priced(plan, on, topology).total
            best = (milliseconds, name) if milliseconds < best[0] else best
    return best


def _bound(plan: Plan, on: Machine, topology: Topology) -> float:
    """Returns a lower bound on the milliseconds of a plan; for states of very many segments, infinity."""
    if plan.attend is not None:
        return sum(bounds_of_directions(plan, on, topology, 2))
    return float("inf") if sum(plan.bytes_sent(2, forward=True)) > 2**42 else 0.0


def judged(cell: Cell, on: Machine) -> dict[str, Any]:
    """Returns what `auto` takes in the default layout and in the layout that is chosen with it, and its regret."""
    slot = replace(LAYERS[cell.layer], hardware=on, topology=on.topology(cell.cp, cell.hosts))
    lengths, topology = lengths_of(cell.batch, cell.cp), on.topology(cell.cp, cell.hosts)
    began = time.thread_time()
    plan = slot.plan(layout_by_name(DEFAULT, Packing(lengths), cell.cp))
    middle = time.thread_time()
    choice = choose_layout(Packing(lengths), cell.cp, [slot])
    chosen = slot.plan(choice.layout)
    seconds = [middle - began, time.thread_time() - middle]
    fixed = {name: fastest(slot, layout_by_name(name, Packing(lengths), cell.cp), cell, on) for name in CHOICES}
    auto = [priced(each, on, topology).total for each in (plan, chosen)]
    best = [fixed[DEFAULT], min(fixed.values())]
    return {
        "cell": cell._asdict(), "layouts": (DEFAULT, choice.name), "auto_ms": auto, "best_fixed_ms": best,
        "takes": [each.prices[0].scheme + each.prices[0].detail for each in (plan, chosen)],
        "regret": [ours / least for ours, (least, _) in zip(auto, best, strict=True)], "plan_seconds": seconds,
    }  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--only", default="", help="cells that have this in them, such as 'mla 8'")
    parser.add_argument("--all", action="store_true", help="every combination in place of 20")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    on, asked = machine(args.gpu), all_cells() if args.all else cells()
    print(f"{on.describe()}\n\n| layer | cp | batch | hosts | in {DEFAULT}: takes | ms | regret | fastest fixed way | "
          "chosen layout: takes | ms | regret | fastest fixed way | default over chosen | plan s, both |")  # fmt: skip
    print("|---|--:|---|--:|---|--:|--:|---|---|--:|--:|---|--:|--:|")
    rows = []
    for cell in asked:
        if args.only in " ".join(map(str, cell)):
            rows.append(judged(cell, on))
            print(_line(rows[-1]), flush=True)
    print()
    for number, which in enumerate((f"in {DEFAULT}", "in the layout that is chosen")):
        regret = np.array([row["regret"][number] for row in rows])
        seconds = np.array([row["plan_seconds"][number] for row in rows])
        print(f"{which}: regret at most {regret.max():.4f}, geometric mean {np.exp(np.log(regret).mean()):.4f}; "
              f"planning took {np.median(seconds):.3f} s (median), at most {seconds.max():.3f}")  # fmt: skip
    hints = sum(row["auto_ms"][0] >= MUCH * row["auto_ms"][1] for row in rows)
    print(f"`plan` names the chosen layout in {hints} of {len(rows)} cells, where it is {MUCH} times as fast")
    if args.json:
        print(json.dumps({"rows": rows}))


def _line(row: dict[str, Any]) -> str:
    ours, best, regret, takes = row["auto_ms"], row["best_fixed_ms"], row["regret"], row["takes"]
    takes[1] = f"{row['layouts'][1]}: {takes[1]}"
    words = ["same" if regret[n] < 1.0005 else f"{name}, {least:.2f}" for n, (least, name) in enumerate(best)]
    halves = [f"{takes[n]} | {ours[n]:.2f} | {regret[n]:.3f} | {words[n]}" for n in (0, 1)]
    seconds = ", ".join(f"{each:.2f}" for each in row["plan_seconds"])
    cell = " | ".join(map(str, row["cell"].values()))
    return f"| {cell} | {' | '.join(halves)} | {ours[0] / ours[1]:.2f} | {seconds} |"


if __name__ == "__main__":
    main()
