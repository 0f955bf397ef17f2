"""Softmax attention for Megatron: a core attention that runs a plan, and rotary positions under any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_cp.executor.trace import layer_operation
from megatron_cp.megatron.layers.base import ContextParallelModule
from megatron_cp.megatron.layers.communication import cp_ranks, spec_options
from megatron_cp.megatron.layers.norms import Norm
from megatron_cp.megatron.layers.refusals import refuse_other_means, refuse_unsupported, uses_transformer_engine
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams
from megatron_cp.megatron.rules import feature_error, refuse, unsupported_attention
from megatron_cp.megatron.slots import attention_slot, comm_scheme
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.latent_attention import latent_attention

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True, AttnMaskType.no_mask: False}


class CoreAttention(MegatronModule, ContextParallelModule):
    """Megatron's `core_attention` over the context-parallel group, by the scheme that `--cp-comm-type` names.

    Packed batches may have any layout, whose plan they carry; other batches have Megatron's zigzag of each sequence.
    Windows (`--window-size`, `--window-attn-skip-freq`), sinks (`--softmax-type`) and dropout are Megatron's, in global
    positions and the same for every scheme and number of ranks. Arguments are those that Megatron's `SelfAttention` and
    `MLASelfAttention` pass; the latter's keys and values have different sizes, and as many heads as the queries.

    Attributes:
        softmax_offset: `[heads]`, the sinks of this tensor-parallel rank: a parameter if learnable, zeros for
            off-by-one, None for the plain softmax.

    Raises:
        ArgumentError: an option that is not supported exactly, by Megatron's flag, while the model is built.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(config=config)
        refuse_attention(config, attn_mask_type, attention_type)
        self.cp_group, self.ranks = pg_collection.cp, cp_ranks(pg_collection.cp)
        self.tp_group, self.layer_number = pg_collection.tp, layer_number
        self.softmax_scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        dropout = others.get("attention_dropout")
        self.dropout = config.attention_dropout if dropout is None else dropout
        self.slot = attention_slot(
            config,
            self.ranks.size,
            cp_comm_type,
            _mask(config, attn_mask_type, layer_number),
            spec_options(config, self.ranks, f"--cp-comm-type {comm_scheme(cp_comm_type, self.ranks.size)}"),
            tp_size=pg_collection.tp.size(),
            k_channels=k_channels,
            v_channels=v_channels,
        )
        self._add_sinks(config)
        sinks = config.softmax_type
        self.agree(softmax_scale=softmax_scale, dropout=self.dropout, sinks=sinks, mask=attn_mask_type)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """Computes attention for this rank's rows.

        Args:
            query: `[t, h, d]` if packed, else `[s, b, h, d]`.
            key, value: `[t, g, d]` or `[s, b, g, d]`; their d may differ.
            attention_mask: ignored, as in Transformer Engine; `attn_mask_type` and the documents define the mask.
            attn_mask_type: None, or the mask type that the layer was built with.
            attention_bias: must be None.
            packed_seq_params: from `shard_batch`, or Megatron's own after its zigzag sharding.
            up: `[h, key + value features, r]`, the up-projection of latents, if the slot has them. key and value are
                then shared keys `[t, 1, d]` and latents `[t, 1, r]`.

        Returns:
            `[t, h * d]` or `[s, b, h * d]`.
        """
        if attention_bias is not None:
            refuse("attention_bias", "a tensor", "None", "No scheme here adds a bias to the scores.")
        if attn_mask_type is not None and _CAUSAL.get(attn_mask_type) != _CAUSAL[self.attn_mask_type]:
            refuse("attn_mask_type", attn_mask_type, "the one that the layer was built with", "")
        dropout = self.dropout if self.training else 0.0
        plans, ranks, packed = self.plans_of(packed_seq_params, query)
        seed = None if packed is None else packed.seed
        if isinstance(packed, _RotaryParams):
            query, key = packed.rotate(query, key, self.config, self.cp_group)
        refuse_other_means(self.config, packed_seq_params, plans.layout.cp_size)
        plan = plans.plan(self.slot)
        tensors = (query, key, value) if up is None else (query, value.squeeze(-2), key.squeeze(-2), up)
        out: Tensor = layer_operation(self.layer_number, attention if up is None else latent_attention)(
            *tensors, plan, ranks,
            softmax_scale=self.softmax_scale, sink=self.softmax_offset,
            dropout=dropout, seed=self._seed(seed) if dropout else 0,
        )  # fmt: skip
        return out.flatten(-2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Returns the sinks, if they are learnable, in the format of Megatron's own core attention."""
        learnt = self.config.softmax_type == "learnable"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True) if learnt else {},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def _add_sinks(self, config: Any) -> None:
        on_device = torch.cuda.is_available() and not config.use_cpu_initialization
        device = torch.cuda.current_device() if on_device else "cpu"
        sinks = torch.zeros(self.slot.heads, device=device, dtype=config.params_dtype)
        if config.softmax_type != "learnable":
            self.register_buffer(
                "softmax_offset", sinks if config.softmax_type == "off-by-one" else None, persistent=False
            )
            return
        self.softmax_offset = torch.nn.Parameter(sinks)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def _seed(self, seed: int | None) -> int:
        """Mixes the microbatch's seed with the numbers of this layer and this tensor-parallel rank."""
        if seed is None:
            # The host's generator is used since reading a device's would make the host wait. Recomputation restores it.
            seed = int(torch.randint(2**31, ()))
        return ((seed * 1_000_003 + self.layer_number) * 1_000_003 + self.tp_group.rank()) % 2**62


class _RotaryParams(PlannedSeqParams):
    """`PlannedSeqParams` with the rotary phases of one attention layer's queries and keys."""

    phases: tuple[Tensor | None, Tensor | None]
    mscale: float

    @classmethod
    def from_params(cls, params: PlannedSeqParams, tables: Any, mscale: float) -> _RotaryParams:
        one = cls.__new__(cls)
        one.__dict__.update(params.__dict__)
        pair = tables if isinstance(tables, tuple) else (tables, tables)
        # For positions of several axes Megatron makes a table for every batch, with a row for each row.
        queries, keys = (x if x is None or params.has_axes else params.rotary_phases(x) for x in pair)
        one.phases = queries, keys
        one.mscale = mscale
        return one

    def rotate(self, query: Tensor, key: Tensor, config: Any, cp_group: Any) -> tuple[Tensor, Tensor]:
        """Applies rotary positions to queries and keys, `[t, h, d]` each, by Megatron's own function."""
        turned = [
            x
            if phases is None
            # As a batch of one sequence, so that row n has phase n, and document boundaries are ignored.
            else apply_rotary_pos_emb(x.unsqueeze(1), phases, config, mscale=self.mscale, cp_group=cp_group).squeeze(1)
            for x, phases in zip((query, key), self.phases, strict=True)
        ]
        return turned[0], turned[1]


class SelfAttention(megatron_attention.SelfAttention):
    """Megatron's self-attention with the rotary positions of the layout.

    Megatron computes positions in packed batches in each layer, from lengths that it copies to the host, and for its
    own zigzag only. Here the core attention rotates queries and keys, by phases that are gathered once for the batch.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        norms = config.qk_layernorm and not config.qk_l2_norm and submodules.q_layernorm is None
        if norms and not uses_transformer_engine(config):
            # If the spec has no norm, Megatron takes Transformer Engine's.
            submodules = replace(submodules, q_layernorm=Norm, k_layernorm=Norm)
        super().__init__(config, submodules, *args, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Calls Megatron's, with packed batches in any layout."""
        if packed_seq_params is not None and inference_context is None and packed_seq_params.qkv_format == "thd":
            packed = self.core_attention.planned(packed_seq_params)
            if self.config.mrope_section is not None and not packed.has_axes:
                remedy = "Give megatron_cp.megatron.batch.shard_batch the batch's position_ids."
                refuse("mrope_section", self.config.mrope_section, "batches with positions of several axes", remedy)
            without = self.config.no_rope_freq  # layers without rotary positions
            if rotary_pos_emb is not None and not (without and without[self.layer_number - 1]):
                packed = _RotaryParams.from_params(packed, rotary_pos_emb, self._yarn_concentration_factor)
            packed_seq_params, rotary_pos_emb = packed, None
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            inference_context=inference_context,
            **kwargs,
        )


def _mask(config: Any, attn_mask_type: AttnMaskType, layer_number: int) -> str:
    """Returns the layer's mask, as `Mask.named` spells it."""
    is_causal = _CAUSAL[attn_mask_type]
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return "causal" if is_causal else "full"
    left, right = config.window_size
    return f"window:{left},{0 if is_causal else right}"


def refuse_attention(config: Any, attn_mask_type: AttnMaskType, attention_type: str) -> None:
    """Raises an error for options that no attention here supports, while the model is built."""
    refuse_unsupported(config)
    if attention_type != "self":
        raise feature_error("cross_attention", attention_type, "self", flag="attention_type")
    if attn_mask_type not in _CAUSAL:
        refuse("attn_mask_type", attn_mask_type, "causal, padding_causal or no_mask", "Pack documents instead.")
    for error in unsupported_attention(config):
        raise error
