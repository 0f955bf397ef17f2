"""Collectives of one rank to itself, beside the time in which a device copies as many bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.executor.launch import start_torchrun_rank
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.kernel_times import copy_seconds
from tools.gpu_check.device_time import times

MEGABYTES = (4, 256)


def rows(repeats: int, *, small: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each collective and size."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group, hardware = start_torchrun_rank(), machine("h100").hardware
    for megabytes in (2**-6,) if small else MEGABYTES:
        size = int(megabytes * 2**20)
        sent, received = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        starts = {
            "all_to_all": partial(group.start_all_to_all, received, sent, [size], [size]),
            "all_gather": partial(group.start_all_gather, received, sent),
        }
        predicted = round(float(copy_seconds(hardware, size)) * 1e6, 1)
        for name, start in starts.items():
            took = times(lambda start=start: start().wait(), repeats).row()
            yield {"row": name, "column": f"{megabytes} MB", **took, "predicted_us": predicted}
    dist.destroy_process_group()
