"""Checkpoints of a job: written step by step, and looked at when it has ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

CHECKPOINTS, NOTE = "checkpoints", "saved.txt"


def save(folder: Path, state: dict[str, Tensor], step: int) -> None:
    """Saves with the function of `megatron-cp train`. Collective."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_cp.apps.train.checkpoint import save_checkpoint
    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    run_megatron_on_cpu()

    def sharded() -> dict[str, Any]:
        owner = (0, 0, dist.get_rank())
        return {name: ShardedTensor.from_rank_offsets(name, x, replica_id=owner) for name, x in state.items()}

    # The parts of a training that are asked for their state.
    training: Any = SimpleNamespace(
        model=SimpleNamespace(module=SimpleNamespace(sharded_state_dict=sharded)),
        optimizer=SimpleNamespace(sharded_state_dict=lambda *_, **__: {}),
        scheduler=SimpleNamespace(state_dict=lambda: {"step": step}),
    )
    save_checkpoint(folder / CHECKPOINTS, training, {}, step)


def note(folder: Path, step: int) -> None:
    """Writes down that a step's checkpoint has been saved: one of that step or a later one must load from then on."""
    written = folder / f"{NOTE}.new"
    written.write_text(str(step))
    written.replace(folder / NOTE)


def problem(folder: Path) -> str:
    """Describes the defect of the last checkpoint of a job that has ended; empty if there is none."""
    promised = int((folder / NOTE).read_text()) if (folder / NOTE).exists() else 0
    try:
        step = _loaded_step(folder)
    except BaseException as error:
        return f"step {promised} was saved, and loading ends in {type(error).__name__}: {error}" if promised else ""
    return f"step {promised} was saved, and step {step} is there" if step < promised else ""


def _loaded_step(folder: Path) -> int:
    from megatron.core import dist_checkpointing

    from megatron_cp.apps.train.run_folder import latest_checkpoint

    dist.init_process_group("gloo", init_method=f"file://{folder}/loading", rank=0, world_size=1)
    found = latest_checkpoint(folder / CHECKPOINTS)
    common = dist_checkpointing.load_common_state_dict(str(found))
    tensors = dist_checkpointing.load_plain_tensors(str(found))
    weights = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    if not weights:
        raise ValueError("no weights")
    broken = [name for name, x in weights.items() if not x.double().isfinite().all()]
    if broken:
        raise ValueError(f"{broken[0]} is not finite")
    return int(common["megatron_cp"]["iteration"])
