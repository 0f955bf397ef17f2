"""Reads a layer's group, transport and codec from Megatron's process groups and configuration."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from megatron_cp.executor.groups import RankGroup, TorchGroup, as_rank_group
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.plan.transport import Transport, knows_hosts


def cp_ranks(group: dist.ProcessGroup | None) -> RankGroup:
    """Returns Megatron's context-parallel group, or this rank only without context parallelism."""
    return as_rank_group(None, 1) if group is None or group.size() == 1 else TorchGroup(group)


def transport_of(config: Any, ranks: RankGroup) -> Transport:
    """Returns the transport that the configuration names. It is collective; call it while the model is built."""
    name = getattr(config, "cp_transport", "collective")
    return Transport(name, hosts_of(ranks)) if knows_hosts(name) else Transport.named(name)


def codec_of(config: Any, ranks: RankGroup, *, exchanges: bool, how: str) -> str:
    """Returns the configuration's codec if the layer exchanges heads; else "none", with a warning."""
    name: str = getattr(config, "cp_codec", "none")
    if exchanges or name == "none":
        return name
    if ranks.size > 1:
        warnings.warn(f"--cp-codec {name} does nothing for {how}: heads do not change places.", stacklevel=3)
    return "none"
