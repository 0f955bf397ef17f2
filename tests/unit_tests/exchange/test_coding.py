"""Coding by faster means than torch's own conversions: still the same bits.

How far codes are from what they stand for is tested in `test_codecs.py` and `test_fuzz.py`, and that kernels code alike
in `test_triton_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch

from megatron_cp.exchange import coding
from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.coding import decode, encode

FORMATS = {format_.dtype: format_ for codec in CODECS.values() if codec for format_ in (codec.forward, codec.backward)}


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compares bits; all NaN are equal."""
    is_nan = expected.isnan()
    numbers = (x.masked_fill(is_nan, 0).view(torch.int32) for x in (got, expected))
    return torch.equal(got.isnan(), is_nan) and torch.equal(*numbers)


@pytest.mark.parametrize("name", FORMATS)
def test_every_pair_of_codes_is_what_torch_says(name: str):
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(64, 16, 128)
    scales = torch.rand(64, 16) + 0.5
    expected = codes.view(getattr(torch, name)).to(torch.float32) * scales[..., None]
    assert same_bits(decode(codes, scales, FORMATS[name]), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("start", "row", "width"), [(0, 32, 8), (2, 32, 8), (1, 32, 8), (0, 33, 8), (0, 32, 7), (1, 33, 5)]
)
def test_codes_may_lie_anywhere(name: str, start: int, row: int, width: int):
    table = torch.arange(40 * row, dtype=torch.int32).to(torch.uint8).view(40, row)
    codes = table[:, start : start + 2 * width].unflatten(1, (2, width))
    dense = codes.clone().view(getattr(torch, name)).to(torch.float32)
    assert same_bits(decode(codes, torch.ones(40, 2), FORMATS[name]), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_scale_is_the_largest_magnitude_over_the_largest_code(dtype: torch.dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(11, 6, 9, generator=draw).to(dtype)
    x[0, 0], x[1, 1, 3], x[2, 2, 4], x[3, 3] = -x[0, 0].abs(), -torch.inf, torch.nan, -0.0
    for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([x, x], -1)[..., 5:14]):
        before = given.clone()
        payload, scales = torch.empty(11, 6, 9, dtype=torch.uint8), torch.empty(11, 6)
        encode(given, FORMATS["int8"], payload, scales)
        expected = given.abs().amax(-1).to(torch.float32) / 127
        assert same_bits(scales, expected.clamp_min(torch.finfo(torch.float32).tiny))
        assert torch.equal(given.nan_to_num(7), before.nan_to_num(7))


def test_the_table_is_the_processors_whatever_the_default_device():
    coding._pairs.cache_clear()
    codes, scales = torch.zeros(2, 1, 4, dtype=torch.uint8), torch.ones(2, 1)
    with torch.device("meta"):
        decode(codes, scales, FORMATS["float8_e4m3fn"])
    assert decode(codes, scales, FORMATS["float8_e4m3fn"]).device.type == "cpu"
