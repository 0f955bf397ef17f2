"""Which device's exchange is done by kernels, and what of it is left to torch."""

import pytest
import torch

from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
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
