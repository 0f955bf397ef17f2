"""`bench layer --profile`: profiles one forward and backward of our layer on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_cp.executor import RankGroup


def trace_files(path: str, layers: list[str]) -> dict[str, str]:
    """Returns the file of each layer: the path itself for one layer, else with the layer's name before its ending."""
    if len(layers) == 1:
        return {layers[0]: path}
    target = Path(path)
    return {layer: str(target.with_name(f"{target.stem}.{layer}{target.suffix}")) for layer in layers}


def write_trace(step: Callable[[], Any], group: RankGroup, device: torch.device, path: str) -> None:
    """Runs a step under the profiler on every rank, and writes rank 0's trace."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for last in (False, True):  # the first is not kept: in it the profiler starts up
        group.barrier()
        with profile(activities=activities, acc_events=True) as found:
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if last and group.rank == 0:
            found.export_chrome_trace(path)
            if not Path(path).is_file():  # torch says so in its log alone
                raise OSError(f"the trace could not be written to {path}")
