"""Refuses arguments of a model's call whose meaning changes when a rank has only some of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.transformers.batch import PlannedBatch

REFUSED = {
    "past_key_values": "Training has no cache. To generate: with parallel.disabled(): model.generate(...).",
    "cache_params": "Training has no cache. To generate: with parallel.disabled(): model.generate(...).",
    "use_cache": "Training has no cache. To generate: with parallel.disabled(): model.generate(...).",
    "output_attentions": "No scheme here has the weights of a softmax in one place.",
    "logits_to_keep": (
        "A rank would keep the last of its own rows. Leave it out: parallel.gather(out.logits, batch)[:, -n:]."
    ),
    "attn_temperature_tuning": "transformers counts rows for it, not positions, and a rank has other rows.",
    "output_router_logits": "The auxiliary loss is a product of means over all tokens, which no shard has. In TRL: "
    "router_aux_loss_coef=0.",
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
            "Without it each rank has the mean over its own labels. Pass num_items_in_batch=batch.num_items, and with "
            "other replicas or microbatches the sum of theirs: the loss of the step is the sum of the ranks' losses."
        )
        raise ArgumentError("num_items_in_batch", None, "the number of labels on all ranks", remedy)


def check_rows(inputs: Iterable[object], batch: PlannedBatch) -> None:
    """Refuses a call with other rows than the batch's, such as virtual tokens that a wrapper puts before them."""
    if torch.compiler.is_compiling():
        return  # attention refuses them too, though it names its own arguments
    rows = (1, int(batch.plans.layout.row_counts[batch.group.rank]))
    for given in inputs:
        if isinstance(given, Tensor) and given.shape[:2] != rows:
            name = "inputs_embeds" if given.is_floating_point() else "input_ids"
            remedy = (
                "A wrapper has added or dropped rows, as prompt tuning does before each rank's part of a row. Adapters "
                "that act on each token, such as LoRA, may be trained."
            )
            raise ArgumentError(name, list(given.shape), f"{list(rows)}, this rank's rows of the batch", remedy)
