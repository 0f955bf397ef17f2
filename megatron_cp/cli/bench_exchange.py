"""`megatron-cp bench exchange`: the head exchange of Gated DeltaNet beside a copy of its bytes and megatron-core's own.

Shapes: `t` a rank's tokens, `T` all tokens, `f` features of all sections, `h` heads, `d` head size.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.cli.bench import EXCHANGE_RANKS
from megatron_cp.cli.bench_pack import (
    ALL,
    ALL_SECTIONS,
    GATES,
    LAYOUTS,
    MEGATRON,
    SENT,
    Batch,
    compare,
    in_place,
    keep_freed_memory,
    leaf,
    local_ratios,
    local_table,
    measure_alone,
    megatron_missing,
)
from megatron_cp.cli.main import Report
from megatron_cp.cli.measure import DIRECTIONS, Timing, Watch, formatted, interleaved_order, spread, with_defaults
from megatron_cp.cli.options import MODELS, case_of, hosts_of_job
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import TorchGroup
from megatron_cp.executor.head_exchange import ToTokensInParts, start_to_heads
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.counters import Counters
from megatron_cp.testing.parity import Case

LOOP = "loop"
PROJECTION = (("q", "k", "v"), ("z",), ("beta",), ("alpha",))
CUT = "without the gate, cut from one projection"
STAGES = ("inbound forward", "inbound backward", "outbound forward", "outbound backward")
SEPARATE, IN_PLACE = "separate", "in place"
TARGETS = {LOOP: 5.0, MEGATRON: 3.0}  # over ours, at least, as geometric means
_SHAPE = MODELS["qwen3-next"]["gdn"]
_SHAPES = {"gdn": {"heads": _SHAPE.heads, "key_heads": _SHAPE.groups, "head_dim": _SHAPE.head_dim}}
_DOCUMENTS = 16
_CELLS = ((1024, 16), (4096, 16), (8192, 64))  # tokens and documents
_CELL_RANKS = (2, 4)

LEGEND = f"""\
Local part: one rank's, on one thread, of messages that are there already. Every stage is timed beside a copy of the
bytes that enter it between two buffers that are in memory. Ours packs into pooled buffers; whatever else is made, by
either side, comes from an allocator that keeps what is freed, so that nothing is paged in: *faults* counts the pages
that were, in the median call. {MEGATRON}: its order of heads and its split and cat before the collective, its gather of
tokens after it; to tokens, autograd's way back through the same.
One exchange: {MEGATRON} is what `GatedDeltaNet.forward` does around its collective, the order of tokens built in each
layer included; {LOOP} is what {MEGATRON} did before, with its own functions: a call for every document and section.
Medians [quartiles] over the repeats of ratios within each, wall time of the slowest rank; *local*: time of that rank's
own thread without the wire; *copy*: one warm copy of what enters the exchange, on all ranks at once.
*Gradients* arrive on the head side in tensors of their own, as most kernels return them (for {MEGATRON} after its own
`torch.split`); *in place* is where the inputs stood, as a kernel that asked `like_rows` for its buffers writes them:
they leave as rows of all sections, so that packing gathers or does nothing, and unpacking cuts rows. Those of separate
tensors leave section by section. The limit of unpacking is for these, which are Gated DeltaNet's.
*Cut from one projection*: what travels is columns of one tensor with the gate; autograd joins the gradients of all.
*Passes*: bytes written by copy-like operators in units of what enters; *MiB*: the same bytes on a rank. *Syncs*:
operators and methods that make the host wait."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """What the command prints."""
    if args.ranks != "processes":
        raise ArgumentError("--ranks", args.ranks, "processes", f"{MEGATRON} knows no other ranks.")
    if args.scheme not in (None, "headwise"):
        raise ArgumentError("--scheme", args.scheme, "headwise", "That is the one that exchanges heads.")
    asked = world.size if world else args.cp
    args = argparse.Namespace(**vars(args))
    args.dtype, args.scheme = args.dtype or "bfloat16", "headwise"
    cells = _cells(args.cells, asked, world)
    args.cp = asked or EXCHANGE_RANKS
    if args.lengths is None:
        tokens = (args.tokens_per_rank or 2048) * args.cp
        args.lengths = aligned_lengths(tokens, args.documents or _DOCUMENTS, 2 * args.cp, "--tokens-per-rank")
        args.tokens_per_rank = args.documents = None
    args = with_defaults(args, world, ("gdn",), _SHAPES)
    local = case_of(args, args.cp, device=args.device, hosts=hosts_of_job(args, world, args.cp))
    check_is_megatrons(local)
    cases = sorted((_of_cell(local, cell) for cell in cells), key=lambda case: case.cp)
    for case in cases:
        check_is_megatrons(case)
    return _reported(local, cases, args, world)


def _reported(local: Case, cases: list[Case], args: argparse.Namespace, world: TorchGroup | None) -> Report:
    not_run = megatron_missing()
    peers = not not_run
    if world is not None:
        stages = [measure_alone(world, local, args.repeats, peers)] if world.rank == 0 else []
        world.barrier()
        sets = [world.all_gather_object(measure(world, cases, args.repeats, peers))]
    else:
        limit = args.timeout
        stages = run_ranks(measure_alone, 1, local, args.repeats, peers, kind="processes", timeout=limit)
        sets = [
            run_ranks(measure, size, list(of_size), args.repeats, peers, kind="processes", timeout=limit)
            for size, of_size in itertools.groupby(cases, lambda case: case.cp)
        ]
    ranks = [list(of_cell) for of_ranks in sets for of_cell in zip(*of_ranks, strict=True)]
    if world is not None and world.rank != 0:
        return Report("", quiet=True)
    data = {
        **local_ratios(stages[0]),
        **_exchange_ratios([cell_rows(case, seen) for case, seen in zip(cases, ranks, strict=True)]),
        "megatron_host_syncs_in_checks": ranks[0][0].syncs_in_checks,
        "cp": args.cp,
        "layer": args.layer,
        "heads": [local.heads, local.groups, local.head_dim, local.value_head_dim],
        "dtype": args.dtype,
        "lengths": list(local.lengths),
        "head_chunks": args.head_chunks or 1,
        "transport": args.transport,
        "codec": args.codec,
        "repeats": args.repeats,
        "device": args.device,
        "torch": torch.__version__,
        "megatron_core": version(MEGATRON) if peers else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "not_run": not_run,
    }
    return Report(_text(local, data), data)


# -- what was asked for ------------------------------------------------------------------------------------------------


def _cells(given: str | None, ranks: int | None, world: TorchGroup | None) -> list[tuple[int, int, int]]:
    """Ranks, tokens and documents of each exchange that is timed between processes."""
    if given is None:
        return [(size, *batch) for size in ([ranks] if ranks else _CELL_RANKS) for batch in _CELLS]
    cells = []
    for text in given.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)/(\d+)", text)
        if match is None or not all(int(number) for number in match.groups()):
            raise ArgumentError("--cells", given, "RANKSxTOKENS/DOCUMENTS,... as in 2x1024/16,4x8192/64")
        size, tokens, documents = (int(number) for number in match.groups())
        if world and size != world.size:
            raise ArgumentError("--cells", given, f"cells of the {world.size} ranks of this job")
        cells.append((size, tokens, documents))
    return cells


def aligned_lengths(tokens: int, documents: int, multiple: int, name: str = "--cells") -> list[int]:
    """Documents of very different lengths, always the same, all multiples of what Megatron can shard.

    Raises:
        ArgumentError: there are not as many multiples as documents in so many tokens.
    """
    units = tokens // multiple
    if tokens % multiple or units < documents:
        raise ArgumentError(
            name, f"{tokens} tokens in {documents} documents", f"multiples of 2 * cp = {multiple}, one a document"
        )
    draws = np.random.default_rng(0).lognormal(mean=3.0, sigma=1.2, size=documents)
    cuts = np.round(np.cumsum(draws) / draws.sum() * (units - documents)).astype(int)  # beyond the one that each has
    return ((np.diff(cuts, prepend=0) + 1) * multiple).tolist()


def _of_cell(case: Case, cell: tuple[int, int, int]) -> Case:
    size, tokens, documents = cell
    case = replace(case, cp=size)
    _check_ranks(case)
    return replace(case, lengths=tuple(aligned_lengths(tokens, documents, 2 * size)))


def check_is_megatrons(case: Case) -> None:
    """Refuses what Megatron cannot exchange, so that no report lacks its peer."""
    _check_ranks(case)
    if any(not length or length % (2 * case.cp) for length in case.lengths):
        allowed = f"multiples of 2 * cp = {2 * case.cp}"
        raise ArgumentError("--lengths", list(case.lengths), allowed, f"{MEGATRON} shards no others.")
    case.plan()


def _check_ranks(case: Case) -> None:
    if case.cp < 2 or case.groups % case.cp:
        allowed = f"divisors of the {case.groups} key heads above 1"
        raise ArgumentError("--cp", case.cp, allowed, f"{MEGATRON} exchanges no others.")


# -- one exchange between processes ------------------------------------------------------------------------------------

Outputs = list[Tensor]
Gradients = tuple[Outputs, list[Tensor]]  # the tensors to differentiate and the gradient of each
Forms = dict[str, Callable[[Outputs], Gradients]]


@dataclass
class Contender:
    """One way to do one exchange.

    The gradient of every element is the element itself, so that the gradient of each input must be the input.

    Attributes:
        way: "inbound" (tokens to heads) or "outbound".
        inputs: leaves of the graph.
        entering: bytes of what enters the exchange: the unit of copy passes.
        forward: from the inputs to what the layer goes on with.
        gradients: for each form in which the gradients of those arrive, how to get them.
        expected: what `forward` must return.
        case: whose codec says how exactly.
    """

    name: str
    way: str
    inputs: list[Tensor]
    entering: int
    forward: Callable[[], Outputs]
    gradients: Forms
    expected: list[Tensor]
    case: Case

    def check(self) -> None:
        """Raises unless this delivers what it should, forward and backward."""
        outputs = self.forward()
        compare(f"{self.name}, {self.way}", outputs, self.expected, self.case)
        for form, gradients_of in self.gradients.items():
            outs, gradients = gradients_of(outputs)
            found = torch.autograd.grad(outs, self.inputs, gradients, retain_graph=True)
            compare(f"{self.name}, {self.way}, gradients {form}", found, self.inputs, self.case)

    def run(self, measure: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Forward, and backward for each form of gradients, every stage through `measure(key, call)`."""
        outputs = measure(self.key("forward"), self.forward)
        for form, gradients_of in self.gradients.items():
            outs, gradients = gradients_of(outputs)
            measure(self.key("backward", form), partial(self._backward, outs, gradients))

    def _backward(self, outs: Outputs, gradients: list[Tensor]) -> Any:
        with torch.autograd.set_multithreading_enabled(False):  # another thread would not be on this one's clock
            return torch.autograd.grad(outs, self.inputs, gradients, retain_graph=True)

    def key(self, direction: str, form: str = "") -> str:
        """What a stage is known by."""
        return "|".join((f"{self.way} {direction}", self.name, form))


@dataclass
class Seen:
    """What one stage of one contender did on one rank."""

    entering: int
    written: int = 0
    collectives: int = 0
    host_syncs: int = 0
    spent: list[Timing] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)  # a warm copy of `entering` bytes


@dataclass
class OnRank:
    """What one rank saw."""

    stages: dict[str, Seen]
    syncs_in_checks: dict[str, int] | None = None


def ours(batch: Batch, layout: str, wire: Communicator) -> list[Contender]:
    """Both directions from one layout: with the gate, as Megatron sends it, and without, as the layer does it."""
    rank, case = wire.rank, batch.case

    def separate(outputs: Outputs) -> Gradients:
        return outputs, [output.detach().clone(memory_format=torch.contiguous_format) for output in outputs]

    def arrive(exchange: Exchange, *tensors: Tensor) -> Outputs:
        return [section for arrived in start_to_heads(exchange, wire, *tensors) for section in arrived()]

    def placed(exchange: Exchange, inputs: list[Tensor]) -> Callable[[Outputs], Gradients]:
        count = len(exchange.sections.blocks)

        def gradients(_: Outputs) -> Gradients:
            outputs = arrive(
                replace(exchange, section_major=False), *inputs
            )  # which is what lets them leave as they lie
            values = [output.detach() for output in outputs]
            parts = [values[start : start + count] for start in range(0, len(values), count)]
            return outputs, [gradient for part in parts for gradient in in_place(part)]

        return gradients

    def wanted(exchange: Exchange) -> list[Tensor]:
        return [section for part in exchange.parts for section in batch.own(part, rank)]

    found = []
    for gate, tensors in GATES.items():
        exchange = batch.exchange(layout, tensors)
        inputs = [leaf(batch.local(layout, names, rank)) for names in tensors]
        found.append(Contender(
            f"{layout}, {gate}", "inbound", inputs, sum(x.nbytes for x in inputs),
            lambda exchange=exchange, inputs=inputs: arrive(exchange, *inputs),  # type: ignore[misc]
            {IN_PLACE: placed(exchange, inputs), SEPARATE: separate}, wanted(exchange), case,
        ))  # fmt: skip
    exchange, projection = batch.exchange(layout, SENT), leaf(batch.local(layout, ALL, rank))
    widths = [sum(batch.widths[name] for name in names) for names in PROJECTION]

    def cut_projection() -> Outputs:
        qkv, z, beta, alpha = projection.split(widths, -1)
        return [*arrive(exchange, qkv, beta, alpha), z]

    found.append(Contender(
        f"{layout}, {CUT}", "inbound", [projection], found[-1].entering, cut_projection, {SEPARATE: separate},
        [*wanted(exchange), batch.local(layout, "z", rank)], case,
    ))  # fmt: skip
    back = batch.back(layout)
    outs = [leaf(section) for part in back.parts for section in batch.own(part, rank)]

    def leave() -> Outputs:
        in_flight = ToTokensInParts(back, wire)
        for part, out in enumerate(outs):
            in_flight.start(part, out)
        return in_flight.finish()

    found.append(Contender(
        layout, "outbound", list(outs), sum(out.nbytes for out in outs), leave, {"": separate},
        [batch.local(layout, "v", rank)], case,
    ))  # fmt: skip
    return found


def megatrons(batch: Batch, group: TorchGroup) -> tuple[list[Contender], Callable[[], None]]:
    """Both directions, fused and in loops, and the checks of the documents that come before."""
    from megatron_cp.megatron.bench_peers import StockExchange

    rank, size, case = group.rank, group.size, replace(batch.case, codec="none")
    stock = StockExchange(batch.packing, list(batch.widths.values()), size, group.group, batch.device)
    split = [sum(batch.widths[name] for name in names) // size for names in PROJECTION]
    local = leaf(batch.local("zigzag", ALL, rank)[:, None])
    own = batch.own(batch.exchange("zigzag", (ALL,)).sections, rank)
    out = leaf(own[ALL.index("v")].flatten(1)[:, None])

    def whole(outputs: Outputs) -> Gradients:
        return outputs, [output.detach().clone() for output in outputs]

    def separate(outputs: Outputs) -> Gradients:
        return whole(list(outputs[0].split(split, -1)))

    joined, back = torch.cat([heads.flatten(1) for heads in own], -1), batch.local("zigzag", "v", rank)

    def contenders(
        name: str, to_heads: Callable[[Tensor], Tensor], to_tokens: Callable[[Tensor], Tensor]
    ) -> list[Contender]:
        forms: Forms = {IN_PLACE: whole, SEPARATE: separate}
        whole_only: Forms = {"": whole}
        return [
            Contender(name, "inbound", [local], local.nbytes, lambda: [to_heads(local)], forms, [joined], case),
            Contender(name, "outbound", [out], out.nbytes, lambda: [to_tokens(out)], whole_only, [back], case),
        ]

    fused = contenders(MEGATRON, stock.to_heads, stock.to_tokens)
    in_loops = contenders(LOOP, stock.to_heads_in_loops, stock.to_tokens_in_loops)
    return [*fused, *in_loops], stock.check_offsets


def measure(group: TorchGroup, cases: list[Case], repeats: int, with_megatron: bool) -> list[OnRank]:
    """Everything on one rank, cell by cell."""
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about packages that nothing here uses
        return [_measured(group, case, repeats, with_megatron=with_megatron) for case in cases]


def _measured(group: TorchGroup, case: Case, repeats: int, *, with_megatron: bool) -> OnRank:
    """One cell: the same bits first, then counts, then times."""
    batch, watch = Batch(case), Watch(torch.device(case.device).type)
    contenders: list[Contender] = []
    syncs = None
    if with_megatron:
        contenders, check_offsets = megatrons(batch, group)
        counters = Counters()
        with counters:
            check_offsets()
        syncs = dict(counters.host_syncs)
    for layout in LAYOUTS:
        contenders += ours(batch, layout, Communicator(group, batch.plans[layout].transport))
    for contender in contenders:
        contender.check()
    stages: dict[str, Seen] = {}
    for contender in contenders:
        contender.run(partial(_counted, stages, contender))
    _time(group, contenders, stages, repeats, watch)
    return OnRank(stages, syncs)


def _counted(stages: dict[str, Seen], contender: Contender, key: str, call: Callable[[], Any]) -> Any:
    """`call()` under `Counters`."""
    counters = Counters()
    with counters:
        result = call()
    stages[key] = Seen(
        contender.entering, sum(counters.copied.values()), counters.collectives, sum(counters.host_syncs.values())
    )
    return result


def _time(
    group: TorchGroup, contenders: list[Contender], stages: dict[str, Seen], repeats: int, watch: Watch
) -> None:  # fmt: skip
    most = max(contender.entering for contender in contenders)
    source, target = (torch.zeros(most, dtype=torch.uint8, device=contenders[0].inputs[0].device) for _ in range(2))
    numbers = [str(number) for number in range(len(contenders))]
    with watched_wire(watch):
        for number in interleaved_order(numbers, repeats):
            contender = contenders[int(number)]
            size = contender.entering
            group.barrier()
            _, copied = watch.timed(lambda size=size: target[:size].copy_(source[:size]))  # type: ignore[misc]

            def timed(key: str, call: Callable[[], Any], copy: float = copied.wall) -> Any:
                group.barrier()
                result, spent = watch.timed(call)
                stages[key].spent.append(spent)
                stages[key].copy.append(copy)
                return result

            contender.run(timed)


@contextlib.contextmanager
def watched_wire(watch: Watch) -> Iterator[None]:
    """Within it torch.distributed says how long it takes, whoever calls it."""
    names = ("all_to_all_single", "isend", "irecv")
    had = {name: getattr(dist, name) for name in names}
    for name, function in had.items():
        setattr(dist, name, _watched(function, watch))
    try:
        yield
    finally:
        for name, function in had.items():
            setattr(dist, name, function)


def _watched(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with watch.span("wire"):
            started = function(*args, **kwargs)
        return started and _WatchedWork(started, watch)

    return call


class _WatchedWork:
    def __init__(self, work: Any, watch: Watch) -> None:
        self._work, self._watch = work, watch

    def wait(self, *limit: Any) -> None:
        with self._watch.span("wire"):
            self._work.wait(*limit)


# -- the report --------------------------------------------------------------------------------------------------------


def cell_rows(case: Case, ranks: list[OnRank]) -> dict[str, Any]:
    """One row a stage, contender and form of gradients: counts of the busiest rank, times of the slowest."""
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
            copy = np.max([rank[key].copy for rank in stages], axis=0)
            rows.append({
                "stage": stage,
                "contender": name,
                "gradients": form,
                "loop_over_this": over(LOOP, stage, key, form),
                "megatron_over_this": over(MEGATRON, stage, key, form),
                "over_copy": spread(times[key] / copy),
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
    """How much longer the peer takes than each of ours, with gradients in tensors of their own; nothing without it."""
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
                direction: spread(their / mine) for direction, (their, mine) in zip(_BOTH, pairs, strict=True)
            }
    return found


_BOTH = (*DIRECTIONS, "both")


def _exchange_ratios(cells: list[dict[str, Any]]) -> dict[str, Any]:
    def means(peer: str) -> dict[str, Any]:
        of_cells = [cell[f"{_peer(peer)}_over_ours"] for cell in cells]
        return {
            name: {way: statistics.geometric_mean(ratios[name][way]["median"] for ratios in of_cells) for way in _BOTH}
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
        "cells": cells,
    }


def _of_copies(data: dict[str, Any]) -> str:
    return "" if data["codec"] == "none" else " where nothing is coded"


def _text(case: Case, data: dict[str, Any]) -> str:
    sizes = f"{case.head_dim}/{case.value_head_dim}"
    chunks = f"{data['head_chunks']} head chunk{'s' * (data['head_chunks'] > 1)}"
    wire = f"{chunks}, transport {data['transport']}, codec {data['codec']}"
    versions = f"torch {data['torch']}, megatron-core {data['megatron_core'] or 'none'}, python {data['python']}"
    return "\n".join([
        f"gdn, heads {case.heads}/{case.groups} of {sizes}, {data['dtype']} on {data['device']}, {wire}, "
        f"{data['repeats']} repeats; {versions}, {data['cores']} cores",
        *(f"{name} was not run: {reason}." for name, reason in data["not_run"].items()),
        "",
        f"### Local part, {case.packing.total // case.cp} tokens a rank, cp {case.cp}",
        "",
        *local_table(data),
        "",
        *(
            f"{what.capitalize()}, {ALL_SECTIONS}: at most {found['worst']:.2f} of a copy, at most "
            f"{found['at_most']} is the target{_of_copies(data)}: {_met(found)}."
            for what, found in data["local_targets"].items()
        ),
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


def _met(found: Mapping[str, Any]) -> str:
    return "met" if found["met"] else "NOT met"


def _cell_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['ranks']} ranks, {cell['tokens']} tokens in {cell['documents']} documents"


def _cells_table(data: dict[str, Any]) -> list[str]:
    """A row for each cell, contender and way, forward and backward beside each other."""
    lines = []
    for cell in data["cells"]:
        rows = {(row["stage"], row["contender"], row["gradients"]): row for row in cell["rows"]}
        lines += [
            f"{_cell_name(cell)}:",
            "",
            "| | forward ms | of it local | backward ms | of it local | forward / copy | backward / copy "
            "| loop / this | megatron-core / this |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for way, form in (("inbound", SEPARATE), ("outbound", "")):
            for name in [contender for stage, contender, _ in rows if stage == f"{way} forward"]:
                both = [rows[f"{way} forward", name, ""], rows[f"{way} backward", name, form]]
                key = f"{way}, {name}"
                ratios = [cell[f"{_peer(peer)}_over_ours"].get(key) for peer in TARGETS]
                cells = [
                    key,
                    *(f"{row[what]['median']:.1f}" for row in both
                      for what in ("milliseconds", "local_milliseconds")),
                    *(f"{row['over_copy']['median']:.1f}" for row in both),
                    *(formatted(ratio["both"]) if ratio else "" for ratio in ratios),
                ]  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def _means_table(data: dict[str, Any]) -> list[str]:
    """Geometric means over the cells."""
    found = {peer: data[f"{_peer(peer)}_over_ours"] for peer in TARGETS}
    if not found[MEGATRON]:
        return ["No peer was run."]
    lines = [
        "Geometric means over the cells:",
        "",
        "| | loop / ours forward | backward | both | megatron-core / ours forward | backward | both |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in found[MEGATRON]:
        cells = [f"{ratios[name][way]:.2f}" for ratios in found.values() for way in _BOTH]
        lines.append(f"| {' | '.join([name, *cells])} |")
    targets = [
        f"{peer} / ours, {LAYOUTS[0]}, {ALL_SECTIONS}, both directions: {each['found']['both']:.2f}, at least "
        f"{each['at_least']:g} is the target{_of_copies(data)}: {_met(each)}."
        for peer, each in data["exchange_targets"].items()
    ]
    return [*lines, "", *targets]


def _counts_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| | | gradients | passes | MiB | collectives | syncs |", "|---|---|---|--:|--:|--:|--:|"]
    for row in rows:
        cells = [
            row["stage"], row["contender"], row["gradients"], f"{row['copy_passes']:.2f}",
            f"{row['bytes_written'] / 2**20:.1f}", row["collectives"], row["host_syncs"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
