"""Multi-latent attention for Megatron: its layers, with rotary positions under any layout and values of their own size.

Keys and values are made from a latent of each token (DeepSeek-V2, arXiv 2405.04434). Rotary positions are turned inside
Megatron's layer, into a part of each head, so they are given to it here, where `SelfAttention` turns afterwards.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention as megatron_mla
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from torch import Tensor, nn

from megatron_cp.megatron.layers.norms import Norm
from megatron_cp.megatron.layers.refusals import unsupported_latent_attention
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams

_ROTARY_SETTINGS = (
    "rope_type", "qk_pos_emb_head_dim", "rotary_base", "rotary_percent", "rotary_scaling_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip


class _Rotary(nn.Module):
    """Megatron's rotary embedding, which has a length for its argument; here that may be a microbatch with plans.

    Then its rows are those of this rank's positions, found once a microbatch for all layers, although Megatron gives
    every layer an embedding of its own. It has no state in checkpoints.
    """

    def __init__(self, embedding: Any, config: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.settings = ("rotary", *(getattr(config, name) for name in _ROTARY_SETTINGS))

    def get_rotary_seq_len(self, context: Any, block: Any, hidden_states: Tensor, config: Any, params: Any) -> Any:
        """What `forward` is called with: `params` where they are planned, else Megatron's length."""
        if isinstance(params, PlannedSeqParams):
            return params
        return self.embedding.get_rotary_seq_len(context, block, hidden_states, config, params)

    def forward(self, length: int | PlannedSeqParams, packed_seq: bool = False) -> Any:
        """`[t, 1, d]` angles of the rows of a microbatch, or Megatron's of a length; for yarn with its factor."""
        if isinstance(length, PlannedSeqParams):
            params = length
            return params.remember(self.settings, lambda: self._of(params))
        return self.embedding(length, packed_seq=packed_seq)

    def _of(self, params: PlannedSeqParams) -> Any:
        assert params.positions is not None
        found = self.embedding(max(params.max_seqlen_q, params.max_seqlen_kv), packed_seq=True)
        if isinstance(found, tuple):
            table, factor = found
            return table.index_select(0, params.positions).squeeze(1), factor
        return found.index_select(0, params.positions).squeeze(1)


class _OverRanks(megatron_mla.MLASelfAttention):
    """What our two classes change in Megatron's two.

    Attributes:
        core_attention: gets the heads' keys and values, which Megatron's layer makes before it: with h heads of sizes
            k and v, `h * (k + v)` elements travel where `kv_lora_rank + qk_pos_emb_head_dim` of the latent would do.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        for error in unsupported_latent_attention(config):
            raise error
        super().__init__(config, submodules, *args, **kwargs)
        own: Any = self._modules["rotary_pos_emb"]
        self.rotary_pos_emb = _Rotary(own, config)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            for weight in self.q_layernorm.parameters():
                # Every tensor-parallel rank has its whole gradient, which Megatron would sum, as of norms of heads.
                weight.average_gradients_across_tp_domain = True

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Megatron's linear layers and norms; torch's norms where it would take Transformer Engine's without asking."""
        if HAVE_TE:
            found: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return found
        config = copy.copy(self.config)
        config.transformer_impl = "local"
        if config.qk_layernorm:
            submodules = replace(submodules, q_layernorm=Norm, kv_layernorm=Norm)
        return dict(QKNormConfigResolver(config, submodules).resolve())

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The latents, of which the keys' rotary part gets the gradients of the heads of all tensor-parallel ranks.

        In Megatron's layer a rank has its own heads' alone, but for Transformer Engine's layers with sequence
        parallelism; elsewhere ranks drift apart, or learn from a part of the heads.
        """
        queries, keys = super()._qkv_down_projection(hidden_states)
        if self.world_size == 1:
            return queries, keys
        latent_size, rotary_size = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if keys.size(-1) != latent_size + rotary_size:  # Megatron's own linear layers have a share of the columns
            keys = gather_from_tensor_model_parallel_region(keys, group=self.tp_group)
            if self.config.sequence_parallel:  # gathered again by Megatron's layer, which then sums the gradients
                keys = scatter_to_sequence_parallel_region(keys, group=self.tp_group)
        if not self.config.sequence_parallel:
            latent, rotary = keys.split([latent_size, rotary_size], dim=-1)
            keys = torch.cat([latent, copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)], dim=-1)
        return queries, keys

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        """As Megatron's, with packed batches in any layout: `[t, h, k]`, `[t, h, k]`, `[t, h, v]` and the latents."""
        if packed_seq_params is not None and inference_context is None and packed_seq_params.qkv_format == "thd":
            # One row after another, each with its own angles: no document boundaries are looked for.
            packed = self.core_attention.planned(packed_seq_params)
            shares = self.tp_group.size() if self.config.sequence_parallel else 1
            self.core_attention.check_rows(
                hidden_states.shape[0] * shares, packed.plans.layout, self.core_attention.ranks_of(packed)
            )
            packed_seq_params = copy.copy(packed)
            packed_seq_params.qkv_format = "sbhd"
        found: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states,
            key_value_states,
            position_ids,
            packed_seq_params,
            inference_context=inference_context,
            **others,
        )
        return found

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        attn_mask_type: AttnMaskType | None = None,
        **others: Any,
    ) -> Tensor:
        """The core attention, without Megatron's padding of the values of packed batches to the size of keys."""
        out: Tensor = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            packed_seq_params=packed_seq_params,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            **others,
        )
        return out


class MLASelfAttention(_OverRanks):
    """Megatron's multi-latent self-attention, whose rotary positions are those of the layout."""


class FusedMLASelfAttention(_OverRanks, megatron_mla.FusedMLASelfAttention):
    """Megatron's, likewise, with one projection down to both latents (`--mla-down-proj-fusion`)."""
