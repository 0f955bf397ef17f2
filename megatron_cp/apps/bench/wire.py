"""`megatron-cp bench wire`: measures transports, codecs, and the overlap of transfers with computation."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_cp.apps.bench.defaults import WIRE_RANKS, with_defaults
from megatron_cp.apps.bench.on_ranks import measured_on_ranks
from megatron_cp.apps.bench.overlap import Overlapped, inbound
from megatron_cp.apps.bench.timing import Measure, with_progress
from megatron_cp.apps.bench.transports import count_bytes, transports
from megatron_cp.apps.bench.wire_job import HALVES, PARTS, Job, Key, Seen
from megatron_cp.apps.bench.wire_report import of_codecs, of_overlap, of_transports, text
from megatron_cp.cli import Report, case_of
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange import Exchange
from megatron_cp.executor import Communicator, RankGroup, ToHeadsInParts, TorchGroup, hosts_of
from megatron_cp.plan import DEFAULT, HEADWISE, Transport, knows_hosts
from megatron_cp.testing import Case, draw

LAYERS = ("attention", "gdn")
CHUNKS = (1, 2, 4, 8)  # as far as heads allow
_NUM_HOSTS = 2
_MAIN = 4  # ranks of codecs and overlap in local runs that name none
_TOKENS = 2048  # in all
_HEADS = 4  # heads of a rank in layers whose chunks are measured

Step = Callable[[Measure], Any]  # something to measure: it calls `measure(direction, call)` for each of its directions


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Measures the parts that were asked for and returns the report."""
    parts = _parts(args.only)
    if args.scheme is not None:
        raise ArgumentError("--scheme", args.scheme, "nothing", "This benchmark measures a2a and headwise.")
    if args.layer not in (None, *LAYERS):
        raise ArgumentError("--layer", args.layer, " or ".join(LAYERS), "That is what this benchmark measures.")
    sizes = (world.size,) if world else (args.cp,) if args.cp else WIRE_RANKS if "transports" in parts else (_MAIN,)
    if sizes == (1,):
        raise ArgumentError("--cp", 1, "2 ranks or more", "One rank sends nothing.")
    main = _MAIN if len(sizes) > 1 else sizes[0]
    named = hosts_of(world) if world else ()
    jobs = {cp: _job(args, world, parts if cp == main else parts[:1], cp, named) for cp in sizes}
    seen: dict[int, list[Seen]] = {
        cp: measured_on_ranks(measure, job, plans=[job.plan(job.coded)], cp=job.sent.cp, args=args, world=world)
        for cp, job in jobs.items()
    }
    job, data = jobs[main], dict[str, Any]()
    if "transports" in parts:
        data |= of_transports(jobs, seen)
    if "codecs" in parts:
        data |= of_codecs(job, seen[main])
    if "overlap" in parts:
        data |= of_overlap(job, seen[main])
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
    return Report(text(jobs, data), data, quiet=world is not None and world.rank != 0)


def _parts(asked: str | None) -> tuple[str, ...]:
    names = PARTS if asked is None else tuple(asked.split(","))
    if not set(names) <= set(PARTS):
        raise ArgumentError("--only", asked, f"{' or '.join(PARTS)}, or several of them with commas between")
    return tuple(part for part in PARTS if part in names)


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
            groups = (None if layer == "attention" else args.key_heads) or args.kv_heads or args.heads or groups
            asked.kv_heads, asked.key_heads = (groups, None) if layer == "attention" else (None, groups)
        asked = with_defaults(asked, world, (layer,), {layer: {"head_dim": 128}})
        scheme = DEFAULT.name if layer == "attention" else HEADWISE.name
        found = replace(case_of(asked, cp, kernel=args.kernel, device=asked.device), scheme=scheme)
        found.refuse_early()
        return found

    # Two of four ranks get twice as many heads as the others, so that messages differ.
    sent, coded = case("attention", 12, 6), case("attention", _HEADS * cp, _HEADS * cp)
    replace(coded, transport=args.transport, codec=args.codec, head_chunks=args.head_chunks).refuse_early()
    layers = LAYERS if args.layer is None else (args.layer,)
    # The hosts are torchrun's if there are several, and otherwise imagined.
    even = Transport.even_hosts("hierarchical", cp, args.hosts or _NUM_HOSTS).hosts
    hosts = tuple(named) if len(set(named)) > 1 and args.hosts is None else even
    return Job(
        parts=parts,
        repeats=args.repeats,
        hosts=hosts,
        transport=Transport(args.transport, hosts if knows_hosts(args.transport) else ()),
        sent=sent,
        coded=coded,
        codecs=("none", "fp8", "int8") if args.codec == "none" else ("none", args.codec),
        # One document unless told otherwise: with many short ones attention has little to compute.
        layers=tuple(case(layer, _HEADS * cp, _HEADS * cp, documents=1) for layer in layers),
        chunks=CHUNKS if args.head_chunks is None else tuple(sorted({1, args.head_chunks})),
    )


def measure(group: RankGroup, job: Job) -> Seen:
    """Measures every part on one rank."""
    seen = Seen()
    if "transports" in job.parts:
        calls = transports(group, job)
        seen.counted = count_bytes(calls, group, job.hosts)
        steps: dict[Key, Step] = {key: partial(_once, partial(call, group)) for key, (call, _) in calls.items()}
        seen.times |= _interleaved(steps, job.repeats, group, job.sent.device)
    if "codecs" in job.parts:
        seen.times |= _interleaved(_codec_steps(group, job), job.repeats, group, job.sent.device)
    if "overlap" in job.parts:
        steps = _overlap_steps(group, job)
        seen.times |= _interleaved(steps, -(-job.repeats // 2), group, job.sent.device, warm=HALVES[-1:])
    return seen


def _once(call: Callable[[], Any], measure: Measure) -> None:
    measure("", call)


def _interleaved(
    steps: Mapping[Key, Step], repeats: int, group: RankGroup, device: str, warm: Sequence[str] = ()
) -> dict[Key, list[float]]:
    """Times every step once a round, in changing order, since a step finds links as the one before has left them.

    Every step, or those named `warm` if any, runs once before.
    """
    times: dict[Key, list[float]] = {}
    for key, step in steps.items():
        if not warm or key[-1] in warm:
            step(lambda _, call: call())
    random = np.random.default_rng(0)  # the same on every rank
    turns = [list(steps)[index] for _ in range(repeats) for index in random.permutation(len(steps))]
    for key in with_progress(turns, f"timings over {group.size} ranks", group.rank):

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


def _codec_steps(group: RankGroup, job: Job) -> dict[Key, Step]:
    layout = job.plan(job.coded).layout
    tensors = [layout.shard(x, group.rank).flatten(1) for x in draw(job.coded).inputs.values()]

    def to_heads(exchange: Exchange, comm: Communicator) -> None:
        with torch.no_grad():
            move = ToHeadsInParts(exchange, comm)
            move.start(*tensors)
            for part in range(move.num_parts):
                move.finish(part)

    steps: dict[Key, Step] = {}
    for chunks in job.ends:
        for codec in job.codecs:
            plan = job.plan(job.coded, codec=codec, head_chunks=chunks)
            steps[codec, chunks] = partial(_once, partial(to_heads, inbound(plan), Communicator(group, plan.transport)))
    return steps


def _overlap_steps(group: RankGroup, job: Job) -> dict[Key, Step]:
    steps: dict[Key, Step] = {}
    for case in job.layers:
        problem = draw(case)
        for chunks in job.chunks_of(case):
            layer = Overlapped(case, problem, job.plan(case, head_chunks=chunks), group)
            steps |= {(case.layer, chunks, half): getattr(layer, half) for half in HALVES}
    return steps
