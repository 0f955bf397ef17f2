"""Tests of the devices whose exchange is done by kernels, and of the work that is left to torch."""

from types import SimpleNamespace

import pytest
import torch

from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing


def fits(tensors: list[torch.Tensor], codec: str = "none") -> bool:
    """Returns True if a kernel copies the tensors of an exchange of one section."""
    sections = Sections((Section("q", 4, 64, partition_heads(4, 4, 2).heads),))
    exchange = Exchange(Layout.zigzag(Packing([5, 9]), 2), sections, (), CODECS[codec])
    return copies._fits(tensors, [], Geometry(exchange, 0, (torch.bfloat16,), None, torch.device("cuda")))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("capability", "refused"), [
    ((8, 0), {"fp8", "fp8_e5m2"}), ((8, 9), set()), ((9, 0), set()), ((10, 0), set()),
])  # fmt: skip
def test_fp8_is_left_to_torch_where_triton_rounds_otherwise(codec, capability, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert fits([torch.ones(7, 256, dtype=torch.bfloat16)], codec) == (codec not in refused)


def test_rows_that_are_not_dense_are_left_to_torch():
    table = torch.ones(7, 512, dtype=torch.bfloat16)
    dense = table[:, :256], table.view(7, 8, 64)[:, :4], table[:, None, :256], table.view(7, 1, 8, 64)[:, :, :4]
    apart = table[:, ::2], table.view(7, 8, 64)[:, ::2], table.view(7, 4, 128)[..., :64], table.t()[:, :7]
    assert all(fits([tensor]) for tensor in dense)
    assert not any(fits([dense[0], tensor]) for tensor in apart)


def test_sums_of_integers_and_codes_of_a_batch_are_left_to_torch():
    at = SimpleNamespace(
        rows_per_token=2, is_coded=True, dtypes=[torch.int64],
        exchange=SimpleNamespace(sections=SimpleNamespace(replicated=True)),
    )  # fmt: skip
    for make in (copies._packs_heads, copies._unpacks_heads, copies._unpacks_tokens):
        assert make([], [], at) is None
