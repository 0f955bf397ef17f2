"""Reading a checkpoint runs none of its code: pickles in it may only name what Megatron's own writers name.

A checkpoint is many pickles: `.metadata`, which torch opens with `pickle.load`, and each object that is no tensor,
which torch's loader opens with `torch.load(weights_only=False)`. A pickle can name any function and call it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from megatron_cp.megatron import checkpoints_unpickled_by

_METADATA = "torch.distributed.checkpoint.metadata"
# What torch 2.11 writes into `.metadata`: plain data classes, and a function that looks up a layout by its name.
_NAMED = {
    *((_METADATA, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMED:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


@contextlib.contextmanager
def names_of_checkpoints_alone() -> Iterator[None]:
    """Whatever reads a checkpoint within refuses pickles that name anything else; raises `pickle.UnpicklingError`.

    At the place where torch reads, since it also falls back from one file to another.
    """
    with checkpoints_unpickled_by(lambda file: _MetadataUnpickler(file).load()):
        yield
