"""The exchange's copy kernels: bytes a second, beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.head_side import pack_heads, unpack_heads
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.exchange.token_side import pack_tokens, unpack_tokens
from megatron_cp.layout import Layout, Packing
from tools.gpu_check.device_time import times

RANKS = 4
MEGABYTES = (10, 50, 100, 200)
# By name: heads, key heads (fewer than ranks are replicated, and summed on the way back), head_dim, codec.
SHAPES = {
    "128 B": (32, 32, 64, "none"),
    "256 B": (32, 32, 128, "none"),
    "2 KiB": (4, 4, 1024, "none"),
    "sums": (32, 2, 128, "none"),
    "fp8": (32, 32, 128, "fp8"),
    "int8": (32, 32, 128, "int8"),
}


def rows(repeats: int, *, small: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each shape, size and direction: bandwidth, and the time over that of a copy of as many bytes.

    The bandwidth counts the bytes of bf16 that enter, whatever format the message has.

    Args:
        repeats: of each.
        small: 16 KiB alone, to see that it runs.
    """
    for megabytes in (2**-6,) if small else MEGABYTES:
        copied = _copy(megabytes, repeats)
        for name, (heads, groups, head_dim, codec) in SHAPES.items():
            calls, size = _calls(int(megabytes * 2**20), heads, groups, head_dim, codec)
            for direction, call in calls.items():
                took = times(call, repeats)
                entering = size / 1e3 / took.device_us  # bytes in 1e-6 s, in 1e9 a second
                yield {
                    "runs": name, "megabytes": megabytes, "direction": direction, **took.row(),
                    "entering_gb_s": round(entering, 1), "over_copy": round(took.device_us / copied, 2),
                }  # fmt: skip


def _copy(megabytes: float, repeats: int) -> float:
    source, target = (torch.empty(int(megabytes * 2**20), dtype=torch.uint8, device="cuda") for _ in range(2))
    return times(lambda: target.copy_(source), repeats).device_us


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
