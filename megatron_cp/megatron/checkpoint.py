"""Megatron's distributed checkpoints, written so that a run killed at any moment can go on from the last one."""

from __future__ import annotations

import queue
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.errors import ArgumentError
from megatron_cp.megatron.model import Training
from megatron_cp.megatron.options import TrainingOptions
from megatron_cp.testing.parity import FLOOR_SHARE, relative_error

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name for it
_ANY_ERROR = (Exception, CheckpointException)  # torch's is no Exception


def save_checkpoint(folder: Path, training: Training, shape: dict[str, Any], iteration: int) -> None:
    """Writes the state after `iteration` steps below `folder`, and only then makes it the one to resume from.

    `shape` is what a model that loads it must have too, from `TrainingOptions.shape`.
    """
    target = folder / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)  # what a killed run left behind
        target.mkdir(parents=True)
    dist.barrier()
    # Megatron's own queue is a process more for each rank, which takes seconds to start and outlives a rank that is
    # killed. What is saved at once needs none: threads of this process write.
    known, filesystem_async._results_queue = filesystem_async._results_queue, queue.SimpleQueue()
    state = _state(training)
    state["megatron_cp"] = {"iteration": iteration, "shape": shape}
    try:
        dist_checkpointing.save(state, str(target))
    finally:
        filesystem_async._results_queue = known
    dist.barrier()
    if dist.get_rank() == 0:
        written = folder / f"{TRACKER}.new"
        written.write_text(str(iteration))
        written.replace(folder / TRACKER)  # at once or not at all
    dist.barrier()


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint that a run in `folder` can go on from.

    Raises:
        ArgumentError: there is none.
    """
    allowed = "a folder in which a run has saved a checkpoint"
    tracker = folder / TRACKER
    try:
        iteration = int(tracker.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError("resume", str(folder), allowed, f"Cannot read {TRACKER}: {error}.") from None
    found = folder / f"iter_{iteration:07d}"
    if not found.is_dir():
        raise ArgumentError("resume", str(folder), allowed, f"{TRACKER} names {found.name}, which is not there.")
    return found


def check_checkpoint(checkpoint: Path, options: TrainingOptions, vocab_size: int) -> int:
    """The number of steps that the checkpoint holds, if a run of `options` on data of that vocabulary can go on.

    Raises:
        ArgumentError: it is unreadable, or of another model; the differences are named.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(checkpoint))
        saved = common["megatron_cp"]
    except _ANY_ERROR as error:  # whatever a damaged file leads to
        raise _unreadable(checkpoint, error) from None
    shape = options.shape(vocab_size)
    differences = [
        f"--{name.replace('_', '-')} was {value}, is {shape.get(name)}"
        for name, value in saved["shape"].items()
        if shape.get(name) != value
    ]
    if differences:
        raise ArgumentError(
            "resume", str(checkpoint), "a checkpoint of the same model and optimizer", f"{'; '.join(differences)}."
        )
    if saved["iteration"] >= options.train_iters:
        allowed = f"more than the {saved['iteration']} steps that the checkpoint holds"
        raise ArgumentError("train_iters", options.train_iters, allowed)
    return int(saved["iteration"])


def _unreadable(checkpoint: Path, error: BaseException) -> ArgumentError:
    lines = str(error).strip().splitlines()
    # torch's has every rank's traceback before it.
    said = lines[-1] if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
    allowed = "a checkpoint of this model that megatron-cp train has written"
    return ArgumentError("resume", str(checkpoint), allowed, f"Cannot read it: {said}.")


def load_checkpoint(checkpoint: Path, training: Training) -> None:
    """Loads a state that was saved with any number of context-, tensor- or data-parallel ranks.

    Raises:
        ArgumentError: it is damaged, or of a model whose weights have other shapes.
    """
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
    """This rank's gradients, as reduced and normalised, by parameter name."""
    gradients = {name: weight.main_grad.cpu().clone() for name, weight in training.model.module.named_parameters()}
    torch.save(gradients, path)


@dataclass(frozen=True)
class GradientDifference:
    """How far two sets of gradients are apart.

    Attributes:
        error: the largest over parameters of `max|a - b| / max(max|b|, floor)`, the floor a thousandth of the largest
            gradient of all: what cancels to less than that is known to fewer digits, on one rank too.
        worst: the parameter that is furthest apart without the floor.
        worst_error: its `max|a - b| / max|b|`.
        worst_share: its `max|b|` over the largest gradient of all.
    """

    error: float
    worst: str
    worst_error: float
    worst_share: float


def compare_gradients(ours: list[Path], theirs: list[Path]) -> GradientDifference:
    """Compares what `save_gradients` wrote on each tensor-parallel rank of two runs."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        a, b = torch.load(one), torch.load(other)
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
