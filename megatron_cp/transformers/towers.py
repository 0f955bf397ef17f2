"""Splits images over ranks: a vision tower's rows are a packing, whose attention is planned like any other.

A tower's documents are its frames, whose patches see each other, or windows of them in some layers. Ranks have pieces
of frames; they give the tower its positions for these rows, and attention that reaches the other pieces.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_cp.batch.shard import prepare_plans
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.batch import AttentionSpec, BatchPlan
from megatron_cp.planner.images import SPLIT, Pieces
from megatron_cp.softmax.attention import attention
from megatron_cp.transformers.image_items import Items, Modality

NAME = "megatron_cp_tower"  # in AttentionInterface
WINDOWED = "cp_windowed"  # an attribute of the attention of towers that are split: True for windows


@dataclass(frozen=True, eq=False)
class TowerPlans:
    """The keyword argument `cp_tower` of a tower whose images are split.

    Attributes:
        frames: the plans of layers that see whole frames.
        windows: the plans of layers that see windows of them; None without such layers.
        group: the ranks.
        kernel: the kernel, as for the text.
    """

    frames: BatchPlan
    windows: BatchPlan | None
    group: RankGroup
    kernel: str


def tower_of(model: nn.Module) -> Any:
    """Returns the tower of a model whose images can be split; None for others."""
    kind = model.config.model_type if isinstance(model, PreTrainedModel) else None
    if kind not in SPLIT or importlib.util.find_spec("transformers.vision_utils") is None:
        return None
    from transformers import vision_utils

    if "kwargs" not in inspect.signature(vision_utils.get_vision_position_ids).parameters:
        return None  # before 5.17 towers computed all this themselves
    return next((each.visual for each in model.modules() if hasattr(each, "visual")), None)


def attention_of(tower: Any) -> list[tuple[nn.Module, bool]]:
    """Returns the attention of each layer of a tower, and True where it sees windows."""
    whole = getattr(tower, "fullatt_block_indexes", None)
    return [(block.attn, whole is not None and number not in whole) for number, block in enumerate(tower.blocks)]


@dataclass(frozen=True, eq=False)
class TowerPart:
    """A rank's part of a tower.

    Attributes:
        inputs: its pixels and what belongs to them, by the names of the model's arguments.
        num_rows: the number of rows of output that it makes.
        order: `[rows]` the row at each place of the tower's order, of the rows of all ranks.
        arguments: the other arguments of the method that calls the tower.
    """

    inputs: dict[str, Tensor]
    num_rows: int
    order: IntArray
    arguments: Mapping[str, Any]


def split_tower(
    tower: Any, modality: Modality, items: Items, pieces: Pieces, group: RankGroup, kernel: str, device: torch.device
) -> TowerPart:
    """Returns this rank's part of a tower whose images are split.

    Args:
        tower: a tower that `tower_of` returned.
        modality: images or videos.
        items: those of the whole batch, with grids.
        pieces: of each rank, ranges of the tower's output rows in the order in which its layers have them.
        group: the ranks.
        kernel: the kernel of attention.
        device: where the tower runs.
    """
    merge, grids = int(tower.spatial_merge_size), items.beside[modality.grids]
    unit = merge**2
    order, windows = _order_and_windows(tower, grids, len(items.pixels) // unit)
    fragments = [[(begin * unit, end * unit) for begin, end in of_rank] for of_rank in pieces]
    frames = _plan(tower, Packing((grids[:, 1] * grids[:, 2]).numpy()), fragments)
    plans = TowerPlans(frames, None if windows is None else _plan(tower, windows, fragments), group, kernel)
    for each in (plans.frames, plans.windows):
        if each is not None:
            prepare_plans(each, group.rank, device)
    mine = frames.layout.shard((order[:, None] * unit + torch.arange(unit)).flatten(), group.rank)
    given = {f"{modality.name}_{name}": each.to(device) for name, each in _positions(tower, grids, mine).items()}
    grid = torch.tensor([[1, merge, len(mine) // merge]])
    inputs = {modality.pixels: items.pixels[mine], modality.grids: grid}
    return TowerPart(inputs, len(mine) // unit, order.numpy(), {**given, "cp_tower": plans})


def _order_and_windows(tower: Any, grids: Tensor, num_rows: int) -> tuple[Tensor, Packing | None]:
    """Returns the output row at each place of the tower's order, and its windows of patches; None without windows."""
    if not hasattr(tower, "fullatt_block_indexes"):
        return torch.arange(num_rows), None
    from transformers.vision_utils import get_vision_window_index

    order, ends = get_vision_window_index(grids, int(tower.spatial_merge_size), tower.window_size, tower.patch_size)
    return order, Packing(np.diff(ends.numpy()))


def _positions(tower: Any, grids: Tensor, mine: Tensor) -> dict[str, Tensor]:
    """Returns what a tower would compute from the grids of its patches, for some of them, as of one frame."""
    from transformers import vision_utils

    merge, ends = int(tower.spatial_merge_size), torch.tensor([0, len(mine)], dtype=torch.int32)
    given = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)[mine], "cu_seqlens": ends}
    if hasattr(tower, "fullatt_block_indexes"):
        given |= {"window_index": torch.arange(len(mine) // merge**2), "cu_window_seqlens": ends}
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        given |= {"interp_indices": indices[mine], "interp_weights": weights[mine]}
    return given


def _plan(tower: Any, packing: Packing, fragments: Pieces) -> BatchPlan:
    """Plans the attention of layers that see the documents of a packing."""
    attn = tower.blocks[0].attn
    heads, head_dim = int(attn.num_heads), int(attn.qkv.in_features) // int(attn.num_heads)
    # A rank without a piece has pad rows, copies of the first patch, since a tower cannot run on none.
    layout = Layout.from_fragments(packing, fragments).padded(min_rows=int(tower.spatial_merge_size) ** 2)
    return BatchPlan(layout, [AttentionSpec(heads, head_dim=head_dim, mask="full", item_size=tower.dtype.itemsize)])


@no_compile
def tower_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    cp_tower: TowerPlans, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes a tower's attention for this rank's patches: `[1, heads, t, head_dim]` to `[1, t, heads, head_dim]`."""
    assert attention_mask is None
    assert not dropout
    plans = cp_tower.windows if getattr(module, WINDOWED) else cp_tower.frames
    assert plans is not None
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    found = attention(q, k, v, plans.plans[0], cp_tower.group, softmax_scale=scaling, kernel=cp_tower.kernel)
    return found[None], None
