"""Draws what `megatron-cp bench exchange --json` or `megatron-cp bench wire --json` found.

python benchmarks/plot.py benchmarks/results/exchange_cpu.json docs/images/exchange.png
python benchmarks/plot.py benchmarks/results/wire_cpu.json docs/images/wire.png
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

from megatron_cp.page import DISTINCT

BLUE, ORANGE, _, _, SKY, VERMILION, _, GREY = DISTINCT
COLOURS = {
    "zigzag": BLUE, "contiguous": SKY, "megatron-core": VERMILION, "loop": ORANGE, "all_to_all": BLUE,
    "all_gather": SKY, "speedup": BLUE, "bytes": GREY, "attention": BLUE, "gdn": ORANGE,
}  # fmt: skip
STAGES = [(stage, way) for way in ("to heads", "to tokens") for stage in ("pack", "unpack")]
GATE = "with the gate"


def draw_local_part(axes: Any, data: dict[str, Any]) -> None:
    """Draws the times of packing and unpacking over that of a copy of the same bytes."""
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
    """Draws the times of both peers over ours, in every cell, both directions together."""
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


def draw_transports(axes: Any, data: dict[str, Any]) -> None:
    """Draws the speed of each transport over that of the backend's own collective."""
    of_size = {kind: sizes[str(data["cp"])] for kind, sizes in data["collective_over"].items()}
    names = [name for name in ("naive loop", "pairwise", "hierarchical") if name in of_size["all_to_all"]]
    values = {kind.replace("_", "-"): [found.get(name) for name in names] for kind, found in of_size.items()}
    draw_bars(axes, values, list(of_size), logarithmic=False)
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("time of the collective / this")
    axes.set_title(f"Transports, {data['cp']} ranks on {max(data['hosts']) + 1} hosts", fontsize=9)


def draw_codecs(axes: Any, data: dict[str, Any]) -> None:
    """Draws how much sooner coded messages arrive, beside how much shorter they are."""
    codecs = [codec for codec in data["codecs_ms"] if codec != "none"]
    cells = [(codec, chunks) for codec in codecs for chunks in data["codecs_ms"][codec]]
    values = {
        "speed-up": [data[f"{codec}_over_none_speedup"][chunks] for codec, chunks in cells],
        "fewer bytes": [exactly(data[f"{codec}_byte_ratio"][chunks]) for codec, chunks in cells],
    }
    draw_bars(axes, values, ["speedup", "bytes"], logarithmic=False)
    axes.set_xticks(range(len(cells)), [f"{codec}\n{chunks} chunk{'s' * (chunks != '1')}" for codec, chunks in cells])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("none / codec")
    axes.set_title("Codecs", fontsize=9)


def draw_overlap(axes: Any, data: dict[str, Any]) -> None:
    """Draws the share of the smaller of transfer and compute that head chunks hide, forward and backward together."""
    shares = data["hidden_share"]
    chunks = sorted({count for of_chunks in shares.values() for count in of_chunks}, key=int)
    values = {
        layer: [of_chunks[count]["both"] if count in of_chunks else None for count in chunks]
        for layer, of_chunks in shares.items()
    }
    draw_bars(axes, values, list(values), logarithmic=False)
    axes.set_xticks(range(len(chunks)), [f"{count} chunk{'s' * (count != '1')}" for count in chunks])
    axes.set_ylabel("hidden / the smaller of both")
    axes.set_title("Transfer behind computation", fontsize=9)


def exactly(value: float) -> dict[str, float]:
    """Formats counted values in the form of measured ones."""
    return {"median": value, "low": value, "high": value}


def draw_bars(
    axes: Any, values: dict[str, list[dict[str, float] | None]], colours: list[str], *, logarithmic: bool = True
) -> None:
    """Draws medians with their quartiles and values; None leaves its place empty."""
    width = 0.8 / len(values)
    for number, ((name, spreads), colour) in enumerate(zip(values.items(), colours, strict=True)):
        drawn = [(index, spread) for index, spread in enumerate(spreads) if spread]
        places = [index + (number - (len(values) - 1) / 2) * width for index, _ in drawn]
        medians = [spread["median"] for _, spread in drawn]
        errors = [
            [spread["median"] - spread["low"] for _, spread in drawn],
            [spread["high"] - spread["median"] for _, spread in drawn],
        ]
        axes.bar(places, medians, width, yerr=errors, label=name, color=COLOURS[colour], error_kw={"linewidth": 0.8})
        for place, (_, spread) in zip(places, drawn, strict=True):
            value = spread["median"]
            axes.annotate(
                f"{value:.2g}" if value < 10 else f"{value:.0f}", (place, spread["high"]), ha="center", va="bottom",
                xytext=(0, 1), textcoords="offset points", fontsize=6,
            )  # fmt: skip
    if logarithmic:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.3)  # room for the legend
    axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=7)
    axes.yaxis.label.set_size(8)
    axes.spines[["top", "right"]].set_visible(False)


def draw(data: dict[str, Any], image: Path) -> None:
    """Draws all results of a benchmark side by side.

    Raises:
        SystemExit: no plot is known for it.
    """
    panels = {
        "pack_over_copy": draw_local_part,
        "megatron_over_ours": draw_exchanges if "pack_over_copy" in data else None,
        "collective_over": draw_transports,
        "codecs_ms": draw_codecs,
        "hidden_share": draw_overlap,
    }
    drawn = [panel for key, panel in panels.items() if panel and data.get(key)]
    if not drawn:
        raise SystemExit("there is nothing to draw: give the JSON of bench exchange or bench wire")
    figure, axes = plt.subplots(
        1, len(drawn), figsize=(3 * len(drawn) + 3 * (len(drawn) < 3), 3.2), layout="constrained", squeeze=False
    )
    for panel, place in zip(drawn, axes[0], strict=True):
        panel(place, data)
    figure.savefig(image, dpi=150)


def main() -> int:
    """Reads the command line and writes the image."""
    parser = argparse.ArgumentParser(description="Draws what bench exchange or bench wire found.")
    parser.add_argument("result", type=Path, help="the JSON that --json prints, or all that the command prints")
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.result.read_text().strip().splitlines()[-1]), args.image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
