"""Packed batches from documents on disk.

Owns `Tokenizer` (text to token numbers), `Corpus` (the documents as tokens), best-fit packing, `even_packs` (packs of a
global batch that take equally long), `group_batches` and `group_microbatches` (its microbatches of groups of ranks),
`PackedStream` (the endless sequence of packs that training reads) and `BlendedStream` (that of several corpora).
Everything here is numpy on the host and a function of its arguments: no torch, no groups, no padding, no labels,
nothing of Megatron's.
"""

from megatron_cp.data.blend import BlendedStream
from megatron_cp.data.corpus import Corpus, CorpusPart, TokenCorpus, is_indexed, read_corpus
from megatron_cp.data.even import Cost, GlobalBatch, balance_packs, even_packs
from megatron_cp.data.group_schedule import GroupBatch, GroupSchedule, group_batches, group_microbatches
from megatron_cp.data.pieces import Piece, best_fit
from megatron_cp.data.stream import PackedStream
from megatron_cp.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, read_tokenizer

__all__ = [
    "BlendedStream",
    "ByteTokenizer",
    "Corpus",
    "CorpusPart",
    "Cost",
    "FileTokenizer",
    "GlobalBatch",
    "GroupBatch",
    "GroupSchedule",
    "PackedStream",
    "Piece",
    "TokenCorpus",
    "Tokenizer",
    "balance_packs",
    "best_fit",
    "even_packs",
    "group_batches",
    "group_microbatches",
    "is_indexed",
    "read_corpus",
    "read_tokenizer",
]
