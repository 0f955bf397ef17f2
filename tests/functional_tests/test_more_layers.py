"""Layers that are made of the operations, as docs/more-layers.md has them: exact over ranks."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks

LENGTHS = (37, 1, 130, 22)
LAYOUTS = {"contiguous": cp.Layout.contiguous, "zigzag": cp.Layout.zigzag, "balanced": cp.Layout.balanced}


def steps_of(layout, steps):
    """The layout of a stream in which each token stands `steps` times, one after another."""
    packing = cp.Packing(layout.packing.lengths * steps)
    ranks = [
        [(start * steps, end * steps) for start, end in layout.fragments_of(rank)] for rank in range(layout.cp_size)
    ]
    return cp.Layout.from_fragments(packing, ranks)


def gated_delta_product(q, k, v, g, beta, plan, group, steps):
    """A token's product of `steps` reflections, as that many tokens of the gated delta rule: the first one decays.

    q `[t, heads, key]`, g `[t, heads]`; k `[t * steps, heads, key]`, v `[t * steps, heads, value]`, beta likewise.
    """
    decays = torch.zeros_like(beta)
    decays[::steps] = g
    out = cp.gated_delta_rule(q.repeat_interleave(steps, 0), k, v, decays, beta, plan, group)
    return out[steps - 1 :: steps]  # a token is read after its last step


def token_by_token(q, k, v, g, beta, steps):
    """The definition, document by document."""
    out = []
    for tokens in torch.arange(len(q)).split(LENGTHS):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for token in tokens.tolist():
            state = state * g[token].exp()[:, None, None]
            for step in range(token * steps, (token + 1) * steps):
                missing = v[step] - torch.einsum("hkv,hk->hv", state, k[step])
                state = state + beta[step][:, None, None] * torch.einsum("hk,hv->hkv", k[step], missing)
            out.append(torch.einsum("hkv,hk->hv", state, q[token]) * q.shape[2] ** -0.5)
    return torch.stack(out)


def drawn(steps):
    total, heads, key, value = sum(LENGTHS), 6, 8, 5
    random = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(total * steps, heads, key), dim=-1)
    return [
        normal(total, heads, key), k, normal(total * steps, heads, value), -normal(total, heads).exp() / 8,
        normal(total * steps, heads).sigmoid(), normal(total, heads, value),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "layout", "mode"),
    [(2, "zigzag", "chunkwise"), (3, "balanced", "headwise"), (5, "contiguous", "chunkwise")],
)
@pytest.mark.parametrize("steps", [2, 3])
def test_gated_delta_product_is_a_delta_rule_over_steps(size, layout, mode, steps):
    *inputs, weight = drawn(steps)
    alone = [x.clone().requires_grad_() for x in inputs]
    expected = token_by_token(*alone, steps)
    (expected * weight).sum().backward()
    of_tokens = LAYOUTS[layout](cp.Packing(LENGTHS), size)
    of_steps = steps_of(of_tokens, steps)
    plan = cp.plan_linear(
        of_steps.packing, of_steps, "gdn", heads=6, key_heads=6, head_dim=8, value_head_dim=5, mode=mode
    )
    layouts = (of_tokens, of_steps, of_steps, of_tokens, of_steps)

    def main(group):
        own = [layout.shard(x, group.rank).requires_grad_() for layout, x in zip(layouts, inputs, strict=True)]
        out = gated_delta_product(*own, plan, group, steps)
        (out * of_tokens.shard(weight, group.rank)).sum().backward()
        return out.detach(), [x.grad for x in own]

    found = run_ranks(main, size)
    assert (of_tokens.unshard([out for out, _ in found]) - expected).abs().max() < 1e-12
    for at, (layout, x) in enumerate(zip(layouts, alone, strict=True)):
        gradient = layout.unshard([gradients[at] for _, gradients in found])
        assert (gradient - x.grad).abs().max() < 1e-12 * max(x.grad.abs().max(), 1)


HEADS, TOP, INDEX_HEADS, WIDTH = 4, 16, 3, 8


def chosen_and_attended(dsa, q, keys, values, index_q, index_k, weights, starts, ends):
    """Megatron's own functions: the top keys of each query among `starts` to `ends`, and attention to them.

    Scores without relu: with it many are 0, and which of equal scores torch chooses depends on how many keys there are.
    """
    bounds, index = (
        {"varlen_starts": starts, "varlen_ends": ends},
        (index_q[:, None], index_k[:, None], weights[:, None]),
    )
    _, chosen = dsa.fused_qk_topk_naive(*index, TOP, use_relu=False, **bounds)
    out = dsa.unfused_dsa_fn(q[:, None], keys[:, None, None], values[:, None, None], chosen, WIDTH**-0.5, **bounds)
    return out[:, 0]


def latents(total):
    random = torch.Generator().manual_seed(2)
    shapes = [(HEADS, WIDTH), (WIDTH,), (WIDTH,), (INDEX_HEADS, WIDTH), (WIDTH,), (INDEX_HEADS,), (HEADS * WIDTH,)]
    return [torch.randn((total, *shape), generator=random) for shape in shapes]


@pytest.mark.parametrize(("size", "layout"), [(2, "zigzag"), (3, "balanced"), (5, "contiguous")])
def test_sparse_attention_over_gathered_latents(size, layout):
    """The indexer and its top-k of a rank's own queries, over gathered keys: Megatron's own on each document alone."""
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    packing = cp.Packing(LENGTHS)
    *inputs, weight = latents(packing.total)
    alone, expected = [x.clone().requires_grad_() for x in inputs], []
    for begin, end in packing.spans():
        rows = torch.arange(end - begin)
        own = [x[begin:end] for x in alone]
        expected.append(chosen_and_attended(dsa, *own, torch.zeros_like(rows), rows + 1))
    (torch.cat(expected) * weight).sum().backward()
    assigned = LAYOUTS[layout](packing, size)

    def main(group):
        q, keys, values, index_q, index_k, weights = own = [
            assigned.shard(x, group.rank).requires_grad_() for x in inputs
        ]
        ends = torch.from_numpy(assigned.tokens(group.rank)) + 1
        starts = ends - 1 - torch.from_numpy(assigned.positions(group.rank))
        keys, values = (cp.gather(x, assigned, group) for x in (keys, values))
        index_k = cp.gather(index_k.detach(), assigned, group)  # what is chosen has no gradient
        out = chosen_and_attended(dsa, q, keys, values, index_q, index_k, weights, starts, ends)
        (out * assigned.shard(weight, group.rank)).sum().backward()
        return out.detach(), [x.grad for x in own[:3]]

    found = run_ranks(main, size)
    assert (assigned.unshard([out for out, _ in found]) - torch.cat(expected)).abs().max() < 1e-6
    for at, x in enumerate(alone[:3]):
        gradient = assigned.unshard([gradients[at] for _, gradients in found])
        assert (gradient - x.grad).abs().max() < 1e-5 * x.grad.abs().max()
