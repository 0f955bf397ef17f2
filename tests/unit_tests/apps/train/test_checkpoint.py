"""Tests of the checkpoint that a run goes on from, and of the distance between the gradients of two runs."""

import math
import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.apps.train import checkpoint
from megatron_cp.apps.train.checkpoint import check_checkpoint, compare_gradients, other_data
from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.run_folder import TRACKER, latest_checkpoint
from megatron_cp.data import TokenCorpus
from megatron_cp.errors import ArgumentError
from tests.refusals import rejects
from tests.unit_tests.apps.train.evil import Evil


def test_the_latest_checkpoint_is_the_one_that_the_tracker_names(tmp_path):
    for iteration in (5, 10):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / TRACKER).write_text("5\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000005"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "It has saved none: a run saves one every"),
        (b"", "invalid literal"),
        (b"\xff", "utf-8"),
        (b"7", "names iter_0000007, which is not"),
    ],
)
def test_rejects_a_folder_without_a_checkpoint(content, says, tmp_path):
    (tmp_path / "iter_0000005").mkdir()
    if content is not None:
        (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(ArgumentError, match=says) as caught:
        latest_checkpoint(tmp_path)
    assert caught.value.argument == "resume"


def holding(monkeypatch, common):
    def load(path):
        if isinstance(common, BaseException):
            raise common
        return common

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", load)
    monkeypatch.setattr(checkpoint, "check_digests", lambda path: None)
    monkeypatch.setattr(FileSystemReader, "read_metadata", lambda reader: None)


def saved_by(options, iteration):
    return {"megatron_cp": {"iteration": iteration, "shape": options.shape(257)}}


def test_rejects_other_vocabularies_and_unknown_shapes(monkeypatch, tmp_path):
    holding(monkeypatch, saved_by(TrainingOptions(), 7))
    assert check_checkpoint(tmp_path, TrainingOptions(context_parallel_size=3, train_iters=300), 257) == 7
    # Its additional entries, untrained, would take part in the softmax.
    holding(monkeypatch, saved_by(TrainingOptions(), 7))
    with pytest.raises(ArgumentError, match=r"--padded-vocab-size was 384, is 512.*--make-vocab-size-divisible-by"):
        check_checkpoint(tmp_path, TrainingOptions(tensor_model_parallel_size=2, train_iters=300), 257)
    same = TrainingOptions(tensor_model_parallel_size=2, make_vocab_size_divisible_by=64, train_iters=300)
    assert check_checkpoint(tmp_path, same, 257) == 7
    saved = saved_by(TrainingOptions(), 7)
    del saved["megatron_cp"]["shape"]["adam_beta1"]
    holding(monkeypatch, saved)
    rejects(r"--adam-beta1 was not known, is 0\.9", check_checkpoint, tmp_path, TrainingOptions(), 257)


def test_rejects_a_checkpoint_of_another_model(monkeypatch, tmp_path):
    holding(monkeypatch, saved_by(TrainingOptions(), 7))
    other = TrainingOptions(hidden_size=64, hybrid_layer_pattern="G", spec=("a", "b"), lr=0.1, adam_beta2=0.5)
    with pytest.raises(ArgumentError) as caught:
        check_checkpoint(tmp_path, other, 300)
    text = str(caught.value)
    assert text.startswith(f"resume: got '{tmp_path}'; allowed: a checkpoint of the same model and optimizer.")
    for difference in (
        "--hidden-size was 128, is 64",
        "--hybrid-layer-pattern was GG*-GG*-, is G",
        "--vocab-size was 257, is 300",
        "--lr was 0.001, is 0.1",
        "--adam-beta2 was 0.95, is 0.5",
        "--spec was ['megatron_cp.megatron.specs', 'hybrid_stack_spec'], is ['a', 'b']",
    ):
        assert difference in text
    assert text.count(" was ") == 6


@pytest.mark.parametrize("train_iters", [6, 7])
def test_rejects_a_checkpoint_with_all_steps(train_iters, monkeypatch, tmp_path):
    holding(monkeypatch, saved_by(TrainingOptions(), 7))
    with pytest.raises(ArgumentError, match=f"train_iters: got {train_iters}; allowed: more than the 7 steps"):
        check_checkpoint(tmp_path, TrainingOptions(train_iters=train_iters, lr_warmup_iters=0), 257)


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
    with pytest.raises(ArgumentError, match=says) as caught:
        check_checkpoint(tmp_path, TrainingOptions(), 257)
    assert caught.value.argument == "resume"
    assert "\n" not in str(caught.value)


def test_a_checkpoint_is_replaced_unless_it_is_the_one_to_resume_from(tmp_path):
    (tmp_path / TRACKER).write_text("5")
    for name in ("iter_0000005", "iter_0000005.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(ArgumentError, match=r"run_dir: got .*iter_0000005'; .* to go on from there: --resume"):
        checkpoint._make_latest(tmp_path / "iter_0000005.new", tmp_path / "iter_0000005", 5)
    assert (tmp_path / "iter_0000005" / "file").read_text() == "iter_0000005"
    (tmp_path / TRACKER).write_text("5")
    for name in ("iter_0000010", "iter_0000010.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    checkpoint._make_latest(tmp_path / "iter_0000010.new", tmp_path / "iter_0000010", 10)
    assert (tmp_path / "iter_0000010" / "file").read_text() == "iter_0000010.new"
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert not (tmp_path / "iter_0000010.new").exists()


def compared(tmp_path, *ranks):
    """The difference of runs whose gradients on each rank are a pair of dictionaries of lists."""
    paths = [], []
    for number, pair in enumerate(ranks):
        for own, name, gradients in zip(paths, ("ours", "theirs"), pair, strict=True):
            own.append(tmp_path / f"{name}.{number}.pt")
            torch.save({weight: torch.tensor(values) for weight, values in gradients.items()}, own[-1])
    return compare_gradients(*paths)


def test_differences_of_gradients_are_relative_to_each_parameter(tmp_path):
    gradients = {"a": [1.0, -2.0], "b": [0.0]}
    found = compared(tmp_path, (gradients, gradients))
    assert (found.error, found.worst_error) == (0, 0)
    found = compared(tmp_path, ({"big": [100.0], "small": [1.01]}, {"big": [100.0], "small": [1.0]}))
    assert found.error == pytest.approx(0.01, rel=1e-4)
    assert found.worst == "small"
    assert found.worst_share == pytest.approx(0.01)
    found = compared(tmp_path, ({"big": [1.0], "tiny": [3e-8]}, {"big": [1.0], "tiny": [1e-8]}))
    assert found.error == pytest.approx(2e-5, rel=1e-4)
    assert found.worst == "tiny"
    assert found.worst_error == pytest.approx(2, rel=1e-4)
    assert found.worst_share == pytest.approx(1e-8)
    same = {"weight": [1000.0]}
    found = compared(tmp_path, (same, same), ({"weight": [2.0]}, {"weight": [1.0]}))
    assert found.error == pytest.approx(1)
    assert found.worst == "weight of tensor-parallel rank 1"
    found = compared(tmp_path, ({"weight": [2.0]}, {"weight": [1.0]}), (same, same))
    assert found.worst == "weight"


def test_rejects_gradients_that_are_code(tmp_path):
    evil = tmp_path / "evil.pt"
    torch.save({"weight": Evil(tmp_path / "ran")}, evil)
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        compare_gradients([evil], [evil])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("side", [0, 1])
def test_a_gradient_that_is_no_number_is_never_equal(side, tmp_path):
    pair = [{"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [1.0]}]
    pair[side] = {"a": [math.nan], "b": [1.0]}
    assert math.isnan(compared(tmp_path, pair).error)


def corpus_of(lengths, *, changed=None):
    """A corpus whose tokens are counted from 0; the one at `changed` is another."""
    flat = np.arange(sum(lengths)) % 256
    if changed is not None:
        flat[changed] += 256
    return TokenCorpus("documents", 512, flat, np.cumsum([0, *lengths]))


def test_a_run_that_goes_on_with_other_data_is_told_what_changed(monkeypatch, tmp_path):
    options, corpus = TrainingOptions(), corpus_of([3, 5, 4])
    about = saved_by(options, 7)
    about["megatron_cp"]["data"] = options.data(corpus)
    holding(monkeypatch, about)
    assert other_data(tmp_path, options.data(corpus)) == []
    moved = TrainingOptions(data_path="elsewhere", context_parallel_size=3, cp_even_packs=True)
    assert other_data(tmp_path, moved.data(corpus)) == []  # the same documents, in the same order
    for change in ({"seq_length": 48}, {"global_batch_size": 3}, {"seed": 5}):
        ((name, value),) = change.items()
        flag = name.replace("_", "-")
        said = f"--{flag} was {getattr(options, name)}, is {value}"
        assert other_data(tmp_path, TrainingOptions(**change).data(corpus)) == [said]
    others = [corpus_of([3, 4, 5]), *(corpus_of([3, 5, 4], changed=token) for token in (0, 4, 11))]
    for other in others:  # other lengths, or another token in one of the documents
        (said,) = other_data(tmp_path, options.data(other))
        assert said.startswith("--data-path was 3 documents of 12 tokens (")
        assert ", is 3 documents of 12 tokens (" in said
    holding(monkeypatch, saved_by(options, 7))
    assert other_data(tmp_path, options.data(corpus)) == []


def test_a_corpus_is_known_by_documents_all_over_it():
    """Without reading all of it: a corpus may be larger than memory."""
    options, lengths = TrainingOptions(), [5000] * 300
    known = options.data(corpus_of(lengths))
    for document in (0, 299):
        assert options.data(corpus_of(lengths, changed=5000 * document + 1023)) != known
    read = []
    corpus = corpus_of(lengths)
    tokens = TokenCorpus.tokens

    class Counted(TokenCorpus):
        def tokens(self, document, start=0, end=None):
            read.append(found := tokens(self, document, start, end))
            return found

    assert options.data(Counted(**{field.name: getattr(corpus, field.name) for field in fields(corpus)})) == known
    assert len(read) == 64
    assert sum(map(len, read)) == 64 * 1024
