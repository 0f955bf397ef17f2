"""`cu_seqlens_q_padded`: attention of Megatron's padded batches is that of each document without its pads."""

from types import SimpleNamespace

import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_cp.megatron.config import TransformerConfig
from megatron_cp.megatron.layers import attention
from megatron_cp.megatron.layers.attention import CoreAttention
from tests.softmax_oracle import attend

LENGTHS = [18, 26, 0, 8, 43, 1, 22]
ROWS = [20, 28, 4, 8, 44, 8, 28]
HEADS, GROUPS, SIZE = 4, 2, 8
MASKS = {
    "full": (AttnMaskType.no_mask, None),
    "window": (AttnMaskType.no_mask, (5, 3)),
    "ahead": (AttnMaskType.no_mask, (0, -1)),
    "causal": (AttnMaskType.causal, None),
    "causal window": (AttnMaskType.padding_causal, (4, 0)),
}
PLACES = [(1, None), (2, "a2a"), (2, "p2p"), (2, "all_gather"), (2, "exact")]


def inputs():
    generator = torch.Generator().manual_seed(3)
    # Pads as large as anything, so that one look at them shows.
    return [
        torch.randn(sum(ROWS), heads, SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


def each_document_alone(mask_type, window):
    """The output and the gradients of q, k and v, by dense attention over the tokens alone; zeros in pad rows."""
    *qkv, gradient = inputs()
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    out = torch.zeros_like(q)
    for start, length in zip(Packing(ROWS).cu_seqlens.tolist(), LENGTHS, strict=False):
        own = slice(start, start + length)
        ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        left, right = window or (-1, -1)
        right = 0 if mask_type != AttnMaskType.no_mask else right
        hidden = ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
        found, _ = attend(q[own], k[own], v[own], ~hidden, scale=SIZE**-0.5)
        out = out.index_copy(0, torch.arange(start, start + length), found)
    out.backward(gradient)
    return [out.detach(), q.grad, k.grad, v.grad]


def through_megatrons_fields(group, mask_type, window, scheme):
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, window_size=window, context_parallel_size=group.size, calculate_per_token_loss=True,
        cp_packed_order="document",
    )  # fmt: skip
    groups = SimpleNamespace(cp=group, tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    layer = CoreAttention(config, 1, mask_type, "self", scheme, pg_collection=groups)
    tokens, padded = (torch.tensor(Packing(n).cu_seqlens, dtype=torch.int32) for n in (LENGTHS, ROWS))
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=tokens, cu_seqlens_kv=tokens.clone(), cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded.clone(), max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS),
    )  # fmt: skip
    layout = Layout.zigzag(Packing(ROWS), group.size)
    *qkv, gradient = (layout.shard(tensor, group.rank) for tensor in inputs())
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    out = layer(q, k, v, None, packed_seq_params=params)
    out.backward(gradient.flatten(1))
    return [out.detach().view_as(q), q.grad, k.grad, v.grad]


@pytest.mark.parametrize(("size", "scheme"), PLACES)
@pytest.mark.parametrize("mask", MASKS)
def test_pads_are_seen_by_nobody_and_given_zeros(mask, size, scheme, monkeypatch):
    monkeypatch.setattr(attention, "cp_ranks", lambda group: group)
    shares = run_ranks(through_megatrons_fields, size, *MASKS[mask], scheme)
    layout, packing = Layout.zigzag(Packing(ROWS), size), Packing(ROWS)
    pads = torch.tensor(packing.positions()) >= torch.tensor(LENGTHS).repeat_interleave(torch.tensor(ROWS))
    for index, expected in enumerate(each_document_alone(*MASKS[mask])):
        name, found = ["out", "q", "k", "v"][index], layout.unshard([share[index] for share in shares])
        assert not found[pads].any(), name
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
