"""`group_batches` and `group_microbatches`: every document once, ranks that have room, and times that add up.

The durations are not below a bound that no schedule beats, and near it.
"""

import itertools

import numpy as np
import pytest

from megatron_cp.data import group_batches, group_microbatches
from megatron_cp.errors import ArgumentError
from megatron_cp.planner.predict.pack_cost import PackCost

COST = PackCost(0.0, 1.0, 0.01)


def document_seconds(length, size, exchange):
    work = COST.token * length + COST.pair * length**2
    return (work + exchange * length * (size - 1) / size) / size


def played(batches, ranks, barriers=0):
    """Returns when the last rank is through; each takes the batches in order, and all of a batch run together.

    Args:
        barriers: the number of microbatches, behind each of which all ranks wait for each other.
    """
    free, left = [0.0] * ranks, ranks
    for batch in batches:
        ends = max(free[rank] for rank in batch.ranks) + batch.seconds
        for rank in batch.ranks:
            free[rank] = ends
        left -= len(batch.ranks)
        if barriers and left == 0:
            free, left = [max(free)] * ranks, ranks
    return max(free)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("exchange", [0.0, 0.5, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_schedules_hold_what_they_say(ranks, exchange, seed):
    random = np.random.default_rng(seed)
    lengths = [min(int(n) + 1, ranks * 64) for n in random.lognormal(3.0, 1.2, 40)]
    found = group_batches(lengths, ranks=ranks, tokens_per_rank=64, cost=COST, exchange=exchange)
    assert sorted(document for batch in found.batches for document in batch.documents) == list(range(40))
    for batch in found.batches:
        assert batch.ranks.step == 1
        assert 0 <= batch.ranks[0] <= batch.ranks[-1] < ranks
        assert sum(lengths[document] for document in batch.documents) <= 64 * len(batch.ranks)
        expected = sum(document_seconds(lengths[one], len(batch.ranks), exchange) for one in batch.documents)
        assert batch.seconds == pytest.approx(expected, rel=1e-12)
    assert found.seconds == pytest.approx(played(found.batches, ranks), rel=1e-12)
    assert found.ideal <= found.bound * (1 + 1e-12) <= found.seconds * (1 + 1e-9)
    for rank in range(ranks):
        assert found.of_rank(rank) == [batch for batch in found.batches if rank in batch.ranks]
    assert group_batches(lengths, ranks=ranks, tokens_per_rank=64, cost=COST, exchange=exchange) == found


@pytest.mark.parametrize(("ranks", "smallest"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 1), (5, 2), (8, 3), (12, 12)])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("exchange", [0.0, 40.0])
@pytest.mark.parametrize("barrier", [False, True])
def test_every_rank_runs_as_many_microbatches(ranks, smallest, microbatches, exchange, barrier):
    random = np.random.default_rng(ranks)
    lengths = [min(int(n) + 1, ranks * 64) for n in random.lognormal(3.0, 1.2, 40)]
    budget = -(-sum(lengths) // (ranks * microbatches)) + 64
    options = {"ranks": ranks, "tokens_per_rank": budget, "cost": COST, "exchange": exchange}
    options |= {"microbatches": microbatches, "smallest": smallest, "barrier": barrier}
    found = group_microbatches(lengths, **options)
    assert sorted(document for batch in found.batches for document in batch.documents) == list(range(40))
    for rank in range(ranks):
        assert len(found.of_rank(rank)) == microbatches
    place = 0
    for batch in found.batches:
        assert batch.ranks == range(place, place + len(batch.ranks))  # side by side, a microbatch after another
        place = batch.ranks.stop % ranks
        assert len(batch.ranks) >= smallest
        assert batch.documents
        assert sum(lengths[document] for document in batch.documents) <= budget * len(batch.ranks)
        expected = sum(document_seconds(lengths[one], len(batch.ranks), exchange) for one in batch.documents)
        assert batch.seconds == pytest.approx(expected, rel=1e-12)
    assert found.seconds == pytest.approx(played(found.batches, ranks, microbatches if barrier else 0), rel=1e-12)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert group_microbatches(lengths, **options) == found


def test_microbatches_of_many_documents_come_within_a_tenth_of_the_bound():
    random = np.random.default_rng(7)
    for ranks in (3, 8, 12, 16):
        lengths = [min(int(n) + 1, 500) for n in random.lognormal(4.0, 1.0, 400)]
        found = group_microbatches(
            lengths, ranks=ranks, microbatches=4, tokens_per_rank=sum(lengths) // ranks // 2, cost=COST, exchange=0.2,
            barrier=True,
        )  # fmt: skip
        assert found.seconds <= 1.1 * found.bound


def test_few_documents_leave_no_rank_out():
    found = group_microbatches([5, 4, 3], ranks=7, microbatches=3, tokens_per_rank=9, cost=COST)
    assert [len(found.of_rank(rank)) for rank in range(7)] == [3] * 7


def shortest(lengths, ranks, tokens_per_rank, exchange):
    """Returns the shortest time over all sizes and places of groups in all orders."""
    places = [
        [(first, size) for size in range(-(-length // tokens_per_rank), ranks + 1) for first in range(ranks - size + 1)]
        for length in lengths
    ]
    best = float("inf")
    for order in itertools.permutations(range(len(lengths))):
        for chosen in itertools.product(*places):
            free = [0.0] * ranks
            for one in order:
                first, size = chosen[one]
                ends = max(free[first : first + size]) + document_seconds(lengths[one], size, exchange)
                free[first : first + size] = [ends] * size
            best = min(best, max(free))
    return best


@pytest.mark.parametrize("exchange", [0.0, 1.0, 9.0])
@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_beats_the_bound_and_ours_is_near_the_shortest(exchange, seed):
    lengths = np.random.default_rng(seed).integers(1, 24, 4).tolist()
    found = group_batches(lengths, ranks=3, tokens_per_rank=8, cost=COST, exchange=exchange)
    best = shortest(lengths, 3, 8, exchange)
    assert found.bound <= best * (1 + 1e-12) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= 1.5 * best


def test_many_documents_come_within_two_hundredths_of_the_bound():
    random = np.random.default_rng(7)
    for ranks in (8, 12, 16):
        lengths = [min(int(n) + 1, 500) for n in random.lognormal(4.0, 1.0, 400)]
        found = group_batches(lengths, ranks=ranks, tokens_per_rank=256, cost=COST, exchange=0.2)
        assert found.seconds <= 1.02 * found.bound


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"lengths": []}, "lengths"), ({"lengths": [3, 0]}, "lengths"), ({"lengths": [17]}, "lengths"),
        ({"lengths": [1.5]}, "lengths"), ({"lengths": "31"}, "lengths"), ({"lengths": [[1, 2]]}, "lengths"),
        ({"ranks": 0}, "ranks"), ({"ranks": True}, "ranks"), ({"tokens_per_rank": 2.0}, "tokens_per_rank"),
        ({"cost": None}, "cost"), ({"cost": 3.0}, "cost"), ({"exchange": -1.0}, "exchange"),
        ({"exchange": float("nan")}, "exchange"), ({"exchange": None}, "exchange"),
    ],
)  # fmt: skip
def test_rejects_what_is_no_batch(changes, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}: got "):
        group_batches(**{"lengths": [3, 9], "ranks": 2, "tokens_per_rank": 8, "cost": COST} | changes)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"microbatches": 0}, "microbatches"), ({"microbatches": 4}, "microbatches"), ({"smallest": 3}, "smallest"),
        ({"smallest": 0}, "smallest"), ({"lengths": [17, 1, 1]}, "lengths"), ({"ranks": 0}, "ranks"),
        ({"lengths": [16, 9, 8]}, "tokens_per_rank"),
    ],
)  # fmt: skip
def test_rejects_what_no_microbatches_hold(changes, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}: got "):
        group_microbatches(
            **{"lengths": [3, 9, 1], "ranks": 2, "microbatches": 2, "tokens_per_rank": 8, "cost": COST} | changes
        )
