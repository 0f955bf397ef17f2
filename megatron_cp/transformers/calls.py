"""Checks a model's calls with a rank's rows: arguments whose meaning changes, and layers that do not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.transformers.additions import TokenLoss
from megatron_cp.transformers.attention import planned_batch
from megatron_cp.transformers.batch import PlannedBatch, RankTokens
from megatron_cp.transformers.images import place_images

LAYERS = "cp_layers"  # an attribute of models whose layers run over the ranks
_RAN_NOT = (
    'If another attention was set, model.set_attn_implementation("megatron_cp") sets this one again, or '
    '{"text_config": "megatron_cp"} in a model with images, whose tower keeps its own. If layers were replaced, or '
    "have a forward of their own now, enable the model after that."
)

REFUSED = {
    "past_key_values": "Training has no cache. To generate: with parallel.disabled(): model.generate(...).",
    "cache_params": "Training has no cache. To generate: with parallel.disabled(): model.generate(...).",
    "use_cache": "Training has no cache. To generate: with parallel.disabled(): model.generate(...).",
    "output_attentions": "No scheme has all weights of a softmax in one place.",
    "logits_to_keep": (
        "A rank would keep the last of its own rows. Use parallel.gather(out.logits, batch)[:, -n:] instead."
    ),
    "attn_temperature_tuning": "For it, transformers counts rows, not positions, and a rank has only some rows.",
    "output_router_logits": (
        "The auxiliary loss is a product of means over all tokens, which no rank knows. In TRL: router_aux_loss_coef=0."
    ),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of a batch, or of a call, that training over ranks does not support."""
    for name, remedy in REFUSED.items():
        value = given.get(name)
        if isinstance(value, Tensor) or value:
            shown = value if isinstance(value, bool | int) else type(value).__name__
            raise ArgumentError(name, shown, "None", remedy)


def check_call(given: Mapping[str, Any], num_ranks: int, *, has_loss: bool) -> None:
    """Checks the keyword arguments that a model is called with together with a batch of `ContextParallel.shard`.

    Raises:
        ArgumentError: labels without shifted labels, or without the number of labels on all ranks; and the errors of
            `check_arguments`.
    """
    check_arguments(given)
    if not has_loss or given.get("labels") is None:
        return
    if given.get("shift_labels") is None:
        remedy = "Give labels of the whole batch to ContextParallel.shard, which shifts them within documents."
        raise ArgumentError("labels", "labels without shift_labels", "both, as in shard's batch", remedy)
    if num_ranks > 1 and given.get("num_items_in_batch") is None:
        remedy = (
            "Without it each rank would compute the mean over its own labels. Pass "
            "num_items_in_batch=batch.num_items, or with other replicas or microbatches the sum of all: the loss "
            "of the step is the sum of the ranks' losses."
        )
        raise ArgumentError("num_items_in_batch", None, "the number of labels on all ranks", remedy)


def check_rows(inputs: Iterable[object], batch: PlannedBatch) -> None:
    """Refuses a call with other rows than the batch's, such as virtual tokens that a wrapper puts before them."""
    rows = (1, int(batch.plans.layout.row_counts[batch.group.rank]))
    for given in inputs:
        if isinstance(given, Tensor) and given.shape[:2] != rows:
            name = "inputs_embeds" if given.is_floating_point() else "input_ids"
            remedy = (
                "A wrapper has added or dropped rows, as prompt tuning does before each rank's part of a row. Adapters "
                "that act on each token, such as LoRA, may be trained."
            )
            raise ArgumentError(name, list(given.shape), f"{list(rows)}, this rank's rows of the batch", remedy)


@dataclass(frozen=True)
class Layers:
    """The layers of a model that run over the ranks.

    Attributes:
        modules: by name.
        has_loss: True if the model computes a loss from labels, None for a model inside the enabled one.
    """

    modules: dict[str, nn.Module]
    has_loss: bool | None = None


def run_checked(model: Any, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Runs a model's forward. Checks that it is called with a rank's rows, that all its layers run over the ranks, and
    that its loss is that of its tokens.

    Raises:
        ArgumentError: layers that did not run; a call without a batch of `ContextParallel.shard`; a term that was added
            to the loss; and the errors of `check_call` and `check_rows`.
    """
    layers = vars(model).get(LAYERS)
    if layers is None:  # disabled
        return forward(*args, **given)
    before, args, given = _enter(layers, args, given)
    kept = vars(model).get("_loss_function")
    if isinstance(kept, TokenLoss):
        kept.loss = None  # of a call by hand, or of a forward that failed
    batch = given["cp_batch"]
    placed = place_images(model, batch.tower_rows, batch.group) if batch.tower_rows else ()
    try:
        found = forward(*args, **given)
    finally:
        for method in placed:
            del vars(model)[method]
    _leave(layers, batch, before)
    if isinstance(kept, TokenLoss) and kept.loss is not None:
        kept.check(found, type(model).__name__)
    return found


@no_compile
def _enter(
    layers: Layers, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[list[int], tuple[Any, ...], dict[str, Any]]:
    batch = planned_batch(given.get("cp_batch"))
    if layers.has_loss is not None:
        # TRL's trainers compute their loss from the log-probabilities that the model returns for this argument.
        has_loss = layers.has_loss and not given.get("fused_lm_head")
        check_call(given, batch.group.size, has_loss=has_loss)
        check_rows((*args, given.get("input_ids"), given.get("inputs_embeds")), batch)
    own = {name: RankTokens.plain(value) for name, value in given.items()}
    return batch.runs.so_far(layers.modules), tuple(map(RankTokens.plain, args)), own


@no_compile
def _leave(layers: Layers, batch: PlannedBatch, before: list[int]) -> None:
    batch.runs.check(layers.modules, before, _RAN_NOT)
