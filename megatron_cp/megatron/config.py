"""Megatron's configuration with our options, for any number of key heads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerConfig as MegatronTransformerConfig

from megatron_cp.errors import ArgumentError
from megatron_cp.plan.schemes import AUTO
from megatron_cp.planner.capabilities import require, spelled
from megatron_cp.planner.predict.machine_files import SAFE, machine, presets
from megatron_cp.planner.tiled import checked_search


@dataclass
class TransformerConfig(MegatronTransformerConfig):
    """Megatron's `TransformerConfig` with our options, and without its limits on the heads of linear layers.

    Megatron asserts that tp * cp divides the key and the value heads of GatedDeltaNet, since its own context
    parallelism needs that; ours needs only that tp does. A config of this class is filled from flags by name
    (`core_transformer_config_from_args(args, TransformerConfig)`).

    Attributes:
        cp_layout: the layout of `shard_batch`: balanced, contiguous or zigzag, which is Megatron's order; or auto, the
            one in which all layers of the model are predicted to be fastest on the batch, which pipeline stages refuse.
        linear_cp_mode: the mode of linear layers: headwise, chunkwise, redistribute or auto.
        cp_head_chunks: number of chunks in which heads are exchanged in `a2a` and `a2a+p2p`, and in headwise linear
            layers (there at most as many as a rank has key heads), 1 if None; or in which `all_gather` and `exact`
            gather keys, 2 if None and there are as many key/value heads.
        cp_transport: the transport of messages: collective, pairwise, hierarchical, shared_memory or symmetric_memory.
        cp_codec: the codec of heads, keys and values in messages: none, fp8, fp8_e5m2 or int8.
        cp_latent_mode: what is done with the latents of multi-latent attention: "heads", they are expanded to keys and
            values, which travel; expand, absorb or auto; see `plan_attention`.
        cp_hardware: the hardware for which `auto` predicts: a preset, or a machine file; "h100"
            if None.
        cp_search: seconds for which OR-Tools may search for better tiles in `tiled` and `a2a+tiled`, for each pack and
            direction; above 0 `auto` considers these two as well. Refused if no layer has one of the three schemes.
        cp_packed_order: the order of packed batches that Megatron's own pipeline sharded: each "document" or the whole
            "pack" was cut into 2 * cp chunks. If None, it is derived from the next two; if neither is set, such batches
            are refused on several ranks. Batches of `shard_batch` need none of the three.
        sft: Megatron's flag, with which its pipeline cuts each document.
        dataloader_inter_document_masking: Megatron's flag, with which it cuts the whole pack, unless `sft` is set.
        reset_attention_mask: Megatron's flag, which attention refuses, since it reads no masks that are tensors.
        variable_seq_lengths: Megatron's option, which has no flag: set if there are pipeline stages, since packs differ
            in length.
    """

    cp_layout: str = "balanced"
    linear_cp_mode: str = "auto"
    cp_head_chunks: int | None = None
    cp_transport: str = "collective"
    cp_codec: str = "none"
    cp_latent_mode: str = "heads"
    cp_hardware: str | None = None
    cp_search: float = 0.0
    cp_packed_order: str | None = None
    sft: bool = False
    dataloader_inter_document_masking: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self) -> None:
        # Megatron's check of this option refuses a dispatcher of experts, even if there are no experts.
        self.variable_seq_lengths, varies = False, self.variable_seq_lengths
        self._run_megatron_checks()
        self.variable_seq_lengths = varies
        _derive_options(self)

    def _run_megatron_checks(self) -> None:
        if self.experimental_attention_variant != "gated_delta_net":
            super().__post_init__()
            return
        # Only the checks of heads and the two below read context_parallel_size.
        cp_size: int = self.context_parallel_size  # type: ignore[has-type]
        self.context_parallel_size = 1
        super().__post_init__()
        self.context_parallel_size = cp_size
        if cp_size > 1 and isinstance(self.cp_comm_type, list) and len(self.cp_comm_type) != self.num_layers:
            raise ValueError(f"cp_comm_type: got {len(self.cp_comm_type)} values; allowed: one, or {self.num_layers}")
        if cp_size > 1 and self.batch_invariant_mode:
            raise ValueError("batch_invariant_mode: got True; allowed: False with context_parallel_size above 1")


def with_options(config: Any, args: argparse.Namespace) -> Any:
    """Sets our options, and those derived from them, on a configuration of another class, from flags by name.

    It is for `--multi-latent-attention`, where Megatron's `core_transformer_config_from_args` makes its own
    `MLATransformerConfig`, whatever class it is given. Returns `config`; one of our class is not changed.

    Raises:
        ArgumentError: an option with an unknown value, or a flag of no configuration that is not supported here.
    """
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, name, False) and config.context_parallel_size > 1:
            remedy = (
                "Parameters in shards have not run here over context-parallel ranks. Use --use-distributed-optimizer."
            )
            raise ArgumentError(f"--{name.replace('_', '-')}", True, "off with --context-parallel-size above 1", remedy)
    if isinstance(config, TransformerConfig):
        return config
    for name in vars(TransformerConfig)["__annotations__"]:
        setattr(config, name, getattr(args, name, getattr(TransformerConfig, name)))
    _derive_options(config)
    return config


def _derive_options(config: Any) -> None:
    """Checks our options, and sets those that are derived from Megatron's."""
    check_options(config)
    if config.cp_packed_order is None and config.sft:
        config.cp_packed_order = "document"
    elif config.cp_packed_order is None and config.dataloader_inter_document_masking:
        config.cp_packed_order = "pack"
    if config.pipeline_model_parallel_size > 1:
        config.variable_seq_lengths = True


def check_options(config: Any) -> None:
    """Refuses unknown values of our options, and those that contradict Megatron's."""
    for option in ("layout", "transport", "codec", "latent_mode"):
        name = f"cp_{option}"
        setattr(config, name, require(option, getattr(config, name), name=f"--{name.replace('_', '-')}"))
    if config.cp_latent_mode != "heads" and not config.multi_latent_attention:
        remedy = "Other attention has no latents."
        raise ArgumentError("--cp-latent-mode", config.cp_latent_mode, "heads without --multi-latent-attention", remedy)
    config.linear_cp_mode = require("mode", config.linear_cp_mode, name="--linear-cp-mode")
    machine(config.cp_hardware, argument="--cp-hardware")
    checked_search(config.cp_search, schemes_of(config), name="--cp-search")
    if config.cp_layout == AUTO and config.pipeline_model_parallel_size > 1:
        allowed = "balanced, contiguous or zigzag with --pipeline-model-parallel-size above 1"
        remedy = "A stage knows its own layers alone, and hidden states go from stage to stage in one layout."
        raise ArgumentError("--cp-layout", AUTO, allowed, remedy)
    if config.cp_packed_order is not None:
        config.cp_packed_order = require("packed_order", config.cp_packed_order, name="--cp-packed-order")


def scheme_name(cp_comm_type: str) -> str:
    """Returns this package's name of a scheme of Megatron's."""
    name: str = spelled("scheme", cp_comm_type)
    return name


def schemes_of(config: Any) -> list[str]:
    """Returns the schemes that `--cp-comm-type` names; "auto" if it names none, or on one rank."""
    given = config.cp_comm_type
    if given is None or config.context_parallel_size == 1:
        return [AUTO]
    return [scheme_name(scheme) for scheme in ([given] if isinstance(given, str) else given)]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags to Megatron's parser; pass it as `extra_args_provider`."""
    group = parser.add_argument_group("megatron_cp")
    layouts = "layout of tokens: balanced, contiguous, zigzag (Megatron's order) or auto"
    group.add_argument("--cp-layout", default="balanced", help=layouts)
    modes = "mode of linear layers: headwise, chunkwise, redistribute or auto"
    group.add_argument("--linear-cp-mode", default="auto", help=modes)
    group.add_argument("--cp-head-chunks", type=int, help="chunks in which heads are exchanged, or keys are gathered")
    transports = "transport of messages: collective, pairwise, hierarchical, shared_memory or symmetric_memory"
    group.add_argument("--cp-transport", default="collective", help=transports)
    orders = "unit that Megatron's own pipeline cut into 2 * cp chunks: each document, or the whole pack"
    group.add_argument("--cp-packed-order", help=f"{orders}; derived from --sft or its masking by default")
    codecs = "codec of heads, keys and values in messages: none, fp8, fp8_e5m2 or int8"
    group.add_argument("--cp-codec", default="none", help=codecs)
    latents = "what multi-latent attention does with latents: heads (they are expanded before they travel), expand"
    group.add_argument("--cp-latent-mode", default="heads", help=f"{latents} (on arrival), absorb (in queries) or auto")
    hardware = f"hardware for which auto predicts: {', '.join(presets())} or a file; {SAFE} by default"
    group.add_argument("--cp-hardware", help=hardware)
    search = "seconds for which OR-Tools may search for better tiles, for each pack and direction; above 0 auto"
    group.add_argument("--cp-search", type=float, default=0.0, metavar="SECONDS", help=f"{search} considers tiled too")
    return parser


def add_megatrons_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds all flags of Megatron's training by its own parser, to read a job's flags without starting it."""
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(parser)
    return parser
