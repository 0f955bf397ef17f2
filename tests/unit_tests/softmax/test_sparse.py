"""Sparse attention over ranks is each document alone, by the definition: scores of all keys, and a stable sort."""

from functools import partial

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.layout.tiles import Tiles
from megatron_cp.softmax.choices import ROWS, first_of_largest
from megatron_cp.softmax.selection import _cut
from tests.peak_memory import PeakMemory
from tests.softmax_oracle import attend, divergence, index_scores, largest, scores_of

LENGTHS = [37, 1, 130, 22]
HEADS, TOP = 4, 9
INDEXER = (3, 5)
SIZES = {"heads": HEADS, "kv_heads": 2, "head_dim": 6, "value_head_dim": 7}
SHARED, RANK, OWN = 2, 8, 4
LATENT = {"heads": HEADS, "head_dim": OWN + SHARED, "value_head_dim": 7, "latent": (SHARED, RANK)}
TOKENS, GLOBAL = ("q", "k", "v", "index_q", "index_k", "index_weights"), ("up",)


def drawn(total, sizes, dtype=torch.float64):
    """Draws a layer's tensors. Those of the indexer are small integers: many scores are equal, and exactly so."""
    random = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    def integers(*shape):
        return torch.randint(-1, 2, shape, generator=random).to(dtype)

    if "latent" in sizes:
        found = {"q": normal(total, HEADS, OWN + SHARED), "k": normal(total, SHARED), "v": normal(total, RANK)}
        found["up"] = normal(HEADS, OWN + 7, RANK) / 3
    else:
        found = {"q": normal(total, HEADS, 6), "k": normal(total, 2, 6), "v": normal(total, 2, 7)}
    index = {"index_q": integers(total, *INDEXER), "index_k": integers(total, 5), "index_weights": integers(total, 3)}
    return found | index, normal(total, HEADS, 7), normal(total), normal(total, HEADS)


def keys_and_values(inputs):
    """Returns keys and values `[t, heads, features]`."""
    if "up" in inputs:
        expanded = torch.einsum("tr,hnr->thn", inputs["v"], inputs["up"])
        shared = inputs["k"][:, None].expand(-1, HEADS, -1)
        return torch.cat([expanded[..., :OWN], shared], -1), expanded[..., OWN:]
    return inputs["k"].repeat_interleave(2, 1), inputs["v"].repeat_interleave(2, 1)


def one_document(inputs, first, last, relu=True, window=None, top=TOP):
    """Returns the output, the choice, both divergences and the log-sum-exp of one document."""
    own = {name: x if name == "up" else x[first:last] for name, x in inputs.items()}
    (keys, values), size = keys_and_values(own), last - first
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    if window is not None:
        visible &= ~torch.ones_like(visible).tril(-window - 1)
    index = index_scores(own["index_q"], own["index_k"], own["index_weights"], relu).masked_fill(~visible, -torch.inf)
    chosen, scale = largest(index, top) & visible, own["q"].shape[-1] ** -0.5
    out, lse = attend(own["q"], keys, values, chosen, scale=scale)
    losses = [divergence(scores_of(own["q"], keys, scale), index, among) for among in (chosen, visible)]
    places = torch.full((size, top), -1)
    for row, found in enumerate(chosen):
        kept = found.nonzero().flatten() + first
        places[row, : len(kept)] = kept
    return out, places, losses, lse.T


def alone(sizes, loss=None, **options):
    packing = cp.Packing(LENGTHS)
    inputs, dout, dloss, dlse = drawn(packing.total, sizes)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    documents = (one_document(inputs, *span, **options) for span in packing.spans())
    outputs, places, losses, lses = zip(*documents, strict=True)
    total = (torch.cat(outputs) * dout).sum() + (torch.cat(lses) * dlse).sum()
    divergence = torch.cat([each[loss == "dense"] for each in losses])
    if loss:
        total = total + (divergence * dloss).sum()
    total.backward()
    found = {"out": torch.cat(outputs).detach(), "chosen": torch.cat(places), "loss": divergence.detach()}
    found["lse"] = torch.cat(lses).detach()
    return found | {f"d_{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}


def over_ranks(group, sizes, layout, loss=None, dtype=torch.float64, scheme="exact", chosen=None, **options):
    packing = cp.Packing(LENGTHS)
    layout = getattr(cp.Layout, layout)(packing, group.size) if isinstance(layout, str) else layout
    mask = {"mask": f"window:{options.pop('window')},0"} if "window" in options else {}
    indexer = {} if chosen is not None else {"indexer": INDEXER}
    plan = cp.plan_attention(packing, layout, scheme=scheme, topk=options.pop("top", TOP), **sizes, **mask, **indexer)
    inputs, *gradients = drawn(packing.total, sizes, dtype)
    if chosen is not None:
        inputs = {name: x for name, x in inputs.items() if "index" not in name}
    own = {
        name: x.clone() if name == "up" else layout.shard(x, group.rank, pad_value=torch.nan)
        for name, x in inputs.items()
    }
    own = {name: x.requires_grad_() for name, x in own.items()}
    more = {} if chosen is None else {"chosen": layout.shard(chosen, group.rank)}
    if "relu" in options:
        more["index_relu"] = options["relu"]
    found = cp.sparse_attention(**own, plan=plan, group=group, index_loss=loss, **more)
    dout, dloss, dlse = (layout.shard(x, group.rank, pad_value=torch.nan) for x in gradients)
    made = {found.out: dout, found.lse: dlse.to(found.lse.dtype)} | ({found.index_loss: dloss} if loss else {})
    torch.autograd.backward(list(made), list(made.values()))
    results = {"out": found.out.detach(), "chosen": found.chosen, "lse": found.lse.detach()}
    assert (results["lse"][int(layout.token_counts[group.rank]) :] == -torch.inf).all()
    if loss:
        results["loss"] = found.index_loss.detach()
    gradients = {f"d_{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in own.items()}
    return results | gradients, layout


def check(size, sizes, layout, limit=1e-12, loss=None, exact=None, **options):
    both = {name: value for name, value in options.items() if name in ("relu", "window", "top")}
    exact = exact or alone(sizes, loss, **both)
    ranks = run_ranks(partial(over_ranks, sizes=sizes, layout=layout, loss=loss, **options), size)
    for name in ranks[0][0]:
        parts = [rank[0][name] for rank in ranks]
        found = sum(parts) if name == "d_up" else ranks[0][1].unshard(parts)
        if name == "chosen":
            assert (found == exact[name]).all()
        else:
            assert (found - exact[name]).abs().max() <= limit * exact[name].abs().max().clamp_min(1), name


@pytest.mark.parametrize("sizes", [SIZES, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize(
    ("size", "layout", "scheme"),
    [(1, "contiguous", "auto"), (2, "zigzag", "exact"), (3, "balanced", "all_gather"), (5, "contiguous", "exact")],
)
def test_every_document_is_as_alone(size, layout, scheme, sizes):
    for loss in ("sparse", "dense"):
        check(size, sizes, layout, loss=loss, scheme=scheme)


def test_scores_without_relu_and_windows():
    check(3, SIZES, "zigzag", relu=False)
    check(2, LATENT, "balanced", window=20, loss="dense")


@pytest.mark.parametrize("top", [1, 500])
def test_queries_choose_one_key_or_all_that_there_are(top):
    check(3, LATENT, "zigzag", top=top, loss="sparse")


def test_rows_in_any_order_and_ranks_without_rows():
    packing = cp.Packing(LENGTHS)
    total = packing.total
    backwards = cp.Layout.from_fragments(packing, [[(100, total), (0, 100)]])
    check(1, SIZES, backwards, loss="sparse")
    padded = cp.Layout.zigzag(packing, 3, align=8)
    assert padded.pad_rows.any()
    check(3, LATENT, padded, loss="dense")
    holes = cp.Layout.from_fragments(packing, [[(50, 60), (0, 30)], [], [(60, total), (30, 50)]])
    check(3, LATENT, holes, loss="sparse")


def test_choices_of_the_caller():
    """A layer's own choice, given again in any order, also with places that the mask hides, repeated ones, and -1."""
    exact = {name: value for name, value in alone(SIZES).items() if "index" not in name}
    chosen = exact["chosen"]
    later = torch.arange(len(chosen))[:, None] + torch.tensor([1, 400])
    given = torch.cat([chosen, chosen[:, :2], later], 1)
    given = given[:, torch.randperm(given.shape[1], generator=torch.Generator().manual_seed(0))]
    main = partial(over_ranks, sizes=SIZES, layout="zigzag", chosen=given, top=given.shape[1])
    ranks = run_ranks(main, 3)
    for name in exact.keys() - {"chosen", "loss"}:
        found = ranks[0][1].unshard([rank[0][name] for rank in ranks])
        assert (found - exact[name]).abs().max() <= 1e-12, name
    found = ranks[0][1].unshard([rank[0]["chosen"] for rank in ranks]).sort(-1).values
    assert (found[:, -TOP:] == chosen.sort(-1).values).all()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_narrow_types_choose_as_float64_does(dtype, limit):
    """The indexer's tensors are small integers, so that its scores are exact in every type."""
    check(2, LATENT, "zigzag", dtype=dtype, limit=limit, loss="sparse")


@pytest.mark.any_cpu
@pytest.mark.parametrize("distinct", [1, 6])
@pytest.mark.parametrize("mask", ["causal", "window:200,0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.few(together=2)
def test_every_layout_chooses_alike_to_the_bit(dtype, mask, distinct):
    """Scores of random numbers, many of which differ in the last bits only: keys are equal but for their place."""
    packing = cp.Packing([300, 7, 90])
    random = torch.Generator().manual_seed(5)
    few = torch.randn(distinct, 128, generator=random, dtype=dtype)
    keys = few[torch.randint(distinct, (packing.total,), generator=random)]
    shapes = ((8, 128), (8,), (2, 4))
    queries, weights, q = (torch.randn(packing.total, *shape, generator=random, dtype=dtype) for shape in shapes)

    def main(group, layout):
        plan = cp.plan_attention(packing, layout, heads=2, head_dim=4, topk=20, indexer=(8, 128), mask=mask)
        rows = (layout.shard(x, group.rank) for x in (q, queries, keys, weights))
        q_own, *index = rows
        names = ("index_q", "index_k", "index_weights")
        return cp.sparse_attention(q_own, q_own, q_own, plan, group, **dict(zip(names, index, strict=True))).chosen

    expected = run_ranks(main, 1, cp.Layout.contiguous(packing, 1))[0]
    if distinct == 1:
        first = 299 - 200 if mask != "causal" else 0
        # relu leaves zeros where all weighted products are negative, so all scores of a query are equal
        assert expected[299].sort().values.tolist() == [*range(first, first + 20)]
    for size, kind in ((2, "zigzag"), (3, "balanced"), (5, "contiguous"), (7, "striped")):
        layout = getattr(cp.Layout, kind)(packing, size)
        assert torch.equal(layout.unshard(run_ranks(main, size, layout)), expected)


def test_short_documents_take_no_memory_for_keys_that_they_lack():
    packing = cp.Packing([16] * 4)
    layout = cp.Layout.contiguous(packing, 1)
    peaks = []
    for topk in (16, 4096):
        inputs, *_ = drawn(packing.total, SIZES)
        plan = cp.plan_attention(packing, layout, topk=topk, indexer=INDEXER, **SIZES)
        out = cp.sparse_attention(**{name: x.requires_grad_() for name, x in inputs.items()}, plan=plan).out
        with PeakMemory() as memory:
            out.backward(torch.ones_like(out))
        peaks.append(memory.peak)
    assert peaks[1] < 2 * peaks[0] + 4 * 64 * 4096 * 8  # the choice itself, sorted


def test_queries_without_keys_have_no_weight():
    """Their log-sum-exp is -inf, and whatever gradient it is given is left out."""
    packing = cp.Packing([5, 2])
    plan = cp.plan_attention(packing, cp.Layout.contiguous(packing, 1), topk=3, **SIZES)
    inputs = {name: x.requires_grad_() for name, x in drawn(packing.total, SIZES)[0].items() if "index" not in name}
    found = cp.sparse_attention(**inputs, plan=plan, chosen=torch.tensor([[0, 1, -1]] * 3 + [[-1] * 3] * 4))
    assert found.lse.isfinite().all(1).tolist() == [True] * 3 + [False] * 4
    assert (found.lse[3:] == -torch.inf).all()
    found.lse.backward(torch.cat([torch.ones(3, HEADS), torch.full((4, HEADS), torch.nan)]).double())
    assert inputs["q"].grad[:3].abs().min() > 0
    assert not any(x.any() for x in (inputs["q"].grad[3:], inputs["k"].grad[2:], inputs["v"].grad))


def test_queries_that_see_a_few_keys_more_are_computed_together():
    """Keys that stand for four tokens each: a band for every four queries, and 64 queries in a block of them."""
    packing, keys = cp.Packing([400, 3, 600]), cp.Packing([100, 1, 150])
    firsts = ((0, 400, 0), (403, 1003, 101))
    slices = [(at, at + 4, key, key + 1 + (at - q) // 4, "full") for q, end, key in firsts for at in range(q, end, 4)]
    bands = cp.Mask.from_slices(packing, slices, keys).bands
    blocks = _cut(Tiles(bands, np.arange(packing.total), np.arange(keys.total)), packing, of_one_path=False)
    rows = [[int(block[:, 0].min()), int(block[:, 1].max())] for block in blocks]
    assert len(bands) > 200
    assert rows == [[at, min(at + ROWS, end)] for q, end, _ in firsts for at in range(q, end, ROWS)]
    assert sorted(map(tuple, np.concatenate(blocks))) == sorted(map(tuple, bands))


def test_equal_scores_go_to_the_first():
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0], [-torch.inf, 3.0, 3.0, 3.0, -torch.inf]])
    columns, valid = first_of_largest(scores, scores > -torch.inf, 4)
    assert columns.tolist() == [[0, 1, 2, 4], [1, 2, 3, 0]]
    assert valid.tolist() == [[True] * 4, [True, True, True, False]]


def test_what_a_rank_sends():
    """The rows that queries see, once: index keys beside latents; an indexer that is not there sends nothing."""
    packing = cp.Packing([1000])
    layout = cp.Layout.contiguous(packing, 4)
    sizes = {"heads": 128, "head_dim": 192, "value_head_dim": 128, "latent": (64, 512)}
    plans = [cp.plan_attention(packing, layout, topk=64, scheme="exact", indexer=x, **sizes) for x in ((64, 128), None)]
    assert [max(plan.bytes_sent(2, forward=True)) for plan in plans] == [250 * 3 * 704 * 2, 250 * 3 * 576 * 2]
    assert "64 keys a query" in plans[0].explain()
    assert plans[0].fingerprint() != plans[1].fingerprint()
    auto = cp.plan_attention(packing, layout, topk=64, **sizes)
    assert auto.scheme in ("exact", "all_gather")
    assert {price.scheme for price in auto.prices} == {"exact", "all_gather"}


def call(**changed):
    packing = cp.Packing([5, 2])
    sizes = changed.pop("sizes", {"indexer": INDEXER})
    plan = changed.pop("plan", None) or cp.plan_attention(
        packing, cp.Layout.contiguous(packing, 1), topk=3, **SIZES, **sizes
    )
    inputs, *_ = drawn(packing.total, SIZES)
    return cp.sparse_attention(**{**inputs, **changed}, plan=plan)


NONE = {"index_q": None, "index_k": None, "index_weights": None}
PLACES = torch.zeros(7, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("index_q", {"index_q": None}), ("index_k", {"index_k": torch.ones(7, 5)}),
        ("index_weights", {"index_weights": torch.ones(7, 2)}), ("chosen", {"chosen": PLACES}),
        ("up", {"up": torch.ones(2, 2)}), ("index_loss", {"index_loss": "both"}), ("index_relu", {"index_relu": 1}),
        ("softmax_scale", {"softmax_scale": "1"}), ("k", {"k": torch.ones(7, 1, 6, dtype=torch.float64)}),
        ("chosen", {**NONE, "sizes": {}}), ("chosen", {**NONE, "sizes": {}, "chosen": PLACES.float()}),
        ("chosen", {**NONE, "sizes": {}, "chosen": PLACES[:, :2]}), ("index_q", {"sizes": {}, "chosen": PLACES}),
        ("index_loss", {**NONE, "sizes": {}, "chosen": PLACES, "index_loss": "sparse"}),
    ],
)  # fmt: skip
def test_rejects_calls_that_do_not_fit(argument, changed):
    with pytest.raises(ArgumentError) as caught:
        call(**changed)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("topk", {"topk": 0}), ("topk", {"topk": 2.0}), ("indexer", {"topk": 3, "indexer": 5}),
        ("indexer[1]", {"topk": 3, "indexer": (4, 0)}), ("indexer", {"indexer": (4, 4)}),
        ("scheme", {"topk": 3, "scheme": "p2p"}), ("scheme", {"topk": 3, "scheme": "a2a"}),
        ("scheme", {"topk": 3, "scheme": "a2a+exact"}),
        ("head_chunks", {"topk": 3, "scheme": "exact", "head_chunks": 2}),
        ("ulysses_degree", {"topk": 3, "ulysses_degree": 2}), ("codec", {"topk": 3, "codec": "fp8"}),
    ],
)  # fmt: skip
def test_rejects_plans_that_choose_nothing(argument, given):
    packing = cp.Packing([5, 2])
    with pytest.raises(ArgumentError) as caught:
        cp.plan_attention(packing, cp.Layout.contiguous(packing, 4), **SIZES, **given)
    assert caught.value.argument == argument


def test_rejects_a_mode_of_latents_that_queries_choose():
    packing = cp.Packing([5, 2])
    with pytest.raises(ArgumentError, match="latent_mode: got 'heads'"):
        cp.plan_attention(packing, cp.Layout.contiguous(packing, 4), topk=3, latent_mode="heads", **LATENT)


def test_errors_say_what_a_tensor_is_for():
    packing = cp.Packing([5, 2])
    plan = cp.plan_attention(packing, cp.Layout.contiguous(packing, 1), topk=3, **LATENT)
    inputs, *_ = drawn(packing.total, LATENT)
    inputs |= {**NONE, "chosen": PLACES}
    for changed, says in (({"up": None}, "Without up, queries are in the space of latents"),
                          ({"index_q": torch.ones(7, 4, 4)}, "Plan with indexer=")):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            cp.sparse_attention(**{**inputs, **changed}, plan=plan)


def test_a_pack_of_every_size_has_no_such_layer():
    tables = cp.GraphTables(16, 2, 1)
    with pytest.raises(ArgumentError, match="outside of the graph"):
        tables.load(cp.BatchPlan(tables.layout([5]), [cp.AttentionSpec(4, 4, 6, topk=3)]), 0, torch.device("cpu"))


def test_rejects_a_codec_before_there_is_a_plan():
    with pytest.raises(ArgumentError, match="Keys among which queries choose travel in their own type"):
        cp.AttentionSpec(heads=4, kv_heads=4, head_dim=6, topk=3, codec="fp8")


def test_rejects_plans_of_other_operations():
    packing = cp.Packing([5, 2])
    layout = cp.Layout.contiguous(packing, 1)
    q = torch.ones(7, 4, 6)
    with pytest.raises(ArgumentError, match="topk"):
        call(plan=cp.plan_attention(packing, layout, **SIZES))
    chooses = cp.plan_attention(packing, layout, heads=4, head_dim=6, topk=3)
    with pytest.raises(ArgumentError, match="sparse_attention"):
        cp.attention(q, q, q, chooses)
    latent = cp.plan_attention(packing, layout, topk=3, **LATENT)
    with pytest.raises(ArgumentError, match="sparse_attention"):
        cp.latent_attention(q, q[:, 0], q[:, 0], q, latent)


def other_loss(group):
    packing = cp.Packing(LENGTHS)
    inputs, *_ = drawn(packing.total, SIZES)
    layout = cp.Layout.zigzag(packing, 2)
    plan = cp.plan_attention(packing, layout, topk=TOP, indexer=INDEXER, **SIZES)
    own = {name: layout.shard(x, group.rank) for name, x in inputs.items()}
    cp.sparse_attention(**own, plan=plan, group=group, index_loss=("sparse", "dense")[group.rank])


def test_ranks_agree_on_the_loss():
    with pytest.raises(RankError, match="index_loss"):
        run_ranks(other_loss, 2)


@pytest.mark.parametrize("size", [1, 3])
def test_joined_with_a_window_it_is_one_softmax_over_both(size):
    """All keys before a window are chosen, so that both parts are causal attention; gradients reach both."""
    packing = cp.Packing(LENGTHS)

    def far(packing):
        spans = [(start, end) for start, end in packing.spans() if end - start > 9]
        return cp.Mask.from_slices(packing, [(start + 9, end, start, end - 9, "causal") for start, end in spans])

    def on_rank(group):
        layout = cp.Layout.zigzag(packing, size)
        everything, *_ = drawn(packing.total, SIZES)
        index = {name: layout.shard(x, group.rank) for name, x in everything.items() if name.startswith("index")}
        q, k, v = (layout.shard(everything[name], group.rank).requires_grad_() for name in "qkv")
        whole, near = (cp.plan_attention(packing, layout, **SIZES, mask=mask) for mask in ("causal", "window:8,0"))
        chosen = cp.plan_attention(packing, layout, **SIZES, mask=far, topk=packing.total, indexer=INDEXER)
        found = cp.sparse_attention(q, k, v, chosen, group, **index)
        expected, lse = cp.attention(q, k, v, whole, group, return_lse=True)
        joined = cp.merge([cp.attention(q, k, v, near, group, return_lse=True), (found.out, found.lse)])
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results = []
        for out, sums in (joined, (expected, lse)):
            loss = (out * weights).sum() + sums.masked_fill(sums.isinf(), 0).sum()
            results.append((out, sums, *torch.autograd.grad(loss, (q, k, v), retain_graph=True)))
        for actual, wanted in zip(*results, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)

    run_ranks(on_rank, size)
