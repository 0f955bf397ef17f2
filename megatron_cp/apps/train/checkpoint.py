"""Megatron's distributed checkpoints, written so that a run killed at any moment can go on from the last one."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.apps.train.digests import check_digests, write_digests
from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.pickles import names_of_checkpoints_alone
from megatron_cp.apps.train.run_folder import TRACKER, checkpoint_folder, sync, write_whole, writing
from megatron_cp.apps.train.setup import Training
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import naming_lost_ranks
from megatron_cp.megatron import checkpoint_results_in_this_process
from megatron_cp.testing import FLOOR_SHARE, relative_error

_ANY_ERROR = (Exception, CheckpointException)  # torch's is no Exception


def save_checkpoint(
    folder: Path, training: Training, shape: dict[str, Any], iteration: int, data: Mapping[str, Any] | None = None
) -> None:
    """Writes the state after `iteration` steps below `folder`, and then makes it the one to resume from.

    It has another name until it is whole and on disk, so that a kill or a power cut at any moment leaves the last one.

    Args:
        folder: the folder of the run's checkpoints; no other run writes there.
        shape: options that a model that loads it must share, from `TrainingOptions.shape`.
        data: what the steps read, from `TrainingOptions.data`; None leaves out the warning about other data.

    Raises:
        ArgumentError: it cannot be written, or would replace the one to resume from; on the ranks that see it.
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
            about = {"iteration": iteration, "shape": shape, "data": dict(data or {})}
            _write({**_state(training), "megatron_cp": about}, new)
            write_digests(new)
            if is_first:
                _make_latest(new, target, iteration)
        except OSError:
            if is_first:
                shutil.rmtree(new, ignore_errors=True)  # a full disk stays full otherwise
            raise
        dist.barrier()


def _write(state: dict[str, Any], folder: Path) -> None:
    # Megatron logs why a thread could not write, and raises something else.
    logger, heard = logging.getLogger(filesystem_async.__name__), _Heard(logging.ERROR)
    logger.addHandler(heard)
    logger.propagate = False
    try:
        with checkpoint_results_in_this_process():
            dist_checkpointing.save(state, str(folder))
    except CheckpointException as error:  # on every rank
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, heard.reason)
        raise OSError(next(filter(None, reasons), str(error).strip().splitlines()[-1])) from None
    except AssertionError as error:  # on the rank of the thread
        raise OSError(heard.reason or f"{error}") from None
    finally:
        logger.removeHandler(heard)
        logger.propagate = True


class _Heard(logging.Handler):
    """Keeps the first error that is logged."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.reason = self.reason or record.getMessage().partition("error: ")[2]


def _make_latest(new: Path, target: Path, iteration: int) -> None:
    tracker = target.parent / TRACKER
    if target.exists():
        if tracker.exists() and tracker.read_text().strip() == str(iteration):
            allowed = "a folder without a checkpoint of that step"
            raise ArgumentError("run_dir", str(target), allowed, "A run has saved it; to go on from there: --resume.")
        shutil.rmtree(target)  # a run was killed before it named this checkpoint
    for path in (*new.iterdir(), new):
        sync(path)
    new.replace(target)
    write_whole(tracker, str(iteration))


def check_checkpoint(checkpoint: Path, options: TrainingOptions, vocab_size: int) -> int:
    """Returns the number of steps in a checkpoint, if a run of `options` on data of that vocabulary can go on from it.

    If there is a process group every rank must call it.

    Raises:
        ArgumentError: it is damaged, names what no checkpoint needs, or is of another model; the differences are named.
    """
    check_digests(checkpoint)
    try:
        saved = _common_state(checkpoint)["megatron_cp"]
        before = {str(name): value for name, value in dict(saved["shape"]).items()}
        iteration = int(saved["iteration"])
    except _ANY_ERROR as error:  # whatever a damaged file leads to
        raise _unreadable(checkpoint, error) from None
    shape = options.shape(vocab_size)
    differences = [
        f"--{name.replace('_', '-')} was {before.get(name, 'not known')}, is {shape.get(name)}"
        for name in {**before, **shape}
        if name not in before or shape.get(name) != before[name]
    ]
    if differences:
        if any("--padded-vocab-size" in difference for difference in differences):
            differences.append(
                "a vocabulary is padded to a multiple of --make-vocab-size-divisible-by times "
                "--tensor-model-parallel-size: choose the former so that the padded size stays"
            )
        raise ArgumentError(
            "resume", str(checkpoint), "a checkpoint of the same model and optimizer", f"{'; '.join(differences)}."
        )
    if iteration >= options.train_iters:
        allowed = f"more than the {iteration} steps that the checkpoint holds"
        raise ArgumentError("train_iters", options.train_iters, allowed)
    return iteration


def other_data(checkpoint: Path, data: Mapping[str, Any]) -> list[str]:
    """Describes the options and documents that decide what is read and differ from those of the checkpoint.

    A resumed run reads on at the pack with the next number, which is another place if the order differs.
    """
    before = _common_state(checkpoint)["megatron_cp"].get("data", {})
    return [
        f"--{name.replace('_', '-')} was {before[name]}, is {value}"
        for name, value in data.items()
        if name in before and before[name] != value
    ]


def _common_state(checkpoint: Path) -> dict[str, Any]:
    with names_of_checkpoints_alone():
        FileSystemReader(checkpoint).read_metadata()  # torch's loader would try other files before it said why
        found: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(checkpoint))
    return found


def _unreadable(checkpoint: Path, error: BaseException) -> ArgumentError:
    lines = str(error).strip().splitlines()
    # torch's has every rank's traceback before it.
    said = lines[-1] if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
    named = re.search(r"GLOBAL (\S+) ", str(error))
    if named:  # torch's message also advises to load it nevertheless
        said = f"it names {named[1]}, which no checkpoint needs"
    allowed = "a checkpoint of this model that megatron-cp train has written"
    return ArgumentError("resume", str(checkpoint), allowed, f"Cannot read it: {said}.")


def load_checkpoint(checkpoint: Path, training: Training) -> None:
    """Loads a state that was saved with any number of context-, tensor- or data-parallel ranks."""
    try:
        with names_of_checkpoints_alone():
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


@dataclass(frozen=True)
class GradientDifference:
    """The difference of two sets of gradients.

    Attributes:
        error: the largest over parameters of `max|a - b| / max(max|b|, floor)`. The floor is a thousandth of the
            largest gradient: a sum that cancels to less has fewer correct digits, on one rank too.
        worst: the parameter with the largest difference without the floor.
        worst_error: its `max|a - b| / max|b|`.
        worst_share: its `max|b|` over the largest gradient.
    """

    error: float
    worst: str
    worst_error: float
    worst_share: float


def compare_gradients(ours: list[Path], theirs: list[Path]) -> GradientDifference:
    """Compares the files that `save_gradients` wrote on each tensor-parallel rank of two runs."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        a, b = torch.load(one, weights_only=True), torch.load(other, weights_only=True)
        assert a.keys() == b.keys()
        pairs |= {f"{name} of tensor-parallel rank {number}" if number else name: (a[name], b[name]) for name in b}
    scale = max(float(b.abs().max()) for _, b in pairs.values())
    plain = {name: relative_error(a, b, torch.finfo(torch.float32).tiny) for name, (a, b) in pairs.items()}
    worst = max(plain, key=lambda name: plain[name])
    return GradientDifference(
        error=float(np.max([relative_error(a, b, FLOOR_SHARE * scale) for a, b in pairs.values()])),  # NaN if any is
        worst=worst,
        worst_error=plain[worst],
        worst_share=float(pairs[worst][1].abs().max()) / scale,
    )
