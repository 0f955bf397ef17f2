"""`GraphTables`: packs that are filled up to one size give the numbers of one rank; what does not fit is refused."""

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.batch.graph_tables import documents_of
from megatron_cp.exchange.device import CallTables
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear.kernels import conv
from megatron_cp.linear.kernels.common.chunks import fixed_chunks
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.plan.flows import Fetch
from megatron_cp.softmax.kernels.common.fixed_calls import FixedCalls, Pattern
from megatron_cp.softmax.kernels.common.varlen_calls import device_calls, segment_calls
from tests.refusals import rejects
from tests.slots_problem import CAPACITY, CONTIGUOUS, DOCUMENTS, KINDS, PRODUCTS, errors_of, packs_drawn, run_on_rank
from tools.gpu_check.one_rank import StillGroup

CPU = torch.device("cpu")
A2A = [KINDS["a2a"]]


MORE = [pytest.param(size, 6, marks=pytest.mark.thorough) for size in (1, 2, 3, 5)]


@pytest.mark.parametrize(("size", "count"), [(1, 2), (3, 4), *MORE])
def test_every_pack_has_the_numbers_of_one_rank(size, count):
    packs = packs_drawn(count)[:count]
    ranks = run_ranks(run_on_rank, size, packs, CPU, torch.float64, kind="threads")
    for number, lengths in enumerate(packs):
        errors = errors_of(ranks[0][number], lengths, size, torch.float64)
        assert len(errors) == 5 * 4 + 4 + 3 + 2
        assert max(errors.values()) <= 1e-12, (lengths, errors)


@pytest.mark.parametrize(
    ("size", "packs"),
    [(4, [[30, 1, 7], [CAPACITY - 6]]), pytest.param(6, [[30, 1, 7], [12] * 6, [48]], marks=pytest.mark.thorough)],
)
def test_products_of_schemes_have_the_numbers_of_one_rank(size, packs):
    ranks = run_ranks(run_on_rank, size, packs, CPU, torch.float64, "zigzag", PRODUCTS, kind="threads")
    for number, lengths in enumerate(packs):
        errors = errors_of(ranks[0][number], lengths, size, torch.float64, "zigzag", PRODUCTS)
        assert len(errors) == 3 * 4
        assert max(errors.values()) <= 1e-12, (lengths, errors)


@pytest.mark.parametrize(("size", "count"), [(3, 4), *MORE])
def test_chunkwise_layers_of_every_pack_have_the_numbers_of_one_rank(size, count):
    packs = [[41, 38, 3], *packs_drawn(count)[: count - 1]]  # documents begin and end near the cuts of 3 ranks
    given = (CPU, torch.float64, "contiguous")
    ranks = run_ranks(run_on_rank, size, packs, *given, kind="threads")
    for number, lengths in enumerate(packs):
        errors = errors_of(ranks[0][number], lengths, size, *given[1:])
        assert len(errors) == 4 + 4 + 4 + 3 + 2
        assert max(errors.values()) <= 1e-12, (lengths, errors)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_has_as_many_rows_of_every_pack(size, layout):
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, size, layout=layout)
    for lengths in packs_drawn(20):
        made = slots.layout(lengths)
        assert made.row_counts.tolist() == [CAPACITY // size] * size
        assert made.packing.num_documents == DOCUMENTS + 1
        assert documents_of(slots, made) == cp.Packing(lengths)
        assert made.in_stream_order == (layout == "contiguous" or size == 1)


def test_tables_move_rows_also_of_a_pack_that_lies_in_stream_order_by_chance():
    """A graph that was recorded with another pack reads the same tables, in the same memory."""
    slots, places = cp.GraphTables(4, 1, 2), set()
    for lengths in ([4], [1], [4]):
        layout = slots.layout(lengths)
        assert cp.Layout.zigzag(layout.packing, 2).in_stream_order == (lengths == [1])
        assert not layout.in_stream_order
        plans = cp.BatchPlan(layout, A2A)
        slots.load(plans, 0, CPU)  # refuses tables of other shapes than before
        for name in ("order", "inverse_order"):
            table = plans.plans[0].tables.orders[name]
            assert table.tolist() == getattr(layout, name).tolist()
            places.add((name, table.data_ptr()))
    assert len(places) == 2


def run_before_and_after_loading(group):
    """Returns True if outputs are the same; the second layer moves rows by the loaded tables."""
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, group.size)
    plans = cp.BatchPlan(slots.layout([30, 10]), A2A)
    before, generator = plans.plans[0], torch.Generator().manual_seed(group.rank)
    inputs = [torch.randn(CAPACITY // group.size, heads, 16, generator=generator) for heads in (6, 2, 2)]
    first = cp.attention(*inputs, before, group)
    slots.load(plans, group.rank, CPU)
    (after,) = plans.plans
    assert torch.equal(cp.attention(*inputs, after, group), first)
    found = [each for each in vars(after.steps[0].exchange)["_memo"].values() if isinstance(each, Geometry)]
    assert [at.tables for at in found] == [None, after.tables]
    assert found[1].order is after.tables.orders["order"]
    return torch.equal(cp.attention(*inputs, before, group), first)


def test_plans_that_layers_have_run_with_may_be_loaded():
    assert run_ranks(run_before_and_after_loading, 2, kind="threads") == [True, True]


def test_equal_plans_do_the_same_whatever_was_loaded():
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 2, align_documents=4)
    kinds = [KINDS["p2p"], KINDS["gdn"]]
    plans, others = (cp.BatchPlan(slots.layout([30, 10]), kinds) for _ in range(2))
    made = plans.plans
    slots.load(plans, 0, CPU)
    assert made == others.plans
    for plan, loaded in zip(made, plans.plans, strict=True):
        assert plan.tables is None
        assert loaded != plan
        assert pickle.loads(pickle.dumps(loaded)) == plan  # tables stay behind
    plain = cp.Layout.zigzag(plans.layout.packing, 2)
    assert plain != plans.layout
    assert np.array_equal(plain.order, plans.layout.order)
    assert pickle.loads(pickle.dumps(plans.layout)) == plans.layout


def test_layers_read_the_tables_that_were_loaded(monkeypatch):
    """All of them, of every pack from the same memory: a graph replays what it was captured with."""
    slots, group, read = cp.GraphTables(CAPACITY, DOCUMENTS, 1), ThreadGroup.create(1)[0], []
    own = CallTables.tiles
    monkeypatch.setattr(CallTables, "tiles", lambda *given: read.append(own(*given)) or read[-1])
    kinds, addresses = [KINDS["a2a"], KINDS["gdn"]], set()
    for lengths in packs_drawn(3):
        plans = cp.BatchPlan(slots.layout(lengths), kinds)
        slots.load(plans, 0, CPU)
        inputs = [torch.ones(CAPACITY, heads, 16, requires_grad=True) for heads in (6, 2, 2)]
        cp.attention(*inputs, plans.plan(kinds[0]), group).sum().backward()
        calls = device_calls(read[-1], CPU)
        assert read[-2:] == plans.plan(kinds[0]).tables.stage_tiles * 2  # in forward and in backward
        layer = LinearOnRank(plans.plan(kinds[1]), group, "auto", "qkv", torch.ones(CAPACITY, 160))
        linear = layer.kernels[0].call
        chunks, heads = linear.tables["chunks"], conv._piece_heads(linear, 4)
        assert chunks.slots.tolist() == fixed_chunks(plans.layout.packing)["slots"].tolist()
        assert [table.tolist() for table in heads] == [
            table.tolist() for table in conv.fixed_heads(plans.layout.packing, 4).values()
        ]
        tables = [calls.hidden[0], calls.calls[0].queries.offsets, chunks.slots, chunks.begins, *heads]
        addresses.add(tuple(table.data_ptr() for table in tables))
    assert len(addresses) == 1


def addresses_of_flows(group, scheme):
    """Returns, for each pack, the addresses and sizes of the tables that moved keys and their gradients."""
    slots, found = cp.GraphTables(CAPACITY, DOCUMENTS, group.size, align_documents=2 * group.size), []
    for lengths in packs_drawn(3):
        plans = cp.BatchPlan(slots.layout(lengths), [KINDS[scheme]])
        slots.load(plans, group.rank, CPU)
        (plan,) = plans.plans
        inputs = [torch.ones(CAPACITY // group.size, heads, 16, requires_grad=True) for heads in (6, 2, 2)]
        cp.attention(*inputs, plan, group).sum().backward()
        assert not any("bound program" in key for key in vars(plan.attend)["_memo"])
        forward, backward = (each for key, each in vars(plan.tables)["_memo"].items() if "bound program" in key)
        picked = [bound.picked for bound in (*forward, *backward) if bound.picked is not None]
        pieces = [index for bound in backward for index, _, _ in bound.pieces]
        found.append([(index.data_ptr(), len(index)) for index in (*picked, *pieces)])
    return found


@pytest.mark.parametrize("scheme", ["all_gather", "exact"])
def test_keys_are_moved_by_the_tables_that_were_loaded(scheme):
    for first, *others in run_ranks(addresses_of_flows, 3, scheme, kind="threads"):
        assert len(first) > 4
        assert others == [first] * len(others)


def test_chunkwise_layers_read_where_documents_begin_from_the_tables_that_were_loaded():
    slots, kind, found = cp.GraphTables(40, 3, 2, layout="contiguous"), CONTIGUOUS["gdn chunkwise"], []
    for lengths in ([18, 9, 2], [21], [20, 5]):
        plans = cp.BatchPlan(slots.layout(lengths), [kind])
        slots.load(plans, 1, CPU)
        layer = LinearOnRank(plans.plan(kind), StillGroup(1, 2), "auto", "qkv", torch.ones(20, 160))
        tables = layer.kernels[0].call.tables
        history = tables["history"]
        if lengths[0] == 18:  # two tokens of the second document are on the first rank
            assert history["before"].tolist() == [True, False, False]
            assert tables["chunks"].begins.tolist() == [False, True, True, False]
            assert not history["beyond"].any()
        elif lengths[0] == 21:
            assert not history["before"].any()
            assert history["beyond"].tolist() == [False, True, True]
        else:
            assert history["before"].all()
            assert tables["chunks"].begins[0]
        read = [*history.values(), *tables["heads"], tables["chunks"].begins, tables["chunks"].slots]
        found.append((layer.steps, [x.data_ptr() for x in read]))
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kernel": "reference"}, "kernel: got 'reference'; allowed: one that serves graphs"),
     ({"cache": True}, "cache: got 'a cache'; allowed: None for a chunkwise layer over GraphTables")],
)  # fmt: skip
def test_rejects_what_chunkwise_layers_over_tables_do_not_have(options, message):
    slots, kind = cp.GraphTables(40, 3, 1, layout="contiguous"), CONTIGUOUS["gdn chunkwise"]
    plans = cp.BatchPlan(slots.layout([30]), [kind])
    slots.load(plans, 0, CPU)
    cache = cp.Cache(1).layer(0) if options.pop("cache", False) else None
    given = {"kernel": "auto", "name": "qkv", "values": torch.ones(40, 160), "cache": cache} | options
    rejects(message, LinearOnRank, plans.plan(kind), None, **given)


def test_rows_that_fill_up_have_no_label_and_no_weight():
    slots = cp.GraphTables(12, 3, 1, align_documents=4)
    layout = slots.layout([3, 2])
    batch = cp.shard_batch(np.array([5, 6, 7, 8, 9]), layout, slots=A2A, into=slots)
    assert batch.tokens.tolist() == [5, 6, 7, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert batch.labels.tolist() == [6, 7, -100, -100, 9, *[-100] * 7]
    assert batch.loss_weights.tolist() == [1, 1, 0, 0, 1, *[0] * 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.num_tokens == 3
    given = cp.shard_batch(
        np.arange(5), layout, slots=A2A, into=slots, labels=np.array([1, -1, 3, 4, 5]),
        loss_mask=np.array([1, 1, 0, 2, 1]),
    )  # fmt: skip
    assert given.labels.tolist() == [1, -100, -100, -100, 4, 5, *[-100] * 6]
    assert given.loss_weights.tolist() == [1, 0, 0, 0, 2, 1, *[0] * 6]


def test_tables_and_rows_stay_where_they_are_and_documents_are_filled_up():
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 1)
    seen = set()
    for lengths in packs_drawn(4):
        batch = cp.shard_batch(np.arange(sum(lengths)), slots.layout(lengths), slots=[KINDS["gdn"]], into=slots)
        seen.add((batch.tokens.data_ptr(), batch.loss_weights.data_ptr()))
    assert len(seen) == 1
    slots = cp.GraphTables(64, 4, 2, align_documents=4, longest=30)
    assert slots.longest == 32
    assert slots.layout([30]).packing.lengths.tolist() == [32, 0, 0, 0, 32]


@pytest.mark.parametrize("scheme", ["a2a", "p2p", "all_gather", "exact"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_fixed_calls_see_what_bands_see(size, scheme):
    """Pair by pair, and with tables of one shape for every pack."""
    slots, shapes = cp.GraphTables(CAPACITY, DOCUMENTS, size, align_documents=2 * size), {}
    one = KINDS[scheme].plan(slots.layout([CAPACITY])).attend
    for lengths in packs_drawn(8):
        plan = KINDS[scheme].plan(slots.layout(lengths))
        without = cp.BatchPlan(plan.layout, [KINDS[scheme]], lengths=[*plan.packing.lengths[:-1], 0]).plans[0]
        for rank in range(plan.attend.num_kv_ranks):
            for stage in plan.attend.stages:
                tiles = plan.attend.tiles(rank, stage)
                expected = without.attend.tiles(rank, without.attend.stages[stage.number])
                queries, keys = len(tiles.q_tokens), len(tiles.k_tokens)
                pattern = Pattern.from_bands(one.tiles(rank, one.stages[stage.number]).bands, queries, keys)
                fixed = FixedCalls(tiles.bands, pattern, len(lengths), DOCUMENTS, queries, keys)
                tables = fixed.tables()
                shape = {name: (table.shape, table.dtype) for name, table in tables.items()}
                assert shapes.setdefault((rank, stage.number), shape) == shape
                on_cpu = fixed.on_device({name: torch.from_numpy(table) for name, table in tables.items()})
                seen = pairs_of_device(on_cpu, queries, keys)
                assert np.array_equal(seen, pairs(segment_calls(expected.bands), queries, keys))
                assert np.array_equal(on_cpu.hidden[0].numpy() & seen.any(1), np.zeros(queries, dtype=bool))


def pairs(calls, num_queries, num_keys):
    """`[queries, keys]` how often each pair is seen."""
    found = np.zeros((num_queries, num_keys), dtype=int)
    for call in calls:
        add_pairs(found, call.window, call.queries.rows, call.queries.offsets, call.keys.rows, call.keys.offsets)
    return found


def pairs_of_device(calls, num_queries, num_keys):
    found = np.zeros((num_queries, num_keys), dtype=int)
    for call in calls.calls:
        rows = [
            np.arange(size)[axis.rows] if isinstance(axis.rows, slice) else axis.rows.numpy()
            for axis, size in ((call.queries, num_queries), (call.keys, num_keys))
        ]
        add_pairs(found, call.window, rows[0], call.queries.offsets.numpy(), rows[1], call.keys.offsets.numpy())
        assert np.diff(call.queries.offsets.numpy()).max() <= call.queries.longest
        assert np.diff(call.keys.offsets.numpy()).max() <= call.keys.longest
    return found


def add_pairs(found, window, q_rows, q_offsets, k_rows, k_offsets):
    left, right = window
    for q0, q1, k0, k1 in zip(q_offsets[:-1], q_offsets[1:], k_offsets[:-1], k_offsets[1:], strict=True):
        shift = (k1 - k0) - (q1 - q0)
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                if (left < 0 or j >= i + shift - left) and (right < 0 or j <= i + shift + right):
                    found[q_rows[q0 + i], k_rows[k0 + j]] += 1


def test_bands_must_be_those_of_each_document():
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 1)
    plan = KINDS["a2a"].plan(slots.layout([30, 10]))
    tiles = plan.attend.tiles(0, plan.attend.stages[0])
    tokens = (plan.packing.documents_of, tiles.q_tokens, tiles.k_tokens)
    sizes = (2, DOCUMENTS, CAPACITY, CAPACITY)
    calls = FixedCalls(tiles.bands, Pattern.from_bands(tiles.bands[:1], CAPACITY, CAPACITY), *sizes)
    calls.check_documents(tiles.bands, np.array([0, 1]), *tokens)
    rejects("not each document's own", calls.check_documents, tiles.bands, np.array([1, 0]), *tokens)
    longer = FixedCalls(tiles.bands, Pattern.from_bands(tiles.bands[1:2], CAPACITY, CAPACITY), *sizes)
    rejects("sees more in some documents", longer.check_documents, tiles.bands, np.array([0, 1]), *tokens)


def test_rejects_packs_that_ranks_exchange_in_another_way(monkeypatch):
    """Fillings give all packs the same messages: where they did not, ranks would wait for rows that none sends."""
    slots, kinds = cp.GraphTables(32, 3, 2, align_documents=4), [attention(scheme="exact")]
    slots.load(cp.BatchPlan(slots.layout([5, 9]), kinds), 0, CPU)
    counts = Fetch.split_counts
    monkeypatch.setattr(Fetch, "split_counts", property(lambda self: SplitCounts(counts.fget(self).counts + 1)))
    plans = cp.BatchPlan(slots.layout([7]), kinds)
    rejects("plans: got .messages .*name the scheme of each layer", slots.load, plans, 0, CPU)


def test_rejects_packs_that_do_not_fit():
    rejects("capacity_tokens: got 32", cp.GraphTables, 32, 2, 2, align_documents=5)
    slots = cp.GraphTables(32, 3, 2, align_documents=4, longest=16)
    for lengths, message in {
        (1, 2, 3, 4): "lengths: got '4 documents'; allowed: at most 3 documents",
        (9, 9, 9): r"documents of 36 tokens, filled up to multiples of 4'; allowed: at most 32 tokens",
        (17,): "a document of 20 tokens",
        (0, 0): "at least one token",
    }.items():
        with pytest.raises(cp.ArgumentError, match=message) as caught:
            slots.layout(list(lengths))
        if lengths != (0, 0):
            assert "capture the step again" in str(caught.value)


def loaded(kind, of=None, **options):
    """Returns tables with a pack's, which is laid out as `of` says; by default by themselves."""
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 2, **options)
    slots.load(cp.BatchPlan(slots.layout([30, 10]) if of is None else of, [kind]), 0, CPU)
    return slots


def attention(mask="causal", scheme="a2a", **options):
    return cp.AttentionSpec(4, 2, 16, 16, mask=mask, scheme=scheme, **options)


ONLY = "allowed: causal, full or"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (attention(scheme="tiled"), {}, "scheme: got 'tiled'"),
        (attention(scheme="all_gather", topk=2, indexer=(2, 4)), {}, "slots: got 'attention to chosen keys'"),
        (attention(scheme="all_gather"), {}, r"align_documents: got 1; allowed: a multiple of 2 \* cp_size = 4"),
        *((attention("window:5,0", scheme), {"align_documents": 4}, f"mask: got 'window:5,0'; {ONLY} a window")
          for scheme in ("p2p", "all_gather", "exact")),
        (cp.LinearSpec("gdn", 4, 2, 16, 16, mode="redistribute", hidden_size=64), {},
         "mode: got 'redistribute'; allowed: headwise, chunkwise, said by name"),
        (cp.LinearSpec("gdn", 4, 2, 16, 16, mode="chunkwise"), {},
         "layout: got 'zigzag'; allowed: contiguous with chunkwise"),
        (attention(scheme="p2p"), {}, r"align_documents: got 1; allowed: a multiple of 2 \* cp_size = 4"),
        (attention(scheme="p2p"), {"layout": "contiguous", "align_documents": 4},
         "layout: got 'contiguous'; allowed: zigzag with p2p"),
        (attention(scheme="exact"), {"layout": "contiguous", "align_documents": 4},
         "layout: got 'contiguous'; allowed: zigzag with exact"),
        (attention("first:2+window:4,0"), {}, r"mask: got 'first:2\+window:4,0'"),
        (attention("prefix:2"), {}, f"mask: got 'prefix:2'; {ONLY}"),
        # The documents are long enough to have the same bands.
        (attention("prefix:2"), {"align_documents": 4}, "mask: got 'prefix:2'; allowed: causal"),
        (attention("chunk:4"), {}, "mask: got 'chunk:4'"),
        # Filling would move their blocks.
        *((attention(mask), {"align_documents": step}, f"mask: got '{mask}'; {ONLY} a window")
          for mask in ("strided", "global_local", "star", "streaming", "star:2") for step in (1, 4)),
        (attention(cp.Mask.causal(cp.Packing([30, 11]))), {}, r"mask: got .*a function, .* for each batch\."),
        (attention(lambda packing: 5), {}, "mask: got 'a function that returns 5'; allowed: a mask over the same pack"),
        (attention(lambda packing: cp.Mask.from_slices(packing, [])), {}, f"mask: got 'slices of 40 tokens'; {ONLY}"),
        (attention(lambda packing: cp.Mask.chunk(packing, 4)), {}, f"mask: got 'chunk:4'; {ONLY} a window"),
        (attention(lambda packing: cp.Mask.named(packing, "star")), {}, f"mask: got 'star of 40 tokens'; {ONLY}"),
    ],
)  # fmt: skip
def test_rejects_by_name_what_no_graph_serves(kind, options, message):
    rejects(message, loaded, kind, **options)


def test_rejects_layouts_of_other_packs():
    rejects(r"layout\(lengths\) of these GraphTables", loaded, A2A[0], cp.Layout.zigzag(cp.Packing([CAPACITY]), 2))
    slots = loaded(A2A[0])
    with pytest.raises(cp.ArgumentError, match="device: got 'rank 1 on cpu'; allowed: rank 0 on cpu"):
        slots.load(cp.BatchPlan(slots.layout([5]), A2A), 1, CPU)
    rejects("of type cpu or cuda", loaded(A2A[0]).load, cp.BatchPlan(slots.layout([5]), A2A), 0, torch.device("meta"))
    shorter = cp.GraphTables(CAPACITY, DOCUMENTS, 2, longest=50)
    with pytest.raises(cp.ArgumentError, match="of these GraphTables"):
        shorter.load(cp.BatchPlan(cp.GraphTables(CAPACITY, DOCUMENTS, 2).layout([60]), A2A), 0, CPU)
    other = cp.GraphTables(60, 6, 2)
    rejects(f"filled up to {CAPACITY} tokens", loaded, A2A[0], other.layout([5]))


@pytest.mark.parametrize(
    "kinds",
    [[], [KINDS["gdn"]], [KINDS["window"]], [*A2A, KINDS["gdn"]], [cp.AttentionSpec(6, 2, 8, 8, scheme="a2a")],
     [cp.AttentionSpec(6, 3, 16, 16, scheme="a2a")], [cp.AttentionSpec(6, 2, 16, 16, scheme="a2a", codec="fp8")]],
    ids=str,
)  # fmt: skip
def test_rejects_other_layers_than_were_loaded_before(kinds):
    slots = loaded(A2A[0])
    rejects(r"slots: got .*as were loaded before", slots.load, cp.BatchPlan(slots.layout([5]), kinds), 0, CPU)


def test_rejects_tables_that_do_not_go_with_a_batch():
    slots = loaded(A2A[0])
    rejects("a table 'rows x'", slots.load, cp.BatchPlan(slots.layout([5]), A2A), 0, CPU, {"x": np.zeros(3)})
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 1)
    with pytest.raises(cp.ArgumentError, match="into: got None; allowed: the GraphTables that made the layout"):
        cp.shard_batch(np.arange(5), slots.layout([5]), slots=A2A)


def test_rejects_plans_that_were_not_loaded():
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 2)
    rejects("which have none", slots.check_loaded, cp.BatchPlan(slots.layout([5]), A2A))


def test_rejects_plans_whose_memory_has_another_pack():
    """Their tokens would be the other's, and their tables, also where nobody has their batch any more."""
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 1)
    kinds = [KINDS["a2a"], KINDS["gdn"]]

    def plans_of(lengths):
        batch = cp.shard_batch(np.arange(sum(lengths)), slots.layout(lengths), slots=kinds, into=slots)
        return [batch.plan(kind) for kind in kinds]

    (attention, linear), _ = plans_of([5, 9]), plans_of([7])
    with pytest.raises(cp.ArgumentError, match=r"plan: .*right before its step"):
        cp.attention(*(torch.ones(CAPACITY, heads, 16) for heads in (6, 2, 2)), attention)
    with pytest.raises(cp.ArgumentError, match=r"plan: .*need separate slots"):
        cp.gated_delta_net(
            torch.ones(CAPACITY, 160), torch.ones(CAPACITY, 6), torch.ones(CAPACITY, 6), linear,
            conv=torch.ones(160, 4), A_log=torch.ones(6), dt_bias=torch.ones(6),
        )  # fmt: skip


@pytest.mark.parametrize("lengths", [[1], [20, 20, 20, 4], [3]])
@pytest.mark.parametrize(("kind", "more"), [("window", {"longest": 20}), ("p2p", {"longest": 4, "align_documents": 4})])
def test_what_fills_up_may_be_longer_than_any_document(kind, more, lengths):
    slots = cp.GraphTables(64, 4, 2, **more)
    lengths = [min(length, slots.longest) for length in lengths]
    plans = cp.BatchPlan(slots.layout(lengths), [KINDS[kind]])
    slots.load(plans, 0, CPU)
    slots.check_loaded(plans)
    assert plans.layout.packing.lengths[-1] == 64 - sum(
        -(-length // slots.align_documents) * slots.align_documents for length in lengths
    )


def test_rejects_a_backward_whose_pack_was_loaded_over():
    group = ThreadGroup.create(1)[0]
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 1, layout="zigzag")
    batch = cp.shard_batch(np.arange(5), slots.layout([5]), slots=A2A, into=slots)
    plan = batch.plan(A2A[0])
    comm = Communicator(group, tables=plan.tables)
    comm.start_all_gather(torch.zeros(3), torch.zeros(3)).wait()
    cp.shard_batch(np.arange(7), slots.layout([7]), slots=A2A, into=slots)
    rejects(r"plan: .*right before its step", comm.start_all_gather, torch.zeros(3), torch.zeros(3))


def test_plans_that_nobody_has_any_more_are_freed():
    slots, gone = cp.GraphTables(CAPACITY, DOCUMENTS, 1), []
    gc.collect()
    gc.disable()
    try:
        for lengths in ([5], [7, 3]):
            batch = cp.shard_batch(np.arange(sum(lengths)), slots.layout(lengths), slots=A2A, into=slots)
            gone.append(weakref.ref(batch.plan(A2A[0])))
        del batch
        assert [plan() for plan in gone] == [None, None]
    finally:
        gc.enable()


def test_a_mask_is_a_name_a_mask_or_a_function_of_the_pack():
    """All make the same tables, and each pack may have its own `Mask`; a function has the documents without filling."""
    made = []

    def window(packing):
        made.append(packing.lengths.tolist())
        return cp.Mask.window(packing, 3, 0)

    def tables(lengths, mask, slots):
        spec = cp.AttentionSpec(4, 2, 16, 16, mask=mask, scheme="a2a")
        plans = cp.BatchPlan(slots.layout(lengths), [spec])
        slots.load(plans, 0, CPU)
        return plans.plans[0].mask, {name: view.tolist() for name, view in slots._memory.views.items()}

    named, own, by_function = (cp.GraphTables(CAPACITY, DOCUMENTS, 2, align_documents=4) for _ in range(3))
    for lengths in ([30, 10], [5], [7, 1, 9]):
        mask, expected = tables(lengths, "window:4", named)
        for given, slots in ((cp.Mask.window(cp.Packing(lengths), 3, 0), own), (window, by_function)):
            assert tables(lengths, given, slots) == (mask, expected)
    assert made == [[30, 10], [5], [7, 1, 9]]
    two = [cp.AttentionSpec(4, 2, 16, 16, mask=mask, scheme="a2a") for mask in ("window:4", window)]
    named.load(cp.BatchPlan(named.layout([5]), two[1:]), 0, CPU)  # the same kind, given otherwise
    both = cp.GraphTables(CAPACITY, DOCUMENTS, 2)
    both.load(cp.BatchPlan(both.layout([5]), two), 0, CPU)
    both.load(cp.BatchPlan(both.layout([9, 4]), two), 0, CPU)


def test_outside_of_the_graph_any_mask_is_one_of_the_documents_without_filling():
    slots, lengths = cp.GraphTables(16, 3, 2, align_documents=4), [4, 5]
    packing = cp.Packing(lengths)
    layout, slices = slots.layout(lengths), cp.Mask.from_slices(packing, [(0, 4, 0, 2, "full"), (4, 9, 4, 9, "full")])
    for mask in (slices, lambda packing: slices, cp.Mask.named(packing, "strided")):
        found = cp.AttentionSpec(2, 2, 4, 4, mask=mask, scheme="a2a").plan(layout).mask
        own = mask if isinstance(mask, cp.Mask) else slices
        assert found.packing == layout.packing
        assert found.seen.tolist() == [*own.seen.tolist(), *[0] * 7]


def causal_or_window(packing):
    return cp.Mask.causal(packing) if packing.num_documents == 1 else cp.Mask.window(packing, 3, 0)


def test_rejects_a_function_whose_masks_differ_from_pack_to_pack():
    spec = cp.AttentionSpec(4, 2, 16, 16, mask=causal_or_window, scheme="a2a")
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, 2)
    slots.load(cp.BatchPlan(slots.layout([5]), [spec]), 0, CPU)
    plans = cp.BatchPlan(slots.layout([7, 3]), [spec])
    rejects(r"slots: got .*window:3,0.*mask='causal'.*as were loaded before", slots.load, plans, 0, CPU)
