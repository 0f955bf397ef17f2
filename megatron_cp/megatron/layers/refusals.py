"""Refusals of our layers while a model is built, by the names of Megatron's flags."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.errors import ArgumentError
from megatron_cp.megatron.rules import refuse, unsupported
from megatron_cp.plan.schemes import AUTO, DEFAULT


def check_comm_type(config: Any, cp_comm_type: str | None, layer: str) -> None:
    """Refuses a scheme that sends keys for a linear layer: an error if a list names it, else a warning."""
    if config.context_parallel_size == 1 or cp_comm_type in (None, DEFAULT.name, AUTO):
        return
    remedy = f"{layer} has no keys to send: --linear-cp-mode sets how it is split"
    if isinstance(config.cp_comm_type, list):
        refuse("cp_comm_type", cp_comm_type, "a2a or auto for the linear layers of a list", f"{remedy}.")
    warnings.warn(f"--cp-comm-type {cp_comm_type} is only for softmax layers. {remedy}.", stacklevel=3)


def scheme_of_layer(config: Any, layer_number: int | None) -> str | None:
    """Returns the scheme of a mixer that is told its number only, chosen as in Megatron's transformer layers."""
    schemes = config.cp_comm_type
    found: str | None = schemes[(layer_number or 1) - 1] if isinstance(schemes, list) else schemes
    return found


def refuse_other_means(config: Any, params: PackedSeqParams | None, cp_size: int) -> None:
    """Refuses Megatron's mean of the ranks' means, unless the batch's loss is known to be the mean of one rank."""
    if cp_size == 1 or config.calculate_per_token_loss or getattr(params, "has_global_mean", False):
        return
    remedy = (
        "Ranks have different numbers of labels, so the mean of their means is another loss. Without the flag, use "
        "the loss of megatron_cp.megatron.loss: forward_step, or loss_of(batch, config) in a step of your own."
    )
    refuse("calculate_per_token_loss", False, "True with --context-parallel-size above 1", remedy)


IN_CHUNKS = "logits_are_in_chunks"  # an attribute of configurations, which chunk_logits sets


def refuse_whole_logits(config: Any) -> None:
    """Refuses `--logit-rows` in a model that would compute the logits of all rows."""
    rows = getattr(config, "logit_rows", None)
    if rows is not None and not getattr(config, IN_CHUNKS, False):
        remedy = "Call megatron_cp.megatron.logits.chunk_logits(model) in a forward step that is not ours."
        refuse("logit_rows", rows, "none for a model that chunk_logits did not change", remedy)


def alignment_of(config: Any) -> int:
    """Returns the number of which every rank's number of rows must be a multiple, by the flags."""
    tensor_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if config.fp8:
        return tensor_ranks * get_fp8_align_size(config.fp8_recipe)
    return tensor_ranks * (get_fp4_align_size(config.fp4_recipe) if config.fp4 else 1)


def refuse_unaligned(config: Any, rows: int) -> None:
    """Refuses numbers of rows that quantized matrix products do not support, at which Transformer Engine would fail."""
    if not (config.fp8 or config.fp4) or rows % alignment_of(config) == 0:
        return
    flag, given = ("--fp8-format", config.fp8) if config.fp8 else ("--fp4-format", config.fp4)
    allowed = f"a multiple of {alignment_of(config)} rows on every rank, not {rows}"
    remedy = "Make layouts with layout_by_name(..., **megatron_cp.megatron.batch.layout_options(config))."
    raise ArgumentError(flag, given, allowed, remedy)


def refuse_unsupported(config: Any) -> None:
    """Refuses options that no layer supports under context parallelism, or with varying numbers of tokens."""
    for error in unsupported(config):
        raise error


def uses_transformer_engine(config: Any) -> bool:
    """True if Megatron builds linear layers and norms of Transformer Engine."""
    return HAVE_TE and config.transformer_impl != "local"


def refuse_other_implementation(config: Any, *, te: bool) -> None:
    """Refuses `--transformer-impl` where a spec's layers are of the other one, or cannot be built on this machine.

    Args:
        te: True if the spec has layers of Transformer Engine.
    """
    if te != uses_transformer_engine(config):
        allowed, name = ("transformer_engine", "local_hybrid_stack_spec") if te else ("local", "hybrid_stack_spec")
        remedy = f"The spec for {config.transformer_impl} is {name}."
        refuse("transformer_impl", config.transformer_impl, f"{allowed} with this spec", remedy)
    if te and not torch.cuda.is_available():
        remedy = "Transformer Engine's layers cannot be built without a GPU."
        refuse("transformer_impl", config.transformer_impl, "local without CUDA", remedy)
