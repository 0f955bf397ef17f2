"""Reads the document lengths of a Hugging Face batch, whose documents are one row of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Packing
from megatron_cp.layout.packing import IntArray, check_signed, offsets_remedy

# Keys by which collators describe documents. They are not passed to the model.
DOCUMENT_KEYS = (
    "lengths", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_lengths", "seq_idx",
)  # fmt: skip
_HOST = torch.device("cpu")
_ON_HOST = "Shard the batch before it is moved, or move it back once: .cpu(). Reading it here would stop the device."
_FLATTEN = (
    "Put the documents of a batch end to end into one row, without padding: DataCollatorWithFlattening does, and TRL's "
    "packing."
)


def packing_of(batch: Mapping[str, Any]) -> Packing:
    """Returns the documents' lengths, from `lengths`, `cu_seq_lens_q`, or `position_ids` that begin again at 0.

    A batch without any of them is one document. `lengths` may be a packing, which may branch.

    Raises:
        ArgumentError: several rows, padding, lengths that are on a device or do not sum to the number of tokens, or
            positions that do not show where documents begin.
    """
    total = _checked_row(batch)
    _check_padding(batch)
    if (lengths := batch.get("lengths", batch.get("seq_lengths"))) is not None:
        name = "lengths" if batch.get("lengths") is not None else "seq_lengths"
        packing = lengths if isinstance(lengths, Packing) else Packing(on_host(name, lengths).reshape(-1).tolist())
    elif (ends := batch.get("cu_seq_lens_q")) is not None:
        name, packing = "cu_seq_lens_q", Packing.from_cu_seqlens(on_host("cu_seq_lens_q", ends).reshape(-1))
    elif (positions := batch.get("position_ids")) is not None:
        name, packing = "position_ids", Packing(_lengths_of(on_host("position_ids", positions)))
    else:
        return Packing([total])
    if packing.total != total:
        remedy = "They look like cu_seqlens: name them cu_seq_lens_q." if offsets_remedy(packing, total) else ""
        raise ArgumentError(name, f"documents of {packing.total} tokens", f"the {total} tokens of input_ids", remedy)
    return packing


def check_on_host(name: str, values: object) -> None:
    """Refuses a tensor on a device, since reading it would wait for all work that is queued there."""
    if isinstance(values, Tensor) and values.device != _HOST:
        raise ArgumentError(name, f"a tensor on {values.device}", "a tensor on the host", _ON_HOST)


def on_host(name: str, values: object) -> IntArray:
    """Returns integers on the host as an array."""
    check_on_host(name, values)
    try:
        found = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError):
        found = np.empty(1)
    if found.size and found.dtype.kind not in "iu":
        raise ArgumentError(name, values, "integers")
    return check_signed(name, found).astype(np.int64)


def _checked_row(batch: Mapping[str, Any]) -> int:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        given = ids if not isinstance(ids, Tensor) else f"{ids.dtype} {list(ids.shape)}"
        raise ArgumentError("input_ids", given, "[1, tokens] token ids", _FLATTEN)
    if ids.shape[0] != 1:
        raise ArgumentError("input_ids", f"{ids.shape[0]} rows", "one row", _FLATTEN)
    on_host("input_ids", ids)
    return ids.shape[1]


def _check_padding(batch: Mapping[str, Any]) -> None:
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        given = mask if not isinstance(mask, Tensor) else list(mask.shape)
        remedy = "Windows, chunks and documents come from the model's configuration and from the lengths."
        raise ArgumentError("attention_mask", given, "None, or [1, tokens] of ones", remedy)
    check_on_host("attention_mask", mask)
    if not (mask == 1).all():
        raise ArgumentError("attention_mask", "zeros in it", "None, or all ones", _FLATTEN)


def _lengths_of(positions: IntArray) -> list[int]:
    """Returns the lengths of documents whose positions count up from 0."""
    if positions.ndim != 2 or positions.shape[0] != 1:
        remedy = "With position ids of several axes say lengths, or cu_seq_lens_q, too."
        raise ArgumentError("position_ids", list(positions.shape), "[1, tokens]", remedy)
    row = positions[0]
    starts = np.flatnonzero(row == 0)
    if row.size and (row[0] != 0 or not np.array_equal(np.flatnonzero(np.diff(row) != 1) + 1, starts[1:])):
        remedy = "From other positions documents cannot be told: say lengths, or cu_seq_lens_q, too."
        raise ArgumentError("position_ids", row, "positions that count up from 0 in every document", remedy)
    return np.diff(np.append(starts, row.size)).tolist()
