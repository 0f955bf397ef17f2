"""Makes packs from Megatron's samples, and broadcasts them to tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.batch.pack import Pack as HostPack
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Packing

_UNPACKED = "Megatron gives offsets with --sft or --dataloader-inter-document-masking; else make a Pack of your own."


@dataclass(frozen=True)
class Pack(HostPack):
    """A `megatron_cp.batch.pack.Pack` that can be made from Megatron's samples, and can have ranks of its own.

    Attributes:
        ranks: the data- and context-parallel ranks that hold it, as in `BatchGroups.part`; None for those of the
            model's context parallelism.
    """

    ranks: range | None = None

    @classmethod
    def from_megatron(cls, sample: dict[str, Tensor], pad_token: int | None = None) -> Pack:
        """Makes a pack from a sample of Megatron's packed datasets (such as `SFTDataset`), with batch size 1.

        Build those datasets with `context_parallel_size=1` in their config, since no document needs padding here.

        Args:
            sample: `tokens, labels, loss_mask` `[1, seq_length]` and `cu_seqlens` `[1, n]` on the host, or without
                their first axis.
            pad_token: the token that pads the end of the pack, which is dropped to save its computation.
        """
        lacking = [name for name in ("tokens", "labels", "loss_mask", "cu_seqlens") if sample.get(name) is None]
        if lacking:
            raise ArgumentError("sample", f"no {', '.join(lacking)}", "a sample of a packed dataset", _UNPACKED)
        if sample["tokens"].ndim > 1 and len(sample["tokens"]) != 1:
            raise ArgumentError("micro_batch_size", len(sample["tokens"]), "1: a pack is a whole microbatch")
        tokens, labels, loss_mask = (sample[name].flatten() for name in ("tokens", "labels", "loss_mask"))
        given = Packing.from_cu_seqlens(sample["cu_seqlens"].flatten())
        offsets = np.unique(given.cu_seqlens)  # it is padded with copies of its last entry
        total = given.total
        if total > tokens.numel():
            raise ArgumentError("cu_seqlens", offsets.tolist(), f"offsets from 0 up to {tokens.numel()}")
        if pad_token is not None:
            used = torch.nonzero((tokens[:total] != pad_token) | (loss_mask[:total] != 0)).flatten()
            total = int(used[-1]) + 1 if used.numel() else 1
            offsets = np.append(offsets[offsets < total], total)
        return cls(Packing(np.diff(offsets)), tokens[:total], labels[:total], loss_mask[:total])


def broadcast_pack(pack: HostPack | None, host_group: dist.ProcessGroup) -> HostPack:
    """Broadcasts the pack of the group's first rank to all of its ranks, in host memory only.

    Args:
        pack: the pack on the first rank; ignored elsewhere.
        host_group: the tensor-parallel ranks, as a group that moves host memory (`BatchGroups.tp_host`).
    """
    source = dist.get_process_group_ranks(host_group)[0]
    if pack is None and dist.get_rank() == source:
        raise ArgumentError("pack", None, "a pack on the first rank of the group", "Its data iterator has none.")
    if host_group.size() == 1:
        assert pack is not None
        return pack
    ranks = getattr(pack, "ranks", None)
    group = None if ranks is None else torch.tensor([ranks.start, ranks.stop])
    fields = [] if pack is None else [*_documents(pack.packing), group, pack.tokens, pack.labels, pack.loss_mask]
    header = torch.tensor([-1 if entry is None else entry.numel() for entry in fields] or [0] * 7)
    dist.broadcast(header, source, group=host_group)
    sizes = header.tolist()
    # One message of 8-byte words, in which weights are float64, which represents float32 exactly.
    words = [
        entry.double().view(torch.int64) if entry.is_floating_point() else entry.long()
        for entry in fields
        if entry is not None
    ]
    message = torch.cat(words) if words else torch.empty(sum(size for size in sizes if size > 0), dtype=torch.int64)
    dist.broadcast(message, source, group=host_group)
    if pack is not None and dist.get_rank() == source:
        return pack
    lengths, parents, ends, group, tokens, labels, weights = (
        None if size < 0 else part
        for size, part in zip(sizes, message.split([max(size, 0) for size in sizes]), strict=True)
    )
    assert lengths is not None
    assert tokens is not None
    loss_mask = None if weights is None else weights.view(torch.float64).float()
    packing = Packing(lengths.numpy()) if parents is None else Packing.tree(lengths, parents, ends)
    return Pack(packing, tokens, labels, loss_mask, None if group is None else range(*group.tolist()))


def _documents(packing: Packing) -> list[Tensor | None]:
    """Returns the arguments of `Packing.tree`; the documents' lengths alone where none branches."""
    tree = packing.branches
    arrays = (packing.lengths, None, None) if tree is None else (tree.lengths, tree.parents, tree.ends)
    return [None if array is None else torch.from_numpy(array.copy()) for array in arrays]
