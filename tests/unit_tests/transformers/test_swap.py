"""Tests of the changes that enabling makes in a model of transformers: modules, options, and their lifetime."""

import copy

import pytest

pytest.importorskip("transformers")
import torch
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import __version__ as transformers_version

from megatron_cp import reduce_gradients
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable, enable_context_parallel
from tests.limits import limit
from tests.refusals import rejects
from tests.transformers_cases import LENGTHS, TOKENS, batch, build


@pytest.fixture(scope="module")
def dropping():
    """Makes a model whose two layers differ in the layer's number only."""
    return build("Llama", num_hidden_layers=2, attention_dropout=0.5)


def test_layers_drop_different_weights(dropping):
    model = copy.deepcopy(dropping)
    sharded = enable_context_parallel(model, None).shard(batch(), seed=3)
    first, second = (layer.self_attn for layer in model.model.layers)
    second.load_state_dict(first.state_dict())
    hidden = torch.randn(1, 13, 48, dtype=torch.float64)
    phases = model.model.rotary_emb(hidden, sharded["position_ids"])
    again, once, other = (
        layer(hidden, phases, None, cp_batch=sharded["cp_batch"])[0] for layer in (first, first, second)
    )
    assert torch.equal(again, once)
    assert not torch.equal(once, other)


def test_dropout_is_the_same_on_every_number_of_ranks(dropping):
    def main(group, seed):
        own = copy.deepcopy(dropping)
        context = enable_context_parallel(own, group, layout="zigzag", scheme="exact")
        sharded = context.shard(batch(), seed=seed)
        return context.gather(own(**sharded, num_items_in_batch=sharded.num_items).logits.detach(), sharded)

    one, two, other = (run_ranks(main, ranks, seed)[0] for ranks, seed in ((1, 3), (2, 3), (2, 4)))
    assert (one - two).abs().max() < 1e-12
    assert (one - other).abs().max() > 1e-3
    assert (one - copy.deepcopy(dropping).eval()(input_ids=TOKENS).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next", "Mamba2", "StableLm"])
def test_disabled_is_the_stock_model(name):
    model = build(name, dtype=torch.float32).eval()

    def state():
        return [(type(module), set(vars(module))) for module in model.modules()], list(model.state_dict())

    before, logits = state(), model(input_ids=TOKENS, use_cache=False).logits
    context = enable_context_parallel(model, None)
    found = model(**context.shard({"input_ids": TOKENS})).logits
    assert (found - logits).abs().max() < 1e-4
    enabled = state()
    assert enabled[0] != before[0]
    assert enabled[1] == before[1]
    with context.disabled(), context.disabled():
        assert state() == before
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, logits)
        with context.disabled():
            pass
        assert model.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (1, 15)
    assert state() == enabled
    assert torch.equal(model(**context.shard({"input_ids": TOKENS})).logits, found)


@pytest.mark.parametrize("name", ["Mamba2", "StableLm", "Nemotron"])
@pytest.mark.parametrize("fails", [False, True])
def test_hooks_of_layers_that_drop_arguments_last_for_one_call(name, fails):
    model = build(name, dtype=torch.float32)
    if (
        name == "Nemotron"
        and not model._can_set_attn_implementation()
        and Version(transformers_version) < Version("5.23")
    ):
        pytest.skip("its attention is its own in this transformers")
    sharded = enable_context_parallel(model, None).shard(batch())
    if fails:
        rejects("cp_batch", model, **{**sharded, "cp_batch": object()})
    else:
        model(**sharded)
    assert not any(module._forward_pre_hooks for module in model.modules())
    rejects("cp_batch", model, input_ids=TOKENS, use_cache=False)


def test_rows_go_to_the_device_that_is_named(monkeypatch):
    prepared = []
    monkeypatch.setattr(enable, "prepare_plans", lambda plans, rank, device: prepared.append(device.type))
    context = enable_context_parallel(build("Llama", num_hidden_layers=1, dtype=torch.float32), None)
    for named, expected in ((None, "cpu"), ("meta", "meta")):
        rows = context.shard(batch(), device=named)
        assert {value.device.type for value in rows.values() if isinstance(value, torch.Tensor)} == {expected}
    assert prepared == ["cpu", "meta"]


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_plans_count_bytes_of_the_model(dtype, size):
    model = build("Qwen3Next", dtype=dtype)
    assert {slot.item_size for slot in enable_context_parallel(model, None).slots} == {size}


def test_an_indexer_chooses_as_many_keys_as_it_says_and_its_norm_may_be_wider_than_the_model():
    model = build("HYV4", dtype=torch.float32, indexer_types=["full", "full"]).eval()
    indexer = model.model.layers[0].self_attn.indexer
    indexer.k_norm.double()
    indexer.index_topk = 3
    model.set_attn_implementation("eager")
    expected = model(input_ids=TOKENS, use_cache=False).logits
    context = enable_context_parallel(model, None)
    assert [slot.topk for slot in context.slots] == [3, 8]
    found = model(**context.shard({"input_ids": TOKENS})).logits
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2"])
def test_a_model_that_is_enabled_can_be_pickled_and_copied(name, tmp_path):
    model = build(name, dtype=torch.float32).eval()
    rows = enable_context_parallel(model, None).shard({"input_ids": TOKENS, "lengths": LENGTHS})
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(other(**rows).logits, model(**rows).logits)


def test_explains_plans_and_a_batch_can_be_made_again_of_its_arguments():
    context = enable_context_parallel(build("Llama", num_hidden_layers=1, dtype=torch.float32), None)
    sharded = context.shard(batch())
    moved = type(sharded)(dict(sharded.items()))
    assert (moved.num_items, moved.layout, moved.plans) == (10, sharded.layout, sharded.plans)
    assert "model.layers.0.self_attn: AttentionSpec" in context.explain()
    assert "attention by a2a over 1 rank: 3 documents, 13 tokens" in context.explain(sharded)


def after_fully_shard(group):
    model = build("Mamba2", dtype=torch.float32).eval()
    before = model(input_ids=TOKENS, use_cache=False).logits
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    rejects("2 dimensions", enable_context_parallel, model, square)
    for takes_a_group in (enable_context_parallel, reduce_gradients):
        rejects(r"world of 2 ranks.*dist\.group\.WORLD", takes_a_group, model, None)
    context = enable_context_parallel(model, mesh := square["cp"])
    assert (context.cp_size, context.rank) == (2, group.rank)
    for block in model.backbone.layers:
        fully_shard(block.mixer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours = [type(module) for module in model.modules()]
    rows = context.shard({"input_ids": TOKENS, "lengths": LENGTHS})
    first = model(**rows).logits
    with context.disabled():
        off = (model(input_ids=TOKENS, use_cache=False).logits - before).abs().max().item()
    return off, torch.equal(model(**rows).logits, first), [type(module) for module in model.modules()] == ours


def test_rejects_no_group_and_is_disabled_after_fully_shard():
    for off, is_same, is_back in run_ranks(after_fully_shard, 2, kind="processes", timeout=limit(60)):
        assert off < 1e-5
        assert is_same
        assert is_back
