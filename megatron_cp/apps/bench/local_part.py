"""The local part of `megatron-cp bench exchange`: times packing and unpacking on one thread beside a copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.apps.bench.allocator import keep_freed_memory, page_faults
from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.section_batch import ALL, ALL_SECTIONS, GATES, LAYOUTS, Batch, compare, in_place, leaf
from megatron_cp.apps.bench.spread import formatted, spread, table
from megatron_cp.apps.bench.timing import Watch, interleaved_order, with_progress
from megatron_cp.exchange import Buffers, Geometry, pack_heads, pack_tokens, unpack_heads, unpack_tokens
from megatron_cp.executor import TorchGroup
from megatron_cp.testing import Case

DIRECTIONS = ("to heads", "to tokens", "to tokens, in place")
LOCAL_TARGETS = {"pack": 1.5, "unpack": 1.2}  # time over that of a warm copy, at most
LocalKey = tuple[str, str, str]  # contender, direction, "pack" or "unpack"
LocalWork = dict[LocalKey, tuple[Callable[[], Any], int]]


@dataclass
class LocalStage:
    """Timings of packing or unpacking on one thread.

    Attributes:
        entering: bytes of the tensors that are packed or unpacked.
        seconds, copy: seconds of the stage, and of a copy of as many bytes, in every repeat.
        faults: pages that were paged in meanwhile, in every repeat.
    """

    entering: int
    seconds: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)


def measure_alone(_: TorchGroup, case: Case, repeats: int, with_megatron: bool) -> dict[LocalKey, LocalStage]:
    """Runs `measure_local_part` in a process of its own."""
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about packages that nothing here uses
        return measure_local_part(case, repeats, with_megatron=with_megatron)


def measure_local_part(case: Case, repeats: int, *, with_megatron: bool) -> dict[LocalKey, LocalStage]:
    """Times every stage beside a copy of its bytes, one after the other within every repeat."""
    batch, watch = Batch(case), Watch(torch.device(case.device).type)
    works: LocalWork = {}
    for layout in LAYOUTS:
        for gate, tensors in GATES.items():
            works |= local_work(batch, layout, gate, tensors)
    if with_megatron:
        works |= megatrons_local_work(batch)
    stages = {key: LocalStage(size) for key, (_, size) in works.items()}
    most = max(size for _, size in works.values())
    source, target = (torch.zeros(most, dtype=torch.uint8, device=batch.device) for _ in range(2))
    del batch
    for work, _ in 2 * list(works.values()):
        work()
    names = {"|".join(key): key for key in works}
    for name in with_progress(interleaved_order(list(names), repeats), "timings of the local part"):
        key = names[name]
        work, size = works[key]
        _, copied = watch.timed(lambda size=size: target[:size].copy_(source[:size]))  # type: ignore[misc]
        before = page_faults()
        _, took = watch.timed(work)
        stage = stages[key]
        stage.faults.append(page_faults() - before)
        stage.seconds.append(took.total)
        stage.copy.append(copied.total)
    return stages


def local_work(batch: Batch, layout: str, gate: str, tensors: Sequence[Sequence[str]]) -> LocalWork:
    """Returns our packing and unpacking in both directions, on the first rank, of messages as all ranks send them."""
    rank, buffers, case = 0, Buffers(), batch.case
    exchange = batch.exchange(layout, tensors)
    dtypes = (case.dtype,) * len(exchange.sections.blocks)
    ats = [Geometry(exchange, sender, dtypes, None, batch.device) for sender in range(batch.size)]
    backs = [replace(at, forward=False) for at in ats]
    own = [batch.local(layout, names, rank).contiguous() for names in tensors]
    widths, count = [tensor.shape[1] for tensor in own], len(exchange.parts)

    def packed_tokens(at: Geometry, tensors: list[Tensor]) -> list[Tensor]:
        return [pack_tokens(tensors, part, buffers) for part in at.parts]

    def packed_heads(at: Geometry, sections: list[list[Tensor]]) -> list[Tensor]:
        return [pack_heads(of_part, part, buffers) for of_part, part in zip(sections, at.parts, strict=True)]

    def unpacked_heads(messages: list[Tensor]) -> list[list[Tensor]]:
        return [unpack_heads(message, part) for message, part in zip(messages, ats[rank].parts, strict=True)]

    def arrived(of_ranks: Iterator[list[Tensor]], ats: list[Geometry], *, to_heads: bool) -> list[Tensor]:
        pieces: list[list[Tensor]] = [[] for _ in range(count)]
        for at, messages in zip(ats, of_ranks, strict=True):
            for number, message in enumerate(messages):
                splits = at.parts[number].split_counts(to_heads=to_heads).sent_by(at.rank)
                pieces[number].append(message.split(splits)[rank].clone())
            buffers.release(*messages)
        return [torch.cat(of_part) for of_part in pieces]

    everyone = range(batch.size)
    from_tokens = arrived(
        (packed_tokens(ats[r], [batch.local(layout, names, r) for names in tensors]) for r in everyone),
        ats, to_heads=True,
    )  # fmt: skip
    expected = [batch.own(part, rank) for part in exchange.parts]
    found = unpacked_heads(from_tokens)
    for of_part, wanted in zip(found, expected, strict=True):
        compare(f"{layout}, {gate}: to heads", of_part, wanted, case)
    rows = [in_place(of_part) for of_part in found]
    del found
    from_heads = arrived(
        (packed_heads(backs[r], [batch.own(part, r) for part in exchange.parts]) for r in everyone),
        backs, to_heads=False,
    )  # fmt: skip
    compare(f"{layout}, {gate}: to tokens", unpack_tokens(from_heads, backs[rank], widths), own, case)
    # These are gradients that a kernel wrote in the places of its inputs.
    rowwise = [replace(at, exchange=replace(exchange, section_major=False)) for at in backs]
    in_rows = arrived(
        (packed_heads(rowwise[r], [batch.own(part, r) for part in exchange.parts]) for r in everyone),
        rowwise, to_heads=False,
    )  # fmt: skip
    compare(f"{layout}, {gate}: to tokens, in rows", unpack_tokens(in_rows, rowwise[rank], widths), own, case)
    for placed, of_part, at in zip(rows, expected, rowwise[rank].parts, strict=True):
        messages = [pack_heads(sections, at, buffers) for sections in (placed, of_part)]
        if case.codec == "none" and not torch.equal(*(_without_padding(message, at) for message in messages)):
            raise RuntimeError(f"{layout}, {gate}: gradients in place make another message")
        buffers.release(*messages)

    sent, sizes = sum(tensor.nbytes for tensor in own), sum(x.nbytes for of_part in expected for x in of_part)
    name = f"{layout}, {gate}"
    return {
        (name, DIRECTIONS[0], "pack"): (lambda: buffers.release(*packed_tokens(ats[rank], own)), sent),
        (name, DIRECTIONS[0], "unpack"): (lambda: unpacked_heads(from_tokens), sizes),
        (name, DIRECTIONS[1], "pack"): (lambda: buffers.release(*packed_heads(backs[rank], expected)), sizes),
        (name, DIRECTIONS[1], "unpack"): (lambda: unpack_tokens(from_heads, backs[rank], widths), sent),
        (name, DIRECTIONS[2], "pack"): (lambda: buffers.release(*packed_heads(rowwise[rank], rows)), sizes),
        (name, DIRECTIONS[2], "unpack"): (lambda: unpack_tokens(in_rows, rowwise[rank], widths), sent),
    }


def _without_padding(message: Tensor, at: Geometry) -> Tensor:
    """Returns the bytes of a head side's message that belong to sections."""
    row = at.format.row_bytes[at.rank]
    if not row:
        return message
    used = [
        torch.arange(offset, offset + block.heads_on(at.rank) * block.head_dim * dtype.itemsize)
        for offset, block, dtype in zip(at.format.offsets[at.rank], at.blocks, at.dtypes, strict=True)
    ]
    return message.view(-1, row)[:, torch.cat(used).to(message.device)]


def megatrons_local_work(batch: Batch) -> LocalWork:
    """Returns Megatron's packing and unpacking of the same tensors, and autograd's reverse of both."""
    from megatron_cp.apps.bench.peers.head_exchange import StockExchange

    rank, case = 0, batch.case
    stock = StockExchange(batch.packing, list(batch.widths.values()), batch.size, None, batch.device)
    with torch.no_grad():
        sent = [stock.pack(batch.local("zigzag", ALL, sender)[:, None]) for sender in range(batch.size)]
    arrived = leaf(torch.cat([message.chunk(batch.size)[rank] for message in sent]))
    del sent
    local = leaf(batch.local("zigzag", ALL, rank)[:, None])
    packed, unpacked = stock.pack(local), stock.unpack(arrived)
    sections = batch.exchange("zigzag", (ALL,)).sections
    own = torch.cat([heads.flatten(1) for heads in batch.own(sections, rank)], -1)
    exact = replace(case, codec="none")
    compare(f"{MEGATRON}: to heads", [unpacked[:, 0]], [own], exact)
    gradients = packed.detach().clone(), unpacked.detach().clone()

    def to_tokens(out: Tensor, start: Tensor, gradient: Tensor) -> Tensor:
        return torch.autograd.grad(out, start, gradient, retain_graph=True)[0]

    def without_graph(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return function(tensor)

    work: dict[tuple[str, str], Callable[[], Tensor]] = {
        (DIRECTIONS[0], "pack"): lambda: without_graph(stock.pack, local),
        (DIRECTIONS[0], "unpack"): lambda: without_graph(stock.unpack, arrived),
        (DIRECTIONS[1], "pack"): lambda: to_tokens(unpacked, arrived, gradients[1]),
        (DIRECTIONS[1], "unpack"): lambda: to_tokens(packed, local, gradients[0]),
    }
    compare(
        f"{MEGATRON}: to tokens", [work[DIRECTIONS[1], name]() for name in ("pack", "unpack")], [arrived, local], exact
    )

    def on_this_thread(call: Callable[[], Tensor]) -> Tensor:
        with torch.autograd.set_multithreading_enabled(False):  # another thread would not be on this one's clock
            return call()

    return {
        (MEGATRON, *key): (lambda call=call: on_this_thread(call), local.nbytes)  # type: ignore[misc]
        for key, call in work.items()
    }


def local_ratios(stages: Mapping[LocalKey, LocalStage]) -> dict[str, Any]:
    """Returns the stages' times over those of a copy of their bytes, and in milliseconds."""

    def ratios(what: str, *, of_megatron: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for (name, direction, stage), seen in stages.items():
            if stage == what and (name == MEGATRON) == of_megatron:
                found.setdefault(name, {})[direction] = spread(np.array(seen.seconds) / np.array(seen.copy))
        return found

    over_copy = {what: ratios(what, of_megatron=False) for what in LOCAL_TARGETS}
    theirs = {what: ratios(what, of_megatron=True).get(MEGATRON) for what in LOCAL_TARGETS}
    worst = {
        what: max(ratio["median"] for name, of_directions in over_copy[what].items() if name.endswith(ALL_SECTIONS)
                  for direction, ratio in of_directions.items() if (what, direction) != ("unpack", DIRECTIONS[2]))
        for what in LOCAL_TARGETS
    }  # fmt: skip
    return {
        "pack_over_copy": over_copy["pack"],
        "unpack_over_copy": over_copy["unpack"],
        "megatron_pack_over_copy": theirs["pack"],
        "megatron_unpack_over_copy": theirs["unpack"],
        "local_targets": {
            what: {"at_most": limit, "worst": worst[what], "met": worst[what] <= limit}
            for what, limit in LOCAL_TARGETS.items()
        },
        "local": [
            {
                "contender": name,
                "direction": direction,
                "stage": what,
                "milliseconds": spread(np.array(seen.seconds) * 1e3),
                "copy_milliseconds": spread(np.array(seen.copy) * 1e3),
                "bytes": seen.entering,
                "page_faults": float(np.median(seen.faults)),
            }
            for (name, direction, what), seen in stages.items()
        ],
    }


def local_table(data: dict[str, Any]) -> list[str]:
    """Returns a table with a row for each contender and direction."""
    columns = ("pack / copy", "unpack / copy", "pack ms", "unpack ms", "copy ms", "MiB", "faults")
    cells = []
    rows = {(row["contender"], row["direction"], row["stage"]): row for row in data["local"]}
    ratios = {
        what: {**data[f"{what}_over_copy"], MEGATRON: data[f"megatron_{what}_over_copy"]} for what in LOCAL_TARGETS
    }
    for name, direction in dict.fromkeys((name, direction) for name, direction, _ in rows):
        both = [rows.get((name, direction, what)) for what in LOCAL_TARGETS]
        held = [row for row in both if row]
        cells.append([
            name, direction,
            *(
                formatted(ratios[what][name][direction]) if row else ""
                for what, row in zip(LOCAL_TARGETS, both, strict=True)
            ),
            *(f"{row['milliseconds']['median']:.2f}" if row else "" for row in both),
            f"{np.mean([row['copy_milliseconds']['median'] for row in held]):.2f}",
            f"{held[0]['bytes'] / 2**20:.1f}",
            f"{max(row['page_faults'] for row in held):.0f}",
        ])  # fmt: skip
    return table(("", "direction"), columns, cells)
