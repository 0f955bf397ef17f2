"""The page of `megatron-cp plan --report`: candidates, who holds what, the streams of a layer, and the traffic."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from megatron_cp import __version__
from megatron_cp.cli.environment import command_line
from megatron_cp.page import save_page, spans_of
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import scheme_named
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import described, timelines

_MOST_RANKS = 8  # whose streams are drawn; others look alike
_MOST_FRAGMENTS = 5_000  # that are drawn: more are finer than a pixel


def save_plan(args: argparse.Namespace, plans: dict[str, tuple[Plan, dict[str, Any]]], verdict: list[str]) -> None:
    """Writes the page of a plan to `args.report`.

    Args:
        args: the command line.
        plans: the plan of each kind of layer by its name, with its numbers as `plan --json` has them.
        verdict: what to take, and the lines that explain it.
    """
    charts, tables = [], []
    for name, (plan, data) in plans.items():
        of = f", {name}" if len(plans) > 1 else ""
        charts += [_candidates(plan, data, of), _owners(plan, of), _streams(args, plan, of), _traffic(args, plan, of)]
        tables.append(_ranks(plan, data, of))
    on = machine(args.gpu)
    facts = [["machine", described(on, on.topology(args.cp[0], args.hosts))], ["megatron_cp", __version__]]
    facts += [[name, text] for name, text in on.hardware.sources.items()]
    notes = dict.fromkeys(note for plan, _ in plans.values() for note in plan.notes)
    save_page(
        {
            "title": f"Plan of {args.cp[0]} context-parallel ranks", "verdict": {"text": verdict[0], "ok": True},
            "command": command_line(args), "notes": [*verdict[1:], *notes], "charts": charts,
            "tables": tables, "facts": facts,
        },
        args.report,
    )  # fmt: skip


def _candidates(plan: Plan, data: dict[str, Any], of: str) -> dict[str, Any]:
    """Returns the chart of each candidate's milliseconds by part, the chosen one first, then the fastest."""
    if data["schemes"]:
        found = {_spelled(name, each): each["parts_ms"] for name, each in data["schemes"].items()}
        chosen = _spelled(plan.scheme, data["schemes"][plan.scheme])
    else:
        found = {f"{price.scheme}{price.detail}": price.parts for price in plan.prices if not price.is_bound}
        chosen = f"{plan.prices[0].scheme}{plan.prices[0].detail}"
    rows = sorted(found, key=lambda name: (name != chosen, sum(found[name].values())))
    parts = {part: [found[row].get(part, 0.0) for row in rows] for part in found[chosen]}
    rows[0] += " (taken)"
    title = f"Predicted milliseconds of a layer, forward and backward{of}"
    return {"title": title, "x": "ms", "bars": {"rows": rows, "parts": parts}}


def _spelled(name: str, scheme: dict[str, Any]) -> str:
    """Returns a scheme's name with its degree and chunks, so that no two candidates have one name."""
    degree = f", u = {scheme['ulysses_degree']}" if scheme_named(name).is_product else ""
    chunks = f", {scheme['head_chunks']} chunks" if scheme["head_chunks"] > 1 else ""
    return f"{name}{degree}{chunks}"


def _owners(plan: Plan, of: str) -> dict[str, Any]:
    layout = plan.layout
    ranks = np.repeat(np.arange(layout.cp_size), np.diff(layout.fragment_offsets))
    drawn = np.sort(np.argsort(layout.starts - layout.ends, kind="stable")[:_MOST_FRAGMENTS])
    text = f"{layout.packing.describe()}."
    if drawn.size < ranks.size:
        text += f" The longest {drawn.size:,} of {ranks.size:,} fragments are drawn."
    owners, starts, ends = (column[drawn].tolist() for column in (ranks, layout.starts, layout.ends))
    spans = spans_of(owners, starts, ends, [f"rank {rank}" for rank in range(layout.cp_size)])
    return {"title": f"Who holds what{of}", "text": text, "x": "token of the packed stream", "spans": spans}


def _streams(args: argparse.Namespace, plan: Plan, of: str) -> dict[str, Any]:
    """Returns the chart of what each stream does when, forward and then backward."""
    on, shown = machine(args.gpu), min(plan.cp_size, _MOST_RANKS)
    names = [f"rank {rank} {stream}" for rank in range(shown) for stream in ("computes", "sends", "receives")]
    parts: dict[str, list[tuple[int, float, float, str]]] = {}
    begun = 0.0
    for way, timeline in zip(
        ("forward", "backward"), timelines(plan, on, on.topology(plan.cp_size, args.hosts)), strict=True
    ):
        for span in timeline.spans:
            place = {"send": 1, "receive": 2}.get(span.kind, 0)
            for rank in range(shown):
                start, end = (1e6 * (begun + float(each[rank])) for each in (span.start, span.end))
                if end > start:
                    text = f"{way}: {span.name}, {end - start:.1f} us"
                    parts.setdefault(span.kind, []).append((3 * rank + place, start, end, text))
        begun += float(timeline.end.max(initial=0.0))
    text = f"The first {shown} of {plan.cp_size} ranks." if shown < plan.cp_size else ""
    return {"title": f"Streams of a layer{of}", "text": text, "x": "us", "spans": {"rows": names, "parts": parts}}


def _traffic(args: argparse.Namespace, plan: Plan, of: str) -> dict[str, Any]:
    on = machine(args.gpu)
    matrix = np.zeros((plan.cp_size, plan.cp_size), dtype=np.int64)
    for timeline in timelines(plan, on, on.topology(plan.cp_size, args.hosts)):
        for span in timeline.spans:
            if span.kind == "send" and span.edges is not None:
                np.add.at(matrix, (span.edges.senders, span.edges.receivers), span.edges.nbytes)
    title = f"Bytes that a layer sends, forward and backward{of}"
    return {"title": title, "x": "to rank", "y": "from rank", "matrix": matrix.tolist()}


def _ranks(plan: Plan, data: dict[str, Any], of: str) -> dict[str, Any]:
    work = plan.work_per_rank()
    mean, sent = max(sum(work) / len(work), 1e-9), data["bytes_sent_per_rank"]
    rows = [
        [rank, data["tokens_per_rank"][rank], work[rank] / mean, sent["forward"][rank], sent["backward"][rank]]
        for rank in range(plan.cp_size)
    ]
    columns = ["rank", "tokens", "work over the mean", "bytes sent forward", "bytes sent backward"]
    return {"title": f"Ranks{of}", "columns": columns, "rows": rows, "folded": plan.cp_size > 2 * _MOST_RANKS}
