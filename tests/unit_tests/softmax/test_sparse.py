"""Sparse attention over ranks is each document alone, by the definition: scores of all keys, and a stable sort.

Keys are chosen by an indexer, or in blocks by their means (MoBA).
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

import megatron_cp as cp
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.layout.tiles import Tiles
from megatron_cp.softmax.choices import ROWS
from megatron_cp.softmax.selection_work import _cut
from tests.peak_memory import PeakMemory
from tests.refusals import rejects
from tests.softmax_oracle import (
    attend,
    causal_in_blocks,
    chosen_blocks,
    divergence,
    index_scores,
    largest,
    scores_of,
)

PACKING = cp.Packing([37, 1, 130, 22])
HEADS, GROUPS, DIM, VALUE = 6, 2, 6, 7
SHARED, RANK, OWN = 2, 8, 4
SIZES = {"heads": HEADS, "kv_heads": GROUPS, "head_dim": DIM, "value_head_dim": VALUE}
LATENT = {"heads": HEADS, "head_dim": OWN + SHARED, "value_head_dim": VALUE, "latent": (SHARED, RANK)}
INDEXER = (3, 5)


class Layer(NamedTuple):
    """A layer whose queries choose keys by an indexer, or blocks of keys by their means.

    Attributes:
        top: the number of keys, or of blocks.
        block: the keys of a block; 0 for an indexer.
        latent: True for latents in place of keys and values.
        ties: True for queries and keys of blocks that are small integers: many scores are equal, and exactly so for
            blocks of two, four or eight keys. An indexer always has such.
        relu, loss: of an indexer.
        window: the keys before a query that it sees; None for all.
    """

    top: int = 9
    block: int = 0
    latent: bool = False
    ties: bool = True
    relu: bool = True
    loss: str | None = None
    window: int | None = None

    def plan(self, layout, scheme="exact", indexer=INDEXER):
        more = {"block": self.block} if self.block else {"indexer": indexer}
        more |= {"mask": "causal" if self.window is None else f"window:{self.window},0"}
        sizes = LATENT if self.latent else SIZES
        return cp.plan_attention(layout.packing, layout, topk=self.top, scheme=scheme, **sizes, **more)


BLOCKS, TIED_BLOCKS = Layer(3, 8, ties=False), Layer(3, 8)


def drawn(total, layer=BLOCKS, dtype=torch.float64):
    """Draws a layer's tensors, and the gradients of its output, log-sum-exp and index loss."""
    random = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    def integers(*shape):
        return torch.randint(-1, 2, shape, generator=random).to(dtype)

    if layer.latent:
        found = {"q": normal(total, HEADS, DIM), "k": normal(total, SHARED), "v": normal(total, RANK)}
        found["up"] = normal(HEADS, OWN + VALUE, RANK) / 3
    else:
        draw = integers if layer.block and layer.ties else normal
        found = {"q": draw(total, HEADS, DIM), "k": draw(total, GROUPS, DIM), "v": normal(total, GROUPS, VALUE)}
    if not layer.block:
        found |= {"index_q": integers(total, *INDEXER), "index_k": integers(total, 5)}
        found["index_weights"] = integers(total, 3)
    return found, {"out": normal(total, HEADS, VALUE), "lse": normal(total, HEADS), "loss": normal(total)}


def keys_and_values(inputs):
    """Returns keys and values `[t, heads, features]`."""
    if "up" in inputs:
        expanded = torch.einsum("tr,hnr->thn", inputs["v"], inputs["up"])
        shared = inputs["k"][:, None].expand(-1, HEADS, -1)
        return torch.cat([expanded[..., :OWN], shared], -1), expanded[..., OWN:]
    return (inputs[name].repeat_interleave(HEADS // GROUPS, 1) for name in "kv")


def places_of(chosen, tokens, count):
    """Returns the first `count` tokens of the last axis that are chosen, -1 behind them if there are fewer."""
    none = 2**40
    found = torch.where(chosen, tokens, none).sort(-1).values[..., :count]
    found = pad(found, (0, count - found.shape[-1]), value=none)
    return found.where(found < none, -1)


def one_document(inputs, tokens, layer):
    """Returns the output, the log-sum-exp, the index loss and the choice of one document."""
    own = {name: x if name == "up" else x[tokens] for name, x in inputs.items()}
    (keys, values), queries, size, scale = keys_and_values(own), own["q"], len(tokens), DIM**-0.5
    tokens, loss = torch.tensor(tokens), queries.new_zeros(size)
    if layer.block:
        block = min(layer.block, size)
        chosen = chosen_blocks(queries, keys, block, layer.top)
        places = places_of(chosen, tokens[::block], layer.top)
        seen = causal_in_blocks(chosen, block, size)
    else:
        visible = torch.ones(size, size, dtype=torch.bool).tril()
        if layer.window is not None:
            visible &= ~torch.ones_like(visible).tril(-layer.window - 1)
        index = index_scores(own["index_q"], own["index_k"], own["index_weights"], layer.relu)
        index = index.masked_fill(~visible, -torch.inf)
        seen = largest(index, layer.top) & visible
        places = places_of(seen, tokens, layer.top)
        loss = divergence(scores_of(queries, keys, scale), index, visible if layer.loss == "dense" else seen)
    out, lse = attend(queries, keys, values, seen, scale=scale)
    return out, lse.T, loss, places


def alone(layer, documents=None):
    """Returns the results of each document by itself; a token of several documents has those of the first one."""
    documents = documents or [list(range(*span)) for span in PACKING.spans()]
    held = [token for tokens in documents for token in tokens]
    rows = [held.index(token) for token in range(max(held) + 1)]
    inputs, gradients = drawn(len(rows), layer)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    parts = zip(*(one_document(inputs, tokens, layer) for tokens in documents), strict=True)
    out, lse, loss, places = (torch.cat(of_documents)[rows] for of_documents in parts)
    results = {"out": out, "lse": lse} | ({"loss": loss} if layer.loss else {})
    return with_gradients(results, gradients, inputs) | {"chosen": places}


def with_gradients(results, gradients, inputs):
    """Returns the results, and the gradients of the inputs."""
    torch.autograd.backward(list(results.values()), [gradients[name].to(x.dtype) for name, x in results.items()])
    of_inputs = {f"d_{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}
    return {name: x.detach() for name, x in results.items()} | of_inputs


def over_ranks(group, layer, plan, dtype=torch.float64, chosen=None):
    layout, rank = plan.layout, group.rank
    inputs, gradients = drawn(layout.packing.total, layer, dtype)
    more = {} if layer.block or chosen is not None else {"index_relu": layer.relu}
    if chosen is not None:
        inputs = {name: x for name, x in inputs.items() if "index" not in name}
        more["chosen"] = layout.shard(chosen, rank)
    own = {n: x.clone() if n == "up" else layout.shard(x, rank, pad_value=torch.nan) for n, x in inputs.items()}
    own = {name: x.requires_grad_() for name, x in own.items()}
    found = cp.sparse_attention(**own, plan=plan, group=group, index_loss=layer.loss, **more)
    assert (found.lse[int(layout.token_counts[rank]) :] == -torch.inf).all()
    results = {"out": found.out, "lse": found.lse} | ({"loss": found.index_loss} if layer.loss else {})
    gradients = {name: layout.shard(x, rank, pad_value=torch.nan) for name, x in gradients.items()}
    return with_gradients(results, gradients, own) | {"chosen": found.chosen}


def check(layer, size, layout, *, scheme="exact", exact=None, limit=1e-12, dtype=torch.float64, chosen=None):
    exact = exact or alone(layer)
    layout = getattr(cp.Layout, layout)(PACKING, size) if isinstance(layout, str) else layout
    plan = layer.plan(layout, scheme, None if chosen is not None else INDEXER)
    ranks = run_ranks(partial(over_ranks, layer=layer, plan=plan, dtype=dtype, chosen=chosen), size)
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        found = sum(parts) if name == "d_up" else layout.unshard(parts)
        if name == "chosen":
            assert (found.sort(-1).values == exact[name].sort(-1).values).all()
            assert layer.block or chosen is not None or (found == exact[name]).all()
        else:
            assert (found - exact[name]).abs().max() <= limit * exact[name].abs().max().clamp_min(1), name


LAYERS = [*(Layer(latent=latent, loss=loss) for latent in (False, True) for loss in ("sparse", "dense"))]


@pytest.mark.parametrize("layer", [*LAYERS, BLOCKS, TIED_BLOCKS], ids=str)
@pytest.mark.parametrize(
    ("size", "layout", "scheme"),
    [
        (1, "contiguous", "auto"), (2, "zigzag", "exact"), (3, "balanced", "all_gather"), (5, "contiguous", "exact"),
        (7, "striped", "exact"),
    ],
)  # fmt: skip
def test_every_document_is_as_alone(size, layout, scheme, layer):
    check(layer, size, layout, scheme=scheme)


KINDS = [
    Layer(relu=False), Layer(latent=True, window=20, loss="dense"),
    *(Layer(top, latent=True, loss="sparse") for top in (1, 500)),
    *(Layer(top, block, ties=False) for top, block in ((2, 5), (4, 1), (1, 8), (50, 7), (1, 130), (2, 2**62))),
    Layer(3, 8, latent=True, ties=False),
]  # fmt: skip


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_any_number_of_keys_or_blocks(layer):
    check(layer, 3, "zigzag")


@pytest.mark.parametrize("layer", [Layer(loss="sparse"), Layer(latent=True, loss="dense"), TIED_BLOCKS], ids=str)
def test_rows_in_any_order_and_ranks_without_rows(layer):
    total, exact = PACKING.total, alone(layer)
    check(layer, 1, cp.Layout.from_fragments(PACKING, [[(100, total), (0, 100)]]), exact=exact)
    padded = cp.Layout.zigzag(PACKING, 3, align=8)
    assert padded.pad_rows.any()
    check(layer, 3, padded, exact=exact)
    holes = cp.Layout.from_fragments(PACKING, [[(50, 60), (0, 30)], [], [(60, total), (30, 50)]])
    check(layer, 3, holes, exact=exact)


def test_documents_that_branch():
    """Blocks are counted along each path; two tokens that continue one path are not seen by one another."""
    packing = cp.Packing.tree([11, 1, 1, 1, 14, 3], [-1, 0, 0, 0, 0, 3])
    parts = [list(range(*span)) for span in ((0, 11), (11, 12), (12, 13), (13, 14), (14, 28), (28, 31))]
    documents = [parts[0] + parts[1], parts[0] + parts[2], parts[0] + parts[3] + parts[5], parts[0] + parts[4]]
    for layer in (Layer(2, 4), Layer(3, 3, ties=False)):
        exact = alone(layer, documents)
        for size, layout in ((1, "contiguous"), (3, "balanced")):
            check(layer, size, getattr(cp.Layout, layout)(packing, size), exact=exact)


@pytest.mark.parametrize("layer", [Layer(), BLOCKS], ids=str)
def test_choices_of_the_caller(layer):
    """A layer's own choice, given again in any order, with places that are hidden, repeated or within a block."""
    exact = {name: x for name, x in alone(layer).items() if "index" not in name}
    chosen = exact["chosen"]
    later = torch.arange(len(chosen)).view(-1, *[1] * (chosen.ndim - 1)) + torch.tensor([24, 400])
    within = [chosen[..., 1:2] + 1] if layer.block else []
    given = torch.cat([chosen, chosen[..., :1], later.expand(*chosen.shape[:-1], 2), *within], -1)
    given = given[..., torch.randperm(given.shape[-1], generator=torch.Generator().manual_seed(0))]
    exact["chosen"] = pad(chosen, (0, given.shape[-1] - chosen.shape[-1]), value=-1)
    check(layer._replace(top=given.shape[-1]), 3, "zigzag", exact=exact, chosen=given)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("layer", [Layer(latent=True, loss="sparse"), TIED_BLOCKS], ids=str)
def test_narrow_types_choose_as_float64_does(layer, dtype, limit):
    """Scores of small integers are exact in every type."""
    check(layer, 2, "zigzag", dtype=dtype, limit=limit)


def assert_every_layout_chooses_alike(packing, sizes, rows):
    """Returns the choice of one rank."""

    def main(group, layout):
        plan = cp.plan_attention(packing, layout, **sizes)
        own = {name: layout.shard(x, group.rank) for name, x in rows.items()}
        return cp.sparse_attention(**own, plan=plan, group=group).chosen

    expected = run_ranks(main, 1, cp.Layout.contiguous(packing, 1))[0]
    for size, kind in ((2, "zigzag"), (3, "balanced"), (5, "contiguous"), (7, "striped")):
        layout = getattr(cp.Layout, kind)(packing, size)
        assert torch.equal(layout.unshard(run_ranks(main, size, layout)), expected)
    return expected


@pytest.mark.any_cpu
@pytest.mark.parametrize("distinct", [1, 6])
@pytest.mark.parametrize("mask", ["causal", "window:200,0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.few(together=2)
def test_every_layout_chooses_the_same_keys_to_the_bit(dtype, mask, distinct):
    """Scores of random numbers, many of which differ in the last bits only: keys are equal but for their place."""
    packing, random = cp.Packing([300, 7, 90]), torch.Generator().manual_seed(5)
    few = torch.randn(distinct, 128, generator=random, dtype=dtype)
    keys = few[torch.randint(distinct, (packing.total,), generator=random)]
    shapes = ((8, 128), (8,), (2, 4))
    queries, weights, q = (torch.randn(packing.total, *shape, generator=random, dtype=dtype) for shape in shapes)
    sizes = {"heads": 2, "head_dim": 4, "topk": 20, "indexer": (8, 128), "mask": mask}
    rows = {"q": q, "k": q, "v": q, "index_q": queries, "index_k": keys, "index_weights": weights}
    expected = assert_every_layout_chooses_alike(packing, sizes, rows)
    if distinct == 1:
        first = 299 - 200 if mask != "causal" else 0
        # relu leaves zeros where all weighted products are negative, so all scores of a query are equal
        assert expected[299].sort().values.tolist() == [*range(first, first + 20)]


@pytest.mark.any_cpu
def test_every_layout_chooses_the_same_blocks_to_the_bit():
    """Blocks of the same few keys in other orders, whose means differ in the last bits only, and many are equal."""
    packing, random = cp.Packing([300, 7, 90]), torch.Generator().manual_seed(5)
    few = torch.randn(7, 2, 16, generator=random)
    keys = torch.cat([few[torch.randperm(7, generator=random)] for _ in range(57)])[: packing.total]
    q = torch.randn(packing.total, 4, 16, generator=random)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "topk": 6, "block": 7}
    assert_every_layout_chooses_alike(packing, sizes, {"q": q, "k": keys, "v": keys})


def test_short_documents_take_no_memory_for_keys_that_they_lack():
    layout, peaks = cp.Layout.contiguous(cp.Packing([16] * 4), 1), []
    for layer in (Layer(16), Layer(4096)):
        inputs = {name: x.requires_grad_() for name, x in drawn(64, layer)[0].items()}
        out = cp.sparse_attention(**inputs, plan=layer.plan(layout)).out
        with PeakMemory() as memory:
            out.backward(torch.ones_like(out))
        peaks.append(memory.peak)
    assert peaks[1] < 2 * peaks[0] + 4 * 64 * 4096 * 8  # the choice itself, sorted


SEVEN = cp.Layout.contiguous(cp.Packing([5, 2]), 1)


def test_queries_without_keys_have_no_weight():
    """Their log-sum-exp is -inf, and whatever gradient it is given is left out."""
    inputs = {name: x.requires_grad_() for name, x in drawn(7)[0].items()}
    plan = Layer(3).plan(SEVEN, indexer=None)
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


def test_documents_that_end_in_pads():
    spec = cp.AttentionSpec(**SIZES, topk=2, block=4)
    layer, inputs = Layer(2, 4, ties=False), drawn(25)[0]
    found = cp.sparse_attention(**inputs, plan=spec.plan(cp.Layout.contiguous(cp.Packing([20, 5]), 1), [17, 5])).out
    expected, *_ = one_document(inputs, list(range(17)), layer)
    assert (found[:17] - expected).abs().max() < 1e-12
    assert not found[17:20].any()


LARGE = {"heads": 128, "head_dim": 192, "value_head_dim": 128, "latent": (64, 512), "topk": 64}
MOBA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "topk": 3}
SENT = [
    (LARGE | {"indexer": (64, 128)}, 704, "64 keys a query"), (LARGE, 576, "64 keys a query"),
    (MOBA | {"block": 64}, 8 * 256, "at most 3 blocks of 64 keys"),
    (MOBA | {"block": 65}, 8 * 256, "at most 3 blocks of 65 keys"),
]  # fmt: skip


def test_the_rows_that_queries_see_are_sent_once():
    """Index keys beside latents; an indexer that is not there sends nothing."""
    packing = cp.Packing([1000])
    layout = cp.Layout.contiguous(packing, 4)
    plans = [cp.plan_attention(packing, layout, scheme="exact", **sizes) for sizes, *_ in SENT]
    for plan, (_, row, says) in zip(plans, SENT, strict=True):
        assert max(plan.bytes_sent(2, forward=True)) == 250 * 3 * row * 2
        assert says in plan.explain()
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    assert {price.scheme for price in cp.plan_attention(packing, layout, **LARGE).prices} == {"exact", "all_gather"}


KEYS, QUERIES = cp.Packing([9, 3]), cp.Packing([5, 2])
CROSS = {"kv_packing": KEYS, "kv_layout": cp.Layout.contiguous(KEYS, 4)}
UNPLANNED = [
    ({"indexer": (4, 4)}, "^indexer: got .*None without topk"), ({"block": 2}, "^block: got 2; .*None without topk"),
    ({"topk": 3, "block": 2, "indexer": (3, 5)}, "^indexer: got .*None with block"),
    *(({"topk": 3, "scheme": scheme}, "^scheme: got .*auto with topk") for scheme in ("a2a", "p2p", "a2a+exact")),
    ({"topk": 3, "scheme": "exact", "head_chunks": 2}, "^head_chunks: got "),
    ({"topk": 3, "ulysses_degree": 2}, "^ulysses_degree: got "),
    *(({"topk": 3, "block": 2, "mask": mask}, "^mask: got .*causal with block") for mask in ("full", "window:3,0")),
    ({"topk": 3, "block": 2, **CROSS}, "^mask: got .*over other documents of keys"),
    ({"topk": 3, "latent_mode": "heads", **LATENT, "kv_heads": None}, "^latent_mode: got 'heads'; .*None with topk"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), UNPLANNED, ids=str)
def test_rejects_plans_that_choose_nothing(given, says):
    rejects(says, cp.plan_attention, QUERIES, cp.Layout.contiguous(QUERIES, 4), **SIZES | given)


def refused_load():
    tables = cp.GraphTables(16, 2, 1)
    tables.load(cp.BatchPlan(tables.layout([5]), [cp.AttentionSpec(4, 4, 6, topk=3)]), 0, torch.device("cpu"))


PLACES, INDEX = torch.zeros(7, 3, dtype=torch.int32), torch.ones(7, 4, 4)
LATENTS = {name: x for name, x in drawn(7, Layer(latent=True))[0].items() if name in ("q", "k", "v")}
UNCALLED = {
    "Without up, queries are in the space of latents": lambda: cp.sparse_attention(
        **LATENTS, chosen=PLACES, plan=Layer(3, latent=True).plan(SEVEN, indexer=None)),
    "^index_q: got .*Plan with indexer=": lambda: cp.sparse_attention(
        **drawn(7)[0], chosen=PLACES, index_q=INDEX, plan=Layer(3).plan(SEVEN, indexer=None)),
    "Call sparse_attention": lambda: cp.latent_attention(
        *LATENTS.values(), torch.ones(HEADS, OWN + VALUE, RANK), Layer(3, latent=True).plan(SEVEN)),
    "Keys among which queries choose are never coded": lambda: cp.AttentionSpec(4, 4, 6, topk=3, codec="fp8"),
    "outside the graph": refused_load,
}  # fmt: skip


@pytest.mark.parametrize("says", UNCALLED)
def test_rejects_calls_that_do_not_fit(says):
    rejects(says, UNCALLED[says])


def called_differently(group, layer, plan):
    odd = group.rank == 1
    chosen = torch.full((PACKING.total, HEADS, layer.top), -1) if layer.block and odd else None
    over_ranks(group, layer._replace(loss=layer.loss and ("sparse", "dense")[odd]), plan, chosen=chosen)


@pytest.mark.parametrize(("layer", "says"), [(Layer(loss="sparse"), "index_loss"), (BLOCKS, "chosen")], ids=str)
def test_ranks_agree_on_the_loss_and_on_whether_a_choice_is_given(layer, says):
    with pytest.raises(RankError, match=says):
        run_ranks(called_differently, 2, layer, layer.plan(cp.Layout.contiguous(PACKING, 2)))
