"""Images of a batch: deals them to ranks by cost, and plans the vision tower that makes their rows. No torch here."""

from __future__ import annotations

import heapq
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.array_types import IntArray
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.planner.predict.hardware import Machine
from megatron_cp.planner.predict.price import timelines

LEAST_PIECE = 1024  # rows of a tower's output: some ten milliseconds of a large tower on a GPU
# Towers whose rows depend on other rows of their image in attention alone.
SPLIT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
Pieces = list[list[tuple[int, int]]]


def _patches(config: Any) -> int:
    """Returns the number of patches of an image, all of which have one size."""
    sizes = (getattr(config.vision_config, name) for name in ("image_size", "patch_size"))
    (height, width), (patch_height, patch_width) = ((each, each) if isinstance(each, int) else each for each in sizes)
    return int((height // patch_height) * (width // patch_width))


def _class_rows(config: Any) -> int:
    """Returns the number of rows of the class, which stand before the patches."""
    return int(config.vision_config.model_type in ("clip_vision_model", "internvl_vision"))


def _llava_tokens(config: Any) -> int:
    return _patches(config) + _class_rows(config) - (config.vision_feature_select_strategy == "default")


# Towers that take images, or tiles of them, of one size: the number of tokens that each has.
TILES: dict[str, Callable[[Any], int]] = {
    "gemma3": lambda config: int(config.mm_tokens_per_image),
    "internvl": lambda config: round(_patches(config) * config.downsample_ratio**2),
    "llava": _llava_tokens,
}


def tile_sizes(config: Any) -> tuple[int, int]:
    """Returns the rows of a tile in its tower, and its tokens, of one of the models in `TILES`."""
    return _patches(config) + _class_rows(config), TILES[config.model_type](config)


def image_costs(patches: IntArray, width: int) -> IntArray:
    """Returns the work of images, but for a factor: 24 width^2 a patch in products, 4 width a pair in attention."""
    return patches * (6 * width + patches)


def deal_images(costs: IntArray, tokens: IntArray, num_ranks: int, *, splits: bool) -> tuple[Pieces, int]:
    """Returns the ranges of rows that each rank makes, in rising order, and the number of images that are split.

    The dearest goes first, to the rank that has the least so far. An image that costs more than a rank's share is split
    into equal pieces, if they are large enough to be worth the exchanges of the tower's layers.
    """
    share = max(int(costs.sum()) / num_ranks, 1)
    wanted = np.ceil(costs / share).astype(np.int64) if splits else np.ones_like(costs)
    counts = np.maximum(np.minimum(wanted, tokens // LEAST_PIECE), 1)
    number = np.repeat(np.arange(costs.size), counts)
    within = np.arange(number.size) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = (np.cumsum(tokens) - tokens)[number]
    starts = begins + within * tokens[number] // counts[number]
    ends = begins + (within + 1) * tokens[number] // counts[number]
    dear = costs[number] / counts[number]
    found: Pieces = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for piece in np.argsort(-dear, kind="stable"):
        load, rank = heapq.heappop(loads)
        found[rank].append((int(starts[piece]), int(ends[piece])))
        heapq.heappush(loads, (load + float(dear[piece]), rank))
    return [sorted(each) for each in found], int((counts > 1).sum())


def layouts_of_rows(
    packing: Packing, pieces: Pieces, order: IntArray, places: IntArray, text: Layout
) -> tuple[Layout, Layout]:
    """Returns the layouts of a tower's rows as ranks make them, and as their text holds them.

    Args:
        packing: the rows of each image.
        pieces: of each rank, ranges of rows in the tower's order.
        order: `[rows]` the row at each place of the tower's order.
        places: `[rows]` the place of each row among the tokens of the text.
        text: the layout of these tokens.
    """
    numbers = np.full(text.packing.total, -1)
    numbers[places] = np.arange(packing.total)
    made = [_runs(np.concatenate([order[:0], *(order[begin:end] for begin, end in each)])) for each in pieces]
    held = [_runs(numbers[text.tokens(rank)]) for rank in range(text.cp_size)]
    return Layout.from_fragments(packing, made), Layout.from_fragments(packing, held)


def _runs(numbers: IntArray) -> list[tuple[int, int]]:
    """Returns the ranges of numbers that follow one another, in their order; numbers below 0 are left out."""
    kept = numbers[numbers >= 0]
    edges = np.flatnonzero(np.diff(kept, prepend=-2, append=-2) != 1)
    return [(int(kept[begin]), int(kept[end - 1]) + 1) for begin, end in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Tower:
    """The sizes of a vision tower.

    Attributes:
        kind: the type of its model in transformers.
        layers, width, heads: its layers, the features of a patch, and the heads of its attention.
        weights: those with which each patch is multiplied, of the embedding and all layers.
        projector: those with which each row of output is multiplied, that of deepstack features included.
        features: those of a row of output, deepstack features included.
        patches, rows: so many patches become so many rows of output: of one image where all have one size.
        merge: rows and columns of patches that become a row of output; 0 where all images have one size.
        window: rows and columns of output of a window of attention.
        windowed: the number of layers that see windows.
    """

    kind: str
    layers: int
    width: int
    heads: int
    weights: int
    projector: int
    features: int
    patches: int
    rows: int
    merge: int = 0
    window: int = 1
    windowed: int = 0

    def frames(self, images: Sequence[Sequence[int]], most: int) -> IntArray:
        """Returns `[frames, 2]` the rows and columns of output of each frame.

        Args:
            images: of each image or video its frames, and rows and columns of patches; only a number of images where
                all have one size.
            most: the tokens of the batch, of which the rows are a part.

        Raises:
            ArgumentError: images of another form, that do not divide by `merge`, or with more rows than tokens.
        """
        allowed = f"frames x rows x columns, the last two multiples of {self.merge}, such as 1x64x48"
        if not self.merge:
            allowed = f"a number of images: those of {self.kind} have one size"
        for grid in images:
            if len(grid) != (3 if self.merge else 1) or (self.merge and any(each % self.merge for each in grid[1:])):
                raise ArgumentError("images", "x".join(map(str, grid)), allowed)
        if (rows := sum(self.rows_of(images))) > most:
            remedy = "Rows of images are among the tokens of documents."
            raise ArgumentError("images", f"{rows} rows", f"at most the {most} tokens of the batch", remedy)
        grids = np.array([(*grid[1:], grid[0]) if self.merge else (self.rows, 1, grid[0]) for grid in images])
        return np.repeat(grids[:, :2] // max(self.merge, 1), grids[:, 2], axis=0)

    def rows_of(self, images: Sequence[Sequence[int]]) -> list[int]:
        """Returns the rows of output of each image or video, or of each number of images; see `frames`."""
        return [math.prod(grid) * self.rows // (self.patches if self.merge else 1) for grid in images]

    def windows(self, frames: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the patches of each window, and the row of output at each place of the tower's order."""
        sizes, order, first = [], [], 0
        for height, width in frames.tolist():
            edges = (np.diff(np.append(np.arange(0, each, self.window), each)) for each in (height, width))
            sizes.append(np.multiply.outer(*edges).ravel() * self.patches)
            rows, columns = np.divmod(np.arange(height * width), width)
            order.append(first + np.lexsort((columns, rows, columns // self.window, rows // self.window)))
            first += height * width
        return np.concatenate(sizes), np.concatenate(order)


@dataclass(frozen=True)
class TowerPlan:
    """`TowerPlan`: the work that each rank does in a tower, and its predicted time.

    Attributes:
        pieces: of each rank, the rows of output that it makes, in the tower's order.
        order: `[rows]` the row at each place of this order.
        rows: `[ranks]` the number of rows that each rank makes.
        num_split: the number of images and frames that are split over ranks.
        attention: the plan of the attention of layers that see frames, and of those that see windows, and how many
            layers there are of each.
        operations: `[ranks]` floating-point operations of forward, in matrix products and attention.
        milliseconds: predicted for them on the last rank, forward and backward.
    """

    pieces: Pieces
    order: IntArray
    rows: IntArray
    num_split: int
    attention: list[tuple[Plan, int]]
    operations: IntArray
    milliseconds: tuple[float, float]


def plan_tower(
    tower: Tower, frames: IntArray, num_ranks: int, on: Machine, *, hosts: int | None = None, item_size: int = 2
) -> TowerPlan:
    """Deals images to ranks as `shard` of `megatron_cp.transformers` does, and predicts the tower's work and time.

    Args:
        tower: the tower.
        frames: those that `tower.frames` returned.
        num_ranks: the number of ranks.
        on: the machine.
        hosts: the number of hosts; see `Machine.topology`.
        item_size: bytes of an activation.
    """
    rows = frames.prod(1)
    patches = rows * tower.patches // tower.rows
    costs = image_costs(patches, tower.width)
    pieces, num_split = deal_images(costs, rows, num_ranks, splits=tower.kind in SPLIT)
    fragments = [
        [(begin * tower.patches // tower.rows, end * tower.patches // tower.rows) for begin, end in each]
        for each in pieces
    ]
    sizes, order = tower.windows(frames) if tower.windowed else (patches, np.arange(rows.sum()))
    layers = [(patches, tower.layers - tower.windowed), (sizes, tower.windowed)]
    topology, head_dim = on.topology(num_ranks, hosts), tower.width // tower.heads
    # Images that are whole send nothing by this scheme.
    scheme: dict[str, Any] = {} if num_split else {"scheme": "exact", "head_chunks": 1}
    spec = AttentionSpec(
        tower.heads, head_dim=head_dim, mask="full", hardware=on, topology=topology, item_size=item_size, **scheme
    )
    made = np.array([sum(end - begin for begin, end in each) for each in pieces])
    own = made * tower.patches // tower.rows
    operations = products = 2 * (own * tower.weights + made * tower.projector)
    hardware, attention = on.hardware, []
    rate = hardware.matrix / (1 + hardware.matrix_rows / np.maximum(own, 1)) / hardware.slower(item_size)
    seconds = [products / rate, 2 * products / rate]
    for lengths, number in layers:
        if not number:
            continue
        layout = Layout.from_fragments(Packing(lengths), fragments).padded(min_rows=tower.patches if num_split else 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of heads and bands, which a reader cannot change
            plan = spec.plan(layout)
        attention.append((plan, number))
        operations = operations + number * 4 * head_dim * np.array(plan.work_per_rank())
        for way, timeline in enumerate(timelines(plan, on, topology, item_size=item_size)):
            kernels = [span.end - span.start for span in timeline.spans if span.kind == "kernel"]
            seconds[way] = seconds[way] + number * (timeline.end if num_split else sum(kernels))
    forward, backward = (1e3 * float(each.max()) for each in seconds)
    return TowerPlan(pieces, order, made, num_split, attention, operations, (forward, backward))
