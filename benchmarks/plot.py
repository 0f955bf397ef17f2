"""Draws what `megatron-cp bench exchange --json` found.

python benchmarks/plot.py benchmarks/results/exchange_cpu.json docs/images/exchange.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"zigzag": "#1b6ca8", "contiguous": "#7fb3d5", "megatron-core": "#c0392b", "loop": "#e59866"}
STAGES = [(stage, way) for way in ("to heads", "to tokens") for stage in ("pack", "unpack")]
GATE = "with the gate"


def draw_local_part(axes: Any, data: dict[str, Any]) -> None:
    """Packing and unpacking over a copy of the same bytes."""
    values = {
        layout: [data[f"{stage}_over_copy"][f"{layout}, {GATE}"][way] for stage, way in STAGES]
        for layout in ("zigzag", "contiguous")
    }
    if data["megatron_pack_over_copy"]:
        values["megatron-core"] = [data[f"megatron_{stage}_over_copy"][way] for stage, way in STAGES]
    names = {"zigzag": "ours, zigzag", "contiguous": "ours, contiguous"}
    draw_bars(axes, {names.get(name, name): of_stages for name, of_stages in values.items()}, list(values))
    axes.set_xticks(range(len(STAGES)), [f"{stage}\n{way}" for stage, way in STAGES])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("time / a warm copy")
    axes.set_title("Local work, one thread", fontsize=9)


def draw_exchanges(axes: Any, data: dict[str, Any]) -> None:
    """Both peers over ours, in every cell, both directions together."""
    key, cells = f"inbound, zigzag, {GATE}", data["cells"]
    peers = {"loop": "loop_over_ours", "megatron-core": "megatron_over_ours"}
    values = {peer: [cell[name][key]["both"] for cell in cells] for peer, name in peers.items()}
    names = {"loop": "a call per document and section / ours", "megatron-core": "megatron-core / ours"}
    draw_bars(axes, {names[name]: of_cells for name, of_cells in values.items()}, list(values))
    axes.set_xticks(
        range(len(cells)), [f"{cell['ranks']} ranks\n{cell['tokens']} tok.\n{cell['documents']} doc." for cell in cells]
    )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("time / ours")
    axes.set_title("One exchange over gloo, forward and backward", fontsize=9)


def draw_bars(axes: Any, values: dict[str, list[dict[str, float]]], colours: list[str]) -> None:
    """Medians with their quartiles, on a logarithmic scale; the longest bars say their value."""
    width = 0.8 / len(values)
    for number, ((name, spreads), colour) in enumerate(zip(values.items(), colours, strict=True)):
        places = [index + (number - (len(values) - 1) / 2) * width for index in range(len(spreads))]
        medians = [spread["median"] for spread in spreads]
        errors = [
            [spread["median"] - spread["low"] for spread in spreads],
            [spread["high"] - spread["median"] for spread in spreads],
        ]
        axes.bar(places, medians, width, yerr=errors, label=name, color=COLOURS[colour], error_kw={"linewidth": 0.8})
        for place, spread in zip(places, spreads, strict=True):
            value = spread["median"]
            axes.annotate(
                f"{value:.2g}" if value < 10 else f"{value:.0f}", (place, spread["high"]), ha="center", va="bottom",
                xytext=(0, 1), textcoords="offset points", fontsize=6,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.3)  # room for the legend
    axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=7)
    axes.yaxis.label.set_size(8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Reads the command line and writes the image."""
    parser = argparse.ArgumentParser(description="Draws what bench exchange found.")
    parser.add_argument("result", type=Path, help="the JSON that bench exchange --json prints, or all that it prints")
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    data = json.loads(args.result.read_text().strip().splitlines()[-1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1, 1.2), layout="constrained")
    draw_local_part(left, data)
    if data["megatron_over_ours"]:
        draw_exchanges(right, data)
    figure.savefig(args.image, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
