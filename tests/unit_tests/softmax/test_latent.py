"""Multi-latent attention that sends latents."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.memory import peak_bytes
from megatron_cp.planner.predict.price import priced
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from tests.peak_memory import PeakMemory
from tests.refusals import rejects

LENGTHS = (17, 1, 30, 5)
HEADS, OWN, SHARED, VALUE, RANK = 6, 8, 4, 5, 12
SIZES = {"heads": HEADS, "head_dim": OWN + SHARED, "value_head_dim": VALUE}


def drawn(dtype=torch.float64):
    """Returns queries, latents, shared keys, the up-projection and a sink."""
    random, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = [(total, HEADS, OWN + SHARED), (total, RANK), (total, SHARED), (HEADS, OWN + VALUE, RANK), (HEADS,)]
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def test_bfloat16_is_as_near_as_attention_to_expanded_keys():
    packing = cp.Packing(LENGTHS)
    layout = cp.Layout.contiguous(packing, 1)
    plans = [cp.plan_attention(packing, layout, latent=latent, **SIZES) for latent in (None, (SHARED, RANK))]
    given, own = ([x.requires_grad_() for x in drawn(torch.bfloat16)] for _ in range(2))
    q, latent, shared, up, sink = given
    kv = torch.einsum("tr,hnr->thn", latent, up / 3)
    k = torch.cat([kv[..., :OWN], shared[:, None].expand(-1, HEADS, -1)], -1)
    expected = cp.attention(q, k, kv[..., OWN:].contiguous(), plans[0], sink=sink)
    q, latent, shared, up, sink = own
    found = cp.latent_attention(q, latent, shared, up / 3, plans[1], sink=sink)
    assert found.dtype == torch.bfloat16
    for result in (found, expected):
        result.float().square().sum().backward()
    for one, other in [(found, expected), *((x.grad, y.grad) for x, y in zip(own, given, strict=True))]:
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


def test_rejects_key_heads_that_share_latents():
    layout = cp.Layout.contiguous(cp.Packing([3]), 1)
    rejects("^kv_heads: got 2; .*None with latent", cp.plan_attention, layout.packing, layout, latent=(4, 8),
            **SIZES, kv_heads=2)  # fmt: skip


def frozen_on_others(group):
    layout = cp.Layout.zigzag(cp.Packing(LENGTHS), 2)
    plan = cp.plan_attention(layout.packing, layout, scheme="p2p", latent=(SHARED, RANK), **SIZES)
    *rows, up, _ = drawn()
    own = [layout.shard(x, group.rank) for x in rows]
    cp.latent_attention(*own, up.requires_grad_(group.rank == 0), plan, group)


def test_ranks_agree_on_the_up_projection():
    with pytest.raises(RankError, match="up"):
        run_ranks(frozen_on_others, 2)


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
