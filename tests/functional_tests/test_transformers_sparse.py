"""Models of transformers whose attention chooses keys: in float64 equal to the stock class on each document alone."""

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
import torch

from megatron_cp import AttentionSpec, Packing
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import attention, enable_context_parallel
from megatron_cp.transformers.slots import mask_of
from tests.stable_topk import first_of_equal
from tests.transformers_cases import build, stock, wide, worst_gradient

LENGTHS, CLOSE = (37, 1, 22), 2e-12


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize(("size", "scheme"), [(3, "exact"), (2, "all_gather")])
@pytest.mark.few
def test_queries_choose_as_on_each_document_alone(name, size, scheme):
    model, packing = build(name), Packing(LENGTHS)
    tokens = torch.randint(3, 97, (packing.total,), generator=torch.Generator().manual_seed(1))

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own, group, scheme=scheme)
        batch = cp.shard({"input_ids": tokens[None], "labels": tokens[None], "lengths": list(LENGTHS)})
        loss = own(**batch, num_items_in_batch=batch.num_items).loss
        loss.backward()
        with cp.disabled():
            own(input_ids=tokens[None, :5])
        return loss.item(), {name: each.grad for name, each in own.named_parameters()}

    with wide(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", first_of_equal(torch.Tensor.topk))
        loss, _, gradients = stock(model, packing, tokens)
    with wide():
        found = run_ranks(main, size)
    assert abs(sum(each[0] for each in found) - loss) < CLOSE
    names = {name for _, each in found for name, gradient in each.items() if gradient is not None}
    assert names == gradients.keys()
    summed = {name: sum(each[1][name] for each in found if each[1][name] is not None) for name in names}
    error, parameter = worst_gradient(summed, gradients)
    assert error < CLOSE, parameter


@pytest.mark.parametrize("name", ["softcap", "sink", "dropout", "indices"])
def test_rejects_calls_that_layers_that_choose_keys_do_not_compute(name):
    options = dict.fromkeys(("softcap", "sink", "dropout"), 0.0) | {name: 0.5}
    with pytest.raises(ArgumentError) as caught:
        attention._selected(None, AttentionSpec(heads=1, kv_heads=1, head_dim=4, topk=2), (), None, options, None)
    assert caught.value.argument == name


def test_rejects_what_layers_that_choose_keys_lack():
    with pytest.raises(ArgumentError, match="scheme"):
        enable_context_parallel(build("DeepseekV32"), None, scheme="p2p")
    with pytest.raises(ArgumentError, match="codec: got 'fp8'"):
        enable_context_parallel(build("DeepseekV32"), None, codec="fp8")
    with pytest.raises(ArgumentError, match=r"attention_dropout: got 0\.1"):
        enable_context_parallel(build("DeepseekV32", attention_dropout=0.1), None)


@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_rejects_layers_whose_keys_are_made_of_several_tokens(kind):
    """DeepSeek-V4's; its layers of a window alone are taken."""
    layer, config = SimpleNamespace(layer_idx=1), SimpleNamespace(layer_types=["sliding_attention", kind])
    with pytest.raises(ArgumentError, match=rf"a layer of type '{kind}'.*more-layers\.md"):
        mask_of(layer, config)
