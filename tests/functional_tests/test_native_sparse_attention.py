"""Native sparse attention as docs/compressed-attention.md has it, of operations of the library: exact over ranks."""

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.token_blocks import Blocks

LENGTHS = (37, 1, 130, 22)
HEADS, GROUPS, WIDTH, VALUE = 6, 2, 8, 5
BLOCK, TOP, WINDOW = 8, 4, 12


def native_sparse_attention(q, k, v, gates, layout, group):
    """Adds attention to means of blocks, to the blocks that have the largest weights there, and to a window.

    q `[t, heads, d]`, k and v `[t, groups, d]`, gates `[t, 3, heads]`.
    """
    packing, sizes = layout.packing, {"heads": HEADS, "kv_heads": GROUPS, "head_dim": WIDTH, "value_head_dim": VALUE}
    blocks = Blocks(layout, BLOCK)
    keys, values = (blocks.rows(x, group).mean(1) for x in (k, v))
    to_means = cp.plan_attention(
        packing, layout, mask=blocks.mask, kv_packing=blocks.entries.packing, kv_layout=blocks.entries, **sizes
    )
    compressed = cp.attention(q, keys, values, to_means, group)

    # Weights of means, of which every rank has all, choose blocks for all heads of a key head; the own block is first.
    places = layout.shard(torch.arange(packing.total), group.rank)[:, None]
    ends = np.array([last for _, last in packing.spans()])[packing.documents_of(blocks.starts)]
    begins, final, shown = (torch.from_numpy(x) for x in (blocks.starts, ends, blocks.whole))
    seen = (places >= begins + BLOCK - 1) & (places < final) & shown
    own = (places >= begins) & (places < torch.from_numpy(blocks.ends))
    means = cp.gather(keys.detach(), blocks.entries, group).repeat_interleave(HEADS // GROUPS, 1)
    scores = torch.einsum("qhd,bhd->qhb", q.detach(), means).mul_(WIDTH**-0.5).masked_fill_(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num_(0.0).masked_fill_(own[:, None], 1.0)
    weights = weights.unflatten(1, (GROUPS, -1)).sum(2).masked_fill_(~(seen | own)[:, None], -1.0)
    best = weights.sort(dim=-1, descending=True, stable=True)
    chosen = begins[best.indices].masked_fill(best.values < 0, -1)[..., :TOP]
    chosen = torch.nn.functional.pad(chosen, (0, TOP - chosen.shape[-1]), value=-1)
    to_blocks = cp.plan_attention(packing, layout, topk=TOP, block=BLOCK, **sizes)
    selected = cp.sparse_attention(q, k, v, to_blocks, group, chosen=chosen.repeat_interleave(HEADS // GROUPS, 1)).out

    to_window = cp.plan_attention(packing, layout, mask=f"window:{WINDOW - 1},0", **sizes)
    parts = (compressed, selected, cp.attention(q, k, v, to_window, group))
    return sum(gates[:, at, :, None] * part for at, part in enumerate(parts))


def query_by_query(q, k, v, gates):
    """The definition, of one document."""
    out = []
    ratio = HEADS // GROUPS
    for place in range(len(q)):
        parts, count = [], (place + 1) // BLOCK
        keys, values = (x[: count * BLOCK].unflatten(0, (count, BLOCK)).mean(1) if count else x[:0] for x in (k, v))
        own, weights = place // BLOCK, torch.zeros(GROUPS, place // BLOCK + 1, dtype=q.dtype)
        rows = []
        for head in range(HEADS):
            weight = (keys[:, head // ratio] @ q[place, head] * WIDTH**-0.5).softmax(0)
            rows.append(weight @ values[:, head // ratio])
            weights[head // ratio, :count] += weight.detach()[: own + 1]
        parts.append(torch.stack(rows))
        weights[:, own] = ratio
        best = weights.sort(dim=-1, descending=True, stable=True).indices[:, :TOP]
        window = range(max(place - WINDOW + 1, 0), place + 1)
        for seen in (
            [[j for j in range(place + 1) if j // BLOCK in each] for each in best.tolist()],
            [window] * GROUPS,
        ):
            rows = []
            for head in range(HEADS):
                held = list(seen[head // ratio])
                weight = (k[held, head // ratio] @ q[place, head] * WIDTH**-0.5).softmax(0)
                rows.append(weight @ v[held, head // ratio])
            parts.append(torch.stack(rows))
        out.append((torch.stack(parts) * gates[place, :, :, None]).sum(0))
    return torch.stack(out)


@pytest.mark.parametrize(("size", "layout"), [(2, "zigzag"), (3, "balanced"), (5, "contiguous")])
def test_every_document_is_as_alone(size, layout):
    packing = cp.Packing(LENGTHS)
    random = torch.Generator().manual_seed(4)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUE), (3, HEADS), (HEADS, VALUE))
    *inputs, weight = (torch.randn(packing.total, *shape, generator=random, dtype=torch.float64) for shape in shapes)
    alone = [x.clone().requires_grad_() for x in inputs]
    expected = torch.cat([query_by_query(*(x[first:last] for x in alone)) for first, last in packing.spans()])
    (expected * weight).sum().backward()
    assigned = getattr(cp.Layout, layout)(packing, size)

    def main(group):
        own = [assigned.shard(x, group.rank).requires_grad_() for x in inputs]
        out = native_sparse_attention(*own, assigned, group)
        (out * assigned.shard(weight, group.rank)).sum().backward()
        return out.detach(), [x.grad for x in own]

    found = run_ranks(main, size)
    assert (assigned.unshard([out for out, _ in found]) - expected).abs().max() < 1e-12
    for at, x in enumerate(alone):
        gradient = assigned.unshard([gradients[at] for _, gradients in found])
        assert (gradient - x.grad).abs().max() < 1e-12 * max(x.grad.abs().max(), 1)
