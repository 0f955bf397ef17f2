"""Gated DeltaNet and its second version for Megatron: Megatron's parameters and projections, our exchange and rule
between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net as megatron_gdn
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from torch import Tensor

from megatron_cp.executor.trace import layer_operation
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.gated_delta_net_2 import gdn2_mixer
from megatron_cp.megatron.layers.base import LinearModule
from megatron_cp.megatron.layers.communication import cp_ranks, with_one_cp_rank
from megatron_cp.megatron.layers.refusals import check_comm_type, refuse_unsupported
from megatron_cp.megatron.patches import gated_delta_net_without_fla
from megatron_cp.megatron.rules import refuse


class _DeltaNet(LinearModule):
    """Megatron's layers of Gated DeltaNet with our context parallelism: subclasses say which one, and split its input.

    They have the same parameters, names and checkpoints. Between the projections they take one collective before the
    rule and one after, without the gate, for any document lengths and any number of heads. They never wait for the
    device, and are deterministic if the kernel is, packed or not.

    Raises:
        ArgumentError: an option that is not supported exactly, by Megatron's flag, while the model is built.
    """

    kind: str
    title: str
    operation: Callable[..., Tensor]

    if TYPE_CHECKING:  # subclasses have the attributes of Megatron's layer

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        refuse_unsupported(config)
        check_comm_type(config, kwargs.get("cp_comm_type"), self.title)
        with gated_delta_net_without_fla():  # fla's kernels are not called by Megatron's code here
            super().__init__(config, *args, pg_collection=with_one_cp_rank(pg_collection), **kwargs)  # type: ignore[call-arg]
        self.pg_collection = pg_collection
        if self.activation not in ("silu", "swish"):
            refuse("activation_func", self.activation, "silu", "The convolution's activation is silu.")
        if not self.use_qk_l2norm:
            refuse("use_qk_l2norm", False, "True", "Queries and keys are normalised.")
        self.ranks = cp_ranks(self.pg_collection.cp)
        self.set_slot(
            self.kind,
            self.title,
            heads=self.num_v_heads_local_tp,
            key_heads=self.num_key_heads // self.tp_size,
            head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            conv_width=self.conv_kernel_dim,
        )
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
        """Returns `[t, b, hidden]` and a bias for this rank's rows `[t, b, hidden]`; b is 1 for packed batches."""
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError(f"{self.title} has no inference through megatron_cp's layer")
        projected, _ = self.in_proj(hidden_states)
        rows, batch, _ = projected.shape
        plan = self.plan_of(rows, batch, packed_seq_params)
        # Sequences are put end to end, which is a view for a batch of one.
        flat = projected.transpose(0, 1).reshape(rows * batch, -1)
        qk, v = self.qk_dim_local_tp, self.v_dim_local_tp
        qkv, gate, *gates = flat.split([2 * qk + v, v, *self._gate_sizes()], dim=-1)
        out: Tensor = layer_operation(self.layer_number, type(self).operation)(
            qkv, *gates, plan, self.ranks_of(packed_seq_params), conv=self.conv1d.weight,
            conv_bias=self.conv1d.bias, A_log=self.A_log, dt_bias=self.dt_bias, kernel=self.kernel,
        )  # fmt: skip
        checkpoint = CheckpointWithoutOutput(fp8=None) if self.recompute_norm_out else None

        def gated_norm(out: Tensor, gate: Tensor) -> Tensor:
            normed = self._apply_gated_norm(out, gate.reshape(out.shape))
            return normed.view(batch, rows, -1).transpose(0, 1).contiguous()

        normed = checkpoint.checkpoint(gated_norm, out, gate) if checkpoint else gated_norm(out, gate)
        out, bias = self.out_proj(normed)
        if checkpoint:
            checkpoint.discard_output_and_register_recompute(out)
        return out, bias

    def _gate_sizes(self) -> list[int]:
        """Returns the features of each input of the operation behind the output gate, on this tensor-parallel rank."""
        raise NotImplementedError

    def _sum_norm_gradients_over_tp(self) -> None:
        """Sums the gradients of the norm's weight, which all heads share, over the tensor-parallel ranks.

        Megatron sums such gradients with sequence parallelism only; otherwise its ranks' weights diverge. Its
        `finalize_model_grads` averages marked gradients, so each rank's share is multiplied by the number of ranks.
        """
        for weight in self.out_norm.parameters():
            weight.average_gradients_across_tp_domain = True
            weight.register_hook(lambda gradient: gradient * self.tp_size)


class GatedDeltaNet(_DeltaNet, megatron_gdn.GatedDeltaNet):
    """Megatron's Gated DeltaNet with our context parallelism: see `_DeltaNet`."""

    kind, title, operation = "gdn", "Gated DeltaNet", gated_delta_net

    def _gate_sizes(self) -> list[int]:
        return [self.num_v_heads_local_tp] * 2


class _DeltaNet2(_DeltaNet):
    kind, title, operation = "gdn2", "Gated DeltaNet-2", gdn2_mixer

    def _gate_sizes(self) -> list[int]:
        return [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]


# Megatron-Core has had the layer since 0.20; None before.
GatedDeltaNet2: Any = None
if hasattr(megatron_gdn, "GatedDeltaNet2"):
    doc = "Megatron's Gated DeltaNet-2 with our context parallelism: see `_DeltaNet`."
    GatedDeltaNet2 = type("GatedDeltaNet2", (_DeltaNet2, megatron_gdn.GatedDeltaNet2), {"__doc__": doc})
