"""Multi-latent attention that sends latents: torch's attention on each document, with keys and values expanded."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.memory import peak_bytes
from megatron_cp.planner.predict.price import priced
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from tests.covering import covering
from tests.peak_memory import PeakMemory

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


def planned(packing, size, scheme, layout, mode):
    layout = getattr(cp.Layout, layout)(packing, size)
    return cp.plan_attention(packing, layout, scheme=scheme, latent=(SHARED, RANK), latent_mode=mode, **SIZES)


def over_ranks(group, plan):
    layout = plan.layout
    inputs, _, dout = drawn(layout.packing)
    own = {
        name: (x.clone() if name == "up" else layout.shard(x, group.rank)).requires_grad_()
        for name, x in inputs.items()
    }
    out = cp.latent_attention(**own, plan=plan, group=group)
    out.backward(layout.shard(dout, group.rank))
    return {"out": out.detach(), **{name: x.grad for name, x in own.items()}}


CASES = covering(
    [*SCHEMES, *PRODUCTS], (1, 2, 3, 4), ("contiguous", "zigzag", "balanced"), ("expand", "absorb", "heads", "auto"),
    allowed=lambda scheme, size, *_: size == 4 or scheme in SCHEMES,
)  # fmt: skip


@pytest.fixture(scope="module")
def exact():
    packing = cp.Packing(LENGTHS)
    inputs, _, dout = drawn(packing)
    return expanded(inputs, packing, dout)


@pytest.mark.filterwarnings("ignore:.*get no")
@pytest.mark.parametrize(("scheme", "size", "layout", "mode"), CASES)
def test_every_scheme_is_torchs_attention(scheme, size, layout, mode, exact):
    plan = planned(cp.Packing(LENGTHS), size, scheme, layout, mode)
    ranks = run_ranks(over_ranks, size, plan)
    for name, value in exact.items():
        parts = [rank[name] for rank in ranks]
        found = sum(parts) if name == "up" else plan.layout.unshard(parts)
        assert (found - value).abs().max() <= 1e-12 * value.abs().max(), name


def test_sinks_windows_batches_and_types_are_those_of_attention():
    packing = cp.Packing(LENGTHS)
    inputs, sink, _ = drawn(packing)
    layout, options = cp.Layout.contiguous(packing, 1), {"mask": "window:7", **SIZES}
    for dtype, limit in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        q, latent, shared, up = (x.to(dtype)[:, None].expand(-1, 2, *x.shape[1:]).contiguous() for x in inputs.values())
        up, own_sink = inputs["up"].to(dtype), sink.to(dtype)
        plan = cp.plan_attention(packing, layout, **options)
        given = [x.detach().clone().requires_grad_() for x in (q, latent, shared, up, own_sink)]
        kv = torch.einsum("tbr,hnr->tbhn", given[1], given[3])
        k = torch.cat([kv[..., :OWN], given[2][:, :, None].expand(-1, -1, HEADS, -1)], -1)
        expected = cp.attention(given[0], k, kv[..., OWN:].contiguous(), plan, sink=given[4])
        plan = cp.plan_attention(packing, layout, latent=(SHARED, RANK), **options)
        own = [x.detach().clone().requires_grad_() for x in (q, latent, shared, up, own_sink)]
        found = cp.latent_attention(*own[:4], plan, sink=own[4])
        assert found.dtype == dtype
        for result in (found, expected):
            result.float().square().sum().backward()
        pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(own, given, strict=True))]
        for one, other in pairs:
            assert (one - other).abs().max() <= limit * other.abs().max()


@pytest.mark.parametrize("mode", ["expand", "absorb", "heads"])
def test_pad_rows_hold_anything(mode):
    packing, (inputs, _, dout) = cp.Packing(LENGTHS), drawn(cp.Packing(LENGTHS))
    layout = cp.Layout.contiguous(packing, 1, align=64)
    plan = cp.plan_attention(packing, layout, latent=(SHARED, RANK), latent_mode=mode, scheme="exact", **SIZES)
    own = {n: x.clone() if n == "up" else layout.shard(x, 0, pad_value=torch.nan) for n, x in inputs.items()}
    own = {name: x.requires_grad_() for name, x in own.items()}
    cp.latent_attention(**own, plan=plan).backward(layout.shard(dout, 0, pad_value=torch.nan))
    for name, value in expanded(inputs, packing, dout).items():
        if name != "out":
            found = own[name].grad
            assert not found[packing.total :].any() or name == "up"
            found = found if name == "up" else found[: packing.total]
            assert (found - value).abs().max() <= 1e-12 * value.abs().max(), name


# Rates of a core, so that sizes alone decide: a model whose latents are large or small beside its heads, and how many
# keys a query sees of those that its rank is sent.
PRICED = {
    "expand": ({"heads": 8, "head_dim": 96, "value_head_dim": 64, "latent": (32, 128)}, [4096], "all_gather"),
    "absorb": ({"heads": 8, "head_dim": 96, "value_head_dim": 64, "latent": (32, 128)}, [16] * 256, "all_gather"),
    "heads": ({"heads": 2, "head_dim": 24, "value_head_dim": 16, "latent": (8, 512)}, [1024], "exact"),
}


@pytest.mark.parametrize("mode", PRICED)
def test_auto_takes_the_mode_of_the_lowest_price(mode):
    sizes, lengths, scheme = PRICED[mode]
    packing = cp.Packing(lengths)
    layout, on = cp.Layout.zigzag(packing, 8), machine("cpu")
    plans = {
        each: cp.plan_attention(packing, layout, scheme=scheme, latent_mode=each, hardware="cpu", **sizes)
        for each in (*LATENT_MODES, "auto")
    }
    prices = {each: priced(plan, on).total for each, plan in plans.items()}
    assert min(prices, key=prices.get) == mode
    assert plans["auto"].attend == plans[mode].attend
    assert prices["auto"] == plans["auto"].prices[0].total == prices[mode]
    free = cp.plan_attention(packing, layout, hardware="cpu", **sizes)
    assert priced(free, on).total <= 1.05 * prices[mode] + 0.1  # a scheme that rounds or searches counts as slower
    assert {price.detail.split(", ")[-1] for price in free.prices} == set(LATENT_MODES)


def test_devices_are_not_given_heads_that_their_kernels_refuse():
    packing = cp.Packing([16] * 256)
    for latent, modes in (((64, 512), {"expand", "heads"}), ((32, 64), set(LATENT_MODES))):
        sizes = {"heads": 8, "head_dim": 96, "value_head_dim": 64, "latent": latent}
        plan = cp.plan_attention(packing, cp.Layout.zigzag(packing, 8), scheme="exact", latent_mode="auto", **sizes)
        assert {price.detail.split(", ")[-1] for price in plan.prices} == modes


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


def frozen_on_others(group):
    packing = cp.Packing(LENGTHS)
    inputs, _, _ = drawn(packing)
    layout = cp.Layout.zigzag(packing, 2)
    plan = cp.plan_attention(packing, layout, scheme="p2p", latent=(SHARED, RANK), **SIZES)
    own = {name: x if name == "up" else layout.shard(x, group.rank) for name, x in inputs.items()}
    own["up"] = own["up"].clone().requires_grad_(group.rank == 0)
    cp.latent_attention(**own, plan=plan, group=group)


def test_ranks_agree_on_the_up_projection():
    with pytest.raises(RankError, match="up"):
        run_ranks(frozen_on_others, 2)


class Silent(ReferenceAttention):
    """A kernel that allocates nothing."""

    name = "silent"

    def forward(self, out, lse, *_):
        out.zero_(), lse.zero_()

    def backward(self, dq, dk, dv, *_):
        dq.zero_(), dk.zero_(), dv.zero_()


def peaks(group, scheme, mode):
    packing = cp.Packing([512])
    layout = cp.Layout.zigzag(packing, group.size)
    sizes = {"heads": 8, "head_dim": 96, "value_head_dim": 64, "latent": (32, 128)}
    plan = cp.plan_attention(packing, layout, scheme=scheme, latent_mode=mode, **sizes)
    rows, memory = int(layout.row_counts[group.rank]), PeakMemory()
    shapes = ((rows, 8, 96), (rows, 128), (rows, 32), (8, 128, 128))
    own = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    with memory:
        out = cp.latent_attention(*own, plan, memory.watch(group), kernel=Silent())
        found = [memory.peak]
        memory.restart()
        out.backward(torch.ones_like(out).mul_(1))
    found.append(memory.peak - out.nbytes)
    return found, [peak_bytes(plan, group.rank, 4, forward=forward) for forward in (True, False)]


@pytest.mark.parametrize("scheme", ["a2a", "exact", "p2p"])
@pytest.mark.parametrize("mode", LATENT_MODES)
def test_peaks_are_those_that_are_predicted(mode, scheme):
    for found, predicted in run_ranks(peaks, 2, scheme, mode):
        # Expanded keys, and what merges partial results, are not alive together, and are counted so.
        assert all(0.85 * one <= other <= 1.25 * one for one, other in zip(found, predicted, strict=True))


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
