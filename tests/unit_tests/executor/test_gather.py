"""`gather`: every rank gets the packed stream, and each rank's rows get the gradient that the stated loss means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_cp.executor.gather import gather
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from tests.refusals import rejects

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

RAGGED = Packing([7, 1, 13, 0, 2])
LAYOUTS = {
    "contiguous, cp 3": Layout.contiguous(RAGGED, 3),
    "zigzag, cp 5": Layout.zigzag(RAGGED, 5),
    "zigzag, cp 3, align 4": Layout.zigzag(RAGGED, 3, align=4),
    "one rank": Layout.contiguous(RAGGED, 1),
    "one rank, shuffled and padded": Layout.from_fragments(RAGGED, [[(9, 23), (0, 9)]], align=4),
    "empty ranks": Layout.from_fragments(RAGGED, [[], [(5, 23), (1, 5)], [], [(0, 1)]]),
    "padded empty ranks": Layout.from_fragments(RAGGED, [[], [(5, 23), (0, 5)], []], align=2),
    "fewer tokens than ranks": Layout.zigzag(Packing([1, 1]), 5),
    "no tokens": Layout.contiguous(Packing([0]), 2),
}
TRAILING = [(), (3,), (2, 3)]
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


@pytest.fixture(params=LAYOUTS)
def layout(request) -> Layout:
    return LAYOUTS[request.param]


def whole_numbers(layout: Layout, trailing: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """So small that no sum over the ranks rounds, in either type."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (layout.packing.total, *trailing), generator=draw).to(dtype)


def rows_of(full: Tensor, layout: Layout, rank: int, pad_value: float) -> Tensor:
    pad = full.new_full((int(layout.pad_rows[rank]), *full.shape[1:]), pad_value)
    return torch.cat([full[torch.tensor(layout.tokens(rank))], pad])


def gathered(
    group: RankGroup, layout: Layout, trailing: tuple[int, ...], dtype: torch.dtype, same_loss: bool
) -> tuple[Tensor, Tensor]:
    """A rank's copy of the stream, and its gradient where rank r's copy has gradient number r; pad rows are NaN."""
    local = rows_of(whole_numbers(layout, trailing, dtype, 100), layout, group.rank, float("nan")).requires_grad_()
    full = gather(local, layout, group, same_loss=same_loss)
    full.backward(whole_numbers(layout, trailing, dtype, 0 if same_loss else group.rank))
    return full.detach(), local.grad


def check(answers: list[tuple[Tensor, Tensor]], layout: Layout, trailing, dtype, same_loss: bool) -> None:
    stream = whole_numbers(layout, trailing, dtype, 100)
    losses = [0] if same_loss else range(layout.cp_size)
    gradient = sum(whole_numbers(layout, trailing, dtype, seed) for seed in losses)
    for rank, (full, got) in enumerate(answers):
        assert full.dtype == got.dtype == dtype
        assert torch.equal(full, stream)
        assert torch.equal(got, rows_of(gradient, layout, rank, 0.0))


@pytest.mark.parametrize("same_loss", [False, True], ids=["sum of losses", "same loss"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
@pytest.mark.few(together=2)
def test_gather_and_its_gradient(layout: Layout, trailing: tuple[int, ...], dtype: torch.dtype, same_loss: bool):
    answers = run_ranks(gathered, layout.cp_size, layout, trailing, dtype, same_loss)
    check(answers, layout, trailing, dtype, same_loss)


def test_gradients_in_bfloat16_are_summed_in_fp32():
    layout = Layout.contiguous(Packing([4, 3]), 5)
    gradients = [256.0, 1.0, 1.0, 1.0, 1.0]  # summed one by one in bfloat16: 256

    def rank_main(group: RankGroup) -> Tensor:
        local = torch.zeros(int(layout.row_counts[group.rank]), dtype=torch.bfloat16, requires_grad=True)
        gather(local, layout, group).backward(torch.full((7,), gradients[group.rank], dtype=torch.bfloat16))
        return local.grad

    assert all((gradient == 260).all() for gradient in run_ranks(rank_main, 5))


def test_same_loss_sends_nothing_backward():
    layout = LAYOUTS["contiguous, cp 3"]

    def rank_main(group: RankGroup) -> Tensor:
        local = torch.ones(int(layout.row_counts[group.rank]), requires_grad=True)
        full = gather(local, layout, group, same_loss=True)
        group.start_all_to_all = group.start_messages = None  # on which every other call of a ThreadGroup is built
        full.sum().backward()
        return local.grad

    assert all((gradient == 1).all() for gradient in run_ranks(rank_main, 3))


def test_an_expanded_gradient_and_no_group():
    layout = LAYOUTS["zigzag, cp 5"]

    def rank_main(group: RankGroup) -> Tensor:
        local = torch.ones(int(layout.row_counts[group.rank]), 2, requires_grad=True)
        gather(local, layout, group).sum().backward()
        return local.grad

    assert all((gradient == 5).all() for gradient in run_ranks(rank_main, 5))
    local = torch.arange(23.0)
    assert torch.equal(gather(local, LAYOUTS["one rank"], None), local)


@pytest.mark.parametrize(
    ("rows", "group", "argument"),
    [(9, ThreadGroup.create(3)[0], "local"), (7, ThreadGroup.create(2)[0], "group"), (7, None, "group")],
)
def test_rejects_wrong_rows_and_groups(rows: int, group: RankGroup | None, argument: str):
    rejects(f"^{argument}: got ", gather, torch.zeros(rows), LAYOUTS["contiguous, cp 3"], group)
