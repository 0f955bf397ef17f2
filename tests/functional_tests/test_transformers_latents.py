"""Multi-latent models of transformers that send latents: in float64 equal to the stock class on each document."""

import copy

import pytest

pytest.importorskip("transformers")
import torch
from torch import nn

from megatron_cp import Packing
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.transformers_cases import build, stock, wide, worst_gradient

LENGTHS, CLOSE = (37, 1, 22), 2e-12


@pytest.mark.parametrize("name", ["DeepseekV3", "KimiLinear"])
@pytest.mark.parametrize(("size", "scheme"), [(3, "exact"), (2, "a2a")])
@pytest.mark.few
def test_latents_travel_and_nothing_else_changes(name, size, scheme):
    model, packing = build(name), Packing(LENGTHS)
    tokens = torch.randint(3, 97, (packing.total,), generator=torch.Generator().manual_seed(1))

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own, group, scheme=scheme, latents=True)
        batch = cp.shard({"input_ids": tokens[None], "labels": tokens[None], "lengths": list(LENGTHS)})
        assert any(plan.attend is not None and plan.attend.latent for plan in batch.plans.plans)
        loss = own(**batch, num_items_in_batch=batch.num_items).loss
        loss.backward()
        with cp.disabled():
            own(input_ids=tokens[None, :5])
        return loss.item(), {name: each.grad for name, each in own.named_parameters()}

    with wide():
        found = run_ranks(main, size)
        loss, _, gradients = stock(model, packing, tokens)
    assert abs(sum(each[0] for each in found) - loss) < CLOSE
    names = {name for _, each in found for name, gradient in each.items() if gradient is not None}
    summed = {name: sum(each[1][name] for each in found if each[1][name] is not None) for name in names}
    error, parameter = worst_gradient(summed, gradients)
    assert error < CLOSE, parameter


def test_latents_are_refused_where_there_are_none():
    with pytest.raises(ArgumentError, match="latents"):
        enable_context_parallel(build("Llama"), None, latents=True)
    model = build("DeepseekV3", dtype=torch.float32)
    cp = enable_context_parallel(model, None, latents=True)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = nn.Sequential(module.kv_b_proj)
    with pytest.raises(ArgumentError, match="kv_b_proj"):
        model(**cp.shard({"input_ids": torch.arange(3, 9)[None]}))
