"""Vision-language models of transformers over several ranks: equal to the stock class on each document alone.

In float64 throughout: loss, logits, and the gradient of every parameter, those of the tower too.
"""

import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers.towers import tower_of
from tests.covering import covering
from tests.image_cases import MODELS, WITH_TILES, build, document, over_ranks, packed, sampled_wide, stock
from tests.transformers_cases import wide, worst_gradient

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
    model, batch, (loss, logits, gradients) = case(name, pack)
    with wide(), sampled_wide():
        found = over_ranks(model, batch, size, layout=layout, scheme=scheme)
    worst, parameter = worst_gradient(found[2], gradients)
    errors = {
        "loss": abs(found[0] - loss), "logits": (found[1] - logits).abs().max().item(),
        f"gradient of {parameter}": worst,
    }  # fmt: skip
    assert [name for name, error in errors.items() if not error < CLOSE] == [], errors
    assert found[2].keys() == gradients.keys()


@pytest.mark.parametrize("images", ["split", "whole"])
def test_recomputes_a_tower_by_the_same_plans(images, monkeypatch):
    if images == "split":
        monkeypatch.setattr("megatron_cp.planner.images.LEAST_PIECE", 1)
    model, batch, (_, _, gradients) = case("Qwen2_5_VL", "one image")
    with wide():
        found = over_ranks(model, batch, 2, layout="contiguous", recomputes=True)
    assert worst_gradient(found[2], gradients)[0] < CLOSE


def test_images_are_dealt_by_cost_and_large_ones_split(monkeypatch):
    skip_without_split("Qwen3VL")
    model = build("Qwen3VL")
    batch = packed([document(model, 3, [(1, 16, 16), (1, 4, 4), (1, 4, 4), (1, 4, 8)]), document(model, 2)])
    whole = over_ranks(model, batch, 3, layout="contiguous")[3]
    assert [of_rank["pixel_values"] for of_rank in whole] == [256, 32, 32]
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
