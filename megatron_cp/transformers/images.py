"""Images and videos of a batch: packings of their own, whose rows a vision tower makes and the text model reads.

A rank runs the tower on whole images and frames, dealt by their cost. One exchange takes the tower's rows to the ranks
whose text rows hold them, in the order in which the model's forward puts them there, and gradients the same way back.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from megatron_cp.planner.images import deal_images, layouts_of_rows
from megatron_cp.transformers.documents import on_host
from megatron_cp.transformers.image_items import (
    FAMILIES,
    IMAGE_KEYS,
    MODALITIES,
    TYPES,
    VIDEO,
    Items,
    Modality,
    seconds_of,
    tensor_of,
)
from megatron_cp.transformers.sources import refers_to
from megatron_cp.transformers.towers import TowerPart, split_tower, tower_of

_KEYS = (*IMAGE_KEYS, *TYPES)
_ONE_CALL = (
    "Take both from one call of the processor for each document, and put documents and images in the same order. If "
    "you truncate, leave out whole images with all their tokens."
)


def takes_images(model: PreTrainedModel) -> bool:
    """Returns True if `ContextParallel.shard` takes this model's images."""
    return model.config.model_type in FAMILIES


def without_images(model: PreTrainedModel, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a batch has beside images. Refuses those that the model's tower does not take."""
    family = FAMILIES.get(model.config.model_type)
    taken = () if family is None else (*family.keys, *TYPES)
    for name in _KEYS:
        if batch.get(name) is not None and name not in taken:
            remedy = (
                f"If the batch has only text, leave {name} out. Only models of these types take images: "
                f"{', '.join(FAMILIES)}. In others, context parallelism would attend causally where images attend in "
                "both directions, or put their rows elsewhere: train those on images without it."
            )
            raise ArgumentError(name, type(batch[name]).__name__, f"None for {type(model).__name__}", remedy)
    return {name: value for name, value in batch.items() if name not in _KEYS}


class Images:
    """The images and videos of a whole batch, as far as ranks have to agree on them; there may be none.

    Args:
        model: any model.
        batch: the whole batch, which `without_images` has checked.
        ids: `[total]` its tokens.
        packing: its documents.

    Attributes:
        positions: `[axes, 1, total]` the positions of tokens and of images' rows, which the model's own function
            computes; None where the batch has them, or they have one axis.

    Raises:
        ArgumentError: images that do not fit the tokens, or tokens of images that the batch does not have.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Any], ids: Tensor, packing: Packing) -> None:
        self._packing, config = packing, model.config
        self._items: dict[Modality, Items] = {}
        self._places: dict[Modality, IntArray] = {}
        self._spans: IntArray = np.empty((0, 2), np.int64)  # of tokens that see both ways
        self._only_in_windows = False
        self.positions: Tensor | None = None
        if (family := FAMILIES.get(config.model_type)) is None:
            return
        if packing.branches is not None and any(batch.get(name) is not None for name in _KEYS):
            remedy = "Store each sequence whole, as a document of its own."
            allowed = "documents that do not, in batches with images"
            raise ArgumentError("lengths", "documents that branch", allowed, remedy)
        pixels = {each: tensor_of(batch, each.pixels) for each in MODALITIES}
        self._places = family.places(config, ids, pixels)
        documents: dict[Modality, IntArray] = {}
        for each, given in pixels.items():
            if given is None:
                if each.pixels in family.keys and batch.get("inputs_embeds") is None:
                    _check_no_tokens(each, self._places[each])
                continue
            items = family.read(config, each, given, batch)
            found = self._documents(each, items)
            if items.tokens.size:
                self._items[each], documents[each] = items, found
        types = self._types(batch, len(ids))
        if family.sees_both_ways(config, batch):
            self._spans, self._only_in_windows = _spans_of(types, packing), family.in_windows
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
            at = crossing[0]
            given = f"{modality.name} {at} with tokens in documents {first[at]} and {last[at]}"
            remedy = "Let no document begin or end inside an image: compare lengths with input_ids."
            raise ArgumentError(modality.pixels, given, "images and frames whose tokens are in one document", remedy)
        return first

    def _types(self, batch: Mapping[str, Any], total: int) -> IntArray:
        """Returns `[total]` the modality's number of each token, and 0 for text."""
        types = np.zeros(total, np.int64)
        for modality, places in self._places.items():
            types[places] = modality.number
        for name in TYPES:
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
            given: dict[str, Any] = {
                "mm_token_type_ids": torch.from_numpy(types[None, begin:end]),
                "attention_mask": torch.ones_like(ids[None, begin:end]),
            }
            for modality, of_frames in documents.items():
                given |= _grids_of(number, modality, batch, of_frames)
            named = {name: value for name, value in given.items() if name in takes}
            try:
                found.append(owner.get_rope_index(ids[None, begin:end], **named)[0])
            except Exception as error:  # it checks nothing, so what it raises depends on where it fails
                allowed = f"[axes, 1, {len(ids)}] where {type(owner).__name__}.get_rope_index fails"
                remedy = (
                    f"For document {number} it raised {type(error).__name__}: {error}. Put text between images that "
                    f"touch, or pass position_ids [axes, 1, {len(ids)}]."
                )
                raise ArgumentError("position_ids", None, allowed, remedy) from error
        return torch.cat(found, -1)

    def masks(self, names: Iterable[str]) -> dict[str, Mask]:
        """Returns the masks of layers, by the names of those that they have in text, with images that see both ways."""
        if not len(self._spans):
            return {}
        kept = (name for name in names if not (self._only_in_windows and name == "causal"))
        return {name: _both_ways(Mask.named(self._packing, name), self._spans) for name in kept}

    def shard(
        self, model: PreTrainedModel, layout: Layout, group: RankGroup, kernel: str, device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, TowerRows]]:
        """Returns this rank's arguments of the model, and the rows of its towers by the method that calls them."""
        values, rows, tower = dict[str, Tensor](), dict[str, TowerRows](), tower_of(model)
        for modality, items in self._items.items():
            pieces, num_split = deal_images(items.costs, items.tokens, group.size, splits=tower is not None)
            if num_split:
                part = split_tower(tower, modality, items, pieces, group, kernel, device)
            else:
                part = _whole_items(modality, items, pieces[group.rank])
            values |= part.inputs
            layouts = layouts_of_rows(Packing(items.tokens), pieces, part.order, self._places[modality], layout)
            rows[modality.method] = TowerRows(*layouts, part.num_rows, part.arguments)
        return values, rows


@dataclass(frozen=True)
class TowerRows:
    """The rows of a tower's output on one rank.

    Attributes:
        source: the rows that each rank makes for others.
        target: the rows that each rank's text has.
        num_rows: the number of rows that this rank's tower makes. A rank without images makes some that nobody reads.
        arguments: those by which images are split over ranks.
    """

    source: Layout
    target: Layout
    num_rows: int
    arguments: Mapping[str, Any]


def batch_positions(batch: Mapping[str, Any]) -> Tensor | None:
    """Returns positions of several axes that a batch has itself."""
    given = batch.get("position_ids")
    return given if isinstance(given, Tensor) and given.ndim == 3 else None


def tower_rows(output: Any) -> list[Tensor]:
    """Returns the rows `[rows, features]` of a tower's output, and of each of its deepstack features."""
    made = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [(each if isinstance(each, Tensor) else torch.cat(tuple(each))).flatten(0, -2) for each in made]


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
    made = tower_rows(found)
    moved = _moved(torch.cat(made, -1), all_rows[method], group)
    first, *others = moved.split([each.shape[-1] for each in made], -1)
    found.pooler_output = _in_form_of(found.pooler_output, first)
    if others:
        found.deepstack_features = list(map(_in_form_of, found.deepstack_features, others))
    return found


def _in_form_of(before: Any, rows: Tensor) -> Any:
    """Returns rows as a tower does: a tensor, or a sequence of those of each image."""
    return rows if isinstance(before, Tensor) else (rows,)


@no_compile
def _moved(made: Tensor, rows: TowerRows, group: RankGroup) -> Tensor:
    if len(made) != rows.num_rows:
        remedy = "Pass the model the pixels and grids that shard returned, not those of the whole batch."
        allowed = f"{rows.num_rows}, as shard gave this rank"
        raise ArgumentError("batch", f"{len(made)} rows of the tower's output", allowed, remedy)
    return relayout(made[: rows.source.row_counts[group.rank]], rows.source, rows.target, group)


def _whole_items(modality: Modality, items: Items, ranges: Sequence[tuple[int, int]]) -> TowerPart:
    """Returns a rank's part of a tower where no image is split, from the ranges of its rows."""
    mine = np.searchsorted(np.cumsum(items.tokens), [begin for begin, _ in ranges], "right")
    # A rank without images runs the tower too, on the cheapest, as others may wait for it: FSDP's do.
    mine = mine if mine.size else np.array([items.costs.argmin()])
    return TowerPart(items.inputs(modality, mine), int(items.tokens[mine].sum()), np.arange(items.tokens.sum()), {})


def _grids_of(number: int, modality: Modality, batch: Mapping[str, Any], of_frames: IntArray) -> dict[str, Any]:
    """Returns the arguments of `get_rope_index` for the images or videos of one document."""
    grids: Tensor = batch[modality.grids]
    chosen = np.flatnonzero(_document_of_each(modality, grids, of_frames) == number)
    found: dict[str, Any] = {modality.grids: grids[chosen] if chosen.size else None}
    if modality == VIDEO and (seconds := seconds_of(batch, len(grids))) is not None:
        # A list's numbers are rounded elsewhere than a tensor's.
        kept = seconds[chosen] if isinstance(seconds, Tensor) else [seconds[each] for each in chosen]
        found |= {"second_per_grid_ts": kept, "second_per_grids": torch.as_tensor(kept)}
    return found


def _document_of_each(modality: Modality, grids: Tensor, of_frames: IntArray) -> IntArray:
    """Returns the document of each image or video, from those of frames, in which its positions are computed."""
    ends = np.cumsum(grids[:, 0].numpy())
    first, last = of_frames[ends - grids[:, 0].numpy()], of_frames[ends - 1]
    if (crossing := np.flatnonzero(first != last)).size:
        given = f"{modality.name} {crossing[0]} with frames in documents {first[crossing[0]]} and {last[crossing[0]]}"
        remedy = "Or pass position_ids [axes, 1, total]."
        raise ArgumentError(modality.grids, given, "videos whose frames are in one document", remedy)
    return first


def _check_no_tokens(modality: Modality, places: IntArray) -> None:
    """Refuses tokens of images in a batch without images: collators of text drop them, and no model notices."""
    if places.size:
        allowed = f"the {modality.name}s of the {places.size} tokens of {modality.token} in input_ids"
        remedy = "DataCollatorWithFlattening and other collators of text drop them: concatenate them yourself."
        raise ArgumentError(modality.pixels, None, allowed, remedy)


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
