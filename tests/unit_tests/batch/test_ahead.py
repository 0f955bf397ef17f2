"""Tests of the values ahead of each row: against a loop over documents, in every layout."""

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.planner.layouts import layout_by_name

LENGTHS = (7, 1, 0, 12, 3)
TOKENS = np.arange(100, 100 + sum(LENGTHS))
MASK = np.array([1, 0, 1, 1, 0.5, 1, 0] * 4)[: sum(LENGTHS)].astype(np.float32)


def expected(places):
    """Returns, by place in the stream, the token, label, weight and position so many places ahead."""
    found, first = [], 0
    for length in LENGTHS:
        for place in range(length):
            ahead = place + places
            if ahead >= length:
                found.append((0, 0, 0.0, 0))
                continue
            token = TOKENS[first + ahead]
            weight = float(MASK[first + ahead]) if ahead + 1 < length else 0.0
            found.append((token, TOKENS[first + ahead + 1] if weight else -100, weight, ahead))
        first += length
    return found


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "balanced", "random"])
@pytest.mark.parametrize("cp_size", [1, 3, 5])
@pytest.mark.parametrize("places", [0, 1, 2, 11, 40])
@pytest.mark.few(together=2)
def test_rows_are_what_lies_ahead_in_their_document(name, cp_size, places):
    layout = layout_by_name(name, Packing(LENGTHS), cp_size, align=4, seed=3)
    stream, rows = expected(places), 0
    everyone = run_ranks(lambda group: cp.shard_batch(TOKENS, layout, group, loss_mask=MASK).ahead(places), cp_size)
    for rank, ahead in enumerate(everyone):
        held = layout.tokens(rank)
        columns = list(zip(*(stream[place] for place in held), strict=True)) or [[], [], [], []]
        pads = [0] * int(layout.pad_rows[rank])
        for got, column in zip(
            (ahead.tokens, ahead.labels, ahead.loss_weights, ahead.position_ids), columns, strict=True
        ):
            assert got.tolist() == [*column, *pads]
        assert ahead.total_weight == sum(weight for _, _, weight, _ in stream)
        assert (ahead.tokens.dtype, ahead.loss_weights.dtype) == (torch.int64, torch.float32)
        rows += len(ahead.tokens)
    assert rows == int(layout.row_counts.sum())
