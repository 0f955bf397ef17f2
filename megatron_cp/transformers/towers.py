"""Splits images over ranks: a vision tower's rows are a packing, whose attention is planned like any other.

A tower's documents are its frames, whose patches see each other, or windows of them in some layers. Ranks have pieces
of frames; they give the tower its positions for these rows, and attention that reaches the other pieces.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
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
from megatron_cp.planner.images import SPLIT
from megatron_cp.softmax.attention import attention

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


def split_tower(
    tower: Any, modality: str, pixels: Tensor, grids: Tensor, pieces: Sequence[Sequence[tuple[int, int]]],
    group: RankGroup, kernel: str, device: torch.device,
) -> tuple[Tensor, Tensor, IntArray, dict[str, Any]]:  # fmt: skip
    """Returns this rank's part of what a tower is given, and of its rows.

    Args:
        tower: a tower that `tower_of` returned.
        modality: "image" or "video".
        pixels: `[patches, features]` of all images.
        grids: `[frames, 3]` 1, and the rows and columns of patches of each.
        pieces: of each rank, ranges of the tower's output rows in the order in which its layers have them.
        group: the ranks.
        kernel: the kernel of attention.
        device: where the tower runs.

    Returns:
        The pixels of this rank, a grid of as many patches, `[rows]` the output row at each place of the tower's order,
        and the other arguments of the method that calls the tower.
    """
    from transformers import vision_utils

    merge = int(tower.spatial_merge_size)
    unit, patches = merge**2, len(pixels)
    order, windows = torch.arange(patches // unit), None
    if hasattr(tower, "fullatt_block_indexes"):
        order, ends = vision_utils.get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        windows = Packing(np.diff(ends.numpy()))
    rows = (order[:, None] * unit + torch.arange(unit)).flatten()
    fragments = [[(begin * unit, end * unit) for begin, end in of_rank] for of_rank in pieces]
    frames = Packing((grids[:, 1] * grids[:, 2]).numpy())
    plans = [
        None if packing is None else _plans(tower, packing, fragments, unit, pixels.element_size())
        for packing in (frames, windows)
    ]
    layout = plans[0].layout  # type: ignore[union-attr]
    for each in plans:
        if each is not None:
            prepare_plans(each, group.rank, device)

    mine = layout.shard(rows, group.rank)

    def own(values: Tensor) -> Tensor:
        return values[mine]

    count = int(layout.row_counts[group.rank])
    given = {"position_ids": own(vision_utils.get_vision_position_ids(grids, merge))}
    given["cu_seqlens"] = torch.tensor([0, count], dtype=torch.int32)
    if windows is not None:
        given["window_index"], given["cu_window_seqlens"] = torch.arange(count // unit), given["cu_seqlens"]
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        given["interp_indices"], given["interp_weights"] = own(indices), own(weights)
    arguments: dict[str, Any] = {f"{modality}_{name}": value.to(device) for name, value in given.items()}
    arguments["cp_tower"] = TowerPlans(plans[0], plans[1], group, kernel)  # type: ignore[arg-type]
    return own(pixels), torch.tensor([[1, merge, count // merge]]), order.numpy(), arguments


def _plans(
    tower: Any, packing: Packing, fragments: Sequence[Sequence[tuple[int, int]]], unit: int, item_size: int
) -> BatchPlan:
    attn = tower.blocks[0].attn
    heads, head_dim = int(attn.num_heads), int(attn.qkv.in_features) // int(attn.num_heads)
    # A rank without a piece has pad rows, copies of the first patch, since a tower cannot run on none.
    layout = Layout.from_fragments(packing, fragments).padded(min_rows=unit)
    return BatchPlan(layout, [AttentionSpec(heads, head_dim=head_dim, mask="full", item_size=item_size)])


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
