"""Attention to blocks of keys that query heads choose is each document alone, by the definition of MoBA."""

from functools import partial

import pytest
import torch

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.softmax.choices import best_blocks
from tests.softmax_oracle import attend, causal_in_blocks, chosen_blocks

LENGTHS = [37, 1, 130, 22]
HEADS, GROUPS = 6, 2
SIZES = {"heads": HEADS, "kv_heads": GROUPS, "head_dim": 6, "value_head_dim": 7}
SHARED, RANK, OWN = 2, 8, 4
LATENT = {"heads": HEADS, "head_dim": OWN + SHARED, "value_head_dim": 7, "latent": (SHARED, RANK)}
BLOCK, TOP = 8, 3


def drawn(total, *, ties, latent=False, dtype=torch.float64):
    """Draws a layer's tensors. With ties, queries and keys are small integers: many scores are equal.

    They are exactly so for blocks of two, four or eight keys.
    """
    random = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    def integers(*shape):
        return torch.randint(-1, 2, shape, generator=random).to(dtype)

    if latent:
        tensors = {"q": normal(total, HEADS, 6), "k": normal(total, SHARED), "v": normal(total, RANK)}
        tensors["up"] = normal(HEADS, OWN + 7, RANK) / 3
    else:
        draw = integers if ties else normal
        tensors = {"q": draw(total, HEADS, 6), "k": draw(total, GROUPS, 6), "v": normal(total, GROUPS, 7)}
    return tensors, normal(total, HEADS, 7), normal(total, HEADS)


def keys_and_values(inputs):
    if "up" in inputs:
        made = torch.einsum("tr,hnr->thn", inputs["v"], inputs["up"])
        return torch.cat([made[..., :OWN], inputs["k"][:, None].expand(-1, HEADS, -1)], -1), made[..., OWN:]
    return (inputs[name].repeat_interleave(HEADS // GROUPS, 1) for name in "kv")


def one_document(inputs, tokens, block, top):
    """Returns one document's output, log-sum-exp, and first keys of the blocks that each query head sees."""
    own = {name: x if name == "up" else x[tokens] for name, x in inputs.items()}
    (keys, values), queries, size = keys_and_values(own), own["q"], len(tokens)
    block = min(block, size)
    chosen, numbers = chosen_blocks(queries, keys, block, top), torch.arange(-(-size // block))
    seen = causal_in_blocks(chosen, block, size)
    firsts = torch.where(chosen, torch.tensor(tokens)[numbers * block], 2**40).sort(-1).values[..., :top]
    firsts = torch.nn.functional.pad(firsts, (0, top - firsts.shape[-1]), value=2**40)
    out, lse = attend(queries, keys, values, seen, scale=queries.shape[-1] ** -0.5)
    return out, lse.T, firsts.where(firsts < 2**40, -1)


def alone(block=BLOCK, top=TOP, documents=None, **options):
    """Returns results of each document by itself; a token of several documents has those of the first one."""
    documents = documents or [list(range(*span)) for span in cp.Packing(LENGTHS).spans()]
    held = [token for tokens in documents for token in tokens]
    rows = [held.index(token) for token in range(max(held) + 1)]
    inputs, *gradients = drawn(len(rows), **options)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    documents = (one_document(inputs, tokens, block, top) for tokens in documents)
    out, lse, firsts = (torch.cat(parts)[rows] for parts in zip(*documents, strict=True))
    torch.autograd.backward([out, lse], gradients)
    found = {"out": out.detach(), "lse": lse.detach(), "chosen": firsts}
    return found | {f"d_{name}": x.grad for name, x in inputs.items()}


def over_ranks(group, layout, *, block=BLOCK, top=TOP, scheme="exact", chosen=None, **options):
    packing = cp.Packing(LENGTHS)
    layout = getattr(cp.Layout, layout)(packing, group.size) if isinstance(layout, str) else layout
    sizes = LATENT if options.get("latent") else SIZES
    plan = cp.plan_attention(layout.packing, layout, scheme=scheme, topk=top, block=block, **sizes)
    inputs, *gradients = drawn(layout.packing.total, **options)
    own = {
        name: x.clone() if name == "up" else layout.shard(x, group.rank, pad_value=torch.nan)
        for name, x in inputs.items()
    }
    own = {name: x.requires_grad_() for name, x in own.items()}
    given = None if chosen is None else layout.shard(chosen, group.rank)
    found = cp.sparse_attention(**own, plan=plan, group=group, chosen=given)
    dout, dlse = (layout.shard(x, group.rank, pad_value=torch.nan) for x in gradients)
    torch.autograd.backward([found.out, found.lse], [dout, dlse.to(found.lse.dtype)])
    gradients = {f"d_{name}": x.grad for name, x in own.items()}
    return {"out": found.out.detach(), "lse": found.lse.detach(), "chosen": found.chosen} | gradients, layout


def check(size, layout, limit=1e-12, exact=None, **options):
    if exact is None:
        exact = alone(**{name: x for name, x in options.items() if name not in ("scheme", "dtype")})
    ranks = run_ranks(partial(over_ranks, layout=layout, **options), size)
    for name in ranks[0][0]:
        parts = [rank[0][name] for rank in ranks]
        found = sum(parts) if name == "d_up" else ranks[0][1].unshard(parts)
        if name == "chosen":
            assert (found.sort(-1).values == exact[name].sort(-1).values).all()
        else:
            assert (found - exact[name]).abs().max() <= limit * exact[name].abs().max().clamp_min(1), name


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("size", "layout", "scheme"),
    [
        (1, "contiguous", "auto"), (2, "zigzag", "exact"), (3, "balanced", "all_gather"), (5, "contiguous", "exact"),
        (7, "striped", "exact"),
    ],
)  # fmt: skip
def test_every_document_is_as_alone(size, layout, scheme, ties):
    check(size, layout, scheme=scheme, ties=ties)


@pytest.mark.parametrize(("block", "top"), [(5, 2), (1, 4), (8, 1), (7, 50), (130, 1), (2**62, 2)])
def test_blocks_of_any_size_and_number(block, top):
    check(3, "zigzag", ties=False, block=block, top=top)


def test_queries_choose_among_latents():
    check(3, "balanced", ties=False, latent=True)


def test_rows_in_any_order_and_ranks_without_rows():
    packing = cp.Packing(LENGTHS)
    total = packing.total
    check(1, cp.Layout.from_fragments(packing, [[(100, total), (0, 100)]]), ties=True)
    padded = cp.Layout.zigzag(packing, 3, align=8)
    assert padded.pad_rows.any()
    check(3, padded, ties=True)
    check(3, cp.Layout.from_fragments(packing, [[(50, 60), (0, 30)], [], [(60, total), (30, 50)]]), ties=True)


def test_documents_that_branch():
    """Blocks are counted along each path; two tokens that continue one path are not seen by one another."""
    packing = cp.Packing.tree([11, 1, 1, 1, 14, 3], [-1, 0, 0, 0, 0, 3])
    parts = [list(range(*span)) for span in ((0, 11), (11, 12), (12, 13), (13, 14), (14, 28), (28, 31))]
    documents = [parts[0] + parts[1], parts[0] + parts[2], parts[0] + parts[3] + parts[5], parts[0] + parts[4]]
    for block, top, ties in ((4, 2, True), (3, 3, False)):
        exact = alone(block, top, documents, ties=ties)
        for size, layout in ((1, "contiguous"), (3, "balanced")):
            check(size, getattr(cp.Layout, layout)(packing, size), exact=exact, block=block, top=top, ties=ties)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_narrow_types_choose_as_float64_does(dtype, limit):
    """Sums of eight small integers, and products with them, are exact in every type."""
    check(2, "zigzag", dtype=dtype, limit=limit, ties=True)


def test_choices_of_the_caller():
    """A choice that is given again in any order, with places that are hidden, repeated or in the midst of a block."""
    exact = alone(ties=False)
    chosen = exact["chosen"]
    later = torch.arange(len(chosen))[:, None, None].expand(-1, HEADS, -1) + torch.tensor([3 * BLOCK, 400])
    given = torch.cat([chosen, chosen[..., :1], later, chosen[..., 1:2] + 1], -1)
    given = given[..., torch.randperm(given.shape[-1], generator=torch.Generator().manual_seed(0))]
    check(3, "zigzag", exact=exact | {"chosen": torch.nn.functional.pad(chosen, (0, 4), value=-1)}, ties=False,
          chosen=given, top=given.shape[-1])  # fmt: skip


@pytest.mark.any_cpu
def test_every_layout_chooses_alike_to_the_bit():
    """Blocks of the same few keys in other orders, whose means differ in the last bits only, and many are equal."""
    packing = cp.Packing([300, 7, 90])
    random = torch.Generator().manual_seed(5)
    few = torch.randn(7, 2, 16, generator=random)
    keys = torch.cat([few[torch.randperm(7, generator=random)] for _ in range(57)])[: packing.total]
    q = torch.randn(packing.total, 4, 16, generator=random)

    def main(group, layout):
        plan = cp.plan_attention(packing, layout, heads=4, kv_heads=2, head_dim=16, topk=6, block=7)
        rows = [layout.shard(x, group.rank) for x in (q, keys, keys)]
        return cp.sparse_attention(*rows, plan, group).chosen

    expected = run_ranks(main, 1, cp.Layout.contiguous(packing, 1))[0]
    for size, kind in ((2, "zigzag"), (3, "balanced"), (5, "contiguous"), (7, "striped")):
        layout = getattr(cp.Layout, kind)(packing, size)
        assert torch.equal(layout.unshard(run_ranks(main, size, layout)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_means_are_sums_of_pairs_rounded_to_the_type_of_keys(dtype):
    """Means of few numbers, of which many are equal once rounded: the first of these is chosen."""
    random, size, count = torch.Generator().manual_seed(0), 7, 60
    keys = (1 + torch.randint(4, (count * size, 1, 1), generator=random) * torch.finfo(dtype).eps).to(dtype)
    a, b, c, d, e, f, g = keys.float().unflatten(0, (-1, size)).unbind(1)
    means = (((a + b) + (c + d)) + ((e + f) + g)).div(size).to(dtype).float().flatten()
    own = torch.tensor([count - 1])
    for sign in (1, -1):
        numbers, valid = best_blocks(torch.full((1, 1, 1), sign, dtype=dtype), keys, own, size, 6)
        best = (means[:-1] * sign).sort(descending=True, stable=True).indices[:5]
        assert valid.all()
        assert numbers.flatten().tolist() == [*sorted(best.tolist()), count - 1]


def test_a_document_does_not_change_others():
    packing = cp.Packing(LENGTHS)
    plan = cp.plan_attention(packing, cp.Layout.contiguous(packing, 1), topk=TOP, block=BLOCK, **SIZES)
    inputs, *_ = drawn(packing.total, ties=False)
    before = cp.sparse_attention(**inputs, plan=plan).out
    for x in inputs.values():
        x[38:168] *= -3
    after = cp.sparse_attention(**inputs, plan=plan).out
    assert torch.equal(before[:38], after[:38])
    assert torch.equal(before[168:], after[168:])


def test_what_a_plan_says():
    packing = cp.Packing([1000])
    layout = cp.Layout.contiguous(packing, 4)
    plans = [
        cp.plan_attention(packing, layout, heads=32, kv_heads=8, head_dim=128, topk=3, block=block, scheme="exact")
        for block in (64, 65)
    ]
    assert max(plans[0].bytes_sent(2, forward=True)) == 250 * 3 * 8 * 256 * 2
    assert "at most 3 blocks of 64 keys a query and head" in plans[0].explain()
    assert plans[0].fingerprint() != plans[1].fingerprint()


def test_documents_that_end_in_pads():
    packing, own = cp.Packing([20, 5]), [17, 5]
    spec = cp.AttentionSpec(heads=HEADS, kv_heads=GROUPS, head_dim=6, value_head_dim=7, topk=2, block=4)
    inputs, *_ = drawn(packing.total, ties=False)
    found = cp.sparse_attention(**inputs, plan=spec.plan(cp.Layout.contiguous(packing, 1), own)).out
    expected, *_ = one_document(inputs, list(range(17)), 4, 2)
    assert (found[:17] - expected).abs().max() < 1e-12
    assert not found[17:20].any()


KEYS = cp.Packing([9, 3])


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("block", {"block": 0}), ("block", {"block": 2.0}), ("block", {"block": True}), ("block", {"topk": None}),
        ("topk", {"topk": 0}), ("indexer", {"indexer": (3, 5)}), ("scheme", {"scheme": "p2p"}),
        ("scheme", {"scheme": "a2a"}), ("mask", {"mask": "full"}), ("mask", {"mask": "window:3,0"}),
        ("mask", {"mask": "first:1+window:2,0"}), ("mask", {"mask": "window:-1,1"}), ("mask", {"mask": "prefix:2"}),
        ("mask", {"kv_packing": KEYS, "kv_layout": cp.Layout.contiguous(KEYS, 4)}),
        ("mask", {"mask": "causal", "kv_packing": KEYS, "kv_layout": cp.Layout.contiguous(KEYS, 4)}),
    ],
)  # fmt: skip
def test_rejects_plans_of_no_blocks(argument, given):
    packing = cp.Packing([5, 2])
    with pytest.raises(ArgumentError) as caught:
        cp.plan_attention(packing, cp.Layout.contiguous(packing, 4), **{**SIZES, "topk": 3, "block": 2, **given})
    assert caught.value.argument == argument


def test_rejects_specs_of_no_blocks():
    for given in ({"block": 0}, {"block": 2, "topk": None}, {"block": 2, "indexer": (1, 2)}):
        with pytest.raises(ArgumentError, match=next(reversed(given))):
            cp.AttentionSpec(**{**SIZES, "topk": 3, **given})


PLACES = torch.zeros(7, HEADS, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("chosen", {"chosen": PLACES[:, 0]}), ("chosen", {"chosen": PLACES[:, :GROUPS]}),
        ("chosen", {"chosen": PLACES.double()}), ("chosen", {"chosen": PLACES[..., :2]}),
        ("index_q", {"index_q": torch.ones(7, 3, 5)}), ("index_k", {"index_k": torch.ones(7, 5)}),
        ("index_loss", {"index_loss": "sparse"}), ("k", {"k": torch.ones(7, 1, 6, dtype=torch.float64)}),
    ],
)  # fmt: skip
def test_rejects_calls_that_do_not_fit(argument, given):
    packing = cp.Packing([5, 2])
    plan = cp.plan_attention(packing, cp.Layout.contiguous(packing, 1), topk=3, block=2, **SIZES)
    inputs, *_ = drawn(packing.total, ties=False)
    with pytest.raises(ArgumentError) as caught:
        cp.sparse_attention(**{**inputs, **given}, plan=plan)
    assert caught.value.argument == argument


def given_on_one_rank(group):
    layout = cp.Layout.contiguous(cp.Packing(LENGTHS), 2)
    given = torch.full((layout.packing.total, HEADS, TOP), -1)
    return over_ranks(group, layout, ties=False, chosen=given if group.rank else None)


def test_ranks_agree_on_whether_a_choice_is_given():
    with pytest.raises(RankError, match="chosen"):
        run_ranks(given_on_one_rank, 2)
