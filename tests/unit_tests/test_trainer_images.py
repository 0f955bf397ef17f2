"""Images through the adapters for ms-swift and verl: batches of their shapes, beside the stock class on each document.

Stand-ins do to a model what these trainers do, by their sources: ms-swift 4.6.0, verl 0.9.1.
"""

import copy
import functools
import threading
from types import MethodType, SimpleNamespace

import pytest

pytest.importorskip("transformers")
import torch
from torch import nn
from torch.nn import functional

from megatron_cp.executor.launch import run_ranks
from megatron_cp.integrations import swift as swift_adapter
from megatron_cp.integrations.swift import ContextParallelSequenceMixin
from megatron_cp.integrations.verl import ContextParallelEngineMixin
from tests.image_cases import MODELS, build, document, packed, stock
from tests.refusals import rejects
from tests.stand_ins import stand_in
from tests.transformers_cases import gradients_of, summed, wide, worst_gradient

CLOSE = 2e-12
# Text, images and videos of each document.
PACKS = {
    "images": ((5, [(1, 4, 4)], []), (9, [], []), (3, [(1, 8, 4), (1, 12, 8)], [])),
    "both": ((6, [(1, 4, 4)], [(3, 4, 8)]), (11, [], [(2, 8, 4)]), (7, [], [])),
    "text": ((6, [], []), (11, [], [])),
}
CASES = [("Qwen2_5_VL", "images"), ("Qwen2_5_VL", "both"), ("Qwen3VL", "both"), ("Qwen3VL", "text"),
         ("Qwen3_5", "images"), ("InternVL", "images"), ("InternVL", "text")]  # fmt: skip


@functools.cache
def case(name, pack):
    """A model, documents, and what the stock class makes of them."""
    model = build(name)
    documents = [document(model, *each, seed=number) for number, each in enumerate(PACKS[pack])]
    with wide():
        return model, documents, stock(model, documents)


def positions_of(model, documents):
    """Returns `[tokens]` within each document, and `[3, 1, tokens]` by the model's function; None where it has none."""
    text = torch.cat([torch.arange(each["input_ids"].shape[1]) for each in documents])
    if not hasattr(model.model, "get_rope_index"):
        return text, None
    taken = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    of_each = [
        model.model.get_rope_index(**{name: each[name] for name in taken if name in each})[0] for each in documents
    ]
    return text, torch.cat(of_each, -1)


def check(found, expected):
    """Compares logits, or what was made of them, and gradients, also of towers that a pack without images ran."""
    (rows, gradients), (expected_rows, expected_gradients) = found, expected
    assert (rows - expected_rows).abs().max() < CLOSE
    others = {name: each for name, each in gradients.items() if name not in expected_gradients}
    assert all("visual" in name or "vision" in name or "projector" in name for name in others)
    assert not any(each.any() for each in others.values())
    error, name = worst_gradient(gradients, expected_gradients)
    assert error < CLOSE, name
    return others


# -- ms-swift ---------------------------------------------------------------------------------------------------------


class Sequence(ContextParallelSequenceMixin):
    """Calls the mixin's methods as ms-swift's class does."""

    device_mesh = world_size = None

    def __init__(self, ranks):
        self.ranks, self.extra_kwargs = ranks, {}

    def _init_device_mesh(self):
        self.device_mesh, self.rp_group, self.rp_rank = "mesh", self.ranks, self.ranks.rank


class SequenceParallel:
    def prepare_inputs(self, inputs):
        inputs["labels"] = self.split(torch.roll(inputs["labels"], -1, -1), dim=-1)


class SequenceOfSwift(Sequence, SequenceParallel):
    pass


class Template:
    """Embeds images before the call of a model, and drops arguments that it does not know, as ms-swift's do."""

    def pre_forward_hook(self, model, args, kwargs):
        return args, {"inputs_embeds": "embedded"}


def collated(model, documents):
    """Returns what the templates of ms-swift collate, with labels."""
    text, positions = positions_of(model, documents)
    batch = packed(documents)
    ends = torch.tensor([0, *batch.pop("lengths")], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch["labels"] = batch["input_ids"].where(text > 0, -100)
    if positions is None:
        return {**batch, "position_ids": text[None]}
    longest = int(ends.diff().max())
    packs = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**batch, **packs, "position_ids": positions, "text_position_ids": text[None]}


def refused(*args, **given):
    raise AssertionError("a forward of ms-swift's ran")


def load_as_swift(model):
    """Puts forwards before those of Qwen3-VL's classes, as ms-swift does where it loads a model."""
    if hasattr(model.model, "language_model") and hasattr(model.model.language_model, "_deepstack_process"):
        inner, visual = model.model, model.model.visual
        inner.origin_forward, inner.forward = inner.forward, MethodType(refused, inner)
        inner.language_model._deepstack_process = MethodType(refused, inner.language_model)
        stock_forward = visual.forward
        visual.forward = lambda *args, **given: stock_forward(*args, **given)


class Wrapper(nn.Module):
    """Wraps a model as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **given):
        return self.model(*args, **given)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("name", "pack"), CASES)
@pytest.mark.few
def test_swift_passes_images_on(name, pack, is_wrapped, size, monkeypatch):
    model = case(name, pack)[0]
    if name == "Qwen3_5":  # ms-swift's refuses rings
        layer = next(each for each in model.modules() if type(each).__name__ == "Qwen3_5GatedDeltaNet")
        monkeypatch.setattr(type(layer), "forward", refused)
    compare_swift(name, pack, is_wrapped, SequenceOfSwift, Template, load_as_swift, size)


def compare_swift(name, pack, is_wrapped, sequence_of_swift, template, load, size=2):
    """Compares a step through the mixin with the stock class, as ms-swift takes it, with its classes or stand-ins."""
    model, documents, (_, *expected) = case(name, pack)
    count = sum(each["input_ids"].shape[1] - 1 for each in documents)

    def main(ranks):
        sequence, own = sequence_of_swift(ranks), copy.deepcopy(model)
        load(own)
        sequence.prepare(ranks.size, model=own, tokenizer=None, padding_free=True)
        called = Wrapper(own) if is_wrapped else own
        hook = swift_adapter._leaving_images(sequence, template.pre_forward_hook)
        called.register_forward_pre_hook(MethodType(hook, object.__new__(template)), with_kwargs=True)
        inputs = collated(own, documents)
        sequence.prepare_inputs(inputs)
        labels = inputs.pop("labels")
        inputs.pop("text_position_ids", None)
        logits = called(**inputs, use_cache=False).logits
        (functional.cross_entropy(logits[0], labels[0], reduction="sum") / count).backward()
        return sequence.gather(logits.detach(), dim=1)[0], gradients_of(own)

    with wide():
        logits, gradients = zip(*run_ranks(main, size), strict=True)
    others = check((logits[0], summed(gradients)), expected)
    assert bool(others) == (pack == "text")


def test_swifts_hook_embeds_images_of_other_models(monkeypatch):
    class Known(SequenceParallel):
        world_size = None

    known = Known()
    kind = type("Template", (Template,), {"pre_forward_hook": Template.pre_forward_hook})
    stand_in(monkeypatch, {
        "swift.sequence_parallel": {"SequenceParallel": Known, "sequence_parallel": known},
        "swift.template.base": {"Template": kind},
    })  # fmt: skip
    sequence = swift_adapter.register(layout="zigzag")
    assert isinstance(sequence, ContextParallelSequenceMixin)
    ours, other = nn.Linear(1, 1), nn.Linear(1, 1)
    sequence._with_images = ours
    given = {"input_ids": torch.zeros(1, 3)}
    for model in (ours, Wrapper(ours)):
        assert kind().pre_forward_hook(model, (), given) == ((), given)
    assert kind().pre_forward_hook(other, (), given) == ((), {"inputs_embeds": "embedded"})


# -- verl -------------------------------------------------------------------------------------------------------------

BUILDING = threading.Lock()  # verl's engines are built in processes of their own


@pytest.fixture
def patches(monkeypatch):
    """Replaces the forwards of a model's classes by verl's, as its apply_monkey_patch does; and says how often."""
    made = SimpleNamespace(count=0)

    def forward(self, *args, **given):
        raise AssertionError("verl's forward ran")

    def apply_monkey_patch(model, **others):
        made.count += 1
        for kind in (type(model), type(model.model)):
            monkeypatch.setattr(kind, "forward", forward)

    forward.__module__ = "verl.models.transformers.qwen2_vl"
    name = "verl.workers.engine.fsdp.transformer_impl"
    made.module = stand_in(monkeypatch, {name: {"apply_monkey_patch": apply_monkey_patch}})[name]
    return made


# What verl passes on of a processor's answer; Gemma's types of tokens are of the pack's tokens.
OF_IMAGES = ("pixel", "image_", "video_grid", "token_type_ids", "mm_token_type_ids")


class EngineOfVerl:
    """Builds a model and answers as verl's engine does without sequence parallelism."""

    ulysses_sequence_parallel_size, use_ulysses_sp = 2, True

    def __init__(self, model, ranks, patches):
        self.model, self.ulysses_parallel_group, self.patches = model, ranks, patches

    def _build_module(self):
        self.patches.module.apply_monkey_patch(model=self.model, ulysses_sp_size=self.ulysses_sequence_parallel_size)
        return self.model

    def prepare_model_inputs(self, documents):
        text, positions = positions_of(self.model, documents["all"])
        batch = packed(documents["all"])
        ids, given = batch["input_ids"], {name: batch[name] for name in batch if name.startswith(OF_IMAGES)}
        if "image_grid_thw" in given:
            given["images_seqlens"] = given["image_grid_thw"].prod(1)
        positions = text[None] if positions is None else torch.cat([text[None, None], positions])
        inputs = {"input_ids": ids, "attention_mask": None, "position_ids": positions, **given}
        rolled = {"input_ids_rmpad_rolled": ids[0].roll(-1), "temperature_rmpad": torch.ones(ids.shape[1])}
        return inputs, {**rolled, "pad_size": 0}


class Engine(ContextParallelEngineMixin, EngineOfVerl):
    pass


def micro_batch(documents):
    rows = torch.nested.nested_tensor([each["input_ids"][0] for each in documents], layout=torch.jagged)
    return {"all": documents, "input_ids": rows}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "pack"), [*CASES, ("Gemma3", "images"), ("Gemma3", "text")])
@pytest.mark.few
def test_verl_passes_images_on(name, pack, size, patches):
    model, documents, (_, logits, gradients) = case(name, pack)
    lengths = [each["input_ids"].shape[1] for each in documents]
    ids = torch.cat([each["input_ids"][0] for each in documents]).roll(-1)
    scores = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    counted = torch.ones(len(ids), dtype=torch.float64)
    counted[torch.tensor(lengths).cumsum(0) - 1] = 0

    def main(ranks):
        engine = Engine(copy.deepcopy(model), ranks, patches)
        with BUILDING:
            own = engine._build_module()
        inputs, results = engine.prepare_model_inputs(micro_batch(documents))
        rows = own(**inputs, use_cache=False).logits[0].log_softmax(-1)
        own_scores = rows.gather(-1, results["input_ids_rmpad_rolled"][:, None])[:, 0]
        every = engine._gather_and_unpad_packed(own_scores, 0)
        (-(every * counted).sum() / counted.sum()).backward()
        return every.detach(), {name: each / ranks.size for name, each in gradients_of(own).items()}  # as FSDP's mean

    with wide():
        found, of_ranks = zip(*run_ranks(main, size), strict=True)
    others = check((found[0], summed(of_ranks)), (scores, gradients))
    assert bool(others) == (pack == "text")
    assert patches.count == 0


@pytest.mark.parametrize(("name", "types"), [("Gemma3", "token_type_ids"), ("Gemma4", "mm_token_type_ids")])
def test_rejects_images_of_a_gemma_whose_types_verl_dropped(name, types, patches):
    model = build(name)
    documents = [document(model, *each) for each in PACKS["images"]]
    without = [{name: each[name] for name in each if name != types} for each in documents]
    engine = Engine(model, None, patches)
    engine._build_module()
    rejects(f"{types}: got None; allowed: the types of all .*causal inside", engine.prepare_model_inputs,
            micro_batch(without))  # fmt: skip
    engine.prepare_model_inputs(micro_batch(documents))
    text = document(model, 6)
    engine.prepare_model_inputs(micro_batch([{name: text[name] for name in text if name != types}]))


def test_a_gemma_that_sees_images_causally_needs_no_types_of_verl(patches):
    text = {**MODELS["Gemma4"][2]["text_config"], "use_bidirectional_attention": None}
    engine = Engine(model := build("Gemma4", text_config=text), None, patches)
    engine._build_module()
    found = document(model, *PACKS["images"][0])
    engine.prepare_model_inputs(micro_batch([{name: found[name] for name in found if name != "mm_token_type_ids"}]))


def test_rejects_models_that_another_engine_of_verl_patched(patches):
    documents = [document(model := build("Qwen2_5_VL"), *each) for each in PACKS["images"]]
    engine = Engine(model, None, patches)
    engine._build_module()
    EngineOfVerl(build("Qwen2_5_VL"), None, patches)._build_module()  # a critic's
    says = r"model: got 'Qwen2_5_VL\w+ with the forward of verl.models.transformers.qwen2_vl'; .*of its own"
    rejects(says, engine.prepare_model_inputs, micro_batch(documents))
    rejects(says, Engine(build("Qwen2_5_VL"), None, patches)._build_module)
