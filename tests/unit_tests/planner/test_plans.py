"""`plan_attention` and `plan_linear`: the plans they make, and what those say of themselves."""

import pickle
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.choose import degrees_to_try
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.price import priced
from tests.unit_tests.planner.plan_cases import ATTENTION, LAYOUT, LINEAR, PACKING, PLANNERS


def test_arguments_that_are_left_out():
    plan = plan_attention(PACKING, LAYOUT, heads=6, head_dim=8)
    assert plan == plan_attention(
        PACKING, LAYOUT, heads=6, kv_heads=6, head_dim=8, value_head_dim=8, mask=Mask.causal(PACKING), scheme="a2a",
        kv_packing=PACKING, kv_layout=LAYOUT,
    )  # fmt: skip
    assert plan_linear(PACKING, LAYOUT, heads=6, head_dim=8) == plan_linear(
        PACKING, LAYOUT, "gdn", heads=6, key_heads=6, head_dim=8, value_head_dim=8, mode="auto", conv_width=4,
        hidden_size=None, layers=1,
    )  # fmt: skip


@PLANNERS
def test_collectives_and_fingerprints_are_those_of_equal_plans(planner, arguments):
    alone = planner(**{**arguments, "layout": Layout.contiguous(PACKING, 1)})
    assert [alone.collectives(forward=forward) for forward in (True, False)] == [0, 0]
    assert [planner(**arguments).collectives(forward=forward) for forward in (True, False)] == [2, 2]
    packing = Packing(PACKING.lengths.tolist())
    fragments = [LAYOUT.fragments_of(rank) for rank in range(3)]
    again = planner(**{**arguments, "packing": packing, "layout": Layout.from_fragments(packing, fragments)})
    plan = planner(**arguments)
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()
    assert {plan: "found"}[again] == "found"
    assert len(plan.fingerprint()) == 16
    assert plan.memo("key", lambda: "device tensor") == plan.memo("key", lambda: "made again")
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.fingerprint() == plan.fingerprint()
    assert copy.memo("key", lambda: "made again") == "made again"


def test_explain_says_what_is_sent_and_what_is_empty():
    packing = Packing([512])
    plan = plan_attention(packing, Layout.contiguous(packing, 2), heads=2, head_dim=8, scheme="a2a")
    assert plan.bytes_sent(2, forward=True) == [256 * (3 + 1) * 16] * 2
    for item_size, sent in ((2, "16.0 KiB"), (4, "32.0 KiB")):
        said = f"the busiest rank will send {sent} (this scheme needs {sent}), at {item_size} bytes an element"
        assert plan.explain(item_size).count(said) == 2
    assert plan.explain().startswith("attention by a2a over 2 ranks: ")
    assert plan.explain().count("-> own heads, one collective:") == 1
    chunks = plan_attention(packing, Layout.contiguous(packing, 2), heads=4, head_dim=8, scheme="a2a", head_chunks=2)
    assert chunks.explain().count("-> own heads, 2 collectives, each of a chunk of heads:") == 1
    narrow = plan_attention(packing, Layout.contiguous(packing, 2), heads=2, head_dim=5, scheme="a2a")
    for forward in (True, False):  # rows of 10 bytes are filled up to 16
        assert narrow.bytes_sent(2, forward=forward) == [256 * 4 * 16] * 2
        assert narrow.bytes_needed(2, forward=forward) == [256 * 4 * 10] * 2
    packing = Packing([0])
    plan = plan_attention(packing, Layout.contiguous(packing, 2), heads=2, head_dim=8)
    assert "the packed stream is empty" in plan.explain()
    assert plan.work_imbalance == 1.0
    assert plan_attention(PACKING, LAYOUT, heads=5, head_dim=8).work_imbalance == 2 / (5 / 3)
    assert plan_attention(PACKING, LAYOUT, heads=6, head_dim=8).work_imbalance == 1.0


def test_explain_says_first_for_which_machine_auto_has_chosen():
    """It need not be the one on which the plan is made."""
    for name in (None, "b200"):
        plan = plan_attention(PACKING, LAYOUT, heads=6, head_dim=8, hardware=name)
        assert plan.explain().startswith(f"attention by {plan.scheme}, chosen for {name or 'h100'}, over 3 ranks: ")


def other_batch(packing, partition=Layout.zigzag, **options):
    return {"packing": packing, "layout": partition(packing, 3, **options)}


SINGLES = np.stack([np.arange(PACKING.total), np.arange(PACKING.total) + 1], axis=-1)
DIFFERENT = {
    "lengths": other_batch(Packing([7, 1, 0, 131, 1])), "an empty document": other_batch(Packing([7, 1, 0, 130, 2, 0])),
    "layout": other_batch(PACKING, Layout.contiguous),
    "fragments": {"layout": Layout.from_fragments(PACKING, np.split(SINGLES, np.cumsum(LAYOUT.token_counts)[:-1]))},
    "align": other_batch(PACKING, align=4), "cp_size": {"layout": Layout.zigzag(PACKING, 5)}, "heads": {"heads": 12},
    "head_dim": {"head_dim": 16}, "value_head_dim": {"value_head_dim": 16},
}  # fmt: skip


@PLANNERS
@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_plans_and_fingerprints_differ_by(planner, arguments, changes):
    plan, other = planner(**arguments), planner(**{**arguments, **changes})
    assert other != plan
    assert other.fingerprint() != plan.fingerprint()


def contiguous(*lengths):
    return plan_attention(**ATTENTION | other_batch(Packing(lengths), Layout.contiguous))


def with_keys(partition):
    keys = Packing([3, 9, 0, 20, 5])
    return plan_attention(**ATTENTION, kv_packing=keys, kv_layout=partition(keys, 3), scheme="exact")


# The last documents of many are not in a description, but are in its fingerprint.
@pytest.mark.parametrize(
    ("plan", "other"),
    [
        (plan_attention(**ATTENTION), plan_attention(**{**ATTENTION, "kv_heads": 6})),
        (plan_linear(**LINEAR), plan_linear(**{**LINEAR, "key_heads": 6})),
        (plan_attention(**ATTENTION), plan_attention(**ATTENTION, mask=Mask.full(PACKING))),
        (plan_attention(**ATTENTION), plan_linear(**LINEAR)),
        (with_keys(Layout.contiguous), with_keys(Layout.zigzag)),
        (contiguous(*[3] * 20, 5, 7), contiguous(*[3] * 20, 7, 5)),
        (contiguous(*[3] * 20, 8), contiguous(*[3] * 20, 7, 1)),
    ],
    ids=["kv_heads", "key_heads", "mask", "kind", "kv_layout", "late length", "last document"],
)
def test_fingerprints_differ_by(plan, other):
    assert other != plan
    assert other.fingerprint() != plan.fingerprint()


def test_explain_says_who_holds_what():
    layout = Layout.zigzag(PACKING, 70, align=2)
    text = plan_attention(PACKING, layout, heads=70, head_dim=8).explain()
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+)  ", text, re.MULTILINE)
    tokens, pads = layout.token_counts, layout.pad_rows
    held = [(rank, tokens[rank], pads[rank], len(layout.fragments_of(rank))) for rank in range(64)]
    assert [tuple(map(int, row)) for row in rows] == held
    assert "... and 6 more ranks" in text
    packing = Packing([5, 0, 4])
    layout = Layout.from_fragments(packing, [[(6, 9)], [(0, 2)], [(2, 6)]])
    text = plan_attention(packing, layout, heads=3, head_dim=8).explain()
    assert "documents  |    |   \nowner      112222000   (1 token a character)" in text
    with pytest.warns(UserWarning, match="1 of 3 ranks"):
        text = plan_attention(PACKING, LAYOUT, heads=2, kv_heads=1, head_dim=8, scheme="a2a").explain()
    rows = [line.split()[4:] for line in text.splitlines() if re.match(r" +\d+ ", line)]
    assert rows == [["0", "0", "50.0%"], ["1", "0", "50.0%"], ["none", "none", "0.0%"]]


@PLANNERS
def test_warns_the_caller_of_idle_ranks(planner, arguments):
    scheme = {"scheme": "a2a"} if planner is plan_attention else {"mode": "headwise"}
    with pytest.warns(UserWarning, match="3 of 5 ranks get no .*head and compute nothing here") as caught:
        plan = planner(PACKING, Layout.zigzag(PACKING, 5), heads=2, head_dim=8, **scheme)
    assert [warning.filename for warning in caught] == [__file__]
    assert plan.notes == (str(caught[0].message),)


@PLANNERS
@pytest.mark.parametrize(("groups", "notes"), [(1, 1), (3, 0)])
def test_notes_groups_that_ranks_share(planner, arguments, groups, notes):
    shared = {name: groups for name in arguments if name in ("kv_heads", "key_heads")}
    scheme = {"scheme": "a2a"} if planner is plan_attention else {"mode": "headwise"}
    plan = planner(**{**arguments, **shared, **scheme})
    assert [note for note in plan.notes if "sent to each of them and its gradient is summed" in note] == [*plan.notes]
    assert len(plan.notes) == notes


def test_sharding_and_planning_a_batch_import_no_torch():
    program = """
import sys
import numpy as np
from megatron_cp import plan_attention, plan_linear
from megatron_cp.layout import Layout, Packing, Route
packing = Packing([700, 1, 0, 395])
layout = Layout.zigzag(packing, 3, align=4)
tokens = np.arange(1096)
assert (layout.unshard([layout.shard(tokens, rank) for rank in range(3)]) == tokens).all()
layout.labels(tokens, 1), layout.positions(1), layout.document_ids(1)
Route.between(layout, Layout.contiguous(layout.packing, 3), 1)
for plan in (
    plan_attention(packing, layout, heads=6, kv_heads=2, head_dim=8),
    *(plan_linear(packing, layout, heads=6, key_heads=2, head_dim=8, mode=mode) for mode in ("headwise", "chunkwise")),
):
    plan.explain(), plan.fingerprint(), plan.bytes_sent(2, forward=False), hash(plan)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def calls_of(attend, kv_rank):
    return sum(len(attend.bands(kv_rank, stage)) for stage in attend.stages)


@pytest.mark.parametrize("mask", [Mask.causal, Mask.full, lambda packing: Mask.window(packing, 40)])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
def test_pieces_of_a_ring_are_counted_without_making_them(name, mask):
    packing = Packing([130, 1, 69])
    layout = getattr(Layout, name)(packing, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        attend = plan_attention(packing, layout, heads=2, head_dim=4, scheme="p2p", mask=mask(packing)).attend
        gathered = plan_attention(packing, layout, heads=2, head_dim=4, scheme="exact", mask=mask(packing)).attend
    for kv_rank in range(4):
        assert attend.count_bands(kv_rank) == (calls_of(attend, kv_rank), calls_of(gathered, kv_rank))


@pytest.mark.parametrize(
    ("scheme", "instead"), [("p2p", "all_gather or exact"), ("a2a+p2p", "a2a+all_gather or a2a+exact")]
)
def test_a_ring_over_single_tokens_warns_and_names_what_gathers(scheme, instead):
    packing = Packing([1500, 548])
    layout = Layout.striped(packing, 4)
    if scheme == "a2a+p2p":  # whose KV ranks would join the stripes of their ranks
        evens, odds = ([(token, token + 1) for token in range(start, 2048, 2)] for start in (0, 1))
        layout = Layout.from_fragments(packing, [evens[:512], evens[512:], odds[:512], odds[512:]])
    with pytest.warns(
        UserWarning, match=rf"{re.escape(scheme)} computes \d+ pieces .* take {re.escape(instead)}"
    ) as seen:
        plan = plan_attention(packing, layout, heads=4, head_dim=4, scheme=scheme)
    assert len(seen) == 1
    count = plan.attend.count_bands(plan.attend.num_kv_ranks - 1)[0]
    assert f"note: {scheme} computes {count} pieces" in plan.explain()


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "balanced", "zigzag_of_pack"])
def test_a_ring_over_other_layouts_does_not_warn(name):
    packing = Packing(np.random.default_rng(0).integers(1, 200, 500))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_attention(packing, getattr(Layout, name)(packing, 16), heads=4, head_dim=4, scheme="p2p")
    assert not any("pieces" in note for note in plan.notes)


SEVERAL = Packing([10000, 4500, 4500, 4500, 4500, 4768])
DRAWS = np.random.default_rng(0).lognormal(8, 1.2, 64)
HEAVY = Packing(np.diff(np.round(np.cumsum(DRAWS) / DRAWS.sum() * 2**14).astype(int), prepend=0))


@pytest.mark.parametrize(
    ("layout", "hosts", "shape", "slower", "chosen"),
    [
        # Without chunks all_gather is predicted to be fastest, and in four chunks it is slower than exact in four.
        (Layout.balanced(SEVERAL, 8), 8, (64, 8, 128), [("exact", 1, 1), ("exact", 1, 2), ("all_gather", 1, 4)],
         ("exact", 1, 4)),
        # In two chunks, a2a+exact among four ranks is a third behind that among eight; in one it wins.
        (Layout.balanced(HEAVY, 16), 4, (8, 8, 64), [("a2a+exact", 4, 2), ("a2a+exact", 8, 1)], ("a2a+exact", 4, 1)),
    ],
    ids=["every scheme", "far behind"],
)  # fmt: skip
def test_auto_tries_head_chunks(layout, hosts, shape, slower, chosen):
    on, (heads, kv_heads, head_dim) = machine("h100"), shape
    topology = on.topology(layout.cp_size, hosts)
    request = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "hardware": on, "topology": topology}
    *others, best = (
        priced(
            plan_attention(
                layout.packing, layout, **request, scheme=scheme, ulysses_degree=degree, head_chunks=chunks
            ), on, topology, item_size=2,
        ).total
        for scheme, degree, chunks in (*slower, chosen)
    )  # fmt: skip
    assert best < min(others)
    plan = plan_attention(layout.packing, layout, **request)
    assert (plan.scheme, plan.ulysses_degree, plan.attend.head_chunks) == chosen
    assert plan.prices[0].total == pytest.approx(best)


def test_of_two_level_schemes_only_the_ranks_of_a_host_are_tried_for_very_many_fragments(monkeypatch):
    monkeypatch.setattr("megatron_cp.planner.choose.VERY_MANY", 0)
    layout = Layout.contiguous(Packing([64]), 8)
    for hosts, tried in ((2, [4]), (4, [2]), (8, [2])):
        assert degrees_to_try(SCHEMES["a2a+p2p"], layout, None, machine("h100").topology(8, hosts)) == tried


def test_auto_tries_head_chunks_for_very_many_fragments(monkeypatch):
    """The first candidate alone, which is the one that it would be without chunks."""
    packing, hardware = SEVERAL, machine("h100")
    request = {"heads": 32, "kv_heads": 16, "head_dim": 128, "hardware": hardware, "topology": hardware.topology(8, 8)}
    all_prices = plan_attention(packing, Layout.zigzag(packing, 8), **request).prices
    monkeypatch.setattr("megatron_cp.planner.choose.VERY_MANY", 10)
    chosen = plan_attention(packing, Layout.zigzag(packing, 8), **request)
    assert sorted((price.scheme, price.detail.partition(",")[0]) for price in chosen.prices) == sorted(
        (price.scheme, price.detail.partition(",")[0])
        for price in all_prices
        if "exact" not in price.scheme and "(u = 4)" not in price.detail  # of the degrees only the first, too
    )
    fixed = [
        plan_attention(packing, Layout.zigzag(packing, 8), **request, scheme=chosen.scheme, head_chunks=chunks)
        for chunks in (1, 2)
    ]
    times = [priced(plan, hardware, request["topology"], item_size=2).total for plan in fixed]
    assert min(times) < 0.99 * times[0]
    assert chosen.prices[0].total == pytest.approx(min(times))
