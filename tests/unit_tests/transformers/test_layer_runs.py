"""A rank's rows and a model's layers are two things: both are of context parallelism, or a call is refused."""

import copy
import functools
import types

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import accelerate
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.utils.checkpoint import checkpoint

from megatron_cp import Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.batch import LinearSpec
from megatron_cp.transformers import enable_context_parallel
from megatron_cp.transformers.batch import RankTokens
from tests.refusals import rejects
from tests.transformers_cases import LENGTHS, TOKENS, batch, build, gradients_of, stock

PACKING = Packing(LENGTHS)
SHORT = {"Qwen3Next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}}


@functools.cache
def tiny(name):
    return build(name, **SHORT.get(name, {})).eval()


def hooked(model):
    """Gives every module a forward of its own, as accelerate's `dispatch_model` and `cpu_offload` do."""
    for module in list(model.modules()):
        add_hook_to_module(module, ModelHook())
    return model


def whole_logits(model, parallel):
    rows = parallel.shard({"input_ids": TOKENS, "lengths": LENGTHS})
    with torch.no_grad():
        return parallel.gather(model(**rows).logits, rows)[0]


@pytest.mark.parametrize(
    "name",
    ["Qwen3Next", "DeepseekV32", *(pytest.param(name, marks=pytest.mark.thorough) for name in
                                   ("Llama", "Mamba2", "StableLm"))],
)  # fmt: skip
def test_layers_run_under_hooks_of_accelerate(name):
    """Whenever the hooks came; and `disabled` has the stock layers under them."""
    model = tiny(name)
    with torch.no_grad():
        alone = copy.deepcopy(model)(input_ids=TOKENS, use_cache=False).logits

    def main(group):
        before, after, without = hooked(copy.deepcopy(model)), copy.deepcopy(model), copy.deepcopy(model)
        found = []
        for each in (before, after, without):
            parallel = enable_context_parallel(each, group)
            if each is after:
                hooked(each)
            if group.size > 1 and name != "DeepseekV32":
                learnt = parallel.shard(batch())
                rejects("num_items_in_batch", each, **learnt)
            found.append(whole_logits(each, parallel))
            with parallel.disabled(), torch.no_grad():
                assert torch.equal(each(input_ids=TOKENS, use_cache=False).logits, alone)
            found.append(whole_logits(each, parallel))
            remove_hook_from_module(each, recurse=True)
            found.append(whole_logits(each, parallel))
        return found

    for first, *others in run_ranks(main, 2):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next", "Mamba2"])
def test_a_dispatched_model_has_the_logits_of_documents_alone(name):
    model = tiny(name)
    expected = stock(model, PACKING, TOKENS[0])[1]

    def main(group):
        own = accelerate.dispatch_model(copy.deepcopy(model), {"": "cpu"}, main_device="cpu", force_hooks=True)
        return (whole_logits(own, enable_context_parallel(own, group)) - expected).abs().max().item()

    assert max(run_ranks(main, 2)) < 1e-5


def test_a_forward_that_stands_before_the_models_is_checked_too():
    """TRL's and accelerate's wrappers for autocast keep the function of the class, and not a method."""
    model = copy.deepcopy(tiny("Llama"))
    stock_forward = type(model).forward
    model.forward = types.MethodType(lambda self, *args, **named: stock_forward(self, *args, **named), model)

    def main(group):
        own = copy.deepcopy(model)
        parallel = enable_context_parallel(own, group)
        rows = parallel.shard(batch())
        rejects("num_items_in_batch", own, **rows)
        own(**rows, num_items_in_batch=rows.num_items)
        with parallel.disabled():
            rejects("does not run over the ranks", own, **rows)
            own(input_ids=TOKENS)
        checked = own.forward
        own.forward = lambda **whole: checked(**parallel.shard(whole))  # set later, as our trainers do for TRL's
        with parallel.disabled():
            pass
        own(input_ids=TOKENS)

    run_ranks(main, 2)


def _frozen(model):
    """Makes the last layer return its input, as caches that skip layers do."""
    model.model.layers[-1].forward = lambda hidden, *_, **__: hidden


def _replaced(model):
    layers = model.model.layers
    layers[-1] = copy.deepcopy(layers[0])


def _with_stock_mixer(model):
    mixer = model.model.layers[0].linear_attn
    again = copy.deepcopy(mixer)
    again.__class__ = type(mixer).__bases__[1]
    model.model.layers[0].linear_attn = again


CHANGES = [
    ("Llama", lambda model: model.set_attn_implementation("sdpa"), r"model\.layers\.0\.self_attn"),
    ("Qwen3Next", lambda model: model.set_attn_implementation("eager"), r"model\.layers\.1\.self_attn"),
    ("Llama", _frozen, r"model\.layers\.1\.self_attn"),
    ("Llama", _replaced, r"model\.layers\.1\.self_attn"),
    ("Qwen3Next", _with_stock_mixer, r"model\.layers\.0\.linear_attn"),
]


@pytest.mark.parametrize(("name", "change", "layers"), CHANGES)
@pytest.mark.parametrize("part", ["whole", "below the head"])
def test_rejects_a_forward_in_which_a_layer_did_not_run_over_the_ranks(name, change, layers, part):
    model = copy.deepcopy(tiny(name))
    parallel = enable_context_parallel(model, None)
    rows = parallel.shard({"input_ids": TOKENS})
    called = model if part == "whole" else model.base_model
    called(**rows)
    change(model)
    rejects(rf"a forward in which {layers}[\w., ]* did not run over the ranks", called, **rows)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("Qwen3Next", True), ("Zamba2", False), ("StableLm", True), ("StableLm", False),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in
          (("Llama", True), ("Llama", False), ("Mamba2", False), ("Qwen3Next", False), ("Zamba2", True))),
    ],
)  # fmt: skip
def test_layers_may_run_again(name, reentrant):
    """In a second forward, and where the layers, or the whole model, are computed again in backward."""
    model = build(name, **SHORT.get(name, {}))
    parallel = enable_context_parallel(model, None)
    rows = parallel.shard(batch())

    def trained(loss):
        model.zero_grad()
        loss.backward()
        return [loss.detach(), *gradients_of(model).values()]

    found = [trained(model(**rows).loss), trained(model(**rows).loss)]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found.append(trained(model(**rows).loss))
    whole = checkpoint(lambda _: model(**rows).loss, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
    found.append(trained(whole))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next", "Mamba2"])
def test_rejects_a_ranks_rows_in_a_model_that_is_not_enabled(name, tmp_path):
    model = copy.deepcopy(tiny(name)).float()
    teacher = copy.deepcopy(model)
    parallel = enable_context_parallel(model, None)
    rows = parallel.shard(batch())
    model.save_pretrained(tmp_path)
    loaded = type(teacher).from_pretrained(tmp_path)
    for called in (teacher, teacher.base_model, loaded):
        rejects("a model that does not run over the ranks", called, **rows)
        called(input_ids=TOKENS)
    with parallel.disabled():
        rejects("a model that does not run over the ranks", model, **rows)
    model(**rows)


def test_tokens_of_a_rank_stay_so_where_they_are_moved_and_cut():
    parallel = enable_context_parallel(copy.deepcopy(tiny("Llama")), None)
    rows = parallel.shard(batch())
    ids, weight = rows["input_ids"], torch.randn(97, 4)
    for each in (ids, ids.to("meta"), ids[:, 2:], ids.clone(), ids.int(), copy.deepcopy(ids), torch.cat([ids, ids])):
        assert isinstance(each, RankTokens)
        rejects("does not run over the ranks", torch.nn.functional.embedding, each, weight.to(each.device))
    for look_up in (lambda: weight[ids], lambda: weight.index_select(0, ids[0]), lambda: torch.embedding(weight, ids)):
        rejects("does not run over the ranks", look_up)
    assert torch.equal(ids, TOKENS)
    assert TOKENS[0][ids[0] - 3].tolist() == TOKENS[0].tolist()
    plain = RankTokens.plain(ids)
    assert type(plain) is torch.Tensor
    assert torch.nn.functional.embedding(plain, weight).shape == (1, 13, 4)
    assert type(parallel.gather(ids, rows)) is torch.Tensor


def _wrapped(model):
    mixer = model.model.layers[0].linear_attn
    mixer.forward = functools.partial(type(mixer).forward, mixer)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("Mamba2", lambda model: setattr(model.backbone.layers[0].mixer, "forward", lambda *_, **__: None),
         r"mixer with a forward of its own"),
        ("Qwen3Next", _wrapped, r"linear_attn with a forward of its own"),
        ("Mamba2", lambda model: accelerate.cpu_offload(model, torch.device("cpu")),
         r"mixer\.conv1d, whose weights are loaded when it is called"),
    ],
)  # fmt: skip
def test_rejects_layers_that_would_not_be_called(name, change, text):
    model = copy.deepcopy(tiny(name))
    change(model)
    rejects(text, enable_context_parallel, model, None)
    assert not any("cp_slot" in vars(module) for module in model.modules())


def test_rejects_offloaded_projections_of_latents():
    model = accelerate.cpu_offload(copy.deepcopy(tiny("DeepseekV3")), torch.device("cpu"))
    rejects(r"kv_b_proj, whose weights are loaded", enable_context_parallel, model, None, latents=True)
    parallel = enable_context_parallel(model, None)
    model(**parallel.shard(batch(), device="cpu"))


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.base_model], ids=["whole", "base"])
def test_hidden_states_of_an_enabled_model_are_those_of_the_stock_class(part):
    """transformers records them by the name of the class."""
    enabled = part(copy.deepcopy(tiny("Llama")))
    rows = enable_context_parallel(enabled, None).shard({"input_ids": TOKENS})
    found = enabled(**rows, output_hidden_states=True).hidden_states
    expected = part(tiny("Llama"))(input_ids=TOKENS, output_hidden_states=True).hidden_states
    assert len(found) == 3
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(found, expected, strict=True))


def test_auto_never_moves_hidden_states():
    """That mode is taken for layers whose specs name a hidden size."""
    models = [build(name, dtype=torch.float32) for name in ("Qwen3Next", "KimiLinear", "Mamba2", "Lfm2")]
    slots = [slot for model in models for slot in enable_context_parallel(model, None).slots]
    hidden_sizes = {slot.kind: slot.hidden_size for slot in slots if isinstance(slot, LinearSpec)}
    assert hidden_sizes == dict.fromkeys(("gdn", "kda", "mamba", "conv1d"))


def test_what_is_derived_of_a_ranks_tokens_is_plain_and_chooses_rows():
    """Heads, rewards and metrics choose rows by masks and places of tokens."""
    ids = torch.tensor([[5, 2, 7, 2]]).as_subclass(RankTokens)
    hidden, weights = torch.arange(8.0).view(1, 4, 2), torch.arange(9.0)
    plain = torch.Tensor(ids.as_subclass(torch.Tensor)).long()
    for take in (
        lambda ids: hidden[ids == 2],
        lambda ids: hidden[0][(ids == 2)[0]],
        lambda ids: hidden[0, (ids[0] == 2).nonzero()[:, 0]],
        lambda ids: hidden[:, (ids == 2).int().argmax(-1)],
        lambda ids: hidden[0].index_select(0, (ids[0] == 2).nonzero()[:, 0]),
        lambda ids: weights[ids],
        lambda ids: torch.where((ids == 2)[..., None], hidden, 0.0),
        lambda ids: weights.expand(1, 4, 9).gather(-1, ids[..., None]),
    ):
        found = take(ids)
        assert type(found) is torch.Tensor
        assert torch.equal(found, take(plain))
    for kept in (ids.view(-1), ids.detach(), ids.masked_fill(ids == 2, 0)):
        assert isinstance(kept, RankTokens)
