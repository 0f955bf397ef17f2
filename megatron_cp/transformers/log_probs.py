"""Per-token log-probabilities under context parallelism, for reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.batch.branched import LabelRows
from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.transformers.batch import ShardedBatch
from megatron_cp.transformers.logits import ChunkedLogits


def token_log_probs(
    logits: Tensor | ChunkedLogits, batch: ShardedBatch, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Returns the log-probability of each label, in at least fp32; differentiable.

    A rank computes those of its own rows, exactly as one rank does. `parallel.gather(token_log_probs(...), batch)`
    returns them for the whole batch, in the order of its tokens; where documents branch with `are_labels=True`.

    Args:
        logits: this rank's logits, `[1, t, vocabulary]`, as the model returns them.
        batch: the batch, with labels, that the model was called with.
        temperature: the logits are divided by it: a positive number, or one for each row, `[1, t]`, as `shard` deals
            them from `[1, tokens]`.

    Returns:
        `[1, t]`: for each token the log-probability of the token that it predicts; 0 where there is no label. `[1, p]`
        where documents branch: that of each label, in the order of `batch.label_rows`, which
        `parallel.gather(..., are_labels=True)` returns for every token at its own place.
    """
    of_labels = batch.label_rows
    labels = batch.get("shift_labels") if of_labels is None else batch["cp_batch"].labels
    if labels is None:
        raise ArgumentError("batch", "no labels", "a batch that was sharded with labels or shift_labels")
    rows = (1, int(batch.layout.row_counts[batch["cp_batch"].group.rank]))
    if logits.shape[:-1] != rows:
        raise ArgumentError("logits", list(logits.shape), f"{[*rows, 'vocabulary']}")
    is_label = labels != IGNORE_INDEX
    if isinstance(logits, ChunkedLogits):
        return _of_chunks(logits, labels.flatten(), of_labels, _checked_temperature(temperature, rows))
    wide = logits.to(accumulation_dtype(logits.dtype)) / _checked_temperature(temperature, rows)
    chosen, normaliser = labels.where(is_label, 0), wide.logsumexp(-1)
    if of_labels is not None:
        picked = wide[0, of_labels.rows, chosen] - normaliser[0, of_labels.rows]
        return torch.where(is_label, picked, 0.0)[None]
    return torch.where(is_label, wide.gather(-1, chosen[..., None])[..., 0] - normaliser, 0.0)


def _of_chunks(
    logits: ChunkedLogits, labels: Tensor, of_labels: LabelRows | None, temperature: float | Tensor
) -> Tensor:
    """Returns `[1, p]` the log-probability of each label, computed from the logits of a few rows at a time."""
    scales = [temperature[0]] if isinstance(temperature, Tensor) and temperature.ndim else []
    if of_labels is not None:
        logits, scales = logits.at(of_labels.rows), [each[of_labels.rows] for each in scales]

    def of_chunk(chunk: Tensor, labels: Tensor, *scales: Tensor) -> Tensor:
        wide, is_label = chunk.to(accumulation_dtype(chunk.dtype)), labels != IGNORE_INDEX
        wide = wide / (scales[0] if scales else temperature)
        chosen = wide.gather(-1, labels.where(is_label, 0)[:, None])[:, 0]
        return torch.where(is_label, chosen - wide.logsumexp(-1), 0.0)

    return logits.rows_of(of_chunk, labels, *scales)


def _checked_temperature(temperature: float | Tensor, rows: Sequence[int]) -> float | Tensor:
    """Returns the temperature as what logits `[1, t, vocabulary]` are divided by, after checking it."""
    if not isinstance(temperature, Tensor):
        if not 0 < as_number(temperature) < float("inf"):
            raise ArgumentError("temperature", temperature, _TEMPERATURES.format(list(rows)))
        return temperature
    of_rows = list(temperature.shape) == list(rows)
    if not (of_rows or temperature.ndim == 0) or not bool(((temperature > 0) & temperature.isfinite()).all()):
        given = f"{temperature.dtype} {list(temperature.shape)} from {temperature.min()}"[:200]
        raise ArgumentError("temperature", given, _TEMPERATURES.format(list(rows)))
    return temperature[..., None] if of_rows else temperature


_TEMPERATURES = "a positive number, or one for each of this rank's rows, {}"
