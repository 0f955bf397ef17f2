"""Models of transformers that are right as a whole or refused: heads, calls, configurations, and what layers skip."""

import copy
import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_cp import reduce_gradients
from megatron_cp.errors import ArgumentError, PlanMismatchError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.limits import limit
from tests.refusals import rejects
from tests.transformers_cases import TINY, TOKENS, audio_model, batch, build, class_of, worst_gradient


def tiny(module, name, **changed):
    """A random model in float64 of a class that the cases do not have."""
    kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    torch.manual_seed(0)
    config = kind.config_class(**{**TINY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changed})
    return kind(config).double().eval()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("qwen3", "Qwen3ForSequenceClassification"), ("llama", "LlamaForTokenClassification"),
        ("llama", "LlamaForQuestionAnswering"), ("gpt2", "GPT2DoubleHeadsModel"),
    ],
)  # fmt: skip
def test_rejects_heads_that_are_no_causal_language_model(module, name):
    model = tiny(module, name)
    rejects(f"'{name}'.*model.base_model", enable_context_parallel, model, None)
    enable_context_parallel(model.base_model, None)


def test_rejects_heads_by_what_they_are_and_not_by_their_names():
    stock = class_of("Llama")

    class LlamaForCausalLM(stock):
        def forward(self, input_ids, **others):
            return {"logits": self.lm_head(self.model(input_ids, **others).last_hidden_state[:, -1])}

    class LlamaForSequenceClassification(stock):
        def get_input_embeddings(self):
            return super().get_input_embeddings()

    class OfItsOwn(stock):
        def forward(self, input_ids, labels=None, **others):
            logits = self.lm_head(self.model(input_ids, **others).last_hidden_state)
            return {"loss": self.loss_function(logits, labels, self.vocab_size, **others), "logits": logits}

    config = build("Llama", num_hidden_layers=1).config
    for kind in (LlamaForSequenceClassification, OfItsOwn):
        enable_context_parallel(kind(config), None)
    rejects("LlamaForCausalLM", enable_context_parallel, LlamaForCausalLM(config), None)


def test_a_classifier_is_computed_from_all_rows_below_its_head():
    model = tiny("qwen3", "Qwen3ForSequenceClassification", num_labels=3)
    with torch.no_grad():
        alone = model(input_ids=TOKENS, use_cache=False).logits

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own.base_model, group, layout="zigzag")
        rows = cp.shard({"input_ids": TOKENS})
        with torch.no_grad():
            return own.score(cp.gather(own.base_model(**rows).last_hidden_state, rows)[:, -1])

    for found in run_ranks(main, 2):
        assert (found - alone).abs().max() < 1e-6


class Classifier(torch.nn.Module):
    """The recipe of docs/transformers.md, for the place of one document's last token."""

    def __init__(self, model, parallel):
        super().__init__()
        self.model, self.parallel = [model], parallel  # in a list, so that the parts alone are wrapped
        self.base, self.score = model.base_model, model.score

    def forward(self, batch, last_places):
        rows = self.parallel.gather(self.base(**batch).last_hidden_state, batch)
        return self.score(rows[:, last_places])


def classified(scores, targets):
    return torch.nn.functional.cross_entropy(scores[0], targets)


def error_of_a_classifier(world, stock, how):
    """The worst error of a rank's gradients, after they are reduced."""
    model, whole, lengths, targets = copy.deepcopy(stock), copy.deepcopy(stock), [4, 1, 8], torch.tensor([0, 2, 1])
    parallel = enable_context_parallel(model.base_model, world, layout="zigzag", scheme="exact")
    classifier: Any = Classifier(model, parallel)
    if how == "fully_shard":
        mesh = init_device_mesh("cpu", (world.size,))
        fully_shard(classifier.base, mesh=mesh)
        fully_shard(classifier.score, mesh=mesh)
    called = DistributedDataParallel(classifier) if how == "DistributedDataParallel" else classifier
    batch = parallel.shard({"input_ids": TOKENS, "lengths": lengths})
    loss = classified(called(batch, torch.tensor(lengths).cumsum(0) - 1), targets) / parallel.cp_size
    (loss if how == "reduce_gradients" else loss * world.size).backward()
    if how == "reduce_gradients":
        reduce_gradients(model, world)
    found = {name: each.grad for name, each in model.named_parameters()}
    found = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    scores = [whole(input_ids=each[None], use_cache=False).logits for each in TOKENS[0].split(lengths)]
    classified(torch.stack(scores, 1), targets).backward()
    return worst_gradient(found, {name: each.grad for name, each in whole.named_parameters()})[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_classifiers_gradients_are_those_of_one_rank(ranks):
    stock = tiny("qwen3", "Qwen3ForSequenceClassification", num_labels=3)
    assert max(run_ranks(error_of_a_classifier, ranks, stock, "reduce_gradients")) < 1e-5


def errors_of_wrapped_classifiers(world):
    stock = tiny("qwen3", "Qwen3ForSequenceClassification", num_labels=3)
    return [error_of_a_classifier(world, stock, how) for how in ("DistributedDataParallel", "fully_shard")]


@pytest.mark.thorough  # processes; the mean over ranks of as many times the loss is the sum above
def test_a_classifiers_gradients_are_those_of_one_rank_under_what_averages_them():
    for found in run_ranks(errors_of_wrapped_classifiers, 2, kind="processes", timeout=limit(120)):
        assert max(found) < 1e-5


def test_rejects_labels_for_a_loss_of_the_models_own_and_the_configuration_of_an_enabled_one():
    cp = enable_context_parallel(audio_model(), None)
    for name in ("labels", "shift_labels"):
        rejects("a loss in Qwen2Audio", cp.shard, {"input_ids": TOKENS, name: TOKENS})
    cp.shard({"input_ids": TOKENS, "targets": TOKENS})
    model = build("Llama", num_hidden_layers=1, dtype=torch.float32)
    cp = enable_context_parallel(model, None)
    rejects(r"copy\.deepcopy", enable_context_parallel, type(model).__bases__[1](model.config), None)
    with cp.disabled():
        other = type(model)(copy.deepcopy(model.config))
    enable_context_parallel(other, None)


@pytest.mark.parametrize("name", ["Llama", "Mamba2"])
def test_rejects_labels_without_the_number_of_all_ranks_labels(name):
    model, labels = build(name), torch.full_like(TOKENS, -100)
    labels[0, 10:] = TOKENS[0, 10:]  # two of three ranks have none
    alone = enable_context_parallel(one := copy.deepcopy(model), None)
    expected = one(**alone.shard(batch(labels=labels))).loss.item()  # one rank has the mean of them all

    def main(group):
        cp = enable_context_parallel(own := copy.deepcopy(model), group, layout="contiguous")
        rows = cp.shard(batch(labels=labels))
        for call in (own, own.forward):  # PEFT calls forward
            rejects(r"num_items_in_batch=batch\.num_items", call, **rows)
        return own(**rows, num_items_in_batch=rows.num_items).loss.item()

    shares = run_ranks(main, 3)
    assert sorted(shares)[:2] == [0.0, 0.0]
    assert abs(sum(shares) - expected) < 1e-6


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"output_attentions": True}, "in one place"), ({"logits_to_keep": 5}, r"parallel.gather\(out.logits, batch\)"),
        ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep"), ({"output_router_logits": True}, "no shard has"),
        ({"past_key_values": object()}, "no cache"), ({"labels": TOKENS}, "labels without shift_labels"),
    ],
)  # fmt: skip
def test_rejects_arguments_of_a_call(named, text):
    model = build("Llama", num_hidden_layers=1, dtype=torch.float32)
    rows = enable_context_parallel(model, None).shard({"input_ids": TOKENS})
    with pytest.raises(ArgumentError, match=text) as refused:
        model(**rows, **named)
    assert refused.value.argument == next(iter(named))
    model(**rows, output_attentions=False, logits_to_keep=0)


@pytest.mark.parametrize("name", ["Llama", "Mamba2"])
def test_the_signature_stays_that_of_the_class(name):
    model = build(name, dtype=torch.float32)
    before = inspect.signature(model.forward)
    enable_context_parallel(model, None)
    assert inspect.signature(model.forward) == before


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next", "Mamba2"])
@pytest.mark.parametrize("enabled", [(0,), (1,), (0, 1), (1, 0)])
@pytest.mark.few
def test_models_of_one_configuration_do_not_change_each_other(name, enabled):
    first = build(name, dtype=torch.float32).eval()
    models = [first, type(first)(first.config).eval()]
    assert models[1].config is first.config
    stock = [model(input_ids=TOKENS, use_cache=False).logits for model in models]
    contexts = {place: enable_context_parallel(models[place], None) for place in enabled}

    def is_stock(place):
        return torch.equal(models[place](input_ids=TOKENS, use_cache=False).logits, stock[place])

    assert all(is_stock(place) for place in range(2) if place not in enabled)
    for place, cp in contexts.items():
        with cp.disabled():
            assert is_stock(place)
        assert (models[place](**cp.shard({"input_ids": TOKENS})).logits - stock[place]).abs().max() < 1e-4
    assert all(is_stock(place) for place in range(2) if place not in enabled)


def test_text_models_of_one_configuration_do_not_change_each_other():
    from transformers.models import clip, llama, llava

    vision = clip.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=8, patch_size=4
    )
    config = llava.LlavaConfig(vision_config=vision, text_config=llama.LlamaConfig(**TINY))
    policy, reference = (llava.LlavaForConditionalGeneration(config).eval() for _ in range(2))
    expected = reference(input_ids=TOKENS, use_cache=False).logits
    cp = enable_context_parallel(policy, None)
    policy(**cp.shard({"input_ids": TOKENS}))
    assert torch.equal(reference(input_ids=TOKENS, use_cache=False).logits, expected)
    assert policy.config.text_config is policy.get_decoder().config


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("Mamba2", "hidden_act"), ("KimiLinear", "hidden_act"), ("Bamba", "hidden_act"), ("FalconH1", "hidden_act"),
        ("GraniteMoeHybrid", "hidden_act"), ("NemotronH", "mamba_hidden_act"), ("Qwen3Next", "hidden_act"),
    ],
)  # fmt: skip
def test_rejects_other_activations_of_the_convolution(name, argument):
    model = build(name, dtype=torch.float32, **{argument: "gelu"})
    rejects("'gelu'; allowed: silu or swish", enable_context_parallel, model, None)
    assert not any("cp_slot" in vars(module) for module in model.modules())


def test_swish_is_silu():
    model = build("Mamba2", dtype=torch.float32, hidden_act="swish")
    enable_context_parallel(model, None)
    assert any("cp_slot" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("module", "name"), [("opt", "OPTForCausalLM"), ("biogpt", "BioGptForCausalLM")])
def test_rejects_layers_that_are_skipped_at_random(module, name):
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.2}
    rejects(r"layerdrop: got 0\.2", enable_context_parallel, tiny(module, name, **sizes), None)
    model = tiny(module, name, **{**sizes, "layerdrop": 0.0})
    holder = next(each for each in model.modules() if "layerdrop" in vars(each))
    holder.layerdrop = 0.1  # after it was built
    rejects(r"layerdrop: got 0\.1", enable_context_parallel, model, None)
    holder.layerdrop = 0.0
    enable_context_parallel(model, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", TOKENS), ("shift_labels", TOKENS), ("position_ids", torch.arange(13)[None]),
        ("weights", torch.rand(1, 13).bfloat16()),
    ],
)  # fmt: skip
def test_ranks_with_other_tensors_are_told(name, value):
    model = build("Llama", num_hidden_layers=1, dtype=torch.float32)

    def main(group):
        cp = enable_context_parallel(copy.deepcopy(model), group)
        changed = value.clone()
        if group.rank == 1:
            changed[0, 9] += 1
        with pytest.raises(PlanMismatchError, match=rf"rank 0: {name}: .*\n.*rank 1: {name}: "):
            cp.shard(batch(**{name: changed}))
        cp.shard(batch(**{name: value}))
        cp.shard(batch(**{name: changed}), agree=False)

    run_ranks(main, 2)
