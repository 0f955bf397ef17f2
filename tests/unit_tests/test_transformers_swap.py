"""Tests of the changes that enabling makes in a model of transformers: modules, options, and their lifetime."""

import copy
import importlib
import itertools

import pytest

pytest.importorskip("transformers")
import torch
from packaging.version import Version
from transformers import __version__ as transformers_version

from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable, enable_context_parallel
from tests.refusals import rejects
from tests.transformers_cases import TINY, TOKENS, audio_model, batch, build


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
    def main(group):
        own = copy.deepcopy(dropping)
        context = enable_context_parallel(own, group, layout="zigzag", scheme="exact")
        sharded = context.shard(batch(), seed=3)
        return context.gather(own(**sharded, num_items_in_batch=sharded.num_items).logits.detach(), sharded)

    one, two = run_ranks(main, 1)[0], run_ranks(main, 2)[0]
    assert (one - two).abs().max() < 1e-12
    assert (one - copy.deepcopy(dropping).eval()(input_ids=TOKENS).logits).abs().max() > 1e-3


def test_towers_have_no_slots():
    model = audio_model()
    tower = dict(model.named_modules())
    enable_context_parallel(model, None)
    slotted = [name for name, module in tower.items() if "cp_slot" in vars(module)]
    assert len(slotted) == 2
    assert all("language_model" in name for name in slotted)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next", "Mamba2", "StableLm"])
def test_disabled_leaves_nothing_on_a_module(name):
    model = build(name, dtype=torch.float32)
    before = [(type(module), vars(module).keys() - {"training"}) for module in model.modules()]
    context = enable_context_parallel(model, None)
    model(**context.shard(batch()))
    with context.disabled():
        assert [(type(module), vars(module).keys() - {"training"}) for module in model.modules()] == before


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


def test_layers_that_drop_arguments_can_be_recomputed():
    model = build("StableLm", dtype=torch.float64)
    context, losses = enable_context_parallel(model, None), []
    for reentrant in (None, True, False):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(**context.shard(batch())).loss.backward()
        losses.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    for first, second in itertools.pairwise(losses):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("module", "kind", "changed", "text"),
    [
        ("phimoe", "Phimoe", {"sliding_window": 8, "num_local_experts": 2}, "PhimoeAttention.*leaves the window"),
        ("qwen2_moe", "Qwen2Moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
                                  "num_experts": 2, "num_experts_per_tok": 1}, "Qwen2MoeAttention.*leaves the window"),
        ("moshi", "Moshi", {"sliding_window": 8, "ffn_dim": 64}, "Moshi(Sdpa)?Attention.*leaves the window"),
        ("doge", "Doge", {}, "DogeAttention.*does not depend"),
    ],
)  # fmt: skip
def test_rejects_windows_and_masks_that_are_in_the_mask_alone(module, kind, changed, text):
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    of = getattr(code, f"{kind}ForCausalLM")
    names = {name: value for name, value in TINY.items() if module != "moshi" or name != "intermediate_size"}
    model = of(of.config_class(**names, **changed))
    rejects(text, enable_context_parallel, model, None)


def test_gather_of_the_same_loss_divides_gradients():
    model = build("Llama", num_hidden_layers=1, dtype=torch.float64)

    def main(group):
        context = enable_context_parallel(copy.deepcopy(model), group, layout="contiguous")
        sharded, found = context.shard(batch()), []
        for same in (False, True):
            rows = torch.ones(*sharded["input_ids"].shape, 2, dtype=torch.float64, requires_grad=True)
            context.gather(rows, sharded, same_loss=same).sum().backward()
            found.append(rows.grad[0, 0, 0].item())
        return found

    assert run_ranks(main, 2) == [[2.0, 1.0]] * 2


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
