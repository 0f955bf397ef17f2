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
from megatron_cp.cli.options import (
    add_batch_arguments,
    add_layer_arguments,
    described_documents,
    described_layer,
    layer_case_of,
)
from megatron_cp.cli.parser import cp_sizes, flags
from megatron_cp.cli.paths import check_paths
from megatron_cp.cli.report import Report
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask
from megatron_cp.plan.describe import counted, describe_ties, size, tied
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, REDISTRIBUTE, may_assign_tiles, scheme_named
from megatron_cp.plan.transport import knows_hosts
from megatron_cp.planner.capabilities import working
from megatron_cp.planner.choose import CHUNKS, detail_of
from megatron_cp.planner.picture import save_picture
from megatron_cp.planner.predict import machine, presets
from megatron_cp.planner.predict.machine_files import SAFE
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from megatron_cp.planner.predict.price import priced
from megatron_cp.softmax.options import checked_options
from megatron_cp.testing.case import LayerCase

EXAMPLES = (
    "plan --cp 8 --model llama3-8b --lengths 100k,20k,8k",
    "plan --whole --model qwen3-next --cp 8,16 --gpu h100 --lengths 256k",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        *flags("cp"), type=cp_sizes, metavar="N,N,...", help="context-parallel sizes (default: 4; all with --gpus)"
    )
    add_layer_arguments(parser, dtype="bfloat16")
    add_batch_arguments(parser, corpus="default")
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture of who owns what")
    group = parser.add_argument_group("prediction")
    group.add_argument(
        *flags("gpu"),
        metavar="NAME-OR-FILE",
        help=f"the machine: {', '.join(presets())}, or a file of bench planner --calibrate (default: {SAFE})",
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
    args.cp = args.cp or (None if args.whole and args.gpus else [4])
    _check_hosts(args)
    _announce_search(args)
    if args.whole:
        _refuse(args, ("plot", "parents"), "without --whole")
        report: Report = application("estimate").run_whole(args)
        return report
    _refuse(args, application("estimate").WHOLE, "with --whole")
    if len(args.cp) > 1:
        _refuse(args, ("plot",), "with one --cp")
    return _explained(args, args.cp[0]) if len(args.cp) == 1 else _compared(args)


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
    for cp in args.cp or []:
        if args.hosts is not None and args.hosts < cp and cp % args.hosts:
            divisors = [str(hosts) for hosts in range(1, cp + 1) if cp % hosts == 0]
            remedy = f"Every host must have as many ranks of --cp {cp}: take one of these, or another --cp."
            raise ArgumentError("--hosts", args.hosts, " or ".join(divisors), remedy)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], allowed: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ArgumentError(f"--{name}", getattr(args, name), f"only {allowed}")


def _compared(args: argparse.Namespace) -> Report:
    reports = {cp: _explained(args, cp) for cp in args.cp}
    lines = [described_layer(args), *described_documents(args), ""]
    lines += [f"{'cp':>4} {'by':<24}{'forward ms':>12}{'backward ms':>13}{'a rank sends':>14}{'imbalance':>11}"]
    total = {cp: sum(report.data["predicted_ms"].values()) for cp, report in reports.items()}
    fastest, cheapest = min(total, key=lambda cp: total[cp]), min(total, key=lambda cp: total[cp] * cp)
    said = f"fastest: cp {fastest} by {reports[fastest].data['scheme']}, {total[fastest]:.3f} ms predicted"
    others = {f"cp {cp}": milliseconds for cp, milliseconds in total.items() if cp != fastest}
    said += describe_ties([*reports[fastest].data["ties"], *tied(others, total[fastest])])
    lines.insert(0, f"{said}; least GPU time: cp {cheapest}, {total[cheapest] * cheapest:.3f} GPU-ms")
    for cp, report in reports.items():
        found, sent = report.data, report.data["bytes_sent_per_rank"]
        times = [found["predicted_ms"][direction] for direction in _BOTH]
        shown = [f"{time:.3f}" if time is not None else "-" for time in times]
        lines.append(
            f"{cp:>4} {found['scheme'] + found['detail']:<24}{shown[0]:>12}{shown[1]:>13}"
            f"{size(max(sent['forward']) + max(sent['backward'])):>14}{found['work_imbalance']:>11.3f}"
        )
    lines.append(f"predicted for {machine(args.gpu).describe()}; one --cp explains its plan")
    first = next(iter(reports.values())).data
    return Report("\n".join(lines), {**first, "sizes": {str(cp): report.data for cp, report in reports.items()}})


def _explained(args: argparse.Namespace, cp: int) -> Report:
    of_wire = args.hosts if knows_hosts(args.transport) else None
    given = argparse.Namespace(**{**vars(args), "hosts": of_wire})
    case = replace(layer_case_of(given, cp), machine=machine(args.gpu), machine_hosts=args.hosts)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # explain() shows the notes
        choice, plan = case.layout_choice(), case.plan()
        if not plan.prices:  # a scheme that is given is not priced
            plan = replace(plan, prices=(_priced_as(case, plan),))
    milliseconds = (time.perf_counter() - started) * 1e3
    if case.layer == "attention":
        checked_options(case.head_dim, **case.softmax_options)  # for what the layer would refuse
    if choice is not None:
        case = replace(case, layout=choice.name)  # in which the other schemes are compared
    item_size = case.dtype.itemsize
    faster = _faster_layout(case, plan) if len(args.cp) == 1 and choice is None else None
    schemes = _schemes(case, plan, item_size) if case.layer == "attention" else {}
    text = [*_verdict(args, case, plan, schemes, item_size)]
    if faster is not None:
        times = f"{faster['predicted_ms']:.3f} ms, and {plan.prices[0].total:.3f} ms in {case.layout}"
        text.append(f"layout {faster['name']} is predicted to take {times}: try --layout {faster['name']}")
    text += ["", described_layer(args), *described_documents(args), *([choice.explain()] if choice else [])]
    text.append(plan.explain(item_size, candidates=not schemes))
    if schemes:
        text += [f"note: {note}" for note in plan.notes]
    text.append(f"planned in {milliseconds:.1f} ms, in layout {case.layout}")
    if schemes:
        text += ["", *_table(schemes, plan.scheme), *_not_as_asked(case, schemes)]
    if args.plot is not None:
        save_picture(plan, args.plot)
        text.append(f"picture: {args.plot}")
    found = {**as_json(plan, item_size, milliseconds), "faster_layout": faster, "schemes": schemes}
    found["ties"] = _ties(plan, schemes)
    return Report("\n".join(text), found)


def _verdict(
    args: argparse.Namespace, case: LayerCase, plan: Plan, schemes: dict[str, Any], item_size: int
) -> list[str]:
    """Returns what to take, its predicted times, bytes and memory, and the reason."""
    price, sent, needed = plan.prices[0], [], []
    for forward in _BOTH.values():
        sent.append(size(max(plan.bytes_sent(item_size, forward=forward))))
        needed.append(size(max(plan.bytes_needed(item_size, forward=forward))))
    name = (plan.scheme if plan.hidden_layout is None else REDISTRIBUTE.name) + price.detail
    is_asked = getattr(args, "scheme", None) not in (None, AUTO)
    memory = schemes.get(plan.scheme, {})
    needs = max(memory["peak_bytes_of_rank_0"].values()) + memory["buffer_bytes_of_rank_0"] if memory else None
    lines = [
        f"{'as asked' if is_asked else 'take this'}: {name} in layout {case.layout}, {price.total:.3f} ms predicted"
        + describe_ties(_ties(plan, schemes)),
        f"time: {price.forward:.3f} ms forward and {price.backward:.3f} ms backward, {price.exposed:.3f} ms of it "
        f"exposed transfers and {price.imbalance:.3f} ms imbalance, on {price.hardware}",
        f"bytes: the busiest rank sent {sent[0]} forward and {sent[1]} backward, minimum {needed[0]} and {needed[1]}"
        + price.describe_links(),
        *([f"memory: {size(needs)} on rank 0 beyond q, k and v"] if needs is not None else []),
        f"work: the busiest rank has {plan.work_imbalance:.3f} x the mean",
        f"why: {_reason(plan, schemes, name)}",
    ]
    if case.layer == "attention" and isinstance(case.mask, str) and (meaning := _window(plan.mask)):
        lines.append(f"mask: {meaning}")
    return lines


def _reason(plan: Plan, schemes: dict[str, Any], name: str) -> str:
    """Says which other candidate is fastest, in the numbers of the table, and why it was not taken."""
    price, times = plan.prices[0], _other_times(plan, schemes)
    if not times:
        least = [f"; {each.scheme}{each.detail} takes at least {each.total:.3f} ms" for each in plan.prices[1:2]]
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
    return {f"{other.scheme}{other.detail}": other.total for other in plan.prices[1:] if not other.is_bound}


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


def _schemes(case: LayerCase, chosen: Plan, item_size: int) -> dict[str, Any]:
    """Returns the bytes, memory, balance and predicted time of each scheme for the same batch, layout and options."""
    found = {}
    one_host = machine(case.machine).topology(case.cp, case.machine_hosts).num_hosts == 1
    for scheme in (name for name in working("scheme") if name != AUTO):
        record = scheme_named(scheme)
        costs_a_search = record.assigns_tiles and not case.search_seconds  # tiles take seconds to assign
        if scheme != chosen.scheme and (costs_a_search or (record.goes_by_host and one_host)):
            continue
        with warnings.catch_warnings(), contextlib.suppress(ArgumentError):  # schemes that these ranks cannot run
            warnings.simplefilter("ignore", UserWarning)
            plan = chosen if scheme == chosen.scheme else _like(case, scheme)
            sent = {name: plan.bytes_sent(item_size, forward=forward) for name, forward in _BOTH.items()}
            price = _priced_as(case, plan)
            found[scheme] = {
                "ulysses_degree": plan.ulysses_degree,
                "codec": _codec(plan),
                "head_chunks": _head_chunks(plan),
                "bytes_sent": {name: sum(ranks) for name, ranks in sent.items()},
                "largest_bytes_sent_per_rank": {name: max(ranks) for name, ranks in sent.items()},
                "peak_bytes_of_rank_0": {
                    name: peak_bytes(plan, 0, item_size, forward=forward) for name, forward in _BOTH.items()
                },
                "buffer_bytes_of_rank_0": buffer_bytes(plan, 0, item_size),
                "work_imbalance": plan.work_imbalance,
                "predicted_ms": {"forward": price.forward, "backward": price.backward},
                "parts_ms": price.parts,
            }
    return found


def _priced_as(case: LayerCase, plan: Plan) -> Price:
    on = machine(case.machine)
    price = priced(plan, on, on.topology(case.cp, case.machine_hosts), item_size=case.dtype.itemsize)
    return replace(price, detail=detail_of(plan) if plan.attend else "")


def _like(case: LayerCase, scheme: str) -> Plan:
    """Returns the plan of another scheme, with those of the given options that it supports."""
    candidate = scheme_named(scheme)
    degree = case.ulysses_degree if candidate.is_product and scheme_named(case.scheme).is_product else None
    like = case.with_scheme(scheme, ulysses_degree=degree, head_chunks=None)
    plan = like.plan()
    most = plan.partition.most_groups if candidate.takes_chunks else 0
    tried = CHUNKS if case.head_chunks is None else (min(case.head_chunks, most or 1),)
    others = [replace(like, head_chunks=n).plan() for n in tried if n <= most and n != _head_chunks(plan)]
    plans = others or [plan] if case.head_chunks is not None else [plan, *others]
    return min(plans, key=lambda each: _priced_as(case, each).total) if len(plans) > 1 else plans[0]


def _not_as_asked(case: LayerCase, schemes: dict[str, Any]) -> list[str]:
    """Returns a line that names the rows whose scheme does not support all given options; nothing if all do."""
    rows = []
    for name, scheme in schemes.items():
        chunks = scheme["head_chunks"]
        without = [
            *(["no codec"] if scheme["codec"] != case.codec and case.cp > 1 else []),
            *([counted(chunks, "head chunk")] if case.head_chunks not in (None, chunks) else []),
        ]
        if without:
            rows.append(f"{name} has {' and '.join(without)}")
    return [f"a row leaves out the options that its scheme does not support: {'; '.join(rows)}."] * bool(rows)


def _codec(plan: Plan) -> str:
    return "none" if plan.codec is None else plan.codec.name


def _head_chunks(plan: Plan) -> int:
    """Returns the number of chunks in which heads are exchanged, or keys are gathered, whichever is more."""
    return max(plan.head_chunks, plan.attend.head_chunks if plan.attend else 1)


def _table(schemes: dict[str, Any], chosen: str) -> list[str]:
    heads = (
        "all ranks send: forward",
        "backward",
        "most of a rank, both",
        "memory of rank 0",
        "imbalance",
        "predicted ms",
    )
    lines = [f"{'from this layout':<24}" + "".join(f"{head:>{len(head) + 3}}" for head in heads)]
    for name, scheme in schemes.items():
        total, largest = scheme["bytes_sent"], scheme["largest_bytes_sent_per_rank"]
        cells = (
            size(total["forward"]),
            size(total["backward"]),
            size(largest["forward"] + largest["backward"]),
            size(max(scheme["peak_bytes_of_rank_0"].values()) + scheme["buffer_bytes_of_rank_0"]),
            f"{scheme['work_imbalance']:.3f}",
            f"{sum(scheme['predicted_ms'].values()):.3f}",
        )
        row = "".join(f"{cell:>{len(head) + 3}}" for head, cell in zip(heads, cells, strict=True))
        degree = f" (u = {scheme['ulysses_degree']})" if scheme_named(name).is_product else ""
        lines.append(f"{name + degree:<24}{row}{'  <-' if name == chosen else ''}")
    total = {name: sum(scheme["bytes_sent"].values()) for name, scheme in schemes.items()}
    fewest, most_even = (
        min(total, key=lambda name: total[name]),
        min(schemes, key=lambda n: schemes[n]["work_imbalance"]),
    )
    lines.append(
        f"fewest bytes: {fewest}, {size(total[fewest])} in all; most even work: {most_even}; predicted to be fastest: "
        f"{min(schemes, key=lambda n: sum(schemes[n]['predicted_ms'].values()))}"
    )
    return lines


_BOTH = {"forward": True, "backward": False}
_LINKS = ("within_hosts", "between_hosts")


def _redistribution(plan: Plan, item_size: int) -> dict[str, Any] | None:
    """Returns the bytes that redistributing hidden states around a run of linear layers sends; None without it."""
    if plan.redistribution is None:
        return None
    sent = plan.redistribution.bytes_sent(plan.layout, item_size)
    return {"layers": plan.redistribution.layers, "collectives": 2, "bytes_sent_per_rank": sent}


def _solver(plan: Plan) -> dict[str, Any]:
    """Returns the solver's results for assigned tiles, forward and backward; None for each field of other plans."""
    solutions = plan.attend.tiled.solutions if plan.attend is not None and plan.attend.tiled is not None else ()
    if not solutions:
        names = ("optimal", "bound", "found", "load_cap", "seconds", "rounds", "predicted_ms", "bound_ms")
        return dict.fromkeys(names)
    assert plan.attend is not None
    assert plan.attend.tiled is not None
    both = dict(zip(_BOTH, solutions, strict=True))
    schedules = dict(zip(_BOTH, plan.attend.tiled.schedules, strict=False))
    return {
        "optimal": {name: each.is_optimal for name, each in both.items()},
        "bound": {name: each.bound for name, each in both.items()},
        "found": {name: each.busiest_bytes for name, each in both.items()},
        "load_cap": {name: each.load_cap for name, each in both.items()},
        "seconds": {name: each.seconds for name, each in both.items()},
        "rounds": dict(zip(_BOTH, plan.attend.tiled.rounds, strict=True)),
        "predicted_ms": {name: each.milliseconds for name, each in schedules.items()},
        "bound_ms": {name: each.bound for name, each in schedules.items()},
    }


def as_json(plan: Plan, item_size: int, milliseconds: float) -> dict[str, Any]:
    """Returns the plan in numbers; `null` for values that were not priced or solved."""
    return {
        "scheme": plan.scheme if plan.hidden_layout is None else REDISTRIBUTE.name,
        "cp": plan.cp_size,
        "transport": plan.transport.name,
        "hosts": list(plan.transport.hosts),
        "codec": _codec(plan),
        "head_chunks": _head_chunks(plan),
        "tokens_per_rank": plan.layout.token_counts.tolist(),
        "fragments_per_rank": np.diff(plan.layout.fragment_offsets).tolist(),
        "pad_tokens": int(plan.layout.pad_rows.sum()),
        "work_imbalance": plan.work_imbalance,
        "bytes_sent_per_rank": {name: plan.bytes_sent(item_size, forward=forward) for name, forward in _BOTH.items()},
        "bytes_lower_bound": {name: plan.bytes_needed(item_size, forward=forward) for name, forward in _BOTH.items()},
        "solver": _solver(plan),
        "collectives": {name: plan.collectives(forward=forward) for name, forward in _BOTH.items()},
        "redistribution": _redistribution(plan, item_size),
        "predicted_ms": {name: getattr(plan.prices[0], name) if plan.prices else None for name in _BOTH},
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
            }
            for price in plan.prices
        ],
        "predicted_for": plan.prices[0].hardware if plan.prices else None,
        "plan_ms": milliseconds,
        "notes": list(plan.notes),
    }
