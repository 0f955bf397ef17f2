"""The rules by which options are refused, as functions of a configuration or of an object with its names.

The layers raise these errors while a model is built, and `megatron-cp doctor --megatron` lists them without building
one: this module imports neither torch nor Megatron. `te` is True if Megatron builds linear layers and norms of
Transformer Engine. Errors name Megatron's flags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.plan.transport import knows_hosts
from megatron_cp.planner.capabilities import remark, spelled


def refuse(argument: str, given: object, allowed: str, remedy: str) -> None:
    """Raises an `ArgumentError` that names Megatron's flag, while the model is built."""
    raise ArgumentError(f"--{argument.replace('_', '-')}", given, allowed, remedy)


# Values of --experimental-attention-variant: main makes the first the second, and 0.20 is the first to have the third.
GATED_DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")

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


def unsupported(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that no layer supports, or only with lengths that do not vary."""
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        yield ArgumentError(
            "variable_seq_lengths",
            False,
            "True with --pipeline-model-parallel-size above 1",
            "Packs differ in length, and Megatron has no flag for it: set it in the configuration, as"
            " megatron_cp.megatron.config.TransformerConfig does.",
        )
    yield from _unsupported_graphs(config)
    for name in ("hybrid_context_parallel", "dynamic_context_parallel"):  # set by another parser than ours
        if getattr(config, name, False):
            yield feature_error("dynamic_context_parallel", True, "off", flag=name)
    if getattr(config, "cp_dynamic", False):
        yield from _unsupported_groups(config)
    if getattr(config, "logit_rows", None) is not None:
        yield from _unsupported_in_chunks(config)
    yield from _unsupported_of_some_releases(config)
    if config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather":
        # It assumes that every rank has as many rows as this one.
        yield feature_error("moe_token_dispatcher_type", "allgather", "alltoall or flex with expert parallelism")
    if config.context_parallel_size > 1 and config.num_moe_experts:
        yield from _coupling_experts(config)


def _unsupported_in_chunks(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options with which the output layer cannot run on a few rows at a time."""
    remedies = {
        "defer_embedding_wgrad_compute": "The output layer runs again in backward, and would keep its input twice.",
        "overlap_moe_expert_parallel_comm": "Megatron's other schedule calls parts of the model, not the model.",
        "fp8_output_proj": "We have run no output layer of Transformer Engine on a few rows at a time.",
    }
    for name, remedy in remedies.items():
        if getattr(config, name, False):
            yield ArgumentError(f"--{name.replace('_', '-')}", True, "off with --logit-rows", remedy)
    impl = getattr(config, "cross_entropy_fusion_impl", "native")
    if getattr(config, "cross_entropy_loss_fusion", False) and impl not in ("native", "te"):
        remedy = "Its output layer computes the loss and never has the logits: leave out --logit-rows."
        yield ArgumentError("--cross-entropy-fusion-impl", impl, "native or te with --logit-rows", remedy)


def _unsupported_groups(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that batches with groups of their own do not support."""
    several = "with --dynamic-context-parallel"
    if not config.calculate_per_token_loss:
        remedy = "Groups of different sizes have different numbers of tokens."
        yield ArgumentError("--calculate-per-token-loss", False, f"True {several}", remedy)
    transport = getattr(config, "cp_transport", "collective")
    if knows_hosts(transport):
        remedy = "A batch with its own group may be on other hosts."
        yield ArgumentError("--cp-transport", transport, f"collective or pairwise {several}", remedy)
    for given in _listed(config.cp_comm_type):
        scheme = SCHEMES.get(spelled("scheme", given))
        if scheme is not None and (scheme.is_product or scheme.goes_by_host):
            remedy = "A group may have any number of ranks, on any hosts."
            yield ArgumentError("--cp-comm-type", given, f"a scheme of one level {several}", remedy)
            break
    if config.hierarchical_context_parallel_sizes:
        given = config.hierarchical_context_parallel_sizes
        yield ArgumentError("--hierarchical-context-parallel-sizes", given, f"none {several}")
    if config.dsa_indexer_n_heads is not None and config.dsa_indexer_loss_coeff:
        remedy = "Megatron logs the indexer's loss over the model's own group."
        yield ArgumentError("--dsa-indexer-loss-coeff", config.dsa_indexer_loss_coeff, f"0 {several}", remedy)
    has_losses = config.moe_z_loss_coeff is not None or any(_listed(config.moe_aux_loss_coeff))
    if config.num_moe_experts and has_losses:
        remedy = "Auxiliary losses are means over the tokens of the model's own group."
        flag, given = "--moe-aux-loss-coeff", config.moe_aux_loss_coeff
        if not any(_listed(given)):
            flag, given = "--moe-z-loss-coeff", config.moe_z_loss_coeff
        yield ArgumentError(flag, given, f"none {several}", remedy)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _unsupported_of_some_releases(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that only some releases of Megatron have, and that our layers would ignore."""
    remedies = {
        "enable_hyper_connections": "We have not run layers with several residual streams.",
        "enable_mhc_connections": "We have not run layers with several residual streams.",
        "mtp_hsm": "Hidden states would be rolled in Megatron's own order of tokens.",
        "rotary_base_per_layer": "Phases are gathered once for all layers.",
    }
    for name, remedy in remedies.items():
        given = getattr(config, name, None)
        if given:
            yield ArgumentError(f"--{name.replace('_', '-')}", given, "off with our layers", remedy)
    partition = getattr(config, "cp_partition_mode", "zigzag")
    if partition != "zigzag":
        remedy = "Megatron's layers would move tokens that ours have moved: give --cp-layout contiguous instead."
        yield ArgumentError("--cp-partition-mode", partition, "zigzag with our layers", remedy)


# Modules that Megatron captures without the layers around them. With local it captures a layer with an MLP whole.
_GRAPHS_WITHOUT_OURS = {
    "local": {"moe_router", "moe_preprocess"}, "transformer_engine": {"mlp", "moe_router", "moe_preprocess"}
}  # fmt: skip


def _unsupported_graphs(config: Any) -> Iterator[ArgumentError]:
    """Yields the error for Megatron's own CUDA graphs, with the reason for what they would capture.

    Graphs of routers, and of feed-forward parts, hold no layer of ours, and are taken.
    """
    impl = getattr(config, "cuda_graph_impl", "none")
    if impl == "none":
        return
    modules = {getattr(module, "name", module) for module in getattr(config, "cuda_graph_modules", None) or ()}
    if modules and modules <= _GRAPHS_WITHOUT_OURS.get(impl, set()):
        if not getattr(config, "cp_dynamic", False):
            return
        reason = "A graph has one number of rows, and groups for each batch have many."
    elif impl == "full_iteration":
        reason = "The graph of a whole step would repeat the tables of the pack that it was captured with."
    elif impl == "local" and "mlp" in modules:
        reason = "Megatron captures layers with an MLP whole, attention included; 0.19.2 fails to build them."
    elif impl == "transformer_engine" and modules and modules.isdisjoint({"attn", "mamba"}):
        reason = "Experts of a fixed capacity have not been captured beside our layers."
    elif impl == "transformer_engine":
        reason = "These graphs take tensors only, and Megatron asserts that there is no packed_seq_params."
    else:
        reason = "Megatron looks for a graph by the fields of packed_seq_params, which differ from pack to pack."
    yield ArgumentError("--cuda-graph-impl", impl, "none", f"{reason} {remark('megatron', 'cuda_graph_impl')}.")


def unsupported_spec(config: Any, *, has_gdn2: bool = False) -> Iterator[ArgumentError]:
    """Yields the errors for options for which GPTModel's spec here has no layers; `has_gdn2` says if Megatron has."""
    variant = config.experimental_attention_variant
    known = GATED_DELTA_NETS if has_gdn2 else GATED_DELTA_NETS[:2]
    if variant not in (None, *known, "dsa"):
        remedy = "megatron_cp has no such layers: leave out --spec to keep Megatron's own layers, with their limits."
        if variant in GATED_DELTA_NETS:
            remedy = "Megatron-Core has these layers since 0.20."
        allowed = f"{', '.join(known)}, dsa, or none for softmax attention"
        yield ArgumentError("--experimental-attention-variant", variant, allowed, remedy)
    if config.transformer_impl == "inference_optimized":
        yield ArgumentError("--transformer-impl", config.transformer_impl, "transformer_engine or local")
    for name in ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"):
        if getattr(config, name, None):
            remedy = "Our spec has one kind of attention and of feed-forward layer, or those of --hybrid-layer-pattern."
            yield ArgumentError(f"--{name.replace('_', '-')}", getattr(config, name), "not given", remedy)


def unsupported_layers(symbols: Iterable[str]) -> Iterator[ArgumentError]:
    """Yields the error for layers of `--hybrid-layer-pattern` that our stacks do not have."""
    known = "MG*D+-E"
    others = sorted({symbol for symbol in symbols if symbol not in known})
    if others:
        remedy = "megatron_cp has no such layers: leave out --spec to keep Megatron's own layers, with their limits."
        yield ArgumentError("--hybrid-layer-pattern", "".join(others), f"layers {', '.join(known)}", remedy)


def unsupported_attention(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that softmax attention does not support, beside `unsupported`."""
    if config.qk_clip or config.log_max_attention_logit:
        flag = "qk_clip" if config.qk_clip else "log_max_attention_logit"
        yield feature_error("largest_score", True, "off", flag=flag)
    if getattr(config, "reset_attention_mask", False):  # only our configuration has it
        yield feature_error("reset_attention_mask", True, "off")


def unsupported_latent_attention(config: Any, *, te: bool) -> Iterator[ArgumentError]:
    """Yields the errors for options that multi-latent attention does not support, beside `unsupported`."""
    if config.apply_rope_fusion:
        yield feature_error("apply_rope_fusion", True, "off with --multi-latent-attention")
    if config.cache_mla_latents:
        yield feature_error("cache_mla_latents", True, "off")
    if config.qk_layernorm and config.q_lora_rank is None and not te:
        remedy = "Without --q-lora-rank the norm of queries is inside a linear layer of Transformer Engine."
        yield ArgumentError("--qk-layernorm", True, "off, or with --q-lora-rank", remedy)
    mode = getattr(config, "cp_latent_mode", "heads")
    if mode != "heads":
        remedy = "Where latents arrive, only the weight of the up-projection is used."
        for flag, given in (("--fp8-format", config.fp8), ("--fp4-format", config.fp4)):
            if given:
                yield ArgumentError(flag, given, "none with --cp-latent-mode", remedy)
        if config.delay_wgrad_compute:
            yield ArgumentError("--delay-wgrad-compute", True, "off with --cp-latent-mode", remedy)
        if config.qk_layernorm and te:
            allowed = "heads with --qk-layernorm, or --transformer-impl local"
            remedy = "Transformer Engine's up-projection has the norm inside."
            yield ArgumentError("--cp-latent-mode", mode, allowed, remedy)


def unsupported_mamba(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that Mamba-2 layers do not support, beside `unsupported`."""
    given = config.mamba_training_ssm_states_dtype
    if str(given) not in ("None", "fp32", "torch.float32"):  # the flag's value, or the configuration's
        flag = "--mamba-training-ssm-states-dtype"
        yield ArgumentError(flag, given, "none or float32", "megatron_cp computes states in float32.")


def unsupported_delta_product(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors for options that Gated DeltaProduct layers do not support, beside `unsupported`."""
    if config.gdp_cutedsl_kernel:
        yield ArgumentError("--gdp-cutedsl-kernel", True, "off", "megatron_cp has kernels of its own.")
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
    offloaded = config.offload_modules if config.fine_grained_activation_offloading else []
    for flag, modules in (("--recompute-modules", recomputed), ("--offload-modules", offloaded)):
        if own := {"gdp_in_proj", "gdp_qkv"} & set(modules or []):
            remedy = "Recompute whole layers with --recompute-granularity full."
            yield ArgumentError(flag, " ".join(sorted(own)), "other modules with Gated DeltaProduct", remedy)


def unsupported_sparse_attention(config: Any, *, te: bool) -> Iterator[ArgumentError]:
    """Yields the errors for options that DSA layers do not support, beside `unsupported`."""
    if not getattr(config, "multi_latent_attention", False):
        yield ArgumentError("--multi-latent-attention", False, "True with layers whose keys an indexer chooses")
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if getattr(config, name) is None:
            yield ArgumentError(f"--{name.replace('_', '-')}", None, "an integer of at least 1")
    if config.dsa_indexer_topk_freq > 1 and config.pipeline_model_parallel_size > 1:
        remedy = "A layer would use keys that an earlier layer chose for another microbatch."
        for is_given, how in (
            (config.recompute_granularity, "recomputation"),
            (config.virtual_pipeline_model_parallel_size, "interleaving"),
        ):
            if is_given:
                allowed = f"1 with pipeline stages and {how}"
                yield ArgumentError("--dsa-indexer-topk-freq", config.dsa_indexer_topk_freq, allowed, remedy)
    if config.tensor_model_parallel_size > 1 and (config.context_parallel_size > 1 or not te):
        allowed = "1 with an indexer that chooses keys"
        remedy = "We have not proved that gradients of latents are right over tensor-parallel ranks."
        if config.context_parallel_size == 1:
            remedy = f"Only Transformer Engine's layers sum the gradients of latents: {install('te')}."
        yield ArgumentError("--tensor-model-parallel-size", config.tensor_model_parallel_size, allowed, remedy)
    elif config.tensor_model_parallel_size > 1 and config.dsa_indexer_loss_coeff:
        remedy = "The indexer learns from the weights of all heads, but a tensor-parallel rank has only some heads."
        given = config.dsa_indexer_loss_coeff
        yield ArgumentError("--dsa-indexer-loss-coeff", given, "0 with --tensor-model-parallel-size above 1", remedy)
    if getattr(config, "cp_latent_mode", "heads") == "expand":
        remedy = "With an indexer, latents are never expanded: queries are multiplied with the up-projection instead."
        allowed = "heads, absorb or auto with an indexer that chooses keys"
        yield ArgumentError("--cp-latent-mode", "expand", allowed, remedy)
    if config.dsa_kernel_backend != "none":
        remedy = (
            "megatron_cp does not call these kernels. Leave out --spec to keep Megatron's own layers, with "
            "their limits."
        )
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


def unsupported_shards(args: Any, cp_size: int) -> Iterator[ArgumentError]:
    """Yields the errors for flags, of no configuration, that shard parameters."""
    if getattr(args, "use_torch_fsdp2", False) and cp_size > 1:
        remedy = "We have not run torch's FSDP2 in Megatron over context-parallel ranks. Use --use-megatron-fsdp."
        yield ArgumentError("--use-torch-fsdp2", True, "off with --context-parallel-size above 1", remedy)
    if getattr(args, "use_torch_fsdp2", False) and getattr(args, "logit_rows", None) is not None:
        remedy = "Backward would run an output layer whose weights are in shards. Use --use-megatron-fsdp."
        yield ArgumentError("--logit-rows", args.logit_rows, "none with --use-torch-fsdp2", remedy)
    if getattr(args, "cp_dynamic", False) and getattr(args, "use_megatron_fsdp", False):
        remedy = "We have not run sharded parameters with groups for each batch. Use --use-distributed-optimizer."
        yield ArgumentError("--use-megatron-fsdp", True, "off with --dynamic-context-parallel", remedy)


def unsupported_groups(args: Any, ranks: int | None = None) -> Iterator[ArgumentError]:
    """Yields the errors for sizes with which no groups of ranks can be made for the packs of a job.

    `ranks` is the number of data- and context-parallel ranks, None before the job runs.
    """
    if args.context_parallel_size == 1 and ranks != 1:
        remedy = "Layers of one rank ignore --cp-comm-type and what couples tokens; groups may still have one rank."
        yield ArgumentError("--context-parallel-size", 1, "at least 2 with --dynamic-context-parallel", remedy)
    smallest = args.min_dynamic_context_parallel_size
    if smallest < 1 or (ranks is not None and smallest > ranks):
        allowed = "at least 1" if ranks is None else f"from 1 to {ranks}, the data- and context-parallel ranks"
        yield ArgumentError("--min-dynamic-context-parallel-size", smallest, allowed)
    held, fewest = args.max_seqlen_per_dp_cp_rank, -(-(args.seq_length or 0) // args.context_parallel_size)
    if held is not None and held < fewest:
        allowed = f"at least {fewest}, a rank's share of --seq-length {args.seq_length}"
        remedy = "Packs that cannot be dealt in another way are spread over the ranks of --context-parallel-size."
        yield ArgumentError("--max-seqlen-per-dp-cp-rank", held, allowed, remedy)
    if args.micro_batch_size not in (None, 1):
        yield ArgumentError("--micro-batch-size", args.micro_batch_size, "1: a pack is a whole microbatch")
