"""Compares codecs of keys and values with those of exchanged heads, and with four bits: errors and bytes.

    python -m tools.key_codecs [--draws 12]

Errors are those of attention in float64 over one rank without a codec, the worst of the draws: the root of the mean
square over that of the tensor, and the largest over the largest. Codes of four bits are not in the package: here keys
and values are rounded to them, and one rank computes. `nvfp4` has a scale in E4M3 for 16 numbers of E2M1, `mxfp4` a
power of two for 32, `int4` a float16 for 32 whole numbers from -7 to 7.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.exchange.codec import CODECS
from megatron_cp.executor import run_ranks
from megatron_cp.testing.parity import Case, Problem, draw, run_layer, whole

LENGTHS = (7, 1, 130, 64, 2, 200)
NAMES = ("out", "d_q", "d_k", "d_v")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def in_blocks(x: Tensor, size: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `[..., d]` rounded in blocks of features, each with its own scale; d is a multiple of `size`."""
    return rounded(x.unflatten(-1, (-1, size))).flatten(-2)


def _nvfp4(x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).double().clamp(min=2.0**-9)
    return _to_e2m1(x / scale) * scale


def _mxfp4(x: Tensor) -> Tensor:
    scale = 2.0 ** (x.abs().amax(-1, keepdim=True).log2().floor() - 2)
    return _to_e2m1(x / scale) * scale


def _int4(x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 7).half().double()
    return (x / scale).round().clamp(-7, 7) * scale


def _to_e2m1(x: Tensor) -> Tensor:
    places = torch.bucketize(x.abs(), (_E2M1[1:] + _E2M1[:-1]) / 2)
    return _E2M1[places].copysign(x)


FOUR_BITS = {"nvfp4": (16, 8, _nvfp4), "mxfp4": (32, 8, _mxfp4), "int4": (32, 16, _int4)}  # block, bits of a scale


def drawn(case: Case, *, outliers: bool) -> Problem:
    """Returns a case's tensors; with outliers, one feature of 32 of the keys is ten times as large."""
    problem = draw(case)
    if outliers:
        problem.inputs["k"][..., ::32] *= 10
        problem.inputs["q"][..., ::32] /= 10  # scores keep their size
    return problem


def errors(case: Case, problem: Problem, changed: Problem) -> list[tuple[float, float]]:
    """Returns both errors of each tensor of a case with changed inputs, beside one rank without a codec."""
    plain = replace(case, cp=1, codec="none", scheme="exact", layout="contiguous")
    expected = whole(plain, run_ranks(run_layer, 1, plain, problem))
    found = whole(case, run_ranks(run_layer, case.cp, case, changed))
    differences = [(found[name] - expected[name], expected[name]) for name in NAMES]
    return [(float(d.norm() / x.norm()), float(d.abs().max() / x.abs().max())) for d, x in differences]


def rows(size: int, draws: int, *, outliers: bool) -> list[tuple[str, str, float, list[tuple[float, float]]]]:
    """Returns what is coded, the codec, bytes of a key and its value, and the worst errors of the tensors."""
    base = Case("attention", 4, LENGTHS, "zigzag", heads=6, groups=6, head_dim=size, value_head_dim=size)
    ways = [("heads, `a2a`", name, "a2a") for name in CODECS if name != "none"]
    ways += [("keys, `p2p`", name, "p2p") for name in ("fp8", "int8")]
    found = []
    for what, codec, scheme in ways:
        case = replace(base, scheme=scheme, codec=codec, heads=8 if scheme == "a2a" else 6,
                       groups=8 if scheme == "a2a" else 6)  # fmt: skip
        each = []
        for seed in range(draws):
            problem = drawn(replace(case, seed=seed), outliers=outliers)
            each.append(errors(case, problem, problem))
        found.append((what, codec, 2 * (size + 4.0), each))
    for codec, (block, bits, rounded) in FOUR_BITS.items():
        case, each = replace(base, cp=1, scheme="exact", layout="contiguous"), []
        for seed in range(draws):
            problem = drawn(replace(case, seed=seed), outliers=outliers)
            coded = {name: in_blocks(problem.inputs[name], block, rounded) for name in "kv"}
            each.append(errors(case, problem, replace(problem, inputs=problem.inputs | coded)))
        found.append(("keys", codec, 2 * (size / 2 + size / block * bits / 8), each))
    return [(what, codec, width, _worst(each)) for what, codec, width, each in found]


def _worst(each: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    return [(max(rms for rms, _ in draws), max(largest for _, largest in draws)) for draws in zip(*each, strict=True)]


def main() -> None:
    """Prints a table for keys without and with outliers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=12, help="problems of each row")
    parser.add_argument("--size", type=int, default=128, help="features of a head")
    given = parser.parse_args()
    for outliers in (False, True):
        print(f"\n### {'One feature of 32 ten times as large' if outliers else 'Normal keys'}\n")
        print(f"| coded | codec | bytes of {4 * given.size} | " + " | ".join(f"`{name}`" for name in NAMES) + " |")
        print("| --- | --- | --: |" + " --: |" * len(NAMES))
        for what, codec, width, worst in rows(given.size, given.draws, outliers=outliers):
            cells = " | ".join(f"{rms:.4f}, {largest:.3f}" for rms, largest in worst)
            print(f"| {what} | {codec} | {width:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
