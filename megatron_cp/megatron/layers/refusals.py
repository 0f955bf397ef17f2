"""What our layers refuse while a model is built, by the names of Megatron's flags."""

from __future__ import annotations

import warnings
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.errors import ArgumentError
from megatron_cp.plan.schemes import AUTO, DEFAULT
from megatron_cp.planner.capabilities import remark


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


def refuse_other_means(config: Any, params: PackedSeqParams | None, cp_size: int) -> None:
    """A mean of the ranks' means, where nobody says that the batch's loss is the mean of one rank."""
    if cp_size == 1 or config.calculate_per_token_loss or getattr(params, "mean_is_of_all_ranks", False):
        return
    remedy = (
        "Ranks hold different numbers of tokens and of labels: a mean of their means is another loss. Without the flag"
        " take the loss of megatron_cp.megatron.loss: forward_step, or loss_of(batch, config) in a step of your own."
    )
    refuse("calculate_per_token_loss", False, "True with --context-parallel-size above 1", remedy)


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
    if getattr(config, "cuda_graph_impl", "none") != "none":
        refuse_feature("cuda_graph_impl", config.cuda_graph_impl, "none")
    if getattr(config, "hybrid_context_parallel", False):
        refuse_feature("hybrid_context_parallel", True, "off")
    if config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather":
        # It gathers as many rows from every rank as there are here.
        refuse_feature("moe_token_dispatcher_type", "allgather", "alltoall or flex with expert parallelism")
    if config.context_parallel_size == 1:
        return
    several = "with --context-parallel-size above 1"
    if config.num_moe_experts:
        _refuse_experts(config, several)


def _refuse_experts(config: Any, several: str) -> None:
    """What makes experts' results depend on which tokens share a rank."""
    balancing = config.moe_router_load_balancing_type
    if balancing in ("sinkhorn", "quantile_balancing"):
        refuse_feature("moe_router_load_balancing_type", balancing, f"none or aux_loss without a coefficient {several}")
    if config.moe_expert_capacity_factor is not None:
        refuse_feature("moe_expert_capacity_factor", config.moe_expert_capacity_factor, f"None {several}")
