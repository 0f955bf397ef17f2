"""Tests of the trainers' mixin without a trainer: padded rows, and parallelism that must be configured."""

import warnings
from importlib import metadata
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import torch
from accelerate.parallelism_config import ParallelismConfig
from transformers import Trainer

from megatron_cp.transformers import enable_context_parallel
from megatron_cp.transformers.documents import packing_of
from megatron_cp.transformers.generation import ContextParallelGRPOMixin
from megatron_cp.transformers.padding import flatten_rows, restore_rows
from megatron_cp.transformers.parallelism import Parallelism, checked_parallelism
from megatron_cp.transformers.preference import ContextParallelPreferenceMixin
from megatron_cp.transformers.trainer import ContextParallelMixin
from tests.refusals import rejects
from tests.transformers_cases import tiny

IDS = torch.tensor([[3, 4, 5, 0], [6, 7, 8, 9], [3, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
LABELS = IDS.where(MASK == 1, -100)
PADDED = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}


def test_padded_rows_are_put_end_to_end():
    extra = torch.arange(24.0).view(3, 4, 2)
    flat, kept = flatten_rows({**PADDED, "position_ids": torch.arange(4).repeat(3, 1), "extra": extra, "name": "a"})
    assert flat["input_ids"].tolist() == flat["labels"].tolist() == [[3, 4, 5, 6, 7, 8, 9, 3]]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert flat["lengths"].tolist() == [3, 4, 1]
    assert flat["name"] == "a"
    assert "attention_mask" not in flat
    assert torch.equal(restore_rows(flat["extra"], kept), extra * MASK[..., None])
    flat, kept = flatten_rows({"input_ids": IDS})
    assert flat["lengths"].tolist() == [4, 4, 4]
    assert kept.all()


def test_rows_of_images_stay_as_they_are():
    images = {"pixel_values": torch.rand(3, 4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    videos = {"pixel_values_videos": torch.rand(5, 3, 4), "image_position_ids": torch.ones(3, 4, 2)}
    flat, _ = flatten_rows({**PADDED, **images, **videos, "mm_token_type_ids": MASK, "token_type_ids": IDS})
    assert {name for name in {**images, **videos} if flat[name] is not {**images, **videos}[name]} == set()
    assert flat["mm_token_type_ids"].tolist() == [[1] * 8]
    assert flat["token_type_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 9, 3]]


def test_rows_of_numbered_documents_do_not_merge():
    numbers = torch.tensor([[1, 2, 2, 0], [1, 1, 2, 3], [1, 0, 0, 0]])
    positions = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    for extra in ({}, {"position_ids": positions}):
        flat, kept = flatten_rows({**PADDED, "attention_mask": numbers, **extra})
        assert flat["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 9, 3]]
        assert flat["lengths"].tolist() == packing_of(flat).lengths.tolist() == [1, 2, 2, 1, 1, 1]
        assert torch.equal(kept, MASK == 1)
    one = {"input_ids": IDS[1:2], "attention_mask": numbers[1:2].to(torch.uint8)}
    assert flatten_rows(one) == (one, None)
    assert packing_of(one).lengths.tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 0, 1]])},
        {"input_ids": IDS[:1], "attention_mask": torch.ones(1, 4)},
        {"input_ids": IDS, "lengths": [4, 4, 4]},
        {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4)},
        {"prompt_ids": IDS},
    ],
)
def test_other_batches_stay_as_they_are(batch):
    assert flatten_rows(batch) == (batch, None)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"attention_mask": MASK.flip(1)}, "padding_side"),
        ({"attention_mask": MASK * torch.tensor([2, 2, 1, 1])}, "numbers that fall"),
        ({"attention_mask": MASK * torch.tensor([1, 2, 2, 2]), "position_ids": IDS * 0}, "padding_free=True"),
        ({"labels": IDS}, "labels: got 'a label where attention_mask is 0'"),
        ({"shift_labels": IDS}, "shift_labels"),
        ({"position_ids": torch.tensor([[0, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])}, "padding_free=True"),
    ],
)
def test_rejects_rows_that_are_not_documents(changed, text):
    rejects(text, flatten_rows, {**PADDED, **changed})


def arguments(ranks, gpus=1):
    return SimpleNamespace(world_size=ranks, n_gpu=gpus, use_cpu=False)


@pytest.mark.parametrize(
    ("ranks", "config", "remedy"),
    [
        (2, None, r"ParallelismConfig\(cp_size=2\); torchrun needs no flag for it"),
        (2, ParallelismConfig(), r"For data parallelism only, set ParallelismConfig\(dp_replicate_size=2\)"),
        (4, ParallelismConfig(cp_size=2), r"ParallelismConfig\(dp_shard_size=2, cp_size=2\)"),
        (1, ParallelismConfig(cp_size=2), "torchrun --standalone --nproc-per-node 2"),
    ],
)  # fmt: skip
def test_rejects_ranks_that_share_nothing(ranks, config, remedy):
    rejects(f"args.parallelism_config: .*{remedy}", checked_parallelism, arguments(ranks), config)


def test_rejects_processes_without_a_group_and_several_gpus(monkeypatch):
    said = r"args.n_gpu: got 4.*torchrun --standalone --nproc-per-node 4"
    rejects(said, checked_parallelism, arguments(1, gpus=4), None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    rejects("use_cpu=True", checked_parallelism, arguments(1), None)


def test_one_process_is_warned_unless_one_is_meant():
    with pytest.warns(UserWarning, match=r"without context parallelism.*torchrun --standalone --nproc-per-node N"):
        assert checked_parallelism(arguments(1), None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked_parallelism(arguments(1), ParallelismConfig()).cp_size == 1


def test_parallelism_is_what_was_said(monkeypatch):
    assert checked_parallelism(arguments(2), ParallelismConfig(dp_replicate_size=2)).cp_size == 1
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    found = checked_parallelism(arguments(2), None)
    assert found.cp_size == 2
    assert not found.cp_enabled
    found.is_hidden = False
    assert found.cp_enabled


@pytest.mark.parametrize(
    ("name", "mixin", "message"),
    [
        ("RewardTrainer", ContextParallelMixin, r"enable_context_parallel\(model.base_model"),
        ("GKDTrainer", ContextParallelMixin, "token_log_probs.*same_loss=True"),
        ("DPOTrainer", ContextParallelMixin, r"class Mine\(ContextParallelPreferenceMixin, DPOTrainer\)"),
        ("KTOTrainer", ContextParallelMixin, r"class Mine\(ContextParallelPreferenceMixin, KTOTrainer\)"),
        ("GRPOTrainer", ContextParallelMixin, r"class Mine\(ContextParallelGRPOMixin, GRPOTrainer\)"),
        ("RLOOTrainer", ContextParallelPreferenceMixin, "allowed: TRL's DPOTrainer or KTOTrainer. .*GRPOMixin"),
        ("SFTTrainer", ContextParallelPreferenceMixin, "allowed: TRL's DPOTrainer or KTOTrainer. .*ParallelMixin"),
        ("DPOTrainer", ContextParallelGRPOMixin, "allowed: TRL's GRPOTrainer or RLOOTrainer. .*PreferenceMixin"),
    ],
)
def test_rejects_trainers_of_trl_whose_loss_is_not_the_models(name, mixin, message):
    sft = type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"})
    theirs = type(name, (sft,), {"__module__": "trl.trainer.theirs"})
    rejects(f"trainer: got '{name}'.*{message}", type, "Mine", (mixin, theirs), {})


def test_rejects_a_preference_mixin_for_the_plain_trainer():
    says = r"trainer: got .*a trainer that is not TRL's.*ContextParallelMixin is for it"
    rejects(says, type, "Mine", (ContextParallelPreferenceMixin, Trainer), {})


def test_rejects_images_where_completions_are_generated():
    theirs = type("GRPOTrainer", (), {"__module__": "trl.trainer.grpo_trainer"})
    trainer = object.__new__(type("Mine", (ContextParallelGRPOMixin, theirs), {}))
    trainer._score_rows(model := tiny("llama", "LlamaForCausalLM"), enable_context_parallel(model, None))
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "fused_lm_head": True}
    rejects("pixel_values: got 'Tensor'; allowed: prompts of text", model, pixel_values=torch.ones(4, 8), **given)


def test_rows_may_be_padded_on_both_sides():
    ids, mask = torch.tensor([[0, 3, 4, 5], [6, 7, 0, 0]]), torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    flat, kept = flatten_rows({"input_ids": ids, "attention_mask": mask}, padded_left=True)
    assert (flat["input_ids"].tolist(), flat["lengths"].tolist()) == ([[3, 4, 6, 7]], [2, 2])
    assert torch.equal(restore_rows(flat["input_ids"], kept), ids * mask)
    rejects("zeros before ones", flatten_rows, {"input_ids": ids, "attention_mask": 1 - mask}, padded_left=True)


def generating(attributes=None, **changed):
    """Makes a trainer that generates, without a model, of two groups of two ranks."""
    methods = {
        "__module__": "trl.trainer.grpo_trainer",
        "_build_accelerator_args": lambda self, **named: named,
        "_calculate_rewards": lambda self: torch.arange(8.0)[:, None],  # two completions on each rank
    }
    trainer = object.__new__(type("Mine", (ContextParallelGRPOMixin, type("GRPOTrainer", (), methods)), {}))
    vars(trainer).update(attributes or {})
    batch = {"per_device_train_batch_size": 3, "steps_per_generation": 2, "num_generations": 2}
    trainer.args = SimpleNamespace(
        world_size=4, n_gpu=1, use_cpu=True, generation_batch_size=24, **{"scale_rewards": "group", **batch, **changed}
    )
    trainer._build_accelerator_args(parallelism_config=Parallelism(dp_shard_size=2, cp_size=2))
    return trainer


def test_a_group_of_ranks_generates_one_batch():
    trainer = generating()
    assert trainer.args.generation_batch_size == 12
    trainer._mesh, trainer._group, trainer._first = object(), None, torch.tensor([0, 0, 2, 2])
    assert trainer._calculate_rewards().flatten().tolist() == [0, 1, 0, 1, 4, 5, 4, 5]


async def tool_that_waits():
    pass


@pytest.mark.parametrize(
    ("attributes", "changed", "message"),
    [
        ({}, {"scale_rewards": "batch"}, "args.scale_rewards: got 'batch'; allowed: 'group' or 'none'"),
        ({}, {"multi_objective_aggregation": "normalize_then_sum"}, "allowed: 'sum_then_normalize'"),
        ({}, {"top_entropy_quantile": 0.2}, r"args.top_entropy_quantile: got 0.2; allowed: 1.0"),
        ({}, {"normalize_advantages": True}, "args.normalize_advantages: got True; allowed: False"),
        ({}, {"use_vllm": True}, "args.use_vllm: got True; allowed: False"),
        ({}, {"use_transformers_continuous_batching": True}, "args.use_transformers_continuous_batching: got True"),
        ({}, {"num_generations": 4}, r"steps_per_generation: got 6; allowed: a multiple of the 4 generations"),
        ({"tools": [print, tool_that_waits]}, {}, "tools: got 'tool_that_waits'; allowed: functions that"),
        ({"environment_factories": {None: dict}}, {}, "environment_factory: got 'a function'; allowed: None"),
    ],
)
def test_rejects_what_ranks_cannot_share(attributes, changed, message):
    generating({"tools": [print], "environment_factories": None})
    rejects(message, generating, attributes, **changed)


def test_another_version_of_trl_is_named_where_its_methods_are_overridden(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda package: "1.99.0")
    with pytest.warns(UserWarning, match=r"tested with trl 1.16.0, and 1.99.0 is installed"):
        generating()
