"""Merging attentions over disjoint keys is the attention over all of them, gradients included."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.testing.poison import poisoned
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


def test_rejects_parts_that_do_not_fit_one_another():
    out, lse = torch.ones(3, 2, 4), torch.ones(3, 2)
    rejects("^parts: got .*at least one pair", cp.merge, [])
    rejects(r"^parts\[0\]: got .*a pair", cp.merge, (out, lse))
    rejects(r"^parts\[1\]: got .*float32 \[3, 2, 4\]", cp.merge, [(out, lse), (out.double(), lse)])
    rejects(r"^parts\[1\]: got .*\[2, 3\].*\[3, 2\]", cp.merge, [(out, lse), (out, lse.T)])
    rejects(r"^parts\[0\]: got .*\[t, heads, d\]", cp.merge, [(out[0], lse[0])])
