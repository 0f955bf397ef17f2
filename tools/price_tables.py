"""Presets from measured tables, and how far they are: `python -m tools.price_tables FOLDER [--write]`.

FOLDER has the unpacked wheel of aiconfigurator-core 0.12.0 (Apache-2.0), whose Parquet tables NVIDIA measured with
serving libraries. Needs pandas and pyarrow, which are no dependency of the package. Half of the rows, drawn by a seed,
are fitted; the table shows the other half.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import megatron_cp as cp
from megatron_cp.planner.predict import Hardware, Link, Machine, machine
from megatron_cp.planner.predict.kernel_times import CHUNK, StageShapes, rule_products, seconds_of_shapes, shapes_of
from megatron_cp.planner.predict.machine_files import written

VERSION, SEED = "aiconfigurator-core 0.12.0", 36
PRESETS = Path(cp.__file__).parent / "planner/predict/presets"
HEAD_DIMS, LEAST, STEPS = (64, 128, 256), 128, 60  # LEAST: tokens of the shortest documents that are fitted
TILES = (64, 128, 256)
Numbers = NDArray[np.float64]

# What tables lack, backward: rates over those of forward, and times over those of forward.
FA3 = (
    561 / 648,
    5.8,
    "the figures of FlashAttention-3's paper, head size 128, not causal: 561e12 over 648e12 at 16k tokens; for a row "
    "5.8 times forward, from 316e12 and 467e12 at 512",
)
FA4 = (
    1208.6 / 1418.1,
    5.8,
    "FlashAttention-4's pull request 2280, head size 128, causal, 8k tokens: 1208.6e12 over 1418.1e12; for a row 5.8 "
    "times forward, as of h100",
)
FA2 = (
    2.0 / 2.3,
    5.8,
    "FlashAttention-2 on A800 as published by UltraAttn: 200e12 over 230e12; for a row 5.8 times forward, as of h100",
)
RULE = 10.8 / 4.8
RULE_SOURCE = "flash-linear-attention pull request 691, GatedDeltaNet on an H800: 10.8 over 4.8 ms"


@dataclass(frozen=True)
class Tables:
    """The tables of a machine: folder, library and version of each, and the kernel where a table has several."""

    folder: str
    attention: str
    kernel: str
    backward: tuple[float, float, str]
    nccl: str
    linear: str
    kda: str | None
    gemm: str
    base: str
    about: str
    changes: tuple[tuple[str, Any], ...] = ()


_HOPPER = {"attention": "vllm/0.24.0", "kernel": "vllm_flash_attn_fa3", "backward": FA3, "nccl": "2.29.2"}
_BLACKWELL = {"attention": "sglang/0.5.14", "kernel": "trtllm_mha", "backward": FA4, "nccl": "2.29.2"}
_NEWER: dict[str, Any] = {
    "linear": "sglang/0.5.14",
    "kda": "sglang/0.5.16",
    "gemm": "vllm/0.24.0",
}
_NVL72 = "72 with NVLink, a 400 Gbit/s card each"
# The preset whose numbers each one has where its file names none.
BASES = {"a100": "h100", "b200": "h100", "h200": "h100", "gb200": "b200", "gb300": "b200"}
MACHINES = {
    "a100": Tables(
        "a100_sxm", attention="sglang/0.5.10", kernel="flash_attention", backward=FA2, nccl="2.27.3",
        linear="sglang/0.5.10", kda=None, gemm="sglang/0.5.10", base="a100", about="",
    ),
    "h100": Tables("h100_sxm", **_HOPPER, **_NEWER, base="h100", about=""),
    "h200": Tables("h200_sxm", **_HOPPER, **_NEWER, base="h200", about=""),
    "b200": Tables("b200_sxm", **_BLACKWELL, **_NEWER, base="b200", about=""),
    "gb200": Tables(
        "gb200", **_BLACKWELL, **_NEWER, base="b200", about=f"NVIDIA GB200 186 GB, {_NVL72}",
        changes=(("memory", 1.98e11),),
    ),
    "gb300": Tables(
        "gb300", **_BLACKWELL, **_NEWER, base="b200", about=f"NVIDIA GB300 279 GB, {_NVL72}",
        changes=(("memory", 2.88e11),),
    ),
}  # fmt: skip


@dataclass
class Class:
    """Rows of a class, with what was measured, what is predicted, and whether a row was drawn for fitting."""

    name: str
    measured: Numbers
    predicted: Numbers
    fitted: NDArray[np.bool_]

    def line(self, chosen: NDArray[np.bool_]) -> str:
        """Returns the cells of the rows that were not fitted."""
        at = chosen & ~self.fitted
        ratio = self.predicted[at] / self.measured[at]
        low, high = np.quantile(ratio, [0.1, 0.9])
        return f"{at.sum()} | {np.exp(np.log(ratio).mean()):.2f} | {low:.2f} to {high:.2f}"


class Fit:
    """A fit of positive numbers to rows: the least squares of the logarithms of predicted over measured."""

    def __init__(self, measured: Numbers, usable: NDArray[np.bool_], random: np.random.Generator) -> None:
        self.measured, self.drawn = measured, random.random(measured.size) < 0.5
        self.used, self.loss = self.drawn & usable, 0.0

    def __call__(self, predict: Callable[[Numbers], Numbers], start: list[float]) -> Numbers:
        """Returns the numbers, from a start of the right magnitude (Levenberg and Marquardt)."""
        target, damping = np.log(self.measured[self.used]), 1e-2

        def error(x: Numbers) -> Numbers:
            return np.asarray(np.log(predict(np.exp(np.clip(x, -60, 60)))[self.used]) - target)

        x = np.log(np.array(start))
        found = error(x)
        for _ in range(STEPS):
            slope = np.stack([(error(x + 1e-4 * unit) - found) / 1e-4 for unit in np.eye(x.size)], axis=1)
            square = slope.T @ slope
            for _ in range(8):
                step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slope.T @ found)
                step = np.clip(step, -2, 2)
                tried = error(x + step)
                if tried @ tried < found @ found:
                    x, found, damping = x + step, tried, damping / 3
                    break
                damping *= 4
        self.loss = float(found @ found)
        return np.array([float(f"{number:.3g}") for number in np.exp(x)])


def table(folder: Path, *parts: str) -> Any:
    """Returns a table of the wheel as a DataFrame."""
    return pd.read_parquet(folder / "aiconfigurator_core/systems/data" / "/".join(parts))


def attention_rows(folder: Path, of: Tables) -> Any:
    """Returns the rows of bf16 with no keys from before."""
    rows = table(folder, of.folder, "attention", of.attention, "context_attention_perf.parquet")
    if "window_size" not in rows:
        rows["window_size"] = 0
    rows = rows[(rows.kernel_source == of.kernel) & (rows.attn_dtype == "bfloat16") & (rows.isl >= 16)]
    return rows[(rows.kv_cache_dtype == "bfloat16") & rows.head_dim.isin(HEAD_DIMS)].reset_index(drop=True)


def document_shapes(tokens: NDArray[np.int64], windows: NDArray[np.int64], tile: int) -> StageShapes:
    """Returns the sizes of a call for one causal document of each number of tokens."""
    pairs, place = np.unique(np.stack([tokens, windows], axis=1), axis=0, return_inverse=True)
    far = 1 << 40
    bands = [np.array([[0, n, 0, n, 1 - window if window else -far, 0]]) for n, window in pairs.tolist()]
    found = shapes_of([[each] for each in bands], tile)
    return StageShapes(*(each[:, 0][place.ravel()] for each in found))


def fitted_attention(rows: Any, of: Tables, hardware: Hardware, random: np.random.Generator) -> tuple[Hardware, Class]:
    """Returns the rates of attention for all head sizes of a table, with the best size of tiles."""
    tokens, windows, batch, heads, size = (
        rows[name].to_numpy() for name in ("isl", "window_size", "batch_size", "num_heads", "head_dim")
    )
    fit, sizes = Fit(rows.latency.to_numpy() / 1e3, tokens >= LEAST, random), np.unique(size).tolist()
    place = np.searchsorted(sizes, size)

    def predictor(tile: int) -> Callable[[Numbers], Numbers]:
        one = document_shapes(tokens, windows, tile)
        shapes = StageShapes(*(each * batch for each in one))

        def predict(x: Numbers) -> Numbers:
            rates, per_row, (units, call) = x[: len(sizes)], x[len(sizes) : -2], x[-2:]
            with_them = replace(hardware, units=float(units), call=float(call))
            rate, row = rates[place] / (4 * size), per_row[place]
            return seconds_of_shapes(shapes, rate, row, with_them, heads, forward=True)

        return predict

    start = [4e14] * len(sizes) + [3e-10] * len(sizes) + [100.0, 1e-5]
    tried = []
    for tile in TILES:
        found = fit(predictor(tile), start)
        tried.append((fit.loss, tile, found))
    _, tile, found = min(tried, key=lambda each: each[:2])
    back, row_back, _ = of.backward
    rates = [(each, rate, float(f"{rate * back:.3g}")) for each, rate in zip(sizes, found.tolist(), strict=False)]
    row = [
        (each, taken, float(f"{taken * row_back:.3g}"))
        for each, taken in zip(sizes, found[len(sizes) : -2].tolist(), strict=True)
    ]
    if len(sizes) == 1:  # the others by the ratios that were there
        known = {each: (forward, backward) for each, forward, backward in hardware.attention}
        scale = [rates[0][way] / known[sizes[0]][way - 1] for way in (1, 2)]
        rates = [
            (each, float(f"{forward * scale[0]:.3g}"), float(f"{backward * scale[1]:.3g}"))
            for each, (forward, backward) in known.items()
        ]
    changed = replace(
        hardware, attention=tuple(rates), row=tuple(row), tile=tile, units=float(found[-2]), call=float(found[-1])
    )
    return changed, Class("attention", fit.measured, predictor(tile)(found), fit.drawn)


def fitted_rule(rows: Any, kind: str, random: np.random.Generator) -> tuple[tuple[float, float, float], Class]:
    """Returns multiply-adds a second, seconds beside, and seconds of a token of the longest document."""
    packing = cp.Packing([CHUNK])
    plan = cp.plan_linear(packing, cp.Layout.contiguous(packing, 1), kind, heads=1, head_dim=128, mode="headwise")
    longest = np.ceil(rows.seq_len.to_numpy() / CHUNK) * CHUNK
    products = longest * rows.batch_size.to_numpy() * rows.num_v_heads.to_numpy() * rule_products(plan)
    fit = Fit(rows.latency.to_numpy() / 1e3, rows.seq_len.to_numpy() >= CHUNK, random)

    def predict(x: Numbers) -> Numbers:
        return np.asarray(products / x[0] + x[1] + longest * x[2])

    found = fit(predict, [2.5e13, 4e-5, 2e-8])
    return (found[0], found[1], found[2]), Class(kind, fit.measured, predict(found), fit.drawn)


def fitted_link(rows: Any, random: np.random.Generator) -> tuple[Link, Class]:
    """Returns the link within a host, from all-to-all, all-gather and reduce-scatter together."""
    ranks = rows.num_gpus.to_numpy()
    sent = 2.0 * rows.message_size.to_numpy() * (ranks - 1) / ranks  # sizes are elements of two bytes, of all ranks
    fit = Fit(rows.latency.to_numpy() / 1e3, sent > 0, random)

    def predict(x: Numbers) -> Numbers:
        return np.asarray(x[0] + (ranks - 1) * x[1] + sent / x[2] + x[3] * np.sqrt(sent))

    found = fit(predict, [1e-5, 1e-6, 3e11, 6e-9])
    return Link(*found.tolist()), Class("collectives", fit.measured, predict(found), fit.drawn)


def fitted_products(rows: Any, random: np.random.Generator) -> tuple[list[float], Class]:
    """Returns the rate of products of weights, and the rows at which half of it is reached."""
    m, n, k = (rows[name].to_numpy().astype(np.float64) for name in "mnk")
    fit = Fit(rows.latency.to_numpy() / 1e3, m >= 512, random)

    def predict(x: Numbers) -> Numbers:
        return np.asarray(2 * m * n * k / x[0] * (1 + x[1] / m))

    found = fit(predict, [5e14, 200.0])
    return found.tolist(), Class("products", fit.measured, predict(found), fit.drawn)


def fitted_convolution(rows: Any, launch: float, random: np.random.Generator) -> tuple[float, Class]:
    """Returns the elements a second of the causal convolution."""
    channels = 128 * (2 * rows.num_k_heads.to_numpy() + rows.num_v_heads.to_numpy())
    elements = 1.0 * rows.seq_len.to_numpy() * rows.batch_size.to_numpy() * channels
    fit = Fit(rows.latency.to_numpy() / 1e3, elements >= 1 << 22, random)

    def predict(x: Numbers) -> Numbers:
        return np.asarray(elements / x[0] + launch)

    found = fit(predict, [5e11])
    return found[0], Class("convolution", fit.measured, predict(found), fit.drawn)


def made(name: str, of: Tables, folder: Path) -> tuple[Machine, list[tuple[str, str]]]:
    """Returns a machine with the fitted numbers and their sources, and the lines of its table."""
    random, base, lines = np.random.default_rng(SEED), machine(of.base), list[tuple[str, str]]()
    hardware, sources = replace(base.hardware, **dict(of.changes)), dict(base.hardware.sources)
    if of.about:
        hardware = replace(hardware, name=name, about=of.about)

    def given(part: str, library: str, kernels: str, count: int) -> str:
        return f"{VERSION}, {of.folder}/{part}/{library}, {kernels}, half of {count:,} rows by seed {SEED}"

    rows = attention_rows(folder, of)
    hardware, found = fitted_attention(rows, of, hardware, random)
    words = given("attention", of.attention, of.kernel, int((rows.isl >= LEAST).sum())) + f" of {LEAST} tokens and more"
    for each in ("tile", "units", "call"):
        sources[each] = words
    sources["attention"] = f"{words}; backward: {of.backward[2]}"
    sources["row"] = sources["attention"]
    if rows.head_dim.nunique() == 1:
        sources["attention"] += "; 64 and 256 by the ratios of estimates"
    lines += list(attention_lines(rows, found))

    linear = table(folder, of.folder, "linear_attention", of.linear, "gdn_perf.parquet")
    linear = linear[linear.phase == "context"].reset_index(drop=True)
    convolved = linear[linear.kernel_source == "causal_conv1d_fn"].reset_index(drop=True)
    rate, found = fitted_convolution(convolved, hardware.launch, random)
    hardware = replace(hardware, convolution=(float(rate), float(f"{rate / 3:.3g}")))
    words = given("linear_attention", of.linear, "causal_conv1d_fn", len(convolved))
    sources["convolution"] = f"{words}; backward: three passes for one, an estimate"
    many = convolved.num_tokens.to_numpy() * convolved.num_v_heads.to_numpy() >= 1 << 15
    lines.append(("convolution, 32k tokens of a head and more", found.line(many)))

    rules = dict[str, tuple[tuple[float, float, float], str]]()
    rule_tables = [("gdn", "linear_attention", of.linear, linear, "chunk_gated_delta_rule")]
    if of.kda is not None:
        kda = table(folder, of.folder, "kda", of.kda, "kda_perf.parquet")
        rule_tables.append(("kda", "kda", of.kda, kda[kda.phase == "context"], "chunk_kda"))
    for kind, part, library, rows, kernel in rule_tables:
        rows = rows[rows.kernel_source == kernel].reset_index(drop=True)
        if not len(rows):
            continue
        numbers, found = fitted_rule(rows, kind, random)
        rules[kind] = numbers, given(part, library, kernel, len(rows))
        lines += list(rule_lines(kind, rows, found))
    if rules:
        rules["mamba"] = rules["gdn"]
        hardware = replace(
            hardware,
            rule_floor=0.0,
            rule=tuple(
                (kind, 128, float(a), float(f"{a * 2 / RULE:.3g}"), float(b)) for kind, ((a, b, _), _) in rules.items()
            ),
            chain=tuple((kind, 128, float(c), float(f"{c * RULE:.3g}")) for kind, ((_, _, c), _) in rules.items()),
        )
        words = (
            f"gdn: {rules['gdn'][1]}; kda: {rules['kda'][1]}; mamba: no table has it, as gdn; backward: {RULE_SOURCE}"
        )
        sources |= {"rule": words, "chain": words, "rule_floor": "0: in the seconds beside"}

    rows = table(folder, of.folder, "comm/nccl", of.nccl, "nccl_perf.parquet")
    rows = rows[(rows.nccl_dtype == "half") & (rows.op_name != "all_reduce")].reset_index(drop=True)
    within, found = fitted_link(rows, random)
    sources["within"] = given("comm/nccl", of.nccl, "alltoall, all_gather and reduce_scatter", len(rows))
    sources["within"] += f", on up to {rows.num_gpus.max()} GPUs"
    lines += list(link_lines(rows, found))

    rows = table(folder, of.folder, "gemm", of.gemm, "gemm_perf.parquet")
    rows = rows[(rows.gemm_dtype == "bfloat16") & (rows.m >= 128) & (rows.n >= 1024) & (rows.k >= 1024)]
    rows = rows.reset_index(drop=True)
    (matrix, half), found = fitted_products(rows, random)
    hardware = replace(hardware, matrix=float(matrix), matrix_rows=float(half))
    words = given("gemm", of.gemm, "bf16", len(rows)) + ", 512 rows and more, both other sizes from 1,024"
    sources |= {"matrix": words, "matrix_rows": words}
    m = rows.m.to_numpy()
    lines += [
        ("products, 128 to 511 rows", found.line(m < 512)),
        ("products, 512 to 2,047 rows", found.line((m >= 512) & (m < 2048))),
    ]
    lines.append(("products, 2,048 rows and more", found.line(m >= 2048)))
    if of.about:
        sources["memory"] = f"{VERSION}, systems/{of.folder}.yaml"
    hardware = replace(hardware, sources=dict(sorted(sources.items(), key=lambda pair: _order(pair[0]))))
    ranks = 72 if of.about else base.ranks_per_host
    return replace(base, hardware=hardware, within=within, ranks_per_host=ranks, rails=ranks), lines


def _order(name: str) -> int:
    names = [*Hardware.__dataclass_fields__, "within", "between"]
    return names.index(name)


def attention_lines(rows: Any, found: Class) -> Iterator[tuple[str, str]]:
    """Yields the lines of documents alone and packed, by length, window and head size."""
    tokens, window, batch = (rows[name].to_numpy() for name in ("isl", "window_size", "batch_size"))
    full, alone = window == 0, batch == 1
    classes = [
        ("documents of 16 to 64 tokens (not fitted)", tokens < LEAST),
        ("one document, 128 to 1,536 tokens", full & alone & (tokens >= LEAST) & (tokens < 2048)),
        ("one document, 2,048 tokens and more", full & alone & (tokens >= 2048)),
        ("packed, 128 to 512 tokens", full & ~alone & (tokens >= LEAST) & (tokens <= 512)),
        ("packed, 1,024 to 1,536 tokens", full & ~alone & (tokens > 512) & (tokens < 2048)),
        ("packed, 2,048 tokens and more", full & ~alone & (tokens >= 2048)),
        ("window of 128, from 128 tokens", (window == 128) & (tokens >= LEAST)),
        ("larger windows, from 128 tokens", (window > 128) & (tokens >= LEAST)),
    ]
    sizes = rows.head_dim.to_numpy()
    classes += [
        (f"head size {size}, from 128 tokens", (sizes == size) & (tokens >= LEAST))
        for size in np.unique(sizes).tolist()
    ]
    for name, chosen in classes:
        if (chosen & ~found.fitted).any():
            yield f"attention: {name}", found.line(chosen)


def rule_lines(kind: str, rows: Any, found: Class) -> Iterator[tuple[str, str]]:
    """Yields the lines of one document and packed ones."""
    tokens, alone = rows.seq_len.to_numpy(), rows.batch_size.to_numpy() == 1
    yield f"{kind}: one document, 64 to 1,024 tokens", found.line(alone & (tokens >= 64) & (tokens <= 1024))
    yield f"{kind}: one document, 2,048 tokens and more", found.line(alone & (tokens > 1024))
    yield f"{kind}: packed, from 64 tokens", found.line(~alone & (tokens >= 64))


def link_lines(rows: Any, found: Class) -> Iterator[tuple[str, str]]:
    """Yields the lines of each collective, by the bytes that a rank sends."""
    sent = 2 * rows.message_size.to_numpy() * (1 - 1 / rows.num_gpus.to_numpy())
    for name in ("alltoall", "all_gather", "reduce_scatter"):
        of = rows.op_name.to_numpy() == name
        for words, chosen in (
            ("to 128 KiB", sent < 1 << 17),
            ("128 KiB to 16 MiB", (sent >= 1 << 17) & (sent < 1 << 24)),
            ("from 16 MiB", sent >= 1 << 24),
        ):
            yield f"{name}, {words}", found.line(of & chosen)


def main() -> None:
    """Prints a table for each machine, and writes presets where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the presets of the package")
    options = parser.parse_args()
    for name, of in MACHINES.items():
        found, lines = made(name, of, options.folder)
        print(f"\n### {name}: {of.kernel}\n\n| rows | not fitted | predicted / measured | 10th to 90th percentile |")
        print("|:--|--:|--:|--:|")
        for words, cells in lines:
            print(f"| {words} | {cells} |")
        if options.write:
            (PRESETS / f"{name}.toml").write_text(written(found, BASES.get(name)))


if __name__ == "__main__":
    main()
