"""Megatron's distributed checkpoints, written so that a run killed at any moment can go on from the last one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import verify_integrity_manifest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.run_folder import TRACKER, checkpoint_folder, sync, write_whole, writing
from megatron_cp.apps.train.setup import Training
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import naming_lost_ranks
from megatron_cp.megatron import checkpoint_results_in_this_process
from megatron_cp.testing import FLOOR_SHARE, relative_error

_ANY_ERROR = (Exception, CheckpointException)  # torch's is no Exception


def save_checkpoint(folder: Path, training: Training, shape: dict[str, Any], iteration: int) -> None:
    """Writes the state after `iteration` steps below `folder`, and then makes it the one to resume from.

    It has another name until it is whole and on disk, so that a kill or a power cut at any moment leaves the last one.

    Args:
        folder: the folder of the run's checkpoints; no other run writes there.
        training: the state to write.
        shape: options that a model that loads it must share, from `TrainingOptions.shape`.
        iteration: the steps that are done.

    Raises:
        ArgumentError: it cannot be written; on the ranks that see it.
    """
    target, new = checkpoint_folder(folder, iteration), folder / f"{checkpoint_folder(folder, iteration).name}.new"
    is_first = dist.get_rank() == 0
    with naming_lost_ranks(f"saving {target.name}"), writing(folder, target.name):
        try:
            if is_first:
                for left in folder.glob("iter_*.new"):
                    shutil.rmtree(left)  # a run was killed while it saved
                new.mkdir(parents=True)
            dist.barrier()
            state = {**_state(training), "megatron_cp": {"iteration": iteration, "shape": shape}}
            with checkpoint_results_in_this_process():
                dist_checkpointing.save(state, str(new), verify_integrity=True)
            if is_first:
                _make_latest(new, target, iteration)
        except (OSError, CheckpointException, AssertionError) as error:  # torch's on every rank, Megatron's on one
            if is_first:
                shutil.rmtree(new, ignore_errors=True)  # a full disk stays full otherwise
            said = str(error) if isinstance(error, OSError) else "a writer failed, and Megatron's log above says why"
            raise OSError(said) from None
        dist.barrier()


def _make_latest(new: Path, target: Path, iteration: int) -> None:
    tracker = target.parent / TRACKER
    if target.exists():
        shutil.rmtree(target)  # a run was killed before it named this checkpoint
    for path in (*new.iterdir(), new):
        sync(path)
    new.replace(target)
    write_whole(tracker, str(iteration))


def check_checkpoint(checkpoint: Path, options: TrainingOptions, vocab_size: int) -> int:
    """Returns the number of steps in a checkpoint, if a run of `options` on data of that vocabulary can go on from it.

    If there is a process group every rank must call it.

    Raises:
        ArgumentError: its files are not those that were saved, or it is of another model; the differences are named.
    """
    try:
        verify_integrity_manifest(str(checkpoint))
        saved = dist_checkpointing.load_common_state_dict(str(checkpoint))["megatron_cp"]
        before, iteration = dict(saved["shape"]), int(saved["iteration"])
    except _ANY_ERROR as error:  # whatever a damaged file leads to
        raise _unreadable(checkpoint, error) from None
    shape = options.shape(vocab_size)
    differences = [
        f"--{name.replace('_', '-')} was {before.get(name, 'not known')}, is {shape.get(name)}"
        for name in {**before, **shape}
        if name not in before or shape.get(name) != before[name]
    ]
    if differences:
        raise ArgumentError(
            "resume", str(checkpoint), "a checkpoint of the same model and optimizer", f"{'; '.join(differences)}."
        )
    if iteration >= options.train_iters:
        allowed = f"more than the {iteration} steps of the checkpoint"
        raise ArgumentError("train_iters", options.train_iters, allowed)
    return iteration


def _unreadable(checkpoint: Path, error: BaseException) -> ArgumentError:
    lines = str(error).strip().splitlines()
    # torch's has every rank's traceback before it.
    said = lines[-1].strip() if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
    allowed = "a checkpoint of this model that megatron-cp train has written"
    return ArgumentError("resume", str(checkpoint), allowed, f"Cannot read it: {said}.")


def load_checkpoint(checkpoint: Path, training: Training) -> None:
    """Loads a state that was saved with any number of context-, tensor- or data-parallel ranks."""
    try:
        state = dist_checkpointing.load(_state(training, is_loading=True), str(checkpoint))
        training.model.module.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.scheduler.load_state_dict(state["scheduler"])
    except _ANY_ERROR as error:  # whatever a damaged file leads to
        raise _unreadable(checkpoint, error) from None


def _state(training: Training, *, is_loading: bool = False) -> dict[str, Any]:
    model = training.model.module.sharded_state_dict()
    return {
        "model": model,
        "optimizer": training.optimizer.sharded_state_dict(model, is_loading=is_loading),
        "scheduler": training.scheduler.state_dict(),
    }


def save_gradients(path: Path, training: Training) -> None:
    """Saves this rank's gradients, as reduced and normalised, by parameter name."""
    gradients = {name: weight.main_grad.cpu().clone() for name, weight in training.model.module.named_parameters()}
    torch.save(gradients, path)


def compare_gradients(ours: Path, theirs: Path) -> tuple[float, str]:
    """Compares the files that `save_gradients` wrote in two runs.

    Returns:
        The largest over parameters of `max|a - b| / max(max|b|, floor)`, NaN if any is, and the parameter that has it.
        The floor is a thousandth of the largest gradient: a sum that cancels to less has fewer correct digits, on one
        rank too.
    """
    a, b = (torch.load(path, weights_only=True) for path in (ours, theirs))
    assert a.keys() == b.keys()
    floor = FLOOR_SHARE * max(float(gradient.abs().max()) for gradient in b.values())
    errors = [relative_error(a[name], b[name], floor) for name in b]
    worst = int(np.argmax(errors))  # the first NaN, if there is one
    return float(errors[worst]), list(b)[worst]
