"""What the modules share: their slots, their group, their norm, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, TorchGroup, as_rank_group
from megatron_cp.planner.batch import Slot
from megatron_cp.planner.capabilities import remark


def slots_of(*models: nn.Module) -> list[Slot]:
    """The kinds of layers in one or several model chunks: what `shard_batch` plans for."""
    return list(
        dict.fromkeys(
            module.slot for model in models for module in model.modules() if isinstance(module, ContextParallelModule)
        )
    )


class Norm:
    """torch's norm as Megatron wraps it, also under sequence parallelism and for any spec that asks."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False  # the wrapper refuses it, although marking the weights is all that it takes
        norm = WrappedTorchNorm(plain, hidden_size, eps, **others)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


class ContextParallelModule:
    """A module that runs its tokens over the ranks of the context-parallel group.

    Attributes:
        slot: its kind of layer.
        ranks: its context-parallel group.
    """

    slot: Slot
    ranks: RankGroup


def cp_ranks(group: dist.ProcessGroup | None) -> RankGroup:
    """Megatron's context-parallel group, which is None or of one rank where there is no context parallelism."""
    return as_rank_group(None, 1) if group is None or group.size() == 1 else TorchGroup(group)


def refuse(argument: str, given: object, allowed: str, remedy: str) -> None:
    """Raises an `ArgumentError` that names Megatron's flag, while the model is built."""
    raise ArgumentError(f"--{argument.replace('_', '-')}", given, allowed, remedy)


def refuse_feature(feature: str, given: object, allowed: str, *, flag: str | None = None) -> None:
    """`refuse` with what the capability table says about the feature; the flag is called like it, or `flag`."""
    refuse(flag or feature, given, allowed, f"{feature.replace('_', ' ')}: {remark('megatron', feature)}.")


def refuse_unsupported(config: Any) -> None:
    """What no layer here can do yet: under context parallelism, or where ranks hold different numbers of tokens."""
    if getattr(config, "hybrid_context_parallel", False):
        refuse_feature("hybrid_context_parallel", True, "off")
    if config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather":
        # It gathers as many rows from every rank as there are here.
        refuse_feature("moe_token_dispatcher_type", "allgather", "alltoall or flex with expert parallelism")
    if config.context_parallel_size == 1:
        return
    if config.mtp_num_layers:
        refuse_feature("mtp_num_layers", config.mtp_num_layers, "0 with --context-parallel-size above 1")
    if config.num_moe_experts and _has_auxiliary_loss(config):
        refuse_feature("moe_aux_loss", config.moe_aux_loss_coeff, "0 with --context-parallel-size above 1")


def _has_auxiliary_loss(config: Any) -> bool:
    coefficients = config.moe_aux_loss_coeff
    values = coefficients if isinstance(coefficients, list) else [coefficients]
    return any(values) or bool(config.moe_z_loss_coeff)
