"""Layers that are made of the operations, as docs/more-layers.md has them: exact over ranks."""

from types import SimpleNamespace

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
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


def by_megatron(dsa, q, keys, values, index_q, index_k, weights, sparse):
    """Megatron's own scores, attention, loss and gradients of the indexer, of one document; the first of equal scores.

    Returns the output, the loss of all queries and the gradients of the indexer's three tensors.
    """
    rows = torch.arange(len(q))
    bounds = {"varlen_starts": torch.zeros_like(rows), "varlen_ends": rows + 1}
    index = (index_q[:, None], weights[:, None], index_k[:, None])
    scores = dsa._compute_index_scores(*index)
    visible = scores.masked_fill(rows > rows[:, None], -torch.inf)
    best = visible.sort(dim=-1, descending=True, stable=True)
    chosen = best.indices.masked_fill(best.values == -torch.inf, -1)[..., :TOP]
    out = dsa.unfused_dsa_fn(q[:, None], keys[:, None, None], values[:, None, None], chosen, WIDTH**-0.5, **bounds)
    seen = q.detach()[:, None], keys.detach()[:, None, None].expand(-1, -1, HEADS, -1)
    options = {**bounds, "calculate_per_token_loss": True}
    loss = dsa.compute_dsa_indexer_loss(scores, chosen, *seen, WIDTH**-0.5, 1.0, sparse, ONE_RANK, **options)
    gradients = dsa.bwd_fused_indexer_loss_naive(
        *index, *seen, chosen, WIDTH**-0.5, 1.0, sparse, None, torch.tensor(1.0), ONE_RANK, **options
    )
    return out[:, 0], loss, [each[:, 0] for each in gradients]


def latents(total):
    """Draws the tensors; many index scores are zero, and others equal: those of the indexer are small integers."""
    random = torch.Generator().manual_seed(2)
    shapes = [(HEADS, WIDTH), (WIDTH,), (WIDTH,), (INDEX_HEADS, WIDTH), (WIDTH,), (INDEX_HEADS,), (HEADS * WIDTH,)]
    found = [torch.randn((total, *shape), generator=random) for shape in shapes]
    return [x.round() if 3 <= at < 6 else x for at, x in enumerate(found)]


@pytest.mark.parametrize("loss", ["sparse", "dense"])
@pytest.mark.parametrize(("size", "layout"), [(2, "zigzag"), (3, "balanced"), (5, "contiguous")])
def test_sparse_attention_is_megatrons_on_each_document_alone(size, layout, loss):
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    packing = cp.Packing(LENGTHS)
    *inputs, weight = latents(packing.total)
    alone, expected, of_indexer, losses = [x.clone().requires_grad_() for x in inputs[:3]], [], [], []
    for begin, end in packing.spans():
        own = [x[begin:end] for x in (*alone, *inputs[3:])]
        out, divergence, gradients = by_megatron(dsa, *own, loss == "sparse")
        expected.append(out), losses.append(divergence), of_indexer.append(gradients)
    (torch.cat(expected) * weight).sum().backward()
    index_q, index_weights, index_k = (torch.cat(each) for each in zip(*of_indexer, strict=True))
    gradients = [*(x.grad for x in alone), index_q, index_k, index_weights]
    assigned = LAYOUTS[layout](packing, size)
    plan = cp.plan_attention(
        packing, assigned, heads=HEADS, kv_heads=1, head_dim=WIDTH, topk=TOP, indexer=(INDEX_HEADS, WIDTH)
    )

    def main(group):
        own = [assigned.shard(x, group.rank).requires_grad_() for x in inputs]
        q, keys, values, *index = own
        named = dict(zip(("index_q", "index_k", "index_weights"), index, strict=True))
        found = cp.sparse_attention(q, keys[:, None], values[:, None], plan, group, **named, index_loss=loss)
        (found.out.flatten(1) * assigned.shard(weight, group.rank)).sum().add(found.index_loss.sum()).backward()
        return found.out.detach().flatten(1), found.index_loss.detach().sum(), [x.grad for x in own]

    found = run_ranks(main, size)
    assert (assigned.unshard([out for out, _, _ in found]) - torch.cat(expected)).abs().max() < 1e-6
    assert sum(each for _, each, _ in found) == pytest.approx(sum(losses).item(), rel=1e-6)
    for at, gradient in enumerate(gradients):
        own = assigned.unshard([each[at] for _, _, each in found])
        assert (own - gradient).abs().max() < 1e-5 * gradient.abs().max()
