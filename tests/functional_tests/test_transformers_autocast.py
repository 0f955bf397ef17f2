"""Models of transformers with fp32 weights under autocast, over two ranks: as near to fp32 as the stock class.

The stock class in fp32, on each document alone, is what both are held against.
"""

import copy
import functools

import pytest

pytest.importorskip("transformers")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_cp import Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.limits import limit
from tests.transformers_cases import MODELS, build, over_ranks, stock

LENGTHS = (37, 1, 22)
FACTOR = 1.5  # as far from fp32 as ours may be, of what the stock class is
LOSS = 2e-3  # absolute: of a sum, in which roundings cancel, nothing else can be said
# Roundings choose other experts for a token, now here, now in the stock class: as far as that takes all numbers.
ROUTED = 0.05
EXPERTS = (
    "BailingHybrid", "DeepseekV3", "Flash", "GptOss", "GraniteMoeHybrid", "KimiLinear", "Llama4", "Moe", "NemotronH",
    "Next",
)  # fmt: skip


def errors(found, exact):
    """Returns the errors: absolute for the loss; norm of the difference over the norm for logits and all gradients."""
    loss, logits, gradients = exact
    of_gradients = [torch.cat([each[name].flatten() for name in sorted(gradients)]) for each in (found[2], gradients)]
    pairs = [(found[1].float(), logits), of_gradients]
    return abs(found[0] - loss), *((one - other).norm().item() / other.norm().item() for one, other in pairs)


@functools.cache
def case(name):
    """A model in fp32, a pack, its tokens, and what the stock class makes of it."""
    model, packing = build(name, dtype=torch.float32), Packing(LENGTHS)
    tokens = torch.randint(3, 97, (packing.total,), generator=torch.Generator().manual_seed(1))
    return model, packing, tokens, stock(model, packing, tokens)


def assert_as_near(name, ours, theirs):
    assert ours[0] < LOSS
    floor = ROUTED if name.endswith(EXPERTS) else 0.0
    for own, other in zip(ours[1:], theirs[1:], strict=True):
        assert own < max(FACTOR * other, floor)


def assert_as_near_under_autocast(name, dtype, linear_mode):
    model, packing, tokens, exact = case(name)
    ours = over_ranks(model, tokens, LENGTHS, 2, dtype, layout="zigzag", linear_mode=linear_mode)
    assert_as_near(name, errors(ours, exact), errors(stock(model, packing, tokens, dtype), exact))


# A class of each kind of layer.
FAMILIES = ["Llama", "Qwen3_5", "KimiLinear", "Bamba", "Lfm2"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.thorough) for name in MODELS]
)
def test_bf16_is_as_near_fp32_as_the_stock_class(name):
    assert_as_near_under_autocast(name, torch.bfloat16, "headwise")


@pytest.mark.parametrize("name", FAMILIES)
def test_fp16_is_as_near_fp32_as_the_stock_class(name):
    assert_as_near_under_autocast(name, torch.float16, "chunkwise")


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_in_bf16_are_as_near_fp32_as_the_stock_class(name):
    model, packing, tokens, exact = case(name)
    low = copy.deepcopy(model).bfloat16()
    ours = over_ranks(low, tokens, LENGTHS, 2, layout="zigzag", linear_mode="headwise")
    assert_as_near(name, errors(ours, exact), errors(stock(low, packing, tokens), exact))


def with_fsdp(world, name):
    """Errors under FSDP2's mixed precision with fp32 weights, and of the stock class with weights in bf16."""
    model, packing, tokens, exact = case(name)
    theirs = errors(stock(copy.deepcopy(model).bfloat16(), packing, tokens), exact)
    mesh = init_device_mesh("cpu", (world.size,))
    cp = enable_context_parallel(own := copy.deepcopy(model), mesh, layout="zigzag")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in own.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(own, mesh=mesh, mp_policy=policy)
    batch = cp.shard({"input_ids": tokens[None], "labels": tokens[None], "lengths": list(LENGTHS)})
    out = own(**batch, num_items_in_batch=batch.num_items)
    (out.loss * world.size).backward()
    dist.all_reduce(total := out.loss.detach().clone())
    gradients = {each: parameter.grad.full_tensor() for each, parameter in own.named_parameters()}
    assert {each.dtype for each in gradients.values()} == {torch.float32}
    return errors((total.item(), cp.gather(out.logits.detach(), batch)[0].float(), gradients), exact), theirs


def all_with_fsdp(world):
    return {name: with_fsdp(world, name) for name in ("Llama", "Qwen3_5", "Bamba")}


def test_fsdps_mixed_precision_is_as_near_fp32_as_the_stock_class():
    for name, pair in run_ranks(all_with_fsdp, 2, kind="processes", timeout=limit(60))[0].items():
        assert_as_near(name, *pair)
