"""Batches of documents that branch: labels, losses and gradients are those of the documents alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks

VOCABULARY, HIDDEN, HEADS = 23, 16, 4
SLOT = cp.AttentionSpec(HEADS, HEADS, HIDDEN // HEADS)


def sequences():
    random = np.random.default_rng(1)
    prompt = random.integers(VOCABULARY, size=20)
    given = [np.concatenate([prompt, random.integers(VOCABULARY, size=size)]) for size in (5, 3, 9, 1)]
    return [*given, random.integers(VOCABULARY, size=7), np.concatenate([prompt[:18], [1, 2, 3]]), prompt]


def parameters():
    random = torch.Generator().manual_seed(0)
    shapes = [(VOCABULARY, HIDDEN), *[(HIDDEN, HIDDEN)] * 3]
    return [torch.randn(shape, generator=random, dtype=torch.float64) / 4 for shape in shapes]


def step(group, packing, tokens, loss_mask):
    layout = cp.Layout.balanced(packing, group.size, align=2)
    batch = cp.shard_batch(tokens, layout, group, slots=[SLOT], loss_mask=loss_mask)
    embedding, *projections = weights = [each.requires_grad_() for each in parameters()]
    x = embedding[batch.tokens] + torch.sin(batch.position_ids[:, None] * torch.arange(HIDDEN) * 0.1)
    q, k, v = ((x @ each).unflatten(1, (HEADS, -1)) for each in projections)
    hidden = x + cp.attention(q, k, v, batch.plan(SLOT), group).flatten(1)
    rows, labels = hidden, batch.labels
    if batch.targets is not None:
        rows, labels = hidden[batch.targets.rows], batch.targets.labels
    losses = F.cross_entropy(rows @ embedding.T, labels, reduction="none")
    loss = cp.token_loss(losses, batch, group)
    loss.backward()
    of_labels = layout if batch.targets is None else batch.targets.layout
    return loss.item(), [each.grad for each in weights], batch.num_tokens, cp.gather(losses.detach(), of_labels, group)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_is_that_of_the_sequences_alone(weighted):
    given = sequences()
    tree, alone = cp.Packing.from_sequences(given), cp.Packing([each.size for each in given])
    mask = np.random.default_rng(2).choice([0, 1, 0.25], tree.total).astype(np.float32) if weighted else None
    found = run_ranks(step, 3, tree, tree.tokens, mask)
    masks = None if mask is None else np.concatenate(tree.split(mask))
    loss, gradients, count, losses = run_ranks(step, 1, alone, np.concatenate(given), masks)[0]
    assert {each[2] for each in found} == {count}
    assert abs(found[0][0] - loss) < 1e-12 * abs(loss)
    for number, gradient in enumerate(gradients):
        assert (sum(each[1][number] for each in found) - gradient).abs().max() < 1e-12
    for part, start in zip(tree.split(found[0][3]), alone.cu_seqlens, strict=False):
        assert (part[1:] - losses[start : start + len(part) - 1]).abs().max() < 1e-12  # a label is at its own place


def test_labels_of_a_tree_are_not_taken_for_those_of_rows():
    packing = cp.Packing.tree([3, 2, 1], [-1, 0, 0])
    batch = cp.shard_batch(np.arange(6), cp.Layout.contiguous(packing, 1))
    assert batch.labels.shape == batch.loss_weights.shape == (0,)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(torch.zeros(6, 9), batch.labels)
    with pytest.raises(ArgumentError, match="weights"):
        cp.token_loss(torch.zeros(6), batch.loss_weights)
