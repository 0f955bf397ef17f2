"""Reads the document lengths of a Hugging Face batch, whose documents are one row of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Packing
from megatron_cp.layout.packing import IntArray, check_signed, offsets_remedy

# Keys by which collators describe documents. They are not passed to the model.
_LENGTHS = ("lengths", "seq_lengths", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
DOCUMENT_KEYS = (*_LENGTHS, "max_length_q", "max_length_k")
# Names of other frameworks for the same. A model would swallow them.
_DESCRIBES = re.compile(r"^lengths?$|cu_?seq|seq_?len|seq(uence)?_?(id|len)|segment|doc(ument)?s?_?(id|len)|packed_seq")
_HOST, _INTEGERS = torch.device("cpu"), (torch.uint8, torch.int16, torch.int32, torch.int64)
_ON_HOST = (
    "Shard the batch before you move it to a device, or move it back once with .cpu(). Reading it "
    "here would stop the device."
)
_FLATTEN = (
    "Put the documents of a batch end to end into one row, without padding: DataCollatorWithFlattening and TRL's "
    "packing do it for text. With images, concatenate the processor's tensors, as docs/images.md shows."
)
_OTHER_POSITIONS = "Other positions do not show where documents begin: give lengths or cu_seq_lens_q too."


def packing_of(batch: Mapping[str, Any]) -> Packing:
    """Returns the documents' lengths, from all that the batch says about them, which must agree.

    Documents are described by `lengths` (or `seq_lengths`), `cu_seq_lens_q` and `cu_seq_lens_k`; by `seq_idx` or an
    `attention_mask` that number the documents of a row's tokens; and by `position_ids` that begin again at 0. A batch
    without any of them is one document. `lengths` may be a packing, which may branch.

    Raises:
        ArgumentError: several rows, padding, lengths that are on a device or do not sum to the number of tokens,
            descriptions that contradict each other, positions that do not show where documents begin, or a key that
            seems to describe documents and is not known.
    """
    total = _checked_row(batch)
    _check_known(batch, total)
    said = dict(_descriptions(batch, total))
    for name, packing in said.items():
        if packing.total != total:
            remedy = "They look like cu_seqlens: name them cu_seq_lens_q." if offsets_remedy(packing, total) else ""
            raise ArgumentError(
                name, f"documents of {packing.total} tokens", f"the {total} tokens of input_ids", remedy
            )
    if not said:
        return Packing([total])
    first, *others = said
    found = said[first].lengths[said[first].lengths > 0]
    for name in others:
        other = said[name].lengths[said[name].lengths > 0]
        if not np.array_equal(found, other):
            remedy = "Both describe this batch's documents, but they disagree. Leave out the wrong one."
            raise ArgumentError(name, f"documents of {other.tolist()}", f"{first}'s {found.tolist()}", remedy)
    for name in ("max_length_q", "max_length_k"):
        longest = batch.get(name)
        check_on_host(name, longest)
        if longest is not None and int(longest) < found.max(initial=0):
            raise ArgumentError(name, int(longest), f"at least {found.max()}, the longest document of {first}")
    return said[first]


def _descriptions(batch: Mapping[str, Any], total: int) -> Iterator[tuple[str, Packing]]:
    """Yields each key by which the batch describes its documents, and their lengths by it."""
    for name in ("lengths", "seq_lengths"):
        if (lengths := batch.get(name)) is not None:
            is_packing = isinstance(lengths, Packing)
            yield name, lengths if is_packing else Packing(on_host(name, lengths).reshape(-1).tolist())
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (ends := batch.get(name)) is not None:
            yield name, Packing.from_cu_seqlens(on_host(name, ends).reshape(-1))
    for name, numbers in (("seq_idx", batch.get("seq_idx")), ("attention_mask", _numbered_mask(batch, total))):
        if numbers is not None:
            yield name, Packing(_lengths_by_number(name, on_host(name, numbers), total))
    if (positions := batch.get("position_ids")) is None or getattr(batch.get("lengths"), "branches", None) is not None:
        return  # positions along each path are compared where they are distributed
    others = any(batch.get(name) is not None for name in _LENGTHS) or _numbered_mask(batch, total) is not None
    row = on_host("position_ids", positions)
    if row.ndim == 2 and len(row) == 1 and (counted := _lengths_by_position(row[0])) is not None:
        if len(counted) > 1 or not others:  # beside others, positions may also count through the whole row
            yield "position_ids", Packing(counted)
    elif not others:
        if row.ndim != 2 or row.shape[0] != 1:
            remedy = "With position ids of several axes, give lengths or cu_seq_lens_q too."
            raise ArgumentError("position_ids", list(row.shape), "[1, tokens]", remedy)
        raise ArgumentError(
            "position_ids", row[0], "positions that count up from 0 in every document", _OTHER_POSITIONS
        )


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


def _numbered_mask(batch: Mapping[str, Any], total: int) -> Tensor | None:
    """Returns a mask that numbers documents; None without a mask, or if it is one everywhere."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        given = mask if not isinstance(mask, Tensor) else list(mask.shape)
        remedy = "Windows, chunks and documents come from the model's configuration and from the lengths."
        raise ArgumentError("attention_mask", given, "None, or [1, tokens] of ones", remedy)
    check_on_host("attention_mask", mask)
    if mask.shape != (1, total):
        raise ArgumentError("attention_mask", list(mask.shape), f"None, or [1, {total}] of ones")
    if (mask == 0).any():
        raise ArgumentError("attention_mask", "zeros in it", "None, or all ones", _FLATTEN)
    return None if (mask == 1).all() else mask


def _lengths_by_number(name: str, numbers: IntArray, total: int) -> list[int]:
    """Returns the lengths of documents whose tokens have the same number, which may be any: pads are often -1 or 0.

    Documents that stand side by side must have different ones.
    """
    if numbers.shape not in ((1, total), (total,)):
        raise ArgumentError(name, list(numbers.shape), f"[1, {total}], the number of each token's document")
    steps = np.diff(numbers.reshape(-1))
    return np.diff(np.concatenate([[0], np.flatnonzero(steps) + 1, [total]])).tolist()


def _lengths_by_position(row: IntArray) -> list[int] | None:
    """Returns the lengths of documents whose positions count up from 0; None for other positions."""
    starts = np.flatnonzero(row == 0)
    if row.size and (row[0] != 0 or not np.array_equal(np.flatnonzero(np.diff(row) != 1) + 1, starts[1:])):
        return None
    return np.diff(np.append(starts, row.size)).tolist()


def _check_known(batch: Mapping[str, Any], total: int) -> None:
    """Refuses keys that describe documents by their name, or are offsets by their value, and would not be read."""
    for name, value in batch.items():
        if value is None or name in (*DOCUMENT_KEYS, "input_ids", "position_ids"):
            continue
        if (isinstance(name, str) and _DESCRIBES.search(name) and _are_numbers(value)) or _is_offsets(value, total):
            remedy = "If they are offsets, name them cu_seq_lens_q, or give lengths. Otherwise use another name."
            raise ArgumentError(name, value, f"documents described by {', '.join(_LENGTHS)}", remedy)


def _are_numbers(value: object) -> bool:
    """True for a tensor, an array, or a list of integers: a single number or a text describes no document."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(each, int | np.integer) for each in value)
    return isinstance(value, Tensor | np.ndarray)


def _is_offsets(value: object, total: int) -> bool:
    """True for integers on the host that rise from 0 to the number of tokens."""
    if isinstance(value, Tensor):
        offsets = value.numpy() if value.device == _HOST and value.dtype in _INTEGERS else np.empty(0)
    elif isinstance(value, np.ndarray | list | tuple) and all(isinstance(each, int | np.integer) for each in value):
        offsets = np.asarray(value)
    else:
        return False
    if offsets.ndim != 1 or offsets.size < 2 or offsets.dtype.kind not in "iu":
        return False
    return bool(offsets[0] == 0 and offsets[-1] == total and (offsets[1:] >= offsets[:-1]).all())
