"""Images and videos of a batch: packings of their own, whose rows a vision tower makes and the text model reads.

A rank runs the tower on whole images and frames, dealt by their cost. One exchange takes the tower's rows to the ranks
whose text rows hold them, in the order in which the model's forward puts them there, and gradients the same way back.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.executor.relayout import relayout
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.images import TILES, deal_images, image_costs, layouts_of_rows
from megatron_cp.transformers.documents import check_on_host, on_host
from megatron_cp.transformers.sources import refers_to
from megatron_cp.transformers.towers import split_tower, tower_of


class Modality(NamedTuple):
    """The names by which transformers' models take images, or videos."""

    name: str
    pixels: str
    grids: str
    token: str
    method: str
    number: int  # in `mm_token_type_ids`


MODALITIES = (
    Modality("image", "pixel_values", "image_grid_thw", "image_token_id", "get_image_features", 1),
    Modality("video", "pixel_values_videos", "video_grid_thw", "video_token_id", "get_video_features", 2),
)
# Towers that take patches of any number of images, by their grids, and attend within each frame.
_WITH_GRIDS = (
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe_thinker", "glm4v", "glm4v_moe", "glm46v",
)  # fmt: skip
# Towers that take a row of patches for each image, filled up, with their places: -1 where there is none.
_WITH_PLACES = ("gemma4",)


# Their frames have the token of images, and a call takes images or videos.
_ONE_TOKEN = ("glm4v", "glm4v_moe", "glm46v")
_ONE_CALL = (
    "Take both from one call of the processor for each document, and put documents and images in the same order. If "
    "you truncate, leave out whole images with all their tokens."
)
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")  # between the frames of each video
_TYPES = ("token_type_ids", "mm_token_type_ids")
_BOTH_WAYS = {"gemma3": _TYPES, "gemma4": _TYPES[::-1]}  # the types that a model reads, and those that it ignores
_PIXELS = tuple(each.pixels for each in MODALITIES)
_GRIDS = tuple(each.grids for each in MODALITIES)
_PLACES = ("image_position_ids", "video_position_ids")
_FRAMES = "num_frames_per_video"
# Keys whose tensors have rows of images, or of their patches, and none of tokens.
IMAGE_KEYS = (*_PIXELS, *_GRIDS, *_PLACES, _FRAMES, *_SECONDS)
_KEYS = (*IMAGE_KEYS, *_TYPES)


def _keys_of(kind: str) -> tuple[str, ...]:
    """Returns the arguments for images of a type of model."""
    if kind in _WITH_GRIDS:
        return (*_PIXELS, *_GRIDS, *_SECONDS, *_TYPES)
    if kind in _WITH_PLACES:
        return (*_PIXELS, *_PLACES, _FRAMES, *_TYPES)
    return ("pixel_values", *_TYPES) if kind in TILES else ()


def _sees_both_ways(config: Any, batch: Mapping[str, Any]) -> bool:
    """True if attention sees both ways inside an image; it sees causally where nothing says which tokens are images."""
    vision = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    if config.model_type != "gemma3" and not (config.model_type == "gemma4" and vision):
        return False
    name, other = _BOTH_WAYS[config.model_type]
    if batch.get(name) is None and batch.get(other) is not None:
        remedy = f"This model reads {name} and would attend causally inside images without them: rename them."
        raise ArgumentError(other, "types of tokens", f"None for {config.model_type}", remedy)
    return batch.get(name) is not None


class Items(NamedTuple):
    """Images, or frames of videos, in the order of their tokens.

    Attributes:
        pixels: what the tower takes.
        rows: `[items + 1]` where each item's rows of `pixels` begin, and their end.
        beside: other arguments of the tower with a row for each item, such as its grid.
        tokens: `[items]` the number of tokens of each.
        costs: `[items]` the tower's work for each.
    """

    pixels: Tensor
    rows: IntArray
    beside: dict[str, Tensor]
    tokens: IntArray
    costs: IntArray

    def spans(self, chosen: IntArray) -> list[tuple[int, int]]:
        """Returns the ranges of rows of `pixels` of some items."""
        return [(int(self.rows[each]), int(self.rows[each + 1])) for each in chosen]


@dataclass(frozen=True)
class TowerRows:
    """The rows of a tower's output on one rank.

    Attributes:
        source: the rows that each rank makes.
        target: the rows that each rank's text has.
        arguments: those by which images are split over ranks.
    """

    source: Layout
    target: Layout
    arguments: dict[str, Any]


class Images:
    """The images and videos of a whole batch, as far as ranks have to agree on them.

    Args:
        model: a model whose batches have images.
        batch: the whole batch.
        ids: `[total]` its tokens.
        packing: its documents.

    Attributes:
        positions: `[axes, 1, total]` the positions of tokens and of images' rows; None where positions have one axis.

    Raises:
        ArgumentError: images that do not fit the tokens, or a model whose images are not distributed.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Any], ids: Tensor, packing: Packing) -> None:
        if packing.branches is not None:
            remedy = "Store each sequence whole, as a document of its own."
            raise ArgumentError(
                "lengths", "documents that branch", "documents that do not, in batches with images", remedy
            )
        self._packing, config = packing, model.config
        given = {each: _tensor(batch, each.pixels) for each in MODALITIES}
        self._places = _places(config, ids, given)
        self._items: dict[Modality, Items] = {}
        documents: dict[Modality, IntArray] = {}
        for each, pixels in given.items():
            if pixels is None:
                continue
            items = _items(config, each, pixels, batch)
            documents[each] = self._documents(each, items)
            if items.tokens.size:
                self._items[each] = items
        types = self._types(batch, len(ids))
        self.spans = _spans_of(types, packing) if _sees_both_ways(config, batch) else None
        # Gemma 4's layers that see a whole document see it causally.
        self._causal = ("causal",) if config.model_type == "gemma4" else ()
        self.positions = None
        if self._items and batch_positions(batch) is None:
            self.positions = self._positions(model, batch, ids, types, documents)

    def _documents(self, modality: Modality, items: Items) -> IntArray:
        """Returns `[items]` the document of each, of which its tokens must be."""
        places, ends = self._places[modality], np.cumsum(items.tokens)
        if (items.tokens < 1).any():
            raise ArgumentError(modality.pixels, "an image without a row for a token", "images of a token or more")
        if places.size != items.tokens.sum():
            given = f"{modality.name}s of {items.tokens.sum()} tokens"
            allowed = f"as many as input_ids has of {modality.token}: {places.size}"
            raise ArgumentError(modality.pixels, given, allowed, _ONE_CALL)
        first, last = (self._packing.documents_of(places[at]) for at in (ends - items.tokens, ends - 1))
        if (crossing := np.flatnonzero(first != last)).size:
            given = (
                f"{modality.name} {crossing[0]} with tokens in documents {first[crossing[0]]} and {last[crossing[0]]}"
            )
            remedy = "Let no document begin or end inside an image: compare lengths with input_ids."
            raise ArgumentError(modality.pixels, given, "images and frames whose tokens are in one document", remedy)
        return first

    def _types(self, batch: Mapping[str, Any], total: int) -> IntArray:
        """Returns `[total]` the modality's number of each token, and 0 for text."""
        types = np.zeros(total, np.int64)
        for modality, places in self._places.items():
            types[places] = modality.number
        for name in _TYPES:
            if (given := batch.get(name)) is None:
                continue
            row = on_host(name, given)
            if row.shape != (1, total) or not np.array_equal(row[0], types):
                shown = list(row.shape) if row.shape != (1, total) else "types that disagree with input_ids"
                allowed = f"[1, {total}]: 1 at the tokens of images, 2 at those of videos, 0 at text"
                raise ArgumentError(name, shown, allowed, "Take them from the processor's call that made input_ids.")
        return types

    def _positions(
        self, model: Any, batch: Mapping[str, Any], ids: Tensor, types: IntArray, documents: dict[Modality, IntArray]
    ) -> Tensor | None:
        """Returns `[axes, 1, total]`, which the model's own function computes of each document."""
        owner = next((each for each in model.modules() if hasattr(each, "get_rope_index")), None)
        if owner is None:
            return None
        takes = inspect.signature(owner.get_rope_index).parameters
        found = []
        for number, (begin, end) in enumerate(itertools.pairwise(self._packing.cu_seqlens.tolist())):
            if begin == end:
                continue
            given: dict[str, Any] = {}
            for modality, of in documents.items():
                grids = _tensor(batch, modality.grids)
                assert grids is not None
                chosen = np.flatnonzero(_document_of_each(modality, grids, of) == number)
                given[modality.grids] = grids[chosen] if chosen.size else None
                if modality.name == "video" and (seconds := _seconds(batch, len(grids))) is not None:
                    # A list's numbers are rounded elsewhere than a tensor's.
                    kept = seconds[chosen] if isinstance(seconds, Tensor) else [seconds[each] for each in chosen]
                    given |= {"second_per_grid_ts": kept, "second_per_grids": torch.as_tensor(kept)}
            given["mm_token_type_ids"] = torch.from_numpy(types[None, begin:end])
            given["attention_mask"] = torch.ones_like(ids[None, begin:end])
            named = {name: value for name, value in given.items() if name in takes}
            found.append(owner.get_rope_index(ids[None, begin:end], **named)[0])
        return torch.cat(found, -1)

    def masks(self, names: Iterator[str]) -> dict[str, Mask]:
        """Returns the masks of layers, by the names of those that they have in text, with images that see both ways."""
        if self.spans is None or not len(self.spans):
            return {}
        masks = (Mask.named(self._packing, name) for name in names if name not in self._causal)
        return {mask.name: _both_ways(mask, self.spans) for mask in masks}

    def shard(
        self, model: PreTrainedModel, layout: Layout, group: RankGroup, kernel: str, device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, TowerRows]]:
        """Returns this rank's arguments of the model, and the rows of its towers by the method that calls them."""
        values, rows, tower = {}, {}, tower_of(model)
        for modality, items in self._items.items():
            packing = Packing(items.tokens)
            pieces, num_split = deal_images(items.costs, items.tokens, group.size, splits=tower is not None)
            order, arguments = np.arange(packing.total), dict[str, Any]()
            if num_split:
                values[modality.pixels], values[modality.grids], order, arguments = split_tower(
                    tower, modality.name, items.pixels, items.beside[modality.grids], pieces, group, kernel, device
                )
            else:
                mine = np.searchsorted(packing.cu_seqlens[1:], [begin for begin, _ in pieces[group.rank]], "right")
                # A rank without images runs the tower too, on the cheapest, as others may wait for it: FSDP's do.
                mine = mine if mine.size else np.array([items.costs.argmin()])
                values[modality.pixels] = torch.cat([items.pixels[begin:end] for begin, end in items.spans(mine)])
                values |= {name: each[mine] for name, each in items.beside.items()}
                if modality.name == "video" and _PLACES[1] in items.beside:
                    values[_FRAMES] = torch.tensor([len(mine)])
            source, target = layouts_of_rows(packing, pieces, order, self._places[modality], layout)
            rows[modality.method] = TowerRows(source, target, arguments)
        return values, rows


def check_images(model: PreTrainedModel, batch: Mapping[str, Any]) -> bool:
    """Returns True if a batch has what `Images` takes. Refuses what the model's tower does not take."""
    kind, given = model.config.model_type, [name for name in _KEYS if batch.get(name) is not None]
    for name in given:
        if name not in _keys_of(kind):
            known = ", ".join((*_WITH_GRIDS, *_WITH_PLACES, *TILES))
            remedy = (
                f"If the batch has only text, leave {name} out. Only models of these types take images: {known}. In "
                "others, context parallelism would attend causally where images attend in both directions, or put "
                "their rows elsewhere: train those on images without it."
            )
            raise ArgumentError(name, type(batch[name]).__name__, f"None for {type(model).__name__}", remedy)
    return bool(given)


def check_tokens(model: PreTrainedModel, batch: Mapping[str, Any], ids: Tensor) -> None:
    """Refuses tokens of images in a batch without images: collators of text drop them, and the model does not notice.

    Args:
        model: any model.
        batch: the whole batch.
        ids: `[total]` its tokens.

    Raises:
        ArgumentError: tokens of images or videos that the batch does not have.
    """
    known = _keys_of(model.config.model_type)
    if not known or batch.get("inputs_embeds") is not None:
        return
    given = {each: _tensor(batch, each.pixels) for each in MODALITIES}
    for each, places in _places(model.config, ids, given).items():
        if given[each] is None and each.pixels in known and places.size:
            allowed = f"the {each.name}s of the {places.size} tokens of {each.token} in input_ids"
            remedy = "DataCollatorWithFlattening and other collators of text drop them: concatenate them yourself."
            raise ArgumentError(each.pixels, None, allowed, remedy)


def without_images(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what else a batch has."""
    return {name: value for name, value in batch.items() if name not in _KEYS}


def batch_positions(batch: Mapping[str, Any]) -> Tensor | None:
    """Returns positions of several axes that a batch has itself."""
    given = batch.get("position_ids")
    return given if isinstance(given, Tensor) and given.ndim == 3 else None


def place_images(model: Any, rows: Mapping[str, TowerRows], group: RankGroup) -> list[str]:
    """Makes the methods that a model's forward calls for its images return the rows of this rank's text.

    Returns the methods, whose attributes of the model are to be removed after the call.
    """
    forward = inspect.unwrap(type(model).forward)
    methods = [method for method in rows if refers_to(forward, method)]
    for method in methods:
        vars(model)[method] = partial(_placed, model, method, rows, group)
    return methods


def _placed(
    model: Any, method: str, all_rows: Mapping[str, TowerRows], group: RankGroup, *args: Any, **given: Any
) -> Any:
    ours = {name: vars(model).pop(name) for name in all_rows}  # the model's method for videos may call that for images
    try:
        found = getattr(model, method)(*args, **given, **all_rows[method].arguments)
    finally:
        vars(model).update(ours)
    made = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    parts = [_joined(each) for each in made]
    moved = _moved(torch.cat(parts, -1), all_rows[method], group)
    first, *others = moved.split([part.shape[-1] for part in parts], -1)
    found.pooler_output = first if isinstance(made[0], Tensor) else (first,)
    if others:
        found.deepstack_features = [
            each if isinstance(before, Tensor) else (each,) for each, before in zip(others, made[1:], strict=True)
        ]
    return found


@no_compile
def _moved(made: Tensor, rows: TowerRows, group: RankGroup) -> Tensor:
    held = int(rows.source.row_counts[group.rank])  # what follows is of a rank without images
    if held and len(made) != held:
        remedy = "Pass the model the pixels and grids that shard returned, not those of the whole batch."
        allowed = f"{held}, as shard gave this rank"
        raise ArgumentError("batch", f"{len(made)} rows of the tower's output", allowed, remedy)
    return relayout(made[:held], rows.source, rows.target, group)


def _joined(rows: Any) -> Tensor:
    """Returns `[rows, features]` from a tensor of each image, or of all."""
    joined = rows if isinstance(rows, Tensor) else torch.cat(tuple(rows))
    return joined.flatten(0, -2)


def _tensor(batch: Mapping[str, Any], name: str) -> Tensor | None:
    value = batch.get(name)
    if value is not None and not isinstance(value, Tensor):
        raise ArgumentError(name, type(value).__name__, "a tensor, as a processor returns it with return_tensors='pt'")
    check_on_host(name, value)
    return value


def _seconds(batch: Mapping[str, Any], count: int) -> Any:
    """Returns the seconds between frames of each video, a tensor or a list; None without them."""
    name = next((name for name in _SECONDS if batch.get(name) is not None), None)
    if name is None:
        return None
    check_on_host(name, seconds := batch[name])
    if not isinstance(seconds, Tensor | list | tuple) or len(seconds) != count:
        given = len(seconds) if isinstance(seconds, Tensor | list | tuple) else type(seconds).__name__
        raise ArgumentError(name, given, f"a number for each of {count} videos")
    return seconds


def _document_of_each(modality: Modality, grids: Tensor, of_frames: IntArray) -> IntArray:
    """Returns the document of each image or video, from those of frames, in which its positions are computed."""
    ends = np.cumsum(grids[:, 0].numpy())
    first, last = of_frames[ends - grids[:, 0].numpy()], of_frames[ends - 1]
    if (crossing := np.flatnonzero(first != last)).size:
        given = f"{modality.name} {crossing[0]} with frames in documents {first[crossing[0]]} and {last[crossing[0]]}"
        remedy = "Or pass position_ids [axes, 1, total]."
        raise ArgumentError(modality.grids, given, "videos whose frames are in one document", remedy)
    return first


def _places(config: Any, ids: Tensor, given: Mapping[Modality, Tensor | None]) -> dict[Modality, IntArray]:
    """Returns the places of each modality's tokens in the stream."""
    image, video = MODALITIES
    found = {each: np.flatnonzero(ids.numpy() == getattr(config, each.token, None)) for each in MODALITIES}
    if config.model_type in _ONE_TOKEN and given[video] is not None:
        if given[image] is not None:
            raise ArgumentError(image.pixels, "images beside videos", "batches with images alone, or videos alone")
        found[video], found[image] = found[image], found[video]
    return found


def _items(config: Any, modality: Modality, pixels: Tensor, batch: Mapping[str, Any]) -> Items:
    if (tile := TILES.get(config.model_type)) is not None:
        if pixels.ndim != 4:
            remedy = "Concatenate the images of all documents along axis 0."
            raise ArgumentError(modality.pixels, list(pixels.shape), "[images, channels, height, width]", remedy)
        tokens = np.full(len(pixels), tile(config))
        return Items(pixels, np.arange(len(pixels) + 1), {}, tokens, np.ones(len(pixels), np.int64))
    if config.model_type in _WITH_PLACES:
        return _items_with_places(config, modality, pixels, batch)
    return _items_with_grids(config, modality, pixels, batch)


def _items_with_grids(config: Any, modality: Modality, pixels: Tensor, batch: Mapping[str, Any]) -> Items:
    if (grids := _tensor(batch, modality.grids)) is None:
        raise ArgumentError(modality.grids, None, f"the grid of each of the {modality.name}s", "Processors return it.")
    sizes, merge = on_host(modality.grids, grids), int(config.vision_config.spatial_merge_size)
    if sizes.ndim != 2 or sizes.shape[1] != 3 or (sizes < 1).any() or (sizes[:, 1:] % merge).any():
        allowed = f"[{modality.name}s, 3]: frames, and rows and columns of patches that are multiples of {merge}"
        raise ArgumentError(modality.grids, sizes.tolist(), allowed, "The processor of this model returns such grids.")
    if pixels.ndim != 2 or len(pixels) != sizes.prod(1).sum():
        allowed = f"[{sizes.prod(1).sum()}, features], the patches of {modality.grids}"
        remedy = f"Concatenate {modality.pixels} and {modality.grids} of the same {modality.name}s along axis 0."
        raise ArgumentError(modality.pixels, list(pixels.shape), allowed, remedy)
    frames = np.repeat(sizes, sizes[:, 0], axis=0)
    frames[:, 0] = 1
    patches = frames.prod(1)
    ends = np.concatenate([[0], np.cumsum(patches)])
    beside = {modality.grids: torch.from_numpy(frames)}
    return Items(pixels, ends, beside, patches // merge**2, _costs(config, patches))


def _items_with_places(config: Any, modality: Modality, pixels: Tensor, batch: Mapping[str, Any]) -> Items:
    name = _PLACES[modality.name == "video"]
    places = _tensor(batch, name)
    if places is None or places.shape != (*pixels.shape[:2], 2):
        given = None if places is None else list(places.shape)
        raise ArgumentError(name, given, f"[{modality.name}s, patches, 2], the places of {modality.pixels}")
    patches = (on_host(name, places) != -1).all(-1).sum(1)
    tokens = patches // int(config.vision_config.pooling_kernel_size) ** 2
    filled = np.full(len(patches), pixels.shape[1])  # the tower computes them too
    return Items(pixels, np.arange(len(pixels) + 1), {name: places}, tokens, _costs(config, filled))


def _costs(config: Any, patches: IntArray) -> IntArray:
    width = int(getattr(config.vision_config, "embed_dim", None) or config.vision_config.hidden_size)
    return image_costs(patches, width)


def _spans_of(types: IntArray, packing: Packing) -> IntArray:
    """Returns `[n, 2]` the ranges of tokens of images and videos that touch, within each document."""
    changes = np.flatnonzero(np.diff(types > 0, prepend=False, append=False))
    edges = np.union1d(changes, packing.cu_seqlens)
    spans = np.stack([edges[:-1], edges[1:]], 1)
    return spans[types[spans[:, 0]] > 0]


def _both_ways(mask: Mask, spans: IntArray) -> Mask:
    """Returns a mask of earlier keys with all pairs in each of the spans that its window, if it has one, leaves."""
    blocks = band.range_bands(spans[:, 0], spans[:, 1], spans[:, 0], spans[:, 1])
    kind, _, sides = mask.name.partition(":")
    if kind == "window":
        blocks[:, 4] = -int(sides.partition(",")[0])
    elif kind != "causal":
        raise ArgumentError("mask", mask.name, "causal or a window in a model whose images see both ways")
    bands = band.disjoint(np.concatenate([mask.bands, blocks]), mask.packing.barriers)
    return Mask(mask.packing, mask.packing, bands, f"{mask.name} with images both ways")
