"""Sends a run's numbers to TensorBoard or Weights & Biases, for a flag only. Imports nothing heavy before a run."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from megatron_cp.apps.train.options import Run
from megatron_cp.errors import ArgumentError


def check_trackers(tensorboard: str | None, wandb: str | None) -> None:
    """Refuses a tracker whose package is not installed, without importing it."""
    for name, given in (("tensorboard", tensorboard), ("wandb", wandb)):
        if given is not None and not given.strip():
            raise ArgumentError(name, given, "a folder" if name == "tensorboard" else "a project's name")
        if given is not None and find_spec(name) is None:
            raise ArgumentError(name, given, f"only where {name} is installed", f"pip install {name}")


class Trackers:
    """The trackers that a run's flags ask for, which may be none."""

    def __init__(self, run: Run) -> None:
        self._board: Any = None
        self._wandb: Any = None
        if run.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(run.tensorboard)
        if run.wandb is not None:
            import wandb

            self._wandb = wandb.init(project=run.wandb, name=run.folder.name, config=asdict(run.options))

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        """Sends the numbers of a step; texts and tables are left out."""
        kept = {name: value for name, value in numbers.items() if isinstance(value, int | float) and name != "step"}
        if self._board is not None:
            for name, value in kept.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(kept, step=step)

    def close(self) -> None:
        """Waits until everything is written."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
