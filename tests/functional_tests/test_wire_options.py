"""Transports and head chunks under every layer: the same bits, and buffers that are used again."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange import buffers as buffers_module
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.predict.memory import buffer_bytes
from megatron_cp.softmax.attention import projected_attention
from megatron_cp.softmax.kernels import cpu
from megatron_cp.testing.counters import Counters
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned
from tests.counting_group import CountingGroup, Diary, bytes_of_layer
from tests.covering import covering
from tests.refusals import rejects

LENGTHS = (7, 1, 130, 64, 2, 31)
DOUBLE = torch.float64
TRANSPORTS = ("collective", "pairwise", "hierarchical", "shared_memory")


def run_poisoned(group: RankGroup, case: Case) -> dict[str, torch.Tensor]:
    with poisoned():
        return run_layer(group, case)


def bits(case: Case, **how: object) -> list[dict[str, torch.Tensor]]:
    """Returns each rank's output and gradients."""
    return run_ranks(run_poisoned, case.cp, replace(case, **how))


def assert_same(actual: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for rank, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), f"{name} of rank {rank}"


@pytest.fixture
def group_by_group(monkeypatch):
    """torch's operator called for one key/value head and its queries at a time, on copies that lie alike.

    Chunks hand it other strides, with which MKL rounds in another way on CPUs that have AVX-512: the last bits of the
    operator's own results are the machine's.
    """

    def one_by_one(operator, tensors, keys):
        def call(*args, **options):
            groups = args[keys].shape[1]
            split = [[part.contiguous() for part in x.chunk(groups, 1)] for x in args[:tensors]]
            parts = [operator(*group, *args[tensors:], **options) for group in zip(*split, strict=True)]
            return tuple(torch.cat(results, 1) for results in zip(*parts, strict=True))

        return call

    monkeypatch.setattr(cpu, "cpu_flash", one_by_one(cpu.cpu_flash, tensors=3, keys=1))
    monkeypatch.setattr(cpu, "cpu_flash_backward", one_by_one(cpu.cpu_flash_backward, tensors=6, keys=2))


CASES = (
    Case("attention", 3, LENGTHS, scheme="a2a", heads=12, groups=6),
    Case("attention", 4, LENGTHS, scheme="a2a", layout="contiguous", heads=14, groups=14, learned_sink=True),
    Case("attention", 5, LENGTHS, scheme="a2a", layout="random", heads=20, groups=10, num_hosts=3),
    Case("attention", 8, LENGTHS, scheme="a2a", heads=16, groups=16, dtype=torch.bfloat16, num_hosts=3),
    Case("attention", 4, LENGTHS, scheme="a2a+p2p", heads=16, groups=8, layout="balanced"),
    Case("attention", 6, LENGTHS, scheme="a2a+p2p", heads=12, groups=6, ulysses_degree=3, num_hosts=4),
    # Key heads that several ranks share, of which each is in a chunk of another number.
    Case("attention", 5, LENGTHS, scheme="a2a", heads=9, groups=9, mask="window:20,0"),
    Case("gdn", 3, LENGTHS, scheme="headwise", heads=12, groups=6),
    Case("gdn", 5, LENGTHS, scheme="headwise", heads=10, groups=10, layout="contiguous"),
    Case("kda", 4, LENGTHS, scheme="headwise", heads=16, groups=8, num_hosts=3),
    Case("mamba", 3, LENGTHS, scheme="headwise", heads=12, groups=6, layout="random"),
    Case("conv1d", 3, LENGTHS, scheme="headwise"),
    Case("attention", 5, LENGTHS, scheme="a2a", heads=10, groups=10, head_dim=32, codec="fp8_e5m2"),
    Case("mamba", 3, LENGTHS, scheme="headwise", heads=12, groups=6, head_dim=32, codec="int8", layout="random"),
)


def features(case):
    """Returns the features that a selection of cases should cover."""
    return case.layer, case.scheme, case.num_hosts, case.learned_sink, case.codec


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("group_by_group")
@pytest.mark.few(of=features)
def test_every_transport_and_chunk_count_gives_the_bits_of_one_collective(case):
    """A transport has one of the counts, another with each case."""
    expected = bits(case)
    most = case.plan().partition.most_groups
    assert most > 1
    counts = sorted({1, 2, min(3, most)})
    first = CASES.index(case)
    for number, transport in enumerate(TRANSPORTS):
        assert_same(bits(case, transport=transport, head_chunks=counts[(first + number) % len(counts)]), expected)


SCHEMES = (
    Case("attention", 3, LENGTHS, scheme="all_gather"),
    Case("attention", 5, LENGTHS, scheme="exact", layout="random", num_hosts=3),
    Case("attention", 5, LENGTHS, scheme="p2p"),
    Case("attention", 4, LENGTHS, scheme="a2a+all_gather", layout="contiguous"),
    Case("gdn", 5, LENGTHS, scheme="chunkwise", layout="balanced", num_hosts=3),
    Case("kda", 3, LENGTHS, scheme="chunkwise"),
    Case("mamba", 4, LENGTHS, scheme="chunkwise", layout="contiguous", num_hosts=3),
    Case("conv1d", 5, LENGTHS, scheme="chunkwise", layout="random"),
    Case("gdn", 5, LENGTHS, scheme="redistribute", hidden_size=64, num_hosts=3),
    Case("mamba", 3, LENGTHS, scheme="redistribute", layout="random", hidden_size=64),
)


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
@pytest.mark.parametrize("case", SCHEMES, ids=str)
@pytest.mark.few
def test_every_schedule_goes_by_every_transport(case, transport):
    assert_same(bits(case, transport=transport), bits(case))


@pytest.mark.any_cpu
@pytest.mark.usefixtures("group_by_group")
def test_heads_that_ranks_share_are_summed_in_the_order_of_ranks_in_any_chunks():
    """Sums are in float32, where another order gives other bits."""
    case = Case("attention", 7, LENGTHS, scheme="a2a", heads=18, groups=9, dtype=torch.float32, head_dim=8)
    shared = Case("attention", 5, LENGTHS, scheme="a2a", heads=32, groups=2, dtype=torch.float32)
    assert shared.plan().partition.replicated
    for one in (case, shared):
        for chunks in range(2, one.plan().partition.most_groups + 1):
            assert_same(bits(one, head_chunks=chunks), bits(one))


@pytest.mark.parametrize(
    ("layer", "codec", "chunks"), covering(("attention", "gdn", "mamba"), ("none", "fp8"), (1, 2, 3))
)
@pytest.mark.few
def test_the_plan_says_what_is_started_and_sent(layer, codec, chunks):
    case = Case(
        layer, 3, LENGTHS, scheme="a2a" if layer == "attention" else "headwise", heads=18, groups=9, head_dim=32,
        dtype=torch.bfloat16, codec=codec, head_chunks=chunks,
    )  # fmt: skip
    plan = case.plan()

    def rank_main(inner: RankGroup) -> Counter[str]:
        compare_calls(inner, False)  # what a plan costs once is not part of it
        group = CountingGroup(inner)
        run_layer(group, case)
        return group.calls

    expected = [plan.bytes_sent(2, forward=way) for way in (True, False)]
    assert run_ranks(bytes_of_layer, 3, case) == list(zip(*expected, strict=True))
    assert run_ranks(rank_main, 3) == [Counter(all_to_all=4 * chunks)] * 3
    assert plan.collectives(forward=True) == plan.collectives(forward=False) == 2 * chunks


def test_projections_of_other_heads_are_rejected_and_fp8_sends_its_share():
    # 132 bytes for each head of 128 features, and not 256.
    case = Case("attention", 4, (512,), scheme="a2a", heads=16, groups=16, head_dim=128, value_head_dim=128,
                dtype=torch.bfloat16)  # fmt: skip
    plain, coded = (replace(case, codec=codec).plan().bytes_sent(2, forward=True) for codec in ("none", "fp8"))
    assert max(plain) / max(coded) == 256 / 132
    ring = replace(case, scheme="p2p")
    rings = [replace(ring, codec=codec).plan() for codec in ("none", "fp8")]
    forward, backward = ([sum(plan.bytes_sent(2, forward=way)) for plan in rings] for way in (True, False))
    assert forward[0] / forward[1] == 256 / 132
    assert backward[0] - backward[1] == forward[0] - forward[1]  # keys are sent again, their gradients as they are
    exact = replace(ring, scheme="exact", codec="fp8").plan()
    for way in (True, False):
        assert exact.attend.bytes_needed(2, forward=way).tolist() == exact.attend.bytes_sent(2, forward=way).tolist()
    plan = Case("attention", 1, LENGTHS, scheme="a2a").plan()
    with pytest.raises(ArgumentError, match=r"^k: got "):
        projected_attention(lambda *_: (torch.ones(235, 6, 16), torch.ones(235, 3, 16), torch.ones(235, 2, 16)), plan)


def test_chunks_arrive_while_others_are_computed():
    """The order of steps: all leave at once, then each is awaited, computed and sent back; backward mirrors it."""
    case = Case("attention", 2, LENGTHS, scheme="a2a", heads=6, groups=6, head_chunks=3)

    def rank_main(inner: RankGroup) -> list[str]:
        diary = Diary(inner)
        run_layer(diary, case)
        return diary.events

    forward = ["start"] * 3 + ["wait", "start"] * 3 + ["wait"] * 3
    assert run_ranks(rank_main, 2) == [forward * 2] * 2


def test_projections_happen_while_chunks_travel():
    case = Case("attention", 2, LENGTHS, scheme="a2a", heads=6, groups=6, head_chunks=3)
    plan = case.plan()

    def rank_main(inner: RankGroup) -> list[str]:
        diary = Diary(inner)
        x = torch.ones(int(plan.layout.row_counts[inner.rank]), 1, 16, dtype=torch.float64)

        def project(heads: list[int], groups: list[int]) -> tuple[torch.Tensor, ...]:
            diary.events.append("project")
            return tuple(x.expand(-1, len(numbers), -1) for numbers in (heads, groups, groups))

        projected_attention(project, plan, diary)
        return diary.events

    assert run_ranks(rank_main, 2) == [["project", "start"] * 3 + ["wait", "start"] * 3 + ["wait"] * 3] * 2


@pytest.mark.parametrize("made", [None, (torch.ones(235, 6, 16),) * 2, torch.ones(3, 235, 6, 16)], ids=type)
def test_rejects_a_projection_that_is_not_queries_keys_and_values(made):
    plan = Case("attention", 1, LENGTHS, scheme="a2a").plan()
    rejects(r"^project: got .*one that returns q, k and v", projected_attention, lambda *_: made, plan)


def test_ragged_packs_of_one_size_share_buffers():
    """Documents change from step to step and tokens a rank hardly: so do not the buffers."""
    lengths = [(100, 40, 3), (57, 61, 25), (143,), (1, 140, 2), (80, 63)]
    cases = [Case("attention", 4, each, scheme="a2a", heads=8, groups=4) for each in lengths]

    def rank_main(group: RankGroup) -> list[int]:
        allocations = []
        for case in cases:
            run_layer(group, case)
            allocations.append(group.buffers.allocations)
        return allocations

    for allocations in run_ranks(rank_main, 4):
        assert allocations[-1] == allocations[0]


def test_a_long_step_forgets_no_buffer():
    """A ring over many ranks in many layers takes thousands between two losses."""
    buffers, cpu = Buffers(), torch.device("cpu")
    for _ in range(3):
        buffers.release(buffers.acquire(1_000_000, cpu))
        for _ in range(20_000):
            buffers.release(buffers.acquire(100, cpu))
    assert buffers.allocations == 2


def test_packs_of_all_sizes_need_few_times_what_the_largest_needs():
    random = torch.Generator().manual_seed(0)
    totals = torch.randint(400, 1600, (40,), generator=random).tolist()
    cases = [
        Case("attention", 2, (100,) * (total // 100) + (total % 100,), scheme="a2a", heads=4, groups=2, kernel="cpu")
        for total in totals
    ]

    def rank_main(group: RankGroup) -> float:
        for case in cases:
            run_layer(group, case)
        return group.buffers.size / max(buffer_bytes(case.plan(), group.rank, 8) for case in cases)

    assert all(ratio < 3.5 for ratio in run_ranks(rank_main, 2))


def test_buffers_that_nobody_wants_are_let_go(monkeypatch):
    monkeypatch.setattr(buffers_module, "_FORGOTTEN", 2000)
    buffers, cpu = Buffers(), torch.device("cpu")
    large = buffers.acquire(1_000_000, cpu)
    buffers.release(large)
    for _ in range(5000):
        buffers.release(buffers.acquire(100, cpu))
    assert buffers.size < 10_000
    assert buffers.allocations == 2


def test_buffers_that_a_failed_step_took_are_let_go(monkeypatch):
    monkeypatch.setattr(buffers_module, "_FORGOTTEN", 2000)
    buffers, cpu = Buffers(), torch.device("cpu")
    lost, held = buffers.acquire(1_000_000, cpu), buffers.acquire(1_000, cpu)
    held.fill_(7)
    del lost
    for _ in range(5000):
        buffers.release(buffers.acquire(100, cpu))
    assert buffers.size < 1_000
    # Whoever had one after all keeps it: nobody else gets its memory, now or when it is given back.
    buffers.release(held)
    others = [buffers.acquire(1_000, cpu).fill_(8) for _ in range(3)]
    assert bool((held == 7).all())
    assert len({x.data_ptr() for x in (held, *others)}) == 4


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 5000), st.integers(0, 10)), max_size=60)


@given(STEPS)
def test_a_second_step_like_the_first_takes_the_same_buffers(step):
    """Whatever the sizes, and whatever is given back when."""
    buffers, cpu = Buffers(), torch.device("cpu")

    def run() -> list[int]:
        under_way, addresses = [], []
        for takes, size, which in step:
            if takes or not under_way:
                under_way.append(buffers.acquire(size, cpu))
                addresses.append(under_way[-1].untyped_storage().data_ptr())
            else:
                buffers.release(under_way.pop(which % len(under_way)))
        buffers.release(*under_way)
        return addresses

    first, made = run(), buffers.allocations
    assert run() == first
    assert buffers.allocations == made


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7)], ids=str)
def test_a_buffer_can_be_taken_like_a_tensor(shape, dtype):
    buffers, like = Buffers(), torch.empty(3, dtype=dtype)
    taken, wide = buffers.acquire_like(like, *shape), buffers.acquire_like(like, *shape, dtype=torch.float64)
    assert (taken.shape, taken.dtype, taken.is_contiguous()) == (shape, dtype, True)
    assert (wide.shape, wide.dtype) == (shape, torch.float64)
    assert taken.untyped_storage().data_ptr() % 64 == 0 != wide.untyped_storage().data_ptr()
    buffers.release(taken.view(-1), wide)
    buffers.acquire_like(like, *shape)
    assert buffers.allocations == 2


def test_chunks_copy_no_more_than_the_whole():
    """Every activation once a side and direction: columns cut, rows gathered."""
    case = Case("attention", 2, (33, 31), scheme="a2a", heads=4, groups=4, head_dim=64, value_head_dim=64,
                dtype=torch.float32)  # fmt: skip

    def rank_main(group: RankGroup, head_chunks: int | None) -> int:
        with Counters() as counters:
            run_layer(counters.watch(group), replace(case, head_chunks=head_chunks))
        return counters.copied["copy_"] + counters.copied["index_select"]

    whole, halves = (run_ranks(rank_main, 2, chunks) for chunks in (None, 2))
    one = 64 * 2 * 64 * 4  # bytes of q, k, v or out on a rank
    assert whole == halves
    assert all(16 * one <= copied <= 25 * one for copied in whole)  # and what the draw and the shards take
