"""Attention of a forward pass's rows to one another, over the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.diffusers.families import IMAGE
from megatron_cp.diffusers.rows import PassRows
from megatron_cp.exchange.device import on_device, order_tables
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.gather import gather
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.head_exchange import to_heads, to_tokens
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.describe import size
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.attention import plan_attention
from megatron_cp.softmax.attention import attention

_Made = TypeVar("_Made")
_KEPT = 64  # numbers of rows whose plans and indices are kept; a pipeline has one for each guidance branch


class RowAttention:
    """Computes attentions of one model's passes, and keeps their plans, by the rows of all ranks.

    Attributes:
        plans: the plans that were made, by rows and head sizes; the same on every rank.
    """

    def __init__(self, ranks: RankGroup, options: Mapping[str, Any], kernel: str) -> None:
        self.ranks, self.options, self.kernel = ranks, dict(options), kernel
        self.plans: dict[Any, Plan] = {}
        self._plans_of_one: dict[Any, Plan] = {}  # of attentions without other ranks, where text is held
        self._indices: dict[Any, Tensor] = {}
        self._splits: dict[Any, _Split] = {}

    def __call__(self, rows: PassRows, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Returns the attention of local queries `[batch, rows, heads, head_dim]`; zero where a row is not real."""
        batch, count = q.shape[:2]
        local = [x.flatten(0, 1) for x in (q, k, v)]
        index = self._index(rows, q.device)
        if index is not None:
            local = [x.index_select(0, index) for x in local]
        if rows.holds_text:
            out = self._attend_to_held_text(rows, local, scale)
        else:
            q, k, v = local
            out = attention(q, k, v, self._plan(rows, local), self.ranks, softmax_scale=scale, kernel=self.kernel)
        if index is not None:
            out = out.new_zeros(batch * count, *out.shape[1:]).index_copy(0, index, out)
        return out.unflatten(0, (batch, count))

    def explain(self) -> str:
        """Describes each plan, below the rows that it is for, in bytes of the elements that it was made for."""
        found = []
        for (rows, *_, value_head_dim, item_size), plan in self.plans.items():
            lines = [rows.describe()]
            if rows.holds_text and rows.text_rows:
                most = max(last - first for first, last in plan.partition.heads)
                sent = size(rows.text_rows * most * value_head_dim * item_size * (rows.cp_size - 1))
                lines.append(f"its text is on every rank; only its output travels, at most {sent} from a rank")
            found.append("\n".join([*lines, plan.explain(item_size)]))
        return "\n\n".join(found)

    def _plan(self, rows: PassRows, local: list[Tensor]) -> Plan:
        """Returns the plan of the rows that travel to attentions: all, or those of the image where text is held."""
        q, k, v = local
        sizes = {
            "heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "value_head_dim": v.shape[2],
            "item_size": q.dtype.itemsize,
        }  # fmt: skip

        def made() -> Plan:
            layout = (rows.image if rows.holds_text else rows).layout()
            return plan_attention(layout.packing, layout, mask=Mask.full(layout.packing), **sizes | self.options)

        return _kept(self.plans, (rows, *sizes.values()), made)

    def _index(self, rows: PassRows, device: torch.device) -> Tensor | None:
        """Returns which local rows are real, on the device; None if all are."""
        if rows.real_text is None and not rows.stand_ins(self.ranks.rank):
            return None
        made = _kept(self._indices, (rows, device), lambda: _table(rows.real_rows(self.ranks.rank), device))
        order_tables(device)
        return made

    def _attend_to_held_text(self, rows: PassRows, local: list[Tensor], scale: float | None) -> Tensor:
        """Computes attention over rows of the image that travel, and rows of text that every rank has.

        Queries, keys and values of the image travel to the ranks of their heads, where the text is cut by heads
        without travelling. The text's output is gathered over heads.
        """
        rank, device = self.ranks.rank, local[0].device
        split = _kept(self._splits, (rows, device), lambda: _Split(rows, rank, device))
        order_tables(device)
        images = [x.index_select(0, split.image) for x in local]
        texts = [x.index_select(0, split.text) for x in local]
        plan = self._plan(rows, images)
        comm = Communicator(self.ranks, plan.transport, "attention to held text", plan.scheme)
        (inbound, _), (outbound, _) = plan.exchanges(forward=True)
        received = to_heads(inbound, comm, *(x.flatten(1) for x in images))
        first, last = plan.partition.heads[rank]
        own = [x[:, first:last] for x in texts]
        joined = [torch.cat([own_text, image]) for own_text, image in zip(own, received, strict=True)]
        text_rows = len(texts[0])
        q, k, v = (x.index_select(0, split.joined) for x in joined)
        if last > first:
            heads, head_dim, value_head_dim, packing = last - first, q.shape[2], v.shape[2], split.packing

            def made() -> Plan:
                return plan_attention(
                    packing, Layout.contiguous(packing, 1), heads=heads, head_dim=head_dim,
                    value_head_dim=value_head_dim, mask=Mask.full(packing),
                )  # fmt: skip

            plan_of_one = _kept(self._plans_of_one, (rows, heads, head_dim, value_head_dim), made)
            out = attention(q, k, v, plan_of_one, softmax_scale=scale, kernel=self.kernel)
        else:
            out = q.new_zeros(len(q), 0, v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())
        out = out.index_select(0, split.back)
        (image_out,) = to_tokens(outbound, comm, out[text_rows:])
        by_head = plan.memo("layout by head", lambda: _layout_by_head(plan))
        text_out = gather(out[:text_rows].transpose(0, 1), by_head, self.ranks).transpose(0, 1)
        both = torch.cat([text_out, image_out.unflatten(1, (local[0].shape[1], -1))])
        return both.index_select(0, split.local)


class _Split:
    """Orders of rows where text is held, on a device.

    Attributes:
        image, text: indices of the rank's real rows that are image, and text.
        local: indices into `[text rows, local image rows]`, in the order of the rank's real rows.
        joined, back: indices into `[text rows, all image rows]`, entry by entry, and their inverse.
        packing: the entries' real rows.
    """

    def __init__(self, rows: PassRows, rank: int, device: torch.device) -> None:
        is_image = rows.are_image(rank)[rows.real_rows(rank)]
        texts = rows.counts(rank) - rows.image.counts(rank)
        self.image, self.text = (_table(np.flatnonzero(each), device) for each in (is_image, ~is_image))
        places = np.where(is_image, texts.sum() + np.cumsum(is_image), np.cumsum(~is_image)) - 1
        entries = np.arange(rows.batch)
        images = np.full(rows.batch, dict(rows.streams)[IMAGE])
        joined = np.argsort(np.concatenate([entries.repeat(texts), entries.repeat(images)]), kind="stable")
        self.local, self.joined, self.back = (_table(each, device) for each in (places, joined, np.argsort(joined)))
        self.packing = Packing(texts + images)


def _layout_by_head(plan: Plan) -> Layout:
    """Returns the layout of a plan's heads as rows: each rank has those that it computes."""
    owned_heads = [[owned] if owned[1] > owned[0] else [] for owned in plan.partition.heads]
    return Layout.from_fragments(Packing([max(last for _, last in plan.partition.heads)]), owned_heads)


def _table(indices: NDArray, device: torch.device) -> Tensor:
    return on_device(indices, device, torch.int64)


def _kept(made: dict[Any, _Made], key: Any, make: Callable[[], _Made]) -> _Made:
    """Returns what was made for a key; the oldest entry goes where there are too many.

    Without it each layer would plan, and copy indices to the device, in every pass.
    """
    if (found := made.get(key)) is None:
        found = make()
        if len(made) >= _KEPT:
            del made[next(iter(made))]
        made[key] = found
    return found
