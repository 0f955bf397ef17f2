"""Multi-latent attention that sends latents: torch's attention on each document, with keys and values expanded."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks

LENGTHS = [17, 1, 30, 5]
HEADS, OWN, SHARED, VALUE, RANK = 6, 8, 4, 5, 12
SIZES = {"heads": HEADS, "head_dim": OWN + SHARED, "value_head_dim": VALUE}
SCHEMES = ["p2p", "a2a", "all_gather", "exact", "tiled"]
PRODUCTS = ["a2a+p2p", "a2a+all_gather", "a2a+exact", "a2a+tiled"]


def drawn(packing):
    random = torch.Generator().manual_seed(0)
    shapes = [(packing.total, HEADS, OWN + SHARED), (packing.total, RANK), (packing.total, SHARED)]
    shapes += [(HEADS, OWN + VALUE, RANK), (packing.total, HEADS, VALUE), (HEADS,)]
    q, latent, shared, up, dout, sink = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return {"q": q, "latent": latent, "shared_key": shared, "up": up / 3}, sink, dout


def expanded(inputs, packing, dout):
    """Torch's attention of each path or document, with its gradients."""
    own = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    expanded = torch.einsum("tr,hnr->thn", own["latent"], own["up"])
    k = torch.cat([expanded[..., :OWN], own["shared_key"][:, None].expand(-1, HEADS, -1)], -1)
    outputs = []
    for start, end in packing.spans():
        parts = (x[start:end].transpose(0, 1) for x in (own["q"], k, expanded[..., OWN:]))
        outputs.append(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1))
    out = torch.cat(outputs)
    out.backward(dout)
    return {"out": out.detach(), **{name: x.grad for name, x in own.items()}}


def over_ranks(group, packing, scheme, layout, **options):
    inputs, _, dout = drawn(packing)
    layout = getattr(cp.Layout, layout)(packing, group.size)
    plan = cp.plan_attention(packing, layout, scheme=scheme, latent=(SHARED, RANK), **SIZES, **options)
    own = {
        name: (x.clone() if name == "up" else layout.shard(x, group.rank)).requires_grad_()
        for name, x in inputs.items()
    }
    out = cp.latent_attention(**own, plan=plan, group=group)
    out.backward(layout.shard(dout, group.rank))
    return {"out": out.detach(), **{name: x.grad for name, x in own.items()}}, layout


@pytest.mark.filterwarnings("ignore:.*get no")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_scheme_is_torchs_attention(size, layout):
    packing = cp.Packing(LENGTHS)
    inputs, _, dout = drawn(packing)
    exact = expanded(inputs, packing, dout)
    for scheme in [*SCHEMES, *(PRODUCTS if size == 4 else [])]:
        ranks = run_ranks(over_ranks, size, packing, scheme, layout)
        for name, value in exact.items():
            parts = [rank[0][name] for rank in ranks]
            found = sum(parts) if name == "up" else ranks[0][1].unshard(parts)
            assert (found - value).abs().max() <= 1e-12 * value.abs().max(), (scheme, name)


def test_sinks_windows_batches_and_types_are_those_of_attention():
    packing = cp.Packing(LENGTHS)
    inputs, sink, _ = drawn(packing)
    layout, options = cp.Layout.contiguous(packing, 1), {"mask": "window:7", **SIZES}
    for dtype, limit in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        q, latent, shared, up = (x.to(dtype)[:, None].expand(-1, 2, *x.shape[1:]).contiguous() for x in inputs.values())
        up, own_sink = inputs["up"].to(dtype), sink.to(dtype)
        kv = torch.einsum("tbr,hnr->tbhn", latent, up)
        k = torch.cat([kv[..., :OWN], shared[:, :, None].expand(-1, -1, HEADS, -1)], -1)
        plan = cp.plan_attention(packing, layout, **options)
        expected = cp.attention(q, k, kv[..., OWN:].contiguous(), plan, sink=own_sink)
        plan = cp.plan_attention(packing, layout, latent=(SHARED, RANK), **options)
        found = cp.latent_attention(q, latent, shared, up, plan, sink=own_sink)
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= limit * expected.abs().max()


def test_latents_travel():
    packing = cp.Packing([1000])
    layout = cp.Layout.zigzag(packing, 4)
    sizes = {"heads": 128, "head_dim": 192, "value_head_dim": 128, "scheme": "all_gather"}
    latents = cp.plan_attention(packing, layout, latent=(64, 512), **sizes)
    keys = cp.plan_attention(packing, layout, **sizes)
    for forward in (True, False):
        sent = [max(plan.bytes_sent(2, forward=forward)) for plan in (latents, keys)]
        assert sent[1] / sent[0] == pytest.approx(128 * 320 / 576, rel=0.01)
    assert "a latent and its key are 576 elements" in latents.explain()
    assert latents.describe() != keys.describe()


@pytest.mark.parametrize(
    ("latent", "more", "argument"),
    [
        (5, {}, "latent"), ((4, 0), {}, "latent"), ((12, 8), {}, "latent"), ((4, 8), {"kv_heads": 2}, "kv_heads"),
        ((4.5, 8), {}, "latent"), ("48", {}, "latent"),
    ],
)  # fmt: skip
def test_what_is_no_latent_is_refused(latent, more, argument):
    packing = cp.Packing([3])
    with pytest.raises(ArgumentError, match=argument):
        cp.plan_attention(packing, cp.Layout.contiguous(packing, 1), latent=latent, **SIZES, **more)


def test_plans_of_keys_and_of_latents_are_told_apart():
    packing = cp.Packing([3])
    layout, (inputs, _, _) = cp.Layout.contiguous(packing, 1), drawn(packing)
    keys = cp.plan_attention(packing, layout, **SIZES)
    latents = cp.plan_attention(packing, layout, latent=(SHARED, RANK), **SIZES)
    with pytest.raises(ArgumentError, match="latent="):
        cp.latent_attention(**inputs, plan=keys)
    q = inputs["q"]
    with pytest.raises(ArgumentError, match="latent_attention"):
        cp.attention(q, q, q[..., :VALUE], latents)
    for name, wrong in itertools.product(inputs, (slice(None, -1), None)):
        bad = inputs | {name: inputs[name].float() if wrong is None else inputs[name][..., wrong]}
        with pytest.raises(ArgumentError):
            cp.latent_attention(**bad, plan=latents)
