"""Turns rows of documents into one row: rows that a collator has padded, or the packed rows of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.transformers.documents import DOCUMENT_KEYS, check_on_host, on_host
from megatron_cp.transformers.image_items import IMAGE_KEYS


def flatten_rows(batch: Mapping[str, Any], *, padded_left: bool = False) -> tuple[Mapping[str, Any], Tensor | None]:
    """Puts the rows of a padded batch end to end without their padding.

    Each row becomes one document, or those that its `attention_mask` numbers (1 1 2 2 2 0).

    Args:
        batch: tensors `[rows, width, ...]`, padded on the right where `attention_mask` is 0. Tensors of images stay as
            they are, whatever their sizes.
        padded_left: True if rows may be padded on the left too.

    Returns:
        A batch of one row with its `lengths`, and bools `[rows, width]` that are True where a token was kept. A batch
        of one row without padding, or one that describes its documents, is returned unchanged, with None.

    Raises:
        ArgumentError: padding elsewhere than on the right, labels in the padding, or several documents in a row.
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or any(batch.get(name) is not None for name in DOCUMENT_KEYS):
        return batch, None
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        return batch, None  # sharding refuses it
    for name in ("input_ids", "attention_mask", "labels", "shift_labels"):
        check_on_host(name, batch.get(name))
    numbers = (torch.ones_like(ids) if mask is None else mask).double()  # of documents, where others than 0 and 1
    kept = numbers != 0
    if len(ids) == 1 and kept.all():
        return batch, None
    begins = kept.clone()
    begins[:, 1:] &= numbers[:, 1:] != numbers[:, :-1]
    _check_rows(batch, numbers, begins, padded_left)
    flat = {
        name: value if name in IMAGE_KEYS else _flattened(value, kept)
        for name, value in batch.items() if name != "attention_mask"
    }  # fmt: skip
    edges = torch.cat([begins[kept].nonzero()[:, 0], kept.sum()[None]])
    return {**flat, "lengths": edges.diff()}, kept


def join_documents(rows: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Puts the rows of a data set end to end without their padding, as a collator of packed rows does.

    Args:
        rows: `input_ids` and `labels`, integers, and perhaps `attention_mask`, which is 0 in padding. A row is one
            document, unless its `attention_mask` numbers several or its `position_ids` begin again at 0.

    Returns:
        `input_ids` and `labels` `[1, total]`, and the `lengths` of the documents.
    """
    ids, labels, lengths = [], [], []
    for row in rows:
        mask = np.asarray(row.get("attention_mask", np.ones(len(row["input_ids"]))))
        kept = mask != 0
        begins = np.diff(mask[kept], prepend=0) != 0
        if (positions := row.get("position_ids")) is not None:
            counted = np.asarray(positions)[kept]
            begins |= counted == 0
            starts = np.flatnonzero(begins)
            if (counted != np.arange(len(counted)) - starts[np.cumsum(begins) - 1]).any():
                raise ArgumentError("position_ids", positions, "positions that count up from 0 in every document")
        lengths += np.diff(np.append(np.flatnonzero(begins), kept.sum())).tolist()
        ids.append(on_host("input_ids", row["input_ids"])[kept])
        labels.append(on_host("labels", row["labels"])[kept])
    joined = {"input_ids": np.concatenate(ids)[None], "labels": np.concatenate(labels)[None]}
    return {name: torch.from_numpy(value) for name, value in joined.items()} | {"lengths": torch.tensor(lengths)}


def restore_rows(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Undoes `flatten_rows`: returns `[rows, width, ...]` from `[1, total, ...]`, with zeros in the padding."""
    if kept is None:
        return rows
    restored = rows.new_zeros((*kept.shape, *rows.shape[2:]))
    restored[kept.to(rows.device)] = rows[0]
    return restored


def _flattened(value: Any, kept: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape[:2] == kept.shape:
        return value[kept][None]
    # Positions of several axes are [axes, rows, width]. Sharding refuses other tensors without an item for each token.
    return value[:, kept][:, None] if value.ndim == 3 and value.shape[1:] == kept.shape else value


def _check_rows(batch: Mapping[str, Any], numbers: Tensor, begins: Tensor, padded_left: bool) -> None:
    kept = numbers != 0
    after_pad = ~kept[:, :-1] & kept[:, 1:]
    if (after_pad.sum(1) + kept[:, 0] > 1).any() if padded_left else after_pad.any():
        remedy = 'Pad on the right: tokenizer.padding_side = "right".'
        raise ArgumentError("attention_mask", "zeros before ones", "ones, then zeros, in every row", remedy)
    if ((numbers.diff() < 0) & kept[:, 1:]).any():
        raise ArgumentError("attention_mask", "numbers that fall", "the numbers of a row's documents: 1 1 2 2 2 0")
    for name in ("labels", "shift_labels"):
        labels = batch.get(name)
        if isinstance(labels, Tensor) and labels.shape == kept.shape and (labels[~kept] != IGNORE_INDEX).any():
            raise ArgumentError(name, "a label where attention_mask is 0", f"{IGNORE_INDEX} in the padding")
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != kept.shape:
        return
    inside = (kept & ~begins)[:, 1:]
    if (positions.diff()[inside] != 1).any():
        remedy = "Documents that are packed into rows are put into one row: padding_free=True in TRL does."
        raise ArgumentError("position_ids", "several documents in a row", "positions that count up along it", remedy)
