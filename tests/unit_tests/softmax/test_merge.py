"""Merging attentions over disjoint keys is the attention over all of them, gradients included."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.poison import poisoned
from tests.limits import limit
from tests.refusals import rejects

DTYPE = torch.float64


def by_weights(parts):
    """Merges with torch's own softmax over the parts, for queries that see a key."""
    outs = torch.stack([torch.where(lse[..., None] > -torch.inf, out, 0) for out, lse in parts])
    lses = torch.stack([lse.clamp(min=-1e4) for _, lse in parts])  # without weight either, and without NaN in gradients
    return (lses.softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)


@pytest.mark.parametrize("lead", [(6,), (6, 2)], ids=["thd", "sbhd"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_merged_parts_are_weighted_by_their_sums_and_so_are_their_gradients(count, lead):
    random = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*lead, *shape, generator=random, dtype=DTYPE)

    parts = [(drawn(3, 4), 5 * drawn(3)) for _ in range(count)]
    for number, (out, lse) in enumerate(parts):
        for query in (1 + number, 5):  # one that does not see this part, and one that sees none
            out[query], lse[query] = torch.nan, -torch.inf
    given = [drawn(3, 4), drawn(3)]
    nothing = torch.stack([lse for _, lse in parts]).amax(0) == -torch.inf
    given[1][nothing] = torch.nan  # as a loss of nothing may give
    found = []
    for merged in (cp.merge, by_weights):
        leaves = [(out.clone().requires_grad_(), lse.clone().requires_grad_()) for out, lse in parts]
        with poisoned():
            results = merged(leaves)
            if merged is by_weights:
                given[0][nothing] = given[1][nothing] = 0
            torch.autograd.backward(results, [x.clone() for x in given])
        found.append([*results, *(x.grad for pair in leaves for x in pair)])
    (out, lse, *gradients), (expected, expected_lse, *right) = found
    assert not out[nothing].any()
    assert torch.equal(lse == -torch.inf, nothing)
    for ours, theirs in ((out, expected), (lse[~nothing], expected_lse[~nothing]), *zip(gradients, right, strict=True)):
        assert torch.allclose(ours, theirs.masked_fill(theirs.abs() > 9e3, 0), rtol=0, atol=1e-13)
    for (_, lse), of_out, of_lse in zip(parts, gradients[::2], gradients[1::2], strict=True):
        assert not of_out[lse == -torch.inf].any()
        assert not of_lse[lse == -torch.inf].any()


def test_short_types_are_merged_in_fp32_and_rounded_once():
    random = torch.Generator().manual_seed(0)
    parts = [(torch.randn(50, 2, 8, generator=random).bfloat16(), torch.randn(50, 2, generator=random)) for _ in "1234"]
    out, lse = cp.merge(parts)
    exact, exact_lse = cp.merge([(x.double(), y.double()) for x, y in parts])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, exact.float().bfloat16())
    assert (lse - exact_lse).abs().max() < 1e-6


LENGTHS = (7, 1, 12, 5)


def old_keys(packing):
    """The first three keys of each document, for the queries after them."""
    return cp.Mask.from_slices(packing, [(min(a + 3, b), b, a, min(a + 3, b), "full") for a, b in packing.spans()])


def new_keys(packing):
    """All keys up to the query's own but the first three."""
    spans = [(a, min(a + 3, b), b) for a, b in packing.spans()]
    return cp.Mask.from_slices(packing, [each for a, c, b in spans for each in (
        (a, c, a, c, "causal"), (c, b, c, b, "causal"))])  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "cp_size"), [("a2a", 2), ("p2p", 3), ("all_gather", 1), ("exact", 5), ("a2a+p2p", 4)]
)
def test_attention_in_two_parts_is_attention_at_once(scheme, cp_size):
    """The sink takes part in one of the two, as each key does."""
    packing, random = cp.Packing(LENGTHS), torch.Generator().manual_seed(0)
    layout = cp.Layout.zigzag(packing, cp_size)
    whole = [torch.randn(packing.total, heads, 8, generator=random, dtype=DTYPE) for heads in (4, 2, 2, 4)]
    sink, dlse = torch.randn(4, generator=random, dtype=DTYPE), torch.randn(packing.total, 4, generator=random)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "scheme": scheme}
    plans = [cp.plan_attention(packing, layout, mask=mask, **sizes) for mask in (old_keys, new_keys, cp.Mask.causal)]

    def rank(group):
        *inputs, dout = (layout.shard(x, group.rank) for x in whole)
        results = []
        for in_parts in (True, False):
            q, k, v, own_sink = (x.clone().requires_grad_() for x in (*inputs, sink))
            if in_parts:
                sinks = (None, own_sink)
                out, lse = cp.merge([
                    cp.attention(q, k, v, plan, group, sink=one, return_lse=True)
                    for plan, one in zip(plans[:2], sinks, strict=True)
                ])  # fmt: skip
            else:
                out, lse = cp.attention(q, k, v, plans[2], group, sink=own_sink, return_lse=True)
            torch.autograd.backward([out, lse], [dout, layout.shard(dlse, group.rank).double()])
            results.append([out, lse, *(x.grad for x in (q, k, v, own_sink))])
        return results

    for in_parts, at_once in run_ranks(rank, cp_size, timeout=limit(60)):
        for ours, right in zip(in_parts, at_once, strict=True):
            same = ours == right  # -inf in pad rows
            assert torch.allclose(ours.masked_fill(same, 0), right.masked_fill(same, 0), rtol=0, atol=1e-12)


def test_rejects_parts_that_do_not_fit_one_another():
    out, lse = torch.ones(3, 2, 4), torch.ones(3, 2)
    rejects("^parts: got .*at least one pair", cp.merge, [])
    rejects(r"^parts\[0\]: got .*a pair", cp.merge, (out, lse))
    rejects(r"^parts\[1\]: got .*float32 \[3, 2, 4\]", cp.merge, [(out, lse), (out.double(), lse)])
    rejects(r"^parts\[1\]: got .*\[2, 3\].*\[3, 2\]", cp.merge, [(out, lse), (out, lse.T)])
    rejects(r"^parts\[0\]: got .*\[t, heads, d\]", cp.merge, [(out[0], lse[0])])
