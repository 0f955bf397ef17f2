"""Tests of the devices whose exchange is done by kernels, and of the work that is left to torch."""

import pytest
import torch

from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.kernels.pieces import TENSOR, Pieces
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing


def geometry(codec: str, device: str) -> Geometry:
    partition = partition_heads(4, 4, 2)
    sections = Sections((Section("q", 4, 64, partition.heads),))
    exchange = Exchange(Layout.zigzag(Packing([5, 9]), 2), sections, (), CODECS[codec])
    return Geometry(exchange, 0, (torch.bfloat16,), None, torch.device(device))


@pytest.mark.parametrize(
    ("codec", "capability", "fits"),
    [
        ("none", (8, 0), True), ("int8", (8, 0), True), ("fp8", (8, 0), False), ("fp8", (8, 9), True),
        ("fp8_e5m2", (9, 0), True),
    ],
)  # fmt: skip
def test_fp8_is_left_to_torch_where_triton_rounds_otherwise(codec, capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert copies._fits([torch.ones(7, 256, dtype=torch.bfloat16)], [], geometry(codec, "cuda")) == fits


def test_rows_that_are_not_dense_are_left_to_torch():
    table = torch.ones(7, 512, dtype=torch.bfloat16)
    dense = table[:, :256], table.view(7, 8, 64)[:, :4], table[:, None, :256], table.view(7, 1, 8, 64)[:, :, :4]
    apart = table[:, ::2], table.view(7, 8, 64)[:, ::2], table.view(7, 4, 128)[..., :64], table.t()[:, :7]
    assert [copies._fits([tensor], [], geometry("none", "cuda")) for tensor in dense] == [True] * 4
    assert [copies._fits([dense[0], tensor], [], geometry("none", "cuda")) for tensor in apart] == [False] * 4


# By ranks: units of a token with both sides' kinds, and programs of 128 rows; if all took `UNITS` units, there would be
# 136, 136 and 136 of them, and 72, 40 and 24.
@pytest.mark.parametrize(
    ("ranks", "tokens", "heads"),
    [
        (2, ((16,), 1032, 129), ((16,), 516, 65)),
        (4, ((16,), 1032, 129), ((16,), 258, 33)),
        (8, ((16, 8), 1040, 130), ((16, 8), 130, 17)),
    ],
)  # fmt: skip
def test_no_whole_program_is_for_beta(ranks: int, tokens: tuple, heads: tuple):
    """Qwen3-Next's linear layers: 16 key heads and 32 heads of 128, and two numbers a head, in bfloat16."""
    partition = partition_heads(32, 16, ranks)
    shapes = {"q": (16, 128), "k": (16, 128), "v": (32, 128), "beta": (32, 1), "alpha": (32, 1)}
    held = {16: partition.groups, 32: partition.heads}
    sections = Sections(tuple(Section(name, count, size, held[count]) for name, (count, size) in shapes.items()))
    exchange = Exchange(Layout.zigzag(Packing([2 * ranks]), ranks), sections, ())
    at = Geometry(exchange, 0, (torch.bfloat16,) * 5, None, torch.device("cpu"))
    joint = (sum(count * size for count, size in list(shapes.values())[:3]), 32, 32)
    to_ranks = copies._token_table(
        at.blocks, (at.format,), at.dtypes, at.coded, joint, at.dtypes[:3], (16,) * 4, at.device, to_tensors=False
    )
    assert programs_of(to_ranks) == tokens
    assert programs_of(copies._head_pieces(at, (16,) * 6, to_tensors=True)) == heads


def programs_of(pieces: Pieces) -> tuple[tuple[int, ...], int, int]:
    """Kinds, units, and programs of a group of rows."""
    return pieces.kinds, int((pieces.table[TENSOR] >= 0).sum()), pieces.programs[-1]
