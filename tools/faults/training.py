"""Jobs that are `megatron-cp train`, with the fault put into its steps and its saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.faults import saves
from tools.faults.cases import Case
from tools.faults.faulty import Faulty

_SHAPE = [
    "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "2", "--num-query-groups", "1",
    "--kv-channels", "16", "--linear-num-key-heads", "1", "--linear-num-value-heads", "2", "--linear-key-head-dim", "8",
    "--linear-value-head-dim", "8", "--hybrid-layer-pattern", "G*-", "--device", "cpu", "--seq-length", "64",
    "--global-batch-size", "1", "--lr-warmup-iters", "1", "--train-iters", "4", "--save-interval", "1",
]  # fmt: skip
_FIRST_STEP = 40.0  # the limit of the first step and of saving is ten minutes, for which no campaign has the time


def prepare(folder: Path) -> None:
    """Writes documents to train on."""
    (folder / "documents").mkdir()
    for number, length in enumerate((7, 1, 130, 64, 90)):
        (folder / "documents" / f"{number}.txt").write_text((f"{number} and on, " * length)[:length])
    (folder / saves.CHECKPOINTS).symlink_to(folder / "run" / saves.CHECKPOINTS)  # as the command calls it


def run(case: Case, folder: Path) -> int:
    """Runs the command, which starts its ranks, or is one of those that torchrun has started; its exit code."""
    from megatron_cp.cli.main import main

    _put_faults_in(case, folder)
    where = ["--data-path", str(folder / "documents"), "--run-dir", str(folder / "run"), "--seed", str(case.seed)]
    return main(["train", "--context-parallel-size", str(case.cp_size), *_SHAPE, *where])


def _put_faults_in(case: Case, folder: Path) -> None:
    from megatron_cp.apps.train import checkpoint, loop
    from megatron_cp.executor import launch

    step, forward_step, save_checkpoint = [0], loop.forward_step, checkpoint.save_checkpoint
    made: list[Faulty] = []

    def faulty() -> Faulty:
        made.extend([Faulty(case, dist.get_rank(), folder)] if not made else [])
        return made[0]

    def step_with_fault(*args: Any, **options: Any) -> Any:
        faulty().at("before", step[0])
        with faulty().during("forward", step[0]):
            return forward_step(*args, **options)

    def save_with_fault(target: Path, *args: Any, **options: Any) -> None:
        faulty().start_of_save(step[0])
        with faulty().during("save", step[0]):
            save_checkpoint(target, *args, **options)
        step[0] += 1
        if dist.get_rank() == 0:
            saves.note(folder, step[0])

    loop.forward_step, checkpoint.save_checkpoint = step_with_fault, save_with_fault
    launch.FIRST_STEP = _FIRST_STEP
