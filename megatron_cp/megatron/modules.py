"""What the modules share: their slots, their group, their plans, their norm, and what they refuse."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, TorchGroup, as_rank_group
from megatron_cp.executor.plan import Plan
from megatron_cp.executor.transport import Transport
from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron.batch import planned
from megatron_cp.planner.batch import BatchPlan, LinearSlot, Slot
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


class LinearModule(ContextParallelModule):
    """A linear layer, whose rows are those of a packed batch or of whole sequences."""

    slot: LinearSlot
    _unpacked: BatchPlan | None = None  # of the latest shape of unpacked batches, which rarely changes

    def packed_plan(self, packed_seq_params: PackedSeqParams | None) -> Plan | None:
        """The plan for the packed documents; None for batches that are not packed."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            return None
        plans = planned(packed_seq_params, self.ranks).plans
        assert plans is not None
        return plans.plan(self.slot)

    def plan_of(self, rows: int, batch: int, packed_seq_params: PackedSeqParams | None) -> Plan:
        """The plan for `[rows, batch, ...]`: of the packed documents, or else of `batch` sequences in zigzag order.

        Raises:
            ArgumentError: a packed batch of several rows.
        """
        plan = self.packed_plan(packed_seq_params)
        if plan is not None:
            if batch != 1:
                refuse("micro_batch_size", batch, "1 for packed batches", "Pack more documents instead.")
            return plan
        if self.slot.mode == "relay":
            refuse("linear_cp_mode", "relay", "headwise, chunkwise or auto for batches that are not packed", "")
        slot = replace(self.slot, hidden_size=None, run=())  # a layer of its own: only packed batches are relayed
        packing = Packing([rows * self.ranks.size] * batch)
        if self._unpacked is None or self._unpacked.layout.packing != packing:
            self._unpacked = BatchPlan(Layout.zigzag(packing, self.ranks.size), [slot])
        return self._unpacked.plan(slot)


@contextlib.contextmanager
def exchanged(module: ModuleType, **values: Any) -> Iterator[None]:
    """Other values for names of a module of Megatron's, while one of its constructors looks at them."""
    had = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(had)


def cp_ranks(group: dist.ProcessGroup | None) -> RankGroup:
    """Megatron's context-parallel group, which is None or of one rank where there is no context parallelism."""
    return as_rank_group(None, 1) if group is None or group.size() == 1 else TorchGroup(group)


def transport_of(config: Any, ranks: RankGroup) -> Transport:
    """The road that the configuration names. Every rank of the group asks, once a layer, while the model is built."""
    name = getattr(config, "cp_transport", "collective")
    return Transport.of_hosts(name, ranks)


def codec_of(config: Any, ranks: RankGroup, *, exchanges: bool, how: str) -> str:
    """The codec that the configuration names, for a layer that exchanges heads; else none, and a word about it."""
    name: str = getattr(config, "cp_codec", "none")
    if exchanges or name == "none":
        return name
    if ranks.size > 1:
        warnings.warn(f"--cp-codec {name} does nothing for {how}: heads do not change places.", stacklevel=3)
    return "none"


def refuse(argument: str, given: object, allowed: str, remedy: str) -> None:
    """Raises an `ArgumentError` that names Megatron's flag, while the model is built."""
    raise ArgumentError(f"--{argument.replace('_', '-')}", given, allowed, remedy)


def refuse_feature(feature: str, given: object, allowed: str, *, flag: str | None = None) -> None:
    """`refuse` with what the capability table says about the feature; the flag is called like it, or `flag`."""
    refuse(flag or feature, given, allowed, f"{feature.replace('_', ' ')}: {remark('megatron', feature)}.")


def check_comm_type(config: Any, cp_comm_type: str | None, layer: str) -> None:
    """Says that keys do not travel between linear layers: an error where a list asks it of one, else a warning."""
    if config.context_parallel_size == 1 or cp_comm_type in (None, "a2a", "auto"):
        return
    remedy = f"{layer} has no keys to pass on: --linear-cp-mode says how it is spread"
    if isinstance(config.cp_comm_type, list):
        refuse("cp_comm_type", cp_comm_type, "a2a or auto for the linear layers of a list", f"{remedy}.")
    warnings.warn(f"--cp-comm-type {cp_comm_type} is for softmax layers alone. {remedy}.", stacklevel=3)


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
