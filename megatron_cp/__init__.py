"""Context parallelism for packed batches: exact for every document length and head count.

Names are imported when first used, so that a data loader can plan and shard without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_cp.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_cp import nn as nn
    from megatron_cp.batch.gradients import reduce_gradients as reduce_gradients
    from megatron_cp.batch.graph_tables import GraphTables as GraphTables
    from megatron_cp.batch.loss import token_loss as token_loss
    from megatron_cp.batch.shard import LocalBatch as LocalBatch
    from megatron_cp.batch.shard import shard_batch as shard_batch
    from megatron_cp.errors import ArgumentError as ArgumentError
    from megatron_cp.errors import CallMismatchError as CallMismatchError
    from megatron_cp.errors import PeerError as PeerError
    from megatron_cp.errors import PlanMismatchError as PlanMismatchError
    from megatron_cp.executor.agreement import check_agreement as check_agreement
    from megatron_cp.executor.agreement import compare_calls as compare_calls
    from megatron_cp.executor.gather import gather as gather
    from megatron_cp.executor.hosts import hosts_of as hosts_of
    from megatron_cp.executor.relayout import relayout as relayout
    from megatron_cp.layout import Layout as Layout
    from megatron_cp.layout import Packing as Packing
    from megatron_cp.layout import Route as Route
    from megatron_cp.layout.mask import Mask as Mask
    from megatron_cp.linear.causal_conv1d import causal_conv1d as causal_conv1d
    from megatron_cp.linear.gated_delta_net import gated_delta_net as gated_delta_net
    from megatron_cp.linear.gated_delta_net import gated_delta_rule as gated_delta_rule
    from megatron_cp.linear.kimi_delta_attention import kda as kda
    from megatron_cp.linear.kimi_delta_attention import kda_mixer as kda_mixer
    from megatron_cp.linear.mamba2 import mamba2 as mamba2
    from megatron_cp.linear.mamba2 import mamba2_mixer as mamba2_mixer
    from megatron_cp.plan.plan import Plan as Plan
    from megatron_cp.plan.transport import Transport as Transport
    from megatron_cp.planner.attention import plan_attention as plan_attention
    from megatron_cp.planner.batch import AttentionSpec as AttentionSpec
    from megatron_cp.planner.batch import BatchPlan as BatchPlan
    from megatron_cp.planner.batch import LinearSpec as LinearSpec
    from megatron_cp.planner.layouts import choose_layout as choose_layout
    from megatron_cp.planner.linear import plan_linear as plan_linear
    from megatron_cp.softmax.attention import attention as attention
    from megatron_cp.softmax.attention import projected_attention as projected_attention

__version__ = "0.1.0"

_HOMES = {
    "ArgumentError": "megatron_cp.errors",
    "AttentionSpec": "megatron_cp.planner.batch",
    "BatchPlan": "megatron_cp.planner.batch",
    "CallMismatchError": "megatron_cp.errors",
    "Layout": "megatron_cp.layout",
    "LinearSpec": "megatron_cp.planner.batch",
    "LocalBatch": "megatron_cp.batch.shard",
    "Mask": "megatron_cp.layout.mask",
    "Packing": "megatron_cp.layout",
    "PeerError": "megatron_cp.errors",
    "Plan": "megatron_cp.plan.plan",
    "PlanMismatchError": "megatron_cp.errors",
    "GraphTables": "megatron_cp.batch.graph_tables",
    "Route": "megatron_cp.layout",
    "Transport": "megatron_cp.plan.transport",
    "attention": "megatron_cp.softmax.attention",
    "causal_conv1d": "megatron_cp.linear.causal_conv1d",
    "check_agreement": "megatron_cp.executor.agreement",
    "choose_layout": "megatron_cp.planner.layouts",
    "compare_calls": "megatron_cp.executor.agreement",
    "gated_delta_net": "megatron_cp.linear.gated_delta_net",
    "gated_delta_rule": "megatron_cp.linear.gated_delta_net",
    "gather": "megatron_cp.executor.gather",
    "hosts_of": "megatron_cp.executor.hosts",
    "kda": "megatron_cp.linear.kimi_delta_attention",
    "kda_mixer": "megatron_cp.linear.kimi_delta_attention",
    "mamba2": "megatron_cp.linear.mamba2",
    "mamba2_mixer": "megatron_cp.linear.mamba2",
    "plan_attention": "megatron_cp.planner.attention",
    "plan_linear": "megatron_cp.planner.linear",
    "projected_attention": "megatron_cp.softmax.attention",
    "reduce_gradients": "megatron_cp.batch.gradients",
    "relayout": "megatron_cp.executor.relayout",
    "shard_batch": "megatron_cp.batch.shard",
    "token_loss": "megatron_cp.batch.loss",
}

_ROOMS = ("nn",)  # of which a name is a whole module

__all__ = sorted((*_HOMES, *_ROOMS))

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _ROOMS)
