"""Draws plans: the owners of the packed tokens, and the shares of the work."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.files import whole_file
from megatron_cp.layout import Layout
from megatron_cp.layout.array_types import FloatArray, IntArray
from megatron_cp.layout.bands import canonical
from megatron_cp.page import DISTINCT
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.tile_assignment import TileAssignment

_FORMATS = (".png", ".pdf", ".svg")
_LARGEST_RUNS = 20_000  # more bars than this are finer than a pixel
_LINES_OF_DOCUMENTS = 64  # lines of more documents would hide the bars behind them


def check_picture(name: str, path: str) -> None:
    """Refuses a path at which no picture can be saved, or matplotlib that is not there, before anything is planned.

    Args:
        name: the name of the argument.
        path: the path of the picture.

    Raises:
        ArgumentError: the folder does not exist, the ending is not known, or matplotlib is not installed.
    """
    target = Path(path)
    is_name = "\0" not in path and target.suffix in _FORMATS
    if not is_name or not target.parent.is_dir() or target.is_dir():
        raise ArgumentError(name, path, f"a file ending in {' or '.join(_FORMATS)}, in a folder that exists")
    if find_spec("matplotlib") is None:
        raise ArgumentError(name, path, "only where matplotlib is installed, which draws it", install("plot"))


def rank_colours(count: int) -> Any:
    """Returns `[count, 4]` a colour for each rank: distinct ones for few ranks, viridis for many.

    Neighbours among many ranks look alike; a picture of them has a colour bar instead of a legend.
    """
    from matplotlib import colormaps, colors

    if count <= len(DISTINCT):
        return np.array(colors.to_rgba_array(DISTINCT[:count])).reshape(count, 4)
    return colormaps["viridis"](np.linspace(0.06, 0.94, count))


def save_picture(plan: Plan | Sequence[Plan], path: str | Path) -> None:
    """Draws and saves the ownership of the stream, a row for each rank, and each rank's tokens and work.

    Where hidden states are redistributed, two layouts are drawn: the given one, which they have outside the run of
    layers, and that of the layers.

    Args:
        plan: a plan, or the plans of several layers of one model over one batch, which are drawn one below the other.
        path: the path of the picture.

    Raises:
        ArgumentError: the folder does not exist or the file cannot be written there.
    """
    check_picture("plot", str(path))
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    plans = [plan] if isinstance(plan, Plan) else list(plan)
    streams = [(each, title, layout) for each in plans for title, layout in streams_of(each)]
    height = 2.6 + 0.22 * min(plans[0].cp_size, 32)
    tiled = next((each.attend.tiled for each in plans if each.attend is not None and each.attend.tiled), None)
    whole: Any = Figure(figsize=(11, height * len(streams) + 5.5 * (tiled is not None)), layout="constrained")
    figure = whole
    if tiled is not None:
        figure, tile_figure = whole.subfigures(2, 1, height_ratios=(height, 5.5))
        directions = (("forward", tiled.forward), ("backward", tiled.backward))
        axes = tile_figure.subplots(1, 2)
        for axis, (name, assignment) in zip(axes, directions, strict=True):
            _draw_tiles(axis, f"{name}: tiles of the mask by the rank that computes them", assignment)
        _explain_colours(tile_figure, axes, tiled.forward.size)
    axes = figure.subplots(len(streams), 2, width_ratios=(4, 1), squeeze=False)
    figure.suptitle(_title(plans))
    for (stream, shares), (each, title, layout) in zip(axes, streams, strict=True):
        prefix = _name(each) if len(plans) > 1 else ""
        stream.set_title(": ".join(filter(None, [prefix, title])), fontsize=9)
        _draw_ownership(stream, layout)
        is_plans = layout is each.layout
        _draw_shares(shares, layout, each.work_per_rank() if is_plans else None)
    try:
        with whole_file(path) as new:
            whole.savefig(new, dpi=130)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "plot", str(path), "a file that can be written, ending in .png, .pdf or .svg", str(error)
        ) from None


def _name(plan: Plan) -> str:
    return f"{plan.kind} by {plan.strategy}"


def _title(plans: Sequence[Plan]) -> str:
    packing = plans[0].packing
    names = ", ".join(dict.fromkeys(_name(plan) for plan in plans))
    return f"{names} over {plans[0].cp_size} ranks: {packing.describe()}"


def streams_of(plan: Plan) -> list[tuple[str, Layout]]:
    """Returns the layouts to draw, with titles: two if hidden states are redistributed."""
    if plan.hidden_layout is None:
        return [("", plan.layout)]
    return [
        ("outside the run of linear layers, as asked for", plan.hidden_layout),
        ("in the layers, to which hidden states are redistributed", plan.layout),
    ]


def _draw_ownership(axes: Any, layout: Layout) -> None:
    packing = layout.packing
    colours = rank_colours(layout.cp_size)
    ranks = np.repeat(np.arange(layout.cp_size), np.diff(layout.fragment_offsets))
    if ranks.size > _LARGEST_RUNS:
        note = f"{ranks.size} fragments, of which the longest {_LARGEST_RUNS} are drawn"
        axes.set_title(", ".join(filter(None, [axes.get_title(), note])), fontsize=9)
    drawn = np.argsort(layout.starts - layout.ends, kind="stable")[:_LARGEST_RUNS]
    for rank in range(layout.cp_size):
        own = drawn[ranks[drawn] == rank]
        spans = np.stack([layout.starts[own], layout.ends[own] - layout.starts[own]], axis=1)
        axes.broken_barh(spans.tolist(), (rank - 0.4, 0.8), color=colours[rank])
    starts = packing.starts[1:].tolist()
    has_lines = len(starts) < _LINES_OF_DOCUMENTS
    if has_lines:
        for start in starts:
            axes.axvline(start, color="0.25", linewidth=0.6, linestyle=":")
    axes.set_xlim(0, max(packing.total, 1))
    _rank_axis(axes, layout.cp_size)
    pieces = "documents" if packing.branches is None else "segments"
    lines = f"dotted lines begin {pieces}" if has_lines else f"{len(starts) + 1} {pieces}, not marked"
    axes.set_xlabel(f"token of the packed stream; {lines}")


def _draw_tiles(axes: Any, title: str, assignment: TileAssignment) -> None:
    """Draws the mask, keys to the right and queries down, each tile in the colour of the rank that computes it."""
    from matplotlib.collections import PolyCollection

    shapes, ranks, count = shapes_by_rank(assignment)
    if count > len(shapes):
        title += f", the largest {len(shapes)} of {count}"
    corners, colours = outlines_of(shapes), rank_colours(assignment.size)[ranks]
    axes.add_collection(PolyCollection(list(corners), facecolors=colours, edgecolors="face", linewidths=0.3))
    axes.set_title(title, fontsize=9)
    most = corners.reshape(-1, 2).max(axis=0, initial=1)
    axes.set_xlim(0, most[0])
    axes.set_ylim(most[1], 0)
    axes.set_xlabel("key")
    axes.set_ylabel("query")


def shapes_by_rank(assignment: TileAssignment) -> tuple[IntArray, IntArray, int]:
    """Returns the shapes of the tiles that a picture shows.

    Returns:
        The shapes `[n, 6]`, see `shapes_of`, if there are too many those with most queries; the KV rank that computes
        each `[n]`; and the number of all shapes.
    """
    shapes = [shapes_of(assignment.rank_bands(rank)) for rank in range(assignment.size)]
    ranks, found = np.repeat(np.arange(assignment.size), [len(own) for own in shapes]), np.concatenate(shapes)
    drawn = np.arange(len(found))
    if len(found) > _LARGEST_RUNS:
        drawn = np.sort(np.argsort(found[:, 0] - found[:, 1], kind="stable")[:_LARGEST_RUNS])
    return found[drawn], ranks[drawn], len(found)


def shapes_of(bands: IntArray) -> IntArray:
    """Returns `[n, 6]` the shapes that bands cover, cut into pieces with straight edges.

    A shape is a range of queries, the range of keys that its first query sees, and the range that its last one sees;
    between them both ends of the range follow a line.
    """
    q0, q1, k0, k1, lo, hi = canonical(bands).T
    first, last = [(np.maximum(k0, q + lo), np.minimum(k1, q + hi + 1)) for q in (q0, q1 - 1)]
    return np.stack([q0, q1, *first, *last], axis=1)


def outlines_of(shapes: IntArray) -> FloatArray:
    """Returns `[n, 4, 2]` the corners of shapes, as key and query."""
    q0, q1, *ends = shapes.T
    corners = [(ends[0], q0), (ends[1], q0), (ends[3], q1), (ends[2], q1)]
    found: FloatArray = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1).astype(np.float64)
    return found


def _draw_shares(axes: Any, layout: Layout, work: list[int] | None) -> None:
    """Draws each rank's share of the tokens and, if given, of the work."""
    ranks = np.arange(layout.cp_size)
    tokens = layout.token_counts / max(layout.packing.total, 1)
    axes.barh(ranks - 0.2 * (work is not None), 100 * tokens, height=0.4, color="0.7", label="tokens")
    if work is not None:
        shares = np.array(work) / max(sum(work), 1)
        axes.barh(ranks + 0.2, 100 * shares, height=0.4, color=rank_colours(layout.cp_size), label="work (coloured)")
    _rank_axis(axes, layout.cp_size)
    axes.set_xlabel("share, %")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _rank_axis(axes: Any, cp_size: int) -> None:
    axes.set_ylim(cp_size - 0.5, -0.5)
    axes.set_yticks(range(0, cp_size, max(1, cp_size // 16)))
    axes.set_ylabel("rank")


def _explain_colours(figure: Any, axes: Any, count: int) -> None:
    """Adds a legend of few ranks, or a colour bar of many."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    colours = rank_colours(count)
    if count <= len(DISTINCT):
        names = [Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
        figure.legend(handles=names, loc="outside lower center", ncols=count, fontsize=8, frameon=False)
        return
    figure.colorbar(ScalarMappable(Normalize(-0.5, count - 0.5), ListedColormap(colours)), ax=list(axes), label="rank")
