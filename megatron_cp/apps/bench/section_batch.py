"""A packed batch of all sections of a Gated DeltaNet layer, and each rank's parts of it.

Shapes: `t` a rank's tokens, `T` all tokens, `f` features of all sections, `h` heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.exchange import Exchange, Section, Sections, like_rows
from megatron_cp.planner import exchange_of
from megatron_cp.testing import CODEC_TOLERANCES, Case, relative_error

LAYOUTS = ("zigzag", "contiguous")
ALL = ("q", "k", "v", "z", "beta", "alpha")  # Megatron's order
SENT = (("q", "k", "v"), ("beta",), ("alpha",))  # the layer's tensors; the gate z is not sent
GATES = {"with the gate": (ALL,), "without the gate": SENT}
ALL_SECTIONS = next(iter(GATES))  # megatron-core sends these, and targets are for them


class Batch:
    """A packed batch: the stream of all sections, which every rank draws alike, and each rank's parts of it."""

    def __init__(self, case: Case) -> None:
        self.case, self.packing, self.size = case, case.packing, case.cp
        self.plans = {name: replace(case, layout=name).plan() for name in LAYOUTS}
        first = self.plans["zigzag"].steps[0]
        blocks = {block.name: block for block in first.exchange.sections.blocks}  # type: ignore[union-attr]
        blocks["z"] = replace(blocks["v"], name="z")
        self.blocks: dict[str, Section] = {name: blocks[name] for name in ALL}
        self.widths = {name: block.width for name, block in self.blocks.items()}
        random = torch.Generator().manual_seed(case.seed)
        total = self.packing.total
        stream = torch.randn(total, sum(self.widths.values()), generator=random).to(case.dtype).to(case.device)
        self.columns = dict(zip(ALL, stream.split(list(self.widths.values()), -1), strict=True))

    @property
    def device(self) -> torch.device:
        return next(iter(self.columns.values())).device

    def exchange(self, layout: str, tensors: Sequence[Sequence[str]]) -> Exchange:
        """Returns the exchange of these sections to heads."""
        plan = self.plans[layout]
        sections = Sections(tuple(self.blocks[name] for names in tensors for name in names))
        return exchange_of(plan.layout, sections, plan.partition, plan.head_chunks, plan.codec)

    def back(self, layout: str) -> Exchange:
        """Returns the exchange of the layer's output to tokens."""
        step = self.plans[layout].steps[-1]
        found: Exchange = step.exchange  # type: ignore[union-attr]
        return found

    def local(self, layout: str, names: Sequence[str], rank: int) -> Tensor:
        """Returns `[t, f]` a rank's tokens of some sections."""
        return self.plans[layout].layout.shard(torch.cat([self.columns[name] for name in names], -1), rank)

    def own(self, sections: Sections, rank: int) -> list[Tensor]:
        """Returns `[T, h, d]` a rank's heads of each section, in separate tensors."""
        found = []
        for block in sections.blocks:
            name = "v" if block.name not in self.columns else block.name  # the layer's output is as wide
            heads = self.columns[name].unflatten(-1, (block.num_heads, block.head_dim))
            found.append(heads[:, slice(*block.ranges[rank])].contiguous())
        return found


def in_place(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies that lie to each other in memory as the tensors do."""
    copies = like_rows(*tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


def leaf(tensor: Tensor) -> Tensor:
    """Returns a dense copy of a tensor that requires gradients."""
    return tensor.detach().contiguous().requires_grad_()


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> None:
    """Raises unless tensors have the same bits, or are close if they were coded on the way."""
    for actual, wanted in zip(found, expected, strict=True):
        actual, wanted = actual.detach().reshape(len(actual), -1), wanted.detach().reshape(len(wanted), -1)
        if case.codec == "none":
            is_right = torch.equal(actual, wanted)
        else:
            is_right = relative_error(actual, wanted, 1e-3) <= CODEC_TOLERANCES[case.codec]
        if not is_right:
            raise RuntimeError(f"{name} returns other data than was sent")
