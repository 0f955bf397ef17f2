"""The exchange's copy kernels, beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.messages import pack_heads, pack_tokens, unpack_heads, unpack_tokens
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.kernel_times import copy_seconds
from tools.gpu_check.device_time import times

RANKS = 4
MEGABYTES = (10, 50, 200)
# By name: heads, key heads (fewer than ranks are replicated, and summed on the way back), head_dim, codec. The first
# one is measured in all sizes, the others in one.
SHAPES = {"": (32, 32, 128, "none"), " sums": (32, 2, 128, "none"), " fp8": (32, 32, 128, "fp8")}
ONE_SIZE = MEGABYTES[1]


def rows(repeats: int, *, small: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each direction and for a copy, in each size and shape.

    The bytes are those of bf16 that enter, whatever format the message has.

    Args:
        repeats: of each.
        small: 2 KiB alone, to see that it runs.
    """
    hardware = machine("h100").hardware
    for megabytes, shape in _columns(small=small):
        heads, groups, head_dim, codec = SHAPES[shape]
        calls, size = _calls(int(megabytes * 2**20), heads, groups, head_dim, codec)
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        for name, call in {"copy": lambda to=target, of=source: to.copy_(of), **calls}.items():
            took = times(call, repeats)
            passes = 1 if codec == "none" or name == "copy" else 2
            predicted = float(copy_seconds(hardware, size, passes)) * 1e6
            yield {
                "row": name, "column": f"{megabytes:g} MB{shape}", **took.row(), "predicted_us": round(predicted, 1),
                "entering_gb_s": round(size / 1e3 / took.device_us, 1),  # bytes in 1e-6 s, in 1e9 a second
            }  # fmt: skip


def _columns(*, small: bool) -> list[tuple[float, str]]:
    every = [(size, shape) for shape in SHAPES for size in MEGABYTES if not shape or size == ONE_SIZE]
    return [(2**-9, "")] if small else every


def _calls(size: int, heads: int, groups: int, head_dim: int, codec: str) -> tuple[dict[str, Callable[[], Any]], int]:
    """Returns a call for each direction of an exchange of bf16 q, k and v on one of several ranks, and the bytes that
    enter.
    """
    partition, sizes = partition_heads(heads, groups, RANKS), (heads, groups, groups)
    held = (partition.heads, partition.groups, partition.groups)
    sections = Sections(tuple(map(Section, "qkv", sizes, [head_dim] * 3, held)))
    tokens = max(size // (sections.width * 2), 1)
    packing = Packing([tokens * RANKS // 3, tokens * RANKS - tokens * RANKS // 3])
    layout = Layout.zigzag(packing, RANKS)
    device, dtypes, buffers = torch.device("cuda"), (torch.bfloat16,) * 3, Buffers()
    exchange = Exchange(layout, sections, codec=CODECS[codec])
    there, back = (Geometry(exchange, 0, dtypes, None, device, forward=forward) for forward in (True, False))
    widths = [count * head_dim for count in sizes]
    own = [torch.randn(there.local_rows, width, device=device, dtype=torch.bfloat16) for width in widths]

    def message(to_heads: bool) -> Tensor:
        at = there if to_heads else back
        counts = at.split_counts(to_heads=to_heads).received_by(0)
        return torch.zeros(sum(counts), dtype=torch.uint8, device=device)

    from_tokens, from_heads = message(True), message(False)
    sections_of = [view.contiguous() for view in unpack_heads(from_tokens, there)]
    calls: dict[str, Callable[[], Any]] = {
        "pack tokens": lambda: buffers.release(pack_tokens(own, there, buffers)),
        "unpack heads": lambda: unpack_heads(from_tokens, there),
        "pack heads": lambda: buffers.release(pack_heads(sections_of, back, buffers)),
        "unpack tokens": lambda: unpack_tokens([from_heads], back, widths),
    }
    return calls, sum(x.nbytes for x in own)
