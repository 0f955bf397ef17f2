"""Mixtures of experts over ranks with different numbers of tokens: routers that count all tokens, but no pads."""

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

from megatron_cp.megatron.packed_seq_params import PlannedSeqParams
from megatron_cp.megatron.rules import refuse


class TopKRouter(megatron_router.TopKRouter):
    """Megatron's router with the auxiliary losses of one rank, for any numbers of tokens on the ranks.

    Megatron assumes that every rank of the tensor- and context-parallel group has as many tokens as this one. Here the
    tokens are counted, by one reduction of a number in each layer. Pad rows are in no loss and no count.
    """

    _tokens: Tensor | None = None  # number of tokens on all ranks, over which the losses of this call are means

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None, **others: Any) -> Any:
        """Calls Megatron's with a mask, with which it counts the tokens of experts and not the rows."""
        if self.tp_cp_group.size() > 1:
            if padding_mask is None:
                padding_mask = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
            if self.training and torch.is_grad_enabled() and self.has_losses():
                self._tokens = (~padding_mask).sum().to(torch.float32)
                dist.all_reduce(self._tokens, group=self.tp_cp_group)
        return super().routing(logits, padding_mask, **others)

    def has_losses(self) -> bool:
        """True if there is a loss beside the model's own."""
        return self.config.moe_z_loss_coeff is not None or self.is_aux_loss_enabled()

    def attach_and_log_load_balancing_loss(self, *args: Any, **named: Any) -> Tensor:
        """Calls Megatron's, which multiplies by the count and by the ranks, with the mean count of the ranks."""
        size = self.tp_cp_group.size()
        if size > 1:
            assert self._tokens is not None
            # Megatron passes the number of this rank's tokens without a mask, and that of all ranks with one.
            named["valid_token_count"] = self._tokens / size
        attached: Tensor = super().attach_and_log_load_balancing_loss(*args, **named)
        return attached

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Applies the z-loss as a mean over the tokens of all ranks, where Megatron takes the mean of ranks' means."""
        size, config = self.tp_cp_group.size(), self.config
        if size == 1 or not self.training or not torch.is_grad_enabled() or config.moe_z_loss_coeff is None:
            masked: Tensor = super().apply_z_loss(logits, padding_mask)
            return masked
        assert self._tokens is not None
        squares = logits.logsumexp(-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0)
        count = self._tokens.to(squares.dtype).clamp(min=1)
        share = squares.sum() / count  # the shares of all ranks add up to the mean
        depths = config.mtp_num_layers or 0
        repeats = depths if self.is_mtp_layer and config.mtp_use_repeated_layer else 1
        get_moe_metrics_tracker().record(
            "z_loss", share.detach() * (size / repeats), self.layer_number + config.num_layers * self.is_mtp_layer,
            config.num_layers + depths, avg_group=self.tp_dp_cp_group,
        )  # fmt: skip
        weight = count if self.calculate_per_token_loss else 1.0  # Megatron divides gradients by it later
        attached: Tensor = MoEAuxLossAutoScaler.apply(logits, share * config.moe_z_loss_coeff * weight)
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if padding_mask is not None:
            # Megatron's code would apply a token's mask to an expert.
            routing_map, padding_mask = routing_map & ~padding_mask[:, None], None
        super()._apply_expert_bias(routing_map, padding_mask)


def replace_router(mlp: Any) -> Any:
    """Returns the builder of a layer's MLP, with our router if it builds Megatron's layer of experts."""
    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return mlp
    submodules = copy.copy(mlp.keywords["submodules"])
    if submodules.router is megatron_router.TopKRouter:
        submodules.router = TopKRouter
    return partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": submodules})


def mask_pads(layer_class: type) -> type:
    """Returns a class of transformer layers that passes a mask of pad rows to their experts."""

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
                padding_mask = _pads(packed_seq_params, self, hidden_states)
        return layer_class._forward_mlp(  # type: ignore[attr-defined]
            self, hidden_states, inference_context, padding_mask=padding_mask, packed_seq_params=packed_seq_params,
            **others,
        )  # fmt: skip

    return type(layer_class.__name__, (layer_class,), {"_forward_mlp": _forward_mlp, "__doc__": layer_class.__doc__})


def _pads(params: PlannedSeqParams, layer: Any, hidden_states: Tensor) -> Tensor | None:
    """Returns bools `[1, rows]`, True for pad rows among the layer's own; None if no rank has any."""
    layout, rows = params.layout, hidden_states.shape[0]
    rank = layer.pg_collection.cp.rank() if params.ranks is None else params.ranks.rank
    if not layout.pad_rows.any():
        return None
    held, device = int(layout.token_counts[rank]), hidden_states.device
    first = layer.pg_collection.tp.rank() * rows if layer.config.sequence_parallel else 0
    return params.remember(
        ("pads", layout, first, rows), lambda: (torch.arange(first, first + rows, device=device) >= held)[None]
    )
