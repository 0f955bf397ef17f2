"""`megatron-cp bench wire`: transports, codecs, and transfers behind computation, where bytes cost something."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.cli.bench import WIRE_RANKS
from megatron_cp.cli.bench_overlap import Measure, Overlapped, PlanTap, handed_over, inbound
from megatron_cp.cli.main import Report
from megatron_cp.cli.measure import DIRECTIONS, formatted, kept_blocks, spread, with_defaults
from megatron_cp.cli.options import case_of
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor import communicator
from megatron_cp.executor.agreement import check_agreement
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message, Pending, RankGroup, TorchGroup
from megatron_cp.executor.head_exchange import start_to_heads
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.transport import TRANSPORTS, Transport, num_rounds
from megatron_cp.testing.parity import Case, draw

PARTS = ("transports", "codecs", "overlap")
LAYERS = ("attention", "gdn")
EXCHANGES = ("all_to_all", "all_gather")
NAIVE, AT_ONCE = "naive loop", "all at once"
HALVES = ("transfer", "compute", "together")
CHUNKS = (1, 2, 4, 8)  # where heads allow
_NUM_HOSTS = 2
_MAIN = 4  # ranks of codecs and overlap in local runs that name none
_TOKENS = 2048  # in all
_HEADS = 4  # of a rank, where chunks are measured
_IN_FLIGHT = (1, 2, 4)
_OWN_ROUNDS = communicator.ROUNDS_IN_FLIGHT
_BOTH = (*DIRECTIONS, "both")

LEGEND = f"""\
All ranks start together and the slowest counts; medians [quartiles] over the repeats, of ratios within each. The order
is another in each.
Transports: one all-to-all of what attention sends to heads, and one all-gather of an average rank's keys and values.
{NAIVE}: for each peer in rank order isend and irecv, and wait for both. {AT_ONCE}: all of those in that order, and then
wait. pairwise, n: n rounds in flight, the first of its rows being what the transport does. between hosts: MiB from any
host to another, counted as they were sent; a backend's own all-gather takes ways that it does not tell.
Codecs: q, k and v packed or coded, sent, and unpacked or decoded. share: of what fewer bytes could gain at most.
Overlap, in half as many repeats: transfer is the exchanges alone, packing included; compute the same kernels alone, on
data at hand and on all ranks at once; hidden = (transfer + compute - together) / the smaller of the two. gain: the time
of the layer in one chunk over that in so many."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """What the command prints."""
    parts = _parts(args.only)
    if args.scheme is not None:
        raise ArgumentError("--scheme", args.scheme, "nothing", "This benchmark measures a2a and headwise.")
    if args.layer not in (None, *LAYERS):
        raise ArgumentError("--layer", args.layer, " or ".join(LAYERS), "That is what this benchmark measures.")
    sizes = (world.size,) if world else (args.cp,) if args.cp else WIRE_RANKS if "transports" in parts else (_MAIN,)
    if sizes == (1,):
        raise ArgumentError("--cp", 1, "2 ranks or more", "One sends nothing.")
    main = _MAIN if len(sizes) > 1 else sizes[0]
    named = hosts_of(world) if world else ()
    jobs = {cp: _job(args, world, parts if cp == main else parts[:1], cp, named) for cp in sizes}
    seen = {cp: _measured(job, args, world) for cp, job in jobs.items()}
    job, data = jobs[main], dict[str, Any]()
    if "transports" in parts:
        data |= _of_transports(jobs, seen)
    if "codecs" in parts:
        data |= _of_codecs(job, seen[main])
    if "overlap" in parts:
        data |= _of_overlap(job, seen[main])
    data |= {
        "cp": main,
        "hosts": list(job.hosts),
        "lengths": list(job.sent.lengths),
        "transport": job.transport.name,
        "repeats": args.repeats,
        "dtype": str(job.sent.dtype).removeprefix("torch."),
        "device": job.sent.device,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    return Report(_text(jobs, data), data, quiet=world is not None and world.rank != 0)


def _parts(asked: str | None) -> tuple[str, ...]:
    names = PARTS if asked is None else tuple(asked.split(","))
    if not set(names) <= set(PARTS):
        raise ArgumentError("--only", asked, f"{' or '.join(PARTS)}, or several of them with commas between")
    return tuple(part for part in PARTS if part in names)


@dataclass(frozen=True)
class Job:
    """What some ranks measure together.

    Attributes:
        parts: of `PARTS`.
        repeats: of transports and codecs.
        hosts: of each rank.
        transport: by which codecs and overlap are measured.
        sent: the attention whose way to heads every transport takes.
        coded: the same for every codec.
        codecs: "none" first.
        layers: of overlap.
        chunks: of codecs and overlap, where heads allow.
    """

    parts: tuple[str, ...]
    repeats: int
    hosts: tuple[int, ...]
    transport: Transport
    sent: Case
    coded: Case
    codecs: tuple[str, ...]
    layers: tuple[Case, ...]
    chunks: tuple[int, ...]

    def plan(self, case: Case, **changes: Any) -> Plan:
        """A case's plan, by the job's transport."""
        return replace(replace(case, **changes).plan(), transport=self.transport)

    def chunks_of(self, case: Case) -> list[int]:
        """The counts into which heads can be cut."""
        most = case.plan().partition.most_groups
        return [count for count in self.chunks if count <= most]

    @property
    def ends(self) -> list[int]:
        """The least and the most chunks of what is coded."""
        counts = self.chunks_of(self.coded)
        return sorted({counts[0], counts[-1]})


def _job(
    args: argparse.Namespace, world: TorchGroup | None, parts: tuple[str, ...], cp: int, named: Sequence[int]
) -> Job:
    def case(layer: str, heads: int, groups: int, documents: int | None = None) -> Case:
        asked = argparse.Namespace(**vars(args))
        asked.cp, asked.layer, asked.dtype = cp, layer, args.dtype or "bfloat16"
        asked.transport, asked.hosts, asked.codec, asked.head_chunks = "collective", None, "none", None
        asked.documents = args.documents if args.documents or args.lengths else documents
        if args.lengths is None and args.tokens_per_rank is None:
            asked.tokens_per_rank = -(-_TOKENS // cp)
        if args.model is None:
            asked.heads = args.heads or heads
            groups = (args.key_heads if layer == "gdn" else None) or args.kv_heads or args.heads or groups
            asked.kv_heads, asked.key_heads = (groups, None) if layer == "attention" else (None, groups)
        asked = with_defaults(asked, world, (layer,), {layer: {"head_dim": 128}})
        scheme = "a2a" if layer == "attention" else "headwise"
        found = replace(case_of(asked, cp, kernel=args.kernel, device=asked.device), scheme=scheme)
        found.refuse_early()
        return found

    # Of four ranks two get twice as many heads as the others, so that messages differ.
    sent, coded = case("attention", 12, 6), case("attention", _HEADS * cp, _HEADS * cp)
    replace(coded, transport=args.transport, codec=args.codec, head_chunks=args.head_chunks).refuse_early()
    layers = LAYERS if args.layer is None else (args.layer,)
    # torchrun's hosts, where there are several; else made up.
    even = Transport.of_even_hosts("hierarchical", cp, args.hosts or _NUM_HOSTS).hosts
    hosts = tuple(named) if len(set(named)) > 1 and args.hosts is None else even
    return Job(
        parts=parts,
        repeats=args.repeats,
        hosts=hosts,
        transport=Transport(args.transport, hosts if args.transport == "hierarchical" else ()),
        sent=sent,
        coded=coded,
        codecs=("none", "fp8", "int8") if args.codec == "none" else ("none", args.codec),
        # One document unless told otherwise: with many short ones attention has little to compute.
        layers=tuple(case(layer, _HEADS * cp, _HEADS * cp, documents=1) for layer in layers),
        chunks=CHUNKS if args.head_chunks is None else tuple(sorted({1, args.head_chunks})),
    )


# -- measuring ---------------------------------------------------------------------------------------------------------

Key = tuple[str | int, ...]
Step = Callable[[Measure], Any]  # something to measure: it calls `measure(direction, call)` for each of its directions


@dataclass
class Seen:
    """What one rank measured.

    Attributes:
        times: seconds of every repeat, by what was measured and its direction, "" where it has but one.
        counted: bytes that it sent to other hosts, by kind of exchange and transport.
    """

    times: dict[Key, list[float]] = field(default_factory=dict)
    counted: dict[tuple[str, str], int] = field(default_factory=dict)


def _measured(job: Job, args: argparse.Namespace, world: TorchGroup | None) -> list[Seen]:
    if world is not None:
        check_agreement(job.plan(job.coded), world)
        return world.all_gather_object(measure_in_process(world, job))
    if args.ranks == "threads":
        with handed_over() as tap:
            return run_ranks(measure, job.sent.cp, job, tap, kind="threads", timeout=args.timeout)
    with kept_blocks():
        return run_ranks(measure_in_process, job.sent.cp, job, kind="processes", timeout=args.timeout)


def measure_in_process(group: RankGroup, job: Job) -> Seen:
    """`measure`, on a rank that has its process to itself."""
    with warnings.catch_warnings(), handed_over() as tap:
        warnings.simplefilter("ignore", UserWarning)
        return measure(group, job, tap)


def measure(group: RankGroup, job: Job, tap: PlanTap) -> Seen:
    """Everything on one rank, part by part."""
    seen = Seen()
    if "transports" in job.parts:
        calls = _transports(group, job)
        seen.counted = _counted(calls, group, job.hosts)
        steps: dict[Key, Step] = {key: partial(_once, partial(call, group)) for key, (call, _) in calls.items()}
        seen.times |= _interleaved(steps, job.repeats, group, job.sent.device)
    if "codecs" in job.parts:
        seen.times |= _interleaved(_codec_steps(group, job), job.repeats, group, job.sent.device)
    if "overlap" in job.parts:
        steps = _overlap_steps(group, job, tap)
        seen.times |= _interleaved(steps, -(-job.repeats // 2), group, job.sent.device, warm=HALVES[-1:])
    return seen


def _once(call: Callable[[], Any], measure: Measure) -> None:
    """What has one direction, as a step."""
    measure("", call)


def _interleaved(
    steps: Mapping[Key, Step], repeats: int, group: RankGroup, device: str, warm: Sequence[str] = ()
) -> dict[Key, list[float]]:
    """Every step once a round, in another order each: a step finds links as the one before has left them.

    Before that once each, or those named `warm` if any.
    """
    times: dict[Key, list[float]] = {}
    for key, step in steps.items():
        if not warm or key[-1] in warm:
            step(lambda _, call: call())
    random = np.random.default_rng(0)  # the same on every rank
    for key in (list(steps)[index] for _ in range(repeats) for index in random.permutation(len(steps))):

        def timed(way: str, call: Callable[[], Any], key: Key = key) -> Any:
            group.barrier()
            start = time.perf_counter()
            result = call()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            times.setdefault((*key, way), []).append(time.perf_counter() - start)
            return result

        steps[key](timed)
    return times


def split_counts_of(plan: Plan, case: Case, part: int = 0) -> SplitCounts:
    """Bytes from rank to rank of one part of attention's way to heads."""
    exchange = inbound(plan)
    dtypes = (case.dtype,) * len(exchange.sections.blocks)
    return Geometry(exchange, 0, dtypes, None, torch.device(case.device), part).split_counts(to_heads=True)


def between_hosts(split_counts: SplitCounts, hosts: Sequence[int]) -> int:
    """Of all that is moved, what crosses hosts."""
    host = np.array(hosts)
    return int(split_counts.counts[host[:, None] != host].sum())


# -- transports --------------------------------------------------------------------------------------------------------


class Counting(RankGroup):
    """A group that counts the bytes that this rank sends to other hosts."""

    def __init__(self, group: RankGroup, hosts: Sequence[int]) -> None:
        self._group, self.sent = group, 0
        self.rank, self.size, self.agreed = group.rank, group.size, group.agreed
        self._is_away = [host != hosts[group.rank] for host in hosts]

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        self.sent += sent.element_size() * int(np.array(sent_splits)[self._is_away].sum())
        return self._group.start_all_to_all(received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self._group.start_all_gather(received, sent)  # how, only the backend knows

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent += sum(message.tensor.nbytes for message in sends if self._is_away[message.peer])
        return self._group.start_messages(sends, receives)

    def barrier(self) -> None:
        self._group.barrier()


Call = Callable[[RankGroup], None]


class AllToAll:
    """One all-to-all on one rank, by any transport, from and to memory that is there."""

    def __init__(self, split_counts: SplitCounts, rank: int, device: str) -> None:
        random = torch.Generator().manual_seed(rank)
        sizes, arriving = split_counts.sent_by(rank), split_counts.received_by(rank)
        self.split_counts = split_counts
        self.sent = torch.randint(256, (sum(sizes),), generator=random, dtype=torch.uint8).to(device)
        self.received = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
        self._pieces = list(zip(self.sent.split(sizes), self.received.split(arriving), strict=True))

    def by(self, transport: Transport, group: RankGroup) -> None:
        Communicator(group, transport).start_all_to_all(self.received, self.sent, self.split_counts).wait()

    def by_rounds(self, in_flight: int, group: RankGroup) -> None:
        # Ranks that share a process set the same, and none is done before all have started.
        communicator.ROUNDS_IN_FLIGHT = in_flight
        try:
            self.by(Transport("pairwise"), group)
        finally:
            communicator.ROUNDS_IN_FLIGHT = _OWN_ROUNDS

    def by_loop(self, group: RankGroup) -> None:
        for sent, received in self._messages(group.rank):
            group.start_messages([sent], [received]).wait()

    def at_once(self, group: RankGroup) -> None:
        messages = self._messages(group.rank)
        group.start_messages([sent for sent, _ in messages], [received for _, received in messages]).wait()

    def _messages(self, rank: int) -> list[tuple[Message, Message]]:
        """To and from each peer in rank order, once the own piece is copied."""
        self._pieces[rank][1].copy_(self._pieces[rank][0])
        peers = [peer for peer in range(len(self._pieces)) if peer != rank]
        return [(Message(self._pieces[peer][0], peer), Message(self._pieces[peer][1], peer)) for peer in peers]


def _all_gather(received: Tensor, sent: Tensor, transport: Transport, group: RankGroup) -> None:
    Communicator(group, transport).start_all_gather(received, sent).wait()


def _in_flight_of(cp: int) -> list[int]:
    """Rounds in flight to compare with those that pairwise has."""
    rounds = num_rounds(cp)
    return sorted({count for count in (*_IN_FLIGHT, rounds) if count <= rounds} - {min(_OWN_ROUNDS, rounds)})


def _pairwise(in_flight: int) -> str:
    return f"pairwise, {in_flight}"


def share_bytes(case: Case) -> int:
    """Of an average rank's keys and values."""
    return sum(case.lengths) // case.cp * case.groups * (case.head_dim + case.value_head_dim) * case.dtype.itemsize


def _transports(group: RankGroup, job: Job) -> dict[tuple[str, str], tuple[Call, Tensor]]:
    """By kind of exchange and transport how to do it, and what it fills."""
    roads_of = {name: Transport(name, job.hosts if name == "hierarchical" else ()) for name in TRANSPORTS}
    moved = AllToAll(split_counts_of(job.sent.plan(), job.sent), group.rank, job.sent.device)
    exchanges: dict[str, Call] = {name: partial(moved.by, transport) for name, transport in roads_of.items()}
    exchanges |= {NAIVE: moved.by_loop, AT_ONCE: moved.at_once}
    exchanges |= {_pairwise(count): partial(moved.by_rounds, count) for count in _in_flight_of(group.size)}
    own = torch.full((share_bytes(job.sent),), group.rank, dtype=torch.uint8, device=job.sent.device)
    everyone = own.new_empty(len(own) * group.size)
    gathers = {name: partial(_all_gather, everyone, own, transport) for name, transport in roads_of.items()}
    kinds = ((EXCHANGES[0], exchanges, moved.received), (EXCHANGES[1], gathers, everyone))
    return {(kind, name): (call, received) for kind, calls, received in kinds for name, call in calls.items()}


def _counted(
    calls: Mapping[tuple[str, str], tuple[Call, Tensor]], group: RankGroup, hosts: Sequence[int]
) -> dict[tuple[str, str], int]:
    """What each sends to other hosts. All must bring what the backend's own does."""
    counted: dict[tuple[str, str], int] = {}
    expected: dict[str, Tensor] = {}
    for (kind, name), (call, received) in calls.items():
        received.zero_()
        counting = Counting(group, hosts)
        call(counting)
        counted[kind, name] = counting.sent
        if not torch.equal(received, expected.setdefault(kind, received.clone())):
            raise RuntimeError(f"{kind} by {name} brought rank {group.rank} something else than by {TRANSPORTS[0]}")
    return counted


# -- codecs ------------------------------------------------------------------------------------------------------------


def _codec_steps(group: RankGroup, job: Job) -> dict[Key, Step]:
    layout = job.plan(job.coded).layout
    tensors = [layout.shard(x, group.rank).flatten(1) for x in draw(job.coded).inputs.values()]

    def to_heads(exchange: Exchange, wire: Communicator) -> None:
        with torch.no_grad():
            for arrive in start_to_heads(exchange, wire, *tensors):
                arrive()

    steps: dict[Key, Step] = {}
    for chunks in job.ends:
        for codec in job.codecs:
            plan = job.plan(job.coded, codec=codec, head_chunks=chunks)
            steps[codec, chunks] = partial(_once, partial(to_heads, inbound(plan), Communicator(group, plan.transport)))
    return steps


def coded_bytes(job: Job, codec: str, chunks: int = 1) -> int:
    """That cross hosts on the way to heads."""
    plan = job.plan(job.coded, codec=codec, head_chunks=chunks)
    return sum(between_hosts(split_counts_of(plan, job.coded, part), job.hosts) for part in range(chunks))


# -- overlap -----------------------------------------------------------------------------------------------------------


def _overlap_steps(group: RankGroup, job: Job, tap: PlanTap) -> dict[Key, Step]:
    steps: dict[Key, Step] = {}
    for case in job.layers:
        problem = draw(case)
        for chunks in job.chunks_of(case):
            layer = Overlapped(case, problem, job.plan(case, head_chunks=chunks), group, tap)
            steps |= {(case.layer, chunks, half): getattr(layer, half) for half in HALVES}
    return steps


# -- the report --------------------------------------------------------------------------------------------------------


def _slowest(ranks: list[Seen], *key: str | int) -> Any:
    """Seconds of the slowest rank in every repeat."""
    if key[-1] == "both":
        return sum(_slowest(ranks, *key[:-1], way) for way in DIRECTIONS)
    return np.array([rank.times[key] for rank in ranks]).max(0)


def _of_transports(jobs: dict[int, Job], seen: dict[int, list[Seen]]) -> dict[str, Any]:
    def taken(cp: int, name: str, kind: str = EXCHANGES[0]) -> Any:
        return _slowest(seen[cp], kind, name, "")

    def over(cp: int, name: str, other: str, kind: str = EXCHANGES[0]) -> dict[str, float]:
        return spread(taken(cp, name, kind) / taken(cp, other, kind))

    def is_slower(cp: int, name: str, other: str) -> bool:
        """Beyond noise: even its quicker quartile is above the other's slower one."""
        return bool(spread(taken(cp, name))["low"] > spread(taken(cp, other))["high"])

    def flat(cp: int, kind: str = EXCHANGES[0]) -> str:
        """The quicker of those that know of no hosts."""
        return min(TRANSPORTS[:2], key=lambda name: float(np.median(taken(cp, name, kind))))

    def each(value: Callable[[int], Any]) -> dict[str, Any]:
        return {str(cp): value(cp) for cp in seen}

    def every(value: Callable[[int, str, str], Any]) -> dict[str, Any]:
        keys = {cp: list(ranks[0].counted) for cp, ranks in seen.items()}
        return {
            kind: each(lambda cp, kind=kind: {name: value(cp, kind, name) for one, name in keys[cp] if one == kind})  # type: ignore[misc]
            for kind in EXCHANGES
        }

    def counted(cp: int, kind: str, name: str) -> int | None:
        own_road = kind == EXCHANGES[1] and name == TRANSPORTS[0]
        return None if own_road else sum(rank.counted[kind, name] for rank in seen[cp])

    return {
        "collective_over_pairwise": each(lambda cp: over(cp, "collective", "pairwise")),
        "naive_over_pairwise": each(lambda cp: over(cp, NAIVE, "pairwise")),
        "at_once_over_pairwise": each(lambda cp: over(cp, AT_ONCE, "pairwise")),
        "flat_over_hierarchical": each(lambda cp: over(cp, flat(cp), "hierarchical")),
        "gather_flat_over_hierarchical": each(
            lambda cp: over(cp, flat(cp, EXCHANGES[1]), "hierarchical", EXCHANGES[1])
        ),
        "pairwise_over_rounds_in_flight": each(
            lambda cp: {str(count): over(cp, "pairwise", _pairwise(count)) for count in _in_flight_of(cp)}
        ),
        "pairwise_is_slower_than_naive": each(lambda cp: is_slower(cp, "pairwise", NAIVE)),
        "hierarchical_is_slower_than_flat": each(lambda cp: is_slower(cp, "hierarchical", flat(cp))),
        "collective_over": every(lambda cp, kind, name: over(cp, TRANSPORTS[0], name, kind)),
        "bytes_between_hosts": every(counted),
        "bytes_planned_between_hosts": each(
            lambda cp: between_hosts(split_counts_of(jobs[cp].sent.plan(), jobs[cp].sent), jobs[cp].hosts)
        ),
        "transports_ms": every(lambda cp, kind, name: spread(taken(cp, name, kind) * 1e3)),
        "rounds_in_flight": each(lambda cp: min(_OWN_ROUNDS, num_rounds(cp))),
    }


def _of_codecs(job: Job, ranks: list[Seen]) -> dict[str, Any]:
    sizes = {codec: {n: coded_bytes(job, codec, n) for n in job.ends} for codec in job.codecs}
    data: dict[str, Any] = {}
    for codec in job.codecs[1:]:
        fewer = {n: sizes["none"][n] / sizes[codec][n] if sizes[codec][n] else 1.0 for n in job.ends}
        gains = {n: _slowest(ranks, "none", n, "") / _slowest(ranks, codec, n, "") for n in job.ends}
        data |= {
            f"{codec}_over_none_speedup": {str(chunks): spread(gain) for chunks, gain in gains.items()},
            f"{codec}_byte_ratio": {str(chunks): ratio for chunks, ratio in fewer.items()},
            f"{codec}_share_of_byte_ratio": {str(n): spread(gain / fewer[n]) for n, gain in gains.items()},
        }
    return data | {
        "coded_bytes_between_hosts": {
            codec: {str(chunks): size for chunks, size in of_chunks.items()} for codec, of_chunks in sizes.items()
        },
        "codecs_ms": {
            codec: {str(chunks): spread(_slowest(ranks, codec, chunks, "") * 1e3) for chunks in job.ends}
            for codec in job.codecs
        },
    }


def _of_overlap(job: Job, ranks: list[Seen]) -> dict[str, Any]:
    def each(value: Callable[[str, int, str], Any]) -> dict[str, Any]:
        return {
            case.layer: {
                str(chunks): {way: spread(value(case.layer, chunks, way)) for way in _BOTH}
                for chunks in job.chunks_of(case)
            }
            for case in job.layers
        }

    def taken(half: str) -> Callable[[str, int, str], Any]:
        return lambda layer, chunks, way: _slowest(ranks, layer, chunks, half, way)

    transfer, compute, together = (taken(half) for half in HALVES)

    def hidden(*key: Any) -> Any:
        saved = transfer(*key) + compute(*key) - together(*key)
        return saved / np.minimum(transfer(*key), compute(*key))

    return {
        "hidden_share": each(hidden),
        "one_chunk_over_chunked": each(
            lambda layer, chunks, way: together(layer, 1, way) / together(layer, chunks, way)
        ),
        **{f"{half}_ms": each(lambda *key, half=half: taken(half)(*key) * 1e3) for half in HALVES},
    }


def _text(jobs: dict[int, Job], data: dict[str, Any]) -> str:
    job = jobs[data["cp"]]
    ranks = [job.hosts.count(host) for host in range(max(job.hosts) + 1)]
    lines = [
        f"wire cp={','.join(map(str, jobs))} {job.sent.layout}, at cp={data['cp']} {sum(job.sent.lengths)} tokens and "
        f"{len(ranks)} hosts of {'+'.join(map(str, ranks))} ranks, {data['dtype']} on {data['device']}, "
        f"{data['repeats']} repeats; torch {data['torch']}, {data['cores']} cores"
    ]
    if "transports" in job.parts:
        lines += ["", f"Transports, {_shape(job.sent)}", "", *_transport_table(data), "", *_verdicts(data)]
    if "codecs" in job.parts:
        lines += ["", f"Codecs, {_shape(job.coded)}, {job.transport.name}", "", *_codec_table(job, data)]
    if "overlap" in job.parts:
        shapes = ", ".join(f"{case.layer} {_shape(case)}" for case in job.layers)
        lines += ["", f"Overlap, {shapes}, {job.transport.name}", "", *_overlap_table(data)]
    return "\n".join([*lines, "", LEGEND])


def _shape(case: Case) -> str:
    documents = "1 document" if len(case.lengths) == 1 else f"{len(case.lengths)} documents"
    return f"heads {case.heads}/{case.groups} of {case.head_dim}, {documents}"


def _table(left: Sequence[str], right: Sequence[str], rows: list[list[str]]) -> list[str]:
    head = [f"| {' | '.join((*left, *right))} |", f"|{'---|' * len(left)}{'--:|' * len(right)}"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def _transport_table(data: dict[str, Any]) -> list[str]:
    rows = []
    for cp, in_flight in data["rounds_in_flight"].items():
        for kind in EXCHANGES:
            for name, taken in data["transports_ms"][kind][cp].items():
                count = data["bytes_between_hosts"][kind][cp][name]
                rows.append([
                    cp, kind.replace("_", "-"), _pairwise(in_flight) if name == "pairwise" else name, formatted(taken),
                    formatted(data["collective_over"][kind][cp][name]), "" if count is None else f"{count / 2**20:.2f}",
                ])  # fmt: skip
    return _table(("ranks", "", "transport"), ("ms", "collective / this", "between hosts"), rows)


def _verdicts(data: dict[str, Any]) -> list[str]:
    words = {False: "not slower", True: "SLOWER"}
    return [
        f"{cp} ranks: {NAIVE} / pairwise {formatted(ratio)}, {words[data['pairwise_is_slower_than_naive'][cp]]} beyond "
        f"noise; flat / hierarchical {formatted(data['flat_over_hierarchical'][cp])}, "
        f"{words[data['hierarchical_is_slower_than_flat'][cp]]} beyond noise; of all-gathers "
        f"{formatted(data['gather_flat_over_hierarchical'][cp])}."
        for cp, ratio in data["naive_over_pairwise"].items()
    ]


def _codec_table(job: Job, data: dict[str, Any]) -> list[str]:
    rows = []
    for codec, of_chunks in data["codecs_ms"].items():
        for chunks, taken in of_chunks.items():
            gain = ["", "", ""]
            if codec != job.codecs[0]:
                speedup, fewer, share_of = (
                    data[f"{codec}_{name}"] for name in ("over_none_speedup", "byte_ratio", "share_of_byte_ratio")
                )
                gain = [formatted(speedup[chunks]), f"{fewer[chunks]:.2f}", formatted(share_of[chunks], percent=True)]
            rows.append([codec, chunks, formatted(taken), *gain])
    return _table(("codec", "chunks"), ("ms", "speed-up", "fewer bytes", "share"), rows)


def _overlap_table(data: dict[str, Any]) -> list[str]:
    rows = [
        [
            layer, chunks, way,
            *(f"{data[f'{half}_ms'][layer][chunks][way]['median']:.0f}" for half in HALVES),
            formatted(hidden, percent=True), formatted(data["one_chunk_over_chunked"][layer][chunks][way]),
        ]
        for layer, of_chunks in data["hidden_share"].items()
        for chunks, ways in of_chunks.items()
        for way, hidden in ways.items()
    ]  # fmt: skip
    return _table(("layer", "chunks", ""), ("transfer ms", "compute ms", "together ms", "hidden", "gain"), rows)
