"""The loss on documents that are held out, and the texts that a trained model writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.setup import Training
from megatron_cp.data import Corpus, Tokenizer
from megatron_cp.layout import Packing
from megatron_cp.megatron import ShardedBatch, forward_step, layer_slots, layout_options, shard_batch
from megatron_cp.planner import layout_by_name

_PROMPTS, _MOST_OF_A_PROMPT = 2, 32  # documents whose beginnings the model goes on with, and tokens of each


def validation_loss(training: Training, batches: Iterator[ShardedBatch], packs: int) -> float:
    """Returns the loss of a token on the first `packs` packs, the same on every rank.

    It is the sum over all tokens that are to be predicted over their number, so that context-parallel sizes agree up to
    rounding. Replicas share the packs, some with one less.
    """
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    total = torch.zeros(2, dtype=torch.float64, device=training.device)
    training.model.eval()
    with torch.no_grad():
        for _ in range(replica, packs, replicas):
            losses, loss = forward_step(batches, training.model)
            total += loss(losses)[2]["lm loss"].double()
    training.model.train()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return (total[0] / total[1].clamp(min=1)).item()


def write_samples(
    training: Training, options: TrainingOptions, corpus: Corpus, tokenizer: Tokenizer
) -> list[dict[str, str]]:
    """Returns the beginnings of two documents and what the model writes after each, greedily; on every rank.

    Each token is computed from the whole text before it, over the ranks as in training: nothing is cached.

    Returns:
        `prompt` and `text` of each.
    """
    lengths = np.minimum(corpus.lengths[:_PROMPTS] // 2, min(_MOST_OF_A_PROMPT, options.seq_length // 2))
    prompts = [corpus.tokens(number, 0, max(1, int(length))) for number, length in enumerate(lengths)]
    texts, slots = [list(map(int, prompt)) for prompt in prompts], layer_slots(training.model)
    training.model.eval()
    with torch.no_grad():
        for _ in range(options.sample_tokens):
            found = _next_tokens(training, options, texts, slots, corpus.vocab_size)
            texts = [[*text, token] for text, token in zip(texts, found, strict=True)]
    training.model.train()
    pairs = zip(prompts, texts, strict=True)
    return [{"prompt": tokenizer.decode(p.tolist()), "text": tokenizer.decode(text[len(p) :])} for p, text in pairs]


def _next_tokens(
    training: Training, options: TrainingOptions, texts: list[list[int]], slots: Any, vocab_size: int
) -> list[int]:
    """Returns the likeliest next token of each text, which are one pack."""
    packing = Packing([len(text) for text in texts])
    layout = layout_by_name("contiguous", packing, options.context_parallel_size, **layout_options(training.config))
    batch = shard_batch(
        np.concatenate([np.array(text, np.int64) for text in texts]), layout, training.cp_group,
        slots=dict.fromkeys(slots), device=training.device,
    )  # fmt: skip
    logits = training.model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
    logits = gather_from_tensor_model_parallel_region(logits)[0, :, :vocab_size]  # [t, vocabulary] of own rows
    ranks, rows = layout.located(np.array([end - 1 for _, end in packing.spans()]))
    own = torch.from_numpy(np.asarray(ranks) == training.cp_group.rank).to(training.device)
    likeliest = logits.argmax(-1)[torch.from_numpy(np.where(own.cpu(), rows, 0)).to(training.device)]
    found = torch.where(own, likeliest, -1)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=parallel_state.get_context_parallel_group())
    return [int(token) for token in found.tolist()]
