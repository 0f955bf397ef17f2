"""`.bin/.idx` pairs for tests, by Megatron's own builder."""

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_indexed(prefix, documents, dtype=np.int32):
    """Documents are lists of sequences, which are lists of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        flat = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(flat, dtype=torch.int64), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
