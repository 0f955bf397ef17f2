"""Refusals of our layers while a model is built, by the names of Megatron's flags."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.plan.schemes import AUTO, DEFAULT
from megatron_cp.planner.capabilities import remark


def refuse(argument: str, given: object, allowed: str, remedy: str) -> None:
    """Raises an `ArgumentError` that names Megatron's flag, while the model is built."""
    raise ArgumentError(f"--{argument.replace('_', '-')}", given, allowed, remedy)


_FLAGS = {
    "scheme": "cp_comm_type", "ulysses_degree": "hierarchical_context_parallel_sizes", "mask": "window_size",
    "search_seconds": "cp_search",
    **{name: f"cp_{name}" for name in ("head_chunks", "transport", "codec", "latent_mode")},
}  # fmt: skip


@contextlib.contextmanager
def named_by_flags() -> Iterator[None]:
    """Names Megatron's flag in errors about an option of a plan; sizes keep their names."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in _FLAGS:
            raise
        refuse(_FLAGS[error.argument], error.given, error.allowed, error.remedy)


def check_comm_type(config: Any, cp_comm_type: str | None, layer: str) -> None:
    """Refuses a scheme that sends keys for a linear layer: an error if a list names it, else a warning."""
    if config.context_parallel_size == 1 or cp_comm_type in (None, DEFAULT.name, AUTO):
        return
    remedy = f"{layer} has no keys to pass on: --linear-cp-mode says how it is spread"
    if isinstance(config.cp_comm_type, list):
        refuse("cp_comm_type", cp_comm_type, "a2a or auto for the linear layers of a list", f"{remedy}.")
    warnings.warn(f"--cp-comm-type {cp_comm_type} is for softmax layers alone. {remedy}.", stacklevel=3)


def refuse_other_means(config: Any, params: PackedSeqParams | None, cp_size: int) -> None:
    """Refuses Megatron's mean of the ranks' means, unless the batch's loss is known to be the mean of one rank."""
    if cp_size == 1 or config.calculate_per_token_loss or getattr(params, "has_global_mean", False):
        return
    remedy = (
        "Ranks hold different numbers of tokens and of labels: a mean of their means is another loss. Without the flag"
        " take the loss of megatron_cp.megatron.loss: forward_step, or loss_of(batch, config) in a step of your own."
    )
    refuse("calculate_per_token_loss", False, "True with --context-parallel-size above 1", remedy)


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


def unsupported(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for a configuration, or an object with its names; `refuse_unsupported` raises the first."""
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        yield ArgumentError(
            "variable_seq_lengths",
            False,
            "True with --pipeline-model-parallel-size above 1",
            "Packs differ in length, and Megatron has no flag for it: set it in the configuration, as"
            " megatron_cp.megatron.config.TransformerConfig does.",
        )
    if getattr(config, "cuda_graph_impl", "none") != "none":
        yield feature_error("cuda_graph_impl", config.cuda_graph_impl, "none")
    if getattr(config, "hybrid_context_parallel", False):
        yield feature_error("hybrid_context_parallel", True, "off")
    if config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather":
        # It assumes that every rank has as many rows as this one.
        yield feature_error("moe_token_dispatcher_type", "allgather", "alltoall or flex with expert parallelism")
    if config.context_parallel_size > 1 and config.num_moe_experts:
        yield from _coupling_experts(config)


def unsupported_spec(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options for which GPTModel's spec here has no layers."""
    variant = config.experimental_attention_variant
    if variant not in (None, "gated_delta_net", "dsa"):
        remedy = "No layers here are of that kind: leave --spec out to keep Megatron's own, with its own limits."
        allowed = "gated_delta_net, dsa, or none for softmax attention"
        yield ArgumentError("--experimental-attention-variant", variant, allowed, remedy)
    if config.transformer_impl == "inference_optimized" or getattr(config, "heterogeneous_block_specs", False):
        yield ArgumentError(
            "--transformer-impl", config.transformer_impl, "transformer_engine or local, all layers alike"
        )


def unsupported_attention(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that softmax attention does not support, beside `unsupported`."""
    if config.qk_clip or config.log_max_attention_logit:
        flag = "qk_clip" if config.qk_clip else "log_max_attention_logit"
        yield feature_error("largest_score", True, "off", flag=flag)
    if getattr(config, "reset_attention_mask", False):  # only our configuration has it
        yield feature_error("reset_attention_mask", True, "off")


def unsupported_latent_attention(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that multi-latent attention does not support, beside `unsupported`."""
    if config.apply_rope_fusion:
        yield feature_error("apply_rope_fusion", True, "off with --multi-latent-attention")
    if config.cache_mla_latents:
        yield feature_error("cache_mla_latents", True, "off")
    if config.qk_layernorm and config.q_lora_rank is None and not uses_transformer_engine(config):
        remedy = "Without --q-lora-rank the norm of queries is inside a linear layer of Transformer Engine."
        yield ArgumentError("--qk-layernorm", True, "off, or with --q-lora-rank", remedy)
    mode = getattr(config, "cp_latent_mode", "heads")
    if mode != "heads":
        remedy = "The weight of the up-projection alone is used where latents arrive."
        for flag, given in (("--fp8-format", config.fp8), ("--fp4-format", config.fp4)):
            if given:
                yield ArgumentError(flag, given, "none with --cp-latent-mode", remedy)
        if config.delay_wgrad_compute:
            yield ArgumentError("--delay-wgrad-compute", True, "off with --cp-latent-mode", remedy)
        if config.qk_layernorm and uses_transformer_engine(config):
            allowed = "heads with --qk-layernorm, or --transformer-impl local"
            remedy = "Transformer Engine's up-projection has the norm inside."
            yield ArgumentError("--cp-latent-mode", mode, allowed, remedy)


def unsupported_mamba(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that Mamba-2 layers do not support, beside `unsupported`."""
    given = config.mamba_training_ssm_states_dtype
    if given not in (None, torch.float32):
        flag = "--mamba-training-ssm-states-dtype"
        yield ArgumentError(flag, given, "none or float32", "States are float32 here.")


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


def unsupported_sparse_attention(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that DSA layers do not support, beside `unsupported`."""
    if not getattr(config, "multi_latent_attention", False):
        yield ArgumentError("--multi-latent-attention", False, "True with layers whose keys an indexer chooses")
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if getattr(config, name) is None:
            yield ArgumentError(f"--{name.replace('_', '-')}", None, "an integer of at least 1")
    if config.dsa_indexer_topk_freq > 1 and config.pipeline_model_parallel_size > 1:
        remedy = "A layer would take the choice that a layer before it has made for another microbatch since."
        for is_given, how in (
            (config.recompute_granularity, "recomputation"),
            (config.virtual_pipeline_model_parallel_size, "interleaving"),
        ):
            if is_given:
                allowed = f"1 with pipeline stages and {how}"
                yield ArgumentError("--dsa-indexer-topk-freq", config.dsa_indexer_topk_freq, allowed, remedy)
    if config.tensor_model_parallel_size > 1 and (
        config.context_parallel_size > 1 or not uses_transformer_engine(config)
    ):
        allowed = "1 with an indexer that chooses keys"
        remedy = "Gradients of latents over tensor-parallel ranks have not been shown to be right here."
        if config.context_parallel_size == 1:
            remedy = f"Only Transformer Engine's layers sum the gradients of latents: {install('te')}."
        yield ArgumentError("--tensor-model-parallel-size", config.tensor_model_parallel_size, allowed, remedy)
    elif config.tensor_model_parallel_size > 1 and config.dsa_indexer_loss_coeff:
        remedy = "The indexer learns from the weights of all heads, of which a tensor-parallel rank has a share."
        given = config.dsa_indexer_loss_coeff
        yield ArgumentError("--dsa-indexer-loss-coeff", given, "0 with --tensor-model-parallel-size above 1", remedy)
    if getattr(config, "cp_latent_mode", "heads") == "expand":
        remedy = "Latents travel and meet queries that the up-projection is multiplied into: they are never expanded."
        allowed = "heads, absorb or auto with an indexer that chooses keys"
        yield ArgumentError("--cp-latent-mode", "expand", allowed, remedy)
    if config.dsa_kernel_backend != "none":
        remedy = "These kernels are not called here. Leave --spec out to keep Megatron's own layers, with their limits."
        yield ArgumentError("--dsa-kernel-backend", config.dsa_kernel_backend, "none", remedy)
    if config.softmax_type != "vanilla":
        yield ArgumentError("--softmax-type", config.softmax_type, "vanilla with an indexer that chooses keys")


def _coupling_experts(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options with which experts' results depend on the tokens that share a rank."""
    balancing, several = config.moe_router_load_balancing_type, "with --context-parallel-size above 1"
    if balancing in ("sinkhorn", "quantile_balancing"):
        yield feature_error("moe_router_load_balancing_type", balancing, f"none or auxiliary losses {several}")
    if config.moe_expert_capacity_factor is not None:
        yield feature_error("moe_expert_capacity_factor", config.moe_expert_capacity_factor, f"None {several}")


def feature_error(feature: str, given: object, allowed: str, *, flag: str | None = None) -> ArgumentError:
    """Returns the error with the capability table's remark on a feature; the flag is its name, or `flag`."""
    remedy = f"{feature.replace('_', ' ')}: {remark('megatron', feature)}."
    return ArgumentError(f"--{(flag or feature).replace('_', '-')}", given, allowed, remedy)
