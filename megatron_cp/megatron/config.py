"""Megatron's configuration with our options, for any number of key heads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerConfig as MegatronTransformerConfig

from megatron_cp.megatron import compat
from megatron_cp.megatron.options import add_arguments as add_arguments
from megatron_cp.megatron.options import check_options
from megatron_cp.megatron.rules import GATED_DELTA_NETS, unsupported, unsupported_groups, unsupported_shards


@dataclass
class TransformerConfig(MegatronTransformerConfig):
    """Megatron's `TransformerConfig` with our options, and without its limits on the heads of linear layers.

    Megatron asserts that tp * cp divides the key and the value heads of GatedDeltaNet, since its own context
    parallelism needs that; ours needs only that tp does. A config of this class is filled from flags by name
    (`core_transformer_config_from_args(args, TransformerConfig)`).

    Attributes:
        cp_layout: the layout of `shard_batch`: balanced, contiguous or zigzag, which is Megatron's order; or auto, the
            one in which all layers of the model are predicted to be fastest on the batch, which pipeline stages refuse.
        linear_cp_mode: the mode of linear layers: headwise, chunkwise, redistribute or auto. The default is Megatron's
            where it has this field (chunkwise on dev), else auto.
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
        logit_rows: with labels, the rows of which the model has logits at a time, for their losses; None for all rows.
        cp_packed_order: the order of packed batches that Megatron's own pipeline sharded: each "document" or the whole
            "pack" was cut into 2 * cp chunks. If None, it is derived from the next two; if neither is set, such batches
            are refused on several ranks. Batches of `shard_batch` need none of the three.
        cp_dynamic: `--dynamic-context-parallel`: batches have groups of their own (`megatron_cp.megatron.dynamic`).
            Megatron's own fields of this name stay off, since its loader loses the lengths.
        sft: Megatron's flag, with which its pipeline cuts each document.
        dataloader_inter_document_masking: Megatron's flag, with which it cuts the whole pack, unless `sft` is set.
        reset_attention_mask: Megatron's flag, which attention refuses, since it reads no masks that are tensors.
        variable_seq_lengths: Megatron's option, which has no flag: set if there are pipeline stages, since packs differ
            in length.
    """

    cp_layout: str = "balanced"
    linear_cp_mode: str = compat.LINEAR_CP_MODE
    cp_head_chunks: int | None = None
    cp_transport: str = "collective"
    cp_codec: str = "none"
    cp_latent_mode: str = "heads"
    cp_hardware: str | None = None
    cp_search: float = 0.0
    logit_rows: int | None = None
    cp_packed_order: str | None = None
    cp_dynamic: bool = False
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
        if self.experimental_attention_variant not in GATED_DELTA_NETS:
            with compat.local_attention_is_ours(self):
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
        ArgumentError: an option with an unknown value, or one that no layer here supports, such as Megatron's own CUDA
            graphs.
    """
    for error in unsupported_shards(args, config.context_parallel_size):
        raise error
    if getattr(args, "cp_dynamic", False):
        for error in unsupported_groups(args, args.data_parallel_size * args.context_parallel_size):
            raise error
    if not isinstance(config, TransformerConfig):
        for name in vars(TransformerConfig)["__annotations__"]:
            setattr(config, name, getattr(args, name, getattr(TransformerConfig, name)))
        _derive_options(config)
    for error in unsupported(config):  # here already, before a job reads its data and builds a model
        raise error
    return config


def _derive_options(config: Any) -> None:
    """Checks our options, and sets those that are derived from Megatron's."""
    check_options(config)
    if config.cp_packed_order is None and config.sft:
        config.cp_packed_order = "document"
    elif config.cp_packed_order is None and config.dataloader_inter_document_masking:
        config.cp_packed_order = "pack"
    elif config.cp_packed_order is None and getattr(config, "sequence_packing_scheduler", None):
        config.cp_packed_order = "document"  # dev's scheduler
    if config.pipeline_model_parallel_size > 1:
        config.variable_seq_lengths = True
