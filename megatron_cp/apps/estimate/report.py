"""`report_of`: gathers what the web page of a step shows. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_cp import __version__
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import StepPrice, scheme_of
from megatron_cp.apps.estimate.together import chunks_of
from megatron_cp.layout import Packing
from megatron_cp.plan import Plan, counted, size
from megatron_cp.planner import Machine, Span, Topology, described, shapes_by_rank, timelines

_MOST_EVENTS = 60_000  # events in a report's timeline, so that a browser opens it at once
_LABELS = {
    "linear": "linear layers", "exposed": "exposed transfers", "traffic": "memory traffic", "shards": "sharded weights",
}  # fmt: skip


def labelled(row: StepPrice) -> dict[str, float]:
    """Returns the milliseconds of a step's parts by the names that reports have for them."""
    return {_LABELS.get(name, name): value for name, value in row.parts.items()}


def named(row: StepPrice) -> str:
    """Returns a job's sizes and layout, as far as they are not one."""
    job = row.job
    degrees = {"tp": job.tp, "pp": job.pp, "ep": job.ep, "dp": job.replicas, "packs": job.packs}
    more = "".join(f"{name} {value}, " for name, value in degrees.items() if value > 1)
    return f"{more}cp {job.cp} in layout {job.layout}"


def bytes_of(row: StepPrice) -> dict[str, float]:
    """Returns the bytes of a rank by their use."""
    memory = row.memory
    return {
        "parameters": memory.parameters, "optimizer": memory.optimizer, "activations": memory.activations,
        "buffers": memory.buffers,
    }  # fmt: skip


def plan_names(plans: Sequence[Plan]) -> str:
    """Returns the schemes of plans, with their degrees and chunks."""
    return " / ".join(dict.fromkeys(_name(plan) for plan in plans)) or "-"


def _name(plan: Plan) -> str:
    exchanged = 1 < plan.ulysses_degree < plan.cp_size
    chunks = chunks_of(plan)
    return (
        scheme_of(plan)
        + (f" (u = {plan.ulysses_degree})" if exchanged else "")
        + (f", {chunks} chunks" if chunks > 1 else "")
    )


def report_of(
    model: ModelSpec, packing: Packing, on: Machine, topology: Topology, rows: list[StepPrice], chosen: StepPrice,
    limit: float, summary: str,
) -> dict[str, Any]:  # fmt: skip
    """Returns the report from which the page of a step is made."""
    plans = [plan for plan, _ in chosen.plans]
    layout = plans[0].hidden_layout or plans[0].layout
    events, layers, traffic = _timeline(plans, on, topology)
    return {
        "title": f"{model.name}, {packing.total:,} tokens, cp {chosen.job.cp}",
        "summary": summary,
        "facts": [
            ["machine", described(on, topology)],
            ["documents", f"{packing.num_documents}, longest {packing.lengths.max()}"],
            ["sharding", f"{chosen.job.sharding}, {counted(chosen.job.replicas, 'replica')}"],
            ["recomputation", chosen.job.recompute],
            ["work by rank", "time in kernels, in one forward and one backward of all layers"],
            ["not priced", "the host's own time outside of context parallelism"],
            ["model", model.source or model.name], ["version", __version__],
            *([name, text] for name, text in on.hardware.sources.items()),
        ],
        "candidates": [_candidate(row, on, limit, chosen) for row in rows],
        "ownership": {
            "lengths": packing.lengths.tolist(), "starts": layout.starts.tolist(), "ends": layout.ends.tolist(),
            "ranks": np.repeat(np.arange(layout.cp_size), np.diff(layout.fragment_offsets)).tolist(),
        },
        "tiles": _tiles(plans),
        "work": {"unit": "ms", "values": _work(chosen, on, topology)},
        "timeline": {"unit": "us", "layers": layers, "events": events},
        "traffic": {"unit": "bytes", "matrix": traffic.tolist()},
        "hosts": list(topology.hosts),
        "notes": [note for plan in plans for note in plan.notes],
    }  # fmt: skip


def _candidate(row: StepPrice, on: Machine, limit: float, chosen: StepPrice) -> dict[str, Any]:
    fits = row.memory.total <= limit
    return {
        "name": f"cp {row.job.cp}, {row.job.layout}, " + ", ".join(_name(plan) for plan, _ in row.plans),
        "kind": row.job.layout, "cp": row.job.cp, "flags": row.flags,
        "milliseconds": labelled(row) | {"step": row.step},
        "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu, "mfu": row.mfu(on.hardware.matrix_peak),
        "bytes": bytes_of(row), "limit_bytes": limit, "chosen": row is chosen,
        "why_not": "" if row is chosen else "slower per token and GPU" if fits else "does not fit the memory",
    }  # fmt: skip


def _work(chosen: StepPrice, on: Machine, topology: Topology) -> list[float]:
    """Returns each rank's milliseconds of kernels in all layers."""
    total = np.zeros(chosen.job.cp)
    for plan, count in chosen.plans:
        for timeline in timelines(plan, on, topology):
            busy = [span.end - span.start for span in timeline.spans if span.kind == "kernel"]
            total += count * np.sum(busy, axis=0) if busy else 0.0
    return [round(1e3 * value, 3) for value in total.tolist()]


def _tiles(plans: list[Plan]) -> list[dict[str, Any]]:
    """Returns pictures of the tiles of the first kind of layer whose tiles were assigned, forward and backward."""
    plan = next((plan for plan in plans if plan.attend is not None and plan.attend.tiled is not None), None)
    if plan is None:
        return []
    assert plan.attend is not None
    assert plan.attend.tiled is not None
    tiled, group, found = plan.attend.tiled, plan.ulysses_degree, []
    for number, (way, assignment) in enumerate((("forward", tiled.forward), ("backward", tiled.backward))):
        shapes, ranks, count = shapes_by_rank(assignment)
        text = [f"These are the {len(shapes)} pieces with most queries, of {count}."] * (len(shapes) < count)
        for known in tiled.solutions[number : number + 1]:
            most, bound = size(known.busiest_bytes), size(known.bound)
            beside = (
                "which is the least"
                if known.is_optimal
                else f"and no assignment of these tiles needs less than {bound}"
            )
            text.append(f"The busiest rank sends or receives {most} a layer, {beside}.")
        found.append(
            {
                "name": f"{plan.kind} {way}", "text": " ".join(text), "queries": plan.attend.mask.packing.total,
                "keys": plan.attend.mask.kv_packing.total, "group": group, "ranks": ranks * group, "shapes": shapes,
            }
        )  # fmt: skip
    return found


def _timeline(plans: list[Plan], on: Machine, topology: Topology) -> tuple[list[dict[str, Any]], list[str], Any]:
    """Returns the events and names of a layer of each kind, one after the other, and the bytes between ranks."""
    events: list[dict[str, Any]] = []
    names, begun = [], np.zeros(topology.size)
    traffic = np.zeros((topology.size, topology.size), dtype=np.int64)
    spans = []
    for plan in plans:
        for way, timeline in zip(("forward", "backward"), timelines(plan, on, topology), strict=True):
            names.append(f"{plan.kind} {way}")
            spans += [(names[-1], span, begun) for span in timeline.spans]
            begun = np.full(topology.size, float((begun + timeline.end).max()))
            for span in timeline.spans:
                if span.kind == "send" and span.edges is not None:
                    np.add.at(traffic, (span.edges.senders, span.edges.receivers), span.edges.nbytes)
    shown = max(1, _MOST_EVENTS // max(len(spans), 1))
    ranks = np.unique(np.linspace(0, topology.size - 1, min(shown, topology.size)).astype(np.int64))
    for name, span, offset in spans:
        events += _events(name, span, offset, ranks)
    return events, names, traffic


_STREAMS = {"send": "send", "receive": "receive"}


def _events(name: str, span: Span, offset: Any, ranks: Any) -> list[dict[str, Any]]:
    kind = "transfer" if span.kind in _STREAMS else span.kind
    starts, ends = (1e6 * (offset + each) for each in (span.start, span.end))
    return [
        {
            "rank": rank, "stream": _STREAMS.get(span.kind, "compute"), "start": round(starts[rank], 2),
            "end": round(ends[rank], 2), "name": f"{name}: {span.name}", "kind": kind,
        }
        for rank in ranks.tolist()
        if ends[rank] > starts[rank]
    ]  # fmt: skip
