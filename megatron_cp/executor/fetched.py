"""Rows of a `Fetch` on a device: its tables, and rows put in order."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.communicator import Communicator
from megatron_cp.plan.flows import Fetch


def fetch_index(flow: Fetch, kv_rank: int, name: str, device: torch.device) -> Tensor:
    """A table of a fetch on a device; where rows stand among equal shares is the same for every rank.

    Args:
        name: "send_rows", "order" or "inverse", of `FetchTables`; or "shares".
    """
    if name == "shares":
        return flow.memo((name, device), lambda: on_device(flow.shares(), device))
    return flow.memo((name, kv_rank, device), lambda: on_device(getattr(flow.tables(kv_rank), name), device))


def reordered(rows: Tensor, index: Tensor, comm: Communicator) -> Tensor:
    """The rows of a buffer in another one, which takes its place."""
    ordered = comm.buffers.acquire_like(rows, len(index), *rows.shape[1:])
    torch.index_select(rows, 0, index, out=ordered)
    comm.release(rows)
    return ordered


def prepare_fetch(flow: Fetch, kv_rank: int, device: torch.device) -> None:
    """Makes the tables that a fetch, and the way back, use."""
    tables = flow.tables(kv_rank)
    _ = flow.split_counts
    fetch_index(flow, kv_rank, "send_rows", device)
    if tables.inverse is not None:
        fetch_index(flow, kv_rank, "inverse", device)
    if flow.message_rows(kv_rank).ordered is not None:
        fetch_index(flow, kv_rank, "shares" if flow.equal_shares else "order", device)
