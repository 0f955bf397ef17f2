"""The ratios and tables of `megatron-cp bench wire`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_cp.apps.bench.spread import formatted, spread, table
from megatron_cp.apps.bench.timing import BOTH, DIRECTIONS
from megatron_cp.apps.bench.transports import AT_ONCE, EXCHANGES, NAIVE, in_flight_of, pairwise
from megatron_cp.apps.bench.wire_job import HALVES, Job, Seen, between_hosts, coded_bytes, split_counts_of
from megatron_cp.executor import ROUNDS_IN_FLIGHT
from megatron_cp.plan import TRANSPORTS, counted, num_rounds
from megatron_cp.testing import Case

LEGEND = f"""\
All ranks start together and the slowest counts; medians [quartiles] over the repeats, of ratios within one repeat. The
order changes from repeat to repeat.
Transports: one all-to-all of attention's exchange to heads, and one all-gather of an average rank's keys and values.
{NAIVE}: isend and irecv for each peer in rank order, waiting for both. {AT_ONCE}: all of those in that order, and then
waiting. pairwise, n: n rounds in flight; its first row has the transport's own number. between hosts: MiB from any host
to another, counted as they were sent; those of a backend's own all-gather are not known.
Codecs: q, k and v are packed or coded, sent, and unpacked or decoded. share: part of what fewer bytes can gain.
Overlap, in half as many repeats: transfer is the exchanges alone, packing included; compute is the same kernels alone,
on data that has arrived and on all ranks at once; hidden = (transfer + compute - together) / the smaller of the two.
gain: the time of the layer in one chunk over that in several."""


def _slowest(ranks: list[Seen], *key: str | int) -> Any:
    if key[-1] == "both":
        return sum(_slowest(ranks, *key[:-1], way) for way in DIRECTIONS)
    return np.array([rank.times[key] for rank in ranks]).max(0)


def of_transports(jobs: dict[int, Job], seen: dict[int, list[Seen]]) -> dict[str, Any]:
    """Returns the times of transports, ratios first."""

    def taken(cp: int, name: str, kind: str = EXCHANGES[0]) -> Any:
        return _slowest(seen[cp], kind, name, "")

    def over(cp: int, name: str, other: str, kind: str = EXCHANGES[0]) -> dict[str, float]:
        return spread(taken(cp, name, kind) / taken(cp, other, kind))

    def is_slower(cp: int, name: str, other: str) -> bool:
        """Returns True if even its quicker quartile is above the other's slower one, which is beyond noise."""
        return bool(spread(taken(cp, name))["low"] > spread(taken(cp, other))["high"])

    def flat(cp: int, kind: str = EXCHANGES[0]) -> str:
        """Returns the quicker of the transports that know no hosts."""
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
        own_transport = kind == EXCHANGES[1] and name == TRANSPORTS[0]
        return None if own_transport else sum(rank.counted[kind, name] for rank in seen[cp])

    return {
        "collective_over_pairwise": each(lambda cp: over(cp, "collective", "pairwise")),
        "naive_over_pairwise": each(lambda cp: over(cp, NAIVE, "pairwise")),
        "at_once_over_pairwise": each(lambda cp: over(cp, AT_ONCE, "pairwise")),
        "flat_over_hierarchical": each(lambda cp: over(cp, flat(cp), "hierarchical")),
        "gather_flat_over_hierarchical": each(
            lambda cp: over(cp, flat(cp, EXCHANGES[1]), "hierarchical", EXCHANGES[1])
        ),
        "pairwise_over_rounds_in_flight": each(
            lambda cp: {str(count): over(cp, "pairwise", pairwise(count)) for count in in_flight_of(cp)}
        ),
        "pairwise_is_slower_than_naive": each(lambda cp: is_slower(cp, "pairwise", NAIVE)),
        "hierarchical_is_slower_than_flat": each(lambda cp: is_slower(cp, "hierarchical", flat(cp))),
        "collective_over": every(lambda cp, kind, name: over(cp, TRANSPORTS[0], name, kind)),
        "bytes_between_hosts": every(counted),
        "bytes_planned_between_hosts": each(
            lambda cp: between_hosts(split_counts_of(jobs[cp].sent.plan(), jobs[cp].sent), jobs[cp].hosts)
        ),
        "transports_ms": every(lambda cp, kind, name: spread(taken(cp, name, kind) * 1e3)),
        "rounds_in_flight": each(lambda cp: min(ROUNDS_IN_FLIGHT, num_rounds(cp))),
    }


def of_codecs(job: Job, ranks: list[Seen]) -> dict[str, Any]:
    """Returns the gains of codecs, and the most that fewer bytes could gain."""
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


def of_overlap(job: Job, ranks: list[Seen]) -> dict[str, Any]:
    """Returns the shares of transfers or computation that are hidden behind the other."""

    def each(value: Callable[[str, int, str], Any]) -> dict[str, Any]:
        return {
            case.layer: {
                str(chunks): {way: spread(value(case.layer, chunks, way)) for way in BOTH}
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


def text(jobs: dict[int, Job], data: dict[str, Any]) -> str:
    """Returns the report as text."""
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
    documents = counted(len(case.lengths), "document")
    return f"heads {case.heads}/{case.groups} of {case.head_dim}, {documents}"


def _transport_table(data: dict[str, Any]) -> list[str]:
    rows = []
    for cp, in_flight in data["rounds_in_flight"].items():
        for kind in EXCHANGES:
            for name, taken in data["transports_ms"][kind][cp].items():
                count = data["bytes_between_hosts"][kind][cp][name]
                rows.append([
                    cp, kind.replace("_", "-"), pairwise(in_flight) if name == "pairwise" else name, formatted(taken),
                    formatted(data["collective_over"][kind][cp][name]), "" if count is None else f"{count / 2**20:.2f}",
                ])  # fmt: skip
    return table(("ranks", "", "transport"), ("ms", "collective / this", "between hosts"), rows)


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
    return table(("codec", "chunks"), ("ms", "speed-up", "fewer bytes", "share"), rows)


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
    return table(("layer", "chunks", ""), ("transfer ms", "compute ms", "together ms", "hidden", "gain"), rows)
