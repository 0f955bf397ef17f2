"""Tests that Inductor compiles FlexAttention for an H100, without one: with a soft cap, and a limited number of times.

On the runtime and driver of the emulated device and without its values: kernels are compiled and launched, and nothing
is computed. In a process of its own, since Triton is interpreted or compiles for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_cp.layout import Mask, Packing
from megatron_cp.layout.tiles import Tiles
from megatron_cp.softmax.kernels import AttentionCall
from megatron_cp.softmax.kernels.flex import FlexAttention
from tools.nullgpu.device import HERE, UnavailableError, environment

ROOT = Path(__file__).parents[2]
PACKS = ((7, 1, 300, 64, 2), (5, 200), (130, 400, 3, 90), (1000,))
SHORT = (33, 34, 35)  # of one block, with fewer queries than that has rows, and twice as many query heads as key heads


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the graphs after each pack and the kernels.

    Heads of 16 features compile in half the time of 64. These are thorough, and so is the short pack with its graphs.
    """
    own = [item for item in request.session.items if item.module is request.module]
    head_dim, packs = (64, (*PACKS, SHORT)) if any(item.get_closest_marker("thorough") for item in own) else (16, PACKS)
    try:
        device = environment()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    paths = [path for path in device["PYTHONPATH"].split(os.pathsep) if path != str(HERE / "site")]  # which emulates
    with tempfile.TemporaryDirectory() as folder:
        own = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.functional_tests.test_flex_compiled", *map(json.dumps, (head_dim, *packs))],
            cwd=ROOT,
            env={
                **device, **own, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0",
                "TORCHDYNAMO_DISABLE": "0",
            },
            stdout=subprocess.PIPE,  # stderr is left to pytest, which shows it on failure
            timeout=240,
            check=True,
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_forward_and_backward_compile_and_tables_of_one_block_once_more(made):
    # There are two kernels of a template, and those that Inductor fuses beside them.
    templates = {name: target for name, target in made["kernels"].items() if name.startswith("triton_tem_")}
    assert sum("flex_attention_backward" in name for name in templates) == 1, templates
    assert sum("flex_attention" in name for name in templates) == 2, templates
    assert {(target["backend"], target["arch"]) for target in made["kernels"].values()} == {("cuda", 90)}
    assert made["graphs"][len(PACKS) :] == [4]


def test_one_compilation_serves_all_lengths(made):
    """The forward, and the forward with what its backward needs."""
    assert made["graphs"][: len(PACKS)] == [2] * len(PACKS)


def step(lengths: tuple[int, ...], head_dim: int) -> None:
    packing = Packing(list(lengths))
    total = packing.total
    tiles = Tiles(Mask.causal(packing).bands, np.arange(total), np.arange(total))
    call = AttentionCall(0.125, head_dim, head_dim, torch.bfloat16, torch.device("cuda"), softcap=3.0)
    q, k, v, dout = (
        torch.empty(total, heads, head_dim, device="cuda", dtype=torch.bfloat16).normal_() for heads in (4, 2, 2, 4)
    )
    out, lse = torch.empty_like(q), torch.empty(4, total, device="cuda")
    kernel = FlexAttention()
    kernel.forward(out, lse, q, k, v, tiles, call, 0)
    kernel.backward(*(torch.empty_like(x) for x in (q, k, v)), dout, q, k, v, out, lse, tiles, call, 0)


def main() -> None:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no processes that compile ahead
    graphs: list[int] = []
    head_dim, *packs = map(json.loads, sys.argv[1:])
    for lengths in packs:
        step(tuple(lengths), head_dim)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    described = {path.stem: path.with_suffix(".json") for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}
    kernels = {name: json.loads(path.read_text())["target"] for name, path in described.items()}
    print(json.dumps({"graphs": graphs, "kernels": kernels}))


if __name__ == "__main__":
    main()
