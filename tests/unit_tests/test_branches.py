"""Documents that branch: every layer gives each root-to-leaf path what it gives that document alone."""

import functools
import gc
import itertools
import random
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_cp import attention, plan_attention
from megatron_cp.batch.graph_tables import GraphTables
from megatron_cp.errors import PlanMismatchError
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.testing.parity import Case, Problem, draw, run_layer, run_linear, whole
from tests import isolation, stock_layers
from tests.counts import calls_of, peak_of
from tests.covering import covering
from tests.fuzz_cases import LAYOUTS, layout_named
from tests.fuzz_draw import forest
from tests.mask_oracle import pairs_of
from tests.refusals import refusal_of, rejects


def paths(packing):
    """Returns the stream's tokens of each root-to-leaf path, found from predecessors alone."""
    branches = packing.branches
    inner = set(branches.parents.tolist())
    found = []
    for leaf in range(branches.lengths.size):
        if leaf not in inner:
            segment, tokens = leaf, []
            while segment >= 0:
                start = int(branches.lengths[:segment].sum())
                tokens = [*range(start, start + int(branches.lengths[segment])), *tokens]
                segment = int(branches.parents[segment])
            found.append(tokens)
    return found


@functools.cache
def documents_alone(case):
    """Runs each path as a document of its own; a shared token's output gradient counts in one of them."""
    problem, packing = draw(case), case.packing
    out, gradients, done = torch.zeros_like(problem.output_gradient), {}, set()
    for tokens in paths(packing):
        if not tokens:
            continue
        alone = replace(case, lengths=(len(tokens),), parents=None)
        gradient = problem.output_gradient[tokens].clone()
        gradient[[place for place, token in enumerate(tokens) if token in done]] = 0
        inputs = {name: x[tokens] for name, x in problem.inputs.items()}
        results = run_layer(ThreadGroup.create(1)[0], alone, Problem(inputs, problem.parameters, gradient))
        for name, value in results.items():
            if name == "out":
                out[tokens] = value
            elif name.removeprefix("d_") in problem.inputs:
                gradients.setdefault(name, torch.zeros_like(problem.inputs[name.removeprefix("d_")]))[tokens] += value
            else:
                gradients[name] = gradients.get(name, 0) + value
        done |= set(tokens)
    return {"out": out, **gradients}


def error(case):
    found = whole(case, run_ranks(lambda group: run_layer(group, case), case.cp))
    one_rank = {"cp": 1, "layout": "contiguous", "scheme": "p2p" if case.layer == "attention" else "headwise"}
    exact = documents_alone(replace(case, **one_rank))
    assert found.keys() == exact.keys()
    return max(
        float((found[name] - exact[name]).abs().max() / exact[name].abs().max().clamp(min=1e-3)) for name in exact
    )


FORESTS = {
    "star": ([7, 3, 5, 1, 4], [-1, 0, 0, 0, 0]),
    "deep": ([3, 2, 2, 1, 4, 6, 2, 5], [-1, 0, 1, 2, 2, 1, -1, 6]),
    "two, and empty segments": ([0, 4, 3, 0, 5, 1, 9, 2], [-1, 0, 1, 1, 3, 3, -1, 6]),
}


WAYS = [("attention", scheme) for scheme in ("p2p", "a2a", "all_gather", "exact", "tiled")]
WAYS += [(kind, mode) for kind in ("gdn", "kda", "mamba", "conv1d") for mode in ("headwise", "chunkwise")]
RANKS = [(1, "contiguous"), (3, "zigzag"), (2, "balanced"), (5, "random")]


@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize(("name", "way", "ranks"), covering(list(FORESTS), WAYS, RANKS), ids=str)
def test_layers_equal_each_document_alone(name, way, ranks):
    lengths, parents = map(tuple, FORESTS[name])
    (layer, scheme), (cp, layout) = way, ranks
    sizes = {"heads": 4, "groups": 2, "head_dim": 4, "value_head_dim": 4}
    assert error(Case(layer, cp, lengths, layout, scheme=scheme, parents=parents, **sizes)) < 1e-12


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
            held = [token for tokens in paths(packing) for token in tokens]
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


TREE = Packing.tree([3, 2, 4], [-1, 0, 0])


@pytest.mark.parametrize(
    ("says", "tree"),
    [
        (r"parents\[1\]: got 2", ([3, 2, 4], [-1, 2, 0])),  # a parent after its child
        (r"parents\[0\]: got 0", ([3, 2], [0, 0])),
        ("parents: got 'segment 2 after one of another tree", ([3, 2, 4], [-1, -1, 0])),
        ("parents: got .* an integer for each of 2 segments", ([3, 2], [-1])),
        ("ends: got .* a number of documents for each of 3 segments", ([3, 2, 4], [-1, 0, 0], [1, 2, 2**31])),
    ],
)
def test_rejects_what_is_no_tree(says, tree):
    rejects(says, Packing.tree, *tree)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("full", Mask.full),
        ("prefix", lambda packing: Mask.prefix(packing, 2)),
        ("window:2,1", lambda packing: Mask.window(packing, 2, 1)),
        ("window:2,-1", lambda packing: Mask.window(packing, 2, -1)),
        ("strided", lambda packing: Mask.named(packing, "strided")),
        ("blocks", lambda packing: Mask.from_blocks(packing, np.ones((3, 3), dtype=bool), 3, causal=True)),
        ("shared_question", lambda packing: Mask.shared_question(packing, [[3, 2, 4]])),
    ],
)
def test_rejects_masks_without_a_meaning_along_paths(name, make):
    with refusal_of("mask", repr(name)):
        make(TREE)


def test_rejects_keys_of_their_own():
    plain = Packing([9])
    for queries, keys in ((TREE, plain), (plain, TREE), (TREE, Packing.tree([3, 2, 4], [-1, 0, 1], [1, 1, 1]))):
        for make in (Mask.causal, Mask.full, lambda *packings: Mask.window(packings[0], 2, kv_packing=packings[1])):
            rejects("where documents branch", make, queries, keys)
        rejects("where documents branch", Mask.from_slices, queries, [], keys)
        layouts = {"kv_packing": keys, "kv_layout": Layout.contiguous(keys, 2)}
        sizes = {"heads": 2, "kv_heads": 2, "head_dim": 4}
        rejects("where documents branch", plan_attention, queries, Layout.contiguous(queries, 2), **sizes, **layouts)
    rejects("layout: got", plan_attention, TREE, Layout.contiguous(plain, 2), heads=2, head_dim=4)


def test_rejects_what_has_no_meaning_in_documents_that_branch():
    layout, case = Layout.contiguous(TREE, 2), Case("attention", 2, (3, 2, 4), parents=(-1, 0, 0))
    refused = "where documents branch"
    rejects(f"layout: got .* shard_batch {refused}", layout.labels, np.arange(9), 0)
    rejects(f"layout: got .* no numbers of documents {refused}", layout.document_ids, 0)
    rejects(f"lengths: got .* {refused}", Mask.causal(TREE).unpadded, [9])
    rejects(f"case: got .* {refused}", isolation.leaks, case, 0)
    slots = GraphTables(16, 4, 2)
    rejects(f"lengths: got .* no GraphTables {refused}", slots.layout, TREE)
    assert slots.layout(Packing([3, 2])) == slots.layout([3, 2])
    x = torch.zeros(9, 1, 2)
    rejects(f"packing: got .* {refused}", stock_layers.attention, x, x, x, TREE, is_causal=True, scale=None)
    sizes = {"heads": 1, "key_heads": 1, "head_dim": 2, "conv": x, "A_log": x, "dt_bias": x}
    rejects(f"packing: got .* {refused}", stock_layers.gated_delta_net, x, x, x, TREE, None, **sizes)


def test_ranks_with_other_trees_are_told_apart():
    trees = [TREE, Packing.tree([3, 2, 4], [-1, 0, 1], [1, 1, 1])]

    def attend(group):
        layout = Layout.contiguous(trees[group.rank], 2)
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
