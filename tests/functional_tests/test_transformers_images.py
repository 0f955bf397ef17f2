"""Vision-language models of transformers over several ranks: equal to the stock class on each document alone.

In float64 throughout: loss, logits, and the gradient of every parameter, those of the tower too.
"""

import copy
import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.transformers import enable_context_parallel, token_log_probs
from megatron_cp.transformers.towers import tower_of
from tests.covering import covering
from tests.image_cases import MODELS, WITH_TILES, build, document, over_ranks, packed, sampled_wide, stock
from tests.refusals import rejects
from tests.transformers_cases import assert_same_step, gradients_of, summed, wide, worst_gradient

CLOSE = 2e-12
# Text, images and videos of each document.
PACKS = {
    "mixed": ((5, [(1, 4, 4)], []), (9, [], []), (3, [(1, 8, 4), (1, 4, 4), (1, 12, 8)], []), (30, [(1, 4, 8)], [])),
    "one image": ((40, [], []), (4, [(1, 8, 8)], []), (1, [], [])),
    "videos": ((6, [], [(3, 4, 8)]), (11, [], [(2, 8, 4), (1, 4, 4)]), (7, [], [])),
    "both": ((6, [(1, 4, 4)], [(3, 4, 8)]), (11, [], [(2, 8, 4)]), (7, [], []), (2, [(1, 4, 8)], [])),
}
# Models that do not take them.
WITHOUT = dict.fromkeys(WITH_TILES, ("videos", "both"))
WITHOUT |= dict.fromkeys(("Glm4v", "Glm4vMoe", "Glm46V"), ("both",))


@functools.cache
def case(name, pack):
    """A model, a batch, and what the stock class makes of its documents."""
    model = build(name)
    documents = [document(model, *each, seed=number) for number, each in enumerate(PACKS[pack])]
    with wide(), sampled_wide():
        return model, packed(documents), stock(model, documents)


UNSPLIT = (*WITH_TILES, "Gemma4", "Glm4v", "Glm4vMoe", "Glm46V", "Qwen2_5Omni", "Qwen3Omni")


def skip_without_split(name):
    if tower_of(build(name)) is None:
        pytest.skip("towers of this transformers compute their positions themselves")


CASES = covering(
    list(MODELS), list(PACKS), (1, 2, 3, 5), ("contiguous", "zigzag", "balanced"),
    ("a2a", "exact", "p2p", "all_gather"), ("whole", "split"),
    allowed=lambda *case: case[1] not in WITHOUT.get(case[0], ()) and (case[-1] == "whole" or case[0] not in UNSPLIT),
)  # fmt: skip


@pytest.mark.parametrize(("name", "pack", "size", "layout", "scheme", "images"), CASES)
@pytest.mark.few(of=lambda **case: tuple(case.values()))
def test_equals_the_stock_class_on_each_document_alone(name, pack, size, layout, scheme, images, monkeypatch):
    if images == "split":
        skip_without_split(name)
        monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 1)
    model, batch, expected = case(name, pack)
    with wide(), sampled_wide():
        found = over_ranks(model, batch, size, layout=layout, scheme=scheme)
    assert_same_step(found, expected, CLOSE)


# Every scheme that a tower's plan may have, at numbers of ranks that it takes: two exchanges want a product.
OF_TOWERS = [
    (name, scheme.name, size)
    for scheme in SCHEMES.values()
    for size in ((4, 6) if scheme.exchanges_heads and scheme.exchanges_keys else (2, 3, 5))
    for name in ("Qwen2_5_VL", "Qwen3VL")
]


@pytest.mark.parametrize(("name", "scheme", "size"), OF_TOWERS)
@pytest.mark.few
def test_every_scheme_computes_the_attention_of_split_images(name, scheme, size, monkeypatch):
    skip_without_split(name)
    planned = []

    def spec(*args, **named):
        planned.append(AttentionSpec(*args, **named, scheme=scheme))
        return planned[-1]

    monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 1)
    monkeypatch.setattr("megatron_cp.transformers.towers.AttentionSpec", spec)
    model, batch, expected = case(name, "mixed")
    with wide():
        found = over_ranks(model, batch, size)
    assert len(planned) == size * (1 + hasattr(tower_of(model), "fullatt_block_indexes"))
    assert_same_step(found, expected, 1e-12)


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_rank_may_have_no_piece_of_the_images_that_are_split(name, monkeypatch):
    skip_without_split(name)
    monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 1)
    model = build(name)
    documents = [document(model, 3, [(1, 4, 4)]), document(model, 2)]
    with wide():
        expected = stock(model, documents)
        found = over_ranks(model, packed(documents), 5)
    assert sorted(of_rank["pixel_values"] for of_rank in found[3]) == [4, 4, 4, 4, 4]  # the fifth are pad rows
    assert_same_step(found, expected, CLOSE)


@pytest.mark.parametrize(("name", "pack", "size"), [
    ("Qwen2_5_VL", "mixed", 2), ("Qwen2_5_VL", "both", 3), ("Gemma3", "mixed", 3), ("Gemma3", "one image", 2),
])  # fmt: skip
def test_log_probabilities_are_those_of_each_document_alone(name, pack, size):
    model, batch, (_, logits, _) = case(name, pack)
    ids, lengths = batch["input_ids"][0], torch.tensor(batch["lengths"])
    is_last = torch.zeros(len(ids), dtype=torch.bool).index_fill(0, lengths.cumsum(0) - 1, True)
    scores = logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0].where(~is_last, 0.0)
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def main(group):
        own = copy.deepcopy(model)
        parallel = enable_context_parallel(own, group)
        shard = parallel.shard({**batch, "cp_plans": parallel.planner(batch["lengths"])})
        rows = token_log_probs(own(**shard, num_items_in_batch=shard.num_items).logits, shard)
        every = parallel.gather(rows, shard, same_loss=True)[0]
        (every.exp() * weights).sum().backward()  # a loss of log-probabilities, as in reinforcement learning
        return every.detach(), gradients_of(own)

    with wide():
        found, gradients = zip(*run_ranks(main, size), strict=True)
        ((_, expected),) = run_ranks(main, 1)
    assert all((every - scores).abs().max() < CLOSE for every in found)
    worst, parameter = worst_gradient(summed(gradients), expected)
    assert worst < CLOSE, parameter


@pytest.mark.parametrize(("name", "size"), [("Qwen2_5_VL", 2), ("Qwen3VL", 3), ("Gemma3", 3)])
def test_a_disabled_model_takes_whole_images_and_generates(name, size, monkeypatch):
    monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 1)
    model, batch, (loss, logits, _) = case(name, "mixed")
    alone = document(model, *PACKS["mixed"][2], seed=2)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    expected = copy.deepcopy(model)
    expected.set_attn_implementation("eager")
    begin = sum(batch["lengths"][:2])

    def main(group):
        own = copy.deepcopy(model)
        parallel = enable_context_parallel(own, group)
        shard = parallel.shard(batch)
        with parallel.disabled():
            found = own(**alone, use_cache=False).logits[0].detach(), own.generate(**alone, **greedy)
            rejects(r"ContextParallel\.shard", own, **shard)
        with torch.no_grad():
            return *found, own(**shard, num_items_in_batch=shard.num_items).loss

    with wide():
        answers = expected.generate(**alone, **greedy)
        rows, found, losses = zip(*run_ranks(main, size), strict=True)
    assert all((each - logits[begin : begin + len(each)]).abs().max() < CLOSE for each in rows)
    assert all(torch.equal(each, answers) for each in found)
    assert abs(sum(losses).item() - loss) < CLOSE


@pytest.mark.parametrize(("name", "size"), [("Gemma3", 2), ("Gemma4", 3)])
def test_a_gemma_sees_causally_without_types_or_if_its_configuration_says_so(name, size):
    causal = {} if name == "Gemma3" else {**MODELS[name][2]["text_config"], "use_bidirectional_attention": None}
    model = build(name, **({"text_config": causal} if causal else {}))
    documents = [document(model, *each, seed=number) for number, each in enumerate(PACKS["mixed"])]
    if not causal:
        documents = [{key: each[key] for key in each if key != "token_type_ids"} for each in documents]
    with wide():
        expected = stock(model, documents)
        found = over_ranks(model, packed(documents), size)
    assert (
        case(name, "mixed")[2][1] - expected[1]
    ).abs().max() > 1e-6  # types, or the configuration, change the answer
    assert_same_step(found, expected, CLOSE)


def recomputed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def test_recomputes_a_tower_by_the_same_plans(monkeypatch):
    monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 1)
    model, batch, expected = case("Qwen2_5_VL", "one image")
    with wide():
        found = over_ranks(model, batch, 2, changed=recomputed, layout="contiguous")
    assert_same_step(found, expected, CLOSE)


def test_images_are_dealt_by_cost_and_large_ones_split(monkeypatch):
    skip_without_split("Qwen3VL")
    model = build("Qwen3VL")
    batch = packed([document(model, 3, [(1, 16, 16), (1, 4, 4), (1, 4, 4), (1, 4, 8)]), document(model, 2)])
    whole = over_ranks(model, batch, 3, layout="contiguous")[3]
    assert [of_rank["pixel_values"] for of_rank in whole] == [256, 32, 32]
    few = packed([document(model, 3, [(1, 16, 16), (1, 4, 8)])])  # the third rank runs its tower on the cheapest
    assert [of_rank["pixel_values"] for of_rank in over_ranks(model, few, 3)[3]] == [256, 32, 32]
    monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 20)  # of 64 rows: three pieces at most
    split = over_ranks(model, batch, 3, layout="contiguous")[3]
    assert sorted(of_rank["pixel_values"] for of_rank in split) == [100, 104, 116]


def test_the_pages_lines_put_rows_where_their_tokens_are():
    page = (Path(__file__).parents[2] / "docs/images.md").read_text()
    lines = next(
        text for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "relayout" in text
    )
    made = torch.arange(1344.0)[:, None].expand(-1, 3)
    counts, is_image = (700, 644), torch.arange(1600) % 2 == 0  # of 800 places, as many as a rank has rows

    def main(group):
        mine = is_image.clone()
        mine[mine.nonzero()[counts[group.rank] :, 0]] = False
        rows = made[[slice(0, 320), slice(320, 1344)][group.rank]].clone().requires_grad_()
        names = {"rows": rows, "group": group, "is_image": mine, "embeddings": torch.zeros(1600, 3)}
        exec(lines, names)
        (names["embeddings"] * 2).sum().backward()
        return names["embeddings"][mine], rows.grad

    found = run_ranks(main, 2)
    assert torch.equal(torch.cat([rows for rows, _ in found]), made)
    assert all((gradient == 2).all() for _, gradient in found)
