"""The ratios and tables of `megatron-cp bench exchange`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_cp.apps.bench.contenders import LOOP, SEPARATE
from megatron_cp.apps.bench.local_part import local_table
from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.section_batch import ALL_SECTIONS, LAYOUTS
from megatron_cp.apps.bench.spread import formatted, spread, table
from megatron_cp.apps.bench.timing import BOTH, Timing
from megatron_cp.plan import counted
from megatron_cp.testing import Case, HostWork

STAGES = ("inbound forward", "inbound backward", "outbound forward", "outbound backward")
TARGETS = {LOOP: 5.0, MEGATRON: 3.0}  # over ours, at least, as geometric means
LEAST_OVER_MEGATRON, MOST_OVER_COLLECTIVE = 1.0, 1.5  # in every cell and direction

LEGEND = f"""\
Local part: one rank's work on one thread, on messages that have arrived. Every stage is timed beside a copy of the
bytes that enter it between two buffers in memory. Ours packs into pooled buffers; all else that either side makes comes
from an allocator that keeps freed memory, so that nothing is paged in: *faults* counts the pages that were paged in
nevertheless, in the median call. {MEGATRON}: its order of heads and its split and cat before the collective, its gather
of tokens after it; to tokens, autograd's reverse of the same.
One exchange: {MEGATRON} is the work of `GatedDeltaNet.forward` around its collective, with the order of tokens that it
builds in each layer; {LOOP} is the work of {MEGATRON} before, with its own functions: a call for every document and
section. Medians [quartiles] over the repeats of ratios within one repeat, wall time of the slowest rank; *local*: time
of that rank's own thread without transfers; *both*: ratio of the sums of forward and backward in one repeat; *copy*:
one warm copy of the bytes that enter the exchange, on all ranks at once.
*Gradients* arrive on the head side in separate tensors, as most kernels return them (for {MEGATRON} after its own
`torch.split`), or *in place* of the inputs, as a kernel writes them that asks `like_rows` for its buffers: these are
sent as rows of all sections, so that packing gathers or does nothing, and unpacking cuts rows. Others are sent section
by section; Gated DeltaNet's are such, and the limit of unpacking is for them.
*Cut from one projection*: columns of one tensor with the gate are sent; autograd joins the gradients of all.
*Passes*: bytes written by copy-like operators over bytes that enter; *MiB*: the same bytes on a rank. *Syncs*:
operators and methods that make the host wait. *Host us*: time by the clock until the call returns, on the CPU all;
*calls* of Python functions, *operators* of torch with views, and on CUDA *launches*, on one rank.
*Collective*: one bare `all_to_all_single` of as many bytes as enter, in equal pieces, own piece included."""


@dataclass
class Seen:
    """The measurements of one stage of one contender on one rank."""

    entering: int
    written: int = 0
    collectives: int = 0
    host_syncs: int = 0
    spent: list[Timing] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)  # a warm copy of `entering` bytes
    collective: list[float] = field(default_factory=list)  # a bare all-to-all of as many
    work: HostWork | None = None


@dataclass
class OnRank:
    """The measurements of one rank."""

    stages: dict[str, Seen]
    syncs_in_checks: dict[str, int] | None = None


def cell_rows(case: Case, ranks: list[OnRank]) -> dict[str, Any]:
    """Returns a row for each stage, contender and form: the busiest rank's counts and the slowest rank's times."""
    stages = [rank.stages for rank in ranks]
    times = {key: _slowest(stages, key, "wall") for key in stages[0]}

    def over(peer: str, stage: str, key: str, form: str) -> dict[str, float] | None:
        theirs = f"{stage}|{peer}|{form}"
        return spread(times[theirs] / times[key]) if theirs in times and theirs != key else None

    rows = []
    for stage in STAGES:
        for key in (key for key in times if key.startswith(f"{stage}|")):
            _, name, form = key.split("|")
            busiest = max((rank[key] for rank in stages), key=lambda seen: seen.written)
            copy, bare = (
                np.max([getattr(rank[key], what) for rank in stages], axis=0) for what in ("copy", "collective")
            )  # fmt: skip
            work = stages[0][key].work or HostWork(0, 0, None)
            rows.append({
                "stage": stage,
                "contender": name,
                "gradients": form,
                "loop_over_this": over(LOOP, stage, key, form),
                "megatron_over_this": over(MEGATRON, stage, key, form),
                "over_copy": spread(times[key] / copy),
                "over_collective": spread(times[key] / bare),
                "host_us": spread(_slowest(stages, key, "host") * 1e6),
                "calls": work.calls,
                "operators": work.operators,
                "launches": work.launches,
                "local_over_copy": spread(_slowest(stages, key, "busy") / copy),
                "copy_passes": busiest.written / busiest.entering,
                "bytes_written": busiest.written,
                "collectives": busiest.collectives,
                "host_syncs": busiest.host_syncs,
                "milliseconds": spread(times[key] * 1e3),
                "wire_milliseconds": spread(_slowest(stages, key, "wall_wire") * 1e3),
                "local_milliseconds": spread(_slowest(stages, key, "busy") * 1e3),
            })  # fmt: skip
    return {
        "ranks": case.cp,
        "tokens": case.packing.total,
        "documents": len(case.lengths),
        "lengths": list(case.lengths),
        **{f"{_peer(peer)}_over_ours": _both_ways(times, peer) for peer in TARGETS},
        "rows": rows,
    }


def _peer(name: str) -> str:
    return {MEGATRON: "megatron"}.get(name, name)


def _slowest(stages: Sequence[Mapping[str, Seen]], key: str, what: str) -> Any:
    return np.max([[getattr(spent, what) for spent in rank[key].spent] for rank in stages], axis=0)


def _both_ways(times: Mapping[str, Any], peer: str) -> dict[str, Any]:
    """Returns the peer's time over ours, with gradients in separate tensors; empty if the peer was not run."""
    found: dict[str, Any] = {}
    for way, form in (("inbound", SEPARATE), ("outbound", "")):
        stages = (f"{way} forward", ""), (f"{way} backward", form)
        theirs = [times[key] for stage, of in stages if (key := f"{stage}|{peer}|{of}") in times]
        if not theirs:
            continue
        for name in dict.fromkeys(key.split("|")[1] for key in times if key.startswith(way)):
            if name in TARGETS:
                continue
            own = [times[f"{stage}|{name}|{of}"] for stage, of in stages]
            pairs = [*zip(theirs, own, strict=True), (sum(theirs), sum(own))]
            found[f"{way}, {name}"] = {
                direction: spread(their / mine) for direction, (their, mine) in zip(BOTH, pairs, strict=True)
            }
    return found


def exchange_ratios(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns geometric means over the cells, the targets, and the cells."""

    def means(peer: str) -> dict[str, Any]:
        of_cells = [cell[f"{_peer(peer)}_over_ours"] for cell in cells]
        return {
            name: {way: statistics.geometric_mean(ratios[name][way]["median"] for ratios in of_cells) for way in BOTH}
            for name in of_cells[0]
        }

    found = {peer: means(peer) for peer in TARGETS}
    aim = f"inbound, {LAYOUTS[0]}, {ALL_SECTIONS}"
    return {
        **{f"{_peer(peer)}_over_ours": ratios for peer, ratios in found.items()},
        "exchange_targets": {
            _peer(peer): {"at_least": limit, "found": found[peer][aim], "met": found[peer][aim]["both"] >= limit}
            for peer, limit in TARGETS.items()
            if found[peer]
        },
        "limits": _limits(cells),
        "cells": cells,
    }


def _limits(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns our worst ratios to megatron-core and a bare collective, among all stages, directions and cells.

    Gradients inbound are in separate tensors, as Gated DeltaNet's are.
    """
    forms = {"inbound forward": "", "inbound backward": SEPARATE, "outbound forward": "", "outbound backward": ""}
    own = [
        {**row, "cell": _cell_name(cell)}
        for cell in cells
        for row in cell["rows"]
        if row["contender"] not in TARGETS and row["gradients"] == forms[row["stage"]]
    ]

    def worst(rows: list[dict[str, Any]], ratio: str, choose: Any, limit: float, name: str) -> dict[str, Any] | None:
        rows = [row for row in rows if row[ratio] is not None]
        if not rows:
            return None
        row = choose(rows, key=lambda row: row[ratio]["median"])
        found = row[ratio]["median"]
        met = found >= limit if choose is min else found <= limit
        return {name: limit, "found": found, "met": met, "where": f"{row['stage']}, {row['contender']}, {row['cell']}"}

    return {
        "megatron_over_this": worst(own, "megatron_over_this", min, LEAST_OVER_MEGATRON, "at_least"),
        "over_collective": worst(own, "over_collective", max, MOST_OVER_COLLECTIVE, "at_most"),
    }


def _of_copies(data: dict[str, Any]) -> str:
    return "" if data["codec"] == "none" else " where nothing is coded"


def text(case: Case, data: dict[str, Any]) -> str:
    """Returns the report as text."""
    sizes = f"{case.head_dim}/{case.value_head_dim}"
    chunks = counted(data["head_chunks"], "head chunk")
    wire = f"{chunks}, transport {data['transport']}, codec {data['codec']}"
    versions = f"torch {data['torch']}, megatron-core {data['megatron_core'] or 'none'}, python {data['python']}"
    return "\n".join([
        f"gdn, heads {case.heads}/{case.groups} of {sizes}, {data['dtype']} on {data['device']}, {wire}, "
        f"{data['repeats']} repeats; {versions}, {data['cores']} cores",
        *(f"{name} was not run: {reason}." for name, reason in data["not_run"].items()),
        "",
        *_verdicts(data),
        "",
        f"### Local part, {case.packing.total // case.cp} tokens a rank, cp {case.cp}",
        "",
        *local_table(data),
        "",
        "### One exchange",
        "",
        *_cells_table(data),
        "",
        *_means_table(data),
        "",
        f"### Counts, {_cell_name(data['cells'][0])}",
        "",
        *_counts_table(data["cells"][0]["rows"]),
        "",
        *(
            [f"Not in the tables: Megatron's checks of the offsets before each exchange wait: "
             f"{data['megatron_host_syncs_in_checks']}"] if data["megatron_host_syncs_in_checks"] else []
        ),
        LEGEND,
    ])  # fmt: skip


def _verdicts(data: dict[str, Any]) -> list[str]:
    """Says for each target whether it is met, and names the cell that is furthest from it."""
    local = [
        f"Local part, {what}, {ALL_SECTIONS}: at most {found['worst']:.2f} of a copy, at most "
        f"{found['at_most']} is the target{_of_copies(data)}: {_met(found)}."
        for what, found in data["local_targets"].items()
    ]
    words = {
        "megatron_over_this": f"{MEGATRON} / ours, the least of all cells and directions",
        "over_collective": "Ours / a bare all_to_all_single of as many bytes, the most of all cells and directions",
    }
    limits = [
        f"{words[name]}: {found['found']:.2f} ({found['where']}), "
        f"{'at least' if 'at_least' in found else 'at most'} {found.get('at_least', found.get('at_most'))} is the "
        f"target{_of_copies(data)}: {_met(found)}."
        for name, found in data["limits"].items()
        if found
    ]
    means = [
        f"{peer} / ours, inbound, {LAYOUTS[0]}, {ALL_SECTIONS}, forward and backward, geometric mean: "
        f"{each['found']['both']:.2f}, "
        f"at least {each['at_least']:g} is the target{_of_copies(data)}: {_met(each)}."
        for peer, each in data["exchange_targets"].items()
    ]
    return [*local, *limits, *means]


def _met(found: Mapping[str, Any]) -> str:
    return "met" if found["met"] else "NOT met"


def _cell_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['ranks']} ranks, {cell['tokens']} tokens in {cell['documents']} documents"


def _cells_table(data: dict[str, Any]) -> list[str]:
    """Returns a row for each cell, contender and way, with forward and backward beside each other."""
    columns = (
        "forward ms", "of it local", "backward ms", "of it local", "forward / copy", "backward / copy",
        "forward / collective", "backward / collective", "loop / this", f"{MEGATRON} / this",
    )  # fmt: skip
    lines = []
    for cell in data["cells"]:
        rows = {(row["stage"], row["contender"], row["gradients"]): row for row in cell["rows"]}
        of_cell = []
        for way, form in (("inbound", SEPARATE), ("outbound", "")):
            for name in [contender for stage, contender, _ in rows if stage == f"{way} forward"]:
                both = [rows[f"{way} forward", name, ""], rows[f"{way} backward", name, form]]
                key = f"{way}, {name}"
                ratios = [cell[f"{_peer(peer)}_over_ours"].get(key) for peer in TARGETS]
                of_cell.append([
                    key,
                    *(f"{row[what]['median']:.1f}" for row in both
                      for what in ("milliseconds", "local_milliseconds")),
                    *(f"{row['over_copy']['median']:.1f}" for row in both),
                    *(f"{row['over_collective']['median']:.2f}" for row in both),
                    *(formatted(ratio["both"]) if ratio else "" for ratio in ratios),
                ])  # fmt: skip
        lines += [f"{_cell_name(cell)}:", "", *table(("",), columns, of_cell), ""]
    return lines[:-1]


def _means_table(data: dict[str, Any]) -> list[str]:
    found = {peer: data[f"{_peer(peer)}_over_ours"] for peer in TARGETS}
    if not found[MEGATRON]:
        return ["No peer was run."]
    columns = [word for peer in TARGETS for word in (f"{peer} / ours forward", *BOTH[1:])]
    rows = [
        [name, *(f"{ratios[name][way]:.2f}" for ratios in found.values() for way in BOTH)] for name in found[MEGATRON]
    ]
    return ["Geometric means over the cells:", "", *table(("",), columns, rows)]


def _counts_table(rows: list[dict[str, Any]]) -> list[str]:
    columns = ("passes", "MiB", "collectives", "syncs", "host us", "calls", "operators", "launches")
    cells = [
        [
            row["stage"], row["contender"], row["gradients"], f"{row['copy_passes']:.2f}",
            f"{row['bytes_written'] / 2**20:.1f}", str(row["collectives"]), str(row["host_syncs"]),
            f"{row['host_us']['median']:.0f}", str(row["calls"]), str(row["operators"]),
            "" if row["launches"] is None else str(row["launches"]),
        ]
        for row in rows
    ]  # fmt: skip
    return table(("", "", "gradients"), columns, cells)
