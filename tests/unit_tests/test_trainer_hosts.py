"""The adapters for axolotl, LlamaFactory and verl beside fakes with these hosts' signatures.

`test_trainer_hosts.py` and `test_verl_engine.py` of the functional tests run the hosts themselves.
"""

import copy
import importlib
import importlib.util
import sys
import types
import warnings

import pytest

pytest.importorskip("transformers")
import torch
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from megatron_cp.integrations.verl import ContextParallelEngineMixin
from megatron_cp.transformers import ContextParallelMixin, enable_context_parallel
from megatron_cp.transformers.logits import ROWS, ChunkedLogits
from megatron_cp.transformers.padding import join_documents
from tests.refusals import rejects
from tests.stand_ins import stand_in
from tests.transformers_cases import build

DOCUMENTS = [[7, 8, 9, 10, 11], [5], [20, 21, 22]]


def loss_of_documents(model):
    """Returns the loss of `DOCUMENTS`, each alone."""
    ids = [torch.tensor(each) for each in DOCUMENTS]
    logits = [model(input_ids=each[None]).logits[0, :-1] for each in ids]
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat([each[1:] for each in ids])).item()


# -- axolotl ----------------------------------------------------------------------------------------------------------


class BasePlugin:
    """The hooks of axolotl 0.21 that the plugin overrides."""

    def register(self, cfg): ...
    def get_input_args(self): ...
    def get_training_args(self, cfg): ...
    def get_trainer_cls(self, cfg): ...
    def post_trainer_create(self, cfg, trainer): ...
    def get_collator_cls_and_kwargs(self, cfg, is_eval=False): ...


class PluginManager:
    plugins = {}  # noqa: RUF012

    @staticmethod
    def get_instance():
        return PluginManager


class AxolotlTrainer(Trainer):
    """Discards accelerate's state, and takes arguments of its own, as axolotl's trainer does."""

    def __init__(self, *args, eval_data_collator=None, **named):
        super().__init__(*args, **named)

    def create_accelerator_and_postprocess(self):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        super().create_accelerator_and_postprocess()


class Config(dict):
    """A configuration whose missing keys are None, as axolotl's are."""

    __getattr__ = dict.get


@pytest.fixture
def axolotl(monkeypatch):
    PluginManager.plugins = {"axolotl.integrations.context_parallel.ContextParallelPlugin": object()}
    stand_in(monkeypatch, {
        "axolotl.core.trainers": {"AxolotlTrainer": AxolotlTrainer},
        "axolotl.integrations.base": {"BasePlugin": BasePlugin, "PluginManager": PluginManager},
    })  # fmt: skip
    monkeypatch.delitem(sys.modules, "megatron_cp.integrations.axolotl", raising=False)
    yield importlib.import_module("megatron_cp.integrations.axolotl")
    sys.modules.pop("megatron_cp.integrations.axolotl")


def test_the_plugin_disables_axolotls_own_and_names_its_keys(axolotl):
    plugin = axolotl.ContextParallelPlugin()
    plugin.register({"context_parallel_size": 2, "tensor_parallel_size": 1, "attn_implementation": "sdpa"})
    assert [type(each) for each in PluginManager.plugins.values()] == [BasePlugin]
    place, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(importlib.import_module(place), name)(megatron_cp={"layout": "zigzag"})
    assert keys.megatron_cp == {"layout": "zigzag"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"context_parallel": {"backend": "ring"}}, "context_parallel: got .*backend.*context_parallel_size is"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: got 5.0.*number of rows"),
        ({"deepspeed": "zero3.json"}, "deepspeed: got 'zero3.json'.*fsdp_config"),
        ({"rl": "dpo"}, "rl: got 'dpo'.*ContextParallelPreferenceMixin"),
        ({"cut_cross_entropy": True}, "cut_cross_entropy: got True.*megatron_cp: {logit_rows: 1024}"),
        ({"chunked_cross_entropy": True}, "chunked_cross_entropy: got True.*megatron_cp: {logit_rows: 1024}"),
        ({"liger_fused_linear_cross_entropy": True}, "liger_fused.*: got True.*megatron_cp: {logit_rows: 1024}"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: got 2"),
        ({"xformers_attention": True}, "xformers_attention: got True.*only a rank's own tokens"),
        ({"processor_type": "AutoProcessor"}, "processor_type: got 'AutoProcessor'"),
        ({"attn_implementation": "xformers"}, "attn_implementation: got 'xformers'; allowed: sdpa, "),
        ({"megatron_cp": {"layouts": "zigzag"}}, "megatron_cp.layouts: got 'zigzag'; allowed: layout, scheme"),
    ],
)
def test_rejects_keys_of_axolotl_that_it_does_not_compute(axolotl, config, message):
    rejects(message, axolotl.ContextParallelPlugin().register, config)
    assert not isinstance(next(iter(PluginManager.plugins.values())), BasePlugin)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context_parallel_size": 3}, r"^context_parallel_size: got 3; allowed: a divisor of the 4 processes.*node 3"),
        ({"sequence_parallel_degree": 3}, "^sequence_parallel_degree: got 3; allowed: a divisor of the 4"),
        ({"context_parallel_size": "two"}, "^context_parallel_size: got 'two'; allowed: an integer"),
        ({"context_parallel_size": 2}, "^dp_shard_size: got 1; allowed: 2, over .*4 processes are 2 groups of 2"),
        ({"context_parallel_size": 4, "dp_shard_size": 2}, "^dp_shard_size: got 2; allowed: 1, over"),
    ],
)
def test_rejects_sizes_of_axolotl_that_do_not_fit_by_its_own_keys(axolotl, sizes, message, monkeypatch):
    plugin = axolotl.ContextParallelPlugin()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plugin.register(sizes)  # in axolotl's launcher, which has no ranks
    monkeypatch.setenv("WORLD_SIZE", "4")
    for refuses in (plugin.register, lambda cfg: plugin.get_trainer_cls(Config(cfg))):
        rejects(message, refuses, sizes)
    for fitting in ({}, {"context_parallel_size": 4}, {"context_parallel_size": 2, "dp_shard_size": 2}):
        plugin.register(fitting)


@pytest.mark.parametrize("logit_rows", [None, 4])
def test_axolotls_trainer_learns_packed_rows_as_documents(axolotl, tmp_path, logit_rows):
    plugin = axolotl.ContextParallelPlugin()
    options = {"layout": "contiguous", "align": 3, "logit_rows": logit_rows}
    cfg = Config(sample_packing=True, device="cpu", megatron_cp=options)
    plugin.register(cfg)
    kind, options = plugin.get_collator_cls_and_kwargs(cfg)
    collate = kind(None, padding=True, pad_to_multiple_of=64, return_tensors="pt", **options)
    rows = [{"input_ids": ids, "labels": ids, "position_ids": list(range(len(ids)))} for ids in DOCUMENTS]
    given = plugin.get_training_args(cfg)
    assert given == {"average_tokens_across_devices": True, "use_cpu": True}
    args = TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, report_to=[], save_strategy="no", remove_unused_columns=False,
        per_device_train_batch_size=3, **given,
    )  # fmt: skip
    model = build("Llama", dtype=torch.float32)
    expected = loss_of_documents(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process has no configuration of its parallelism
        trainer = plugin.get_trainer_cls(cfg)(
            model=model, args=args, train_dataset=rows, data_collator=lambda three: collate([three]),
            eval_data_collator=None,
        )  # fmt: skip
    assert isinstance(trainer, ContextParallelMixin)
    assert isinstance(trainer, AxolotlTrainer)
    plugin.post_trainer_create(cfg, trainer)
    another = object.__new__(AxolotlTrainer)
    says = r"plugins: got 'AxolotlTrainer'.*Remove the plugin that sets it"
    rejects(says, plugin.post_trainer_create, cfg, another)
    assert (trainer.context_parallel.planner.layout, trainer.context_parallel.planner.align) == ("contiguous", 3)
    assert getattr(trainer.model.lm_head, ROWS, None) == logit_rows
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5)


def test_rows_that_are_not_packed_keep_axolotls_collator(axolotl):
    plugin = axolotl.ContextParallelPlugin()
    assert plugin.get_collator_cls_and_kwargs(Config()) is None
    assert plugin.get_collator_cls_and_kwargs(Config(sample_packing=True), is_eval=True) is None
    assert plugin.get_collator_cls_and_kwargs(Config(eval_sample_packing=True), is_eval=True)[1] == {}


# -- LlamaFactory -----------------------------------------------------------------------------------------------------


class CustomSeq2SeqTrainer(Seq2SeqTrainer):
    """Takes the arguments of LlamaFactory's trainer."""

    def __init__(self, finetuning_args, processor, model_args=None, gen_kwargs=None, ref_model=None, **kwargs):
        self.given = kwargs


class CustomTrainer(Trainer):
    """Takes the arguments of LlamaFactory's trainer."""

    def __init__(self, finetuning_args, processor, model_args=None, **kwargs):
        self.given = kwargs


def job(**changed):
    """Returns what LlamaFactory's get_train_args returns of a packed job."""
    arguments = {"model_args": {}, "data_args": {"packing": True, "neat_packing": True}, "training_args": {},
                 "finetuning_args": {"stage": "sft"}, "generating_args": {}}  # fmt: skip
    for name, values in changed.items():
        arguments[name] = {**arguments[name], **values}
    return tuple(types.SimpleNamespace(**values) for values in arguments.values())


@pytest.fixture
def llamafactory(monkeypatch):
    ran, sft, pt = [], {"CustomSeq2SeqTrainer": CustomSeq2SeqTrainer}, {"CustomTrainer": CustomTrainer}
    return stand_in(monkeypatch, {
        "llamafactory.hparams": {"get_train_args": lambda args: job(**(args or {}))},
        "llamafactory.train.tuner": {"run_exp": lambda: ran.append(sys.argv[1:]), "ran": ran},
        "llamafactory.train.pt.workflow": pt, "llamafactory.train.pt.trainer": pt,
        "llamafactory.train.sft.workflow": sft, "llamafactory.train.sft.trainer": sft,
    })  # fmt: skip


def test_registering_gives_both_stages_the_mixin(llamafactory, monkeypatch):
    from megatron_cp.integrations import llamafactory as adapter

    given = {}
    monkeypatch.setattr(adapter.ContextParallelMixin, "__init__", lambda self, **named: given.update(named))
    monkeypatch.setenv("WORLD_SIZE", "6")
    for _ in range(2):  # the second time replaces the first
        adapter.register(3, layout="zigzag")
    training = llamafactory["llamafactory.train.tuner"].get_train_args(None)[2]
    sizes = training.parallelism_config
    assert (sizes.cp_size, sizes.dp_shard_size, sizes.total_size) == (3, 2, 6)
    finetuning = llamafactory["llamafactory.train.sft.workflow"].CustomSeq2SeqTrainer
    pretraining = llamafactory["llamafactory.train.pt.workflow"].CustomTrainer
    assert finetuning.__bases__ == (ContextParallelMixin, CustomSeq2SeqTrainer)
    assert pretraining.__bases__ == (ContextParallelMixin, CustomTrainer)
    finetuning(data_collator=types.SimpleNamespace(neat_packing=True))
    assert given == {"layout": "zigzag", "data_collator": adapter.collate_packed}
    stock = types.SimpleNamespace(neat_packing=False)
    finetuning(data_collator=stock)
    assert given["data_collator"] is stock


def test_llamafactorys_trainer_learns_from_logits_of_a_few_rows(llamafactory, tmp_path):
    from megatron_cp.integrations import llamafactory as adapter

    llamafactory["llamafactory.train.pt.trainer"].CustomTrainer = type("CustomTrainer", (Trainer,), {})
    adapter.register(1, cp_options={"logit_rows": 4})
    model = build("Llama", dtype=torch.float32)
    expected = loss_of_documents(model)
    args = TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, report_to=[], save_strategy="no", remove_unused_columns=False,
        per_device_train_batch_size=3, use_cpu=True, average_tokens_across_devices=True,
    )  # fmt: skip
    trainer = llamafactory["llamafactory.train.pt.workflow"].CustomTrainer(
        model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids} for ids in DOCUMENTS],
        data_collator=types.SimpleNamespace(neat_packing=True),
    )  # fmt: skip
    assert getattr(trainer.model.lm_head, ROWS) == 4
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5)


def test_the_launcher_leaves_other_arguments_to_llamafactory(llamafactory, monkeypatch):
    from megatron_cp.integrations import llamafactory as adapter

    given = {}
    monkeypatch.setattr(adapter, "register", lambda **named: given.update(named))
    monkeypatch.setattr(sys, "argv", ["launcher", "--cp-size", "4", "job.yaml", "--linear-mode", "exact", "stage=pt"])
    adapter.main()
    assert given == {"cp_size": 4, "linear_mode": "exact"}
    assert llamafactory["llamafactory.train.tuner"].ran == [["job.yaml", "stage=pt"]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"finetuning_args": {"stage": "dpo"}}, "stage: got 'dpo'; allowed: pt or sft"),
        ({"data_args": {"neat_packing": False}}, "packing: got True; allowed: neat_packing: true"),
        ({"training_args": {"predict_with_generate": True}}, "predict_with_generate: got True"),
        ({"finetuning_args": {"use_mca": True}}, "use_mca: got True"),
        ({"model_args": {"shift_attn": True}}, "shift_attn: got True"),
        ({"model_args": {"enable_liger_kernel": True}}, "enable_liger_kernel: got True.*{'logit_rows': 1024}"),
    ],
)
def test_rejects_arguments_of_llamafactory_that_it_does_not_compute(llamafactory, changed, message):
    from megatron_cp.integrations import llamafactory as adapter

    adapter.register(1)
    rejects(message, llamafactory["llamafactory.train.tuner"].get_train_args, changed)


@pytest.mark.parametrize("token", ["image_token", "video_token", "audio_token"])
def test_rejects_templates_with_images_whose_rows_are_not_packed(llamafactory, monkeypatch, token):
    from megatron_cp.integrations import llamafactory as adapter

    given = []
    monkeypatch.setattr(adapter.ContextParallelMixin, "__init__", lambda self, **named: given.append(named))
    adapter.register(1)
    kind = llamafactory["llamafactory.train.sft.workflow"].CustomSeq2SeqTrainer
    plugin = types.SimpleNamespace(image_token=None, video_token=None, audio_token=None)
    collator = types.SimpleNamespace(neat_packing=False, template=types.SimpleNamespace(mm_plugin=plugin))
    kind(data_collator=collator)
    setattr(plugin, token, "<pad>")
    rejects(rf"template.mm_plugin.{token}: got '<pad>'; allowed: None, or neat_packing", kind, data_collator=collator)
    kind(data_collator=types.SimpleNamespace(**{**vars(collator), "neat_packing": True}))
    assert [named["data_collator"] for named in given] == [collator, adapter.collate_packed]


def test_rejects_images_in_packed_rows_and_sizes_that_do_not_divide_the_processes(llamafactory, monkeypatch):
    from megatron_cp.integrations import llamafactory as adapter

    images = {"input_ids": [1], "labels": [1], "images": ["a.png"]}
    rejects("images: got 'files in a row'", adapter.collate_packed, [images])
    monkeypatch.setenv("WORLD_SIZE", "3")
    adapter.register(2)
    get_train_args = llamafactory["llamafactory.train.tuner"].get_train_args
    rejects(r"cp_size: got 2; allowed: a divisor of the 3 processes", get_train_args, None)


@pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="LlamaFactory is not installed")
def test_refused_arguments_are_llamafactorys():
    from llamafactory.hparams import FinetuningArguments, ModelArguments
    from llamafactory.hparams import TrainingArguments as Training

    from megatron_cp.integrations.llamafactory import _REFUSED

    fields = {name for kind in (ModelArguments, FinetuningArguments, Training) for name in kind.__dataclass_fields__}
    assert set(_REFUSED) <= fields


# -- verl -------------------------------------------------------------------------------------------------------------


class EngineOfVerl:
    """Answers as verl's engine does without sequence parallelism."""

    ulysses_sequence_parallel_size, use_ulysses_sp, ulysses_parallel_group = 2, True, None

    def __init__(self, inputs, results):
        self.answer = {"input_ids": torch.zeros(1, 3), **inputs}, results

    def prepare_model_inputs(self, micro_batch):
        assert (self.ulysses_sequence_parallel_size, self.use_ulysses_sp) == (1, False)
        return self.answer

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        return output, micro_batch


class Engine(ContextParallelEngineMixin, EngineOfVerl):
    pass


PACKED = {"input_ids_rmpad_rolled": torch.zeros(3), "temperature_rmpad": torch.ones(3), "pad_size": 0}


@pytest.mark.parametrize(
    ("inputs", "results", "message"),
    [
        ({}, {"temperature": 1}, "use_remove_padding: got False; allowed: True"),
        ({}, PACKED | {"pad_size": 5}, "engine.pad_to_length: got True; allowed: False"),
        ({"shift_labels": torch.zeros(1, 3)}, PACKED, "model.use_fused_kernels: got True; allowed: False"),
    ],
)
def test_rejects_batches_of_verl_that_it_does_not_compute(inputs, results, message):
    engine = Engine(inputs, results)
    rejects(message, engine.prepare_model_inputs, {})
    assert (engine.ulysses_sequence_parallel_size, engine.use_ulysses_sp) == (2, True)


@pytest.fixture
def verl_functions(monkeypatch):
    def assign_non_tensor(batch, **named):
        return batch | named

    def logprobs_from_logits(logits, labels, inplace_backward=True):
        assert not inplace_backward
        assert len(logits) <= 2
        return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    stand_in(monkeypatch, {
        "verl.utils.tensordict_utils": {"assign_non_tensor": assign_non_tensor, "get_non_tensor_data": dict.get},
        "verl.utils.torch_functional": {"logprobs_from_logits": logprobs_from_logits},
    })  # fmt: skip


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk"])
def test_rejects_results_of_verl_that_need_all_logits(verl_functions, name):
    engine = Engine({}, PACKED)
    engine.cp_options = {"logit_rows": 2}
    rejects(f"^{name}: got True; allowed: False with logit_rows", engine.prepare_model_inputs, {name: True})


def test_rejects_fsdp1_of_verl_with_logits_of_a_few_rows():
    engine = Engine({}, PACKED)
    engine.cp_options, engine.engine_config = {"logit_rows": 2}, types.SimpleNamespace(strategy="fsdp")
    rejects("^engine.strategy: got 'fsdp'; allowed: fsdp2 with logit_rows", engine._build_module)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_verl_takes_results_of_a_few_rows_as_those_of_fused_kernels(verl_functions, with_entropy):
    engine, model = Engine({}, PACKED), build("Llama")
    engine.compute_entropy_from_logits = lambda logits: torch.distributions.Categorical(logits=logits).entropy()
    stock = copy.deepcopy(model)
    parallel = enable_context_parallel(model, None, logit_rows=2)
    tokens, temperatures = torch.tensor([[each for ids in DOCUMENTS for each in ids]]), torch.linspace(0.5, 2, 9)
    rolled = tokens[0].roll(-1)
    output = model(**parallel.shard({"input_ids": tokens, "lengths": [5, 1, 3]}))
    assert isinstance(output.logits, ChunkedLogits)
    args = {"input_ids_rmpad_rolled": rolled, "temperature_rmpad": temperatures}
    batch = {"calculate_entropy": with_entropy}
    found, given = engine.prepare_model_outputs(output, args, batch, None)
    logits = torch.cat([stock(input_ids=torch.tensor([each])).logits[0] for each in DOCUMENTS])
    kinds = torch.distributions.Categorical(logits=logits / temperatures[:, None])
    assert (found.log_probs[0] - kinds.log_prob(rolled)).abs().max() < 1e-12
    assert not with_entropy or (found.entropy[0] - kinds.entropy()).abs().max() < 1e-12
    assert (given, batch) == (batch | {"use_fused_kernels": True}, {"calculate_entropy": with_entropy})
    loss = kinds.log_prob(rolled).sum() + (kinds.entropy().square().sum() if with_entropy else 0)
    loss.backward()
    (found.log_probs.sum() + (found.entropy.square().sum() if with_entropy else 0)).backward()
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-11


# -- rows of documents ------------------------------------------------------------------------------------------------


def test_rows_become_documents():
    rows = [
        {"input_ids": [5, 6, 7, 8, 0], "labels": [5, 6, -100, 8, -100], "attention_mask": [1, 1, 2, 2, 0]},
        {"input_ids": [9, 9, 9], "labels": [9, 9, 9], "position_ids": [0, 0, 1], "attention_mask": [1, 1, 1]},
        {"input_ids": torch.tensor([4, 4]), "labels": torch.tensor([4, 4])},
    ]
    joined = join_documents(rows)
    assert joined["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9, 9, 4, 4]]
    assert joined["labels"].tolist() == [[5, 6, -100, 8, 9, 9, 9, 4, 4]]
    assert joined["lengths"].tolist() == [2, 2, 1, 2, 2]


@pytest.mark.parametrize(
    ("adapter", "module", "call", "package"),
    [
        ("verl", "verl", lambda ours: ours.register(), "verl"),
        ("llamafactory", "llamafactory", lambda ours: ours.register(), "llamafactory"),
        ("swift", "swift", lambda ours: ours.register(), "ms-swift"),
        ("torchtitan", "torchtitan", lambda ours: ours.context_parallel(None), "torchtitan"),
        ("automodel", "nemo_automodel", lambda ours: ours.own_batches(None, None), "nemo-automodel"),
    ],
)
def test_rejects_a_framework_that_is_not_installed(monkeypatch, adapter, module, call, package):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("megatron_cp.integrations.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"^{module} is not installed; pip install {package}==.*hosts.md$"):
        call(importlib.import_module(f"megatron_cp.integrations.{adapter}"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position_ids": [3, 4, 5]}, r"position_ids: got .*count up from 0"),
        ({"position_ids": [0, 2, 1]}, r"position_ids: got .*count up from 0"),
        ({"input_ids": [1, 2.5, 3]}, "input_ids: got .*; allowed: integers"),
        ({"labels": [1, 2.5, 3]}, "labels: got .*; allowed: integers"),
    ],
)
def test_rejects_rows_that_are_no_documents(changed, message):
    rejects(message, join_documents, [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], **changed}])
