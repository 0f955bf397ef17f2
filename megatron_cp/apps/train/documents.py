"""The documents of a run: read as text, and divided into those to train on and those that are held out.

Imports nothing heavy, so that wrong documents are refused before Megatron is imported.
"""

from __future__ import annotations

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.data import Corpus, CorpusPart, is_indexed, read_corpus, read_tokenizer
from megatron_cp.errors import ArgumentError


def read_text(options: TrainingOptions) -> Corpus | None:
    """Returns the documents that the options name; None for tokens that Megatron must read.

    Raises:
        ArgumentError: documents or a tokenizer that cannot be read, or a vocabulary that does not fit them.
    """
    if not is_indexed(options.data_path):
        if options.vocab_size is not None:
            raise ArgumentError("vocab_size", options.vocab_size, "only with a .bin/.idx pair as --data-path")
        return read_corpus(options.data_path, read_tokenizer(options.tokenizer_model))
    if options.vocab_size is None and options.tokenizer_model is None:
        raise ArgumentError("vocab_size", None, "the vocabulary of the .bin/.idx pair, or its --tokenizer-model")
    return None


def split_corpus(options: TrainingOptions, corpus: Corpus) -> tuple[Corpus, Corpus | None]:
    """Returns the documents to train on, and those that are held out for validation, the last ones."""
    if not options.validation:
        return corpus, None
    total = corpus.lengths.size
    first = total - min(max(1, round(options.validation * total)), total - 1)
    if first == total:
        raise ArgumentError("validation", options.validation, f"0 with a single document, in {corpus.name}")
    return CorpusPart(corpus, 0, first), CorpusPart(corpus, first, total)
