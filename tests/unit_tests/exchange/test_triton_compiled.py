"""Tests of Triton's output for A100, H100 and B200, without one: PTX, machine code, and the number of compilations.

A stand-in for the CUDA driver says what to compile for and only counts launches. It takes Triton's place for good, so
it has a process of its own. Of what this prints, `benchmarks/results/kernels_compiled.md` has the numbers that count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_cp.exchange.codec import E4M3, E5M2, INT8
from megatron_cp.exchange.kernels.pieces import MOST, Piece, alignment_of, copy_table
from tests.commands import run_module
from tests.shared import once

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = torch.device("cpu")

SM_80, SM_90, SM_100 = 80, 90, 100  # A100, H100 and H200, B200
ARCHITECTURES = (SM_80, SM_90, SM_100)
# By case: (registers of a thread, instructions) on sm_80, sm_90 and sm_100 as Triton 3.6.0 compiles them. FP8 is left
# to torch on sm_80.
MEASURED = {
    "copy_to": ((48, 187), (48, 192), (48, 192)), "copy_from": ((48, 207), (48, 213), (48, 212)),
    "gather": ((48, 247), (48, 255), (48, 254)), "copy_to_eight": ((48, 225), (48, 227), (48, 227)),
    "copy_from_eight": ((48, 272), (48, 274), (48, 273)), "copy_to_ragged": ((48, 669), (48, 688), (48, 692)),
    "copy_from_ragged": ((48, 767), (48, 788), (48, 783)), "sum": ((54, 312), (50, 324), (56, 342)),
    "sum_ragged": ((64, 1479), (56, 1534), (56, 1547)), "encode": (None, (80, 667), (79, 670)),
    "decode": (None, (64, 399), (63, 391)), "encode_e5m2": (None, (80, 667), (79, 670)),
    "decode_e5m2": (None, (64, 399), (63, 391)), "encode_int8": ((80, 728), (80, 731), (80, 712)),
    "decode_int8": ((64, 400), (64, 406), (64, 396)), "encode_gather_int8": ((78, 738), (80, 742), (80, 721)),
    "decode_gather_int8": ((72, 404), (64, 415), (70, 405)),
}  # fmt: skip
# Accesses of the machine code: LDG.128, STG.128, LDG.64 and STG.64.
WIDE = {
    **dict.fromkeys(("copy_to", "copy_from", "copy_to_eight", "copy_from_eight"), (8, 8, 0, 0)), "gather": (8, 8, 8, 0),
    **dict.fromkeys(("copy_to_ragged", "copy_from_ragged"), (8, 8, 8, 8)),
    "sum": (4, 2, 0, 0), "sum_ragged": (12, 10, 8, 8),
    **dict.fromkeys(("encode", "encode_e5m2", "encode_int8"), (2, 0, 0, 2)), "encode_gather_int8": (2, 0, 2, 2),
    **dict.fromkeys(("decode", "decode_e5m2", "decode_int8"), (0, 2, 4, 0)), "decode_gather_int8": (0, 2, 6, 0),
}  # fmt: skip
MARGIN = 1.05  # for another ptxas; a branch or an address that is computed twice costs more
MORE = {"copy_to_eight", "copy_from_eight", "encode_e5m2", "decode_e5m2", "encode_gather_int8", "decode_gather_int8"}


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of a process that compiles."""
    module = "tests.unit_tests.exchange.test_triton_compiled"
    return once(tmp_path_factory, "triton_compiled", lambda: compiled_by(module, *asked_for(request)))


def asked_for(request: pytest.FixtureRequest) -> list[str]:
    """Returns the architectures of the selected tests: H100 and few cases, or all if one of them is thorough."""
    own = [item for item in request.session.items if item.module is request.module]
    thorough = any(item.get_closest_marker("thorough") for item in own)
    return list(map(str, ARCHITECTURES)) if thorough else [str(SM_90), "--few"]


def compiled_by(module: str, *architectures: str) -> dict[str, Any]:
    """Runs a module that compiles, in a process of its own."""
    return json.loads(run_module(module, *architectures, TRITON_INTERPRET="0"))


def compiled_on(architecture: int) -> list[str]:
    return [case for case in MEASURED if MEASURED[case][ARCHITECTURES.index(architecture)]]


def again(architecture: int, more: bool = False) -> Any:
    """Returns the mark of what `make test` compiles for H100 and not of other kernels."""
    return pytest.mark.thorough if more or architecture != SM_90 else ()


each_kernel = pytest.mark.parametrize(
    ("architecture", "case"),
    [pytest.param(architecture, case, marks=again(architecture, case in MORE))
     for architecture in ARCHITECTURES for case in compiled_on(architecture)],
    ids=str,
)  # fmt: skip
each_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(architecture, marks=again(architecture)) for architecture in ARCHITECTURES]
)


def kernel_of(made: dict[str, Any], architecture: int, case: str) -> dict[str, Any]:
    return made["kernels"][str(architecture)][case]  # JSON has no other keys


@each_kernel
def test_a_kernel_moves_wide_words_of_its_architecture(made, architecture: int, case: str):
    # A thread has eight rows of one unit; eight elements are as many bytes of a coded message. What a table has not is
    # not compiled. It is the cubin that is checked, since an assembler could have split accesses.
    kernel = kernel_of(made, architecture, case)
    widths = kernel["machine_accesses"]
    assert tuple(widths.get(width, 0) for width in ("LDG.128", "STG.128", "LDG.64", "STG.64")) == WIDE[case], widths
    assert not set(widths) - {f"{way}.{bits}" for way in ("LDG", "STG") for bits in (8, 16, 32, 64, 128)}, widths
    # 32 units of one row, or two heads of 128 elements: with rows along the threads each would touch a row alone.
    assert set(kernel["warps"]) <= {"[32, 1, 1]", "[2, 1, 16]"}
    assert re.fullmatch(rf"sm_{architecture}a?", kernel["architecture"])


@each_kernel
def test_registers_and_instructions_suffice(made, architecture: int, case: str):
    kernel = kernel_of(made, architecture, case)
    registers, instructions = MEASURED[case][ARCHITECTURES.index(architecture)]
    assert kernel["local"] == 0  # spills nothing
    assert kernel["registers"] <= MARGIN * registers
    assert kernel["instructions"] <= MARGIN * instructions
    assert kernel["products_of_32_bits"] == []


@pytest.mark.parametrize(
    "architecture",
    [SM_90, *(pytest.param(each, marks=pytest.mark.thorough, id=f"{each} with all cases") for each in ARCHITECTURES)],
)
def test_coding_rounds_as_torch_does(made, architecture: int):
    kernels = made["kernels"][str(architecture)]
    encodes, decodes = ([case for case in kernels if case.startswith(what)] for what in ("encode", "decode"))
    assert {"encode_int8", "decode_int8"} <= {*encodes, *decodes}
    for case in encodes:
        assert "div.rn.f32" in kernels[case]["operations"]
        assert not any(name.startswith(("div.full", "div.approx")) for name in kernels[case]["operations"])
        if "int8" in case:
            assert kernels[case]["rounds_to_whole"]
        else:
            name = "e5m2" if "e5m2" in case else "e4m3"
            assert f"cvt.rn.satfinite.{name}x2.f32" in kernels[case]["operations"]
    for case in decodes:
        assert not kernels[case]["fused"]  # a product is rounded before it is added


@pytest.mark.thorough
def test_a_call_is_one_launch_and_no_number_makes_another_kernel(made):
    drawn = made["drawn"]
    assert drawn["launches"] == drawn["calls"] == 200
    # One for each type of index, number of tensors and set of kinds of units, of which this draws many.
    assert drawn["compiled"] == drawn["variants"]


@contextlib.contextmanager
def compiling() -> Iterator[tuple[Driver, list[Any], Path]]:
    """Yields a driver that is Triton's from now on, a list to which each compiled kernel is appended, and a folder."""
    import triton

    driver, compiled = Driver(), []
    triton.runtime.driver.set_active(driver)

    def keep(*, fn: Any, key: Any, **_: Any) -> None:
        compiled.append(fn.jit_function.device_caches[0][0][key])

    triton.knobs.runtime.jit_post_compile_hook = keep
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        yield driver, compiled, Path(folder)


def forget(module: ModuleType) -> None:
    """Forgets all compiled code of a module, so that later calls may compile for another architecture."""
    for kernel in vars(module).values():
        if hasattr(kernel, "device_caches"):
            kernel.device_caches.clear()


class Driver:
    """Compiles for an architecture, and launches nothing."""

    def __init__(self) -> None:
        self.launches = 0
        self.architecture = SM_90
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232448}
        )

    def launcher_cls(self, *_: object) -> Any:
        return self.launch

    def launch(self, *_: object) -> None:
        self.launches += 1

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

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
    """The table; all messages are the one."""
    types, messages = [tensor.dtype for tensor in tensors], [message] * (1 + max(piece.message for piece in pieces))
    alignment = alignment_of(tensors, messages)
    table = copy_table(pieces, types=types, alignment=alignment, device=CPU, to_tensors=back)
    kernels.Launch(tensors, messages, rows, table, **more)([x.data_ptr() for x in (*tensors, *messages)])
    return table


def described(kernel: Any, folder: Path) -> dict[str, Any]:
    import triton

    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    found = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", folder / "cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ptx, ttgir, ttir = (kernel.asm[level] for level in ("ptx", "ttgir", "ttir"))
    # Without what fills up the end, and without the predicates that stand before instructions.
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?(?!NOP)([A-Z]\S*)", found, re.MULTILINE)
    return {
        "operations": sorted(set(re.findall(r"\b(?:div|cvt)\.\S+", ptx))),
        "rounds_to_whole": all(
            f"0f{bits}" in ptx for bits in ("4B400000", "CB400000")
        ),  # adds 1.5 * 2^23, and takes it
        "warps": re.findall(r"^#blocked.*threadsPerWarp = (\[\d+, \d+, \d+\])", ttgir, re.MULTILINE),
        "products_of_32_bits": re.findall(r"arith\.muli .* : tensor<\S*i32>.*", ttir),
        "fused": kernel.metadata.enable_fp_fusion,
        "architecture": re.search(r"code for (\S+)", found)[1],
        "registers": int(re.search(r"REG:(\d+)", found)[1]),
        "local": int(re.search(r"LOCAL:(\d+)", found)[1]) + int(re.search(r"STACK:(\d+)", found)[1]),
        "instructions": len(instructions),
        "machine_accesses": machine_accesses(instructions),
    }


def machine_accesses(instructions: list[str]) -> Counter[str]:
    """Counts `LDG.128`, `STG.64` and similar instructions; those of memory other than the device's, except shared."""
    found: Counter[str] = Counter()
    for instruction in instructions:
        name, *modifiers = instruction.split(".")
        if name in ("LD", "ST", "LDG", "STG", "LDL", "STL"):
            bits = next((each for each in modifiers if each.strip("US").isdigit()), "32")
            found[f"{name}.{bits.strip('US')}"] += 1
    return found


def compile_cases(architecture: int, last: list[Any], folder: Path, left_out: Set[str]) -> dict[str, Any]:
    """Returns the description of each case's kernel."""
    rows, size = 40, 512
    tensor, message = empty(rows * size).view(BF16).view(rows, -1), empty(8 * rows * size)
    copied, other = Piece(0, 0, size, 0, size, 0), Piece(0, 0, size, size, size, 0)
    coded = Piece(0, 0, size, 0, size, 0, head_dim=128, scale=256)
    tensors = [tensor] * MOST
    eight = [Piece(number, 0, size, 0, size, 0, number) for number in range(MOST)]
    to_one = [piece._replace(message=0, start=piece.tensor * size) for piece in eight]
    ragged = Piece(0, 1, 46, 0, size, 1)  # units of 1, 2, 4, 8 and 16 bytes
    summed = [ragged, *(Piece(0, 64, 72, start, size, 64) for start in (0, size))]  # and sums in two widths
    index = torch.arange(rows)
    calls = {
        "copy_to": ([copied], False, {}), "copy_from": ([copied], True, {}),
        "gather": ([copied], False, {"index": index}), "copy_to_eight": (to_one, False, {}),
        "copy_from_eight": (eight, True, {}), "copy_to_ragged": ([ragged], False, {}),
        "copy_from_ragged": ([ragged], True, {}), "sum": ([copied, other], True, {}), "sum_ragged": (summed, True, {}),
        "encode": ([coded], False, {"coding": E4M3}),
        "decode": ([coded, coded._replace(start=size)], True, {"coding": E4M3}),
        "encode_e5m2": ([coded], False, {"coding": E5M2}), "decode_e5m2": ([coded], True, {"coding": E5M2}),
        "encode_int8": ([coded], False, {"coding": INT8}), "decode_int8": ([coded], True, {"coding": INT8}),
        "encode_gather_int8": ([coded], False, {"coding": INT8, "index": index}),
        "decode_gather_int8": ([coded], True, {"coding": INT8, "index": index}),
    }  # fmt: skip
    found = {}
    for name in compiled_on(architecture):
        if name in left_out:
            continue
        pieces, back, more = calls[name]
        launch(pieces, tensors[: 1 + pieces[-1].tensor], message, rows, back=back, **more)
        found[name] = described(last[-1], folder)
    return found


def draw_calls(driver: Driver, compiled: list[Any]) -> dict[str, Any]:
    """Both ways, 100 times: other lengths, strides, alignments, packs of pieces and numbers of tensors each time."""
    draw = np.random.default_rng(0)
    driver.launches, calls, variants = 0, 0, set()
    compiled.clear()
    forget(kernels)
    for number in range(100):
        rows = int(draw.choice([1, 2, 16, 17, 128, draw.integers(1, 4000)]))
        index = (None, torch.arange(rows), torch.arange(rows, dtype=torch.int32))[number % 3]
        tensors, pieces, start = [], [], 0
        for at in range(int(draw.choice([1, 3, MOST]))):
            first, gap, width = int(draw.integers(8)), int(draw.integers(20)), int(draw.integers(1, 9)) * 8
            stride = width + gap if rows > 1 else 2**31 + gap
            room = empty(2 * (rows - 1) * stride + 2 * width, 2 * first).view(BF16)
            tensors.append(room.as_strided((rows, width), (stride, 1)))
            pieces.append(Piece(at, 0, 2 * width, start, 2 * width + 16, 16 * int(draw.integers(2))))
            start += 2 * width + 16
        message = empty(rows * start, int(draw.choice([0, 0, 2, 8])))
        table = launch(pieces, tensors, message, rows, back=False, index=index)
        variants.add(("to_message_kernel", str(index is None or index.dtype), len(tensors), table.kinds))
        if number % 2:  # what stands several times is summed
            copies = range(int(draw.choice([2, 3, 17])))
            pieces = [piece._replace(start=piece.start + start * copy) for piece in pieces for copy in copies]
            message = empty(rows * start * len(copies))
        table = launch(pieces, tensors, message, rows, back=True, index=index)
        variants.add(("from_message_kernel", str(index is None or index.dtype), len(tensors), table.kinds))
        calls += 2
    return {
        "calls": calls,
        "launches": driver.launches,
        "variants": Counter(name for name, *_ in variants),
        "compiled": Counter(kernel.metadata.name for kernel in compiled),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES, choices=ARCHITECTURES)
    options.add_argument("--few", action="store_true", help="leaves out what is like other cases")
    asked = options.parse_args()
    found = {}
    with compiling() as (driver, compiled, folder):
        for architecture in asked.architectures:
            driver.architecture = architecture
            forget(kernels)
            found[architecture] = compile_cases(architecture, compiled, folder, MORE if asked.few else set())
        driver.architecture = SM_90
        drawn = draw_calls(driver, compiled) if list(asked.architectures) == list(ARCHITECTURES) else None
    print(json.dumps({"kernels": found, "drawn": drawn}))


if __name__ == "__main__":
    from megatron_cp.exchange.kernels import triton as kernels

    main()
