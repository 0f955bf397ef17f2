"""Flows by themselves: whose rows a rank then has, in which order, and how many it sends for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.exchange.sections import partition_heads
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan import attention as plan_attention_steps
from megatron_cp.plan.attention import SCHEDULES, Attend
from megatron_cp.plan.flows import ByHost, Fetch, PassOn, Return
from megatron_cp.plan.payloads import Payload, RowSizes
from megatron_cp.planner.layouts import layout_by_name
from tests.fuzz_cases import LAYOUTS, layout_named
from tests.mask_oracle import causal, pairs_of, window

RAGGED = Packing([5, 1, 9, 0, 4])


@st.composite
def fetches(draw):
    """A layout, and for each rank some ranges of the stream that rise and do not touch."""
    size = draw(st.integers(1, 4))
    layout = layout_by_name("random", RAGGED, size, seed=draw(st.integers(0, 9)))
    wanted = []
    for _ in range(size):
        edges = sorted(draw(st.sets(st.integers(0, RAGGED.total), max_size=6)))
        edges = np.array(edges[: len(edges) // 2 * 2], dtype=np.int64).reshape(-1, 2)
        wanted.append((edges[:, 0], edges[:, 1]))
    return Fetch(layout, wanted.__getitem__, "some rows"), wanted


@given(fetches())
def test_a_fetch_brings_the_wanted_rows_in_stream_order(drawn):
    """Rows are moved as the executor moves them, with numbers that say which token each is."""
    fetch, wanted = drawn
    size, layout = fetch.size, fetch.layout
    sent = []
    for rank in range(size):
        tables = fetch.tables(rank)
        rows = layout.tokens(rank)[tables.send_rows]
        sent.append(np.split(rows, np.cumsum(tables.send_counts)[:-1]))
    for rank in range(size):
        tables = fetch.tables(rank)
        received = np.concatenate([sent[other][rank] for other in range(size)])
        ordered = received if tables.order is None else received[tables.order]
        expected = [token for start, end in zip(*wanted[rank], strict=True) for token in range(start, end)]
        assert ordered.tolist() == tables.tokens.tolist() == expected
        back = ordered if tables.inverse is None else ordered[tables.inverse]
        assert back.tolist() == received.tolist()


@given(fetches(), st.data())
def test_two_hops_bring_the_wanted_rows_with_one_copy_to_a_host(drawn, data):
    direct, wanted = drawn
    size = direct.size
    numbers = st.lists(st.integers(0, 2), min_size=size, max_size=size).filter(
        lambda x: set(x) == set(range(max(x) + 1))
    )
    hosts = tuple(data.draw(numbers))
    flow = ByHost(direct, hosts)

    def moved(fetch, held):
        """Moves rows from rank to rank, and returns those of each in the order of arrival, and where they came from."""
        tables = [fetch.tables(rank) for rank in range(size)]
        sent = [
            np.split(held[rank][each.send_rows], np.cumsum(each.send_counts)[:-1]) for rank, each in enumerate(tables)
        ]
        for rank, each in enumerate(tables):
            assert each.recv_counts.tolist() == [len(sent[other][rank]) for other in range(size)]
            assert fetch.split_counts.received_by(rank) == each.recv_counts.tolist()
            assert fetch.arrive_in_order[rank] == fetch.arrives_in_order(rank) == (each.order is None)
        return [np.concatenate([sent[other][rank] for other in range(size)]) for rank in range(size)], sent

    first, sent = moved(flow.first, [direct.layout.tokens(rank) for rank in range(size)])
    for host in set(hosts):
        crossed = [sent[a][b] for a in range(size) for b in range(size) if hosts[a] != host == hosts[b]]
        crossed = np.concatenate(crossed) if crossed else np.zeros(0, dtype=int)
        owners = direct.layout.located(np.arange(RAGGED.total))[0]
        tokens = {t for r in range(size) if hosts[r] == host for t in direct.tokens(r) if hosts[owners[t]] != host}
        assert sorted(crossed) == sorted(tokens)  # each once
    second, sent = moved(flow, first)
    assert not any(sent[a][b].size for a in range(size) for b in range(size) if hosts[a] != hosts[b])
    for rank in range(size):
        order = flow.tables(rank).order
        ordered = second[rank] if order is None else second[rank][order]
        assert ordered.tolist() == [t for start, end in zip(*wanted[rank], strict=True) for t in range(start, end)]


@given(fetches())
def test_a_fetch_counts_what_its_tables_hold(drawn):
    fetch, _ = drawn
    back = Return(fetch)
    for rank in range(fetch.size):
        tables, local = fetch.tables(rank), fetch.split_counts.counts[rank, rank]
        assert fetch.split_counts.sent_by(rank) == tables.send_counts.tolist()
        assert fetch.split_counts.received_by(rank) == tables.recv_counts.tolist()
        assert fetch.arrives_in_order(rank) == (tables.order is None) == (tables.inverse is None)
        assert fetch.arrive_in_order[rank] == fetch.arrives_in_order(rank)
        assert fetch.rows_sent(rank) == len(tables.send_rows) - local
        assert back.rows_sent(rank) == len(tables.tokens) - local
        ordered = None if tables.order is None else len(tables.tokens)
        assert fetch.message_rows(rank) == (len(tables.send_rows), len(tables.tokens), ordered)
        assert back.message_rows(rank) == (ordered, len(tables.send_rows), None)
    for flow in (fetch, back):
        assert flow.rows_sent_by_ranks().tolist() == [flow.rows_sent(rank) for rank in range(fetch.size)]
    assert sum(fetch.rows_sent(rank) for rank in range(fetch.size)) == sum(
        back.rows_sent(rank) for rank in range(fetch.size)
    )


def test_equal_shares_are_as_long_as_the_longest():
    layout = Layout.from_fragments(Packing([10]), [[(4, 10)], [(0, 3)], [(3, 4)]])  # 6, 3 and 1 rows
    everything = np.array([0]), np.array([10])
    fetch = Fetch(layout, lambda _: everything, "all", equal_shares=True)
    assert [fetch.rows_sent(rank) for rank in range(3)] == [12, 12, 12]
    assert [Return(fetch).rows_sent(rank) for rank in range(3)] == [4, 7, 9]
    assert fetch.message_rows(1) == (6, 18, 10)
    # Shares stand one after the other, 6 rows each; the stream begins with rank 1's.
    assert fetch.shares().tolist() == [6, 7, 8, 12, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("packing", [RAGGED, Packing([4]), Packing([16])], ids=str)
@pytest.mark.few(together=2)
def test_an_all_gather_brings_the_stream_in_order(packing, size, name):
    """Shares are moved as the executor moves them: as they stand on their rank, filled up with rows of no token."""
    everything = np.array([0]), np.array([packing.total])
    for seed in range(8):
        layout = layout_named(name, packing, size, seed=seed)
        fetch = Fetch(layout, lambda _: everything, "all", equal_shares=True)
        filled = [[-1] * (fetch.longest - count) for count in layout.token_counts]
        received = np.concatenate([[*layout.tokens(rank), *filled[rank]] for rank in range(size)])
        for rank in range(size):
            rows = fetch.message_rows(rank)
            assert (rows.sent, rows.received) == (fetch.longest, len(received))
            assert rows.ordered in (None, packing.total)
            assert fetch.puts_in_order[rank] == (rows.ordered is not None)
            at_hand = received if rows.ordered is None else received[fetch.shares()]
            assert at_hand.tolist() == list(range(packing.total))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_ring_brings_every_block_once_and_its_gradient_home(size):
    layout = layout_by_name("random", RAGGED, size, seed=3)
    counts = layout.token_counts.tolist()
    for rank in range(size):
        met = [PassOn(layout, hops).source(rank) for hops in range(size)]
        assert sorted(met) == list(range(size))
        assert met[0] == PassOn(layout, size).source(rank) == rank
        for hops in range(1, size):
            flow = PassOn(layout, hops)
            assert flow.rows_sent_by_ranks()[rank] == flow.rows_sent(rank)
            # What a rank sends is what the next one then has.
            assert flow.rows_sent(rank) == flow.rows_received((rank + 1) % size) == counts[flow.source(rank + 1)]
            assert flow.tokens(rank).tolist() == layout.tokens(flow.source(rank)).tolist()


def test_sums_travel_in_at_least_four_bytes():
    sizes = [RowSizes(3, 2, 5, item) for item in (1, 2, 4, 8)]
    assert [Payload.KEY_GRADIENTS.row_bytes(each, 4, 2) for each in sizes] == [10, 20, 40, 80]
    assert [Payload.KEY_GRADIENT_SUMS.row_bytes(each, 4, 2) for each in sizes] == [40, 40, 40, 80]


MASKS = {"causal": (Mask.causal(RAGGED), causal(RAGGED)), "window": (Mask.window(RAGGED, 2, 1), window(RAGGED, 2, 1))}


@given(
    schedule=st.sampled_from(sorted({*SCHEDULES} - {"tiled"})), mask=st.sampled_from(sorted(MASKS)),
    size=st.integers(1, 4), seed=st.integers(0, 9), chunks=st.integers(1, 2),
)  # fmt: skip
def test_the_stages_of_every_schedule_meet_each_visible_pair_once(schedule, mask, size, seed, chunks):
    made, pairs = MASKS[mask]
    layout = layout_by_name("random", RAGGED, size, seed=seed)
    step = Attend(made, layout, layout, partition_heads(4, 2, 1), schedule, 8, 8, 1 if schedule == "p2p" else chunks)
    met = np.zeros_like(pairs, dtype=np.int64)
    for rank in range(size):
        for stage in step.stages:
            tiles = step.tiles(rank, stage)
            seen = pairs_of(tiles.bands, len(tiles.q_tokens), len(tiles.k_tokens))
            np.add.at(met, np.ix_(tiles.q_tokens, tiles.k_tokens), seen)
    assert np.array_equal(met, pairs)
    # Forward and backward are sums over the flows.
    row = 2 * (8 + 8)
    for rank in range(size):
        for forward in (True, False):
            transfers = step.transfers(forward=forward)
            assert step.collectives(forward=forward) == step.head_chunks * len(transfers)
            sent = sum(flow.rows_sent(rank) * row * (2 if kind.is_summed else 1) * 2 for kind, flow in transfers)
            assert step.bytes_sent(2, forward=forward)[rank] == sent
        if schedule == "exact":
            assert step.bytes_sent(2, forward=True)[rank] == step.bytes_needed(2, forward=True)[rank]


@pytest.mark.parametrize(("schedule", "forward", "backward"), [("p2p", 3, 7), ("all_gather", 1, 2), ("exact", 1, 2)])
def test_flows_of_every_schedule(schedule, forward, backward):
    layout = Layout.contiguous(RAGGED, 4)
    step = Attend(Mask.causal(RAGGED), layout, layout, partition_heads(4, 2, 1), schedule, 8, 8)
    assert len(step.transfers(forward=True)) == forward
    assert len(step.transfers(forward=False)) == backward
    alone = Layout.contiguous(RAGGED, 1)
    one = Attend(Mask.causal(RAGGED), alone, alone, partition_heads(4, 2, 1), schedule, 8, 8)
    assert one.transfers(forward=False) == []
    assert one.bytes_sent(2, forward=False).tolist() == [0]


def test_chunks_know_which_heads_of_the_layer_they_are():
    layout, partition = Layout.contiguous(RAGGED, 1), partition_heads(12, 6, 2)
    step = Attend(Mask.causal(RAGGED), layout, layout, partition, "exact", 8, 8, 3)
    assert [chunk.first_head for chunk in step.chunks(0)] == [0, 2, 4]
    assert [chunk.first_head for chunk in step.chunks(1)] == [6, 8, 10]
    assert [chunk.heads for chunk in step.chunks(1)] == [slice(0, 2), slice(2, 4), slice(4, 6)]


@pytest.mark.parametrize("size", [1, 3])
def test_bands_of_a_ring_are_the_same_where_they_are_too_many_to_keep(size, monkeypatch):
    layout = layout_by_name("random", RAGGED, size, seed=3)

    def bands():
        step = Attend(Mask.causal(RAGGED), layout, layout, partition_heads(4, 2, 1), "p2p", 8, 8)
        return [step.bands(rank, stage).tolist() for rank in range(size) for stage in step.stages]

    kept = bands()
    monkeypatch.setattr(plan_attention_steps, "_MOST_BANDS", 0)
    monkeypatch.setattr(plan_attention_steps, "_MOST_FRAGMENTS", 1)  # and ranks one by one
    assert bands() == kept
