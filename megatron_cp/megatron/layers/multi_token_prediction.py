"""Multi-token prediction over ranks: the tokens ahead of a token come from the batch, on whichever rank they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction as megatron_mtp
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.megatron.layers.redistribution import arrange_runs
from megatron_cp.megatron.logits import ChunkedLogits
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams
from megatron_cp.megatron.patches import exchange_multi_token_prediction, exchange_search_for_inference_layers

_REMEDY = "Shard the batch with megatron_cp.megatron.batch.shard_batch, which knows the whole batch."


class MultiTokenPredictionLayer(megatron_mtp.MultiTokenPredictionLayer):
    """Megatron's layer of one depth, with the tokens ahead from the batch that `shard_batch` made.

    It takes no communication, never reads tokens of another document, and supports any layout.

    Raises:
        ArgumentError: in `forward`, on several ranks, for a batch that `shard_batch` did not make.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        exchange_multi_token_prediction(process_mtp_loss, roll_tensor_checked)
        exchange_search_for_inference_layers()
        super().__init__(*args, **kwargs)
        inner = self.mtp_model_layer  # one layer, or a stack of HybridModel's
        arrange_runs(getattr(inner, "layers", [inner]), self.config)

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
        **others: Any,
    ) -> Any:
        if not _has_stream(packed_seq_params, self.cp_group):
            return super()._get_embeddings(
                input_ids, position_ids, embedding, hidden_states, packed_seq_params, padding_mask, **others
            )
        ahead = packed_seq_params.ahead(_depth(input_ids, packed_seq_params, self.config.mtp_num_layers) + 1)
        decoder_input = embedding(input_ids=ahead.tokens, position_ids=ahead.position_ids)
        if self.config.mtp_detach_heads:
            decoder_input = decoder_input.detach()
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        hidden_states.requires_grad_(True)  # recomputation needs one input that requires gradients
        return ahead.tokens, ahead.position_ids, padding_mask, decoder_input, hidden_states


def _has_stream(params: Any, cp_group: Any) -> bool:
    """True if the batch has the tokens ahead."""
    if isinstance(params, PlannedSeqParams) and params.stream is not None:
        return True
    if cp_group is not None and cp_group.size() > 1:
        raise ArgumentError("packed_seq_params", "a batch of Megatron's own", "one of shard_batch's", _REMEDY)
    return False


def _depth(input_ids: Tensor, params: PlannedSeqParams, deepest: int) -> int:
    """Returns how many places ahead `input_ids` are: 0 for the batch's own, more for those that a layer returned."""
    known = (places for places in range(1, deepest) if params.has_rows_ahead(places))
    return next((places for places in known if params.ahead(places).tokens.data_ptr() == input_ids.data_ptr()), 0)


def process_mtp_loss(
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Any,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: Any = None,
    tp_group: Any = None,
    packed_seq_params: Any = None,
    scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
    input_ids: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Returns the decoder's hidden states, to whose gradient the losses of all depths are attached.

    It replaces Megatron's function, and calls it for other batches. For batches of `shard_batch` the labels and weights
    are the batch's, and the arguments of the model are ignored. A depth's loss is divided by the weight of its labels
    on all ranks of the group, so that it is the mean of one rank.

    Args:
        hidden_states: `[(1 + depths) * t, 1, h]`, the decoder's hidden states and then those of each depth.
    """
    if not _has_stream(packed_seq_params, cp_group):
        return _megatron_loss(
            hidden_states, labels, loss_mask, output_layer, output_weight, runtime_gather_output, is_training,
            compute_language_model_loss, config, cp_group, tp_group, packed_seq_params, scale_logits_fn, input_ids,
            **others,
        )  # fmt: skip
    depths = config.mtp_num_layers
    hidden_states, *predicted = hidden_states.chunk(1 + depths)
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
    whole = packed_seq_params.ahead(0).total_weight
    cp_size = packed_seq_params.stream.layout.cp_size
    for depth, states in enumerate(predicted):
        logits, _ = output_layer(states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        logits = logits if scale_logits_fn is None else scale_logits_fn(logits)
        ahead = packed_seq_params.ahead(depth + 1)
        losses = ahead.loss_weights * compute_language_model_loss(ahead.labels, logits)
        count = max(ahead.total_weight, 1.0)
        if is_training:
            accepted = partial(
                megatron_mtp._compute_mtp_acceptance_counts, output_layer=output_layer,
                runtime_gather_output=runtime_gather_output, tp_group=tp_group,
            )  # fmt: skip
            given = ahead.labels, ahead.loss_weights
            guessed = logits.counts(accepted, *given) if isinstance(logits, ChunkedLogits) else accepted(logits, *given)
            _log(losses.sum() * (cp_size / count), guessed, depth, depths)
        # Megatron later divides the sum of all gradients by the batch's tokens, or takes the mean over the ranks.
        share = whole / count if config.calculate_per_token_loss else cp_size / count
        scale = config.mtp_loss_scaling_factor / depths * share
        hidden_states = megatron_mtp.MTPLossAutoScaler.apply(hidden_states, losses * scale)
    return hidden_states


def _log(loss: Tensor, guessed: tuple[Tensor, Tensor], depth: int, depths: int) -> None:
    """Logs a depth's loss, which Megatron averages over the ranks, and the counts of right guesses and of labels."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    megatron_mtp.MTPLossLoggingHelper.save_metrics_to_tracker(loss, *guessed, depth, depths, avg_group=group)


def roll_tensor_checked(
    tensors: Any, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None, **others: Any
) -> Any:
    """Calls Megatron's `roll_tensor`, which on several ranks supports its own order of tokens only."""
    plans = packed_seq_params.plans if isinstance(packed_seq_params, PlannedSeqParams) else None
    if plans is not None and plans.layout.cp_size > 1:
        remedy = "Build the layers by megatron_cp.megatron.specs.gpt_mtp_block_spec."
        raise ArgumentError("mtp_block_spec", "layers of Megatron's own", "layers of ours under a plan", remedy)
    return _megatron_roll(tensors, shifts, dims, cp_group, packed_seq_params, **others)


_megatron_loss: Callable[..., Tensor] = megatron_mtp.process_mtp_loss
_megatron_roll: Callable[..., Any] = megatron_mtp.roll_tensor
