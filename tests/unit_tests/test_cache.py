"""Caches: calls that continue documents give what one call with all tokens gives."""

import gc
import random
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.layers import LAYERS
from megatron_cp.testing.parity import Case, draw
from tests.refusals import rejects

LENGTHS = np.array([11, 23, 0, 7])
SCHEMES = ["p2p", "a2a", "all_gather", "exact", "tiled"]


def chunks_of(lengths, count, draws):
    """Cuts documents at random: each step's lengths, some of them 0."""
    cuts = [sorted(draws.randint(0, int(length)) for _ in range(count - 1)) for length in lengths]
    return np.array([np.diff([0, *own, length]) for own, length in zip(cuts, lengths, strict=True)]).T


def tokens_of(done, step, total):
    """The places of a step's tokens in the stream of whole documents."""
    begins = np.cumsum(total) - total + done
    return np.concatenate([np.arange(begin, begin + new) for begin, new in zip(begins, step, strict=True)])


def steps_of(ranks, lengths, plan):
    """Returns each step's layout, plan, and tokens in the stream of whole documents."""
    total, done, found = np.sum(lengths, 0), np.zeros_like(lengths[0]), []
    cache, draws = cp.Cache(total.size, ranks), random.Random(5)
    for step in lengths:
        packing = cp.Packing(step.tolist())
        layout = draws.choice([cp.Layout.contiguous, cp.Layout.zigzag, cp.Layout.striped])(packing, ranks)
        layout = cache.decode_layout() if (step == 1).all() else layout.padded(align=draws.choice([1, 4]))
        found.append((layout, plan(layout, cache.extend(layout)), tokens_of(done, step, total)))
        done = done + step
    return found


def in_steps(ranks, steps, inputs, call):
    """Runs `call(rows of inputs, plan, group, layer's cache)` for each step; returns the outputs of the stream."""

    def on_rank(group):
        cache, outputs = cp.Cache(steps[0][0].packing.num_documents, ranks, block_size=4), []
        for number, (layout, plan, tokens) in enumerate(steps):
            with torch.no_grad() if number % 2 else torch.inference_mode():  # one goes on where the other was
                cache.extend(layout)
                rows = [layout.shard(x[tokens], group.rank) for x in inputs]
                outputs.append(call(rows, plan, group, cache.layer(0)))
        return outputs

    results = run_ranks(on_rank, ranks)
    outputs = [layout.unshard(shards) for (layout, *_), shards in zip(steps, zip(*results, strict=True), strict=True)]
    stream = torch.empty(len(inputs[0]), *outputs[0].shape[1:], dtype=torch.float64)
    for (*_, tokens), out in zip(steps, outputs, strict=True):
        stream[tokens] = out
    return stream


def drawn(*shapes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 4}


def planned(layout, keys, scheme="exact", mask="causal"):
    return cp.plan_attention(
        layout.packing, layout, **SIZES, mask=mask, kv_packing=keys.packing, kv_layout=keys, scheme=scheme
    )


def attention_error(ranks, lengths, scheme, mask):
    """The greatest difference between attention in steps and attention to the whole documents on one rank."""
    total = int(np.sum(lengths))
    q, k, v = drawn((total, 4, 4), (total, 2, 4), (total, 2, 4))
    steps = steps_of(ranks, lengths, lambda layout, keys: planned(layout, keys, scheme, mask))
    found = in_steps(
        ranks, steps, [q, k, v], lambda rows, plan, *rest: cp.attention(*rows, plan, rest[0], cache=rest[1])
    )
    whole = cp.Packing(np.sum(lengths, 0).tolist())
    alone = cp.plan_attention(whole, cp.Layout.contiguous(whole, 1), **SIZES, mask=mask)
    return (found - cp.attention(q, k, v, alone)).abs().max()


@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention_in_chunks_equals_attention_at_once(scheme):
    for ranks, mask in ((1, "causal"), (2, "window:5"), (3, "causal"), (5, "first:2+window:3,0")):
        lengths = chunks_of(LENGTHS, 4, random.Random(ranks))
        assert attention_error(ranks, lengths, scheme, mask) < 1e-12, (ranks, mask)


def test_tokens_decoded_one_by_one_over_the_ranks_that_hold_their_keys_equal_the_whole():
    lengths = [np.array([9, 4, 13]), *[np.array([1, 1, 1])] * 9]
    assert attention_error(3, lengths, "tiled", "causal") < 1e-12
    assert attention_error(2, lengths[:5], "a2a", "causal") < 1e-12


def test_queries_travel_to_the_keys_of_long_documents_and_no_search_is_made():
    cache = cp.Cache(3, 4)
    cache.extend(cp.Layout.zigzag(cp.Packing([200, 90, 310]), 4))
    layout = cache.decode_layout()
    plan = planned(layout, cache.extend(layout), "tiled")
    assert plan.attend.tiled.solutions == ()  # no search
    assert not plan.attend.assigned_tiles(forward=True).moves_keys
    few = planned(layout, cache.kv_layout, "exact")
    assert 10 * max(plan.bytes_sent(8, forward=True)) < max(few.bytes_sent(8, forward=True))


def test_new_tokens_go_to_the_ranks_that_hold_the_fewest_keys():
    cache = cp.Cache(3, 3)
    cache.extend(cp.Layout.from_fragments(cp.Packing([4, 1, 2]), [[(0, 5)], [(5, 6)], [(6, 7)]]))
    counts = []
    for _ in range(3):
        layout = cache.decode_layout()
        cache.extend(layout)
        counts.append(layout.token_counts.tolist())
    assert counts == [[0, 2, 1], [0, 1, 2], [1, 1, 1]]
    assert cache.kv_layout.token_counts.tolist() == [6, 5, 5]


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_documents_end_and_others_begin(mode):
    """The second of three documents is dropped after two steps and two others begin; none sees another's tokens."""
    steps = [[5, 7, 2], [3, 0, 4], [1, 1, 6, 2], [2, 0, 1, 3]]
    documents = [[0, 1, 2], [0, 1, 2], [0, 2, 3, 4], [0, 2, 3, 4]]
    sizes = np.array([11, 7, 7, 7, 5])
    begins, whole = np.cumsum(sizes) - sizes, cp.Layout.contiguous(cp.Packing(sizes.tolist()), 1)
    q, k, v = drawn(*[(int(sizes.sum()), heads, 4) for heads in (4, 2, 2)])
    x, taps = drawn((int(sizes.sum()), 96), (96, 4))
    exact = cp.attention(q, k, v, planned(whole, whole))
    exact_conv = cp.causal_conv1d(x, taps, None, linear_plan(whole, "conv1d", "headwise"))
    exact_rule = cp.mamba2(q[..., :3], q[..., 3].abs(), taps[:4, 0], k, v, linear_plan(whole, "mamba", "headwise"))

    def on_rank(group):
        cache, done, errors = cp.Cache(3, 3, block_size=2), np.zeros(5, dtype=int), [0.0]
        for step, (new, numbers) in enumerate(zip(steps, documents, strict=True)):
            with torch.no_grad() if step % 2 else torch.inference_mode():
                if step == 2:
                    cache.drop([1])
                    cache.add(2)
                layout = cp.Layout.zigzag(cp.Packing(new), 3, align=4)
                keys = cache.extend(layout)
                firsts = begins[numbers] + done[numbers]
                tokens = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, new, strict=True)])
                positions = tokens - begins[np.searchsorted(np.cumsum(sizes), tokens, side="right")]
                assert cache.positions(group.rank).tolist() == layout.shard(positions, group.rank).tolist()
                local = [layout.shard(each[tokens], group.rank) for each in (q, k, v, x)]
                out = cp.attention(*local[:3], planned(layout, keys), group, cache=cache.layer(0))
                plan = linear_plan(layout, "conv1d", mode)
                convolved = cp.causal_conv1d(local[3], taps, None, plan, group, cache=cache.layer(1))
                rows = [local[0][..., :3], local[0][..., 3].abs(), taps[:4, 0], *local[1:3]]
                ruled = cp.mamba2(*rows, linear_plan(layout, "mamba", mode), group, cache=cache.layer(2))
                for found, all_rows in ((out, exact), (convolved, exact_conv), (ruled, exact_rule)):
                    difference = found - layout.shard(all_rows[tokens], group.rank)
                    errors += [float(difference.abs().max())] if len(found) else []
                done[numbers] += new
        assert cache.lengths.tolist() == sizes[[0, 2, 3, 4]].tolist()
        return max(errors)

    assert max(run_ranks(on_rank, 3)) < 1e-11


def test_memory_is_free_when_the_cache_is_gone():
    cache, layout, keys, rows = first_step()
    cp.attention(*rows, planned(layout, keys), cache=cache.layer(0))
    held, is_enabled = weakref.ref(cache.layer(0)), gc.isenabled()
    gc.disable()
    try:
        del cache
        assert held() is None
    finally:
        gc.enable() if is_enabled else None


def test_rows_of_a_document_are_put_together_again_after_many_steps(monkeypatch):
    monkeypatch.setattr("megatron_cp.executor.cache._MOST_PIECES", 2)
    assert attention_error(2, [np.array([3, 2, 4]), *[np.array([1, 1, 1])] * 9], "exact", "causal") < 1e-12
    cache = cp.Cache(2)
    for _ in range(50):
        layout = cp.Layout.contiguous(cp.Packing([1, 1]), 1)
        assert cache.extend(layout).starts.size <= 8  # 2 sorted, 4 more, and those of this step


KINDS = {kind: {"heads": 4, "key_heads": 2, "head_dim": 4, "value_head_dim": 3} for kind in ("gdn", "kda")}
KINDS["mamba"] = {"heads": 4, "groups": 2, "head_dim": 3, "state": 4}
KINDS["conv1d"] = {"channels": 96}


def linear_plan(layout, kind, mode, **more):
    return cp.plan_linear(layout.packing, layout, kind, **KINDS[kind], conv_width=4, mode=mode, **more)


def mixer_error(kind, ranks, lengths, modes, **more):
    """The greatest difference between a mixer in steps, in these modes in turn, and the whole documents on one rank."""
    whole = np.sum(lengths, 0)
    sizes = {} if kind == "conv1d" else {"heads": 4, "groups": 2, "head_dim": 4, "value_head_dim": 3}
    problem, run = draw(Case(layer=kind, lengths=tuple(whole.tolist()), cp=1, **sizes)), LAYERS[kind].run
    given, modes = list(problem.inputs.values()), iter(modes)
    steps = steps_of(ranks, lengths, lambda layout, keys: linear_plan(layout, kind, next(modes), **more))

    def call(rows, plan, group, cache):
        return run(*rows, plan, group, **problem.parameters, cache=cache)

    layout = cp.Layout.contiguous(cp.Packing(whole.tolist()), 1)
    exact = run(*given, linear_plan(layout, kind, "headwise"), None, **problem.parameters)
    return (in_steps(ranks, steps, given, call) - exact).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_across_ranks_are_continued_token_by_token_on_each_ranks_heads(kind):
    lengths = [np.array([70, 2, 1]), np.array([3, 0, 9]), *[np.array([1, 1, 1])] * 6]
    assert mixer_error(kind, 2, lengths, ["chunkwise"] * 2 + ["headwise"] * 6) < 1e-12
    more = {} if kind == "conv1d" else {"head_chunks": 2}
    assert mixer_error(kind, 1, lengths, ["headwise"] * 8, **more) < 1e-12


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_bare_rules_in_chunks_equal_rules_at_once(mode):
    lengths = chunks_of(LENGTHS, 4, random.Random(7))
    total = int(np.sum(lengths))
    q, k, v, g, beta = drawn((total, 2, 4), (total, 2, 4), (total, 4, 3), (total, 4, 4), (total, 4))
    k, g, beta = torch.nn.functional.normalize(k, dim=-1), -g.abs(), beta.sigmoid()
    rate = -torch.rand(4, dtype=torch.float64)
    rules = {
        "gdn": ([q, k, v, g[..., 0], beta], cp.gated_delta_rule),
        "kda": ([q, k, v, g, beta], cp.kda),
        "mamba": ([v, beta, k, q], lambda x, dt, b, c, *rest, **more: cp.mamba2(x, dt, rate, b, c, *rest, **more)),
    }
    whole = cp.Layout.contiguous(cp.Packing(np.sum(lengths, 0).tolist()), 1)
    for kind, (given, rule) in rules.items():
        steps = steps_of(3, lengths, lambda layout, keys, kind=kind: linear_plan(layout, kind, mode))
        found = in_steps(
            3, steps, given, lambda rows, plan, group, cache, rule=rule: rule(*rows, plan, group, cache=cache)
        )
        assert (found - rule(*given, linear_plan(whole, kind, "headwise"))).abs().max() < 1e-12, kind


def test_program_of_the_page_generates_what_the_model_gives_without_a_cache():
    page = (Path(__file__).parents[2] / "docs/cache.md").read_text()
    scope = {}
    exec(re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1], scope)
    prompts, tokens, logits = scope["prompts"], scope["tokens"], scope["logits"]
    assert tokens.shape == (20, 3)
    assert len(set(tokens.flatten().tolist())) > 15  # no model that repeats itself
    documents = [torch.cat([prompt, own]) for prompt, own in zip(prompts, tokens.T, strict=True)]
    packing = cp.Packing(list(map(len, documents)))
    layout, stream = cp.Layout.contiguous(packing, 1), torch.cat(documents)
    x, positions = scope["embedding"][stream], packing.positions()
    k, v = (x @ scope["to_kv"]).unflatten(-1, (-1, 8)).chunk(2, 1)
    q = scope["rotated"]((x @ scope["to_q"]).unflatten(-1, (-1, 8)), positions)
    plan = cp.plan_attention(packing, layout, heads=4, kv_heads=2, head_dim=8)
    x = x + cp.attention(q, scope["rotated"](k, positions), v, plan).flatten(1) @ scope["from_heads"]
    beta, alpha = (x @ scope["to_gates"]).chunk(2, -1)
    plan = cp.plan_linear(packing, layout, "gdn", heads=4, key_heads=2, head_dim=8)
    out = cp.gated_delta_net(x @ scope["to_qkv"], beta, alpha, plan, **scope["gdn"])
    exact = ((x + out.flatten(1) @ scope["from_states"]) @ scope["head"]).split(packing.lengths.tolist())
    for document, prompt in enumerate(prompts):
        assert (logits[:, document] - exact[document][len(prompt) - 1 :]).abs().max() < 1e-12


def first_step():
    cache = cp.Cache(2)
    layout = cp.Layout.contiguous(cp.Packing([3, 2]), 1)
    keys = cache.extend(layout)
    return cache, layout, keys, [torch.ones(5, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]


def test_rejects_a_cache_that_does_not_fit_the_call():
    cache, layout, keys, rows = first_step()

    def refused(match, cache, plan, rows=rows):
        rejects(match, cp.attention, *rows, plan, cache=cache)

    plan, grown = planned(layout, keys), [x.clone().requires_grad_() for x in rows]
    refused("cache: got <.*allowed: a layer of a Cache.*cache of all layers", cache, plan)
    refused("cache: got 'a cache, and tensors that require grad", cache.layer(0), plan, grown)
    refused("a Cache before its first step", cp.Cache(2).layer(0), plan)
    others = [cp.Layout.contiguous(cp.Packing(lengths), 1) for lengths in ([3, 1, 1], [2, 3])]
    refused("a plan of 3 documents .*allowed: one of 2 documents", cache.layer(0), planned(others[0], others[0]))
    refused(r"queries in .*\[2, 3\].*allowed: one with", cache.layer(0), planned(others[1], others[1]))
    cp.attention(*rows, plan, cache=cache.layer(0))
    refused("a layer that was last called in step 1, in step 1", cache.layer(0), plan)
    # The next step: the keys of this plan are the new ones alone.
    keys = cache.extend(layout)
    refused(r"keys in .*\[3, 2\].*allowed: one with keys in .*\[6, 4\]", cache.layer(0), plan)
    plan = planned(layout, keys)
    low = [x.float() for x in rows]
    refused("keys and values: torch.float32 .*allowed: torch.float64", cache.layer(0), plan, low)
    refused("last called in step 0, in step 2", cache.layer(1), plan)
    assert cp.attention(*rows, plan, cache=cache.layer(0)).shape == (5, 4, 4)  # nothing refused has changed it


def test_rejects_states_that_do_not_fit_the_call():
    cache, layout, *_ = first_step()
    shapes = [(5, 2, 4), (5, 2, 4), (5, 4, 3), (5, 4), (5, 4)]

    def rule(plan, dtype=torch.float64, **more):
        rows = [-torch.ones(*shape, dtype=dtype, **more) for shape in shapes]
        return cp.gated_delta_rule(*rows, plan, cache=cache.layer(0))

    plan = linear_plan(layout, "gdn", "headwise")
    other = linear_plan(cp.Layout.contiguous(cp.Packing([2, 3]), 1), "gdn", "headwise")
    rejects(r"cache: got 'a plan of Packing\(\[2, 3\]\)'; allowed: one of Packing\(\[3, 2\]\)", rule, other)
    rejects("cache: got 'a cache, and tensors that require grad'", rule, plan, requires_grad=True)
    rule(plan)
    rejects("last called in step 1, in step 1", rule, plan)
    keys = cache.extend(layout)
    rejects("state state: torch.float32 .*allowed: torch.float64", rule, plan, dtype=torch.float32)
    rows = [torch.ones(5, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    says = "a layer with states, of a linear layer"
    rejects(says, cp.attention, *rows, planned(layout, keys), cache=cache.layer(0))
    mixer = draw(Case(layer="gdn", lengths=(3, 2), cp=1, heads=4, groups=2, head_dim=4, value_head_dim=3))
    given, says = mixer.parameters | {"cache": cache.layer(0)}, r"a call with states state, q, k, v.*one with state, as"
    rejects(says, cp.gated_delta_net, *mixer.inputs.values(), plan, **given)
    rule(plan)  # nothing refused has changed it


def test_rejects_states_of_each_ranks_heads_where_all_are_needed():
    layout = cp.Layout.contiguous(cp.Packing([4]), 2)
    x = torch.ones(2, 96, dtype=torch.float64)

    @torch.no_grad()
    def on_rank(group):
        cache, call = cp.Cache(1, 2), []
        for mode in ("headwise", "chunkwise"):
            cache.extend(layout)
            call = [x, torch.ones(96, 4, dtype=torch.float64), None, linear_plan(layout, "conv1d", mode), group]
            if mode == "headwise":
                cp.causal_conv1d(*call, cache=cache.layer(0))
        rejects("a chunkwise step after a headwise one", cp.causal_conv1d, *call, cache=cache.layer(0))
        for channels in (48, 128):  # fewer are a part of those that are kept
            other = [torch.ones(2, channels, dtype=torch.float64), torch.ones(channels, 4, dtype=torch.float64), None]
            plan = cp.plan_linear(layout.packing, layout, "conv1d", channels=channels, mode="headwise")
            says = f"state x of {channels}'; allowed: state x of 96"
            rejects(says, cp.causal_conv1d, *other, plan, group, cache=cache.layer(0))

    run_ranks(on_rank, 2)


def test_rejects_steps_that_no_cache_can_take():
    extend = cp.Cache(1).extend
    rejects("a layout of 2 documents", extend, cp.Layout.contiguous(cp.Packing([1, 2]), 1))
    rejects("layout: got 'one over 2", extend, cp.Layout.contiguous(cp.Packing([2]), 2))
    rejects("where documents branch", extend, cp.Layout.contiguous(cp.Packing.tree([3, 2, 1], [-1, 0, 0]), 1))
    rejects("a Cache before its first step", cp.Cache(1).positions, 0)
    cache, layout, *_ = first_step()
    cache.layer(3)
    for change in (lambda: cache.drop([0]), cache.add, lambda: cache.extend(layout)):
        rejects("layer 3 has not been called in step 1", change)


def test_rejects_layers_that_differ_between_ranks():
    def on_rank(group):
        layout = cp.Layout.zigzag(cp.Packing([6]), 2)
        cache = cp.Cache(1, 2)
        plan = planned(layout, cache.extend(layout))
        rows = [torch.ones(3, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]
        with torch.no_grad(), pytest.raises(cp.CallMismatchError):
            cp.attention(*rows, plan, group, cache=cache.layer(0) if group.rank else None)

    run_ranks(on_rank, 2)
