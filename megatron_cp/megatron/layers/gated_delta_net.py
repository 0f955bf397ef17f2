"""Gated DeltaNet for Megatron: its parameters and projections, our exchange and rule between them."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from torch import Tensor

from megatron_cp.executor.trace import of_layer
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.megatron.layers.base import LinearModule
from megatron_cp.megatron.layers.communication import codec_of, cp_ranks, transport_of
from megatron_cp.megatron.layers.refusals import check_comm_type, refuse, refuse_unsupported
from megatron_cp.megatron.patches import gated_delta_net_without_fla
from megatron_cp.plan.schemes import may_exchange_heads
from megatron_cp.planner.batch import LinearSpec
from megatron_cp.planner.capabilities import require


class GatedDeltaNet(MegatronGatedDeltaNet, LinearModule):
    """Megatron's Gated DeltaNet with its context parallelism replaced.

    The same parameters, names and checkpoints. Between the projections there is one collective in and one out, without
    the gate, for any document lengths and any number of heads; nothing is read back to the host. Deterministic where
    the kernel is, packed or not.

    Raises:
        ArgumentError: what this cannot compute exactly, named as Megatron's flag; raised while the model is built.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unsupported(config)
        check_comm_type(config, kwargs.get("cp_comm_type"), "Gated DeltaNet")
        with gated_delta_net_without_fla():  # its kernels are not what runs here
            super().__init__(config, *args, **kwargs)
        if self.activation not in ("silu", "swish"):
            refuse("activation_func", self.activation, "silu", "The convolution's activation is silu.")
        if not self.use_qk_l2norm:
            refuse("use_qk_l2norm", False, "True", "Queries and keys are normalised.")
        self.ranks = cp_ranks(self.pg_collection.cp)
        mode = require("mode", getattr(config, "linear_cp_mode", "auto"), name="--linear-cp-mode")
        self.slot = LinearSpec(
            "gdn",
            heads=self.num_v_heads_local_tp,
            key_heads=self.num_k_heads_local_tp,
            head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            conv_width=self.conv_kernel_dim,
            mode=mode,
            item_size=config.params_dtype.itemsize,
            head_chunks=getattr(config, "cp_head_chunks", None),
            transport=transport_of(config, self.ranks),
            codec=codec_of(config, self.ranks, exchanges=may_exchange_heads(mode), how=f"Gated DeltaNet, {mode}"),
            hardware=getattr(config, "cp_hardware", None),
        )
        self.agree()
        if self.tp_size > 1 and not config.sequence_parallel:
            self._sum_norm_gradients_over_tp()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`[t, b, hidden]` rows of this rank to `[t, b, hidden]` and a bias; b is 1 for packed batches."""
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError("Gated DeltaNet has no inference in Megatron-Core 0.19")
        projected, _ = self.in_proj(hidden_states)
        rows, batch, _ = projected.shape
        plan = self.plan_of(rows, batch, packed_seq_params)
        # One document after another: the same memory for a batch of one.
        flat = projected.transpose(0, 1).reshape(rows * batch, -1)
        qk, v, heads = self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp
        qkv, gate, beta, alpha = flat.split([2 * qk + v, v, heads, heads], dim=-1)
        out: Tensor = of_layer(self.layer_number, gated_delta_net)(
            qkv,
            beta,
            alpha,
            plan,
            self.ranks_of(packed_seq_params),
            conv=self.conv1d.weight,
            conv_bias=self.conv1d.bias,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            kernel=self.kernel,
        )
        checkpoint = CheckpointWithoutOutput(fp8=None) if self.recompute_norm_out else None

        def gated_norm(out: Tensor, gate: Tensor) -> Tensor:
            normed = self._apply_gated_norm(out, gate.reshape(out.shape))
            return normed.view(batch, rows, -1).transpose(0, 1).contiguous()

        normed = checkpoint.checkpoint(gated_norm, out, gate) if checkpoint else gated_norm(out, gate)
        out, bias = self.out_proj(normed)
        if checkpoint:
            checkpoint.discard_output_and_register_recompute(out)
        return out, bias

    def _sum_norm_gradients_over_tp(self) -> None:
        """The norm's weight is one for all heads, and a tensor-parallel rank sees its own heads only.

        Megatron sums such gradients over the tensor-parallel group with sequence parallelism alone; elsewhere its ranks
        drift apart. Its `finalize_model_grads` averages what is marked, so each rank gives its share times their count.
        """
        for weight in self.out_norm.parameters():
            weight.average_gradients_across_tp_domain = True
            weight.register_hook(lambda gradient: gradient * self.tp_size)
