"""A plan as a picture: whose tokens lie where in the packed documents, and how the work is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.plan import Plan

_FORMATS = (".png", ".pdf", ".svg")
_LARGEST_RUNS = 20_000  # more bars than this are finer than a pixel


def save_picture(plan: Plan, path: str | Path) -> None:
    """Draws ownership of the stream (a row for each rank) and each rank's tokens and work, and saves it.

    Raises:
        ArgumentError: the folder does not exist or the file cannot be written there.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    target = Path(path)
    if not target.parent.is_dir() or target.is_dir() or target.suffix not in _FORMATS:
        raise ArgumentError("--plot", str(path), f"a file ending in {' or '.join(_FORMATS)}, in a folder that exists")
    height = 2.6 + 0.22 * min(plan.cp_size, 32)
    figure = Figure(figsize=(11, height), layout="constrained")
    stream, shares = figure.subplots(1, 2, width_ratios=(4, 1))
    figure.suptitle(
        f"{plan.kind} by {plan.scheme} over {plan.cp_size} ranks: "
        f"{plan.packing.num_documents} document{'s' * (plan.packing.num_documents != 1)}, {plan.packing.total} tokens"
    )
    _draw_ownership(stream, plan)
    _draw_shares(shares, plan)
    try:
        figure.savefig(target, dpi=130)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "--plot", str(path), "a file that can be written, ending in .png, .pdf or .svg", str(error)
        ) from None


def _draw_ownership(axes: Any, plan: Plan) -> None:
    layout = plan.layout
    colours = _colours(plan.cp_size)
    ranks = np.repeat(np.arange(layout.cp_size), np.diff(layout.fragment_offsets))
    if ranks.size > _LARGEST_RUNS:
        axes.set_title(f"{ranks.size} fragments, of which the longest {_LARGEST_RUNS} are drawn", fontsize=9)
    drawn = np.argsort(layout.starts - layout.ends, kind="stable")[:_LARGEST_RUNS]
    for rank in range(plan.cp_size):
        own = drawn[ranks[drawn] == rank]
        spans = np.stack([layout.starts[own], layout.ends[own] - layout.starts[own]], axis=1)
        axes.broken_barh(spans.tolist(), (rank - 0.4, 0.8), color=colours[rank])
    for start, _ in list(plan.packing.spans())[1:400]:
        axes.axvline(start, color="0.25", linewidth=0.6, linestyle=":")
    axes.set_xlim(0, max(plan.packing.total, 1))
    _rank_axis(axes, plan.cp_size)
    axes.set_xlabel("token of the packed stream; dotted lines begin documents")


def _draw_shares(axes: Any, plan: Plan) -> None:
    ranks = np.arange(plan.cp_size)
    tokens = plan.layout.token_counts / max(plan.packing.total, 1)
    work = np.array(plan.work_per_rank()) / max(sum(plan.work_per_rank()), 1)
    axes.barh(ranks - 0.2, 100 * tokens, height=0.4, color="0.7", label="tokens")
    axes.barh(ranks + 0.2, 100 * work, height=0.4, color=_colours(plan.cp_size), label="work (coloured)")
    _rank_axis(axes, plan.cp_size)
    axes.set_xlabel("share, %")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _rank_axis(axes: Any, cp_size: int) -> None:
    axes.set_ylim(cp_size - 0.5, -0.5)
    axes.set_yticks(range(0, cp_size, max(1, cp_size // 16)))
    axes.set_ylabel("rank")


def _colours(count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["turbo"](np.linspace(0.08, 0.92, count))
