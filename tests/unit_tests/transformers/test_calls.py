"""Batches that models of transformers are given, what they make of them, and models that share a configuration."""

import copy
import inspect

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
from torch.nn import functional

from megatron_cp import reduce_gradients
from megatron_cp.errors import PlanMismatchError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel, token_log_probs
from tests.refusals import rejects
from tests.transformers_cases import LENGTHS, TINY, TOKENS, batch, build, gradients_of, tiny, worst_gradient

NUMBERS = torch.tensor([[0] * 5 + [1] + [2] * 7])  # of each token's document
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]])


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"lengths": LENGTHS},
        {"lengths": torch.tensor(LENGTHS)},
        {"seq_lengths": np.array(LENGTHS)},
        {"cu_seq_lens_q": torch.tensor([0, 5, 6, 13], dtype=torch.int32), "max_length_q": 7},
        {"cu_seq_lens_k": [0, 5, 6, 13], "max_length_k": 7},
        {"seq_idx": NUMBERS},
        {"attention_mask": NUMBERS + 1},
        {"cu_seq_lens_q": [0, 5, 6, 13], "cu_seq_lens_k": [0, 5, 6, 6, 13], "seq_idx": NUMBERS,
         "attention_mask": NUMBERS + 1, "lengths": LENGTHS, "position_ids": POSITIONS},
        {"position_ids": POSITIONS},
        {"lengths": LENGTHS, "attention_mask": torch.ones(1, 13, dtype=torch.int64)},
    ],
)  # fmt: skip
def test_documents_are_told_from_what_collators_say(enabled, said):
    found = enabled[1].shard({"input_ids": TOKENS, "labels": TOKENS, **said})
    assert found.layout.packing.lengths.tolist() == LENGTHS
    assert torch.equal(found["position_ids"], POSITIONS)
    assert found["labels"].tolist() == [[4, 5, 6, 7, -100, -100, 10, 11, 12, 13, 14, 15, -100]]
    assert found.num_items == 10
    assert {"lengths", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "attention_mask"}.isdisjoint(found)


def test_positions_that_count_through_documents_and_other_values_are_left_alone(enabled):
    others, positions = {"shown": [0, 5, 9], "names": ("a", "b"), "scale": 2, "flags": [True]}, torch.arange(13)[None]
    found = enabled[1].shard(batch(**others, position_ids=positions, labels=None))
    assert found.layout.packing.lengths.tolist() == LENGTHS
    assert torch.equal(found["position_ids"], positions)
    assert {name: found[name] for name in others} == others


def test_numbers_for_each_token_go_beside_the_tokens(enabled):
    model, context = enabled
    extra = {"loss_weights": torch.rand(1, 13), "teacher": torch.rand(1, 13, 4)}
    rows = context.shard(batch(**extra))
    assert torch.equal(model(**rows).logits, model(**context.shard(batch())).logits)
    assert all(torch.equal(rows[name], value) for name, value in extra.items())


def test_without_lengths_a_row_is_one_document_and_shifted_labels_stay(enabled):
    found = enabled[1].shard({"input_ids": TOKENS})
    assert found.layout.packing.lengths.tolist() == [13]
    assert "labels" not in found
    assert found.num_items == 0
    shifted = torch.full((1, 13), -100)
    shifted[0, 3] = 8
    found = enabled[1].shard({"input_ids": TOKENS, "lengths": LENGTHS, "shift_labels": shifted})
    assert torch.equal(found["labels"], shifted)
    assert found.num_items == 1


def test_pad_rows_predict_nothing_and_options_reach_the_batch(llama):
    context = enable_context_parallel(copy.deepcopy(llama), None, align=8, kernel="reference")
    shifted = TOKENS.clone()
    shifted[0, 2] = -100
    found = context.shard({"input_ids": TOKENS, "lengths": LENGTHS, "shift_labels": shifted})
    assert found["cp_batch"].kernel == "reference"
    assert found["shift_labels"].tolist() == [[*shifted[0].tolist(), -100, -100, -100]]
    assert found.num_items == 12


OF_EACH_ROW = torch.linspace(0.5, 3, 13, dtype=torch.float64)[None]


@pytest.mark.parametrize("temperature", [2.5, torch.tensor(2.5), OF_EACH_ROW], ids=["float", "tensor", "of each row"])
def test_temperature_divides_logits(enabled, temperature):
    sharded, logits = enabled[1].shard(batch()), torch.randn(1, 13, 97, dtype=torch.float64)
    found = token_log_probs(logits, sharded, temperature=temperature)
    divided = logits[0] / torch.as_tensor(temperature).expand(1, 13)[0, :, None]
    expected = -functional.cross_entropy(divided, sharded["labels"][0], reduction="none")
    assert (found[0] - expected).abs().max() < 1e-12


def test_positions_of_several_axes_and_values_of_each_token_are_dealt(llama):
    positions, weights = torch.arange(39).reshape(3, 1, 13), torch.rand(1, 13, 2)

    def main(group):
        context = enable_context_parallel(copy.deepcopy(llama), group, layout="zigzag")
        found = context.shard(batch(position_ids=positions, token_weights=weights, return_dict=True))
        axes = torch.stack([context.gather(axis, found)[0] for axis in found["position_ids"]])
        return axes, context.gather(found["token_weights"], found), found["return_dict"]

    axes, dealt, passed = run_ranks(main, 2)[0]
    assert torch.equal(axes, positions[:, 0])
    assert torch.equal(dealt, weights)
    assert passed is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", TOKENS), ("labels", TOKENS), ("shift_labels", TOKENS),
        ("position_ids", torch.arange(13)[None]), ("weights", torch.rand(1, 13).bfloat16()),
    ],
)  # fmt: skip
def test_ranks_with_other_tensors_are_told(llama, name, value):
    def main(group):
        cp = enable_context_parallel(copy.deepcopy(llama), group)
        changed = value.clone()
        if group.rank == 1:
            changed[0, 9] += 1
        with pytest.raises(PlanMismatchError, match=rf"rank 0: {name}: .*\n.*rank 1: {name}: "):
            cp.shard(batch(**{name: changed}))
        cp.shard(batch(**{name: value}))
        cp.shard(batch(**{name: changed}), agree=False)

    run_ranks(main, 2)


# -- models -----------------------------------------------------------------------------------------------------------


class Classifier(torch.nn.Module):
    """The recipe of docs/transformers.md, for the place of one document's last token."""

    def __init__(self, model, parallel):
        super().__init__()
        self.base, self.score, self.parallel = model.base_model, model.score, parallel

    def forward(self, batch, last_places):
        rows = self.parallel.gather(self.base(**batch).last_hidden_state, batch)
        return self.score(rows[:, last_places])


def error_of_a_classifier(world, stock):
    """The worst error of a rank's gradients, after they are reduced."""
    model, whole, lengths, targets = copy.deepcopy(stock), copy.deepcopy(stock), [4, 1, 8], torch.tensor([0, 2, 1])
    parallel = enable_context_parallel(model.base_model, world, layout="zigzag", scheme="exact")
    rows = parallel.shard({"input_ids": TOKENS, "lengths": lengths})
    scores = Classifier(model, parallel)(rows, torch.tensor(lengths).cumsum(0) - 1)
    (functional.cross_entropy(scores[0], targets) / parallel.cp_size).backward()
    reduce_gradients(model, world)
    scores = [whole(input_ids=each[None], use_cache=False).logits for each in TOKENS[0].split(lengths)]
    functional.cross_entropy(torch.cat(scores), targets).backward()
    return worst_gradient(gradients_of(model), gradients_of(whole))[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_classifiers_gradients_are_those_of_one_rank(ranks):
    stock = tiny("qwen3", "Qwen3ForSequenceClassification", num_labels=3)
    assert max(run_ranks(error_of_a_classifier, ranks, stock)) < 1e-5


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


def test_text_models_of_one_configuration_do_not_change_each_other_nor_their_towers():
    from transformers.models import clip, llama, llava

    vision = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = llava.LlavaConfig(
        vision_config=clip.CLIPVisionConfig(**vision, num_hidden_layers=2, image_size=8, patch_size=4),
        text_config=llama.LlamaConfig(**TINY),
    )
    policy, reference = (llava.LlavaForConditionalGeneration(config).eval() for _ in range(2))
    expected = [model(input_ids=TOKENS, use_cache=False).logits for model in (policy, reference)]
    context = enable_context_parallel(policy, None)
    assert len(context.slots) == 2
    assert policy.config.text_config is policy.get_decoder().config
    assert policy.config.text_config._attn_implementation == "megatron_cp"
    assert policy.config.vision_config._attn_implementation != "megatron_cp"
    assert (policy(**context.shard({"input_ids": TOKENS})).logits - expected[0]).abs().max() < 1e-5
    assert torch.equal(reference(input_ids=TOKENS, use_cache=False).logits, expected[1])
