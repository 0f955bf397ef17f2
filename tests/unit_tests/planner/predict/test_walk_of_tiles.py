"""Tests of the workload of assigned tiles, operation by operation, against results worked out by hand."""

import numpy as np

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.predict import machine, walk
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.walk import workload_of
from megatron_cp.planner.predict.workload import Arrival, TimedWork, Transfer
from tests.random_tiles import assign_all_to

ITEM = 2
KEYS, QUERIES, RESULTS = 4 + 2, 4, 2 + 1  # elements of a row of one head


def pairs_of_calls(step, shapes, rates, kv_ranks, heads):
    return shapes.pairs[:, kv_ranks] * heads


def operations(monkeypatch, *, forward):
    """Rank 0 computes all of two ranks' eight tokens; a copy takes its bytes, a kernel its pairs of heads."""
    assign_all_to(monkeypatch, 0)
    monkeypatch.setattr(walk, "copy_seconds", lambda _, nbytes, passes: np.asarray(nbytes) * passes)
    monkeypatch.setattr(walk, "seconds_of_calls", pairs_of_calls)
    packing = Packing([8])
    plan = plan_attention(
        packing, Layout.contiguous(packing, 2), heads=3, kv_heads=3, head_dim=4, value_head_dim=2,
        mask=Mask.full(packing), scheme="tiled", head_chunks=2,
    )  # fmt: skip
    found = []
    for each in workload_of(plan, Rates(machine().hardware, ITEM, forward)).operations:
        match each:
            case TimedWork(name, _, seconds):
                if name != "start a transfer":
                    found.append((name, seconds.tolist()))
            case Transfer(name, key, edges):
                found.append((f"start {key}", list(zip(edges.senders, edges.receivers, edges.nbytes, strict=True))))
            case Arrival(key):
                found.append((f"wait {key}", None))
    return found


def started(heads, first):
    """Keys and queries of rank 1 go to rank 0, which packs its own keys too."""
    keys, queries = 4 * heads * KEYS * ITEM, 4 * heads * QUERIES * ITEM
    return [
        ("pack keys", [keys, keys]), (f"start {first}", [(1, 0, keys)]),
        ("pack remote queries", [0, queries]), (f"start {first + 1}", [(1, 0, queries)]),
    ]  # fmt: skip


def test_forward(monkeypatch):
    """The program is of one head, then of two."""
    one, two = 4 * RESULTS * 4, 4 * 2 * RESULTS * 4
    merged = 4 * 2 * 4 * 3  # rows, elements and bytes, three times
    assert operations(monkeypatch, forward=True) == [
        *started(1, 1),
        ("attend own keys", [16, 0]), ("attend own keys", [32, 0]),
        ("wait 1", None), *started(2, 3),
        ("wait 2", None), ("attend remote queries", [32, 0]), ("start 5", [(0, 1, one)]),
        ("attend far keys", [16, 0]), ("merge", [merged, 0]),
        ("wait 3", None), ("wait 4", None), ("attend remote queries", [64, 0]),
        ("wait 5", None), ("add partial outputs", [0, 3 * one]), ("start 6", [(0, 1, two)]),
        ("attend far keys", [32, 0]), ("merge", [2 * merged, 0]),
        ("wait 6", None), ("add partial outputs", [0, 3 * two]),
    ]  # fmt: skip


def test_backward(monkeypatch):
    """Returned gradients are added in fp32, those of queries at another time than those of keys."""
    added = [each for each in operations(monkeypatch, forward=False) if each[0].startswith("add ")]
    queries, keys = 4 * QUERIES * 4, 4 * KEYS * 4
    assert added == [
        ("add gradients of remote queries", [0, queries]), ("add gradients of keys", [keys, keys]),
        ("add gradients of remote queries", [0, 2 * queries]), ("add gradients of keys", [2 * keys, 2 * keys]),
    ]  # fmt: skip
