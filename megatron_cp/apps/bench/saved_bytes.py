"""Counts what a forward leaves for its backward: numbers, masks, indices and the batch's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_cp.apps.bench.work import Work
from megatron_cp.testing import PeakMemory
from megatron_cp.torch_private import leaves


@dataclass
class Saved:
    """Bytes that one forward of a mixer leaves for its backward on one rank.

    Attributes:
        numbers: bytes that autograd saved, with the mixer's inputs and without its parameters.
        masks: bytes of booleans that it saved.
        indices: bytes of integers that this forward made and that anything still holds.
        tables: bytes of integers to which autograd refers and which were made once for all layers of the batch.
    """

    numbers: int = 0
    masks: int = 0
    indices: int = 0
    tables: int = 0


def saved_bytes(work: Work, parameters: Sequence[Tensor]) -> Saved:
    """Returns the bytes that a forward leaves for backward once the batch's tables exist, as in a second layer."""
    kept: Storages = {}
    kinds: dict[int, str] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        kept.update(storage)
        kinds.update(dict.fromkeys(storage, _kind(tensor)))
        return tensor.detach()

    first, second = _Types(), _Types()
    with first:
        before = work.forward(first.watch(work.group))
    with second, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = work.forward(second.watch(work.group))
    own = second.indices().keys() - first.indices().keys()  # both graphs exist, and so do the tensors that they hold
    found = Saved(indices=sum(second.indices()[key] for key in own))
    of_parameters = {key for parameter in parameters for key in _storage(parameter)}
    for key, (storage, size) in kept.items():
        if key not in of_parameters and key not in own and not storage.expired():
            what = {"indices": "tables"}.get(kinds[key], kinds[key])
            setattr(found, what, getattr(found, what) + size)
    del before, out
    return found


Storages = dict[int, tuple[StorageWeakRef, int]]  # references and bytes, by address


class _Types(PeakMemory):
    """Also remembers the storages that operators take or make as integers, and as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._integers: Storages = {}
        self._numbers: Storages = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket is torch.ops.aten.resize_:
            self._numbers |= _storage(result)  # one of the group's buffers, which send numbers as bytes
        for leaf in leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                storages = {"indices": self._integers, "numbers": self._numbers}.get(_kind(leaf))
                if storages is not None:
                    storages |= _storage(leaf)
        return result

    def indices(self) -> dict[int, int]:
        """Returns the bytes of storages in use that hold integers, without buffers that send numbers as bytes."""
        return {
            key: size
            for key, (storage, size) in self._integers.items()
            if key not in self._numbers and not storage.expired()
        }


def _kind(tensor: Tensor) -> str:
    return "numbers" if tensor.is_floating_point() else "masks" if tensor.dtype == torch.bool else "indices"


def _storage(tensor: Tensor) -> Storages:
    storage = tensor.untyped_storage()
    reference = StorageWeakRef(storage)
    return {reference.cdata: (reference, storage.nbytes())}
