"""`python -m benchmarks exchange`: compares Gated DeltaNet's head exchange with a copy and with megatron-core's own.

Shapes: `t` a rank's tokens, `T` all tokens, `f` features of all sections, `h` heads, `d` head size.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import EXCHANGE_RANKS, MEGATRON, check_megatron, measured_on_ranks, megatron_case
from benchmarks.timing import (
    BOTH,
    DIRECTIONS,
    Measure,
    Timing,
    Watch,
    formatted,
    interleaved,
    once,
    slowest,
    spread,
    table,
)
from megatron_cp.exchange import Exchange, Section, Sections
from megatron_cp.executor import Communicator, ToHeadsInParts, TorchGroup, ToTokensInParts
from megatron_cp.planner import exchange_of
from megatron_cp.testing import CODEC_TOLERANCES, Case, Counters, relative_error

LAYOUTS = ("zigzag", "contiguous")
ALL = ("q", "k", "v", "z", "beta", "alpha")  # Megatron's order
SPLIT = (("q", "k", "v"), ("z",), ("beta",), ("alpha",))  # as its layer splits what has arrived
GATES = {"with the gate": (ALL,), "without the gate": (("q", "k", "v"), ("beta",), ("alpha",))}  # ours sends the latter
LOOP = "loop"
PEERS = {LOOP: "loop", MEGATRON: "megatron"}
_BATCHES = ((1024, 16), (4096, 16), (8192, 64))  # tokens and documents

LEGEND = f"""\
{MEGATRON} is the work of `GatedDeltaNet.forward` around its collective, with the order of tokens that it
builds in each layer; {LOOP} is the work of {MEGATRON} before, with its own functions: a call for every
document and section. Both send the gate; ours does not. Gradients arrive on the head side in separate tensors, as
kernels return them. Medians [quartiles] over the repeats of ratios within one repeat, by the clock, of the slowest
rank. *Copy*: one warm copy of the bytes that enter the exchange, on all ranks at once; *collective*: one bare
`all_to_all_single` of as many bytes in equal pieces. *Passes*: bytes written by copy-like operators over bytes that
enter, forward and backward; *syncs*: operators and methods that make the host wait."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> tuple[str, dict[str, Any]]:
    """Measures every exchange; returns the report and its numbers."""
    check_megatron("exchange")
    asked = world.size if world else args.cp
    own = args.lengths or args.tokens_per_rank or args.documents
    cases = []
    for size in [asked] if asked else EXCHANGE_RANKS:
        given = ((args.tokens_per_rank or 2048) * size, args.documents or 16)
        cases += [megatron_case(args, world, size, *batch) for batch in ([given] if own else _BATCHES)]
    on_ranks = partial(measured_on_ranks, measure, plans=(), args=args, world=world)
    by_cell = [
        list(of_cell)
        for size, of_size in itertools.groupby(cases, lambda case: case.cp)
        for of_cell in zip(*on_ranks(list(of_size), args.repeats, cp=size), strict=True)
    ]
    cells, first = [_ratios(case, ranks) for case, ranks in zip(cases, by_cell, strict=True)], cases[0]

    def mean(name: str, key: str, way: str) -> float:
        return statistics.geometric_mean(cell[name][key][way]["median"] for cell in cells)

    names = [f"{peer}_over_ours" for peer in PEERS.values()]
    data = {
        **{name: {key: {way: mean(name, key, way) for way in BOTH} for key in cells[0][name]} for name in names},
        "cells": cells,
        "heads": [first.heads, first.groups, first.head_dim, first.value_head_dim],
        "dtype": str(first.dtype).removeprefix("torch."),
        "head_chunks": args.head_chunks or 1,
        "transport": args.transport,
        "codec": args.codec,
        "device": first.device,
    }
    return _text(data), data


class Batch:
    """A packed batch: the stream of all sections, which every rank draws alike, and each rank's parts of it."""

    def __init__(self, case: Case) -> None:
        self.case, self.plans = case, {name: replace(case, layout=name).plan() for name in LAYOUTS}
        first: Any = self.plans["zigzag"].steps[0]
        blocks = {block.name: block for block in first.exchange.sections.blocks}
        blocks["z"] = replace(blocks["v"], name="z")
        self.blocks: dict[str, Section] = {name: blocks[name] for name in ALL}
        self.widths = {name: block.width for name, block in self.blocks.items()}
        random = torch.Generator().manual_seed(case.seed)
        stream = torch.randn(case.packing.total, sum(self.widths.values()), generator=random)
        stream = stream.to(case.dtype).to(case.device)
        self.columns = dict(zip(ALL, stream.split(list(self.widths.values()), -1), strict=True))

    def exchange(self, layout: str, tensors: Sequence[Sequence[str]]) -> Exchange:
        """Returns the exchange of these sections to heads."""
        plan = self.plans[layout]
        sections = Sections(tuple(self.blocks[name] for names in tensors for name in names))
        return exchange_of(plan.layout, sections, plan.partition, plan.head_chunks, plan.codec)

    def local(self, layout: str, names: Sequence[str], rank: int) -> Tensor:
        """Returns `[t, f]` a rank's tokens of some sections."""
        return self.plans[layout].layout.shard(torch.cat([self.columns[name] for name in names], -1), rank)

    def own(self, sections: Sections, rank: int) -> list[Tensor]:
        """Returns `[T, h, d]` a rank's heads of each section, in separate tensors."""
        found = []
        for block in sections.blocks:
            name = "v" if block.name not in self.columns else block.name  # the layer's output is as wide
            heads = self.columns[name].unflatten(-1, (block.num_heads, block.head_dim))
            found.append(heads[:, slice(*block.ranges[rank])].contiguous())
        return found


def leaf(tensor: Tensor) -> Tensor:
    """Returns a dense copy of a tensor that requires gradients."""
    return tensor.detach().contiguous().requires_grad_()


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> None:
    """Raises unless tensors have the same bits, or are close if they were coded on the way."""
    for actual, wanted in zip(found, expected, strict=True):
        actual, wanted = actual.detach().reshape(len(actual), -1), wanted.detach().reshape(len(wanted), -1)
        is_right = torch.equal(actual, wanted)
        if case.codec != "none":
            is_right = relative_error(actual, wanted, 1e-3) <= CODEC_TOLERANCES[case.codec]
        if not is_right:
            raise RuntimeError(f"{name} returns other data than was sent")


@dataclass
class Contender:
    """An implementation of one exchange.

    The gradient of every element is the element itself, so that the gradient of each input must be the input.

    Attributes:
        way: "inbound" (tokens to heads) or "outbound".
        inputs: leaves of the graph; copies are counted in units of their bytes.
        forward: makes the tensors with which the layer goes on from the inputs.
        expected: the tensors that `forward` must return.
    """

    name: str
    way: str
    inputs: list[Tensor]
    forward: Callable[[], list[Tensor]]
    expected: list[Tensor]
    case: Case

    @property
    def key(self) -> str:
        return f"{self.way}, {self.name}"

    @property
    def entering(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs)

    def run(self, measure: Measure) -> tuple[list[Tensor], Any]:
        """Runs forward and backward through `measure(direction, call)`; returns the outputs and the gradients."""
        outputs = measure("forward", self.forward)
        gradients = [output.detach().clone(memory_format=torch.contiguous_format) for output in outputs]
        with torch.autograd.set_multithreading_enabled(False):  # another thread would not be on this one's clock
            return outputs, measure("backward", lambda: torch.autograd.grad(outputs, self.inputs, gradients))

    def check(self) -> None:
        """Raises unless the results are as expected, forward and backward."""
        outputs, gradients = self.run(lambda _, call: call())
        compare(self.key, outputs, self.expected, self.case)
        compare(f"{self.key}, gradients", gradients, self.inputs, self.case)


def ours(batch: Batch, layout: str, comm: Communicator) -> list[Contender]:
    """Returns both directions from one layout: with the gate, as Megatron sends it, and without, as ours does."""
    rank, case, found = comm.rank, batch.case, []

    def arrive(exchange: Exchange, tensors: list[Tensor]) -> list[Tensor]:
        inbound = ToHeadsInParts(exchange, comm)
        inbound.start(*tensors)
        return [section for part in range(inbound.num_parts) for section in inbound.finish(part)]

    def leave() -> list[Tensor]:
        in_flight = ToTokensInParts(back, comm)
        for part, out in enumerate(outs):
            in_flight.start(part, out)
        return in_flight.finish()

    for gate, tensors in GATES.items():
        exchange = batch.exchange(layout, tensors)
        inputs = [leaf(batch.local(layout, names, rank)) for names in tensors]
        wanted = [section for part in exchange.parts for section in batch.own(part, rank)]
        found.append(Contender(f"{layout}, {gate}", "inbound", inputs, partial(arrive, exchange, inputs), wanted, case))
    last: Any = batch.plans[layout].steps[-1]
    back: Exchange = last.exchange
    outs = [leaf(section) for part in back.parts for section in batch.own(part, rank)]
    return [*found, Contender(layout, "outbound", outs, leave, [batch.local(layout, "v", rank)], case)]


def megatrons(batch: Batch, group: TorchGroup) -> list[Contender]:
    """Returns both directions, fused and in loops."""
    from benchmarks.peers.head_exchange import StockExchange

    rank, case = group.rank, replace(batch.case, codec="none")
    local = leaf(batch.local("zigzag", ALL, rank)[:, None])
    stock = StockExchange(case.packing, list(batch.widths.values()), group.size, group.group, local.device)
    widths = [sum(batch.widths[name] for name in names) // group.size for names in SPLIT]
    own = batch.own(batch.exchange("zigzag", (ALL,)).sections, rank)
    joined, back = torch.cat([heads.flatten(1) for heads in own], -1), batch.local("zigzag", "v", rank)
    out = leaf(own[ALL.index("v")].flatten(1)[:, None])
    ways = {MEGATRON: (stock.to_heads, stock.to_tokens), LOOP: (stock.to_heads_in_loops, stock.to_tokens_in_loops)}
    found = []
    for name, (to_heads, to_tokens) in ways.items():
        arrive: Any = lambda to_heads=to_heads: list(to_heads(local).split(widths, -1))  # noqa: E731
        leave: Any = lambda to_tokens=to_tokens: [to_tokens(out)]  # noqa: E731
        found.append(Contender(name, "inbound", [local], arrive, list(joined.split(widths, -1)), case))
        found.append(Contender(name, "outbound", [out], leave, [back], case))
    return found


@dataclass
class Seen:
    """The measurements of one rank in a cell.

    Attributes:
        spent: timings of every repeat, by contender and direction; of "copy N" and "collective N" of N bytes.
        entering: bytes that enter, by contender.
        counts: bytes copied, collectives and waits of the host in a forward and a backward, by contender.
    """

    spent: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    entering: dict[str, int] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)


def measure(group: TorchGroup, cases: list[Case], repeats: int) -> list[Seen]:
    """Measures every cell on one rank: compares the results bit by bit, then counts, then times."""
    return [_measured(group, case, repeats) for case in cases]


def _measured(group: TorchGroup, case: Case, repeats: int) -> Seen:
    batch, watch, seen, counters = Batch(case), Watch(torch.device(case.device).type), Seen(), Counters()
    contenders = megatrons(batch, group)
    for layout in LAYOUTS:
        contenders += ours(batch, layout, Communicator(counters.watch(group), batch.plans[layout].transport))

    def counted(_: str, call: Callable[[], Any]) -> Any:
        with counters:
            return call()

    def totals() -> Any:
        return np.array([sum(counters.copied.values()), counters.collectives, sum(counters.host_syncs.values())])

    for contender in contenders:
        contender.check()
        before = totals()
        contender.run(counted)
        seen.entering[contender.key] = contender.entering
        seen.counts[contender.key] = (totals() - before).tolist()
    buffers = [torch.zeros(max(seen.entering.values()), dtype=torch.uint8, device=case.device) for _ in range(2)]
    steps: dict[str, Callable[[Measure], Any]] = {contender.key: contender.run for contender in contenders}
    for size in sorted(set(seen.entering.values())):
        equal = size // group.size * group.size
        source, target = (buffer[:equal] for buffer in buffers)
        copy, send = partial(target.copy_, source), partial(dist.all_to_all_single, target, source, group=group.group)
        steps[f"copy {size}"], steps[f"collective {size}"] = partial(once, copy), partial(once, send)
    seen.spent = interleaved(steps, repeats, watch, group)
    return seen


def _ratios(case: Case, ranks: list[Seen]) -> dict[str, Any]:
    """Returns a row for each contender, and each peer's time over ours: the slowest rank's, within one repeat."""
    spent, keys = [rank.spent for rank in ranks], list(ranks[0].entering)

    def taken(key: str, way: str) -> Any:
        ways = DIRECTIONS if way == "both" else (way,)
        return sum(slowest(spent, (key, one), lambda timing: timing.wall) for one in ways)

    rows = {}
    for key in keys:
        (copied, collectives, host_syncs), entering = max((rank.counts[key], rank.entering[key]) for rank in ranks)
        rows[key] = {
            "passes": copied / entering,
            "collectives": collectives,
            "host_syncs": host_syncs,
            "wall_ms": {way: spread(taken(key, way) * 1e3) for way in DIRECTIONS},
        }
        for name in ("copy", "collective"):
            limit = taken(f"{name} {entering}", "")
            rows[key][f"over_{name}"] = {way: spread(taken(key, way) / limit) for way in DIRECTIONS}
    over = {
        f"{peer}_over_ours": {
            key: {way: spread(taken(f"{key.partition(',')[0]}, {name}", way) / taken(key, way)) for way in BOTH}
            for key in keys
            if key.partition(", ")[2] not in PEERS
        }
        for name, peer in PEERS.items()
    }
    return {**over, "ranks": case.cp, "tokens": case.packing.total, "documents": len(case.lengths), "rows": rows}


def _text(data: dict[str, Any]) -> str:
    lines = [
        f"gdn, heads {data['heads']}, {data['dtype']} on {data['device']}, {data['head_chunks']} head chunks, "
        f"transport {data['transport']}, codec {data['codec']}"
    ]
    columns = (
        "forward ms", "backward ms", "forward / copy", "backward / copy", "forward / collective",
        "backward / collective", "passes", "collectives", "syncs", "loop / this", f"{MEGATRON} / this",
    )  # fmt: skip
    for cell in data["cells"]:
        rows = []
        for key, row in cell["rows"].items():
            numbers = [(row["wall_ms"], 1), (row["over_copy"], 1), (row["over_collective"], 2)]
            over = [cell[f"{peer}_over_ours"].get(key) for peer in PEERS.values()]
            rows.append([
                key, *(f"{number[way]['median']:.{digits}f}" for number, digits in numbers for way in DIRECTIONS),
                f"{row['passes']:.2f}", str(row["collectives"]), str(row["host_syncs"]),
                *(formatted(ratio["both"]) if ratio else "" for ratio in over),
            ])  # fmt: skip
        name = f"{cell['ranks']} ranks, {cell['tokens']} tokens in {cell['documents']} documents"
        lines += ["", f"{name}:", "", *table(("",), columns, rows)]
    ratios = [data[f"{peer}_over_ours"] for peer in PEERS.values()]
    means = [[name, *(f"{of[name]['both']:.2f}" for of in ratios)] for name in ratios[0]]
    heads = [f"{peer} / ours" for peer in PEERS]
    return "\n".join([*lines, "", "Geometric means over the cells:", "", *table(("",), heads, means), "", LEGEND])
