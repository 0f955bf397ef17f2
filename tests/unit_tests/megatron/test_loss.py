"""The loss as Megatron's schedules take it."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_cp.megatron.loss import token_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_of_weighted_losses_and_of_tokens_that_count(dtype):
    draw = torch.Generator().manual_seed(0)
    losses = torch.randn(1, 40, generator=draw).to(dtype).requires_grad_()
    weights = torch.randint(0, 3, (1, 40), generator=draw) / 2
    total, tokens, logged = token_loss(weights, losses)
    assert torch.equal(total, (losses.float() * weights).sum())
    assert (total.dtype, tokens.dtype) == (torch.float32, torch.int32)
    assert tokens.item() == (weights != 0).sum().item()
    assert torch.equal(logged["lm loss"], torch.stack([total.detach(), tokens.float()]))
    total.backward()
    assert torch.equal(losses.grad, weights.to(dtype))
