"""`shard` and images: what it refuses, on every rank and before anything is sent, and what it makes of them."""

import copy
import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import numpy as np
import torch

from megatron_cp import Mask, Packing, PlanMismatchError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from megatron_cp.transformers.images import _both_ways, _moved, _spans_of
from tests.image_cases import IMAGE, VIDEO, build, document, packed
from tests.refusals import rejects


@functools.cache
def made(name):
    """An enabled model, and a batch of a document with two images and one without."""
    model = build(name)
    documents = [document(model, 5, [(1, 4, 4), (1, 4, 8)]), document(model, 3)]
    return enable_context_parallel(model, None), packed(documents)


def test_a_batch_of_images_has_this_ranks_share():
    parallel, batch = made("Qwen3VL")
    rows = parallel.shard(batch)
    assert torch.equal(rows["pixel_values"], batch["pixel_values"])
    assert torch.equal(rows["image_grid_thw"], batch["image_grid_thw"])
    assert rows["position_ids"].shape == (3, *batch["input_ids"].shape)
    assert "mm_token_type_ids" not in rows
    given = torch.arange(3 * batch["input_ids"].shape[1]).view(3, 1, -1)
    assert torch.equal(parallel.shard({**batch, "position_ids": given})["position_ids"], given)


def test_a_batch_plans_the_masks_that_its_images_give():
    parallel, batch = made("Gemma3")
    planned = {kind.mask.name for kind in parallel.shard(batch)["cp_batch"].plans.kinds}
    assert planned == {"causal with images both ways", "window:5,0 with images both ways"}


def test_text_alone_may_have_types():
    parallel, _ = made("Qwen3VL")
    ids = torch.arange(3, 10)[None]
    rows = parallel.shard({"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)})
    assert "mm_token_type_ids" not in rows
    assert rows["cp_batch"].tower_rows == {}


def test_no_images_are_a_batch_of_text():
    parallel, batch = made("Qwen3VL")
    text = {**batch, "input_ids": batch["input_ids"].clamp(max=80), "mm_token_type_ids": None}
    rows = parallel.shard(
        {**text, "pixel_values": batch["pixel_values"][:0], "image_grid_thw": torch.zeros(0, 3).long()}
    )
    assert "pixel_values" not in rows
    assert rows["position_ids"].shape == batch["input_ids"].shape


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Gemma3", "Gemma4"])
def test_the_pages_lines_make_a_batch(name):
    page = (Path(__file__).parents[3] / "docs/images.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {}
    exec(next(text for text in blocks if "def collate" in text), names)
    model = build(name)
    documents = [document(model, 5, [(1, 4, 4), (1, 4, 8)]), document(model, 3), document(model, 2, [(1, 4, 4)])]
    found, expected = names["collate"](documents), packed(documents)
    assert found["lengths"] == expected["lengths"]
    tensors = expected.keys() - {"attention_mask", "labels", "lengths"}
    assert found.keys() == tensors | {"lengths"}
    assert all(torch.equal(found[each], expected[each]) for each in tensors)


def changed(batch, **others):
    return {**batch, **others}


def moved_image(batch):
    """Puts the end of the first document, in which its second image is, into the second document."""
    at = int((batch["input_ids"][0] == IMAGE).nonzero()[-3])
    return changed(batch, lengths=[at, batch["input_ids"].shape[1] - at])


REFUSED = {
    "fewer tokens": (
        "Qwen3VL", lambda b: changed(b, input_ids=b["input_ids"].masked_fill(b["input_ids"] == IMAGE, 3)),
        "pixel_values: got 'images of 12 tokens'; allowed: as many as input_ids has of image_token_id: 0.*one call",
    ),
    "no images": (
        "Qwen3VL", lambda b: changed(b, pixel_values=None),
        "pixel_values: got None; allowed: the images of the 12 tokens of image_token_id.*Flattening.*drop them",
    ),
    "text's collator": (
        "Gemma3", lambda b: {name: b[name] for name in ("input_ids", "labels", "lengths")}, "pixel_values: got None",
    ),
    "tiles of documents": (
        "Gemma3", lambda b: changed(b, pixel_values=b["pixel_values"][None]), "allowed: .images, channels, height, wid",
    ),
    "another grid": (
        "Qwen3VL", lambda b: changed(b, image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 12]])),
        r"pixel_values: got \[48, 96\]; allowed: \[64, features\], the patches of image_grid_thw.*along axis 0",
    ),
    "odd grid": (
        "Qwen3VL", lambda b: changed(b, image_grid_thw=torch.tensor([[1, 3, 16]])), "image_grid_thw.*multiples of 2",
    ),
    "flat grids": (
        "Qwen3VL", lambda b: changed(b, image_grid_thw=b["image_grid_thw"].flatten()), r"thw: got \[1, 4, 4, ",
    ),
    "empty grid": (
        "Qwen3VL", lambda b: changed(b, image_grid_thw=torch.tensor([[1, 4, 12], [1, 0, 4]])), "image_grid_thw: got",
    ),
    "flat pixels": (
        "Qwen3VL", lambda b: changed(b, pixel_values=b["pixel_values"][:, 0]), r"got \[48\]; allowed: .48, features",
    ),
    "no places": (
        "Gemma4", lambda b: changed(b, image_position_ids=None), "image_position_ids: got None; allowed",
    ),
    "short places": (
        "Gemma4", lambda b: changed(b, image_position_ids=b["image_position_ids"][:, 1:]), r"got \[2, 127, 2\]",
    ),
    "no patches": (
        "Gemma4", lambda b: changed(b, image_position_ids=b["image_position_ids"].new_full((2, 128, 2), -1)),
        "pixel_values: got 'an image without a row for a token'",
    ),
    "no grids": ("Qwen2_5_VL", lambda b: changed(b, image_grid_thw=None), "image_grid_thw: got None.*Processors"),
    "two documents": ("Qwen3VL", moved_image, "image 1 with tokens in documents 0 and 1.*inside an"),
    "other types": (
        "Qwen3VL", lambda b: changed(b, mm_token_type_ids=b["mm_token_type_ids"].flip(1)), "types that disagree",
    ),
    "short types": (
        "Gemma3", lambda b: changed(b, token_type_ids=b["token_type_ids"][:, 1:]), r"token_type_ids: got \[1, 2\d\]",
    ),
    "types by another name": (
        "Gemma3", lambda b: changed(b, mm_token_type_ids=b["token_type_ids"], token_type_ids=None),
        "mm_token_type_ids: got 'types of tokens'; allowed: None for gemma3.*reads token_type_ids.*rename",
    ),
    "a list": ("Qwen3VL", lambda b: changed(b, pixel_values=[1.0]), "pixel_values: got 'list'; allowed: a tensor"),
    "on a device": (
        "Qwen3VL", lambda b: changed(b, pixel_values=b["pixel_values"].to("meta")), "tensor on meta.*before you move",
    ),
    "made before": ("Qwen3VL", lambda b: changed(b, mm_encoder_outputs={}), "mm_encoder_outputs"),
    "images and videos": (
        "Glm4v",
        lambda b: changed(b, pixel_values_videos=b["pixel_values"], video_grid_thw=b["image_grid_thw"]),
        "images beside videos",
    ),
    "branches": (
        "Qwen3VL",
        lambda b: changed(
            b, labels=None, lengths=Packing.from_sequences([b["input_ids"][0], b["input_ids"][0]]),
            input_ids=torch.from_numpy(Packing.from_sequences([b["input_ids"][0]]).tokens.copy())[None],
        ),
        "documents that do not, in batches with images",
    ),
    "tiles": (
        "Llava", lambda b: changed(b, pixel_values=b["pixel_values"][:1]), "images of 4 tokens'.*image_token_id: 8",
    ),
}  # fmt: skip


def test_refuses_a_video_whose_frames_are_in_two_documents_unless_it_has_positions():
    model = build("Qwen3VL")
    batch = document(model, 3, [], [(2, 4, 4)])
    at = int((batch["input_ids"][0] == VIDEO).nonzero()[4])  # the second frame's first token
    total = batch["input_ids"].shape[1]
    parallel, batch = enable_context_parallel(model, None), {**batch, "lengths": [at, total - at]}
    rejects("video_grid_thw: got 'video 0 with frames in documents 0 and 1'", parallel.shard, batch)
    given = torch.arange(total).expand(3, 1, -1)
    assert torch.equal(parallel.shard({**batch, "position_ids": given})["position_ids"], given)


def test_documents_without_tokens_do_not_move_positions():
    parallel, batch = made("Qwen3VL")
    first, second = batch["lengths"]
    rows = parallel.shard({**batch, "lengths": [0, first, 0, second, 0]})
    assert torch.equal(rows["position_ids"], parallel.shard(batch)["position_ids"])


@pytest.mark.parametrize("as_list", [False, True])
def test_seconds_between_frames_reach_the_models_function_as_given(as_list):
    model = build("Qwen2_5_VL")
    alone = [document(model, 3, [], [(7, 4, 4), (8, 4, 4)]), document(model, 2, [], [(5, 4, 4)])]
    alone = [{**each, "attention_mask": None, "second_per_grid_ts": None} for each in alone]
    seconds = [[2 / fps for fps in fpses] for fpses in ((12.5, 0.7), (2.9,))]
    made_of = (lambda values: values) if as_list else torch.tensor
    expected = [
        model.model.get_rope_index(
            each["input_ids"], each["mm_token_type_ids"], video_grid_thw=each["video_grid_thw"],
            second_per_grid_ts=made_of(of_videos),
        )[0]
        for each, of_videos in zip(alone, seconds, strict=True)
    ]  # fmt: skip
    batch = {
        **packed([{name: value for name, value in each.items() if value is not None} for each in alone]),
        "second_per_grid_ts": made_of([*seconds[0], *seconds[1]]),
    }
    parallel = enable_context_parallel(model, None)
    assert torch.equal(parallel.shard(batch)["position_ids"], torch.cat(expected, -1))
    short = {**batch, "second_per_grid_ts": batch["second_per_grid_ts"][:2]}
    rejects("second_per_grid_ts: got 2; allowed: a number for each of 3 videos", parallel.shard, short)


@pytest.mark.parametrize(
    ("model", "shapes", "name", "values", "differs"),
    [
        ("Qwen2_5_VL", ([], [(2, 4, 4)]), "second_per_grid_ts", ([0.5], [1.5]), "position_ids"),
        (
            "Qwen3VL", ([(1, 4, 8)],), "image_grid_thw", (torch.tensor([[1, 4, 8]]), torch.tensor([[1, 8, 4]])),
            "image_grid_thw",
        ),
        ("Gemma3", ([(1, 4, 8)],), "token_type_ids", (None, torch.tensor([[0] * 3 + [1] * 4 + [0] * 2])), "mask"),
    ],
)  # fmt: skip
def test_ranks_compare_what_else_images_have(model, shapes, name, values, differs):
    model = build(model)
    batch = packed([document(model, 3, *shapes)])

    def main(group):
        parallel = enable_context_parallel(copy.deepcopy(model), group)
        with pytest.raises(PlanMismatchError, match=f"rank 1: .*{differs}: "):
            parallel.shard({**batch, name: values[group.rank]})

    run_ranks(main, 2)


@pytest.mark.parametrize("most", [0, 10**9])
def test_elements_of_large_tensors_are_not_sent_with_an_error(most, monkeypatch):
    monkeypatch.setattr("megatron_cp.executor.agreement.MOST_ELEMENTS", most)
    model = build("Qwen3VL")
    batch = packed([document(model, 3, [(1, 4, 4)])])

    def main(group):
        parallel = enable_context_parallel(copy.deepcopy(model), group)
        pixels = batch["pixel_values"] + group.rank
        with pytest.raises(PlanMismatchError, match=r"rank 1: pixel_values: float64") as said:
            parallel.shard({**batch, "pixel_values": pixels})
        return str(said.value)

    assert all(("[0] is" in said) == (most > 0) and ("#" in said) == (most == 0) for said in run_ranks(main, 2))


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_images_that_do_not_fit(what):
    name, change, text = REFUSED[what]
    parallel, batch = made(name)
    rejects(text, parallel.shard, change(batch))


def test_refuses_pixels_that_shard_did_not_return():
    parallel, batch = made("Qwen3VL")
    rows = parallel.shard(batch)
    half = {"pixel_values": rows["pixel_values"][:16], "image_grid_thw": rows["image_grid_thw"][:1]}
    says = 'batch: got "4 rows of the tower\'s output"; allowed: 12'
    rejects(says, parallel._model, **rows | half, num_items_in_batch=rows.num_items)


def test_every_rank_refuses_pixels_of_the_whole_batch():
    """Also a rank without images, whose tower makes rows that nobody reads."""
    model = build("Qwen3VL")
    batch = packed([document(model, 5, [(1, 4, 4), (1, 4, 8)])])

    def main(group):
        own = copy.deepcopy(model)
        rows = enable_context_parallel(own, group).shard(batch)
        whole = {name: batch[name] for name in ("pixel_values", "image_grid_thw")}
        says = r'batch: got "12 rows .* output"; allowed: [48], as shard'
        rejects(says, own, **rows | whole, num_items_in_batch=rows.num_items)
        return int(rows["cp_batch"].tower_rows["get_image_features"].source.row_counts[group.rank])

    assert sorted(run_ranks(main, 3)) == [0, 4, 8]


def touching(model):
    """A batch of a document whose two images have no text between them."""
    batch = packed([document(model, 5, [(1, 4, 4), (1, 4, 8)])])
    ids = batch["input_ids"][0]
    images = (ids == IMAGE).nonzero()[:, 0]
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[images[3] + 1 : images[4]] = False
    rows = {name: batch[name][:, kept] for name in ("input_ids", "labels", "mm_token_type_ids")}
    return {**batch, **rows, "lengths": [int(kept.sum())]}


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_every_rank_refuses_images_that_the_models_positions_cannot_tell_apart(name, monkeypatch):
    model = build(name)
    batch = touching(model)
    total = batch["lengths"][0]

    def nothing_is_sent(*args, **named):
        raise AssertionError("ranks compared a batch that is refused")

    def main(group):
        parallel = enable_context_parallel(copy.deepcopy(model), group)
        rejects(says, parallel.shard, batch)

    says = (
        rf"position_ids: got None; allowed: \[axes, 1, {total}\] where \w+Model.get_rope_index fails. For document 0 "
        rf"it raised RuntimeError: .*text between images that touch, or pass position_ids \[axes, 1, {total}\]"
    )
    with monkeypatch.context() as patch:
        patch.setattr("megatron_cp.transformers.enable.check_agreement", nothing_is_sent)
        run_ranks(main, 2)
    given = torch.arange(total).expand(3, 1, -1)
    found = enable_context_parallel(model, None).shard({**batch, "position_ids": given})
    assert torch.equal(found["position_ids"], given)


def test_images_that_see_both_ways_keep_the_window():
    packing = Packing([9, 3])
    types = np.array([0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0])  # two images touch, of two documents
    spans = _spans_of(types, packing)
    assert spans.tolist() == [[1, 5], [6, 9], [9, 10]]
    for name, left in (("causal", 100), ("window:2,0", 2)):
        found = _both_ways(Mask.named(packing, name), spans)
        seen = np.zeros((12, 12), dtype=bool)
        for q0, q1, k0, k1, lo, hi in found.bands:
            for query in range(q0, q1):
                for key in range(k0, k1):
                    seen[query, key] |= lo <= key - query <= hi
        images = np.full(12, -1)
        for number, (begin, end) in enumerate(spans):
            images[begin:end] = number
        documents = np.repeat([0, 1], [9, 3])
        expected = [
            [
                documents[i] == documents[j] and i - j <= left and (j <= i or (images[i] == images[j] >= 0))
                for j in range(12)
            ]
            for i in range(12)
        ]
        assert np.array_equal(seen, np.array(expected))
    rejects("mask: got 'chunk:4'; allowed: causal or a window", _both_ways, Mask.named(packing, "chunk:4"), spans)


def test_a_compiler_does_not_trace_the_move_of_rows():
    assert _moved._torchdynamo_disable
