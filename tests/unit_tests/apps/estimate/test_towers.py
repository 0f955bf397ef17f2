"""Vision-language models are read as transformers builds them, text and tower, and images are dealt as its tower runs.

`tests/image_cases.py` has the models.
"""

import json

import numpy as np
import pytest

from megatron_cp.apps.estimate import TOWERS
from megatron_cp.apps.estimate.model_files import read_model
from tests.refusals import rejects

pytest.importorskip("transformers")

from tests.image_cases import MODELS, WITH_TILES, build

OUTSIDE = ("pos_embed", "position_embedding", "cls_token", ".head.")  # added to patches, or not of their rows


@pytest.fixture
def saved(tmp_path):
    """Builds a model and returns it with what is read from its configuration, which changes replace in part."""

    def reader(name, **changes):
        model = build(name)
        values = json.loads(json.dumps(model.config.to_dict())) | changes
        (tmp_path / "config.json").write_text(json.dumps(values))
        return model, read_model(str(tmp_path))

    return reader


@pytest.mark.parametrize("name", [name for name, (kind, *_) in MODELS.items() if kind in TOWERS])
def test_weights_of_text_and_tower_are_those_of_the_model(saved, name):
    model, found = saved(name)
    text, tower = {}, {}
    for label, parameter in model.named_parameters():
        of_text = "language_model." in label or "lm_head." in label
        (text if of_text else tower)[label] = parameter
    assert found.parameters == sum(each.numel() for each in text.values())
    products = sum(
        each.numel() for label, each in tower.items() if each.ndim > 1 and not any(o in label for o in OUTSIDE)
    )
    assert found.tower.weights + found.tower.projector == products
    assert found.tower.kind == MODELS[name][0]
    assert (found.tower.merge == 0) == (name in WITH_TILES)
    assert found.source.endswith(", without the vision tower")


def test_windows_and_their_order_are_those_of_the_tower(saved):
    utils = pytest.importorskip("transformers.vision_utils")
    import torch

    tower = saved("Qwen2_5_VL")[1].tower
    images = [(1, 16, 4), (2, 12, 20), (1, 2, 2), (1, 6, 10)]
    frames = tower.frames(images, 10_000)
    sizes, order = tower.windows(frames)
    grids = torch.tensor([[1, 2 * height, 2 * width] for height, width in frames.tolist()])
    expected, ends = utils.get_vision_window_index(grids, 2, 16, 4)
    assert order.tolist() == expected.tolist()
    assert sizes.tolist() == np.diff(ends.numpy()).tolist()


def test_first_files_of_qwen2_vl_have_the_fields_of_text_beside_the_tower(saved, tmp_path):
    found = saved("Qwen2VL")[1]
    values = json.loads((tmp_path / "config.json").read_text())
    text = values.pop("text_config")
    (tmp_path / "config.json").write_text(json.dumps(text | values))
    first = read_model(str(tmp_path))
    assert (first.blocks, first.tower) == (found.blocks, found.tower)


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("Qwen3VL", "depth", None, ": depth: got None"),
        ("Qwen2VL", "num_heads", 7, ": num_heads: got 7; allowed: a divisor of 24"),
        ("Gemma3", "image_size", "32", ": image_size: got '32'"),
        ("Llava", "patch_size", [8, 8, 8], ": patch_size: got"),
        ("InternVL", "patch_size", 32, ": image_size: got 0; allowed"),
    ],
)
def test_rejects_towers_that_cannot_be(saved, name, field, value, says):
    vision = json.loads(json.dumps(build(name).config.vision_config.to_dict()))
    rejects(says, saved, name, vision_config=vision | {field: value})
