"""Models of transformers over several ranks: equal to the stock class in eager mode on each document alone.

In float64 throughout, so that what transformers rounds to fp32 hides nothing; loss, logits, log-probabilities, and the
gradient of every parameter.
"""

import functools

import pytest

pytest.importorskip("transformers")
import torch
from torch.nn import functional

from megatron_cp import Packing
from tests.covering import covering
from tests.stable_topk import first_of_equal
from tests.transformers_cases import CHOOSING, MODELS, build, over_ranks, stock, wide, worst_gradient

SIZES, LAYOUTS, SCHEMES = (2, 3, 5), ("contiguous", "zigzag", "balanced"), ("a2a", "exact", "p2p", "all_gather")
MODES = ("headwise", "chunkwise")
FOUR, THREE, FEWER_THAN_RANKS = (37, 1, 130, 22), (37, 1, 22), (1, 2)
CLOSE = 2e-12


@functools.cache
def case(name, lengths, changed=()):
    """A model, a pack, and what the stock class makes of it: loss, logits, gradients."""
    model, packing = build(name, **dict(changed)), Packing(lengths)
    tokens = torch.randint(3, 97, (packing.total,), generator=torch.Generator().manual_seed(1))
    with wide(), pytest.MonkeyPatch.context() as patch:
        if name in CHOOSING:
            patch.setattr(torch.Tensor, "topk", first_of_equal(torch.Tensor.topk))
        return model, packing, tokens, stock(model, packing, tokens)


def assert_is_the_stock_class(name, lengths, size, changed=(), **options):
    model, packing, tokens, (loss, logits, gradients) = case(name, lengths, changed)
    with wide():
        found = over_ranks(model, tokens, lengths, size, **options)
    log_probs = torch.cat([log_probs_of(logits[begin:end], tokens[begin:end]) for begin, end in packing.spans()])
    worst, parameter = worst_gradient(found[2], gradients)
    errors = {
        "loss": abs(found[0] - loss), "logits": (found[1] - logits).abs().max().item(),
        "log-probabilities": (found[3] - log_probs).abs().max().item(), f"gradient of {parameter}": worst,
    }  # fmt: skip
    assert [name for name, error in errors.items() if not error < CLOSE] == [], errors
    assert found[2].keys() >= gradients.keys()
    assert name not in CHOOSING or found[2].keys() == gradients.keys()  # none for indexers, which only choose


def log_probs_of(logits, tokens):
    """Returns the log-probability of each next token of one document, and 0 for its last."""
    chosen = functional.log_softmax(logits[:-1], dim=-1).gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([chosen, chosen.new_zeros(min(len(tokens), 1))])


WITHOUT_LINEAR = (
    "Llama", "Qwen3", "Mistral", "Gemma2", "GptOss", "Llama4", "DeepseekV3", "MiMoV2Flash", "Nemotron", "StableLm",
)  # fmt: skip
CASES = covering(
    list(MODELS), SIZES, LAYOUTS, SCHEMES, MODES,
    allowed=lambda *case: case[-1] == "headwise" or case[0] not in WITHOUT_LINEAR,
)  # fmt: skip


@pytest.mark.parametrize(("name", "size", "layout", "scheme", "mode"), CASES)
@pytest.mark.few(of=lambda **case: tuple(case.values()))
def test_equals_the_stock_class_on_each_document_alone(name, size, layout, scheme, mode):
    assert_is_the_stock_class(name, FOUR, size, layout=layout, scheme=scheme, linear_mode=mode)


@pytest.mark.parametrize(
    ("name", "changed"),
    [("OlmoHybrid", ("linear_allow_neg_eigval", False)), ("BailingHybrid", ("kda_safe_gate", False))],
)
def test_options_of_linear_layers_are_read_from_the_configuration(name, changed):
    assert build(name).config.get_text_config().to_dict()[changed[0]] is True  # by default, as the cases above have it
    assert_is_the_stock_class(name, THREE, 3, (changed,), layout="contiguous", linear_mode="chunkwise")


FAMILIES = ["Llama", "DeepseekV3", "Qwen3_5", "KimiLinear", "Bamba", "Lfm2"]  # a class of each kind of layer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.thorough) for name in MODELS]
)
def test_fewer_tokens_than_ranks(name):
    assert_is_the_stock_class(name, FEWER_THAN_RANKS, 5, layout="contiguous", scheme="exact", linear_mode="headwise")


@pytest.mark.parametrize("name", ["DeepseekV3", "KimiLinear"])
@pytest.mark.parametrize(("size", "scheme"), [(3, "exact"), (2, "a2a")])
@pytest.mark.few
def test_latents_travel_and_nothing_else_changes(name, size, scheme):
    assert_is_the_stock_class(name, THREE, size, scheme=scheme, latents=True)


ALSO_CHOOSING = ("AXK2", "Dots3Note")  # have nothing that the others have not


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in ALSO_CHOOSING else ()) for name in CHOOSING]
)
@pytest.mark.parametrize(("size", "scheme"), [(3, "exact"), (2, "all_gather")])
@pytest.mark.few
def test_queries_choose_as_on_each_document_alone(name, size, scheme):
    assert_is_the_stock_class(name, THREE, size, scheme=scheme)


WITHOUT_HEAD = "NemotronHOmni"  # whose text model has it


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.thorough)
        for name in MODELS
        if name != WITHOUT_HEAD
    ],
)
@pytest.mark.parametrize("logit_rows", [1, 7, 500])
@pytest.mark.few
def test_logits_of_a_few_rows_at_a_time(name, logit_rows):
    assert_is_the_stock_class(name, FOUR, 3, logit_rows=logit_rows)
