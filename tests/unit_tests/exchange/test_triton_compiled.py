"""What Triton makes of the kernels for an H100, without one: the PTX, the registers, and how often it compiles.

A stand-in for the CUDA driver says what to compile for and only counts launches. It takes Triton's place for good, so
it has a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_cp.exchange.codec import E4M3, E5M2, INT8
from megatron_cp.exchange.kernels.pieces import Piece, alignment_of, pieces_of

pytestmark = pytest.mark.slow

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Any]:
    """What a process that compiles has to say."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit_tests.exchange.test_triton_compiled"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,  # stderr is left to pytest, which shows it on failure
        timeout=240,
        check=True,
    )
    return json.loads(done.stdout)


CASES = ["copy_to", "copy_from", "gather", "sum", "encode", "decode", "encode_int8", "decode_int8"]


@pytest.mark.parametrize("case", CASES)
def test_aligned_units_move_in_128_bits(made, case: str):
    """Two 64-bit words or four of 32, both ways; a thread has eight units of 16 rows."""
    accesses = made["kernels"][case]["accesses"]
    assert accesses["ld.global.v2.b64"] == accesses["st.global.v2.b64"] == 8
    wide = {"sum": ("ld", "st"), "encode": ("ld",), "encode_int8": ("ld",), "decode": ("st",), "decode_int8": ("st",)}
    for way in wide.get(case, ()):
        assert accesses[f"{way}.global.v4.b32"] >= 2, accesses
    if "code" in case:  # eight elements are as many bytes of the message
        assert accesses["st.global.v2.b32" if "encode" in case else "ld.global.v2.b32"] >= 2, accesses


@pytest.mark.parametrize("case", CASES)
def test_a_warp_moves_what_lies_side_by_side(made, case: str):
    """32 units of one row, or two heads of 128 elements: with rows along the threads each would touch a row alone."""
    assert set(made["kernels"][case]["warps"]) <= {"[32, 1, 1]", "[2, 1, 16]"}


@pytest.mark.parametrize("case", CASES)
def test_registers_suffice(made, case: str):
    kernel = made["kernels"][case]
    assert kernel["local"] == 0  # spills nothing
    assert kernel["registers"] <= 96  # 5 programs of 128 threads on a processor of 65,536 registers


@pytest.mark.parametrize("case", CASES)
def test_offsets_have_64_bits(made, case: str):
    assert made["kernels"][case]["products_of_32_bits"] == []


def test_coding_rounds_as_torch_does(made):
    for case in ("encode", "encode_int8"):
        assert "div.rn.f32" in made["kernels"][case]["operations"]
        assert not any(name.startswith(("div.full", "div.approx")) for name in made["kernels"][case]["operations"])
    assert "cvt.rn.satfinite.e4m3x2.f32" in made["kernels"]["encode"]["operations"]
    assert "cvt.rn.satfinite.e5m2x2.f32" in made["kernels"]["encode_e5m2"]["operations"]
    assert made["kernels"]["encode_int8"]["rounds_to_whole"]
    for case in ("decode", "decode_int8"):
        assert not made["kernels"][case]["fused"]  # a product is rounded before it is added


def test_a_call_is_one_launch_and_no_number_makes_another_kernel(made):
    drawn = made["drawn"]
    assert drawn["launches"] == drawn["calls"] == 200
    # One for each type of index and, on the way back, each set of kinds of sums: whether aligned, not, or both.
    assert drawn["compiled"] == drawn["variants"]
    assert drawn["variants"]["to_message_kernel"] == 3
    assert drawn["variants"]["from_message_kernel"] <= 3 * 4


# -- in a process of its own -----------------------------------------------------------------------------------------


class Driver:
    """Compiles for an H100, and launches nothing."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def launcher_cls(self, *_: object) -> Any:
        return self.launch

    def launch(self, *_: object) -> None:
        self.launches += 1

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def empty(size: int, first: int = 0) -> Tensor:
    """Bytes from `first` after a multiple of 16 on."""
    room = torch.empty(size + 32, dtype=torch.uint8)
    begin = -room.data_ptr() % 16 + first
    return room[begin : begin + size]


def launch(pieces: list[Piece], tensors: list[Tensor], message: Tensor, rows: int, *, back: bool, **more: Any) -> Any:
    """What was compiled, and the table."""
    types, alignment = [tensor.dtype for tensor in tensors], alignment_of(tensors, [message])
    table = pieces_of(pieces, types=types, alignment=alignment, device=CPU, to_tensors=back)
    if back:
        kernels.copy_from_message([message], tensors, rows, table, **more)
    else:
        kernels.copy_to_message(tensors, message, rows, table, **more)
    return table


def described(kernel: Any, folder: Path) -> dict[str, Any]:
    import triton

    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", folder / "cubin"], capture_output=True, text=True, check=True
    ).stdout
    ptx, ttgir, ttir = (kernel.asm[level] for level in ("ptx", "ttgir", "ttir"))
    return {
        "accesses": Counter(re.findall(r"\b(?:ld|st)\.global\S*", ptx)),
        "operations": sorted(set(re.findall(r"\b(?:div|cvt)\.\S+", ptx))),
        "rounds_to_whole": all(
            f"0f{bits}" in ptx for bits in ("4B400000", "CB400000")
        ),  # adds 1.5 * 2^23, and takes it
        "warps": re.findall(r"^#blocked.*threadsPerWarp = (\[\d+, \d+, \d+\])", ttgir, re.MULTILINE),
        "products_of_32_bits": re.findall(r"arith\.muli .* : tensor<\S*i32>.*", ttir),
        "fused": kernel.metadata.enable_fp_fusion,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1]),
    }


def compile_cases(last: list[Any], folder: Path) -> dict[str, Any]:
    rows, size = 40, 512
    tensor, message = empty(rows * size).view(BF16).view(rows, -1), empty(2 * rows * size)
    copied, other = Piece(0, 0, size, 0, size, 0), Piece(0, 0, size, size, size, 0)
    coded = Piece(0, 0, size, 0, size, 0, head_dim=128, scale=256)
    calls = {
        "copy_to": ([copied], False, {}),
        "copy_from": ([copied], True, {}),
        "gather": ([copied], False, {"index": torch.arange(rows)}),
        "sum": ([copied, other], True, {}),
        "encode": ([coded], False, {"coding": E4M3}),
        "decode": ([coded, coded._replace(start=size)], True, {"coding": E4M3}),
        "encode_e5m2": ([coded], False, {"coding": E5M2}),
        "encode_int8": ([coded], False, {"coding": INT8}),
        "decode_int8": ([coded], True, {"coding": INT8}),
    }
    found = {}
    for name, (pieces, back, more) in calls.items():
        launch(pieces, [tensor], message, rows, back=back, **more)
        found[name] = described(last[-1], folder)
    return found


def draw_calls(driver: Driver, compiled: list[Any]) -> dict[str, Any]:
    """Both ways, 100 times: other lengths, strides, alignments, packs of pieces and numbers of tensors each time."""
    draw = np.random.default_rng(0)
    driver.launches, calls, variants = 0, 0, set()
    compiled.clear()
    for kernel in (kernels.to_message_kernel, kernels.from_message_kernel):
        kernel.device_caches.clear()
    for number in range(100):
        rows = int(draw.choice([1, 2, 16, 17, 128, draw.integers(1, 4000)]))
        index = (None, torch.arange(rows), torch.arange(rows, dtype=torch.int32))[number % 3]
        tensors, pieces, start = [], [], 0
        for at in range(int(draw.integers(1, 9))):
            first, gap, width = int(draw.integers(8)), int(draw.integers(20)), int(draw.integers(1, 9)) * 8
            stride = width + gap if rows > 1 else 2**31 + gap
            room = empty(2 * (rows - 1) * stride + 2 * width, 2 * first).view(BF16)
            tensors.append(room.as_strided((rows, width), (stride, 1)))
            pieces.append(Piece(at, 0, 2 * width, start, 2 * width + 16, 16 * int(draw.integers(2))))
            start += 2 * width + 16
        message = empty(rows * start, int(draw.choice([0, 0, 2, 8])))
        launch(pieces, tensors, message, rows, back=False, index=index)
        variants.add(("to_message_kernel", str(index is None or index.dtype)))
        if number % 2:  # what stands several times is summed
            copies = range(int(draw.choice([2, 3, 17])))
            pieces = [piece._replace(start=piece.start + start * copy) for piece in pieces for copy in copies]
            message = empty(rows * start * len(copies))
        table = launch(pieces, tensors, message, rows, back=True, index=index)
        variants.add(("from_message_kernel", str(index is None or index.dtype), table.sum_kinds))
        calls += 2
    return {
        "calls": calls,
        "launches": driver.launches,
        "variants": Counter(name for name, *_ in variants),
        "compiled": Counter(kernel.metadata.name for kernel in compiled),
    }


def main(folder: Path) -> None:
    import triton

    driver, compiled = Driver(), []
    triton.runtime.driver.set_active(driver)

    def keep(*, fn: Any, key: Any, **_: Any) -> None:
        compiled.append(fn.jit_function.device_caches[0][0][key])

    triton.knobs.runtime.jit_post_compile_hook = keep
    found = {"kernels": compile_cases(compiled, folder), "drawn": draw_calls(driver, compiled)}
    print(json.dumps(found))


if __name__ == "__main__":
    from megatron_cp.exchange.kernels import triton as kernels

    main(Path(os.environ["TRITON_CACHE_DIR"]))
