"""DeepSeek sparse attention (DSA) for Megatron, over the context-parallel group and for packed batches in any layout.

Megatron's layer multiplies the up-projection of latents into queries (`AbsorbedMLASelfAttention`), and its core
attention has an indexer that chooses the keys of each query. Parameters and their names are Megatron's.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from torch import Tensor, nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.trace import layer_operation
from megatron_cp.megatron import compat
from megatron_cp.megatron.layers.attention import refuse_attention
from megatron_cp.megatron.layers.base import ContextParallelModule
from megatron_cp.megatron.layers.communication import cp_ranks, spec_options
from megatron_cp.megatron.layers.multi_latent_attention import PlannedRotary, local_parts
from megatron_cp.megatron.layers.norms import Norm
from megatron_cp.megatron.layers.refusals import refuse_other_means, uses_transformer_engine
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams, unpacked_form
from megatron_cp.megatron.rules import unsupported_latent_attention, unsupported_sparse_attention
from megatron_cp.megatron.slots import comm_scheme, plannable, ulysses_degree
from megatron_cp.planner.batch import BatchPlan
from megatron_cp.softmax.sparse import SparseOutput, sparse_attention


class SparseCoreAttention(dsa.DSAttention, ContextParallelModule):
    """Megatron's `DSAttention` over the context-parallel group: of equal index scores, the first keys are chosen.

    The indexer's loss is Megatron's: a mean over the tokens of all ranks, or a sum with `calculate_per_token_loss`.

    Raises:
        ArgumentError: an option that is not supported exactly, by Megatron's flag, while the model is built.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        refuse_attention(config, attn_mask_type, attention_type)
        latent = config.qk_pos_emb_head_dim, config.kv_lora_rank
        super().__init__(
            config, submodules, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale,
            sum(latent), latent[1], cp_comm_type or "p2p", pg_collection, **others,
        )  # fmt: skip
        self.ranks = cp_ranks(pg_collection.cp)
        scheme = comm_scheme(cp_comm_type, self.ranks.size)
        options = spec_options(
            config,
            self.ranks,
            "sparse attention",
            uncoded="whose keys keep their type",
            unchunked="whose keys are one head",
        )
        sizes = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.slot = plannable(
            self.ranks.size,
            heads=config.num_attention_heads // pg_collection.tp.size(),
            kv_heads=config.num_attention_heads // pg_collection.tp.size(),
            head_dim=sum(latent), value_head_dim=latent[1], scheme=scheme, latent=latent,
            ulysses_degree=ulysses_degree(config, scheme, self.ranks.size),
            topk=config.dsa_indexer_topk, indexer=None if self.skip_topk else sizes, **options,
        )  # fmt: skip
        self._refuse_a_choice_of_another_stage()
        if self.indexer is not None:
            self.indexer.rotary_pos_emb = _IndexerRotary(self.indexer.rotary_pos_emb, config)
        self.agree(softmax_scale=softmax_scale, loss=config.dsa_indexer_loss_coeff)

    def _refuse_a_choice_of_another_stage(self) -> None:
        built: set[int] = vars(self.config).setdefault("_layers_that_choose_keys", set())
        if not self.skip_topk:
            built.add(self.layer_number)
        elif self.source_layer not in built:
            given = (
                f"{self.index_topk_freq}: layer {self.layer_number} uses the keys that layer {self.source_layer} chose"
            )
            allowed = "a number by which each pipeline stage has the layers whose choice its layers share"
            raise ArgumentError("--dsa-indexer-topk-freq", given, allowed, "See also --dsa-indexer-skip-topk-offset.")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes attention for this rank's rows.

        Args:
            query: `[t, h, r + p]` if packed, else `[s, b, h, r + p]`, with the up-projection of keys multiplied in.
            key: `[t, 1, r + p]` or `[s, b, 1, r + p]`, the latents and the rotary keys.
            value: must be None: values are latents.
            x, qr: hidden states and latent queries, from which the indexer computes; it sends no gradient there.
            attention_mask, position_ids, attn_mask_type, attention_bias: ignored: the mask is causal.
            packed_seq_params: from `shard_batch`, or Megatron's own after its zigzag sharding.
            up_v_weight: `[h, v, r]`, multiplied into the output.

        Returns:
            `[t, h * v]` or `[s, b, h * v]`.
        """
        assert value is None
        plans, ranks, packed = self.plans_of(packed_seq_params, query)
        carrier = packed_seq_params
        packed_seq_params = packed_seq_params if packed is None else unpacked_form(packed)
        refuse_other_means(self.config, carrier, plans.layout.cp_size)
        coefficient = self.config.dsa_indexer_loss_coeff or 0.0
        learns = self.training and torch.is_grad_enabled() and coefficient > 0 and not self.skip_topk
        index: dict[str, Any] = {}
        if self.indexer is not None:
            with torch.set_grad_enabled(learns):
                rows = self.indexer.forward_before_topk(x.detach(), qr.detach(), packed_seq_params)
            index = dict(zip(("index_q", "index_k", "index_weights"), rows, strict=True))
        holder = self._get_index_share_topk_holder(carrier, attention_mask) if self.index_share else {}
        if self.skip_topk:
            index = {"chosen": holder[self.source_layer]}
        several = query.dim() == 4
        found = [
            self._attend(plans, ranks, learns, *((q[:, b], k[:, b]) if several else (q, k)),
                         {name: each[:, b] for name, each in index.items()})
            for q, k in [(query, key)] for b in range(query.shape[1] if several else 1)
        ]  # fmt: skip
        if self.index_share and not self.skip_topk:
            holder[self.layer_number] = torch.stack([each.chosen for each in found], 1)
        out = torch.stack([each.out for each in found], 1) if several else found[0].out
        if up_v_weight is not None:
            out = torch.einsum("...hr,hvr->...hv", out, up_v_weight)
        out = out.flatten(-2)
        if learns:
            out = self._with_loss(out, found, plans, ranks.size, coefficient)
        return out

    def _attend(
        self, plans: BatchPlan, ranks: Any, learns: bool, query: Tensor, key: Tensor, index: dict[str, Tensor]
    ) -> SparseOutput:
        rank, loss = self.config.kv_lora_rank, None
        if learns:
            loss = "sparse" if self.config.dsa_indexer_use_sparse_loss else "dense"
        found: SparseOutput = layer_operation(self.layer_number, sparse_attention)(
            query, key[:, 0, rank:], key[:, 0, :rank], plans.plan(self.slot), ranks, **index,
            softmax_scale=self.softmax_scale, index_relu=self.config.dsa_indexer_scoring_relu, index_loss=loss,
        )  # fmt: skip
        return found

    def _with_loss(
        self, out: Tensor, found: list[SparseOutput], plans: BatchPlan, ranks: int, coefficient: float
    ) -> Tensor:
        """Attaches the indexer's loss: a part of the sum over all ranks, or of the mean over all tokens."""
        loss = sum(each.index_loss.sum() for each in found if each.index_loss is not None) * coefficient
        assert isinstance(loss, Tensor)
        if not self.config.calculate_per_token_loss:
            tokens = plans.layout.packing.total if plans.lengths is None else int(plans.lengths.sum())
            loss = loss / max(tokens * len(found), 1)
        group = self.pg_collection.cp if ranks > 1 else None
        dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss, self.layer_number, self.config.num_layers, reduce_group=group
        )
        if not self.config.calculate_per_token_loss and self.config.experimental_attention_variant != "dsa":
            loss = loss * ranks  # since gradients are means over ranks; with dsa Megatron's schedule does it
        attached: Tensor = dsa.DSAIndexerLossAutoScaler.apply(out, loss)
        return attached


class _IndexerRotary(PlannedRotary):
    """The rotary embedding of an indexer, whose rows have an axis for the batch."""

    def forward(self, length: int | PlannedSeqParams, packed_seq: bool = False) -> Any:
        """Returns angles `[t, 1, 1, d]`; see `PlannedRotary`."""
        found = super().forward(length, packed_seq)
        if not isinstance(length, PlannedSeqParams) or compat.LATENT_ROWS_KEEP_AXIS:
            return found
        return (found[0].unsqueeze(1), found[1]) if isinstance(found, tuple) else found.unsqueeze(1)


class SparseMLASelfAttention(AbsorbedMLASelfAttention):
    """Megatron's latent self-attention with the up-projection multiplied into queries, in any layout."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        te = uses_transformer_engine(config)
        errors = unsupported_sparse_attention(config, te=te), unsupported_latent_attention(config, te=te)
        for error in itertools.chain(*errors):
            raise error
        if config.qk_layernorm and not te:
            submodules = replace(submodules, q_layernorm=Norm, kv_layernorm=Norm)
        with local_parts(config):
            super().__init__(config, submodules, *args, **kwargs)
        own: Any = self._modules["rotary_pos_emb"]
        self.rotary_pos_emb = PlannedRotary(own, config)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        """Returns absorbed queries, latents with rotary keys, and latent queries, for packed batches in any layout."""
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            packed_seq_params = unpacked_form(self.core_attention.planned(packed_seq_params))
        found: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, packed_seq_params, inference_context, **others
        )
        return found


class DuplicatedLinear(nn.Linear):
    """torch's linear layer as Megatron calls the indexer's, of which every tensor-parallel rank has a copy."""

    def __init__(self, size: int, out: int, *, config: Any, init_method: Any, bias: bool, **others: Any) -> None:
        super().__init__(size, out, bias=bias, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Returns the product, and None for a bias that is not added."""
        return super().forward(x), None
