"""Megatron's configuration with our options, for any number of key heads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig as MegatronTransformerConfig

from megatron_cp.planner.capabilities import require


@dataclass
class TransformerConfig(MegatronTransformerConfig):
    """Megatron's `TransformerConfig` with our options, and without its limits on the heads of linear layers.

    Megatron asserts that tp * cp divides the key and the value heads of GatedDeltaNet, since its own context
    parallelism needs that; ours needs only that tp does. A config of this class is filled from flags by name
    (`core_transformer_config_from_args(args, TransformerConfig)`).

    Attributes:
        cp_layout: how `shard_batch` should deal tokens: zigzag, contiguous or balanced.
        linear_cp_mode: how linear layers are spread: headwise, chunkwise, relay or auto.
        cp_head_chunks: parts in which heads change places in `a2a` and `a2a+p2p`, and in headwise linear layers (there
            at most as many as a rank has key heads), 1 if None; or in which `all_gather` and `exact` gather keys, 2 if
            None and there are as many key/value heads.
        cp_transport: by which road messages go: collective, pairwise or hierarchical.
        cp_codec: how heads that change places are coded: none, fp8, fp8_e5m2 or int8.
    """

    cp_layout: str = "zigzag"
    linear_cp_mode: str = "auto"
    cp_head_chunks: int | None = None
    cp_transport: str = "collective"
    cp_codec: str = "none"

    def __post_init__(self) -> None:
        require("layout", self.cp_layout, name="--cp-layout")
        require("mode", self.linear_cp_mode, name="--linear-cp-mode")
        require("transport", self.cp_transport, name="--cp-transport")
        require("codec", self.cp_codec, name="--cp-codec")
        if self.experimental_attention_variant != "gated_delta_net":
            super().__post_init__()
            return
        # Only the checks of heads and the two below look at it.
        cp_size: int = self.context_parallel_size  # type: ignore[has-type]
        self.context_parallel_size = 1
        super().__post_init__()
        self.context_parallel_size = cp_size
        if cp_size > 1 and isinstance(self.cp_comm_type, list) and len(self.cp_comm_type) != self.num_layers:
            raise ValueError(f"cp_comm_type: got {len(self.cp_comm_type)} values; allowed: one, or {self.num_layers}")
        if cp_size > 1 and self.batch_invariant_mode:
            raise ValueError("batch_invariant_mode: got True; allowed: False with context_parallel_size above 1")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Our flags beside Megatron's: pass this as `extra_args_provider` to Megatron's parser."""
    group = parser.add_argument_group("megatron_cp")
    group.add_argument("--cp-layout", default="zigzag", help="who holds which tokens: zigzag, contiguous or balanced")
    modes = "how linear layers are spread: headwise, chunkwise, relay or auto"
    group.add_argument("--linear-cp-mode", default="auto", help=modes)
    group.add_argument("--cp-head-chunks", type=int, help="parts in which heads change places, or keys are gathered")
    roads = "by which road messages go: collective, pairwise or hierarchical"
    group.add_argument("--cp-transport", default="collective", help=roads)
    codecs = "how heads that change places are coded: none, fp8, fp8_e5m2 or int8"
    group.add_argument("--cp-codec", default="none", help=codecs)
    return parser
