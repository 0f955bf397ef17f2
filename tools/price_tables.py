"""Presets from measured tables, and how far they are: `python -m tools.price_tables FOLDER [--write]`.

FOLDER has the unpacked wheel of aiconfigurator-core 0.12.0 (Apache-2.0), whose Parquet tables NVIDIA measured with
serving libraries. Needs pandas and pyarrow, which are no dependency of the package. Half of the rows, drawn by a seed,
are fitted; the table shows the other half. A preset keeps what the tables lack, such as its memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomllib
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
Rows = NDArray[np.bool_]

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
    nccl: str = "2.29.2"
    linear: str = "sglang/0.5.14"
    kda: str | None = "sglang/0.5.16"
    gemm: str = "vllm/0.24.0"


_HOPPER = ("vllm/0.24.0", "vllm_flash_attn_fa3", FA3)
_BLACKWELL = ("sglang/0.5.14", "trtllm_mha", FA4)
_OLD = "sglang/0.5.10"
MACHINES = {
    "a100": Tables("a100_sxm", _OLD, "flash_attention", FA2, nccl="2.27.3", linear=_OLD, kda=None, gemm=_OLD),
    "h100": Tables("h100_sxm", *_HOPPER),
    "h200": Tables("h200_sxm", *_HOPPER),
    "b200": Tables("b200_sxm", *_BLACKWELL),
    "gb200": Tables("gb200", *_BLACKWELL),
    "gb300": Tables("gb300", *_BLACKWELL),
}


class Fit:
    """A fit of positive numbers to rows: the least squares of the logarithms of predicted over measured.

    Attributes:
        drawn: rows that were drawn for fitting.
        loss, predicted: of the last fit.
    """

    def __init__(self, rows: Any, usable: Rows, random: np.random.Generator) -> None:
        self.measured = rows.latency.to_numpy() / 1e3
        self.drawn = random.random(self.measured.size) < 0.5
        self.used, self.loss, self.predicted = self.drawn & usable, 0.0, self.measured

    def __call__(self, predict: Callable[[Numbers], Numbers], start: list[float]) -> list[float]:
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
        numbers = [_short(number) for number in np.exp(x)]
        self.loss, self.predicted = float(found @ found), predict(np.array(numbers))
        return numbers

    def line(self, chosen: Rows) -> str:
        """Returns the cells of the rows that were not fitted."""
        at = chosen & ~self.drawn
        ratio = self.predicted[at] / self.measured[at]
        low, high = np.quantile(ratio, [0.1, 0.9])
        return f"{at.sum()} | {np.exp(np.log(ratio).mean()):.2f} | {low:.2f} to {high:.2f}"


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def document_shapes(tokens: NDArray[np.int64], windows: NDArray[np.int64], tile: int) -> StageShapes:
    """Returns the sizes of a call for one causal document of each number of tokens."""
    pairs, place = np.unique(np.stack([tokens, windows], axis=1), axis=0, return_inverse=True)
    far = 1 << 40
    bands = [np.array([[0, n, 0, n, 1 - window if window else -far, 0]]) for n, window in pairs.tolist()]
    found = shapes_of([[each] for each in bands], tile)
    return StageShapes(*(each[:, 0][place.ravel()] for each in found))


def with_attention(hardware: Hardware, rows: Any, of: Tables, random: np.random.Generator) -> tuple[Hardware, Fit]:
    """Returns the rates of attention for all head sizes of a table, with the best size of tiles."""
    tokens, windows, batch, heads, size = (
        rows[name].to_numpy() for name in ("isl", "window_size", "batch_size", "num_heads", "head_dim")
    )
    fit, sizes = Fit(rows, tokens >= LEAST, random), np.unique(size).tolist()
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
        tried.append((fit.loss, tile, found, fit.predicted))
    _, tile, found, fit.predicted = min(tried, key=lambda each: each[:2])
    back, row_back, _ = of.backward
    rates = [(each, rate, _short(rate * back)) for each, rate in zip(sizes, found, strict=False)]
    row = [(each, taken, _short(taken * row_back)) for each, taken in zip(sizes, found[len(sizes) : -2], strict=True)]
    if len(sizes) == 1:  # the others by the ratios that were there
        known = {each: (forward, backward) for each, forward, backward in hardware.attention}
        scale = [rates[0][way] / known[sizes[0]][way - 1] for way in (1, 2)]
        rates = [
            (each, _short(forward * scale[0]), _short(backward * scale[1]))
            for each, (forward, backward) in known.items()
        ]
    return replace(hardware, attention=tuple(rates), row=tuple(row), tile=tile, units=found[-2], call=found[-1]), fit


def fitted_rule(rows: Any, kind: str, random: np.random.Generator) -> tuple[list[float], Fit]:
    """Returns multiply-adds a second, seconds beside, and seconds of a token of the longest document."""
    packing = cp.Packing([CHUNK])
    plan = cp.plan_linear(packing, cp.Layout.contiguous(packing, 1), kind, heads=1, head_dim=128, mode="headwise")
    longest = np.ceil(rows.seq_len.to_numpy() / CHUNK) * CHUNK
    products = longest * rows.batch_size.to_numpy() * rows.num_v_heads.to_numpy() * rule_products(plan)
    fit = Fit(rows, rows.seq_len.to_numpy() >= CHUNK, random)
    return fit(lambda x: products / x[0] + x[1] + longest * x[2], [2.5e13, 4e-5, 2e-8]), fit


def fitted_link(rows: Any, random: np.random.Generator) -> tuple[list[float], Fit]:
    """Returns the numbers of a `Link`, from all-to-all, all-gather and reduce-scatter together."""
    ranks = rows.num_gpus.to_numpy()
    sent = 2.0 * rows.message_size.to_numpy() * (ranks - 1) / ranks  # sizes are elements of two bytes, of all ranks
    fit = Fit(rows, sent > 0, random)
    start = [1e-5, 1e-6, 3e11, 6e-9]
    return fit(lambda x: x[0] + (ranks - 1) * x[1] + sent / x[2] + x[3] * np.sqrt(sent), start), fit


def fitted_products(rows: Any, random: np.random.Generator) -> tuple[list[float], Fit]:
    """Returns the rate of products of weights, and the rows at which half of it is reached."""
    m, n, k = (rows[name].to_numpy().astype(np.float64) for name in "mnk")
    fit = Fit(rows, m >= 512, random)
    return fit(lambda x: 2 * m * n * k / x[0] * (1 + x[1] / m), [5e14, 200.0]), fit


def fitted_convolution(rows: Any, launch: float, random: np.random.Generator) -> tuple[float, Fit]:
    """Returns the elements a second of the causal convolution."""
    channels = 128 * (2 * rows.num_k_heads.to_numpy() + rows.num_v_heads.to_numpy())
    elements = 1.0 * rows.seq_len.to_numpy() * rows.batch_size.to_numpy() * channels
    fit = Fit(rows, elements >= 1 << 22, random)
    return fit(lambda x: elements / x[0] + launch, [5e11])[0], fit


def made(name: str, of: Tables, folder: Path) -> tuple[Machine, list[tuple[str, str]]]:
    """Returns a preset with the fitted numbers and their sources, and the lines of its table."""
    random, base, lines = np.random.default_rng(SEED), machine(name), list[tuple[str, str]]()
    hardware, sources = base.hardware, dict(base.hardware.sources)

    def table(part: str, library: str, name: str) -> Any:
        return pd.read_parquet(folder / "aiconfigurator_core/systems/data" / of.folder / part / library / name)

    def given(part: str, library: str, kernels: str, count: int) -> str:
        return f"{VERSION}, {of.folder}/{part}/{library}, {kernels}, half of {count:,} rows by seed {SEED}"

    rows = table("attention", of.attention, "context_attention_perf.parquet")
    if "window_size" not in rows:
        rows["window_size"] = 0
    rows = rows[(rows.kernel_source == of.kernel) & (rows.attn_dtype == "bfloat16") & (rows.isl >= 16)]
    rows = rows[(rows.kv_cache_dtype == "bfloat16") & rows.head_dim.isin(HEAD_DIMS)].reset_index(drop=True)
    hardware, found = with_attention(hardware, rows, of, random)
    words = given("attention", of.attention, of.kernel, int((rows.isl >= LEAST).sum())) + f" of {LEAST} tokens and more"
    sources |= dict.fromkeys(("tile", "units", "call"), words)
    sources |= dict.fromkeys(("attention", "row"), f"{words}; backward: {of.backward[2]}")
    if rows.head_dim.nunique() == 1:
        sources["attention"] += "; 64 and 256 by the ratios of estimates"
    lines += attention_lines(rows, found)

    linear = table("linear_attention", of.linear, "gdn_perf.parquet")
    linear = linear[linear.phase == "context"].reset_index(drop=True)
    convolved = linear[linear.kernel_source == "causal_conv1d_fn"].reset_index(drop=True)
    rate, found = fitted_convolution(convolved, hardware.launch, random)
    hardware = replace(hardware, convolution=(rate, _short(rate / 3)))
    words = given("linear_attention", of.linear, "causal_conv1d_fn", len(convolved))
    sources["convolution"] = f"{words}; backward: three passes for one, an estimate"
    many = convolved.num_tokens.to_numpy() * convolved.num_v_heads.to_numpy() >= 1 << 15
    lines.append(("convolution, 32k tokens of a head and more", found.line(many)))

    rules = dict[str, tuple[list[float], str]]()
    rule_tables = [("gdn", "linear_attention", of.linear, linear, "chunk_gated_delta_rule")]
    if of.kda is not None:
        kda = table("kda", of.kda, "kda_perf.parquet")
        rule_tables.append(("kda", "kda", of.kda, kda[kda.phase == "context"], "chunk_kda"))
    for kind, part, library, rows, kernel in rule_tables:
        rows = rows[rows.kernel_source == kernel].reset_index(drop=True)
        if len(rows):
            numbers, found = fitted_rule(rows, kind, random)
            rules[kind] = numbers, given(part, library, kernel, len(rows))
            lines += rule_lines(kind, rows, found)
    if rules:
        rules["mamba"] = rules["gdn"]
        of_kinds = {kind: numbers for kind, (numbers, _) in rules.items()}
        hardware = replace(
            hardware, rule_floor=0.0,
            rule=tuple((kind, 128, a, _short(a * 2 / RULE), b) for kind, (a, b, _) in of_kinds.items()),
            chain=tuple((kind, 128, c, _short(c * RULE)) for kind, (_, _, c) in of_kinds.items()),
        )  # fmt: skip
        words = (
            f"gdn: {rules['gdn'][1]}; kda: {rules['kda'][1]}; mamba: no table has it, as gdn; backward: {RULE_SOURCE}"
        )
        sources |= {"rule": words, "chain": words, "rule_floor": "0: in the seconds beside"}

    rows = table("comm/nccl", of.nccl, "nccl_perf.parquet")
    rows = rows[(rows.nccl_dtype == "half") & (rows.op_name != "all_reduce")].reset_index(drop=True)
    link, found = fitted_link(rows, random)
    sources["within"] = given("comm/nccl", of.nccl, "alltoall, all_gather and reduce_scatter", len(rows))
    sources["within"] += f", on up to {rows.num_gpus.max()} GPUs"
    lines += link_lines(rows, found)

    rows = table("gemm", of.gemm, "gemm_perf.parquet")
    rows = rows[(rows.gemm_dtype == "bfloat16") & (rows.m >= 128) & (rows.n >= 1024) & (rows.k >= 1024)]
    rows = rows.reset_index(drop=True)
    (matrix, half), found = fitted_products(rows, random)
    words = given("gemm", of.gemm, "bf16", len(rows)) + ", 512 rows and more, both other sizes from 1,024"
    sources |= {"matrix": words, "matrix_rows": words}
    m = rows.m.to_numpy()
    lines.append(("products, 128 to 511 rows", found.line(m < 512)))
    lines.append(("products, 512 to 2,047 rows", found.line((m >= 512) & (m < 2048))))
    lines.append(("products, 2,048 rows and more", found.line(m >= 2048)))

    order = [*Hardware.__dataclass_fields__, "within", "between"]
    in_order = dict(sorted(sources.items(), key=lambda pair: order.index(pair[0])))
    hardware = replace(hardware, matrix=matrix, matrix_rows=half, sources=in_order)
    return replace(base, hardware=hardware, within=Link(*link)), lines


def attention_lines(rows: Any, found: Fit) -> Iterator[tuple[str, str]]:
    """Yields the lines of documents alone and packed, by length, window and head size."""
    tokens, window, batch, sizes = (rows[name].to_numpy() for name in ("isl", "window_size", "batch_size", "head_dim"))
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
        *((f"head size {size}, from 128 tokens", (sizes == size) & (tokens >= LEAST)) for size in np.unique(sizes)),
    ]
    for name, chosen in classes:
        if (chosen & ~found.drawn).any():
            yield f"attention: {name}", found.line(chosen)


def rule_lines(kind: str, rows: Any, found: Fit) -> Iterator[tuple[str, str]]:
    """Yields the lines of one document and packed ones."""
    tokens, alone = rows.seq_len.to_numpy(), rows.batch_size.to_numpy() == 1
    yield f"{kind}: one document, 64 to 1,024 tokens", found.line(alone & (tokens >= 64) & (tokens <= 1024))
    yield f"{kind}: one document, 2,048 tokens and more", found.line(alone & (tokens > 1024))
    yield f"{kind}: packed, from 64 tokens", found.line(~alone & (tokens >= 64))


def link_lines(rows: Any, found: Fit) -> Iterator[tuple[str, str]]:
    """Yields the lines of each collective, by the bytes that a rank sends."""
    sent = 2 * rows.message_size.to_numpy() * (1 - 1 / rows.num_gpus.to_numpy())
    for name in ("alltoall", "all_gather", "reduce_scatter"):
        of = rows.op_name.to_numpy() == name
        yield f"{name}, to 128 KiB", found.line(of & (sent < 1 << 17))
        yield f"{name}, 128 KiB to 16 MiB", found.line(of & (sent >= 1 << 17) & (sent < 1 << 24))
        yield f"{name}, from 16 MiB", found.line(of & (sent >= 1 << 24))


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
            preset = PRESETS / f"{name}.toml"
            preset.write_text(written(found, tomllib.loads(preset.read_text()).get("base")))


if __name__ == "__main__":
    main()
