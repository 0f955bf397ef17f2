"""`megatron-cp plan`: explains who owns what, what is sent, and how even the work is."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_cp.cli.applications import application
from megatron_cp.cli.case_options import (
    BALANCED,
    LEFT_OPTIONS,
    add_batch_arguments,
    add_layer_arguments,
    described_documents,
    document_lengths,
    layer_case_of,
)
from megatron_cp.cli.parser import cp_sizes, flags, grids
from megatron_cp.cli.paths import check_paths
from megatron_cp.cli.plan_images import check_images, images_of
from megatron_cp.cli.plan_report import save_plan
from megatron_cp.cli.plan_table import BOTH, codec_of, not_as_asked, priced_as, schemes_of, table_of
from megatron_cp.cli.report import Report
from megatron_cp.cli.shapes import LayerShape, described_layer, layers_of
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask
from megatron_cp.page import check_charts
from megatron_cp.plan.describe import counted, describe_ties, size, tied
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import AUTO, may_assign_tiles
from megatron_cp.plan.transport import knows_hosts
from megatron_cp.planner.layouts import choose_layout
from megatron_cp.planner.picture import save_picture
from megatron_cp.planner.predict import machine, presets
from megatron_cp.planner.predict.machine_files import SAFE
from megatron_cp.softmax.options import checked_options
from megatron_cp.testing.case import DTYPES, LayerCase

EXAMPLES = (
    "plan --cp 8 --model llama3-8b --lengths 100k,20k,8k",
    "plan --whole --model qwen3-next --cp 8,16 --gpu h100 --lengths 256k",
)
# The options that --help lists.
COMMON = (
    "cp", "report", "layer", "model", "heads", "kv_heads", "head_dim", "scheme", "mask", "lengths", "documents",
    "layout", "gpu", "whole", "fit", "tp",
)  # fmt: skip
LEFT = {**LEFT_OPTIONS, **application("estimate").LEFT}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(*flags("cp"), type=cp_sizes, metavar="N,N,...", help="context-parallel sizes (default: 4)")
    add_layer_arguments(parser, dtype="bfloat16")
    add_batch_arguments(parser, corpus="default")
    parser.add_argument(
        "--images", type=grids, metavar="TxRxC,...",
        help="with a --model that has a vision tower: frames x rows x columns of patches of each image or video "
        "(image_grid_thw), such as 1x64x48; a number of images where all have one size",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture of each rank's tokens; needs matplotlib")
    report = "save a page with candidates, tokens of each rank, streams and traffic; needs plotly"
    parser.add_argument("--report", metavar="FILE.html", help=report)
    group = parser.add_argument_group("prediction")
    group.add_argument(
        *flags("gpu"),
        metavar="NAME-OR-FILE",
        help=f"machine to predict for: {', '.join(presets())}, or a machine file (default: {SAFE})",
    )
    application("estimate").add_arguments(group)
    for action in parser._actions:
        if action.dest == "hosts":
            action.help = (
                "number of hosts, which share the ranks evenly (default: full hosts; 2 with --transport hierarchical)"
            )


def run(args: argparse.Namespace) -> Report:
    """Plans, explains and draws."""
    check_paths(args)
    args.cp = args.cp or [4]
    _check_hosts(args)
    check_images(args)
    _announce_search(args)
    if args.whole:
        _refuse(args, ("plot", "parents", "report"), "without --whole")
        report: Report = application("estimate").run_whole(args)
        return report
    _refuse(args, application("estimate").WHOLE, "with --whole")
    if len(args.cp) > 1:
        _refuse(args, ("plot", "report"), "with one --cp")
    if args.report is not None:
        check_charts("report", args.report)
    layers = layers_of(args)
    return _of_one_size(args, args.cp[0], layers) if len(args.cp) == 1 else _compared(args, layers)


_LONG_SEARCH = 5  # seconds; shorter searches are not announced


def _announce_search(args: argparse.Namespace) -> None:
    """Prints a line before a long search, on standard error, so that --json stays alone."""
    longest = 2 * args.search  # forward and backward
    reads = may_assign_tiles(args.scheme or AUTO) or args.whole
    if longest > _LONG_SEARCH and reads:
        each = (
            "each size, layout, kind of attention and scheme of tiles"
            if args.whole
            else "each size and scheme of tiles"
        )
        print(f"searching tiles for up to {longest:g} s for {each} ...", file=sys.stderr, flush=True)


def _check_hosts(args: argparse.Namespace) -> None:
    """Refuses a number of hosts that does not divide the ranks evenly."""
    for cp in args.cp:
        if args.hosts is not None and args.hosts < cp and cp % args.hosts:
            divisors = [str(hosts) for hosts in range(1, cp + 1) if cp % hosts == 0]
            remedy = f"Every host must have as many ranks of --cp {cp}: take one of these, or another --cp."
            raise ArgumentError("--hosts", args.hosts, " or ".join(divisors), remedy)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], allowed: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(args, name), f"only {allowed}")


def _of_one_size(args: argparse.Namespace, cp: int, layers: dict[LayerShape, int]) -> Report:
    """Explains the plan of each shape of layers, and names what to take for all of them."""
    found = _explained(args, cp, layers)
    plans, reports = [plan for plan, _ in found.values()], [report for _, report in found.values()]
    if len(found) == 1:
        text = [reports[0].text]
    else:
        total = sum(_milliseconds(report) * layers[shape] for shape, (_, report) in found.items())
        taken = ", ".join(
            f"{report.data['scheme']}{report.data['detail']} in {counted(layers[shape], 'layer')} "
            f"({', '.join(shape.softmax)})"
            for shape, (_, report) in found.items()
        )
        text = [
            f"take this: {taken}, in layout {reports[0].data['layout']}, {total:.3f} ms predicted for all "
            f"{sum(layers.values())} {_on(args)}"
        ]
        for shape, (_, report) in found.items():
            text += ["", f"{counted(layers[shape], 'layer')}: {', '.join(shape.softmax)}", report.text]
    lines, tower = images_of(args, plans[0], DTYPES[args.dtype].itemsize)
    text += ["", *lines] if lines else []
    if args.plot is not None:
        save_picture(plans, args.plot)
        text.append(f"picture: {args.plot}")
    if args.report is not None:
        named = {", ".join(shape.softmax): (plan, report.data) for shape, (plan, report) in found.items()}
        save_plan(args, named, text[0].partition("\n\n")[0].splitlines())
        text.append(f"report: {args.report}")
    return Report("\n".join(text), {**_as_one(found, layers), "tower": tower})


def _as_one(found: dict[LayerShape, tuple[Plan, Report]], layers: dict[LayerShape, int]) -> dict[str, Any]:
    """Returns the first layers' plan in numbers; of several kinds of layers each one's under `kinds`."""
    kinds = [{"layers": layers[shape], **report.data} for shape, (_, report) in found.items()]
    first = next(iter(found.values()))[1].data
    return {**first, "kinds": kinds} if len(kinds) > 1 else first


def _milliseconds(report: Report) -> float:
    """Returns the predicted milliseconds of a layer, forward and backward."""
    return float(sum(report.data["predicted_ms"].values()))


def _on(args: argparse.Namespace) -> str:
    """Names the machine of predictions, which need not be this one."""
    return f"on {machine(args.gpu).hardware.name}{'' if args.gpu else ', the default --gpu'}"


def _compared(args: argparse.Namespace, layers: dict[LayerShape, int]) -> Report:
    sizes = {cp: _explained(args, cp, layers) for cp in args.cp}
    tokens = {cp: sum(document_lengths(args, cp)) for cp in sizes}
    weights = layers if len(layers) > 1 else dict.fromkeys(layers, 1)
    total = {
        cp: sum(_milliseconds(report) * weights[shape] for shape, (_, report) in found.items())
        for cp, found in sizes.items()
    }
    lines = [_verdict_on_sizes(args, sizes, tokens, total)]
    if len(layers) > 1:
        lines.append(f"these are times of all {sum(layers.values())} layers; a row below is one layer")
    lines += [described_layer(args, shape, layers) for shape in layers]
    lines += [*described_documents(args), ""]
    heads = ("forward ms", "backward ms", "a rank sends", "imbalance", "tokens", "GPU-us a token")
    lines += [f"{'cp':>4} {'by':<32}" + "".join(f"{head:>{len(head) + 2}}" for head in heads)]
    for cp, found in sizes.items():
        for shape, (_, report) in found.items():
            data, sent = report.data, report.data["bytes_sent_per_rank"]
            cells = [
                *(f"{data['predicted_ms'][direction]:.3f}" for direction in BOTH),
                size(max(sent["forward"]) + max(sent["backward"])), f"{data['work_imbalance']:.3f}", f"{tokens[cp]:,}",
                f"{1e3 * cp * _milliseconds(report) / tokens[cp]:.3f}",
            ]  # fmt: skip
            row = "".join(f"{cell:>{len(head) + 2}}" for head, cell in zip(heads, cells, strict=True))
            which = f"  {', '.join(shape.softmax)}" if len(layers) > 1 else ""
            lines.append(f"{cp:>4} {data['scheme'] + data['detail']:<32}{row}{which}")
    lines.append(f"predicted for {machine(args.gpu).describe()}; one --cp explains its plan")
    lines += images_of(args, next(plan for plan, _ in sizes[args.cp[0]].values()), DTYPES[args.dtype].itemsize)[0]
    more = {str(cp): _as_one(found, layers) for cp, found in sizes.items()}
    return Report("\n".join(lines), {**next(iter(more.values())), "sizes": more})


def _verdict_on_sizes(
    args: argparse.Namespace, sizes: dict[int, dict[LayerShape, tuple[Plan, Report]]], tokens: dict[int, int],
    total: dict[int, float],
) -> str:  # fmt: skip
    """Names the fastest size for one batch; of batches that grow with the size, only what a token costs."""
    if len(set(tokens.values())) > 1:
        costs = ", ".join(f"cp {cp} {1e3 * cp * total[cp] / tokens[cp]:.3f}" for cp in sizes)
        return (
            f"no size is fastest: --tokens-per-rank gives each its own batch, of {min(tokens.values()):,} to "
            f"{max(tokens.values()):,} tokens; GPU-us a token, forward and backward: {costs}, {_on(args)}; "
            "--lengths compares sizes on one batch"
        )
    fastest, cheapest = min(total, key=lambda cp: total[cp]), min(total, key=lambda cp: total[cp] * cp)
    reports = [report.data for _, report in sizes[fastest].values()]
    schemes = " and ".join(dict.fromkeys(data["scheme"] for data in reports))
    said = f"fastest: cp {fastest} by {schemes}, {total[fastest]:.3f} ms predicted {_on(args)}"
    others = {f"cp {cp}": milliseconds for cp, milliseconds in total.items() if cp != fastest}
    said += describe_ties([*(reports[0]["ties"] if len(reports) == 1 else []), *tied(others, total[fastest])])
    return f"{said}; least GPU time: cp {cheapest}, {total[cheapest] * cheapest:.3f} GPU-ms"


def _explained(
    args: argparse.Namespace, cp: int, layers: dict[LayerShape, int]
) -> dict[LayerShape, tuple[Plan, Report]]:
    """Returns the plan of each shape of layers with its explanation, all in one layout."""
    of_wire = args.hosts if knows_hosts(args.transport) else None
    # Without --layout all layouts are compared, unless each would have a search for tiles of its own.
    layout = args.layout or (BALANCED if args.search else AUTO)
    given = argparse.Namespace(**{**vars(args), "hosts": of_wire, "layout": layout})
    cases = {
        shape: replace(layer_case_of(given, cp, shape), machine=machine(args.gpu), machine_hosts=args.hosts)
        for shape in layers
    }
    if layout == AUTO and len(layers) > 1:
        slots = [cases[shape].slot() for shape, count in layers.items() for _ in range(count)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            choice = choose_layout(next(iter(cases.values())).packing, cp, slots, align=args.align)
        cases = {shape: replace(case, layout=choice.name) for shape, case in cases.items()}
    return {shape: _explained_layer(args, case, shape, layers) for shape, case in cases.items()}


def _explained_layer(
    args: argparse.Namespace, case: LayerCase, shape: LayerShape, layers: dict[LayerShape, int]
) -> tuple[Plan, Report]:
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # explain() shows the notes
        choice, plan = case.layout_choice(), case.plan()
        if not plan.prices:  # a scheme that is given is not priced
            plan = replace(plan, prices=(priced_as(case, plan),))
    milliseconds = (time.perf_counter() - started) * 1e3
    if case.layer == "attention":
        checked_options(case.head_dim, **case.softmax_options)  # for what the layer would refuse
    if choice is not None:
        case = replace(case, layout=choice.name)  # in which the other schemes are compared
    item_size = case.dtype.itemsize
    faster = _faster_layout(case, plan) if len(args.cp) == len(layers) == 1 and choice is None else None
    schemes = schemes_of(case, plan, item_size) if case.layer == "attention" else {}
    text = [*_verdict(args, case, plan, schemes, item_size)]
    if faster is not None:
        times = f"{faster['predicted_ms']:.3f} ms, and {plan.prices[0].total:.3f} ms in {case.layout}"
        text.append(f"layout {faster['name']} is predicted to take {times}: try --layout {faster['name']}")
    text += [
        "",
        described_layer(args, shape, layers),
        *described_documents(args),
        *([choice.explain()] if choice else []),
    ]
    text.append(plan.explain(item_size, candidates=not schemes))
    if schemes:
        text += [f"note: {note}" for note in plan.notes]
    text.append(f"planned in {milliseconds:.1f} ms, in layout {case.layout}")
    if schemes:
        text += ["", *table_of(schemes, plan.scheme), *not_as_asked(case, schemes)]
    found = {
        "layout": case.layout,
        **as_json(plan, item_size, milliseconds),
        "faster_layout": faster,
        "schemes": schemes,
    }
    found["ties"] = _ties(plan, schemes)
    return plan, Report("\n".join(text), found)


def _verdict(
    args: argparse.Namespace, case: LayerCase, plan: Plan, schemes: dict[str, Any], item_size: int
) -> list[str]:
    """Returns what to take, its predicted times, bytes and memory, and the reason."""
    price, sent, needed = plan.prices[0], [], []
    for forward in BOTH.values():
        sent.append(size(max(plan.bytes_sent(item_size, forward=forward))))
        needed.append(size(max(plan.bytes_needed(item_size, forward=forward))))
    name = plan.strategy + price.detail
    is_asked = getattr(args, "scheme", None) not in (None, AUTO)
    memory = schemes.get(plan.scheme, {})
    needs = max(memory["peak_bytes_of_rank_0"].values()) + memory["buffer_bytes_of_rank_0"] if memory else None
    lines = [
        f"{'as asked' if is_asked else 'take this'}: {name} in layout {case.layout}, {price.total:.3f} ms predicted "
        f"{_on(args)}" + describe_ties(_ties(plan, schemes)),
        f"time: {price.forward:.3f} ms forward and {price.backward:.3f} ms backward, {price.exposed:.3f} ms of it "
        f"exposed transfers and {price.imbalance:.3f} ms imbalance, on {price.hardware}",
        f"bytes: the busiest rank will send {sent[0]} forward and {sent[1]} backward (this "
        f"scheme needs {needed[0]} and {needed[1]})" + price.describe_links(),
        *([f"memory: {size(needs)} on rank 0 beyond q, k and v"] if needs is not None else []),
        f"work: the busiest rank has {plan.work_imbalance:.3f} x the mean",
        f"why: {_reason(plan, schemes, name)}",
    ]
    if plan.attend is not None and 1 < plan.ulysses_degree < case.cp:
        degree, groups = plan.ulysses_degree, case.cp // plan.ulysses_degree
        lines.append(
            f"u = {degree}: in each of {groups} groups {degree} ranks exchange heads; keys travel between groups"
        )
    if case.layer == "attention" and isinstance(case.mask, str) and (meaning := _window(plan.mask)):
        lines.append(f"mask: {meaning}")
    return lines


def _reason(plan: Plan, schemes: dict[str, Any], name: str) -> str:
    """Says which other candidate is fastest, in the numbers of the table, and why it was not taken."""
    price, times = plan.prices[0], _other_times(plan, schemes)
    if not times:
        least = [f"; {each.describe('next is')}" for each in plan.prices[1:2]]
        return f"{name} is the only candidate that was priced{''.join(least)}"
    other = min(times, key=lambda scheme: times[scheme])
    if times[other] >= price.total:
        return (
            f"it is predicted to be fastest; next is {other}, {times[other]:.3f} ms{_difference(plan, schemes, other)}"
        )
    ratio = price.total / times[other]
    gain = f"{other} is predicted to be {f'{ratio - 1:.1%} faster' if ratio < 1.5 else f'{ratio:.1f} times as fast'}"
    if len(plan.prices) == 1:
        return f"it was asked for; {gain}, {times[other]:.3f} ms"
    return f"{gain}, {times[other]:.3f} ms, but {price.reason or 'auto leaves such gains alone'}: see docs/planning.md"


def _difference(plan: Plan, schemes: dict[str, Any], other: str) -> str:
    """Returns a clause on the part of the other candidate's time that exceeds the plan's most."""
    prices = {f"{price.scheme}{price.detail}": price.parts for price in plan.prices[1:]}
    parts = schemes[other]["parts_ms"] if schemes else prices[other]
    more, most = max((value - plan.prices[0].parts[name], name) for name, value in parts.items())
    return f": it has {more:.3f} ms more {most}" if more >= 0.001 else ""


def _ties(plan: Plan, schemes: dict[str, Any]) -> list[str]:
    """Returns the candidates that are as fast as the plan; none on one rank, where all are the same."""
    return tied(_other_times(plan, schemes), plan.prices[0].total) if plan.cp_size > 1 else []


def _other_times(plan: Plan, schemes: dict[str, Any]) -> dict[str, float]:
    """Returns the predicted milliseconds of the other candidates: the table's, or else those that were priced."""
    if schemes:
        return {scheme: sum(row["predicted_ms"].values()) for scheme, row in schemes.items() if scheme != plan.scheme}
    return {f"{other.scheme}{other.detail}": other.total for other in plan.prices[1:] if other.is_played}


def _window(mask: Mask | None) -> str:
    """Returns the meaning of a window's numbers; nothing for other masks."""
    found = re.fullmatch(r"window:(-?\d+),(-?\d+)", mask.name) if mask else None
    if not found:
        return ""
    before, after = ("all tokens" if number == "-1" else counted(int(number), "token") for number in found.groups())
    return f"{found[0]} is a token itself, {before} before it and {after} after it, in its document"


_MUCH_FASTER = 1.5  # layouts that win by less are left to those who ask for --layout auto


def _faster_layout(case: LayerCase, plan: Plan) -> dict[str, Any] | None:
    """Returns the layout that is predicted to be much faster than the one that was asked for, if there is one."""
    if case.layout == AUTO or case.search_seconds:  # tiles would be searched for again in each layout
        return None
    with contextlib.suppress(ArgumentError):  # layers whose masks or keys depend on the batch
        choice = replace(case, layout=AUTO).layout_choice()
        if choice and choice.prices and choice.prices[0].milliseconds * _MUCH_FASTER < plan.prices[0].total:
            return {"name": choice.name, "predicted_ms": choice.prices[0].milliseconds}
    return None


_LINKS = ("within_hosts", "between_hosts")


def _redistribution(plan: Plan, item_size: int) -> dict[str, Any] | None:
    """Returns the bytes that redistributing hidden states around a run of linear layers sends; None without it."""
    if plan.redistribution is None:
        return None
    sent = plan.redistribution.bytes_sent(plan.layout, item_size)
    return {"layers": plan.redistribution.layers, "collectives": 2, "bytes_sent_per_rank": sent}


def _solver(plan: Plan) -> dict[str, Any]:
    """Returns the solver's results for assigned tiles, forward and backward; None for each field of other plans."""
    fields = {
        "optimal": "is_optimal", "bound": "bound", "found": "busiest_bytes", "load_cap": "load_cap",
        "seconds": "seconds",
    }  # fmt: skip
    both = dict(zip(BOTH, plan.solutions, strict=False))
    return {name: {way: getattr(each, field) for way, each in both.items()} or None for name, field in fields.items()}


def as_json(plan: Plan, item_size: int, milliseconds: float) -> dict[str, Any]:
    """Returns the plan in numbers; `null` for values that were not priced or solved."""
    return {
        "scheme": plan.strategy,
        "cp": plan.cp_size,
        "transport": plan.transport.name,
        "hosts": list(plan.transport.hosts),
        "codec": codec_of(plan),
        "head_chunks": plan.num_chunks,
        "tokens_per_rank": plan.layout.token_counts.tolist(),
        "fragments_per_rank": np.diff(plan.layout.fragment_offsets).tolist(),
        "pad_tokens": int(plan.layout.pad_rows.sum()),
        "work_imbalance": plan.work_imbalance,
        "bytes_sent_per_rank": {name: plan.bytes_sent(item_size, forward=forward) for name, forward in BOTH.items()},
        "bytes_lower_bound": {name: plan.bytes_needed(item_size, forward=forward) for name, forward in BOTH.items()},
        "solver": _solver(plan),
        "collectives": {name: plan.collectives(forward=forward) for name, forward in BOTH.items()},
        "redistribution": _redistribution(plan, item_size),
        "predicted_ms": {name: getattr(plan.prices[0], name) if plan.prices else None for name in BOTH},
        "detail": plan.prices[0].detail if plan.prices else "",
        "prices": [
            {
                "candidate": f"{price.scheme}{price.detail}",
                "forward": price.forward,
                "backward": price.backward,
                "exposed": price.exposed,
                "imbalance": price.imbalance,
                "bytes_by_link": None if price.by_link is None else dict(zip(_LINKS, price.by_link, strict=True)),
                "is_bound": price.is_bound,
                "is_sum": price.is_sum,
            }
            for price in plan.prices
        ],
        "predicted_for": plan.prices[0].hardware if plan.prices else None,
        "plan_ms": milliseconds,
        "notes": list(plan.notes),
    }
