"""The table of `megatron-cp plan`: every scheme for the same batch, layout and options. No torch in here."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import Any

from megatron_cp.errors import ArgumentError
from megatron_cp.plan.describe import counted, size
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, scheme_named
from megatron_cp.planner.capabilities import working
from megatron_cp.planner.choose import CHUNKS, detail_of
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from megatron_cp.planner.predict.price import priced
from megatron_cp.testing.case import LayerCase

BOTH = {"forward": True, "backward": False}


def schemes_of(case: LayerCase, chosen: Plan, item_size: int) -> dict[str, Any]:
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
            sent = {name: plan.bytes_sent(item_size, forward=forward) for name, forward in BOTH.items()}
            price = priced_as(case, plan)
            found[scheme] = {
                "ulysses_degree": plan.ulysses_degree,
                "codec": codec_of(plan),
                "head_chunks": plan.num_chunks,
                "bytes_sent": {name: sum(ranks) for name, ranks in sent.items()},
                "largest_bytes_sent_per_rank": {name: max(ranks) for name, ranks in sent.items()},
                "peak_bytes_of_rank_0": {
                    name: peak_bytes(plan, 0, item_size, forward=forward) for name, forward in BOTH.items()
                },
                "buffer_bytes_of_rank_0": buffer_bytes(plan, 0, item_size),
                "work_imbalance": plan.work_imbalance,
                "predicted_ms": {"forward": price.forward, "backward": price.backward},
                "parts_ms": price.parts,
            }
    return found


def priced_as(case: LayerCase, plan: Plan) -> Price:
    """Returns the predicted time of another plan for the case, on the case's machine."""
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
    others = [replace(like, head_chunks=n).plan() for n in tried if n <= most and n != plan.num_chunks]
    plans = others or [plan] if case.head_chunks is not None else [plan, *others]
    return min(plans, key=lambda each: priced_as(case, each).total) if len(plans) > 1 else plans[0]


def not_as_asked(case: LayerCase, schemes: dict[str, Any]) -> list[str]:
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


def codec_of(plan: Plan) -> str:
    """Returns the name of the codec of a plan's messages."""
    return "none" if plan.codec is None else plan.codec.name


def table_of(schemes: dict[str, Any], chosen: str) -> list[str]:
    """Returns the lines of the table, with an arrow at the chosen scheme."""
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
    if any(scheme_named(name).is_product for name in schemes):
        lines.append("u: ranks that exchange heads with each other (--ulysses-degree); keys travel between such groups")
    return lines
