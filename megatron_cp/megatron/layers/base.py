"""Base classes of our layers: modules with a spec and a group, which find their batch's plan and check its rows."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.agreement import agree_on_layer
from megatron_cp.executor.groups import RankGroup
from megatron_cp.layout import Layout, Packing
from megatron_cp.linear.kernels import LinearKernel
from megatron_cp.megatron import compat
from megatron_cp.megatron.layers.communication import no_heads, spec_options
from megatron_cp.megatron.layers.refusals import refuse_other_means, refuse_unaligned, refuse_whole_logits
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams, is_packed, planned
from megatron_cp.megatron.rules import named_by_flags, refuse
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import REDISTRIBUTE
from megatron_cp.plan.transport import knows_hosts
from megatron_cp.planner.batch import BatchPlan, LinearSpec, Slot
from megatron_cp.planner.capabilities import require


class ContextParallelModule:
    """A module that runs its tokens over the ranks of the context-parallel group.

    Attributes:
        config: Megatron's configuration, with or without our options.
    """

    config: Any
    slot: Slot
    ranks: RankGroup
    _first_rows: tuple[list[int], bool] | None = None  # of the ranks, and whether pads are among them
    _unpacked: BatchPlan | None = None  # for the latest shape of unpacked batches, which rarely changes

    def planned(self, packed_seq_params: PackedSeqParams) -> PlannedSeqParams:
        """Returns the packed batch with its plans; the configuration has the order of Megatron's own batches."""
        return planned(packed_seq_params, self.ranks, getattr(self.config, "cp_packed_order", None))

    def agree(self, **settings: Any) -> None:
        """Compares the module's settings between ranks while it is built, so that no step has to."""
        name = f"{type(self).__name__} {getattr(self, 'layer_number', '')}".rstrip()
        agree_on_layer(self.ranks, name, {"kind": self.slot, "type": self.config.params_dtype, **settings})

    def ranks_of(self, packed_seq_params: PackedSeqParams | None) -> RankGroup:
        """Returns the ranks of a batch: its own group if it has one, else the layer's.

        Raises:
            ArgumentError: the batch has its own group, and an option needs the group before there is a batch.
        """
        if not isinstance(packed_seq_params, PlannedSeqParams) or packed_seq_params.ranks is None:
            return self.ranks
        if knows_hosts(self.slot.transport.name):  # type: ignore[union-attr]
            remedy = "A batch with its own group may be on other hosts."
            refuse("cp_transport", self.slot.transport, "collective or pairwise with groups for each batch", remedy)
        if not self.config.calculate_per_token_loss:
            remedy = "Groups of different sizes have different numbers of tokens."
            refuse("calculate_per_token_loss", False, "True with groups for each batch", remedy)
        return packed_seq_params.ranks

    def plans_of(
        self, packed_seq_params: PackedSeqParams | None, rows: Tensor
    ) -> tuple[BatchPlan, RankGroup, PlannedSeqParams | None]:
        """Returns the plans and ranks of an attention's rows, and the packed batch's parameters with its plans."""
        refuse_whole_logits(self.config)
        if not is_packed(packed_seq_params, rows.shape[1] if rows.dim() == 4 else 1):
            return self.sequence_plans(self.slot, rows.shape[0]), self.ranks, None
        assert packed_seq_params is not None
        packed = self.planned(packed_seq_params)
        assert packed.plans is not None
        assert packed.run_layout is None, "runs have linear layers only"
        ranks = self.ranks_of(packed)
        self.check_rows(rows.shape[0], packed.plans.layout, ranks)
        self.check_graphs(packed.plans.layout)
        return packed.plans, ranks, packed

    def sequence_plans(self, slot: Slot, rows: int, batch: int = 1) -> BatchPlan:
        """Returns the plans for Megatron's zigzag of `batch` sequences side by side, of `rows` rows on each rank.

        An attention, whose tensors have an axis for the batch, computes all sequences by the plan of one.
        """
        packing = Packing([rows * self.ranks.size] * batch)
        if self._unpacked is None or self._unpacked.layout.packing != packing:
            self._unpacked = BatchPlan(Layout.zigzag(packing, self.ranks.size), [slot])
        return self._unpacked

    def check_rows(self, rows: int, layout: Layout, ranks: RankGroup) -> None:
        """Refuses tensors whose number of rows is not that of this rank's share of the batch."""
        local = int(layout.row_counts[ranks.rank])
        if rows != local:
            raise ArgumentError(
                "packed_seq_params",
                f"cu_seqlens up to {layout.packing.total}, {local} rows of them on rank {ranks.rank}",
                f"the documents of the rows that the layer is given, {rows} on this rank",
                "cu_seqlens end at the number of rows on all ranks; pads behind the last document count as one.",
            )
        refuse_unaligned(self.config, rows)

    def check_graphs(self, layout: Layout) -> None:
        """Refuses a batch that Megatron's graphs, of other modules than this one, were not captured for.

        It does so on every rank. Megatron would find no graph on the ranks whose rows differ, and the others would wait
        for these.
        """
        impl = getattr(self.config, "cuda_graph_impl", "none")
        if impl == "none":
            return
        remedy = "Megatron's graphs have one number of rows: give packs of one length, and --cp-layout contiguous."
        rows, has_pads = given = layout.row_counts.tolist(), bool(layout.pad_rows.any())
        if has_pads and impl == "transformer_engine":
            refuse("cuda_graph_impl", f"{impl} for a batch with pads", "a batch without", "Routers would count them.")
        first_rows, had_pads = self._first_rows = self._first_rows or given
        if rows != first_rows:
            refuse("cuda_graph_impl", f"{rows} rows on the ranks", f"{first_rows}, as of the first batch", remedy)
        if has_pads != had_pads:
            refuse("cuda_graph_impl", "pads in some batches", "pads in all batches, or in none", remedy)


class LinearModule(ContextParallelModule):
    """A linear layer, whose rows are those of a packed batch or of whole sequences.

    Attributes:
        kernel: the `kernel` argument of the operations of `megatron_cp.linear`.
    """

    slot: LinearSpec
    kernel: str | LinearKernel = "auto"

    def set_slot(self, kind: str, name: str, **sizes: Any) -> None:
        """Sets the spec by the configuration, and compares it between ranks; `name` is the layer's, for warnings."""
        mode = require("mode", getattr(self.config, "linear_cp_mode", "auto"), name="--linear-cp-mode")
        if compat.HAS_LINEAR_CP_MODE and mode == compat.LINEAR_CP_MODE and self.ranks.size > 1:
            whose = "the default of --linear-cp-mode in this Megatron; megatron_cp's own is auto"
            warnings.warn(f"Linear layers run {mode}, {whose}.", stacklevel=3)
        unused = no_heads(mode)
        options = spec_options(self.config, self.ranks, f"{name}, {mode}", uncoded=unused, unchunked=unused)
        with named_by_flags():
            self.slot = LinearSpec(kind, mode=mode, **sizes, **options)
        self.agree()

    def packed_plan(self, packed_seq_params: PackedSeqParams | None, batch: int = 1) -> Plan | None:
        """Returns the plan for packed documents, or None for `batch` sequences side by side."""
        if not is_packed(packed_seq_params, batch):
            return None
        assert packed_seq_params is not None
        plans = self.planned(packed_seq_params).plans
        assert plans is not None
        self.refuse_outside_of_stack(plans.layout.cp_size)
        return plans.plan(self.slot)

    def refuse_outside_of_stack(self, cp_size: int) -> None:
        """Refuses redistribution around a layer of no run: nothing there moves hidden states."""
        if cp_size > 1 and self.slot.mode == REDISTRIBUTE.name and self.slot.hidden_size is None:
            allowed = "headwise, chunkwise or auto for a linear layer in no stack of megatron_cp.megatron.specs"
            module = "megatron_cp.megatron.layers.redistribution"
            remedy = "Build GPTModel with gpt_layer_spec, HybridModel with hybrid_stack_spec, or call arrange_runs of"
            refuse("linear_cp_mode", REDISTRIBUTE.name, allowed, f"{remedy} {module}.")

    def plan_of(self, rows: int, batch: int, packed_seq_params: PackedSeqParams | None) -> Plan:
        """Returns the plan for `[rows, batch, ...]`: packed documents, or else `batch` sequences in zigzag order.

        Raises:
            ArgumentError: a packed batch with several sequences, or documents with another number of tokens.
        """
        refuse_whole_logits(self.config)
        plan = self.packed_plan(packed_seq_params, batch)
        refuse_other_means(self.config, packed_seq_params, self.ranks.size if plan is None else plan.layout.cp_size)
        if plan is not None:
            if batch != 1:
                refuse("micro_batch_size", batch, "1 for packed batches", "Pack more documents instead.")
            assert packed_seq_params is not None
            if plan.hidden_layout is not None and self.planned(packed_seq_params).layout != plan.layout:
                remedy = (
                    "The layers of the stack move hidden states when you call them: call whole layers, not their parts."
                )
                allowed = "headwise or chunkwise for a linear layer that is called outside of its stack"
                refuse("linear_cp_mode", REDISTRIBUTE.name, allowed, remedy)
            self.check_rows(rows, plan.layout, self.ranks_of(packed_seq_params))
            self.check_graphs(plan.layout)
            return plan.inside  # the hooks of the run have moved its rows
        if self.slot.mode == REDISTRIBUTE.name:
            refuse("linear_cp_mode", self.slot.mode, "headwise, chunkwise or auto for batches that are not packed", "")
        slot = replace(self.slot, hidden_size=None, run=())  # no run: only packed batches are redistributed
        return self.sequence_plans(slot, rows, batch).plan(slot)
