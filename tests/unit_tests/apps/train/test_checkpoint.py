"""Tests of the checkpoint that a run goes on from, and of the distance between the gradients of two runs."""

import math

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.apps.train import checkpoint
from megatron_cp.apps.train.checkpoint import check_checkpoint, compare_gradients
from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.run_folder import TRACKER, latest_checkpoint
from megatron_cp.errors import ArgumentError
from tests.refusals import rejects


@pytest.mark.parametrize(("content", "says"), [(b"", "invalid literal"), (b"\xff", "utf-8")])
def test_rejects_a_damaged_tracker(content, says, tmp_path):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / TRACKER).write_bytes(content)
    rejects(f"^resume: got .*{says}", latest_checkpoint, tmp_path)


def holding(monkeypatch, common):
    def load(path):
        if isinstance(common, BaseException):
            raise common
        return common

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", load)
    monkeypatch.setattr(checkpoint, "verify_integrity_manifest", lambda path: None)


def saved_by(options, iteration):
    return {"megatron_cp": {"iteration": iteration, "shape": options.shape(257)}}


def test_rejects_unknown_shapes(monkeypatch, tmp_path):
    holding(monkeypatch, saved_by(TrainingOptions(), 7))
    assert check_checkpoint(tmp_path, TrainingOptions(context_parallel_size=3, train_iters=300), 257) == 7
    saved = saved_by(TrainingOptions(), 7)
    del saved["megatron_cp"]["shape"]["adam_beta1"]
    holding(monkeypatch, saved)
    rejects(r"--adam-beta1 was not known, is 0\.9", check_checkpoint, tmp_path, TrainingOptions(), 257)


@pytest.mark.parametrize(
    ("common", "says"),
    [
        ({}, "Cannot read it: KeyError: 'megatron_cp'."),
        ({"megatron_cp": {"iteration": "many", "shape": {}}}, "Cannot read it: ValueError: invalid literal"),
        ({"megatron_cp": {"iteration": 3, "shape": 7}}, "Cannot read it: TypeError"),
        (EOFError(), "Cannot read it: EOFError."),
        (ValueError("a traceback\nOSError: no disk"), "Cannot read it: OSError: no disk."),
        (CheckpointException("load", {}), "Cannot read it: CheckpointException"),
    ],
)
def test_rejects_a_damaged_checkpoint(common, says, monkeypatch, tmp_path):
    holding(monkeypatch, common)
    with pytest.raises(ArgumentError, match=f"^resume: got .*{says}") as caught:
        check_checkpoint(tmp_path, TrainingOptions(), 257)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_a_killed_run_left_is_replaced(tmp_path):
    (tmp_path / TRACKER).write_text("5")
    for name in ("iter_0000010", "iter_0000010.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    checkpoint._make_latest(tmp_path / "iter_0000010.new", tmp_path / "iter_0000010", 10)
    assert (tmp_path / "iter_0000010" / "file").read_text() == "iter_0000010.new"
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert not (tmp_path / "iter_0000010.new").exists()


def compared(tmp_path, ours, theirs):
    """The difference of two runs whose gradients are dictionaries of lists."""
    paths = [tmp_path / "ours.pt", tmp_path / "theirs.pt"]
    for path, gradients in zip(paths, (ours, theirs), strict=True):
        torch.save({weight: torch.tensor(values) for weight, values in gradients.items()}, path)
    return compare_gradients(*paths)


def test_differences_of_gradients_are_relative_to_each_parameter(tmp_path):
    gradients = {"a": [1.0, -2.0], "b": [0.0]}
    assert compared(tmp_path, gradients, gradients)[0] == 0
    error, worst = compared(tmp_path, {"big": [100.0], "small": [1.01]}, {"big": [100.0], "small": [1.0]})
    assert (error, worst) == (pytest.approx(0.01, rel=1e-4), "small")
    # A sum that cancels to less than a thousandth of the largest gradient has fewer correct digits.
    error, worst = compared(tmp_path, {"big": [1.0], "tiny": [3e-8]}, {"big": [1.0], "tiny": [1e-8]})
    assert (error, worst) == (pytest.approx(2e-5, rel=1e-4), "tiny")


@pytest.mark.parametrize("side", [0, 1])
def test_a_gradient_that_is_no_number_is_never_equal(side, tmp_path):
    pair = [{"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [1.0]}]
    pair[side] = {"a": [math.nan], "b": [1.0]}
    error, worst = compared(tmp_path, *pair)
    assert math.isnan(error)
    assert worst == "a"
