"""`even_packs`: packs of a global batch that take equally long."""

import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.data import GlobalBatch, best_fit, even_packs
from megatron_cp.data.even import balance_packs, greedy
from megatron_cp.planner.predict.pack_cost import PackCost
from tests.counts import calls_of
from tests.limits import limit
from tests.refusals import rejects

ragged = settings(max_examples=150)
COST = PackCost(0, 1, 1 / 32768)
COSTS = [COST, PackCost(5e-3, 2e-7, 0), PackCost(0, 0, 1), PackCost(0, 0, 0), PackCost(1, 1e-300, 1e305)]


@st.composite
def batches(draw):
    budget = draw(st.integers(1, 40) | st.sampled_from([97, 4096]))
    lengths = draw(st.lists(st.integers(1, budget) | st.sampled_from([1, budget]), min_size=1, max_size=60))
    ranks = draw(st.integers(1, min(4, len(lengths))))
    needed = -(-len(best_fit(lengths, budget)) // ranks)
    most = len(lengths) // ranks
    return lengths, budget, ranks, draw(st.integers(needed, max(needed, min(most, needed + 2))))


def heavy_tail(count, most, seed=0):
    return np.minimum(np.random.default_rng(seed).lognormal(7, 1.5, count).astype(int) + 1, most)


def times_of(packs, lengths, cost):
    return [cost.of([lengths[index] for index in pack]) for pack in packs]


@ragged
@given(batch=batches(), cost=st.sampled_from(COSTS), barrier=st.booleans())
def test_every_document_is_in_one_pack_of_at_most_the_budget(batch, cost, barrier):
    lengths, budget, ranks, microbatches = batch
    if ranks * microbatches > len(lengths):
        return
    packs = even_packs(lengths, budget=budget, cost=cost, ranks=ranks, microbatches=microbatches, barrier=barrier)
    assert len(packs) == ranks * microbatches
    assert sorted(itertools.chain.from_iterable(packs)) == list(range(len(lengths)))
    assert all(pack and pack == sorted(pack) for pack in packs)
    assert max(sum(lengths[index] for index in pack) for pack in packs) <= budget


@ragged
@given(batch=batches(), cost=st.sampled_from(COSTS[:3]), barrier=st.booleans())
def test_a_step_is_never_longer_than_that_of_the_packs_given(batch, cost, barrier):
    lengths, budget, ranks, _ = batch
    packs = best_fit(lengths, budget)
    packs = packs[: len(packs) // ranks * ranks]
    if not packs:
        return
    kept = sorted(itertools.chain.from_iterable(packs))
    lengths = [lengths[index] for index in kept]
    packs = [[kept.index(index) for index in pack] for pack in packs]
    kind = GlobalBatch(ranks, len(packs) // ranks, cost, barrier)
    found = balance_packs(np.array(lengths), packs, budget, kind)
    before, after = (kind.step_time(times_of(each, lengths, cost)) for each in (packs, found))
    assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("room", [1.0, 1.1])
@pytest.mark.parametrize("cost", COSTS[:3], ids=["both", "tokens", "pairs"])
def test_steps_are_close_to_their_ideal(cost, room, barrier):
    """The documents have no giant, whose work is more than a rank's share."""
    lengths = heavy_tail(600, 8192)
    kind = {"cost": cost, "ranks": 4, "barrier": barrier}
    packs = even_packs(lengths, budget=int(16384 * room), **kind, microbatches=-(-int(lengths.sum()) // (16384 * 4)))
    batch = GlobalBatch(microbatches=len(packs) // 4, **kind)
    ideal = sum(times_of(packs, lengths, cost)) / 4
    assert batch.step_time(times_of(packs, lengths, cost)) / ideal < (1.01 if not barrier else 1.06)


def test_full_packs_exchange_documents_too():
    """Every pack is full, so that no document can move alone: tokens stay, and the work of the long ones is shared."""
    lengths = [8, 8, 8, 8] + [1] * 32
    packs = [[0, 1], [2, 3], list(range(4, 20)), list(range(20, 36))]
    kind = GlobalBatch(4, 1, PackCost(0, 1, 1))
    found = balance_packs(np.array(lengths), packs, 16, kind)
    assert [sorted(lengths[index] for index in pack) for pack in found] == [[1] * 8 + [8]] * 4


def least(lengths, budget, kind):
    """The shortest step of all assignments."""
    best = np.inf
    for chosen in itertools.product(range(kind.packs), repeat=len(lengths)):
        packs = [[index for index, pack in enumerate(chosen) if pack == number] for number in range(kind.packs)]
        if all(packs) and max(sum(lengths[index] for index in pack) for pack in packs) <= budget:
            best = min(best, kind.step_time(times_of(packs, lengths, kind.cost)))
    return best


@pytest.mark.parametrize("barrier", [False, True])
def test_small_batches_are_close_to_the_best_of_all_assignments_and_as_a_rule_equal(barrier):
    random, over = np.random.default_rng(0), []
    kind = GlobalBatch(2, 2, PackCost(0, 1, 0.1), barrier)
    for _ in range(12):
        lengths = random.integers(1, 13, random.integers(4, 7)).tolist()
        packs = even_packs(lengths, budget=24, cost=kind.cost, ranks=2, microbatches=2, barrier=barrier)
        over.append(kind.step_time(times_of(packs, lengths, kind.cost)) / least(lengths, 24, kind))
    assert np.max(over) < 1.35
    assert np.mean(over) < 1.02


@pytest.mark.parametrize("seed", range(2))
def test_each_kind_of_step_gets_its_own_packs(seed):
    lengths = heavy_tail(800, 65536, seed)
    batch = {"cost": COST, "ranks": 8, "microbatches": 4}
    kinds = [GlobalBatch(**batch, barrier=barrier) for barrier in (False, True)]
    budget = int(lengths.sum() / 32 * 1.1)
    found = [even_packs(lengths, budget=budget, **batch, barrier=kind.barrier) for kind in kinds]
    once, always = ([kind.step_time(times_of(packs, lengths, COST)) for packs in found] for kind in kinds)
    assert once[0] < 0.995 * once[1]
    assert always[1] < 0.95 * always[0]


def test_packs_are_as_many_as_best_fit_needs_unless_told():
    lengths = heavy_tail(200, 4096)
    needed = len(best_fit(lengths, 16384))
    for ranks in (1, 3):
        assert len(even_packs(lengths, budget=16384, cost=COST, ranks=ranks)) == -(-needed // ranks) * ranks
    assert len(even_packs(lengths, budget=16384, cost=COST, ranks=3, microbatches=needed)) == 3 * needed
    packs = even_packs([1] * 6, budget=6, cost=COST, ranks=2, microbatches=3)
    assert sorted(packs) == [[0], [1], [2], [3], [4], [5]]
    assert greedy(np.array([9, 1]), np.array([9.0, 1.0]), 10, GlobalBatch(1, 1, COST)) is not None
    # One rank has the long one alone, so that the second of its packs would stay empty.
    lengths = np.array([9, 1, 1, 1])
    assert greedy(lengths, lengths.astype(float), 10, GlobalBatch(2, 2, COST)) is None
    assert all(even_packs(lengths, budget=10, cost=COST, ranks=2, microbatches=2))


def test_the_shortest_documents_go_where_there_is_room():
    """Work alone would leave no room for the last of them."""
    lengths = np.array([6, 5, 5, 4, 4, 3, 3])
    packs = even_packs(lengths, budget=10, cost=PackCost(0, 0, 1), ranks=3)
    assert sorted(lengths[pack].sum() for pack in packs) == [10, 10, 10]


def test_the_unit_of_a_cost_cancels():
    lengths = heavy_tail(300, 16384)
    packs = even_packs(lengths, budget=16384, cost=COST, ranks=4)
    assert packs == even_packs(lengths, budget=16384, cost=PackCost(7, 2.0**40, 2.0**25), ranks=4)


def test_all_ranks_assign_alike():
    """Another process, with other hashes, finds the same."""
    code = (
        "import numpy as np; from megatron_cp.data import even_packs\n"
        "from megatron_cp.planner.predict.pack_cost import PackCost\n"
        "lengths = np.random.default_rng(1).integers(1, 900, 400)\n"
        "print(even_packs(lengths, budget=4096, cost=PackCost(0, 1, 1e-3), ranks=3))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=limit(60)
    ).stdout
    lengths = np.random.default_rng(1).integers(1, 900, 400)
    assert said == f"{even_packs(lengths, budget=4096, cost=PackCost(0, 1, 1e-3), ranks=3)}\n"


def test_takes_any_list_of_integers_and_any_budget():
    lengths = [3, 5, 2, 6, 4]
    expected = even_packs(lengths, budget=10, cost=COST, ranks=2)
    for given_ in (tuple(lengths), np.array(lengths, np.uint8), np.array(lengths, np.int32), iter(lengths)):
        assert even_packs(given_, budget=np.int64(10), cost=COST, ranks=np.int32(2)) == expected
    assert even_packs([3, 1, 4], budget=2**63 - 1, cost=COST) == [[0, 1, 2]]
    assert even_packs([2**50, 2**50], budget=2**63 - 1, cost=COST, ranks=2) == [[0], [1]]


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("documents", [2048, 8192])  # 15 and 34 calls a document
def test_calls_grow_no_faster_than_documents(documents, barrier):
    lengths = heavy_tail(documents, 131072)
    kind = {"ranks": 8, "microbatches": len(best_fit(lengths, 131072)) // 8 + 1, "barrier": barrier}
    assert calls_of(lambda: even_packs(lengths, budget=131072, cost=COST, **kind)) < 50 * documents


def test_a_step_takes_what_its_heaviest_rank_takes():
    times = [4, 2, 3, 1, 5, 1]
    assert GlobalBatch(2, 3, COST).step_time(times) == 4 + 3 + 5
    assert GlobalBatch(3, 2, COST).step_time(times) == 7
    assert GlobalBatch(3, 2, COST, barrier=True).step_time(times) == 4 + 5
    assert GlobalBatch(3, 2, COST).packs == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lengths": []}, "lengths: got []; allowed: a flat list of at least one integer"),
        ({"lengths": [[1]]}, "lengths: got [[1]]; allowed: a flat list"),
        ({"lengths": [1.0]}, "lengths: got [1.0]; allowed: a flat list"),
        ({"lengths": [0, 1]}, "lengths: got [0, 1]; allowed: integers from 1 to the budget of 10"),
        ({"lengths": [11]}, "lengths: got [11]; allowed: integers from 1 to the budget of 10. Cut longer"),
        ({"lengths": [2**60, 1], "budget": 2**61}, "at most 1152921504606846976 tokens in a global batch"),
        ({"lengths": "31"}, "lengths: got '31'; allowed: a list"),
        ({"budget": 0}, "budget: got 0; allowed: an integer of at least 1"),
        ({"budget": 9.5}, "budget: got 9.5; allowed: an integer"),
        ({"ranks": 0}, "ranks: got 0; allowed: an integer of at least 1"),
        ({"ranks": 6}, "ranks: got 6; allowed: at most one pack for each of 5 documents. These are 6 packs."),
        ({"microbatches": 0}, "microbatches: got 0; allowed: an integer of at least 1"),
        ({"microbatches": 1}, "microbatches: got 1; allowed: at least 2 for 5 documents in packs of 10 tokens over 1"),
        ({"microbatches": 6}, "microbatches: got 6; allowed: at most one pack for each of 5 documents"),
        ({"cost": None}, "cost: got None; allowed: a PackCost"),
        ({"cost": 3.0}, "cost: got 3.0; allowed: a PackCost"),
        ({"barrier": 1}, "barrier: got 1; allowed: True or False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_rejects_bad_arguments(options, says):
    arguments = {"lengths": [3, 5, 2, 6, 4], "budget": 10, "cost": COST, "ranks": 1} | options
    rejects(re.escape(says), even_packs, arguments.pop("lengths"), **arguments)


@pytest.mark.parametrize("times", [[1], [1, 2, 3, float("nan")], [[1, 2], [3, 4]], None])
def test_rejects_times_of_other_packs(times):
    rejects(r"times: got .* allowed: a finite number for each of 4 packs", GlobalBatch(2, 2, COST).step_time, times)
