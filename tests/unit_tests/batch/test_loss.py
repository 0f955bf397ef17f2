"""`token_loss`: one mean on every rank, and each rank's own share of its gradient."""

import math

import pytest
import torch

import megatron_cp as cp
from megatron_cp.errors import CallMismatchError, PeerError
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import RankError, run_ranks
from tests.refusals import rejects

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

PACKING = cp.Packing([5, 1, 0, 8, 2])
WEIGHTS = torch.tensor([1, 0.5, 0, 2, 0, 0, -1, 1, 1, 0, 0, 0.25, 1, 0, 1, 0], dtype=torch.float64)
NAN = float("nan")


def drawn(dtype=torch.float64):
    return torch.randn(PACKING.total, dtype=dtype, generator=torch.Generator().manual_seed(3))


def on_rank(group, layout, losses, weights, options):
    """The loss of one rank and the gradient of its losses; pad rows have a loss of NaN, and weight 0."""
    own = layout.shard(losses, group.rank, pad_value=NAN).requires_grad_()
    loss = cp.token_loss(own, layout.shard(weights, group.rank), group, **options)
    loss.backward()
    return loss.detach(), own.grad


def on_ranks(layout, losses, weights=WEIGHTS, **options):
    """The loss of every rank, and the gradient of the stream of losses; asserts that pad rows have one of 0."""
    losses, gradients = zip(*run_ranks(on_rank, layout.cp_size, layout, losses, weights, options), strict=True)
    for gradient, count in zip(gradients, layout.token_counts.tolist(), strict=True):
        assert not gradient[count:].any()
    return losses, layout.unshard(gradients)


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5, 20])
def test_every_rank_has_the_mean_and_its_share_of_the_gradient(cp_size, align):
    losses = drawn()
    values, gradient = on_ranks(cp.Layout.zigzag(PACKING, cp_size, align=align), losses)
    expected = math.fsum((losses * WEIGHTS).tolist()) / 9
    assert len({value.item() for value in values}) == 1
    assert values[0].dtype == torch.float64
    assert abs(values[0].item() - expected) < 1e-15
    assert (gradient - WEIGHTS / 9).abs().max() < 1e-16


def test_the_loss_is_divided_by_all_tokens():
    layout = cp.Layout.from_fragments(PACKING, [[(0, 2)], [(2, 16)]])
    losses = drawn()
    (value, _), _ = on_ranks(layout, losses)
    means = [(losses * WEIGHTS)[piece].sum() / WEIGHTS[piece].count_nonzero() for piece in (slice(2), slice(2, 16))]
    assert abs(value - sum(means) / 2) > 0.001
    layout, losses = cp.Layout.zigzag(PACKING, 3), drawn()
    parts = (WEIGHTS * (torch.arange(16) < 4), WEIGHTS * (torch.arange(16) >= 4))  # of 3 tokens, and of 6
    found = [on_ranks(layout, losses, part, num_tokens=9) for part in parts]
    assert (sum(values[0] for values, _ in found) - (losses * WEIGHTS).sum() / 9).abs() < 1e-15
    assert (sum(gradient for _, gradient in found) - WEIGHTS / 9).abs().max() < 1e-16
    layout, losses = cp.Layout.zigzag(PACKING, 3), drawn()
    values, gradient = on_ranks(layout, losses, averaged_gradients=True)
    assert values == on_ranks(layout, losses)[0]
    assert (gradient / 3 - WEIGHTS / 9).abs().max() < 1e-16


@pytest.mark.parametrize("num_tokens", [None, 0])
def test_without_a_token_that_counts_loss_and_gradients_are_0(num_tokens):
    values, gradient = on_ranks(cp.Layout.zigzag(PACKING, 3), drawn(), WEIGHTS * 0, num_tokens=num_tokens)
    assert [value.item() for value in values] == [0.0] * 3
    assert not gradient.any()


def test_a_loss_of_weight_0_may_be_anything():
    losses = drawn().where(WEIGHTS != 0, torch.tensor([NAN, math.inf, -math.inf, NAN] * 4))
    values, gradient = on_ranks(cp.Layout.zigzag(PACKING, 2), losses)
    assert values == on_ranks(cp.Layout.zigzag(PACKING, 2), drawn())[0]
    assert torch.equal(gradient == 0, WEIGHTS == 0)


def test_the_backward_scales_and_axes_may_be_more():
    losses = drawn().requires_grad_()
    (3 * cp.token_loss(losses, WEIGHTS)).backward()
    assert (losses.grad - WEIGHTS / 3).abs().max() < 1e-16
    losses = drawn()
    assert torch.equal(cp.token_loss(losses.view(1, 2, 8), WEIGHTS.view(1, 2, 8)), cp.token_loss(losses, WEIGHTS))
    with torch.no_grad():
        loss = cp.token_loss(drawn(), WEIGHTS)
    assert not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_of_fewer_bits_are_added_in_fp32(dtype):
    losses = torch.ones(601, dtype=dtype, requires_grad=True)  # bfloat16 has no 601
    loss = cp.token_loss(losses, torch.ones(601, dtype=torch.bool))
    loss.backward()
    assert (loss.item(), loss.dtype) == (1.0, torch.float32)
    assert losses.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_weights_may_be_a_mask(dtype):
    mask, losses = WEIGHTS != 0, drawn()
    assert (cp.token_loss(losses, mask.to(dtype)) - losses[mask].mean()).abs() < 1e-15


def batch_of(cp_size):
    layout = cp.Layout.contiguous(PACKING, cp_size)
    return cp.shard_batch(torch.arange(16), layout, ThreadGroup.create(cp_size)[0], agree=False)


@pytest.mark.parametrize(
    ("losses", "weights", "group", "says"),
    [
        (torch.ones(8), batch_of(2), None, "group: got '1 ranks'; allowed: the 2 that the batch is for"),
        (torch.ones(8), batch_of(2), ThreadGroup.create(3)[0], "group: got '3 ranks'; allowed: the 2 that the batch"),
        (torch.ones(1, 16), batch_of(1), None, r"losses: got '\[1, 16\] on cpu'; allowed: \[16\] on cpu, the rows of "),
        (torch.ones(16), torch.ones(15), None, r"weights: got 'torch.float32 \[15\] on cpu'; .* \[16\] on cpu"),
    ],
)  # fmt: skip
def test_rejects_other_ranks_and_rows_than_the_batch_has(losses, weights, group, says):
    rejects(says, cp.token_loss, losses, weights, group)


def of_other_type(group):
    losses = torch.ones(4, dtype=torch.float32 if group.rank == 2 else torch.float64)
    return cp.token_loss(losses, torch.ones(4), group)


def of_another_option(group):
    return cp.token_loss(torch.ones(4), torch.ones(4), group, averaged_gradients=group.rank == 2)


@pytest.mark.parametrize("call", [of_other_type, of_another_option])
def test_rejects_another_call_on_another_rank(call):
    with pytest.raises(RankError, match="the ranks call token_loss in different ways") as caught:
        run_ranks(call, 3)
    assert isinstance(caught.value.__cause__, CallMismatchError)


def of_other_numbers(group, warm):
    if warm:  # ranks have compared this kind of call
        cp.token_loss(torch.ones(4), torch.ones(4), group, num_tokens=4)
    cp.token_loss(torch.ones(4), torch.ones(4), group, num_tokens=group.rank)


@pytest.mark.parametrize(("warm", "error"), [(False, CallMismatchError), (True, PeerError)])
def test_rejects_another_number_of_tokens_on_another_rank(warm, error):
    with pytest.raises(RankError, match=r"num_tokens:? [01]") as caught:
        run_ranks(of_other_numbers, 2, warm)
    assert isinstance(caught.value.__cause__, error)
