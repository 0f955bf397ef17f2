"""Documents that branch: every layer gives each root-to-leaf path what it gives that document alone."""

import gc
import itertools
import random
import re
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from megatron_cp import attention, plan_attention
from megatron_cp.batch.graph_tables import GraphTables
from megatron_cp.errors import PlanMismatchError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.testing.parity import Case, draw, run_linear
from tests import fuzz_check
from tests.counts import calls_of, peak_of
from tests.covering import covering
from tests.fuzz_cases import LAYOUTS, Call, layout_named
from tests.fuzz_cases import Case as FuzzCase
from tests.fuzz_draw import forest
from tests.mask_oracle import pairs_of
from tests.refusals import rejects

FORESTS = {
    "star": ((7, 3, 5, 1, 4), (-1, 0, 0, 0, 0)),
    "deep": ((3, 2, 2, 1, 4, 6, 2, 5), (-1, 0, 1, 2, 2, 1, -1, 6)),
    "two, and empty segments": ((0, 4, 3, 0, 5, 1, 9, 2), (-1, 0, 1, 1, 3, 3, -1, 6)),
}
WAYS = [("attention", scheme) for scheme in ("p2p", "a2a", "all_gather", "exact", "tiled")]
WAYS += [
    (operation, mode)
    for operation in ("gated_delta_net", "kda_mixer", "mamba2_mixer", "causal_conv1d")
    for mode in ("headwise", "chunkwise")
]
RANKS = [(1, "contiguous"), (3, "zigzag"), (2, "balanced"), (5, "random")]
SIZES = {"heads": 4, "groups": 2, "head_dim": 4, "value_head_dim": 4}


@pytest.mark.parametrize(("name", "way", "ranks"), covering(list(FORESTS), WAYS, RANKS), ids=str)
def test_layers_equal_each_document_alone(name, way, ranks):
    (lengths, parents), (operation, scheme), (size, layout) = FORESTS[name], way, ranks
    sizes = SIZES | ({"groups": 4} if operation == "kda_mixer" else {})
    fuzz_check.check(FuzzCase(size, (Call(operation, lengths, parents, layout, scheme=scheme, **sizes),)))


def drawn(count=24):
    """Random forests, and documents without branches among them, each with its tokens' paths: the tokens up to it."""
    for seed in range(count):
        lengths, parents = forest(random.Random(seed))
        if seed % 8 == 0:
            parents = (-1,) * len(lengths)
        ends, last, found = list(itertools.accumulate(lengths)), [], []
        for end, length, parent in zip(ends, lengths, parents, strict=True):
            path = last[parent] if parent >= 0 else []
            for token in range(end - length, end):
                path = [*path, token]
                found.append(path)
            last.append(path)
        yield seed, Packing.tree(lengths, parents), found


def layouts_of(seed, packing):
    for number, name in enumerate(LAYOUTS):
        if (number + seed) % 4 == 0:
            yield layout_named(name, packing, (1, 2, 3, 5, 8)[(number + seed) % 5], seed=seed)


def test_chains_are_documents():
    for lengths, parents, documents in (
        ([3, 2, 4], [-1, 0, 1], [9]),
        ([3, 2, 4, 1, 1], [-1, 0, -1, 2, 3], [5, 6]),
        ([3, 0, 4, 0], [-1, 0, 1, 2], [7]),
        ([0, 5, 2], [-1, 0, -1], [5, 2]),
        ([2, 1], [-1, -1], [2, 1]),
    ):
        chain, plain = Packing.tree(lengths, parents), Packing(documents)
        assert chain == plain
        assert hash(chain) == hash(plain)
        assert chain.branches is None
    assert Packing.tree([3, 2], [-1, 0], [1, 1]) != Packing([5])  # a document ends within another
    assert Packing.tree([3, 2], [-1, 0], [0, 2]) != Packing([5])
    assert Packing.tree([3, 2], [-1, -1]) != Packing.tree([3, 2], [-1, 0])


def test_positions_and_copies_are_those_of_paths():
    for seed, packing, path in drawn():
        assert packing.positions().tolist() == [len(tokens) - 1 for tokens in path]
        if packing.branches is not None:
            assert packing.branches.predecessors.tolist() == [(tokens[-2:-1] or [-1])[0] for tokens in path]
            call = Call("attention", tuple(packing.branches.lengths), tuple(packing.branches.parents))
            held = [token for tokens in call.paths() for token in tokens]
            assert packing.copies().tolist() == [held.count(token) for token in range(packing.total)]
        for layout in layouts_of(seed, packing):
            for rank in range(layout.cp_size):
                expected = [len(path[token]) - 1 for token in layout.tokens(rank)]
                assert layout.positions(rank)[: len(expected)].tolist() == expected


MASKS = {
    "causal": lambda own, keys: keys,
    "window:3": lambda own, keys: keys[-3:],
    "window:-1,0": lambda own, keys: keys,
    "window:0,0": lambda own, keys: keys[-1:],
    "first:2+window:4,0": lambda own, keys: [*keys[:2], *keys[2:][-5:]],
    "chunk:3": lambda own, keys: keys[own // 3 * 3 :],
}


@pytest.mark.parametrize("spec", MASKS)
def test_queries_see_their_paths_alone(spec):
    for _, packing, path in drawn():
        mask, seen = Mask.named(packing, spec), np.zeros((packing.total, packing.total), dtype=int)
        for query, keys in enumerate(path):
            seen[query, MASKS[spec](len(keys) - 1, keys)] = 1
        assert np.array_equal(pairs_of(mask.bands, packing.total, packing.total), seen)
        assert mask.area == seen.sum()
        assert mask.seen.tolist() == seen.sum(1).tolist()
        assert re.fullmatch(mask.name, spec) or Mask.named(packing, mask.name) == mask


@pytest.mark.parametrize("leaf_first", [True, False])
@pytest.mark.parametrize("spec", ["causal", "window:20", "window:1000", "first:4+window:20,0", "chunk:64"])
def test_bands_calls_and_memory_grow_no_faster_than_levels(spec, leaf_first):
    """Looks at 500 levels, each of which has a leaf beside the next level, behind it at once or at the very end."""
    spine = range(0, 999, 2) if leaf_first else range(500)
    parents = [-1, *np.repeat(spine[:-1], 2)] if leaf_first else [*range(-1, 499), *spine[-2::-1]]
    packing, found = Packing.tree([7 if segment in spine else 3 for segment in range(999)], parents), []
    runs = packing.branches.runs.starts.size
    assert runs == 999
    assert peak_of(lambda: found.append(Mask.named(packing, spec))) < 1_000 * runs
    assert len(found[0].bands) < 3 * runs
    assert calls_of(lambda: Mask.named(packing, spec)) < 100 * runs


TREE, PLAIN = Packing.tree([3, 2, 4], [-1, 0, 0]), Packing([9])
OTHER_ENDS = Packing.tree([3, 2, 4], [-1, 0, 1], [1, 1, 1])
LAYOUT, SLOTS = Layout.contiguous(TREE, 2), GraphTables(16, 4, 2)
BRANCH = "where documents branch"


def planned(queries, keys):
    keys_too = {"kv_packing": keys, "kv_layout": Layout.contiguous(keys, 2)}
    return plan_attention(queries, Layout.contiguous(queries, 2), heads=2, head_dim=4, **keys_too)


MASKS_OF_KEYS = (
    Mask.causal, Mask.full, lambda queries, keys: Mask.window(queries, 2, kv_packing=keys),
    lambda queries, keys: Mask.from_slices(queries, [], keys), planned,
)  # fmt: skip
REFUSED = [
    # What is no tree: a parent after its child, and so on.
    (r"parents\[1\]: got 2", Packing.tree, [3, 2, 4], [-1, 2, 0]),
    (r"parents\[0\]: got 0", Packing.tree, [3, 2], [0, 0]),
    ("parents: got 'segment 2 after one of another tree", Packing.tree, [3, 2, 4], [-1, -1, 0]),
    ("parents: got .* an integer for each of 2 segments", Packing.tree, [3, 2], [-1]),
    ("ends: got .* a number of documents for each of 3 segments", Packing.tree, [3, 2, 4], [-1, 0, 0], [1, 2, 2**31]),
    # Masks without a meaning along paths.
    ("mask: got 'full'", Mask.full, TREE),
    ("mask: got 'prefix'", Mask.prefix, TREE, 2),
    ("mask: got 'window:2,1'", Mask.window, TREE, 2, 1),
    ("mask: got 'window:2,-1'", Mask.window, TREE, 2, -1),
    ("mask: got 'strided'", Mask.named, TREE, "strided"),
    ("mask: got 'blocks'", partial(Mask.from_blocks, causal=True), TREE, np.ones((3, 3), dtype=bool), 3),
    ("mask: got 'shared_question'", Mask.shared_question, TREE, [[3, 2, 4]]),
    # Keys of their own.
    *((BRANCH, make, *of) for make in MASKS_OF_KEYS for of in ((TREE, PLAIN), (PLAIN, TREE), (TREE, OTHER_ENDS))),
    ("layout: got", lambda: plan_attention(TREE, Layout.contiguous(PLAIN, 2), heads=2, head_dim=4)),
    # What takes documents end to end.
    (f"layout: got .* shard_batch {BRANCH}", LAYOUT.labels, np.arange(9), 0),
    (f"layout: got .* no numbers of documents {BRANCH}", LAYOUT.document_ids, 0),
    (f"lengths: got .* {BRANCH}", Mask.causal(TREE).unpadded, [9]),
    (f"lengths: got .* no GraphTables {BRANCH}", SLOTS.layout, TREE),
]


@pytest.mark.parametrize("row", REFUSED)
def test_rejects_what_is_no_tree_and_what_trees_do_not_have(row):
    rejects(*row)


def test_documents_that_do_not_branch_have_graph_tables():
    assert SLOTS.layout(Packing([3, 2])) == SLOTS.layout([3, 2])


def test_ranks_with_other_trees_are_told_apart():
    def attend(group):
        layout = Layout.contiguous((TREE, OTHER_ENDS)[group.rank], 2)
        plan = plan_attention(layout.packing, layout, heads=2, head_dim=4, scheme="p2p")
        x = torch.zeros(int(layout.row_counts[group.rank]), 2, 4)
        with pytest.raises(PlanMismatchError):
            attention(x, x, x, plan, group)

    run_ranks(attend, 2)


def test_tables_of_trees_end_with_their_batch():
    """Without the garbage collector, which training jobs switch off."""
    packings = []

    def step(group, mode):
        case = Case("gdn", 2, (7, 3, 5), scheme=mode, parents=(-1, 0, 0), heads=2, groups=2, head_dim=4)
        plan, problem = case.plan(), draw(case)
        inputs = {name: plan.layout.shard(x, group.rank).requires_grad_() for name, x in problem.inputs.items()}
        run_linear(group, case, plan, inputs, problem.parameters).sum().backward()
        packings.append(weakref.ref(plan.packing))

    gc.collect()
    gc.disable()
    try:
        for mode in ("headwise", "chunkwise"):
            run_ranks(step, 2, mode)
        assert [reference() for reference in packings] == [None] * 4
    finally:
        gc.enable()
