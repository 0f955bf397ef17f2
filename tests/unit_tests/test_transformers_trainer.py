"""Tests of the trainers' mixin without a trainer: padded rows, and parallelism that must be configured."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import torch
from accelerate.parallelism_config import ParallelismConfig

from megatron_cp.transformers.parallelism import checked_parallelism
from megatron_cp.transformers.preference import ContextParallelPreferenceMixin
from megatron_cp.transformers.rows import flatten_rows, restore_rows
from megatron_cp.transformers.trainer import ContextParallelMixin
from tests.refusals import rejects

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
        (2, None, r"parallelism_config = ParallelismConfig\(cp_size=2\), or start it by accelerate launch --use_fsdp"),
        (2, ParallelismConfig(), r"Data parallelism alone is ParallelismConfig\(dp_replicate_size=2\)"),
        (4, ParallelismConfig(cp_size=2), r"ParallelismConfig\(dp_shard_size=2, cp_size=2\)"),
        (1, ParallelismConfig(cp_size=2), "torchrun --nproc-per-node 2"),
    ],
)
def test_rejects_ranks_that_share_nothing(ranks, config, remedy):
    rejects(f"args.parallelism_config: .*{remedy}", checked_parallelism, arguments(ranks), config)


def test_rejects_processes_without_a_group_and_several_gpus(monkeypatch):
    rejects(r"args.n_gpu: got 4.*torchrun --nproc-per-node 4", checked_parallelism, arguments(1, gpus=4), None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    rejects("use_cpu=True", checked_parallelism, arguments(1), None)


def test_one_process_is_warned_unless_one_is_meant():
    with pytest.warns(UserWarning, match=r"without context parallelism.*torchrun --nproc-per-node N"):
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
        ("RewardTrainer", ContextParallelMixin, "token_log_probs.*same_loss=True"),
        ("GKDTrainer", ContextParallelMixin, "token_log_probs.*same_loss=True"),
        ("DPOTrainer", ContextParallelMixin, r"class Mine\(ContextParallelPreferenceMixin, DPOTrainer\)"),
        ("KTOTrainer", ContextParallelMixin, r"class Mine\(ContextParallelPreferenceMixin, KTOTrainer\)"),
        ("GRPOTrainer", ContextParallelPreferenceMixin, "allowed: TRL's DPO- or KTOTrainer"),
        ("SFTTrainer", ContextParallelPreferenceMixin, "allowed: TRL's DPO- or KTOTrainer. .*ContextParallelMixin"),
    ],
)
def test_rejects_trainers_of_trl_whose_loss_is_not_the_models(name, mixin, message):
    sft = type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"})
    theirs = type(name, (sft,), {"__module__": "trl.trainer.theirs"})
    rejects(f"trainer: got '{name}'.*{message}", type("Mine", (mixin, theirs), {}))
