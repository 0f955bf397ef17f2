"""What Megatron's own `PackedSeqParams` say of a batch, read to the host, and the order that its sharding left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.capabilities import require

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_SHARD_BATCH = "megatron_cp.megatron.batch.shard_batch"


@dataclass(frozen=True)
class Documents:
    """The documents of a packed batch.

    Attributes:
        packing: their rows, of which the last ones of a document may be pads.
        lengths: `[num_documents]` their tokens, which come before the pads; None where there are no pads.
    """

    packing: Packing
    lengths: NDArray[np.int64] | None = None

    @property
    def max_length(self) -> int:
        """Tokens of the longest document."""
        return int((self.packing.lengths if self.lengths is None else self.lengths).max())

    @classmethod
    def of(cls, params: PackedSeqParams) -> Documents:
        """Those of the queries, which must be those of the keys. The host waits for the device.

        Raises:
            ArgumentError: fields that are missing, that contradict one another, or that mean another group of ranks.
        """
        if params.cp_group is not None or params.local_cp_size is not None:
            _refuse("a context-parallel group of its own", "the model's group")
        queries, keys = _read(params)
        if queries != keys:
            _refuse("keys in other documents than queries", "self-attention")
        tokens, rows = queries
        if tokens.num_documents != rows.num_documents or (tokens.lengths > rows.lengths).any():
            given = f"cu_seqlens_q of {tokens} in cu_seqlens_q_padded of {rows}"
            _refuse(given, "documents that are no longer than with their pads")
        documents = cls(rows, None if tokens == rows else tokens.lengths)
        _check_the_rest(params, documents)
        return documents

    def layout(self, cp_size: int, order: str | None) -> Layout:
        """Who holds which rows after Megatron's own sharding.

        Args:
            cp_size: the number of ranks.
            order: what is cut into `2 * cp_size` chunks, of which rank r gets chunks r and `2 * cp_size - 1 - r`: each
                "document" or the whole "pack". Nothing in `PackedSeqParams` tells.

        Raises:
            ArgumentError: several ranks and no order, or lengths that cannot be cut so.
        """
        if cp_size == 1:
            return Layout.zigzag(self.packing, 1)
        if order is None:
            raise ArgumentError(
                "--cp-packed-order",
                None,
                "document or pack for Megatron's own packed_seq_params on several ranks",
                "They do not tell whether each document (--sft) or the whole pack (--dataloader-inter-document-masking)"
                " was cut into chunks. megatron_cp.megatron.config.TransformerConfig takes it from these flags; in"
                f" another configuration set cp_packed_order, or shard the batch with {_SHARD_BATCH}.",
            )
        require("packed_order", order, name="--cp-packed-order")  # an attribute may have been set to anything
        whole = self.packing if order == "document" else Packing([self.packing.total])
        bad = whole.lengths[whole.lengths % (2 * cp_size) != 0]
        if bad.size:
            raise ArgumentError(
                "packed_seq_params",
                f"{order}s of {bad[:8].tolist()} tokens, without a plan",
                f"multiples of {2 * cp_size} from Megatron's own sharding",
                f"Shard the batch with {_SHARD_BATCH}, which takes any lengths.",
            )
        cut = Layout.zigzag(whole, cp_size)
        if order == "document":
            return cut
        return Layout.from_fragments(self.packing, [cut.fragments_of(rank) for rank in range(cp_size)])


def is_packed(params: PackedSeqParams | None, batch: int) -> bool:
    """Whether rows are packed documents, and not `batch` sequences side by side.

    Raises:
        ArgumentError: lengths of documents in a format that says neither.
    """
    if params is None or params.qkv_format == "thd":
        return params is not None
    offsets = params.cu_seqlens_q
    # As Megatron has them for multimodal models: one sequence to each of the batch.
    if offsets is not None and not (params.qkv_format == "sbhd" and offsets.numel() == batch + 1):
        given = f"qkv_format {params.qkv_format!r} with {offsets.numel() - 1} documents in a batch of {batch}"
        _refuse(given, "qkv_format='thd' for packed documents", "Another format would be attended to as one sequence.")
    return False


def version_of(params: PackedSeqParams) -> tuple[tuple[int, int], ...]:
    """What another tensor of offsets, or another value in one of them, changes."""
    offsets = (getattr(params, name) for name in _OFFSETS)
    return tuple((id(t), 0 if t is None or t.is_inference() else t._version) for t in offsets)


def _read(params: PackedSeqParams) -> list[tuple[Packing, Packing]]:
    """Tokens and rows of the documents, of queries and of keys. A tensor that is given twice is read once."""
    read: dict[int, Packing] = {}

    def packing(*names: str) -> Packing:
        offsets: Tensor | None = next((t for t in (getattr(params, name) for name in names) if t is not None), None)
        if offsets is None:
            _refuse("no cu_seqlens_q", "the documents of the batch")
        if id(offsets) not in read:
            read[id(offsets)] = Packing.from_cu_seqlens(offsets.cpu())
        return read[id(offsets)]

    queries, padded = "cu_seqlens_q", "cu_seqlens_q_padded"
    return [
        (packing(queries, padded), packing(padded, queries)),
        (
            packing("cu_seqlens_kv", "cu_seqlens_kv_padded", queries, padded),
            packing("cu_seqlens_kv_padded", "cu_seqlens_kv", padded, queries),
        ),
    ]


def _check_the_rest(params: PackedSeqParams, documents: Documents) -> None:
    """Refuses what other fields say against the documents."""
    total, longest = documents.packing.total, documents.max_length
    if params.total_tokens not in (None, total):
        remedy = "Rows behind the last document are a document too: add their end to cu_seqlens."
        _refuse(f"total_tokens {params.total_tokens} for cu_seqlens up to {total}", str(total), remedy)
    if params.seq_idx is not None and params.total_tokens is None:  # else Megatron has just made it
        numbers = params.seq_idx.flatten().cpu().numpy()
        starts = np.unique(documents.packing.cu_seqlens[1:-1])
        inner = starts[(starts > 0) & (starts < total)]
        if numbers.size != total or not np.array_equal(np.flatnonzero(np.diff(numbers)) + 1, inner):
            _refuse("seq_idx of other documents than cu_seqlens", "the same documents", "Leave seq_idx out.")
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        given = getattr(params, name)
        if given is not None and int(given) < longest:  # tables of rotary angles are as long as it says
            _refuse(f"{name} {int(given)} for a document of {longest} tokens", f"at least {longest}")


def _refuse(given: str, allowed: str, remedy: str = "") -> NoReturn:
    raise ArgumentError("packed_seq_params", given, allowed, remedy)
