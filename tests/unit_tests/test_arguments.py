"""Every argument of every public call, against values that it cannot have: all are refused by the argument's name."""

import inspect
import math
import warnings
from datetime import timedelta
from operator import attrgetter

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.planner.predict import machine
from megatron_cp.softmax.kernels import KERNELS
from megatron_cp.softmax.kernels.reference import ReferenceAttention

P, KEYS = cp.Packing([5, 0, 4]), cp.Packing([2, 3, 3])
LAYOUT = cp.Layout.zigzag(P, 2, align=4)
ALONE = cp.Layout.contiguous(P, 1)
STREAM = np.arange(9)
ROWS = 9


def ones(*shape):
    return torch.ones(ROWS, *shape)


MASKED = np.ma.array([3, 1], mask=[False, True])
BEYOND, NEGATIVE = 2**70, -7
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # a prototype, torch says
    NESTED = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])
JAGGED = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
SPARSE = torch.eye(3).to_sparse()
ON_META = torch.zeros(ROWS, dtype=torch.int64, device="meta")


SLOT = cp.AttentionSpec(2, 1, 4, 4)
NO_SEARCH = [-1, 1e9, math.nan, "1", None, True, [1.0]]
NO_INTEGER = [None, True, np.True_, 1.0, math.nan, "1", b"1", 1j, [1], (1,), {1}, {1: 1}, np.array(1), np.array([1]),
              torch.tensor(1), torch.tensor([1]), BEYOND, -BEYOND, 10**400, NEGATIVE, timedelta(1), object(),
              int]  # fmt: skip
NO_NUMBER = [None, True, np.True_, "1", b"1", 1j, [1.0], {1.0}, np.array(1.0), torch.tensor(1.0), 10**400, math.nan,
             math.inf, -math.inf, object(), float]  # fmt: skip
NO_FLAG = [None, 0, 1, "no", [], np.array(True), torch.tensor(True), object()]
NO_NAME = [None, 5, True, 1.5, b"a2a", "", "nothing", ["a2a"], {"a2a"}, np.array(["a2a", "a2a"]), torch.ones(2), str]
NO_LIST = [None, 5, 2.5, True, "31", b"31", bytearray(b"31"), memoryview(b"31"), {3, 1}, {3: 1}, {3: 1}.keys(),
           [3, True], [3, np.True_], [3, 1.5], [3, None], ["3"], [3, -1], [BEYOND], [2**63], [timedelta(1)], [[3], [1]],
           [[3], [1, 2]], [], MASKED, np.array(3), np.array([True]), np.array([3.0]), np.array([3], "m8[s]"),
           np.array([{}]), torch.tensor(3), torch.tensor([3.0]), torch.tensor([3.0], requires_grad=True),
           torch.tensor([True]), SPARSE, NESTED, torch.tensor([3], device="meta"), object()]  # fmt: skip
NO_PACKING = [None, 5, True, [5, 0, 4], STREAM, torch.tensor([5, 4]), "5", LAYOUT, cp.Packing]
NO_LAYOUT = [None, 5, True, "zigzag", [[(0, 9)]], P, cp.Layout, np.arange(9), cp.Layout.contiguous(cp.Packing([3]), 2)]
NO_MASK = [5, True, np.ones((9, 9), bool), torch.ones(9, 9), cp.Mask, [cp.Mask.causal(P)],
           cp.Mask.causal(cp.Packing([3]))]  # fmt: skip
NO_LENGTHS = [5, True, "504", [5, 0], [5, 1, 4], [-1, 0, 4], [5.0, 0.0, 4.0], [True, False, True], object(), {}]
NO_GROUP = [5, True, "world", [], {}, object(), RankGroup, ThreadGroup.create(3)[0], torch.ones(1)]
NO_PLAN = [None, 5, True, "a2a", P, ALONE, cp.Plan, [], object()]
NO_ARRAY = [None, 5, True, "abc", b"123456789", list(range(9)), {}, np.array(3), torch.tensor(3), np.arange(8),
            torch.arange(8), np.ma.array(STREAM, mask=STREAM > 4), NESTED, JAGGED, torch.eye(9).to_sparse(),
            object()]  # fmt: skip
NO_TOKENS = [*NO_ARRAY, STREAM * 1.0, STREAM > 4, STREAM * 1j, STREAM.astype("m8[s]"), STREAM.astype(str),
             STREAM.astype(object), STREAM.astype(np.uint64) + np.uint64(2**63),
             torch.from_numpy(STREAM.astype(np.uint64) + np.uint64(2**63)), torch.ones(9), torch.ones(9) > 0,
             torch.ones(9) * 1j]  # fmt: skip


def no_tensor(good, *, fewer=True):
    """Returns values that are no tensor such as `good`; with `fewer` also one of fewer rows."""
    return [None, 5, 1.0, True, "q", [], good.tolist(), good.numpy(), torch.tensor(1.0), good.long(), good > 0,
            good + 0j, *[good[:-1]] * fewer, good[..., None], good.to("meta"), good.to_sparse(), NESTED, JAGGED,
            torch.nested.nested_tensor([good]), object(), torch.Tensor]  # fmt: skip


def optional(values):
    return [value for value in values if value is not None]


CACHE, BEGUN = cp.Cache(3), cp.Cache(3)
BEGUN.extend(ALONE)
NO_CACHE = [5, True, "cache", {}, CACHE, cp.Cache(3).layer(0), cp.Cache]
SHAPES = {"heads": 2, "head_dim": 4}
PLANS = {
    "attention": cp.plan_attention(P, ALONE, **SHAPES),
    "latent": cp.plan_attention(P, ALONE, **SHAPES, latent=(2, 6)),
    "sparse": cp.plan_attention(P, ALONE, **SHAPES, topk=3, indexer=(2, 5)),
    "chosen": cp.plan_attention(P, ALONE, **SHAPES, topk=3),
    "blocks": cp.plan_attention(P, ALONE, **SHAPES, topk=3, block=2),
    **{kind: cp.plan_linear(P, ALONE, kind, **SHAPES) for kind in ("gdn", "kda", "gdn2", "gdp")},
    "mamba": cp.plan_linear(P, ALONE, "mamba", state=4, **SHAPES),
    "conv1d": cp.plan_linear(P, ALONE, "conv1d", channels=6),
}
TAPS, BIAS, HEADS = torch.ones(24, 4), torch.ones(24), torch.ones(2)
CROSS = {"packing": P, "layout": LAYOUT, "kv_packing": KEYS, "kv_layout": cp.Layout.contiguous(KEYS, 2)}
MIXER = {"conv": TAPS, "conv_bias": BIAS, "A_log": HEADS}
NO_MACHINE = [5, True, "h1000", "", b"h100", {}, 1.5, ["h100"], torch.ones(2), cp.Layout]
NO_TOPOLOGY = [5, True, "h100", (0, 0), machine().topology(5), cp.Layout]
WIRE = {"transport": optional(NO_NAME), "codec": NO_NAME}
NO_TRANSPORT = [*NO_NAME, "hierarchical", cp.Transport, cp.Transport("hierarchical", (0, 0)), ("pairwise", ())]
NO_LATENT = [5, True, "ab", b"ab", (2,), (2, 6, 1), (0, 6), (2, 0), (2.0, 6), (2, True), (None, 6), (4, 6), {2: 6},
             {2, 6}, np.array([2, 6]), torch.tensor([2, 6]), object()]  # fmt: skip
LATENT = {
    "q": torch.ones(9, 2, 4),
    "latent": torch.ones(9, 6),
    "shared_key": torch.ones(9, 2),
    "up": torch.ones(2, 6, 6),
}
NO_INDEXER = [5, True, "ab", (2,), (2, 6, 1), (0, 6), (2, 0), (2.0, 6), (2, True), (None, 6), {2: 6}, {2, 6}, object()]
ATTENTION = {
    "scheme": NO_NAME, **WIRE, **{name: [*NO_INTEGER, 0] for name in ("heads", "head_dim")},
    **{name: optional([*NO_INTEGER, 0]) for name in ("kv_heads", "value_head_dim", "head_chunks")},
    "ulysses_degree": optional([*NO_INTEGER, 0, 2.0, 3]),
}  # fmt: skip
PRICED = {
    "latent": NO_LATENT, "latent_mode": [*optional(NO_NAME), "expand"], "hardware": NO_MACHINE,
    "topology": NO_TOPOLOGY, "item_size": [*NO_INTEGER, 0], "search_seconds": NO_SEARCH,
}  # fmt: skip
CHOOSING = {"topk": optional([*NO_INTEGER, 0]), "indexer": NO_INDEXER, "block": optional([*NO_INTEGER, 0])}
INDEX = {"index_q": ones(2, 5), "index_k": ones(5), "index_weights": ones(2)}
QKV = {name: ones(2, 4) for name in "qkv"}
HELD = {f"held_{name}": torch.ones(KEYS.total, 2, 4) for name in "qkv"}
SOFTMAX = {
    "softmax_scale": optional(NO_NUMBER), "softcap": [*NO_NUMBER, -1.0], "dropout": [*NO_NUMBER, -0.1, 1.0],
    "sink": optional(no_tensor(HEADS)), "seed": optional(NO_INTEGER), "kernel": NO_NAME, "group": NO_GROUP,
    "plan": NO_PLAN,
}  # fmt: skip


def tensors(**given):
    return {name: no_tensor(tensor) for name, tensor in given.items()}


class Mine(ReferenceAttention):
    name = "mine"


def registered(kernel):
    """Registers a kernel, and forgets it."""
    before = list(KERNELS)
    try:
        cp.register_kernel(kernel)
    finally:
        KERNELS[:] = before


def linear(kind, operation, given, optional_tensors=(), **more):
    """A linear operation: what it is called with, and what each argument cannot be."""
    plan = PLANS[kind]
    values = {name: no_tensor(tensor) for name, tensor in given.items()}
    values |= {name: optional(values[name]) for name in optional_tensors}
    values |= {"plan": [*NO_PLAN, PLANS["attention"]], "group": NO_GROUP, "kernel": NO_NAME, "cache": NO_CACHE}
    return operation, {**given, "plan": plan}, values | more


BATCH = cp.shard_batch(STREAM, ALONE)
SLOTS = cp.GraphTables(16, 3, 2)
FILLED = cp.BatchPlan(SLOTS.layout([3, 5]), [cp.AttentionSpec(2, 2, 4, 4, scheme="a2a")])
SLOTS.load(FILLED, 0, torch.device("cpu"))
NO_WEIGHTS = [None, 5, 1.0, True, "w", [], STREAM * 1.0, torch.tensor(1.0), torch.ones(8), torch.ones(9, 1),
              torch.ones(9) + 0j, torch.ones(9, device="meta"), torch.ones(9, requires_grad=True), SPARSE, NESTED,
              object(), cp.LocalBatch]  # fmt: skip
NO_LOSSES = no_tensor(torch.ones(9))
NO_PARAMETERS = [None, 5, True, "abc", b"abc", torch.ones(2), {"weight": torch.ones(2)}, {torch.ones(2)}, [], [5],
                 [None], [SPARSE], [torch.ones(2, requires_grad=True) * 2],
                 [torch.ones(2, dtype=torch.complex64, requires_grad=True)], torch.nn.Module(), object()]  # fmt: skip
ANY_GROUP = [group for group in NO_GROUP if not isinstance(group, ThreadGroup)]
FLAGGED = {"scale": optional(NO_NUMBER), "use_qk_l2norm_in_kernel": NO_FLAG}
NO_LIMIT = [None, 5, True, "ab", [0.0, 1.0], {0.0, 1.0}, (0.0,), (0.0, 1.0, 2.0), ("a", "b"), (0, None), (True, 2.0),
            (1.0, 0.5), (-1.0, 1.0), (math.nan, 1.0), (math.inf, math.inf), (0, BEYOND**9), np.ones(2),
            (1e39, math.inf)]  # fmt: skip
TABLE = np.ones((3, 3), bool)
HEAD = {"hidden": torch.ones(9, 4), "weight": torch.ones(5, 4), "labels": torch.zeros(9, dtype=torch.int64)}
CALLS = {
    "Packing": (cp.Packing, {"lengths": [3]}, {"lengths": NO_LIST}),
    "Packing.from_cu_seqlens": (cp.Packing.from_cu_seqlens, {"cu_seqlens": [0, 5]}, {
        "cu_seqlens": [*NO_LIST, [0], [1, 4], [0, 5, 3]]}),
    "Packing.tree": (cp.Packing.tree, {"lengths": [3], "parents": [-1]}, {
        "lengths": NO_LIST, "parents": [*NO_LIST[:-1], [0], [-2], [-1, 0]], "ends": [*NO_LIST[1:], [-1], [1, 1]]}),
    "Packing.from_sequences": (cp.Packing.from_sequences, {"sequences": [[3, 4]]}, {
        "sequences": [None, 5, 2.5, True, object(), [], [5], [None], ["31"], [b"31"], [{3, 1}], [{3: 1}], [[3, True]],
                      [[3, 1.5]], [[3, None]], [["3"]], [[BEYOND]], [[2**63, 3]], [[[3]]], [MASKED],
                      [torch.tensor([3.0])]],
        "min_shared": [*NO_INTEGER, 0]}),
    **{call: (function, {"tokens": STREAM}, {
        "tokens": [None, 5, True, "1", {1}, [True], [1.0], [9], [-1], MASKED, torch.ones(2), [BEYOND]]})
       for call, function in (("Packing.documents_of", P.documents_of), ("Packing.checked_tokens", P.checked_tokens),
                              ("Layout.located", LAYOUT.located))},
    **{f"Layout.{name}": (getattr(cp.Layout, name), {"packing": P, "cp_size": 2}, {
        "packing": NO_PACKING, "cp_size": [*NO_INTEGER, 0, 1025], "align": [*NO_INTEGER, 0, 2**63 - 1]}
        | ({"mask": NO_MASK} if name == "balanced" else {}))
       for name in ("contiguous", "zigzag", "zigzag_of_pack", "striped", "balanced")},
    "Layout.from_fragments": (cp.Layout.from_fragments, {"packing": P, "fragments": [[(0, 9)]]}, {
        "packing": NO_PACKING, "align": [*NO_INTEGER, 0],
        "fragments": [None, 5, "ab", [], {}, [5], [[5]], [[(0,)]], [[(0, 9.0)]], [[("0", 9)]], [[(0, True), (1, 9)]],
                      [[(0, BEYOND)]], [[(0, 9, 9)]], {((0, 9),)}, [{(0, 9)}], [{(0, 9): 1}], [[{0, 9}]], [[None]],
                      [[(0, 8)]], [[(0, 9)], [(3, 4)]], [[(-1, 9)]], [[(0, 9)]] * 1025]}),
    "Layout.from_counts": (cp.Layout.from_counts, {"counts": [[9]]}, {
        "align": [*NO_INTEGER, 0],
        "counts": [None, 5, "ab", [], {}, [5], [[]], [[9.0]], [["9"]], [[-1], [10]], [[True]], [[1], [2, 3]],
                   [[BEYOND]], [[1]] * 1025]}),
    "Layout.padded": (LAYOUT.padded, {}, {"align": [*NO_INTEGER, 0], "min_rows": NO_INTEGER}),
    **{f"Layout.{name}": (getattr(LAYOUT, name), {"rank": 0}, {"rank": [*NO_INTEGER, 2]})
       for name in ("tokens", "positions", "document_ids", "fragments_of")},
    "Layout.shard": (LAYOUT.shard, {"tokens": STREAM, "rank": 0}, {
        "tokens": NO_ARRAY, "rank": [*NO_INTEGER, 2], "pad_value": [*NO_NUMBER, 1.5, 2**63]}),
    "Layout.labels": (LAYOUT.labels, {"tokens": STREAM, "rank": 0}, {
        "tokens": NO_TOKENS, "rank": [*NO_INTEGER, 2], "shift": [*NO_INTEGER, 0],
        "ignore_index": [value for value in NO_INTEGER if value is not NEGATIVE]}),
    "Layout.unshard": (LAYOUT.unshard, {"shards": [STREAM[:8], STREAM[:4]]}, {
        "shards": [None, 5, True, "ab", b"ab", {}, {1, 2}, [], [STREAM[:8]], [None, None], [5, 5], [[1] * 8, [1] * 4],
                   np.ones(2), torch.ones(2), [STREAM[:8], STREAM[:8]], [STREAM[:8], torch.ones(4)],
                   [STREAM[:8], STREAM[:4] * 1.0], [np.ones((8, 2)), np.ones((4, 3))], [torch.ones(8), SPARSE],
                   [torch.ones(8), torch.ones(4).double()], [torch.ones(8), torch.ones(4, device="meta")]]}),
    **{f"Mask.{name}": (getattr(cp.Mask, name), {"packing": P}, {
        "packing": NO_PACKING, "kv_packing": [*optional(NO_PACKING), cp.Packing([3])]}) for name in ("causal", "full")},
    "Mask.window": (cp.Mask.window, {"packing": P, "left": 1}, {
        "packing": NO_PACKING, "left": NO_INTEGER, "right": NO_INTEGER, "first": NO_INTEGER,
        "kv_packing": optional(NO_PACKING)}),
    "Mask.prefix": (cp.Mask.prefix, {"packing": P, "n": 1}, {
        "packing": NO_PACKING, "n": [*NO_INTEGER, *[value for value in NO_LIST if value is not NO_LIST[1]]]}),
    "Mask.chunk": (cp.Mask.chunk, {"packing": P, "size": 1}, {"packing": NO_PACKING, "size": [*NO_INTEGER, 0]}),
    "Mask.shared_question": (cp.Mask.shared_question, {"packing": P, "parts": [[5], [0], [4]]}, {
        "packing": NO_PACKING,
        "parts": [None, 5, "abc", b"abc", {}, {1}, [[5], [0]], [5, 0, 4], [[5.0], [0], [4]], [[True, 4], [0], [4]],
                  ["5", "0", "4"], [[BEYOND], [0], [4]], [[6, -1], [0], [4]], [{5}, [0], [4]], [None] * 3,
                  [[[5]], [0], [4]], [[5], [0], [1, 2]], np.array(5), np.ma.array([[5], [0], [4]]),
                  [MASKED, [0], [4]]]}),
    "Mask.from_slices": (cp.Mask.from_slices, {"packing": P, "slices": []}, {
        "packing": NO_PACKING, "kv_packing": optional(NO_PACKING),
        "slices": [None, 5, {}, "a", [5], [None], [()], [(0, 1, 0, 1)], [(0, 1, 0, 1, "half")], [(0, 1, 0, 1, 5)],
                   [(0, 1, 0, 1, ["full"])], [(0, 1.0, 0, 1, "full")], [(0, True, 0, 1, "full")],
                   [(-1, 1, 0, 1, "full")],
                   [(0, BEYOND, 0, 1, "full")], [(1, 0, 0, 1, "full")], [(0, "1", 0, 1, "full")]]}),
    "Mask.from_blocks": (cp.Mask.from_blocks, {"packing": P, "table": TABLE, "block_size": 3}, {
        "packing": NO_PACKING, "block_size": [*NO_INTEGER, 0], "causal": NO_FLAG,
        "table": [None, 5, TABLE.tolist(), TABLE * 1, torch.ones(3, 3) > 0, TABLE[:2], np.ma.array(TABLE), "all"]}),
    "Mask.named": (cp.Mask.named, {"packing": P, "spec": "causal"}, {
        "packing": NO_PACKING, "spec": NO_NAME, "kv_packing": optional(NO_PACKING)}),
    "Route.between": (cp.Route.between, {"source": LAYOUT, "target": LAYOUT, "rank": 0}, {
        "source": NO_LAYOUT[:-1], "target": [*NO_LAYOUT, cp.Layout.zigzag(P, 3)], "rank": [*NO_INTEGER, 2]}),
    "Transport": (cp.Transport, {}, {
        "name": NO_NAME, "hosts": [None, 5, "01", b"01", [0.0], [True], [1], [0, 2], [None], {0}, {0: 0}, np.array(0),
                                   np.ma.array([0, 1]), torch.tensor(0.0), [BEYOND], object(), [0]]}),
    "Transport.named": (cp.Transport.named, {"transport": "collective"}, {
        "transport": [*NO_NAME, "hierarchical", cp.Transport]}),
    "Transport.even_hosts": (cp.Transport.even_hosts, {"name": "pairwise", "cp_size": 2, "hosts": 1}, {
        "name": NO_NAME, "cp_size": [*NO_INTEGER, 0, 2**40], "hosts": [*NO_INTEGER, 0, 3]}),
    "hosts_of": (cp.hosts_of, {"group": None}, {"group": NO_GROUP[:-2]}),
    "AttentionSpec": (cp.AttentionSpec, {"heads": 2, "kv_heads": 1, "head_dim": 4}, {
        **ATTENTION, **PRICED, "mask": NO_NAME, "ulysses_degree": optional([*NO_INTEGER, 0]),
        "topology": NO_TOPOLOGY[:-2]}),
    "AttentionSpec, sparse": (cp.AttentionSpec, {"heads": 2, "kv_heads": 1, "head_dim": 4, "topk": 3}, CHOOSING),
    "LinearSpec": (cp.LinearSpec, {"kind": "gdn", "heads": 2, "key_heads": 1, "head_dim": 4, "value_head_dim": 4}, {
        "kind": NO_NAME, "mode": NO_NAME, **WIRE, "run": [None, 5, [], "gdn", (5,), {1}],
        **{name: [*NO_INTEGER, 0]
           for name in ("heads", "key_heads", "head_dim", "value_head_dim", "conv_width", "item_size")},
        "num_householder": [*NO_INTEGER, 0, 2],  # it is of gdp
        **{name: optional(NO_INTEGER) for name in ("hidden_size", "head_chunks")}, "hardware": NO_MACHINE,
        "topology": NO_TOPOLOGY[:-2]}),
    "AttentionSpec.plan": (cp.AttentionSpec(2, 2, 4, 4).plan, {"layout": LAYOUT}, {
        "layout": NO_LAYOUT[:-1], "lengths": NO_LENGTHS}),
    "LinearSpec.plan": (cp.LinearSpec("gdn", 2, 2, 4, 4).plan, {"layout": LAYOUT}, {"layout": NO_LAYOUT[:-1]}),
    "Mask.unpadded": (cp.Mask.causal(P).unpadded, {"lengths": [5, 0, 3]}, {"lengths": [None, *NO_LENGTHS]}),
    "BatchPlan": (cp.BatchPlan, {"layout": LAYOUT}, {
        "layout": NO_LAYOUT[:-1], "lengths": NO_LENGTHS,
        "slots": [None, 5, "ab", [5], [None], [cp.AttentionSpec], ["attention"], [[]], {SLOT}]}),
    "BatchPlan.plan": (cp.BatchPlan(LAYOUT).plan, {"slot": cp.AttentionSpec(2, 2, 4, 4)}, {
        "slot": [None, 5, "attention", [], {}, cp.AttentionSpec]}),
    "BatchPlan.inside": (cp.BatchPlan(LAYOUT).inside, {"slot": cp.LinearSpec("gdn", 2, 2, 4, 4)}, {
        "slot": [None, 5, "attention", [], {}, cp.LinearSpec]}),
    "check_agreement": (cp.check_agreement, {"plan": PLANS["gdn"], "group": None}, {
        "plan": NO_PLAN, "group": NO_GROUP, "seed": optional(NO_INTEGER),
        "tensors": [5, "labels", [torch.zeros(2)], {"labels": [1, 2]}, {5: torch.zeros(2)},
                    {"labels": torch.zeros(2, device="meta")}]}),
    "compare_calls": (cp.compare_calls, {"group": ThreadGroup.create(1)[0], "compare": True}, {
        "group": [None, *(value for value in NO_GROUP if not isinstance(value, ThreadGroup))], "compare": NO_FLAG}),
    "Plan.explain": (PLANS["attention"].explain, {"candidates": True}, {
        "item_size": [*NO_INTEGER, 0], "candidates": NO_FLAG}),
    **{f"Plan.{name}": (getattr(PLANS["attention"], name), more, {"item_size": [*NO_INTEGER, 0]})
       for name, more in (("bytes_sent", {"item_size": 2, "forward": True}),
                          ("bytes_needed", {"item_size": 2, "forward": True}))},
    **{f"Plan.{name}": (getattr(PLANS["attention"], name), {"rank": 0}, {"rank": [*NO_INTEGER, 1]})
       for name in ("heads_of", "groups_of")},
    "choose_layout": (cp.choose_layout, {"packing": P, "cp_size": 2, "slots": [cp.AttentionSpec(2, 2, 4, 4)]}, {
        "packing": NO_PACKING, "cp_size": [*NO_INTEGER, 0, 1025], "align": [*NO_INTEGER, 0], "min_rows": NO_INTEGER,
        "slots": [None, 5, "ab", [5], [None], [cp.AttentionSpec], ["attention"], [[]], []],
        "mask": optional(NO_MASK)}),
    "plan_attention": (cp.plan_attention, {"packing": P, "layout": LAYOUT, **SHAPES}, {
        "packing": NO_PACKING, "layout": NO_LAYOUT, "mask": NO_MASK, **ATTENTION, **PRICED}),
    "plan_held_attention": (cp.plan_held_attention, {"layout": LAYOUT, "held": KEYS, **SHAPES}, {
        "layout": NO_LAYOUT[:-1], "held": NO_PACKING, "mask": NO_MASK, **ATTENTION}),
    "held_attention": (cp.held_attention, {
        **QKV, **HELD, "plan": cp.plan_held_attention(ALONE, KEYS, **SHAPES)},
        tensors(**QKV, **HELD) | {name: bad for name, bad in SOFTMAX.items() if name not in ("dropout", "seed")}),
    "plan_attention, cross": (cp.plan_attention, CROSS | SHAPES, {
        "kv_packing": [*NO_PACKING, cp.Packing([3])], "kv_layout": [*NO_LAYOUT, LAYOUT],
        "mask": [*NO_MASK, cp.Mask.causal(P)]}),
    "plan_attention, product": (cp.plan_attention, {
        "packing": P, "layout": cp.Layout.zigzag(P, 4), "scheme": "a2a+p2p", **SHAPES}, {
        "ulysses_degree": optional([*NO_INTEGER, 0, 1, 2.0, 4])}),
    "plan_linear": (cp.plan_linear, {"packing": P, "layout": LAYOUT, "kind": "gdn", **SHAPES}, {
        "packing": NO_PACKING, "layout": NO_LAYOUT, "kind": NO_NAME, "mode": NO_NAME, **WIRE,
        **{name: [*NO_INTEGER, 0] for name in ("heads", "head_dim", "conv_width", "item_size", "layers")},
        **{name: optional([*NO_INTEGER, 0]) for name in ("key_heads", "value_head_dim", "hidden_size", "head_chunks")},
        "hardware": NO_MACHINE, "topology": NO_TOPOLOGY}),
    "plan_linear, mamba": (cp.plan_linear, {"packing": P, "layout": LAYOUT, "kind": "mamba", "state": 4, **SHAPES}, {
        "state": [*NO_INTEGER, 0], "groups": optional([*NO_INTEGER, 0, 3])}),
    "plan_linear, gdp": (cp.plan_linear, {"packing": P, "layout": LAYOUT, "kind": "gdp", **SHAPES}, {
        "num_householder": optional([*NO_INTEGER, 0, 65])}),
    "plan_linear, conv1d": (cp.plan_linear, {"packing": P, "layout": LAYOUT, "kind": "conv1d", "channels": 4}, {
        "channels": [*NO_INTEGER, 0]}),
    "attention": (cp.attention, {**QKV, "plan": PLANS["attention"]}, tensors(**QKV) | SOFTMAX | {
        "return_lse": NO_FLAG, "cache": NO_CACHE}),
    "Cache": (cp.Cache, {"num_documents": 2}, {
        "num_documents": [*NO_INTEGER, 0], "cp_size": [*NO_INTEGER, 0, 1025], "block_size": [*NO_INTEGER, 0]}),
    "Cache.extend": (CACHE.extend, {"layout": ALONE}, {"layout": [*NO_LAYOUT, LAYOUT]}),
    "Cache.positions": (BEGUN.positions, {"rank": 0}, {"rank": [*NO_INTEGER, 1]}),
    "Cache.layer": (CACHE.layer, {"number": 0}, {"number": NO_INTEGER}),
    "Cache.add": (lambda count: cp.Cache(3).add(count), {"count": 1}, {"count": [*NO_INTEGER, 0]}),
    "Cache.drop": (lambda documents: cp.Cache(3).drop(documents), {"documents": [0]}, {
        "documents": [value for value in NO_LIST if not isinstance(value, list) or value] + [[0, 1, 2], [3], [-1]]}),
    "latent_attention": (cp.latent_attention, {**LATENT, "plan": PLANS["latent"]}, tensors(**LATENT) | SOFTMAX),
    "plan_attention, sparse": (cp.plan_attention, {"packing": P, "layout": LAYOUT, "topk": 3, **SHAPES}, CHOOSING),
    "sparse_attention": (cp.sparse_attention, {**QKV, **INDEX, "plan": PLANS["sparse"]}, {
        **tensors(**QKV, **INDEX), "plan": [*NO_PLAN, PLANS["attention"]], "group": NO_GROUP,
        "softmax_scale": optional(NO_NUMBER), "index_relu": NO_FLAG, "index_loss": optional(NO_NAME),
        "chosen": [torch.zeros(9, 3, dtype=torch.int32)], "up": optional(no_tensor(ones(2)))}),
    "sparse_attention, chosen": (cp.sparse_attention, {
        **QKV, "chosen": torch.zeros(9, 3, dtype=torch.int32), "plan": PLANS["chosen"]}, {
        "chosen": [None, 5, True, "q", [], torch.zeros(9, 3), torch.zeros(9, 2, dtype=torch.int32), SPARSE, NESTED]}),
    "sparse_attention, blocks": (cp.sparse_attention, {**QKV, "plan": PLANS["blocks"]}, {
        "chosen": [5, True, "q", [], torch.zeros(9, 2, 3), torch.zeros(9, 3, dtype=torch.int32), SPARSE, NESTED]}),
    "projected_attention": (cp.projected_attention, {
        "project": lambda heads, kv_heads: tuple(QKV.values()), "plan": PLANS["attention"]}, {
        "project": [None, 5, "q", QKV["q"], list(QKV.values()), lambda heads, kv_heads: None,
                    lambda heads, kv_heads: QKV["q"], lambda heads, kv_heads: {}]} | SOFTMAX),
    "merge": (cp.merge, {"parts": [(QKV["q"], ones(2))] * 2}, {
        "parts": [None, 5, True, "ab", [], (), {}, torch.ones(2), object(), [5], [None], ["ab"], [[]], [(QKV["q"],)],
                  *([(x, ones(2))] for x in no_tensor(QKV["q"])), *([(QKV["q"], x)] for x in no_tensor(ones(2)))]}),
    "register_kernel": (registered, {"kernel": Mine()}, {
        "kernel": [None, 5, True, "reference", "mine", Mine, [Mine()], ReferenceAttention(), object()]}),
    "gather": (cp.gather, {"local": ones(2), "layout": ALONE, "group": None}, {
        "local": [*NO_ARRAY, STREAM], "layout": NO_LAYOUT[:-1],
        "group": NO_GROUP, "same_loss": NO_FLAG, "transport": NO_TRANSPORT}),
    "shard_batch": (cp.shard_batch, {"tokens": STREAM, "layout": ALONE}, {
        "tokens": [*NO_TOKENS, STREAM.reshape(3, 3), STREAM[:, None], ON_META], "layout": NO_LAYOUT[:-1],
        "group": NO_GROUP,
        "slots": [None, 5, "ab", [5], [None], [cp.AttentionSpec], ["attention"], [[]]],
        "labels": [*optional(NO_TOKENS), STREAM[:, None], ON_META],
        "loss_mask": [*optional(NO_ARRAY), ON_META, STREAM[:, None], STREAM * 1j, STREAM.astype(str),
                      STREAM.astype("m8[s]"), torch.ones(9) * 1j, torch.ones(9) * math.nan, (STREAM + 1) * math.inf,
                      STREAM * 1e300],
        "ignore_index": [value for value in NO_INTEGER if value is not NEGATIVE], "seed": NO_INTEGER, "agree": NO_FLAG,
        "labels_may_be_tokens": NO_FLAG,
        "device": [None, True, 1.5, "", "gpu", b"cpu", [], {"cpu"}, object(), torch.device],
        "into": [5, True, "slots", [], {}, cp.GraphTables]}),
    "GraphTables": (cp.GraphTables, {"capacity_tokens": 16, "capacity_documents": 3, "cp_size": 2}, {
        "capacity_tokens": [*NO_INTEGER, 0, 15], "capacity_documents": [*NO_INTEGER, 0], "cp_size": [*NO_INTEGER, 0],
        "align_documents": [*NO_INTEGER, 0], "longest": [*optional(NO_INTEGER), 0, 17],
        "layout": [*NO_NAME, "balanced"]}),
    "GraphTables.layout": (SLOTS.layout, {"lengths": [3]}, {"lengths": [*NO_LIST, [17], [1, 1, 1, 1], [0]]}),
    "GraphTables.load": (SLOTS.load, {"plans": FILLED, "rank": 0, "device": torch.device("cpu")}, {
        "plans": [None, 5, [], FILLED.plans[0], cp.BatchPlan], "rank": [*NO_INTEGER, 2],
        "device": [None, True, 1.5, "cpu", torch.device],
        "rows": [5, True, [], {"x": 5}, {"x": torch.ones(3)}, [STREAM]]}),
    "GraphTables.check_loaded": (SLOTS.check_loaded, {"plans": FILLED}, {
        "plans": [None, 5, [], FILLED.plans[0], BATCH.plans, cp.BatchPlan]}),
    "LocalBatch.ahead": (BATCH.ahead, {"places": 1}, {"places": [-1, *NO_INTEGER]}),
    "LocalBatch.plan": (BATCH.plan, {"slot": cp.AttentionSpec(2, 2, 4, 4)}, {
        "slot": [None, 5, "attention", [], {}, cp.AttentionSpec]}),
    "token_loss": (cp.token_loss, {"losses": torch.ones(9), "weights": BATCH}, {
        "losses": NO_LOSSES, "weights": NO_WEIGHTS, "group": ANY_GROUP, "averaged_gradients": NO_FLAG,
        "num_tokens": optional(NO_INTEGER)}),
    "linear_cross_entropy": (cp.linear_cross_entropy, HEAD, {
        "hidden": no_tensor(torch.ones(9, 4), fewer=False), "weight": [
            *no_tensor(torch.ones(5, 4), fewer=False), torch.ones(5, 3), torch.ones(5, 4).double()],
        "labels": [None, 5, True, "abc", [0] * 9, NESTED, torch.ones(9), torch.zeros(8, dtype=torch.int64),
                   torch.zeros(9, 1, dtype=torch.int64), torch.zeros(9, dtype=torch.int32), ON_META, object()],
        "bias": optional(no_tensor(torch.ones(5))), "chunk_rows": [*NO_INTEGER, 0], "scale": NO_NUMBER,
        "softcap": optional([*NO_NUMBER, 0.0, -1.0]), "ignore_index": [None, True, 1.5, "1", [1]]}),
    "run_in_chunks": (lambda **given: cp.run_in_chunks(**given | {
        "module": given["module"]() if given["module"] is torch.nn.Identity else given["module"]}),
        {"module": torch.nn.Identity, "chunk_rows": 2}, {
            "module": [None, 5, True, "mlp", [], torch.ones(2), torch.nn.Linear, cp.attention],
            "chunk_rows": [*NO_INTEGER, 0]}),
    "saved_on_host": (cp.saved_on_host, {}, {"min_bytes": [*NO_INTEGER, -1]}),
    "reduce_gradients": (cp.reduce_gradients, {"parameters": [torch.ones(2, requires_grad=True)]}, {
        "parameters": NO_PARAMETERS, "group": ANY_GROUP}),
    "relayout": (cp.relayout, {"local": ones(2), "source": ALONE, "target": ALONE}, {
        "local": [*NO_ARRAY, STREAM], "source": NO_LAYOUT[:-1], "target": [*NO_LAYOUT, LAYOUT], "group": NO_GROUP,
        "transport": NO_TRANSPORT}),
    "gated_delta_rule": linear("gdn", cp.gated_delta_rule, {**QKV, "g": -ones(2), "beta": ones(2)}, **FLAGGED),
    "kda": linear("kda", cp.kda, {**QKV, "g": -ones(2, 4), "beta": ones(2)}, **FLAGGED),
    "gdn2": linear("gdn2", cp.gdn2, {**QKV, "g": -ones(2, 4), "b": ones(2, 4), "w": ones(2, 4)}, **FLAGGED),
    "gated_delta_product": linear(
        "gdp", cp.gated_delta_product, {**QKV, "g": -ones(2), "beta": ones(2)}, **FLAGGED),
    "mamba2": linear("mamba", cp.mamba2, {
        "x": ones(2, 4), "dt": ones(2), "A": -HEADS, "B": ones(1, 4), "C": ones(1, 4), "D": HEADS, "dt_bias": HEADS},
        ("D", "dt_bias"), dt_softplus=NO_FLAG, dt_limit=NO_LIMIT),
    "gated_delta_net": linear("gdn", cp.gated_delta_net, {
        "qkv": ones(24), "beta": ones(2), "alpha": ones(2), **MIXER, "dt_bias": HEADS},
        ("conv_bias",), scale=FLAGGED["scale"], allow_neg_eigval=NO_FLAG),
    "kda_mixer": linear("kda", cp.kda_mixer, {
        "qkv": ones(24), "g": ones(8), "beta": ones(2), **MIXER, "dt_bias": torch.ones(8)},
        ("conv_bias",), scale=FLAGGED["scale"], lower_bound=optional([*NO_NUMBER, 0.0, 1.0])),
    "gdn2_mixer": linear("gdn2", cp.gdn2_mixer, {
        "qkv": ones(24), "g": ones(8), "b": ones(8), "w": ones(8), **MIXER, "dt_bias": torch.ones(8)},
        ("conv_bias",), scale=FLAGGED["scale"]),
    "gated_delta_product_mixer": linear("gdp", cp.gated_delta_product_mixer, {
        "vkq": ones(24), "beta": ones(2), "alpha": ones(2), **MIXER, "dt_bias": HEADS},
        ("conv_bias",), scale=FLAGGED["scale"]),
    "mamba2_mixer": linear("mamba", cp.mamba2_mixer, {
        "xBC": ones(16), "dt": ones(2), **MIXER, "conv": TAPS[:16], "conv_bias": BIAS[:16], "dt_bias": HEADS,
        "D": HEADS}, ("conv_bias", "D"), dt_limit=NO_LIMIT),
    "causal_conv1d": linear("conv1d", cp.causal_conv1d, {
        "x": ones(6), "weight": TAPS[:6], "bias": BIAS[:6]}, ("bias",), activation=optional(NO_NAME)),
}  # fmt: skip


NO_SIZE, NO_EPS = [*NO_INTEGER, 0], [*NO_NUMBER, 0.0, -1.0, 2.0]
MADE = {"eps": NO_EPS, "kernel": NO_NAME, "dtype": optional([5, True, "float32", torch.int64, torch.complex64, float]),
        "device": [True, 1.5, "", "gpu", b"cpu", [], {"cpu"}, object(), torch.device],
        "hidden_size": NO_SIZE}  # fmt: skip
LINEAR_MADE = MADE | {"heads": NO_SIZE, "head_dim": NO_SIZE, "conv_width": NO_SIZE, "mode": NO_NAME}
LAYERS = {
    "nn.Attention": (cp.nn.Attention, {"hidden_size": 8, "heads": 2}, MADE | {
        "heads": [*NO_SIZE, 3], "kv_heads": [*optional(NO_SIZE), 3], "head_dim": [*optional(NO_SIZE), 3],
        "rotary_dim": [*optional(NO_INTEGER), 3, 6], "rope_theta": [*NO_NUMBER, 0.0, 1.0, -5.0], "qk_norm": NO_FLAG,
        "bias": NO_FLAG, "mask": NO_NAME, "scheme": NO_NAME}),
    "nn.GatedDeltaNet": (cp.nn.GatedDeltaNet, {"hidden_size": 8, "heads": 2, "head_dim": 4}, LINEAR_MADE | {
        "key_heads": [*optional(NO_SIZE), 3], "value_head_dim": optional(NO_SIZE)}),
    "nn.GatedDeltaNet2": (cp.nn.GatedDeltaNet2, {"hidden_size": 8, "heads": 2, "head_dim": 4}, LINEAR_MADE | {
        "key_heads": [*optional(NO_SIZE), 3], "value_head_dim": optional(NO_SIZE)}),
    "nn.GatedDeltaProduct": (cp.nn.GatedDeltaProduct, {"hidden_size": 8, "heads": 2, "head_dim": 4}, LINEAR_MADE | {
        "key_heads": [*optional(NO_SIZE), 3], "value_head_dim": optional(NO_SIZE), "num_householder": [*NO_SIZE, 65]}),
    "nn.Mamba2": (cp.nn.Mamba2, {"hidden_size": 8, "heads": 2, "head_dim": 4, "state": 4}, LINEAR_MADE | {
        "state": NO_SIZE, "groups": [*NO_SIZE, 3], "conv_bias": NO_FLAG}),
    "nn.KimiDeltaAttention": (
        cp.nn.KimiDeltaAttention, {"hidden_size": 8, "heads": 2, "head_dim": 4}, LINEAR_MADE),
    "nn.LinearRun": (cp.nn.LinearRun, {"blocks": [cp.nn.Mamba2(8, 2, head_dim=4, state=4)]}, {
        "blocks": [None, 5, True, "blocks", [], {}, [5], [None], [torch.nn.Linear(8, 8)], torch.nn.Linear(8, 8),
                   [cp.nn.Mamba2], [cp.nn.Attention(8, 2)]]}),
}  # fmt: skip
CALLS |= LAYERS
CALLS |= {
    f"{name}.forward": (make(**given), {"hidden": ones(8), "batch": BATCH}, {
        "hidden": no_tensor(ones(8)), "batch": [None, 5, True, "batch", P, ALONE, [], {}, cp.LocalBatch],
        "group": NO_GROUP})
    for name, (make, given, _) in LAYERS.items()
}  # fmt: skip

# What the error calls an argument, where that is not its name in the call.
NAMES = {
    ("Mask.named", "spec"): "mask",
    ("Transport", "name"): "transport",
    ("Transport.even_hosts", "name"): "transport",
}

# Arguments of which Python says as well what is wrong if they are of another type.
BY_PYTHON = {
    ("BatchPlan", "slots"), ("GraphTables.load", "plans"), ("Packing.from_sequences", "sequences"),
    ("projected_attention", "project"), ("shard_batch", "slots"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "argument"), [(call, name) for call, (_, _, bad) in CALLS.items() for name in bad])
def test_rejects_what_an_argument_cannot_be(call, argument):
    function, given, bad = CALLS[call]
    name, wrong = NAMES.get((call, argument), argument), []
    for value in bad[argument]:
        try:
            result = function(**given | {argument: value})
        except ArgumentError as error:
            if error.argument != name and not error.argument.startswith(f"{name}["):
                wrong.append(f"{value!r} is refused as another argument: {error}")
        except Exception as error:
            if (call, argument) not in BY_PYTHON or not isinstance(error, TypeError | AttributeError):
                wrong.append(f"{value!r} raises {type(error).__name__}: {error}")
        else:
            wrong.append(f"{value!r} is accepted and gives {result!r}"[:300])
    assert wrong == []


@pytest.mark.parametrize("call", CALLS)
def test_what_is_refused_is_all_that_is_wrong_with_a_call(call):
    function, given, _ = CALLS[call]
    function(**given)


def test_numbers_of_numpy_are_numbers():
    layout = cp.Layout.zigzag(P, np.int32(2), align=np.uint8(4))
    assert layout == LAYOUT
    assert layout.shard(STREAM, np.int64(0), pad_value=np.int8(-3)).tolist() == [0, 1, 4, 5, 8, -3, -3, -3]
    options = {"softcap": np.float16(0), "dropout": np.float32(0), "seed": np.uint64(2**64 - 1)}
    found = cp.attention(**QKV, plan=PLANS["attention"], softmax_scale=np.float32(0.5), **options)
    assert torch.equal(found, cp.attention(**QKV, plan=PLANS["attention"], softmax_scale=0.5))


# Their constructors are called with what others have checked; their methods are here.
NOT_CALLED_BY_USERS = {"Layout", "LocalBatch", "Mask", "Packing.refuse_branches", "Plan", "Route"}
# Asked of plans and transports by what runs them.
NOT_CHECKED = {"self", "cls", "forward", "projected", "chunk", "ranks", "beside"}


def parameters():
    """Every parameter of every public call."""
    names = [name for name in cp.__all__ if not inspect.ismodule(getattr(cp, name))]
    for name in (*names, *(f"nn.{layer}" for layer in cp.nn.__all__)):
        public = attrgetter(name)(cp)
        is_error = inspect.isclass(public) and issubclass(public, Exception)
        if name not in NOT_CALLED_BY_USERS and not is_error:
            yield from ((name, parameter) for parameter in inspect.signature(public).parameters)
        if inspect.isclass(public) and not issubclass(public, Exception):
            own = {key: value for key, value in vars(public).items() if not key.startswith("_")}
            for method, value in own.items():
                value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if inspect.isfunction(value) and f"{name}.{method}" not in NOT_CALLED_BY_USERS:
                    yield from ((f"{name}.{method}", parameter) for parameter in inspect.signature(value).parameters)


def test_every_argument_of_every_public_call_is_here():
    here = {(call.partition(",")[0], argument) for call, (_, _, bad) in CALLS.items() for argument in bad}
    assert [pair for pair in parameters() if pair not in here and pair[1] not in NOT_CHECKED] == []
