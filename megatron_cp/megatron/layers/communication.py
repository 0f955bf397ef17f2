"""Reads a layer's group and options from Megatron's process groups and configuration."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch.distributed as dist

from megatron_cp.executor.groups import RankGroup, TorchGroup, as_rank_group
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.megatron.packed_seq_params import OneRank
from megatron_cp.plan.schemes import may_exchange_heads
from megatron_cp.plan.transport import Transport, knows_hosts


def cp_ranks(group: dist.ProcessGroup | None) -> RankGroup:
    """Returns Megatron's context-parallel group, or this rank only without context parallelism."""
    return as_rank_group(None, 1) if group is None or group.size() == 1 else TorchGroup(group)


def with_one_cp_rank(pg_collection: Any) -> Any:
    """Returns Megatron's process groups with one context-parallel rank.

    Constructors of Megatron's linear layers get it, since they assert that sizes are multiples of the number of ranks,
    for an exchange of their own that is not used here.
    """
    alone = copy.copy(pg_collection)
    alone.cp = OneRank()
    return alone


def no_heads(mode: str) -> str:
    """Returns the reason why a linear layer uses neither codec nor head chunks, if it has no heads to exchange."""
    return "" if may_exchange_heads(mode) else "which exchanges no heads"


def spec_options(config: Any, ranks: RankGroup, how: str, *, uncoded: str = "", unchunked: str = "") -> dict[str, Any]:
    """Returns the arguments that the specs of all kinds of layers read from the configuration.

    It is collective: call it while the model is built. A codec and head chunks that a layer does not use are left out,
    with a warning.

    Args:
        how: the layer and its scheme, for the warning.
        uncoded, unchunked: the reason why none of the layer's messages is coded, and why its heads do not travel in
            chunks, for the warning; empty if they may.
    """
    transport, codec = getattr(config, "cp_transport", "collective"), getattr(config, "cp_codec", "none")
    chunks = getattr(config, "cp_head_chunks", None)
    for flag, given, reason in (("codec", codec, uncoded), ("head-chunks", chunks, unchunked)):
        if given not in ("none", None, 1) and reason and ranks.size > 1:
            warnings.warn(f"--cp-{flag} {given} does nothing for {how}, {reason}.", stacklevel=3)
    codec, chunks = "none" if uncoded else codec, None if unchunked else chunks
    return {
        "head_chunks": chunks,
        "transport": Transport(transport, hosts_of(ranks)) if knows_hosts(transport) else Transport.named(transport),
        "codec": codec,
        "hardware": getattr(config, "cp_hardware", None),
        "item_size": config.params_dtype.itemsize,
    }
