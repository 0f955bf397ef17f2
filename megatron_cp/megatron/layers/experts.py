"""Mixtures of experts over ranks that hold different numbers of tokens: routers that count all of them, and no pads."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_cp.megatron.layers.refusals import refuse
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams


class TopKRouter(megatron_router.TopKRouter):
    """Megatron's router, whose auxiliary losses are those of one rank, however many tokens each rank has.

    Megatron takes the number of its own tokens for that of every rank of the tensor- and context-parallel group. Here
    these are counted, which is one number to sum up for a layer; pad rows have no part in any loss or count.
    """

    _tokens: Tensor | None = None  # of all ranks, which the losses of this call are means over

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """As Megatron's; with a mask, which has Megatron count the tokens that experts got, and not its rows."""
        if self.tp_cp_group.size() > 1:
            if padding_mask is None:
                padding_mask = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
            if self.training and torch.is_grad_enabled() and self.has_losses():
                self._tokens = (~padding_mask).sum().to(torch.float32)
                dist.all_reduce(self._tokens, group=self.tp_cp_group)
        return super().routing(logits, padding_mask)

    def has_losses(self) -> bool:
        """Whether anything is trained beside the model's own loss."""
        return self.config.moe_z_loss_coeff is not None or self.is_aux_loss_enabled()

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, reduce_group: Any,
        needs_dp_avg: bool = True, valid_token_count: Any = None,
    ) -> Tensor:  # fmt: skip
        """As Megatron's, which multiplies by this number and the ranks: their product is the tokens of all ranks."""
        size = self.tp_cp_group.size()
        if size > 1:
            assert self._tokens is not None
            # What Megatron passes here is its own tokens without a mask, and with one those of all ranks.
            valid_token_count = self._tokens / size
        attached: Tensor = super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, needs_dp_avg, valid_token_count
        )
        return attached

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """As Megatron's: a mean over the tokens of all ranks, and not of the ranks' means."""
        size, config = self.tp_cp_group.size(), self.config
        if size == 1 or not self.training or not torch.is_grad_enabled() or config.moe_z_loss_coeff is None:
            masked: Tensor = super().apply_z_loss(logits, padding_mask)
            return masked
        assert self._tokens is not None
        squares = logits.logsumexp(-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0)
        count = self._tokens.to(squares.dtype).clamp(min=1)
        share = squares.sum() / count  # these add up to the mean
        depths = config.mtp_num_layers or 0
        repeats = depths if self.is_mtp_layer and config.mtp_use_repeated_layer else 1
        get_moe_metrics_tracker().record(
            "z_loss", share.detach() * (size / repeats), self.layer_number + config.num_layers * self.is_mtp_layer,
            config.num_layers + depths, avg_group=self.tp_dp_cp_group,
        )  # fmt: skip
        weight = count if self.calculate_per_token_loss else 1.0  # what Megatron divides gradients by, later
        attached: Tensor = MoEAuxLossAutoScaler.apply(logits, share * config.moe_z_loss_coeff * weight)
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if padding_mask is not None:
            # Megatron's would set a token's mask against an expert.
            routing_map, padding_mask = routing_map & ~padding_mask[:, None], None
        super()._apply_expert_bias(routing_map, padding_mask)


def with_our_router(mlp: Any) -> Any:
    """What builds a layer's MLP, with our router where that is Megatron's layer of experts."""
    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return mlp
    submodules = copy.copy(mlp.keywords["submodules"])
    if submodules.router is megatron_router.TopKRouter:
        submodules.router = TopKRouter
    return partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": submodules})


def without_pads(layer_class: type) -> type:
    """A class of transformer layers that tells its experts which rows of a planned batch are pads."""

    def _forward_mlp(
        self: Any, hidden_states: Tensor, inference_context: Any = None, padding_mask: Any = None,
        packed_seq_params: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        if isinstance(packed_seq_params, PlannedSeqParams) and self.is_moe_layer:
            router = self.mlp.router
            if packed_seq_params.ranks is not None and self.training and router.has_losses():
                remedy = "They are means over the tokens of the model's own group."
                refuse("moe_aux_loss_coeff", "an auxiliary loss", "none with groups for each batch", remedy)
            if padding_mask is None:
                padding_mask = _pads(packed_seq_params, self, hidden_states.shape[0])
        return layer_class._forward_mlp(  # type: ignore[attr-defined]
            self, hidden_states, inference_context, padding_mask=padding_mask, packed_seq_params=packed_seq_params,
            **others,
        )  # fmt: skip

    return type(layer_class.__name__, (layer_class,), {"_forward_mlp": _forward_mlp, "__doc__": layer_class.__doc__})


def _pads(params: PlannedSeqParams, layer: Any, rows: int) -> Tensor | None:
    """`[1, rows]`: which of this rank's rows are no token; None where no rank has such rows."""
    assert params.plans is not None
    assert params.positions is not None
    layout = params.plans.layout
    rank = layer.pg_collection.cp.rank() if params.ranks is None else params.ranks.rank
    if not layout.pad_rows.any():
        return None
    held, device = int(layout.token_counts[rank]), params.positions.device
    first = layer.pg_collection.tp.rank() * rows if layer.config.sequence_parallel else 0
    return params.remember(
        ("pads", first, rows), lambda: (torch.arange(first, first + rows, device=device) >= held)[None]
    )
