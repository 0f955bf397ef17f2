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
from megatron_cp.executor.agreement import agree_on_layer
from megatron_cp.executor.groups import RankGroup, TorchGroup, as_rank_group
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.layout import Layout, Packing
from megatron_cp.linear.kernels import LinearKernel
from megatron_cp.megatron.batch import PlannedSeqParams, planned
from megatron_cp.megatron.documents import is_packed
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import AUTO, DEFAULT, REDISTRIBUTE
from megatron_cp.plan.transport import Transport
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
        config: Megatron's configuration, with our options or without.
        slot: its kind of layer.
        ranks: its context-parallel group.
    """

    config: Any
    slot: Slot
    ranks: RankGroup

    def planned(self, packed_seq_params: PackedSeqParams) -> PlannedSeqParams:
        """The packed batch with its plans, in the order that the configuration states for Megatron's own batches."""
        return planned(packed_seq_params, self.ranks, getattr(self.config, "cp_packed_order", None))

    def agree(self, **settings: Any) -> None:
        """Compares what the module fixes while it is built with the other ranks', so that no step has to.

        Raises:
            CallMismatchError: another rank builds it in another way.
        """
        name = f"{type(self).__name__} {getattr(self, 'layer_number', '')}".rstrip()
        agree_on_layer(self.ranks, name, {"kind": self.slot, "type": self.config.params_dtype, **settings})

    def check_rows(self, rows: int, layout: Layout) -> None:
        """Refuses tensors of other rows than those that this rank has of the batch.

        Raises:
            ArgumentError: which, by the name of what Megatron is given.
        """
        local = int(layout.row_counts[self.ranks.rank])
        if rows != local:
            raise ArgumentError(
                "packed_seq_params",
                f"cu_seqlens up to {layout.packing.total}, {local} rows of them on rank {self.ranks.rank}",
                f"the documents of the rows that the layer is given, {rows} on this rank",
                "cu_seqlens end at the number of rows on all ranks; pads behind the last document count as one.",
            )


class LinearModule(ContextParallelModule):
    """A linear layer, whose rows are those of a packed batch or of whole sequences.

    Attributes:
        kernel: what computes it, as the operations of `megatron_cp.linear` take it.
    """

    slot: LinearSlot
    kernel: str | LinearKernel = "auto"
    _unpacked: BatchPlan | None = None  # of the latest shape of unpacked batches, which rarely changes

    def packed_plan(self, packed_seq_params: PackedSeqParams | None, batch: int = 1) -> Plan | None:
        """The plan for the packed documents; None for `batch` sequences side by side."""
        if not is_packed(packed_seq_params, batch):
            return None
        assert packed_seq_params is not None
        plans = self.planned(packed_seq_params).plans
        assert plans is not None
        return plans.plan(self.slot)

    def plan_of(self, rows: int, batch: int, packed_seq_params: PackedSeqParams | None) -> Plan:
        """The plan for `[rows, batch, ...]`: of the packed documents, or else of `batch` sequences in zigzag order.

        Raises:
            ArgumentError: a packed batch of several rows, or documents of another number of tokens.
        """
        plan = self.packed_plan(packed_seq_params, batch)
        if plan is not None:
            if batch != 1:
                refuse("micro_batch_size", batch, "1 for packed batches", "Pack more documents instead.")
            self.check_rows(rows, plan.layout)
            return plan
        if self.slot.mode == REDISTRIBUTE.name:
            refuse("linear_cp_mode", self.slot.mode, "headwise, chunkwise or auto for batches that are not packed", "")
        slot = replace(self.slot, hidden_size=None, run=())  # a layer of its own: only packed batches are redistributed
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
    """The transport that the configuration names. Collective: once a layer, while the model is built."""
    name = getattr(config, "cp_transport", "collective")
    return Transport(name, hosts_of(ranks)) if name == "hierarchical" else Transport.named(name)


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
    if config.context_parallel_size == 1 or cp_comm_type in (None, DEFAULT.name, AUTO):
        return
    remedy = f"{layer} has no keys to pass on: --linear-cp-mode says how it is spread"
    if isinstance(config.cp_comm_type, list):
        refuse("cp_comm_type", cp_comm_type, "a2a or auto for the linear layers of a list", f"{remedy}.")
    warnings.warn(f"--cp-comm-type {cp_comm_type} is for softmax layers alone. {remedy}.", stacklevel=3)


def refuse_unsupported(config: Any) -> None:
    """What no layer here can do: under context parallelism, or where batches and ranks differ in numbers of tokens."""
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise ArgumentError(
            "variable_seq_lengths",
            False,
            "True with --pipeline-model-parallel-size above 1",
            "Packs differ in length, and Megatron has no flag for it: set it in the configuration, as"
            " megatron_cp.megatron.config.TransformerConfig does.",
        )
    if getattr(config, "hybrid_context_parallel", False):
        refuse_feature("hybrid_context_parallel", True, "off")
    if config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather":
        # It gathers as many rows from every rank as there are here.
        refuse_feature("moe_token_dispatcher_type", "allgather", "alltoall or flex with expert parallelism")
    if config.context_parallel_size == 1:
        return
    several = "with --context-parallel-size above 1"
    if not config.calculate_per_token_loss:
        remedy = "Ranks hold different numbers of tokens and of labels: a mean of their means is another loss."
        refuse("calculate_per_token_loss", False, f"True {several}", remedy)
    if config.mtp_num_layers:
        refuse_feature("mtp_num_layers", config.mtp_num_layers, f"0 {several}")
    if config.num_moe_experts:
        _refuse_experts(config, several)


def _refuse_experts(config: Any, several: str) -> None:
    """What makes experts' results depend on which tokens share a rank."""
    for flag in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        given = getattr(config, flag)
        if any(given if isinstance(given, list) else [given]):
            refuse_feature("moe_aux_loss_coeff", given, f"0 {several}", flag=flag)
    balancing = config.moe_router_load_balancing_type
    if balancing in ("sinkhorn", "quantile_balancing"):
        refuse_feature("moe_router_load_balancing_type", balancing, f"none or aux_loss without a coefficient {several}")
    if config.moe_expert_capacity_factor is not None:
        refuse_feature("moe_expert_capacity_factor", config.moe_expert_capacity_factor, f"None {several}")
