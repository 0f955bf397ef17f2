"""Gated DeltaProduct's mixer for Megatron: Megatron's parameters and projections, our exchange and rule between them.

Megatron-Core has had the mixer since 0.20; `GatedDeltaProductMixer` is None before.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from megatron.core import ssm
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_cp.executor.trace import layer_operation
from megatron_cp.linear.gated_delta_product import gated_delta_product_mixer
from megatron_cp.megatron.layers.base import LinearModule
from megatron_cp.megatron.layers.communication import cp_ranks, with_one_cp_rank
from megatron_cp.megatron.layers.refusals import check_comm_type, refuse_unsupported, scheme_of_layer
from megatron_cp.megatron.patches import gated_delta_product_without_its_kernels
from megatron_cp.megatron.rules import unsupported_delta_product


class _DeltaProduct(LinearModule):
    """Megatron's Gated DeltaProduct mixer with our context parallelism.

    It has the same parameters, names and checkpoints. Between the projections it takes one collective before the rule
    and one after, without the gate, for any document lengths and any number of heads and groups. Training needs neither
    mamba_ssm nor causal_conv1d.

    Raises:
        ArgumentError: an option that is not supported exactly, by Megatron's flag, while the model is built.
    """

    if TYPE_CHECKING:  # the subclass has the attributes of Megatron's mixer

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self, config: Any, *args: Any, layer_number: int | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        refuse_unsupported(config)
        check_comm_type(config, scheme_of_layer(config, layer_number), "Gated DeltaProduct")
        for error in unsupported_delta_product(config):
            raise error
        with gated_delta_product_without_its_kernels():  # Megatron's kernels are not called here
            given = {"layer_number": layer_number, "pg_collection": with_one_cp_rank(pg_collection), **kwargs}
            super().__init__(config, *args, **given)  # type: ignore[call-arg]
        self.pg_collection = pg_collection
        self.ranks = cp_ranks(pg_collection.cp)
        self.set_slot(
            "gdp",
            "Gated DeltaProduct",
            heads=self.nheads_local_tp,
            key_heads=self.ngroups_local_tp,
            head_dim=self.d_state,
            value_head_dim=self.headdim,
            conv_width=self.d_conv,
            num_householder=self.num_householder,
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
            raise NotImplementedError("Gated DeltaProduct has no inference here: use Megatron's own layer")
        projected, _ = self.in_proj(hidden_states)
        rows, batch, _ = projected.shape
        plan = self.plan_of(rows, batch, packed_seq_params)
        # Sequences are put end to end, which is a view for a batch of one.
        flat = projected.transpose(0, 1).reshape(rows * batch, -1)
        inner, heads = self.d_inner_local_tp, self.nheads_local_tp
        gates = [self.num_householder * heads, heads]
        z, vkq, beta, alpha = flat.split([inner, flat.shape[1] - inner - sum(gates), *gates], dim=-1)
        out: Tensor = layer_operation(self.layer_number, gated_delta_product_mixer)(
            vkq, beta, alpha, plan, self.ranks_of(packed_seq_params), conv=self.conv1d.weight,
            conv_bias=self.conv1d.bias, A_log=self.A_log, dt_bias=self.dt_bias, kernel=self.kernel,
        ).flatten(1)  # fmt: skip
        normed = self.norm(out, z) if self.rmsnorm else out
        out, bias = self.out_proj(normed.view(batch, rows, -1).transpose(0, 1).contiguous())
        return out, bias


GatedDeltaProductMixer: Any = None
if importlib.util.find_spec(f"{ssm.__name__}.gated_delta_product"):
    from megatron.core.ssm import gated_delta_product

    GatedDeltaProductMixer = type(
        "GatedDeltaProductMixer",
        (_DeltaProduct, gated_delta_product.GatedDeltaProductMixer),
        {"__doc__": _DeltaProduct.__doc__},
    )
