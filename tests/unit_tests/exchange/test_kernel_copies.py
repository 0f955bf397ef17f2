"""The exchange by kernels, under Triton's interpreter, against the exchange by torch: the same bits in every part.

In a process of its own, since the interpreter changes Triton for good.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.messages import (
    _tensor_shapes,
    like_rows,
    pack_heads,
    pack_tokens,
    section_views,
    unpack_heads,
    unpack_tokens,
)
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.testing.poison import poisoned
from tests.commands import run_module
from tests.covering import covering

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PACKING = Packing([7, 1, 13, 0, 2])
LAYOUTS = {
    "contiguous": Layout.contiguous(PACKING, 3), "zigzag": Layout.zigzag(PACKING, 3),
    "padded": Layout.zigzag(PACKING, 3, align=4),
    # More rows on rank 1 than one program of few units takes.
    "long": Layout.from_fragments(Packing([150]), [[(144, 150)], [(5, 144)], [(0, 5)]], align=4),
}  # fmt: skip
# The types of q, of k and v, and of beta; None for beta if all are columns of one tensor.
TYPES = [(FP32, FP32, FP32), (BF16, BF16, None), (BF16, BF16, BF16), (FP16, FP16, None), (FP64, FP64, FP64),
         (FP32, BF16, FP64)]  # fmt: skip
AROUND = [(0, 0), (3, 0), (1, 4)]  # elements before and after each row of a tensor
LONG = [("long", (6, 2), 1, "none", None, TYPES[5], AROUND[0]), ("long", (6, 3), 1, "int8", None, TYPES[1], AROUND[0])]


def cases(every: int) -> list[tuple[Any, ...]]:
    """Any two of layout, heads and groups, chunks, codec, batch, types, and what is around rows; of these some."""
    found = covering(
        ("contiguous", "zigzag", "padded"), [(6, 3), (6, 2), (5, 5), (4, 1)], [1, 2], tuple(CODECS), [None, 2], TYPES,
        AROUND, allowed=lambda layout, heads, chunks, *_: chunks <= partition_heads(*heads, 3).most_groups,
    )  # fmt: skip
    return [*found[::every], *LONG]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)], ids="every {}th case".format)
def test_kernels_move_the_same_bytes_as_torch(every: int):
    """On each rank in turn, or on all of them."""
    printed = run_module("tests.unit_tests.exchange.test_kernel_copies", str(every), TRITON_INTERPRET="1")
    launches = dict(line.split() for line in printed.splitlines())
    assert set(launches) == {"to_message_kernel", "from_message_kernel"}
    assert all(int(count) > 50 // every**2 for count in launches.values())


def exchange_of(layout: Layout, heads: int, groups: int, chunks: int, codec: str, dim: int = 8) -> Exchange:
    partition = partition_heads(heads, groups, 3)
    sections = Sections((
        Section("q", heads, dim, partition.heads), Section("k", groups, dim, partition.groups),
        Section("v", groups, dim - 2, partition.groups), Section("beta", heads, 1, partition.heads, exact=True),
    ))  # fmt: skip
    parts = tuple(sections.chunk(partition, number, chunks) for number in range(chunks)) if chunks > 1 else ()
    return Exchange(layout, sections, parts, CODECS[codec])


def everything(at: Geometry, widths: list[int], around: tuple[int, int] = (3, 0)) -> list[Tensor]:
    """Both directions on one rank, whatever the messages of others may hold."""
    random, buffers, found = torch.Generator().manual_seed(at.rank), Buffers(), []
    before, after = around
    tensors = [
        torch.randn(*lead, before + width + after, generator=random).to(at.device, dtype)[..., before:][..., :width]
        for (*lead, width), dtype in _tensor_shapes(widths, at)
    ]
    for part in at.parts:
        found.append(pack_tokens(tensors, part, buffers))
        shape = (at.layout.packing.total, at.rows_per_token * part.table_format.row_bytes[at.rank])
        table = torch.randn(shape[0], shape[1] // 8, generator=random, dtype=torch.float64).view(torch.uint8)
        table = table.to(at.device)
        plain = pack_heads(sections_of(table, part), part, buffers)
        views = unpack_heads(plain, part)
        gradients = like_rows(*views)
        for gradient, view in zip(gradients, views, strict=True):
            gradient.copy_(view)
        apart = [view.clone(memory_format=torch.contiguous_format) for view in views]
        found += [plain, *apart, pack_heads(gradients, part, buffers), pack_heads(apart, part, buffers)]
    messages = [pack_tokens(tensors, part, buffers) for part in at.parts]
    return [*found, *unpack_tokens(messages, at, widths)]


def sections_of(table: Tensor, at: Geometry) -> list[Tensor]:
    found = section_views(table, at)
    for view in found:  # bits of any table are no numbers
        values = torch.linspace(-3, 5, view.numel()).reshape(view.shape).to(view.dtype)
        view.copy_(values)
    return found


def check() -> None:
    from megatron_cp.exchange.kernels import copies
    from megatron_cp.exchange.kernels import triton as kernels

    launches: Counter[str] = Counter()
    for name in ("to_message_kernel", "from_message_kernel"):
        kernel = getattr(kernels, name)
        setattr(kernels, name, Counted(kernel, name, launches))
    by_torch = copies.runs_on
    every = int(sys.argv[1])
    for number, case in enumerate(cases(every)):
        layout, (heads, groups), chunks, codec, batch, (of_q, of_kv, of_beta), around = case
        dim = 88 if layout == "long" else 8  # more units of 16 bytes than one program takes
        exchange = exchange_of(LAYOUTS[layout], heads, groups, chunks, codec, dim)
        widths = [heads * dim, groups * (2 * dim - 2), heads] if of_beta else [exchange.sections.width]
        dtypes, is_forward = (of_q, of_kv, of_kv, of_beta or of_q), number % 2 == 0  # a codec has a format each way
        for rank in range(3) if every == 1 else [1 if layout == "long" else number % 3]:
            at = Geometry(exchange, rank, dtypes, batch, torch.device("cpu"), forward=is_forward)
            results = []
            for runs_on in (by_torch, lambda device: True):
                copies.runs_on = runs_on
                with poisoned():
                    results.append(everything(at, widths, around))
            copies.runs_on = by_torch
            for place, (expected, actual) in enumerate(zip(*results, strict=True)):
                assert torch.equal(bits(actual), bits(expected)), f"result {place} of {case} on rank {rank}"
    for name, count in launches.items():
        print(name, count)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


class Counted:
    """A kernel, whose launches are counted."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches[self.name] += 1
        return self.kernel[grid]


def interpret() -> None:
    """Lets Triton's interpreter run kernels, and refuse accesses that are not aligned as they say, as a GPU does."""
    from tools.triton_interpreter import interpret_triton, round_as_hardware_does

    interpret_triton()
    round_as_hardware_does()
    from triton.runtime import interpreter

    def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def make(self: Any, pointers: Any, *rest: Any) -> Any:
            multiple = pointers.attr.get("tt.divisibility", [1])[-1]
            first = pointers.data[..., :1][rest[mask_at].data[..., :1]]
            assert not (first % multiple).any(), f"an access is not aligned to {multiple} bytes"
            return access(self, pointers, *rest)

        return make

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = checked(builder.create_masked_load, 0)
    builder.create_masked_store = checked(builder.create_masked_store, 1)


if __name__ == "__main__":
    interpret()
    check()
