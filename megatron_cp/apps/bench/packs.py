"""`megatron-cp bench packs`: compares steps with their ideal, by how a batch's documents are assigned to packs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.apps.bench.defaults import PACK_RANKS
from megatron_cp.apps.bench.peer_limits import MEGATRON, megatron_missing
from megatron_cp.apps.bench.spread import table
from megatron_cp.apps.bench.timing import with_progress
from megatron_cp.cli import Report
from megatron_cp.data import GlobalBatch, PackedStream, balance_packs, read_corpus, read_tokenizer
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import IntArray
from megatron_cp.planner import PackCost

if TYPE_CHECKING:
    from megatron_cp.executor import TorchGroup

REPLICAS, MICROBATCHES = (2, 4, 8), 4
TOKENS_PER_RANK, BATCHES = 16384, 100
TOKEN = 2e-7  # seconds; it cancels
EQUAL_AT = 32768  # tokens of a document whose pairs cost as much as its tokens
# (pack, tokens where both halves of the cost are equal) of the cells at the end, beside those of the table
OTHER_COSTS = ((0.0, 4096), (0.0, 262144), (5e-3, 32768))
WAYS = ("best fit", "even", MEGATRON)


@dataclass(frozen=True)
class _Lengths:
    """A corpus of documents of which only the lengths are read."""

    name: str
    lengths: IntArray
    vocab_size: int = 1
    skipped: Mapping[str, int] = field(default_factory=dict)

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> IntArray:
        return np.zeros(self.lengths[document], np.int64)[start:end]

    def is_learnt(self, document: int, start: int = 0, end: int | None = None) -> None:
        """Returns None: all tokens are to be predicted."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Runs the packers, and nothing else, and returns the report; all ranks of a job would do the same."""
    for name in ("lengths", "documents", "layer", "scheme", "model", "dtype", "layout"):
        if getattr(args, name) is not None:
            raise ArgumentError(f"--{name}", getattr(args, name), "nothing with bench packs")
    sizes = (args.cp,) if args.cp else PACK_RANKS
    for size in sizes:
        if size & (size - 1):
            raise ArgumentError("--cp", size, "powers of two", f"{MEGATRON} runs samples on no other numbers of ranks.")
    tokens, batches = args.tokens_per_rank or TOKENS_PER_RANK, args.batches or BATCHES
    missing = megatron_missing()
    asked = [
        (corpus, replicas, size, tokens, batches, PackCost(pack, TOKEN, TOKEN / equal_at), not missing)
        for corpus in _corpora(args)
        for pack, equal_at in ((0.0, EQUAL_AT), *OTHER_COSTS)
        for replicas, size in product(REPLICAS, sizes)
        if (pack, equal_at) == (0.0, EQUAL_AT) or replicas == REPLICAS[-1]
    ]
    cells = [_cell(*each) for each in with_progress(asked, "cells", 0 if world is None else world.rank)]
    data = {
        **_ratios(cells),
        "cells": cells,
        "batches": batches,
        "tokens_per_rank": tokens,
        "microbatches": MICROBATCHES,
        "seed": args.seed,
        "missing": missing,
        "versions": {"numpy": np.__version__, **({} if missing else {MEGATRON: version(MEGATRON)})},
    }
    return Report(_text(data), data, quiet=world is not None and world.rank > 0)


def _corpora(args: argparse.Namespace) -> Iterator[_Lengths]:
    drawn = np.random.default_rng(args.seed).lognormal(7.0, 1.5, 100_000).astype(np.int64) + 1
    if args.corpus is None:
        yield _Lengths("log-normal, median 1,097, mean 3,378 tokens", drawn)
    path = None if args.corpus in (None, "default") else args.corpus
    corpus = read_corpus(path, read_tokenizer(None))
    yield _Lengths(f"{corpus.name}, a token a byte", corpus.lengths)


def _cell(
    corpus: _Lengths, replicas: int, cp_size: int, tokens: int, batches: int, cost: PackCost, with_peer: bool
) -> dict[str, Any]:
    """Returns the time of steps over their ideal on some global batches, for all ways of assigning.

    The ideal is all work shared evenly by all ranks, and for each microbatch the cost of a pack with any content.
    """
    budget = tokens * cp_size
    stream = PackedStream(corpus, budget)
    kinds = [GlobalBatch(replicas, MICROBATCHES, cost, barrier) for barrier in (False, True)]
    count = replicas * MICROBATCHES
    excess: dict[str, list[float]] = {name: [] for name in (*WAYS, "best fit, barrier", "even, barrier")}
    seconds: list[float] = []
    documents: list[int] = []
    for batch in range(batches):
        packs = [stream.pieces(index) for index in range(batch * count, (batch + 1) * count)]
        lengths = np.array([piece.end - piece.start for pack in packs for piece in pack])
        documents.append(lengths.size)
        given = np.split(np.arange(lengths.size), np.cumsum([len(pack) for pack in packs])[:-1])
        ideal = float(cost.of_documents(lengths).sum()) / replicas + MICROBATCHES * cost.pack
        for kind in kinds:
            began = time.thread_time()  # so that other work on this core does not count
            even = balance_packs(lengths, given, budget, kind)
            seconds.append(time.thread_time() - began)
            for name, assigned in (("best fit", given), ("even", even)):
                taken = kind.step_time([cost.of(lengths[np.asarray(pack)]) for pack in assigned])
                excess[name + (", barrier" if kind.barrier else "")].append(taken / ideal - 1)
        if with_peer:
            excess[MEGATRON].append(_peer_step(lengths.tolist(), replicas, cp_size, tokens, cost) / ideal - 1)
    return {
        "corpus": corpus.name,
        "replicas": replicas,
        "cp": cp_size,
        "equal_at": round(cost.token / cost.pair),
        "pack_seconds": cost.pack,
        "documents": float(np.mean(documents)),
        "excess": {name: {"mean": float(np.mean(v)), "worst": max(v)} for name, v in excess.items() if v},
        "milliseconds": {"median": float(np.median(seconds)) * 1e3, "worst": max(seconds) * 1e3},
    }


def _peer_step(lengths: Sequence[int], replicas: int, cp_size: int, tokens: int, cost: PackCost) -> float:
    from megatron_cp.apps.bench.peers.hybrid_cp import hybrid_step

    return hybrid_step(lengths, replicas * cp_size, tokens, cost, cost.pack, cp_size)


def _ratios(cells: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns our excess over that of others, for the mean and the worst batch, over all cells and by cell."""
    found: dict[str, float | None] = {}
    main = [cell["excess"] for cell in cells if cell["equal_at"] == EQUAL_AT and not cell["pack_seconds"]]
    for name, other in (("best_fit", "best fit"), ("megatron", MEGATRON)):
        for which in ("mean", "worst"):
            pairs = [(each["even"][which], each[other][which]) for each in main if other in each]
            own, theirs = np.array(pairs).T if pairs else (np.array([np.nan]),) * 2
            of_all = own.mean() / theirs.mean() if which == "mean" else own.max() / theirs.max()
            ratios = float(of_all), float((own / theirs).max())
            for ending, ratio in zip(("", "_of_a_cell"), ratios, strict=True):
                found[f"even_over_{name}_{which}{ending}"] = ratio if pairs else None
    return found


def _text(data: Mapping[str, Any]) -> str:
    lines = [
        f"{data['batches']} global batches of {MICROBATCHES} microbatches a replica, packs of "
        f"{data['tokens_per_rank']:,} tokens a context-parallel rank; how much longer than ideal a step takes, mean / "
        "worst batch, in per cent"
    ]
    lines += [f"{name}: {why}" for name, why in data["missing"].items()]
    heads = ("", "CP", "documents", *WAYS, f"even over {MEGATRON}", "best fit, barrier", "even, barrier", "ms")
    kinds = groupby(data["cells"], lambda cell: (cell["corpus"], cell["equal_at"], cell["pack_seconds"]))
    for (corpus, equal_at, seconds), cells in kinds:
        start = f", {seconds * 1e3:g} ms a pack" if seconds else ""
        lines += ["", f"{corpus}; a document's pairs cost as much as its tokens at {equal_at:,}{start}", ""]
        lines += table((), heads, map(_row, cells))
    shown = {name: f"{value:.2f}" for name, value in data.items() if name.startswith("even_over") and value is not None}
    return "\n".join([*lines, "", ", ".join(f"{name} {value}" for name, value in shown.items())])


def _row(cell: Mapping[str, Any]) -> list[str]:
    excess, spent = cell["excess"], cell["milliseconds"]

    def shown(name: str) -> str:
        found = excess.get(name)
        return "-" if found is None else f"{found['mean'] * 100:.1f} / {found['worst'] * 100:.1f}"

    over = "-"
    if MEGATRON in excess:
        own, theirs = excess["even"], excess[MEGATRON]
        over = " / ".join(f"{own[which] / theirs[which]:.2f}" for which in ("mean", "worst"))
    return [
        f"DP {cell['replicas']}", str(cell["cp"]), f"{cell['documents']:.0f}", *map(shown, WAYS), over,
        shown("best fit, barrier"), shown("even, barrier"), f"{spent['median']:.0f} / {spent['worst']:.0f}",
    ]  # fmt: skip
