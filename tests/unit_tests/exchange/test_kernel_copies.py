"""The exchange by kernels, under Triton's interpreter, against the exchange by torch: the same bits in every part.

In a process of its own, since the interpreter changes Triton for good.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.head_side import pack_heads, unpack_heads
from megatron_cp.exchange.messages import like_rows
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.exchange.token_side import pack_tokens, unpack_tokens
from megatron_cp.layout import Layout, Packing
from megatron_cp.testing.poison import poisoned
from tests.covering import covering
from tests.forked_commands import run_module

PACKING = Packing([7, 1, 13, 0, 2])
LAYOUTS = {
    "contiguous": Layout.contiguous(PACKING, 3),
    "zigzag": Layout.zigzag(PACKING, 3),
    "padded": Layout.zigzag(PACKING, 3, align=4),
}
# Any two of layout, heads and groups, chunks, codec, batch, type, sections in one tensor or in three, and direction.
CASES = covering(
    tuple(LAYOUTS), [(6, 3), (6, 2), (5, 5), (4, 1)], [1, 2], ["none", "fp8", "int8"], [None, 2],
    [torch.float32, torch.bfloat16], [False, True], [False, True],
    allowed=lambda layout, heads, chunks, *_: chunks <= partition_heads(*heads, 3).most_groups,
)  # fmt: skip


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)], ids="every {}th case".format)
def test_kernels_move_the_same_bytes_as_torch(every: int):
    """On each rank in turn, or on all of them."""
    printed = run_module("tests.unit_tests.exchange.test_kernel_copies", str(every), TRITON_INTERPRET="1")
    launches = dict(line.split() for line in printed.splitlines() if "_kernel" in line)
    assert set(launches) == {"to_message_kernel", "from_message_kernel"}
    assert all(int(count) > 50 // every**2 for count in launches.values())
    (replaced,) = (int(line.split()[1]) for line in printed.splitlines() if line.startswith("replacements "))
    assert 0 < replaced <= 4 * sum(map(int, launches.values()))  # and not one for each call of a function


def exchange_of(layout: Layout, heads: int, groups: int, chunks: int, codec: str) -> Exchange:
    partition = partition_heads(heads, groups, 3)
    sections = Sections(
        (
            Section("q", heads, 8, partition.heads),
            Section("k", groups, 8, partition.groups),
            Section("v", groups, 6, partition.groups),
            Section("beta", heads, 1, partition.heads, exact=True),
        )
    )
    parts = tuple(sections.chunk(partition, number, chunks) for number in range(chunks)) if chunks > 1 else ()
    return Exchange(layout, sections, parts, CODECS[codec])


def everything(at: Geometry, widths: list[int]) -> list[Tensor]:
    """Both directions on one rank, whatever the messages of others may hold."""
    random, buffers = torch.Generator().manual_seed(at.rank), Buffers()
    lead = (int(at.layout.row_counts[at.rank]),) + (() if at.batch is None else (at.batch,))
    dtypes = dict(zip([32, 16, 12, 4], at.dtypes, strict=False))
    found: list[Tensor] = []
    tensors = [
        torch.randn(*lead, width + 3, generator=random).to(at.device, dtypes.get(width, at.dtypes[0]))[..., 3:]
        for width in widths
    ]
    received: list[Tensor] = []
    for part in at.parts:
        found.append(pack_tokens(tensors, part, buffers))
        shape = (at.layout.packing.total, at.copies * part.table_format.row_bytes[at.rank])
        table = torch.randn(shape[0], shape[1] // 8, generator=random, dtype=torch.float64).view(torch.uint8)
        table = table.to(at.device)
        plain = pack_heads(sections_of(table, part), part, buffers)
        views = unpack_heads(plain, part)
        gradients = like_rows(*views)
        for gradient, view in zip(gradients, views, strict=True):
            gradient.copy_(view)
        apart = [view.clone(memory_format=torch.contiguous_format) for view in views]
        found += [plain, *apart, pack_heads(gradients, part, buffers), pack_heads(apart, part, buffers)]
        received.append(found[-4 - len(views)])  # what was packed is as good as what arrives
        assert len(views) == len(at.blocks)
    messages = [pack_tokens(tensors, part, buffers) for part in at.parts]
    return [*found, *unpack_tokens(messages, at, widths)]


def sections_of(table: Tensor, at: Geometry) -> list[Tensor]:
    from megatron_cp.exchange.messages import section_views

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
    replacements = counted_replacements()
    by_torch = copies.runs_on
    every = int(sys.argv[1])
    for number, case in enumerate(CASES[::every]):
        layout, (heads, groups), chunks, codec, batch, dtype, together, forward = case
        exchange = exchange_of(LAYOUTS[layout], heads, groups, chunks, codec)
        widths = [heads * 9 + groups * 14] if together else [heads * 8, groups * 14, heads]
        dtypes = (dtype,) * 4
        for rank in range(3) if every == 1 else [number % 3]:
            at = Geometry(exchange, rank, dtypes, batch, torch.device("cpu"), forward=forward)
            results = []
            for runs_on in (by_torch, lambda device: True):
                copies.runs_on = runs_on
                with poisoned():
                    results.append(everything(at, widths))
            copies.runs_on = by_torch
            for place, (expected, actual) in enumerate(zip(*results, strict=True)):
                where = f"result {place} of {layout} {heads}:{groups} {chunks} {codec} {batch} on rank {rank}"
                assert torch.equal(bits(actual), bits(expected)), where
    for name, count in launches.items():
        print(name, count)
    print("replacements", replacements.total())


def counted_replacements() -> Counter[str]:
    """Counts the times that the interpreter replaces Triton's functions, which costs more than most calls."""
    from triton.runtime import interpreter

    replacements: Counter[str] = Counter()
    replace = interpreter._patch_lang_core

    def counted(language: Any, *scope: Any) -> None:
        replacements[language.__name__] += 1
        replace(language, *scope)

    interpreter._patch_lang_core = counted
    return replacements


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


class Counted:
    """A kernel, whose launches are counted."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches[self.name] += 1
        return self.kernel[grid]


if __name__ == "__main__":
    from tools.triton_interpreter import interpret_triton, round_as_hardware_does

    interpret_triton()
    round_as_hardware_does()
    check()
