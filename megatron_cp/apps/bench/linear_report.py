"""The ratios and tables of `megatron-cp bench linear`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.saved_bytes import Saved
from megatron_cp.apps.bench.segments import NUM_PIECES, PLACES, RANKS
from megatron_cp.apps.bench.spread import formatted, spread, table
from megatron_cp.apps.bench.timing import BOTH, DIRECTIONS, Timing
from megatron_cp.plan import KINDS, MAMBA
from megatron_cp.testing import Case

LAYERS = ("gdn", "kda", "mamba", "conv1d")
MODES = ("headwise", "chunkwise")
TARGET = 1.35  # time of a middle segment over that of a whole document, forward and backward together

LEGEND = f"""\
A rank's tokens: {{rule}}, on one thread and without transfers: other ranks send zeros.
first, middle, last: the tokens as that segment of a document over {RANKS} ranks, over the plain kernel on the same
tokens as one document. few: the tokens as up to {NUM_PIECES} pieces, of which the first continues a document and the
last is continued, over the plain kernel on the same pieces as whole documents. {MEGATRON}: its own function over ours,
on one document. Whole mixers, on all ranks: local leaves transfers out; wall is by the clock, with transfers and with
all else that shares the cores; both are the slowest rank's. wait: the share of all ranks' wall time spent starting and
awaiting transfers. sent: MiB to other ranks, by the rank that sends most, counted as they were sent. saved: KiB a
token, of all ranks, that autograd keeps from forward to backward, with the mixer's inputs and without its parameters.
Medians [quartiles] over the repeats, of ratios within one repeat. On the CPU local time is that of a rank's own thread,
which others on the same core do not change; on CUDA it is that of its stream."""


@dataclass
class Seen:
    """The measurements of one rank.

    Attributes:
        local: timings of the first rank's work on its own tokens, by their place in documents and direction.
        spent: timings of whole mixers in every repeat, by mode and direction.
        not_run: reasons of peers that were not run.
    """

    kernel: str
    local: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    spent: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


def ratios(cases: dict[str, Case], ranks: list[Seen]) -> dict[str, Any]:
    """Returns the ranks' results, ratios first."""
    local, plans = ranks[0].local, {mode: case.plan() for mode, case in cases.items()}
    item_size = cases["chunkwise"].dtype.itemsize
    tokens = sum(cases["chunkwise"].lengths)

    def alone(name: str, way: str) -> Any:
        return _summed(way, lambda one: np.array([spent.busy for spent in local[name, one]]))

    def slowest(mode: str, way: str, what: str) -> Any:
        return _summed(
            way, lambda one: np.array([[getattr(s, what) for s in rank.spent[mode, one]] for rank in ranks]).max(0)
        )

    def over(name: str, other: str) -> dict[str, Any]:
        return {way: spread(alone(name, way) / alone(other, way)) for way in BOTH}

    def headwise_over(what: str) -> dict[str, Any]:
        return {way: spread(slowest("headwise", way, what) / slowest("chunkwise", way, what)) for way in BOTH}

    def waiting(mode: str, way: str) -> dict[str, float]:
        wire, wall = (
            np.array([[getattr(s, what) for s in rank.spent[mode, way]] for rank in ranks]).sum(0)
            for what in ("wall_wire", "wall")
        )
        return spread(wire / wall)

    def milliseconds(what: str) -> dict[str, Any]:
        return {mode: {way: spread(slowest(mode, way, what) * 1e3) for way in BOTH} for mode in MODES}

    def of_directions(value: Callable[[str, str], Any]) -> dict[str, Any]:
        return {mode: {way: value(mode, way) for way in DIRECTIONS} for mode in MODES}

    def saved(what: str) -> dict[str, int]:
        return {mode: sum(getattr(rank.saved[mode], what) for rank in ranks) for mode in MODES}

    kept = saved("numbers")
    over_plain = {name: over(name, "few plain" if name == "few" else "plain") for name in PLACES}
    middle = over_plain["middle"]["both"]["median"]
    return {
        "chunkwise_over_plain": over_plain,
        "target": {"middle_both_at_most": TARGET, "met": middle <= TARGET},
        "megatron_over_ours": over(MEGATRON, "plain") if (MEGATRON, "forward") in local else None,
        "headwise_over_chunkwise": headwise_over("wall"),
        "headwise_over_chunkwise_local": headwise_over("busy"),
        "wait_share": of_directions(waiting),
        "saved_headwise_over_chunkwise": kept["headwise"] / kept["chunkwise"],
        "saved_bytes_per_token": {mode: kept[mode] / tokens for mode in MODES},
        "saved_mask_bytes": saved("masks"),
        "saved_index_bytes": saved("indices"),
        "shared_table_bytes": saved("tables"),
        "local_ms": {
            name: {way: spread(alone(name, way) * 1e3) for way in BOTH} for name in dict.fromkeys(n for n, _ in local)
        },
        "busy_ms": milliseconds("busy"),
        "transfer_ms": milliseconds("wall_wire"),
        "wall_ms": milliseconds("wall"),
        "bytes_sent_per_rank": of_directions(lambda mode, way: [rank.spent[mode, way][-1].sent for rank in ranks]),
        "bytes_planned_per_rank": of_directions(
            lambda mode, way: plans[mode].bytes_sent(item_size, forward=way == "forward")
        ),
    }


def _summed(way: str, value: Callable[[str], Any]) -> Any:
    return sum(value(one) for one in DIRECTIONS) if way == "both" else value(way)


def text(case: Case, data: dict[str, Any]) -> str:
    """Returns the report as text."""
    dtype = str(case.dtype).removeprefix("torch.")
    what = "the rule, conv and gates apart" if KINDS[case.layer].has_state else "the convolution"
    target = data["target"]
    middle, few = (data["chunkwise_over_plain"][name]["both"]["median"] for name in ("middle", "few"))
    return "\n".join([
        f"{case.layer} cp={data['cp']} {case.layout}, {sum(data['lengths'])} tokens in {len(data['lengths'])} "
        f"documents, {_shape(case)}, {dtype} on {data['device']}, kernel {data['kernel']}, {data['repeats']} repeats; "
        f"torch {data['torch']}, {data['cores']} cores",
        "",
        *_local_table(data),
        "",
        f"Middle segment, both directions: {middle:.2f} of a whole document, at most {target['middle_both_at_most']} "
        f"is the target: {'met' if target['met'] else 'NOT met'}. Few pieces continue: {few:.2f}.",
        *(f"{name} was not run: {reason}." for name, reason in data["not_run"].items()),
        "",
        *_mixer_table(data),
        "",
        "Index tables that a layer saves: "
        + ", ".join(f"{mode} {count} bytes" for mode, count in data["saved_index_bytes"].items())
        + "; of the batch's, made once, autograd refers to "
        + ", ".join(f"{count}" for count in data["shared_table_bytes"].values())
        + ".",
        LEGEND.format(rule=what),
    ])  # fmt: skip


def _shape(case: Case) -> str:
    if not KINDS[case.layer].has_state:
        return f"{case.heads * case.value_head_dim} channels, {case.conv_width} taps"
    if KINDS[case.layer] is MAMBA:
        return f"{case.heads} heads of {case.value_head_dim}, {case.groups} groups of {case.head_dim}"
    return f"heads {case.heads}/{case.groups} of {case.head_dim}/{case.value_head_dim}"


def _local_table(data: dict[str, Any]) -> list[str]:
    columns, rows = (*BOTH, *(f"{way} ms" for way in DIRECTIONS)), []
    names = {"plain": "one document", "few plain": "whole pieces", MEGATRON: f"one document, {MEGATRON}"}
    ratios = {**data["chunkwise_over_plain"], MEGATRON: data["megatron_over_ours"]}
    for name, milliseconds in data["local_ms"].items():
        ratio = ratios.get(name)
        cells = [formatted(ratio[way]) if ratio else "" for way in BOTH]
        cells += [f"{milliseconds[way]['median']:.1f}" for way in DIRECTIONS]
        rows.append([names.get(name, name), *cells])
    return table(("a rank's tokens",), columns, rows)


def _mixer_table(data: dict[str, Any]) -> list[str]:
    columns = ("local ms", "transfers ms", "wall ms", "wait", "sent", "saved")
    rows = [
        [
            mode, way,
            *(f"{data[name][mode][way]['median']:.1f}" for name in ("busy_ms", "transfer_ms", "wall_ms")),
            formatted(data["wait_share"][mode][way], percent=True),
            f"{max(data['bytes_sent_per_rank'][mode][way]) / 2**20:.2f}",
            f"{data['saved_bytes_per_token'][mode] / 2**10:.2f}" if way == "forward" else "",
        ]
        for mode in MODES for way in DIRECTIONS
    ]  # fmt: skip
    ratios = {"local": "headwise_over_chunkwise_local", "wall": "headwise_over_chunkwise"}
    shares = [
        f"{what} " + ", ".join(f"{way} {formatted(data[name][way])}" for way in BOTH) for what, name in ratios.items()
    ]
    saved = f"saved {data['saved_headwise_over_chunkwise']:.2f}"
    return [*table(("mixer", ""), columns, rows), "", f"headwise / chunkwise: {'; '.join([*shares, saved])}."]
