"""Multi-latent attention for Megatron, with rotary positions under any layout and values of a size of their own.

Keys and values are made from a latent of each token (DeepSeek-V2, arXiv 2405.04434). Megatron's layer applies rotary
positions itself, to a part of each head, so that the phases are passed to it; `SelfAttention` applies them later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention as megatron_mla
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron_cp.megatron import compat
from megatron_cp.megatron.layers.norms import Norm
from megatron_cp.megatron.layers.refusals import uses_transformer_engine
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams, unpacked_form
from megatron_cp.megatron.rules import refuse, unsupported_latent_attention

_PLAIN_LINEAR: tuple[type, ...] = (ColumnParallelLinear,)
if HAVE_TE:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    _PLAIN_LINEAR += (TEColumnParallelLinear,)

_ROTARY_SETTINGS = (
    "rope_type", "qk_pos_emb_head_dim", "rotary_base", "rotary_percent", "rotary_scaling_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip


class PlannedRotary(nn.Module):
    """Megatron's rotary embedding, called with a length, or with the `PlannedSeqParams` of a microbatch.

    With a microbatch its rows are those of this rank's positions, gathered once for all layers, although every layer
    has an embedding of its own in Megatron. It has no state in checkpoints.
    """

    def __init__(self, embedding: Any, config: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.settings = ("rotary", *(getattr(config, name) for name in _ROTARY_SETTINGS))

    def get_rotary_seq_len(self, context: Any, block: Any, hidden_states: Tensor, config: Any, params: Any) -> Any:
        """Returns the argument of `forward`: `params` if they are planned, else Megatron's length."""
        if isinstance(params, PlannedSeqParams):
            return params
        return self.embedding.get_rotary_seq_len(context, block, hidden_states, config, params)

    def forward(self, length: int | PlannedSeqParams, packed_seq: bool = False) -> Any:
        """Returns angles for a microbatch's rows, or Megatron's for a length; for YaRN with its factor.

        They are `[t, 1, d]`, or `[t, 1, 1, d]` where Megatron's layer keeps the axis of a batch of one.
        """
        if isinstance(length, PlannedSeqParams):
            params = length
            return params.remember(self.settings, lambda: self._gather(params))
        return self.embedding(length, packed_seq=packed_seq)

    def _gather(self, params: PlannedSeqParams) -> Any:
        assert params.positions is not None
        found = self.embedding(max(params.max_seqlen_q, params.max_seqlen_kv), packed_seq=True)
        if isinstance(found, tuple):
            table, factor = found
            return self._rows(table, params.positions), factor
        return self._rows(found, params.positions)

    def _rows(self, table: Tensor, positions: Tensor) -> Tensor:
        rows = table.index_select(0, positions)
        return rows if compat.LATENT_ROWS_KEEP_AXIS else rows.squeeze(1)


class _ParallelMLA(megatron_mla.MLASelfAttention):
    """The changes that our two classes share.

    Attributes:
        core_attention: the core attention. It gets the heads' keys and values from Megatron's layer, `h * (k + v)`
            elements a token for h heads of sizes k and v; or, by `--cp-latent-mode`, the `kv_lora_rank +
            qk_pos_emb_head_dim` elements of latent and shared key, with the up-projection's weight.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        for error in unsupported_latent_attention(config, te=uses_transformer_engine(config)):
            raise error
        if config.qk_layernorm and not uses_transformer_engine(config):
            submodules = replace(submodules, q_layernorm=Norm, kv_layernorm=Norm)
        with local_parts(config):
            super().__init__(config, submodules, *args, **kwargs)
        own: Any = self._modules["rotary_pos_emb"]
        self.rotary_pos_emb = PlannedRotary(own, config)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            for weight in self.q_layernorm.parameters():
                # Every tensor-parallel rank has the whole gradient, which Megatron would sum as for norms of heads.
                weight.average_gradients_across_tp_domain = True

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the latents; the keys' rotary part gets the gradients of all tensor-parallel ranks' heads.

        In Megatron's layer a rank has the gradients of its own heads only, except for Transformer Engine's layers with
        sequence parallelism. Otherwise its ranks' weights diverge, or learn from a part of the heads.
        """
        queries, keys = super()._qkv_down_projection(hidden_states)
        if self.world_size == 1:
            return queries, keys
        latent_size, rotary_size = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if keys.size(-1) != latent_size + rotary_size:  # Megatron's own linear layers return a share of the columns
            keys = gather_from_tensor_model_parallel_region(keys, group=self.tp_group)
            if self.config.sequence_parallel:  # Megatron's layer gathers them again, and then sums the gradients
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
        """Returns `[t, h, k]`, `[t, h, k]`, `[t, h, v]` and the latents, for packed batches in any layout.

        Where latents are given to the core attention, the second and the third are `[t, 1, shared]` and `[t, 1, r]`.
        """
        if packed_seq_params is not None and inference_context is None and packed_seq_params.qkv_format == "thd":
            # In this format Megatron ignores document boundaries, and every row has its own angles.
            packed = self.core_attention.planned(packed_seq_params)
            shares = self.tp_group.size() if self.config.sequence_parallel else 1
            self.core_attention.check_rows(
                hidden_states.shape[0] * shares, packed.plans.layout, self.core_attention.ranks_of(packed)
            )
            packed_seq_params = unpacked_form(packed)
        if self.core_attention.slot.latent is not None:
            if inference_context is not None:
                mode = self.core_attention.slot.latent_mode
                refuse("cp_latent_mode", mode, "heads for inference", "Megatron's cache is of keys and values.")
            return self._queries_and_latents(hidden_states, packed_seq_params)
        found: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states,
            key_value_states,
            position_ids,
            packed_seq_params,
            inference_context=inference_context,
            **others,
        )
        if isinstance(packed_seq_params, PlannedSeqParams):
            query, key, value, *latents = found
            found = (*(x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value)), *latents)
        return found

    def _queries_and_latents(self, hidden_states: Tensor, params: PackedSeqParams | None) -> tuple[Tensor, ...]:
        """Returns queries, shared keys and latents, then the latents of queries and of keys.

        The up-projection of keys and values is not called. Of its work, tensor-parallel ranks need what it does with
        the gradients of latents, which are those of each rank's heads.
        """
        config, is_sharded = self.config, self.world_size > 1 and self.config.sequence_parallel
        angles: Any = self.rotary_pos_emb(
            self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, config, params)
        )
        angles, factor = (angles, 1.0) if config.rope_type == "rope" else angles
        queries, keys = self._qkv_down_projection(hidden_states)
        latent, rotary = keys.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        if is_sharded:
            rotary = gather_from_sequence_parallel_region(rotary, group=self.tp_group)
        if params is not None:
            queries, latent, rotary = (x.squeeze(1) for x in (queries, latent, rotary))
            angles = angles.squeeze(1) if angles.dim() == 4 else angles
        if config.q_lora_rank is not None:
            queries = self.q_layernorm(queries)
        latent = self.kv_layernorm(latent)

        def turned(x: Tensor, angles: Tensor) -> Tensor:
            found: Tensor = apply_rotary_pos_emb(
                x, angles[: len(x)], config=config, mscale=factor, cp_group=self.pg_collection.cp,
                mla_rotary_interleaved=True,
            )  # fmt: skip
            return found

        def up_projected(queries: Tensor, rotary: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
            projection = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
            heads = projection(queries)[0].unflatten(-1, (-1, self.q_head_dim))
            own, turning = heads.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
            return torch.cat([own, turned(turning, angles)], dim=-1), turned(rotary.unsqueeze(-2), angles).contiguous()

        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=None)
            query, key = self.qkv_up_checkpoint.checkpoint(up_projected, queries, rotary, angles)
        else:
            query, key = up_projected(queries, rotary, angles)
        if is_sharded:
            whole = gather_from_sequence_parallel_region(latent, group=self.tp_group)
        else:
            whole = copy_to_tensor_model_parallel_region(latent, group=self.tp_group)
        return query, key, whole.unsqueeze(-2), queries, latent

    def _up_projection(self) -> Tensor:
        """Returns the weight `[h, key + value features, r]` of this rank's heads."""
        projection = self.linear_kv_up_proj
        if not isinstance(projection, _PLAIN_LINEAR):
            remedy = "Where latents arrive, only its weight is used. With adapters or other projections, use heads."
            found = f"{type(projection).__name__} as linear_kv_up_proj"
            refuse("cp_latent_mode", found, "a plain column-parallel linear layer", remedy)
        weight: Tensor = projection.weight
        return weight.view(self.num_attention_heads_per_partition, -1, self.config.kv_lora_rank)

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
        """Runs the core attention without Megatron's padding of packed batches' values to the size of keys."""
        if self.core_attention.slot.latent is not None:
            others["up"] = self._up_projection()
        out: Tensor = self.core_attention(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type, **others,
        )  # fmt: skip
        return out


class MLASelfAttention(_ParallelMLA):
    """Megatron's multi-latent self-attention with the rotary positions of the layout."""


class FusedMLASelfAttention(_ParallelMLA, megatron_mla.FusedMLASelfAttention):
    """Megatron's multi-latent self-attention with one projection to both latents (`--mla-down-proj-fusion`)."""


@contextlib.contextmanager
def local_parts(config: Any) -> Iterator[None]:
    """Lets Megatron resolve its own linear layers where Transformer Engine's are not installed."""
    before = config.transformer_impl
    config.transformer_impl = before if HAVE_TE else "local"
    try:
        yield
    finally:
        config.transformer_impl = before
