"""CSA and HCA of DeepSeek-V4 as docs/compressed-attention.md has them, of operations of the library, over ranks."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.stable_topk import first_of_equal
from tests.token_blocks import Blocks
from tests.transformers_cases import wide

LENGTHS = (37, 1, 130, 3, 22)
WINDOW, TOP, INDEX_HEADS = 12, 7, 3


def entries_of(rows, blocks, group):
    """Returns this rank's compressed entries: a row for each block of tokens, of which nobody sees those of short ones.

    An entry is the sum of its block's values, weighed feature by feature by a softmax of gates, then `finish` of it and
    its position. With features of two entries the first half of a token's belongs to the entry of the next block.

    Args:
        rows: has values and gates `[t, d]` or `[t, 2 * d]`, a bias of gates for each place in a block, and `finish`.
    """
    halves = rows.values.shape[-1] // rows.width
    values, gates, bias = (x.chunk(halves, -1) for x in (rows.values, rows.gates, rows.bias))
    values, gates = blocks.rows(torch.cat([values[-1], gates[-1]], -1), group).chunk(2, -1)
    gates = gates + bias[-1]
    if halves == 2:
        both = torch.cat([x.chunk(2, -1)[0] for x in (rows.values, rows.gates)], -1)
        values_before, gates_before = blocks.rows(both, group, before=True).chunk(2, -1)
        gates_before = gates_before + bias[0]
        gates_before = gates_before.masked_fill(blocks.of_rank(blocks.first, group)[:, None, None], -torch.inf)
        values, gates = torch.cat([values_before, values], 1), torch.cat([gates_before, gates], 1)
    return rows.finish((values * gates.softmax(1)).sum(1), blocks.of_rank(blocks.positions, group))


def compressed_attention(q, kv, sink, rows, size, layout, group, index=None):
    """Attends, in one softmax with a sink, to a window and to compressed entries: to all, or as an indexer chooses.

    q `[t, heads, d]`, kv `[t, d]` that is key and value of all heads, `index` with entries, queries and weights.
    """
    packing, blocks = layout.packing, Blocks(layout, size)
    heads, width = q.shape[1:]
    sizes = {"heads": heads, "kv_heads": 1, "head_dim": width, "scheme": "exact"}
    to_window = cp.plan_attention(packing, layout, mask=f"window:{WINDOW - 1},0", **sizes)
    window = cp.attention(q, kv[:, None], kv[:, None], to_window, group, sink=sink, return_lse=True)
    entries = entries_of(rows, blocks, group)
    seen = {"mask": blocks.mask, "kv_packing": blocks.entries.packing, "kv_layout": blocks.entries}
    if index is None:
        to_all = cp.plan_attention(packing, layout, **sizes, **seen)
        others = cp.attention(q, entries[:, None], entries[:, None], to_all, group, return_lse=True)
        return cp.merge([window, others])[0]
    # As latents, beside a shared key of one feature that is zero, entries travel once, and not as keys and as values.
    to_chosen = cp.plan_attention(
        packing, layout, heads=heads, head_dim=width + 1, latent=(1, width), topk=index.top, scheme="exact",
        indexer=tuple(index.queries.shape[1:]), **seen,
    )  # fmt: skip
    found = cp.sparse_attention(
        pad(q, (0, 1)), entries.new_zeros(len(entries), 1), entries, to_chosen, group, softmax_scale=width**-0.5,
        index_q=index.queries, index_k=entries_of(index.rows, blocks, group), index_weights=index.weights,
    )  # fmt: skip
    return cp.merge([window, (found.out, found.lse)])[0]


def of_layer(layer, hidden, positions, layout, group):
    """Computes the attention of transformers' DeepSeek-V4 for this rank's rows `[t, hidden]`, by the recipe."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb as turned

    def phases(places):
        return [x[0] for x in layer.compressor.rotary_emb(hidden, position_ids=places[None], layer_type="compress")]

    def rows(module):
        return SimpleNamespace(
            values=module.kv_proj(hidden), gates=module.gate_proj(hidden), bias=module.position_bias,
            width=module.head_dim,
            finish=lambda entries, places: turned(module.kv_norm(entries)[:, None], *phases(places))[:, 0],
        )  # fmt: skip

    cos, sin = phases(positions)
    compressed, index = layer.compressor, None
    latent = layer.q_a_norm(layer.q_a_proj(hidden))
    q = turned(layer.q_b_norm(layer.q_b_proj(latent).unflatten(-1, (layer.num_heads, -1))), cos, sin)
    kv = turned(layer.kv_norm(layer.kv_proj(hidden))[:, None], cos, sin)[:, 0]
    if hasattr(compressed, "indexer"):
        indexer, scorer = compressed.indexer, compressed.indexer.scorer
        queries = turned(indexer.q_b_proj(latent).unflatten(-1, (indexer.num_heads, -1)), cos, sin)
        weights = scorer.weights_proj(hidden) * scorer.weights_scaling * scorer.softmax_scale
        index = SimpleNamespace(queries=queries, weights=weights, rows=rows(indexer), top=indexer.index_topk)
    out = compressed_attention(q, kv, layer.sinks, rows(compressed), compressed.compress_rate, layout, group, index)
    grouped = turned(out, cos, -sin).reshape(len(out), layer.config.o_groups, -1)
    return layer.o_b_proj(layer.o_a_proj(grouped).flatten(1))


@pytest.mark.parametrize("kind", ["heavily_compressed_attention", "compressed_sparse_attention"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "balanced"), (3, "zigzag"), (5, "contiguous")])
@pytest.mark.few
def test_it_is_the_layer_of_transformers(ranks, layout, kind):
    pytest.importorskip("transformers.models.deepseek_v4")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=24, num_attention_heads=4, head_dim=16, q_lora_rank=12, partial_rotary_factor=0.5, o_groups=2,
        o_lora_rank=6, index_n_heads=INDEX_HEADS, index_head_dim=10, index_topk=TOP, sliding_window=WINDOW,
        num_hidden_layers=1, layer_types=[kind], attn_implementation="eager",
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    )  # fmt: skip
    random, packing = torch.Generator().manual_seed(2), cp.Packing(LENGTHS)
    layer = DeepseekV4Attention(config, 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=random)
    hidden, dout = (torch.randn(packing.total, 24, generator=random, dtype=torch.float64) for _ in range(2))
    alone, stock = hidden.clone().requires_grad_(), copy.deepcopy(layer)
    assigned = getattr(cp.Layout, layout)(packing, ranks)
    with wide(), pytest.MonkeyPatch.context() as patch:
        softmax = torch.Tensor.softmax  # the stock class's is in fp32, whatever the type
        patch.setattr(torch.Tensor, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        patch.setattr(torch.Tensor, "topk", first_of_equal(torch.Tensor.topk))
        outs = []
        for first, last in packing.spans():
            places = torch.arange(last - first)[None]
            mask = (places <= places.mT) & (places > places.mT - WINDOW)
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)[None, None]
            phases = stock.compressor.rotary_emb(hidden, position_ids=places, layer_type="compress")
            outs.append(stock(alone[None, first:last], {"compress": phases}, places, mask)[0][0])
        expected = torch.cat(outs)
        (expected * dout).sum().backward()
        positions = torch.cat([torch.arange(last - first) for first, last in packing.spans()])

    def main(group):
        own = copy.deepcopy(layer)
        rows, places, own_dout = (assigned.shard(x, group.rank) for x in (hidden, positions, dout))
        out = of_layer(own, rows.requires_grad_(), places, assigned, group)
        (out * own_dout).sum().backward()
        return out.detach(), rows.grad, {name: x.grad for name, x in own.named_parameters()}

    with wide():
        outs, gradients, of_parameters = zip(*run_ranks(main, ranks), strict=True)
    assert (assigned.unshard(list(outs)) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert (assigned.unshard(list(gradients)) - alone.grad).abs().max() < 1e-12 * alone.grad.abs().max()
    for name, x in stock.named_parameters():
        if ".indexer." in name:  # its choice has no gradient there
            assert x.grad is None
            assert not any(each[name] is not None and each[name].any() for each in of_parameters)
        else:
            assert (sum(each[name] for each in of_parameters) - x.grad).abs().max() < 1e-12 * x.grad.abs().max(), name
