"""Accepts the heads of transformers' models that a rank can compute from its own rows, and refuses others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto import modeling_auto as auto

from megatron_cp.errors import ArgumentError
from megatron_cp.transformers.sources import passes, passes_others, refers_to

_OWN_LOSS = (
    "Leave labels out of the batch, and compute the loss from the logits of model(**batch): shard distributes a "
    "tensor of another name too, such as [1, total] of what each token is to predict."
)


def check_head(model: PreTrainedModel) -> None:
    """Refuses a head that reads other rows than a token's own.

    Accepts the classes that transformers lists as causal language models or as models without a head. A class that it
    does not list is accepted if it passes logits of its output embeddings to transformers' causal loss, or returns
    hidden states only.
    """
    if _is_listed(model, _LANGUAGE_MODELS if has_head(model) else _BASE_MODELS):
        return
    if has_head(model):
        is_known = calls_loss_function(model) and LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss) is ForCausalLMLoss
    else:
        returns_states = bool(passes(inspect.unwrap(type(model).forward), "last_hidden_state"))
        is_known = returns_states and "labels" not in inspect.signature(model.forward).parameters
    if not is_known:
        remedy = (
            "Other heads use rows that only one rank has. Enable the model below the head, model.base_model, and "
            "compute the head from all rows: parallel.gather(model.base_model(**batch).last_hidden_state, batch). "
            "Divide its loss by parallel.cp_size."
        )
        raise ArgumentError(
            "model", type(model).__name__, "a causal language model of transformers, or a model without a head", remedy
        )


def check_loss(model: PreTrainedModel, *, shifts: bool) -> None:
    """Refuses labels for a model whose loss would shift them itself, across the edges of a rank's rows.

    If the batch's labels are not shifted yet, `shifts`, the loss must be transformers' own.
    """
    loss: Any = getattr(model.loss_function, "function", model.loss_function)
    own = has_head(model) and not (calls_loss_function(model) and _gives_shifted_labels(model))
    if own or (shifts and loss is not ForCausalLMLoss):
        given = f"a loss in {type(model).__name__}.forward" if own else getattr(loss, "__name__", type(loss).__name__)
        raise ArgumentError(
            "model.loss_function", given, "transformers' ForCausalLMLoss, which takes shift_labels", _OWN_LOSS
        )


def has_head(model: PreTrainedModel) -> bool:
    """True if the model has output embeddings, or computes a loss from those of its text model (Nemotron's Omni)."""
    if model.get_output_embeddings() is not None:
        return True
    return _is_listed(model, _LANGUAGE_MODELS) and calls_loss_function(model)


def calls_loss_function(model: nn.Module) -> bool:
    """True if the forward leaves the loss to `model.loss_function`."""
    return refers_to(inspect.unwrap(type(model).forward), "loss_function")


def _gives_shifted_labels(model: nn.Module) -> bool:
    """False if the forward keeps `shift_labels` from the loss, as vision models of transformers 5.5 do."""
    return passes_others(inspect.unwrap(type(model).forward), "loss_function") is not False


def _is_listed(model: nn.Module, names: frozenset[str]) -> bool:
    """True if the forward is that of a class of transformers with one of the names."""
    kinds = type(model).__mro__
    owner = next(place for place, kind in enumerate(kinds) if "forward" in vars(kind))
    return any(kind.__name__ in names and kind.__module__.startswith("transformers.") for kind in kinds[: owner + 1])


def _names(*mappings: dict[str, Any]) -> frozenset[str]:
    values: Iterable[Any] = (value for mapping in mappings for value in mapping.values())
    return frozenset(name for value in values for name in ((value,) if isinstance(value, str) else value))


_LANGUAGE_MODELS = _names(
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
_BASE_MODELS = _names(auto.MODEL_MAPPING_NAMES)
