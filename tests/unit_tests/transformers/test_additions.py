"""Additions to a model, its loss or a trainer: accepted if each rank computes them from its own tokens, or refused."""

import copy
import pickle
from functools import partial

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.loss.loss_utils import ForCausalLMLoss

from megatron_cp import Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import ContextParallelMixin, ContextParallelTrainer, enable_context_parallel
from megatron_cp.transformers.sources import refers_to
from tests.refusals import rejects
from tests.transformers_cases import TOKENS, batch, build, class_of, over_ranks, stock, wide, worst_gradient

ONE_PROCESS = pytest.mark.filterwarnings("ignore:one process, and no args.parallelism_config")


def call(model, group=None):
    rows = enable_context_parallel(model, group).shard(batch())
    return model(**rows, num_items_in_batch=rows.num_items)


# -- terms of the loss ------------------------------------------------------------------------------------------------


class Penalised(class_of("Llama")):
    """Adds a term to the loss in a way of its own, `how`."""

    def forward(self, input_ids, labels=None, how="not", **others):
        logits = self.lm_head(self.model(input_ids, **others).last_hidden_state)
        if labels is None:
            return {"logits": logits}
        loss = self.loss_function(logits, labels, self.vocab_size, **others)
        term = 0.1 * self.lm_head.weight.square().mean()
        if how == "in place":
            loss += term
        elif how == "nothing in place":
            loss += 0.0
        elif how == "to a copy":
            loss = loss + term
        elif how == "to a tuple":
            return loss + term, logits
        elif how == "nothing to a copy":
            loss = loss.clone()
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rejects_a_z_loss_on_every_rank(ranks):
    model = build("Bamba", num_hidden_layers=2, attn_layer_indices=[1], z_loss_coefficient=0.1)

    def main(group):
        rejects(r"a term that BambaForCausalLM adds.*once for every rank", call, copy.deepcopy(model), group)

    run_ranks(main, ranks)
    model.z_loss_coefficient = 0.0
    call(model)


@pytest.mark.parametrize("how", ["not", "in place", "nothing in place", "to a copy", "to a tuple", "nothing to a copy"])
@pytest.mark.parametrize("inference", [False, True])
def test_rejects_any_other_term(llama, how, inference):
    model = Penalised(llama.config)
    context = enable_context_parallel(model, None)
    rows = context.shard(batch())
    with torch.inference_mode(inference):
        if "not" in how:
            assert model(**rows, how=how)["loss"].isfinite()
        else:
            rejects("a term that Penalised adds to the loss", model, **rows, how=how)
        model(**context.shard({"input_ids": TOKENS}), how=how)  # without labels nothing is added


@pytest.mark.thorough  # it compiles a model
def test_rejects_a_term_under_compile(llama):
    model = Penalised(llama.config)
    rows = enable_context_parallel(model, None).shard(batch())
    compiled = torch.compile(model, backend="eager")
    compiled(**rows)
    rejects("a term that Penalised adds", compiled, **rows, how="to a copy")
    torch._dynamo.reset()


def test_a_loss_that_is_no_number_is_not_a_term(llama):
    model = copy.deepcopy(llama)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert call(model).loss.isnan()


def test_the_loss_function_is_the_stock_one_where_a_model_is_disabled(llama):
    model = copy.deepcopy(llama)
    context = enable_context_parallel(model, None)
    assert pickle.loads(pickle.dumps(model.loss_function)).function is ForCausalLMLoss
    model(**context.shard(batch()))
    assert model.loss_function.loss is None  # which would keep its graph
    with context.disabled():
        assert model.loss_function is ForCausalLMLoss
        assert "_loss_function" not in vars(model)
    given = copy.deepcopy(llama)
    given.loss_function = scaled = partial(ForCausalLMLoss, ignore_index=-1)
    context = enable_context_parallel(given, None)
    rejects("takes shift_labels", context.shard, batch())
    with context.disabled():
        assert given.loss_function is scaled


# -- noise and adapters -----------------------------------------------------------------------------------------------


def test_rejects_noise_by_the_number_of_rows(llama):
    model = copy.deepcopy(llama)
    context = enable_context_parallel(model, None)
    handle = activate_neftune(model, 0.5)
    rejects("neftune_noise_alpha: got 0.5.*number of rows", context.shard, batch())
    deactivate_neftune(model, handle)
    context.shard(batch())


def adapter(name, **named):
    peft = pytest.importorskip("peft")
    return getattr(peft, name)(task_type="CAUSAL_LM", **named)


ON_Q = {"target_modules": ["q_proj"]}
READS_ROWS = [
    ("AdaLoraConfig", {**ON_Q, "total_step": 9}, "'ADALORA'.*adds to the loss"),
    ("PolyConfig", ON_Q, "'POLY'"),
    ("LoraConfig", {**ON_Q, "alora_invocation_tokens": [5, 6]}, "'activated LoRA'.*last invocation tokens"),
]
VIRTUAL = [
    ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    ("PromptEncoderConfig", {"num_virtual_tokens": 3}),
    ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    ("CPTConfig", {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 4]}),
]  # fmt: skip
BY_TOKEN = [
    ("Llama", "LoraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}),
    ("Qwen3Next", "LoraConfig", {"r": 4, "target_modules": ["in_proj_qkvz", "out_proj", "k_proj"]}),
    ("Bamba", "LoraConfig", {"r": 4, "target_modules": ["in_proj"]}),
    ("Llama", "LoraConfig", {**ON_Q, "use_dora": True}), ("Llama", "VeraConfig", ON_Q), ("Llama", "OFTConfig", ON_Q),
    ("Llama", "LoHaConfig", ON_Q), ("Llama", "IA3Config", {**ON_Q, "feedforward_modules": []}),
    ("Llama", "LNTuningConfig", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "text"), READS_ROWS)
def test_rejects_adapters_that_read_whole_rows(llama, name, options, text):
    config = adapter(name, **options)
    from peft import get_peft_model

    context = enable_context_parallel(model := copy.deepcopy(llama), None)
    get_peft_model(model, config)
    rejects(f"peft_config: got {text}", context.shard, batch())


@pytest.mark.parametrize(("name", "options"), VIRTUAL)
def test_rejects_adapters_that_put_virtual_tokens_before_a_row(llama, name, options, tmp_path):
    config = adapter(name, **options)
    from peft import get_peft_model

    context = enable_context_parallel(model := copy.deepcopy(llama), None)
    rows = context.shard({"input_ids": TOKENS})
    adapted = get_peft_model(model, config)
    if name.startswith("Prefix"):
        rejects("past_key_values", adapted, **rows)
    else:
        says = r"or a wrapper that embeds tokens itself, .* Instead of prompt tuning .* act on each token, .*"
        rejects(rf"{says}input_ids\.as_subclass\(torch\.Tensor\)", adapted, **rows)
        by_hand = rows | {"input_ids": rows["input_ids"].as_subclass(torch.Tensor)}
        rejects(r"inputs_embeds: got \[1, 1[56], 48\]; allowed: \[1, 13\]", adapted, **by_hand)
    kind = str(config.peft_type.value)
    rejects(f"peft_config: got '{kind}'.*the part of every rank", trainer_of, adapted_stock(llama, config), tmp_path)


def adapted_stock(model, config):
    from peft import get_peft_model

    return get_peft_model(copy.deepcopy(model), copy.deepcopy(config))


@pytest.mark.parametrize(("model", "name", "options"), BY_TOKEN)
@pytest.mark.few
def test_adapters_that_act_on_each_token_are_those_of_one_rank(model, name, options):
    config = adapter(name, **options)
    from peft import get_peft_model

    def adapted(model):
        torch.manual_seed(2)  # peft draws the same on all ranks
        model = get_peft_model(model, copy.deepcopy(config)).double()
        for each in model.parameters():
            if each.requires_grad:
                each.data.add_(0.1 * torch.randn_like(each))
        return model

    model, lengths = build(model), (37, 1, 22)
    tokens = torch.randint(3, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    with wide():
        _, logits, gradients = stock(adapted(copy.deepcopy(model)), Packing(lengths), tokens)
        found = over_ranks(model, tokens, lengths, 2, changed=adapted)
    assert (found[1] - logits).abs().max() < 1e-11
    assert found[2].keys() == gradients.keys()
    assert worst_gradient(found[2], gradients)[0] < 1e-11


# -- trainers ---------------------------------------------------------------------------------------------------------


def trainer_of(model, folder, kind=ContextParallelTrainer, wrong=None, **named):
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=1,
        per_device_train_batch_size=2, **(wrong or {}),
    )  # fmt: skip
    data = [{"input_ids": list(range(3, 3 + length))} for length in (5, 7, 9, 4)]
    return kind(model=model, args=args, data_collator=DataCollatorWithFlattening(), train_dataset=data, **named)


@ONE_PROCESS
@pytest.mark.parametrize(
    ("wrong", "named", "text"),
    [
        ({"neftune_noise_alpha": 5.0}, {}, r"args.neftune_noise_alpha: got 5.0"),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "args.accelerator_config.dispatch_batches: got True"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({}, {"compute_loss_func": lambda *_, **__: None}, "compute_loss_func"),
        ({}, {"layout": "ring"}, "layout"),
        ({}, {"cp_options": {"align": 0}}, "align"),
    ],
)
def test_rejects_arguments_of_trainers(llama, wrong, named, text, tmp_path):
    rejects(text, trainer_of, copy.deepcopy(llama), tmp_path, wrong=wrong, **named)


@ONE_PROCESS
def test_rejects_an_evaluation_without_labels(llama, tmp_path):
    trainer = trainer_of(copy.deepcopy(llama), tmp_path)
    whole = {"input_ids": torch.arange(9)[None]}
    rejects("Evaluate with labels", trainer.prediction_step, trainer.model, whole, prediction_loss_only=True)


def own_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    loss = torch.nn.functional.cross_entropy(model(**inputs).logits[0, :-1], labels[0, 1:])
    return (loss, None) if return_outputs else loss


def count_of_its_own(self, batch_samples, device):
    return torch.tensor(7)


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("compute_loss", own_loss), ("_get_num_items_in_batch", count_of_its_own),
        ("training_step", lambda self, model, inputs, *_: model(**inputs).loss.backward()),
        ("get_batch_samples", lambda self, batches, count, device: ([next(batches)], None)),
    ],
)  # fmt: skip
def test_rejects_methods_that_do_not_call_the_trainers(name, method, below):
    base = type("Base", (Trainer,), {name: method}) if below else None
    bases, own = ((ContextParallelMixin, base), {}) if below else ((ContextParallelTrainer,), {name: method})
    rejects(rf"^\w+\.{name}: got 'a method of its own'; .*super\(\).{name}", type, "Mine", bases, own)


def test_rejects_a_loss_below_a_mixin_for_trl():
    sft = type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer.sft_trainer"})

    class Base(sft):
        def compute_loss(self, *args, **named):
            return super().compute_loss(*args, **named) + 1

    says = r"Base.compute_loss: got 'a method below Mine'.*Override it in Mine"
    rejects(says, type, "Mine", (ContextParallelMixin, Base), {})
    type("Mine", (ContextParallelMixin, sft), {"compute_loss": Base.compute_loss})


@ONE_PROCESS
def test_trains_on_whole_batches_while_disabled_and_by_a_name_of_ones_own(llama, tmp_path):
    trainer = trainer_of(copy.deepcopy(llama), tmp_path)
    with trainer.context_parallel.disabled():
        trainer.train()
    assert trainer.state.global_step > 0


def test_a_loss_by_hand_is_not_held_to_the_next_call(llama):
    model = copy.deepcopy(llama)
    parallel = enable_context_parallel(model, None)
    batch = parallel.shard({"input_ids": torch.arange(3, 9)[None], "lengths": [6]})
    logits = model(**batch).logits
    model.loss_function(logits=logits, labels=None, vocab_size=logits.shape[-1], shift_labels=torch.arange(6)[None])
    assert torch.equal(model(**batch).logits, logits)


def test_a_call_of_a_method_is_found_with_and_without_a_source():
    without_source = eval("lambda self: self.compute_loss()")
    assert [refers_to(without_source, name) for name in ("compute_loss", "other")] == [True, False]
    assert [refers_to(own_loss, name) for name in ("cross_entropy", "compute_loss")] == [True, False]


@ONE_PROCESS
@pytest.mark.parametrize("name", ["label_smoother", "compute_loss_func"])
def test_rejects_a_loss_that_is_set_later(llama, name, tmp_path):
    trainer = trainer_of(copy.deepcopy(llama), tmp_path)
    setattr(trainer, name, lambda *args, **named: 0.0)
    rejects(f"{name}: got 'a function'", trainer.train)


class Logging:
    """Reads the loss, and returns it as it is."""

    seen = 0

    def compute_loss(self, *args, **named):
        found = super().compute_loss(*args, **named)
        self.seen += 1
        return found


class Adding:
    """Adds a term to the loss."""

    def compute_loss(self, *args, return_outputs=False, **named):
        loss, outputs = super().compute_loss(*args, return_outputs=True, **named)
        loss = loss + 0.5
        return (loss, outputs) if return_outputs else loss


class AddingInPlace:
    """Adds a term to the loss without another tensor."""

    def compute_loss(self, *args, return_outputs=False, **named):
        found = super().compute_loss(*args, return_outputs=return_outputs, **named)
        (found[0] if return_outputs else found).add_(0.5)
        return found


class AtTimes:
    """Computes the loss of training by itself."""

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        if not return_outputs:
            return model(**self._prepare_inputs(inputs), num_items_in_batch=inputs["cp_batch"].num_items).loss * 0.5
        return super().compute_loss(model, inputs, return_outputs, **named)


class OfLogits:
    """Computes a loss of logits, though it has a call of the trainer's method."""

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        if self.state.global_step < 0:
            return super().compute_loss(model, inputs, return_outputs, **named)
        inputs = {name: value for name, value in inputs.items() if "labels" not in name}
        out = model(**self._prepare_inputs(inputs))
        loss = out.logits.logsumexp(-1).mean()
        return (loss, out) if return_outputs else loss


class Scaling:
    """Differentiates another loss than that of `compute_loss`."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        before = self.accelerator.backward
        self.accelerator.backward = lambda loss, **named: before(loss * 3, **named)
        return super().training_step(model, inputs, num_items_in_batch)


@ONE_PROCESS
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("kind", [Logging, Adding, AddingInPlace, AtTimes, Scaling, OfLogits])
@pytest.mark.few
def test_rejects_another_loss_than_the_models(llama, kind, below, tmp_path):
    trainer = type("Base", (kind, Trainer), {}) if below else kind
    trainer = type("Mine", (ContextParallelMixin, trainer) if below else (trainer, ContextParallelTrainer), {})
    trainer = trainer_of(copy.deepcopy(llama), tmp_path, trainer, {"gradient_accumulation_steps": 2})
    if kind is Logging:
        with pytest.MonkeyPatch.context() as patch:  # numbers are not compared, which would wait for the device
            patch.setattr("megatron_cp.transformers.trainer.equal", None)
            patch.setattr("megatron_cp.transformers.additions.equal", None)
            trainer.train()
        assert trainer.seen == 2
        assert trainer._share is None
    else:
        rejects('compute_loss: got "a(nother)? loss (than|without) the model.s"', trainer.train)
    if kind in (Adding, AddingInPlace, OfLogits):
        rejects("a(nother)? loss (than|without)", trainer.evaluate, trainer.train_dataset)
    else:
        trainer.evaluate(trainer.train_dataset)


@ONE_PROCESS
def test_a_model_that_takes_no_number_of_labels_accumulates(llama, tmp_path):
    model = copy.deepcopy(llama)
    model.accepts_loss_kwargs = False
    trainer = trainer_of(model, tmp_path, wrong={"gradient_accumulation_steps": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_cp.transformers.additions.equal", None)
        trainer.train()
    assert trainer.state.global_step == 1
