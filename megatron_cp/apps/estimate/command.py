"""`megatron-cp plan --whole`: prices a whole model's step for every size and layout, and names the best."""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_cp import __version__
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_layers import FULL, RECOMPUTATION, LinearMixer
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import RUNTIME_BYTES, SHARDINGS, StepChoice, StepPrice, predict_step, scheme_of
from megatron_cp.apps.estimate.together import chunks_of
from megatron_cp.cli import MAX_TOKENS, Report, document_lengths, memory_size, positive
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask, Packing
from megatron_cp.page import check_page, save_page
from megatron_cp.plan import AUTO, MODES, Plan, counted, describe_ties, size, tied
from megatron_cp.planner import (
    CHOICES,
    Machine,
    Span,
    Topology,
    described,
    layout_by_name,
    machine,
    require,
    shapes_by_rank,
    timelines,
)

_MOST_TRIES, _ROUNDED = 5, 1024  # tries to find a length that fits; it is a multiple of so many tokens
_MOST_EVENTS = 60_000  # events in a report's timeline, so that a browser opens it at once
_OF_A_LAYER = (
    "heads", "kv_heads", "key_heads", "groups", "head_dim", "value_dim", "state", "conv_width", "hidden_size",
    "softmax_scale", "learned_sink", "softcap", "dropout",
)  # fmt: skip


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `plan` that concern a whole model's step."""
    group.add_argument("--whole", action="store_true", help="price a step of the whole --model (default: qwen3-next)")
    group.add_argument(
        "--fit",
        type=memory_size,
        metavar="SIZE",
        help="with --whole: memory of a rank with its unit, such as 70GiB or 70GB, or in bytes, such as 70e9 (default: "
        "--gpu's); the exit status is 3 if nothing fits",
    )
    group.add_argument(
        "--sharding", choices=SHARDINGS, help="with --whole: sharding of weights and optimizer (default: zero3)"
    )
    group.add_argument("--replicas", type=positive, help="with --whole: number of data-parallel groups (default: 1)")
    group.add_argument(
        "--recompute",
        choices=RECOMPUTATION,
        help="with --whole: recomputation (default: selective, or full if that does not fit)",
    )
    group.add_argument("--report", metavar="FILE.html", help="with --whole: save a page that shows the step")


def run_whole(args: argparse.Namespace) -> Report:
    """Prices every size and layout, and names the best that fits."""
    for option in _OF_A_LAYER:
        if getattr(args, option):
            allowed = "only without --whole, which prices all layers of --model"
            raise ArgumentError(f"--{option.replace('_', '-')}", getattr(args, option), allowed)
    if args.dtype not in ("bfloat16", "float16"):
        raise ArgumentError(
            "--dtype", args.dtype, "bfloat16 or float16 with --whole, which counts two bytes an element"
        )
    if args.report is not None:
        check_page("--report", args.report)
    args.cp = list(dict.fromkeys(args.cp))
    started = time.perf_counter()
    model, on = read_model(args.model or "qwen3-next"), machine(args.gpu)
    if args.mask is not None:
        model = model.with_mask(args.mask)
    linear = any(isinstance(block.mixer, LinearMixer) for block in model.blocks)
    if args.scheme in MODES and not linear:
        raise ArgumentError("--scheme", args.scheme, f"a scheme of attention: {model.name} has no linear layer")
    lengths = document_lengths(args, max(args.cp))
    limit = on.hardware.memory if args.fit is None else args.fit
    rows = _rows(args, model, on, Packing(lengths), limit)
    if not rows:
        raise ArgumentError("--cp", args.cp, "a size that some scheme can run with these heads")
    fitting = [row for row in rows if row.memory.total <= limit]
    best = min(fitting, key=lambda row: row.step / row.tokens * row.choice.cp) if fitting else None
    if args.fit is not None and fitting:
        smallest = min(row.choice.cp for row in fitting)
        best = min((row for row in fitting if row.choice.cp == smallest), key=lambda row: row.step)
    milliseconds = (time.perf_counter() - started) * 1e3
    chosen = best or min(rows, key=lambda row: row.memory.total)
    topology = _topology(args, on, chosen.choice.cp)
    data = {
        "model": model.name, "parameters": model.parameters, "active_parameters": model.active_parameters,
        "tokens": int(sum(lengths)), "documents": len(lengths), "machine": described(on, topology),
        "memory_limit": limit, "fits": best is not None, "take_this": best.flags if best else None,
        "best": _as_json(chosen, on, limit), "rows": [_as_json(row, on, limit) for row in rows],
        "longest": _longest(args, model, on, chosen, lengths, limit), "plan_ms": milliseconds,
    }  # fmt: skip
    verdict = _verdict(args, rows, best, limit, data)
    text = [*verdict, "", *_text(args, model, lengths, on, rows, best, data)]
    if args.report is not None:
        page = report_of(model, Packing(lengths), on, topology, rows, chosen, limit, verdict[0])
        save_page(page, args.report)
        text.append(f"report: {args.report}")
    return Report("\n".join(text), data, fits=best is not None)


def _rows(args: argparse.Namespace, model: ModelSpec, on: Machine, packing: Packing, limit: float) -> list[StepPrice]:
    names = CHOICES if args.layout in (None, AUTO) else (require("layout", args.layout),)
    rows = []
    for cp, name in itertools.product(args.cp, names):
        try:
            rows.append(_row(args, model, on, packing, cp, name, limit))
        except ArgumentError as error:
            if error.argument not in ("scheme", "ulysses_degree", "head_chunks") or len(args.cp) == 1:
                raise
    return rows


def _row(
    args: argparse.Namespace, model: ModelSpec, on: Machine, packing: Packing, cp: int, name: str, limit: float
) -> StepPrice:
    """Returns the price of a size and layout, with all layers recomputed if it would not fit otherwise."""
    scheme, mode = _asked(args)
    mask = None if args.mask is None else Mask.named(packing, args.mask)
    topology = _topology(args, on, cp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        layout = layout_by_name(name, packing, cp, align=args.align, seed=args.seed, mask=mask)
        choice = StepChoice(
            cp, name, scheme, args.ulysses_degree, mode, args.recompute or "selective", args.head_chunks,
            args.transport, args.codec, args.sharding or "zero3", args.replicas or 1, args.gpu,
            args.search, args.search_cache,
        )  # fmt: skip
        row = predict_step(model, layout, choice, on, topology)
        if row.memory.total > limit and args.recompute is None:
            row = predict_step(model, layout, replace(choice, recompute=FULL), on, topology)
    return row


def _asked(args: argparse.Namespace) -> tuple[str, str]:
    """Returns the scheme of attention and the mode of linear layers; `--scheme` names either."""
    if args.scheme in MODES:
        return "auto", args.scheme
    return args.scheme or "auto", "auto"


def _topology(args: argparse.Namespace, on: Machine, cp: int) -> Topology:
    return on.topology(cp, args.hosts)


def _as_json(row: StepPrice, on: Machine, limit: float) -> dict[str, Any]:
    return {
        "cp": row.choice.cp, "layout": row.choice.layout, "recompute": row.choice.recompute,
        "plans": [
            {"kind": plan.kind, "scheme": scheme_of(plan), "ulysses_degree": plan.ulysses_degree, "layers": count}
            for plan, count in row.plans
        ],
        "milliseconds": _parts(row) | {"step": row.step},
        "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu, "mfu": row.mfu(on.hardware.matrix_peak),
        "bytes": _bytes(row), "fits": row.memory.total <= limit, "flags": row.flags,
    }  # fmt: skip


def _parts(row: StepPrice) -> dict[str, float]:
    return {
        "attention": row.attention, "linear layers": row.linear, "products": row.products,
        "exposed transfers": row.exposed, "imbalance": row.imbalance, "memory traffic": row.others,
        "sharded weights": row.shards,
    }  # fmt: skip


def _bytes(row: StepPrice) -> dict[str, float]:
    memory = row.memory
    return {
        "parameters": memory.parameters, "optimizer": memory.optimizer, "activations": memory.activations,
        "buffers": memory.buffers,
    }  # fmt: skip


def _longest(
    args: argparse.Namespace, model: ModelSpec, on: Machine, row: StepPrice, lengths: Sequence[int], limit: float
) -> int:
    """Returns the number of tokens that fit this candidate with the documents scaled to them; 0 if none is found.

    A second price confirms that they fit; it is left out if tiles are searched, and the number is then approximate.
    """
    again = argparse.Namespace(**{**vars(args), "recompute": row.choice.recompute})
    tokens, found = sum(lengths), row
    for _ in range(_MOST_TRIES):
        fixed = found.memory.parameters + found.memory.optimizer + RUNTIME_BYTES
        growing = found.memory.total - fixed
        tokens = int(min(tokens * max(limit - fixed, 0.0) / growing, MAX_TOKENS)) if growing > 0 else 0
        tokens -= tokens % _ROUNDED if tokens > _ROUNDED else 0
        if args.search or tokens < row.choice.cp:
            return tokens if tokens >= row.choice.cp else 0
        edges = np.round(np.cumsum(lengths) / sum(lengths) * tokens).astype(int)
        packing = Packing(np.diff(edges, prepend=0))
        found = _row(again, model, on, packing, row.choice.cp, row.choice.layout, limit)
        if found.memory.total <= limit:
            return tokens
    return 0


def _text(
    args: argparse.Namespace, model: ModelSpec, lengths: Sequence[int], on: Machine, rows: list[StepPrice],
    best: StepPrice | None, data: dict[str, Any],
) -> list[str]:  # fmt: skip
    choice, middle = rows[0].choice, sorted(lengths)[len(lengths) // 2]
    drawn = "given" if args.lengths is not None else f"drawn from the corpus {args.corpus}"
    drawn += " and scaled" if args.lengths is None and args.tokens_per_rank is not None else ""
    return [
        f"{model.name}: {model.parameters / 1e9:.2f}e9 parameters, of which a token meets "
        f"{model.active_parameters / 1e9:.2f}e9 in products; {model.source}",
        f"a step of one context-parallel group: {counted(sum(lengths), 'token')} in "
        f"{counted(len(lengths), 'document')}, {drawn}; median {middle}, longest {max(lengths)}",
        f"predicted for {data['machine']}; attention: {on.hardware.sources.get('attention', 'given')}",
        f"sharding {choice.sharding} over {counted(choice.replicas, 'replica')} of the group's ranks",
        "",
        *_table(rows, best, on),
        "",
        "Times are milliseconds of one forward and backward on the slowest rank. attention, linear: kernels "
        "of the mean rank; products: of weights; exposed: transfers of context parallelism that no kernel overlaps; "
        "imbalance: kernels of the busiest rank beyond the mean; traffic: norms and activations; shards: "
        "gathers and sums of sharded weights and gradients that nothing overlaps. Pipelines, tensor parallelism "
        "and experts' exchanges are left out. Memory counts parameters, gradients, optimizer, "
        "activations, buffers, and 2.8 GiB for CUDA and its libraries.",
    ]


def _verdict(
    args: argparse.Namespace, rows: list[StepPrice], best: StepPrice | None, limit: float, data: dict[str, Any]
) -> list[str]:
    """Returns what to take, its predicted time and memory, and the tokens that would fit."""
    if best is None:
        return [_nearest(args, rows, limit, data)]
    faster = max((row for row in rows if row.memory.total <= limit), key=lambda row: row.tokens_per_second_per_gpu)
    gain = faster.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu
    why = "the smallest size that fits" if args.fit is not None else "the most tokens/s a GPU of those that fit"
    if args.fit is not None and gain > 1.005:
        why += f"; cp {faster.choice.cp} has {gain:.2f} times its throughput a GPU"
    sizes = [best.choice.cp] if args.fit is not None else args.cp
    others = {
        f"cp {row.choice.cp} in layout {row.choice.layout}": row.tokens_per_second_per_gpu
        for row in rows
        if row is not best and row.memory.total <= limit and row.choice.cp in sizes
    }
    why += describe_ties(tied(others, best.tokens_per_second_per_gpu))
    about, longest = "about " if args.search else "", counted(data["longest"], "token")
    return [
        f"take this: {best.flags}",
        f"step: {best.step:,.1f} ms predicted, {best.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
        f"{size(int(best.memory.total))} of {size(int(limit))} a rank; up to {about}{longest} "
        "fit this way",
        f"why: {why}",
    ]


def _nearest(args: argparse.Namespace, rows: list[StepPrice], limit: float, data: dict[str, Any]) -> str:
    """Names the candidate that is nearest to fitting, and the options that are left to try."""
    near = min(rows, key=lambda row: row.memory.total)
    fixed = near.memory.parameters + near.memory.optimizer
    text = (
        f"nothing fits {size(int(limit))}: the nearest is cp {near.choice.cp}, {near.choice.layout}, which takes "
        f"{size(int(near.memory.total))}"
    )
    remedies = ["more ranks or replicas"] + ["--sharding zero3"] * (near.choice.sharding != "zero3")
    remedies += ["--recompute full"] * (near.choice.recompute != FULL)
    if fixed >= limit:
        text += f", {size(int(fixed))} of it weights, gradients and optimizer"
    else:
        about = "about " if args.search else ""
        text += f"; {about}{counted(data['longest'], 'token')} would fit"
    return f"{text}. Use {' or '.join(remedies)}."


def _table(rows: list[StepPrice], best: StepPrice | None, on: Machine) -> list[str]:
    heads = [
        "cp", "layout", "attention by", "linear by", "recompute", "attention", "linear", "products", "exposed",
        "imbalance", "traffic", "shards", "step ms", "tokens/s/GPU", "MFU", "GiB a rank", "",
    ]  # fmt: skip
    cells = [heads]
    for row in rows:
        attention, linear = (
            [plan for plan, _ in row.plans if (plan.attend is None) == is_linear] for is_linear in (False, True)
        )
        cells.append(
            [
                str(row.choice.cp), row.choice.layout, _names(attention), _names(linear), row.choice.recompute,
                *(f"{value:,.1f}" for value in _parts(row).values()), f"{row.step:,.1f}",
                f"{row.tokens_per_second_per_gpu:,.0f}", f"{row.mfu(on.hardware.matrix_peak):.0%}",
                f"{row.memory.total / 2**30:.1f}", "<-" if row is best else "",
            ]
        )  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if 1 <= number <= 4 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _names(plans: Sequence[Plan]) -> str:
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
        "title": f"{model.name}, {packing.total:,} tokens, cp {chosen.choice.cp}",
        "summary": summary,
        "facts": [
            ["machine", described(on, topology)],
            ["documents", f"{packing.num_documents}, longest {packing.lengths.max()}"],
            ["sharding", f"{chosen.choice.sharding}, {counted(chosen.choice.replicas, 'replica')}"],
            ["recomputation", chosen.choice.recompute],
            ["work by rank", "time in kernels, in one forward and one backward of all layers"],
            ["not priced", "pipelines, tensor parallelism, experts' exchanges, the host's own time"],
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
        "name": f"cp {row.choice.cp}, {row.choice.layout}, " + ", ".join(_name(plan) for plan, _ in row.plans),
        "kind": row.choice.layout, "cp": row.choice.cp, "flags": row.flags,
        "milliseconds": _parts(row) | {"step": row.step},
        "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu, "mfu": row.mfu(on.hardware.matrix_peak),
        "bytes": _bytes(row), "limit_bytes": limit, "chosen": row is chosen,
        "why_not": "" if row is chosen else "slower per token and GPU" if fits else "does not fit the memory",
    }  # fmt: skip


def _work(chosen: StepPrice, on: Machine, topology: Topology) -> list[float]:
    """Returns each rank's milliseconds of kernels in all layers."""
    total = np.zeros(chosen.choice.cp)
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
