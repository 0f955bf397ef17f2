"""Mamba-2's mixer for Megatron: Megatron's parameters and projections, with our exchange and scan between them."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from megatron_cp.executor.trace import layer_operation
from megatron_cp.extras import install
from megatron_cp.linear.gated_norm import silu_gated
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.megatron.layers.base import LinearModule
from megatron_cp.megatron.layers.communication import cp_ranks, with_one_cp_rank
from megatron_cp.megatron.layers.refusals import check_comm_type, refuse_unsupported, scheme_of_layer
from megatron_cp.megatron.patches import mamba_mixer_without_its_kernels
from megatron_cp.megatron.rules import unsupported_mamba


class MambaMixer(mamba_mixer.MambaMixer, LinearModule):
    """Megatron's Mamba-2 mixer with our context parallelism.

    It has the same parameters, names and checkpoints. Between the projections it takes one collective before the scan
    and one after, without the gate, for any document lengths and any number of heads and groups. The plan has the
    documents, so a packed batch needs no `total_tokens`. Training needs neither mamba_ssm nor causal_conv1d.

    Raises:
        ArgumentError: an option that is not supported exactly, by Megatron's flag, while the model is built.
    """

    def __init__(
        self, config: Any, *args: Any, layer_number: int | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        refuse_unsupported(config)
        check_comm_type(config, scheme_of_layer(config, layer_number), "Mamba")
        for error in unsupported_mamba(config):
            raise error
        with mamba_mixer_without_its_kernels():  # Megatron's kernels are not called here
            super().__init__(
                config, *args, layer_number=layer_number, pg_collection=with_one_cp_rank(pg_collection), **kwargs
            )
        self.pg_collection = pg_collection
        self.ranks = cp_ranks(pg_collection.cp)
        self.set_slot(
            "mamba",
            "Mamba",
            heads=self.nheads_local_tp,
            key_heads=self.ngroups_local_tp,
            head_dim=self.d_state,
            value_head_dim=self.headdim,
            conv_width=self.d_conv,
        )

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `[t, b, hidden]` and a bias for this rank's rows `[t, b, hidden]`; b is 1 for packed batches."""
        if inference_context is not None or inference_params is not None:
            return self._infer(hidden_states, inference_context, inference_params, packed_seq_params)
        projected, _ = self.in_proj(hidden_states)
        rows, batch, _ = projected.shape
        plan = self.plan_of(rows, batch, packed_seq_params)
        # Sequences are put end to end, which is a view for a batch of one.
        flat = projected.transpose(0, 1).reshape(rows * batch, -1)
        inner, heads = self.d_inner_local_tp, self.nheads_local_tp
        z, xBC, dt = flat.split([inner, flat.shape[1] - inner - heads, heads], dim=-1)  # noqa: N806 - Mamba's names
        out: Tensor = layer_operation(self.layer_number, mamba2_mixer)(
            xBC, dt, plan, self.ranks_of(packed_seq_params), conv=self.conv1d_weight, conv_bias=self.conv1d_bias,
            A_log=self.A_log, D=self.D, dt_bias=self.dt_bias, kernel=self.kernel,
        ).flatten(1)  # fmt: skip
        gated = self.norm(out, z) if self.rmsnorm else silu_gated(out, z).to(out.dtype)
        out, bias = self.out_proj(gated.view(batch, rows, -1).transpose(0, 1).contiguous())
        return out, bias

    def _infer(
        self, hidden_states: Tensor, context: Any, params: Any, packed_seq_params: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs Megatron's inference, which needs one context-parallel rank and mamba_ssm."""
        if self.ranks.size > 1:
            raise NotImplementedError("Mamba has inference only at --context-parallel-size 1")
        if not mamba_mixer.HAVE_MAMBA_SSM:
            raise NotImplementedError(f"Megatron's inference of Mamba needs mamba-ssm: {install('mamba')}")
        found: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, context, inference_params=params, packed_seq_params=packed_seq_params
        )
        return found
