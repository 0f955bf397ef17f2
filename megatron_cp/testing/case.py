"""`LayerCase`: a layer on a batch over some ranks, as data. No torch in here, so that a plan is made without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from typing_extensions import Self

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import AUTO, may_assign_tiles
from megatron_cp.plan.transport import Transport, knows_hosts
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import AttentionSpec, LinearSpec, Slot
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.layouts import LayoutChoice, choose_layout, layout_by_name
from megatron_cp.planner.linear import LinearShape, linear_shape, plan_linear
from megatron_cp.planner.predict import Machine, machine
from megatron_cp.planner.tiled import checked_search


class ElementType(Protocol):
    """The type of a tensor's elements: torch's own, or a record with the size that a plan needs."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""


@dataclass(frozen=True)
class NamedType:
    """An element type by its name in torch, for use without torch."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


FLOAT64 = NamedType("float64", 8)
DTYPES = {
    dtype.name: dtype for dtype in (FLOAT64, NamedType("float32", 4), NamedType("bfloat16", 2), NamedType("float16", 2))
}


@dataclass(frozen=True)
class LayerCase:
    """A layer on a batch over some ranks: its documents, its layout and its plan.

    Attributes:
        layer: "attention", or the whole mixer of a kind of linear layer, one of `kinds.KINDS`.
        lengths: the documents' lengths; with `parents`, those of the segments of documents that branch.
        parents: the segment that each one continues, see `Packing.tree`; None for documents that share no tokens.
        layout: a name that `layout_by_name` knows.
        heads: query or value heads; for mamba the heads of x.
        groups: key/value or key heads; for mamba the groups of B and C.
        head_dim, value_head_dim: features of a key and of a value head; for mamba of B and C, and of a head of x.
            conv1d has `heads * value_head_dim` channels.
        conv_width: taps of a linear layer's convolution.
        mask: for attention, a spelling of `Mask.named`, or the name of a method that makes one, with its arguments:
            `("from_slices", slices)`.
        layout_mask: a spelling of the mask that the balanced layout is made for; None for `mask`.
        kv_lengths, kv_layout: for cross-attention, the lengths of the keys' documents and their layout; None for those
            of the queries.
        scheme: the scheme of attention, or the mode of a linear layer.
        ulysses_degree: for attention; see `plan_attention`.
        head_chunks: for attention and headwise linear layers.
        num_hosts: hosts of a hierarchical transport, each with neighbouring ranks; `hosts` overrides it.
        hidden_size: features of the model's hidden states, if they may be redistributed around a linear layer; else
            None.
        num_householder: steps of a token of gdp.
        latent, latent_mode: for attention; see `plan_attention`. With `latent`, `latent_attention` runs.
        softmax_scale: None for `head_dim ** -0.5`.
        softcap, dropout, learned_sink: for attention; see `attention`.
        kernel: the backend, or "auto".
        seed: seed of the inputs and of a random layout.
        search_seconds: for tiles; see `plan_attention`.
        machine: the machine for which "auto" predicts; a safe one if None.
        machine_hosts: the number of its hosts that the ranks occupy; as many as they fill if None.
    """

    layer: str
    cp: int
    lengths: tuple[int, ...]
    layout: str = "zigzag"
    heads: int = 6
    groups: int = 2
    head_dim: int = 16
    value_head_dim: int = 16
    conv_width: int = 4
    mask: str | tuple[Any, ...] = "causal"
    kv_lengths: tuple[int, ...] | None = None
    kv_layout: str = "contiguous"
    scheme: str = "auto"
    ulysses_degree: int | None = None
    head_chunks: int | None = None
    transport: str = "collective"
    num_hosts: int = 2
    hosts: tuple[int, ...] = ()
    codec: str = "none"
    hidden_size: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    learned_sink: bool = False
    align: int = 1
    dtype: ElementType = FLOAT64
    device: str = "cpu"
    kernel: str = "auto"
    seed: int = 0
    search_seconds: float = 0.0
    machine: Machine | None = None
    machine_hosts: int | None = None
    parents: tuple[int, ...] | None = None
    layout_mask: str | None = None
    latent: tuple[int, int] | None = None
    latent_mode: str | None = None
    num_householder: int = 1

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths[:6])) + (",..." if len(self.lengths) > 6 else "")
        extras = [
            *([f"parents {','.join(map(str, self.parents))}"] if self.parents else []),
            *([self.mask if isinstance(self.mask, str) else self.mask[0]] if self.layer == "attention" else []),
            *([f"keys {self.kv_layout} {list(self.kv_lengths)}"] if self.kv_lengths else []),
            *(["sink"] if self.learned_sink else []),
            *([f"softcap {self.softcap:g}"] if self.softcap else []),
            *([f"scale {self.softmax_scale:.4g}"] if self.softmax_scale is not None else []),
            *([f"dropout {self.dropout:g}"] if self.dropout else []),
            *([f"latents {self.latent[1]}+{self.latent[0]} {self.latent_mode}"] if self.latent else []),
            *([f"{self.num_householder} steps"] if self.num_householder > 1 else []),
            *([f"{self.head_chunks} chunks"] if self.head_chunks else []),
            *([self._describe_transport()] if self.transport != "collective" else []),
            *([self.codec if self.codes else f"{self.codec} (nothing is coded)"] if self.codec != "none" else []),
        ]
        sizes = f" of {self.head_dim}/{self.value_head_dim}" if self.head_dim != self.value_head_dim else ""
        return (
            f"{self.layer} {self.scheme} cp={self.cp} {self.layout} [{lengths}] heads {self.heads}/{self.groups}{sizes}"
            f" {' '.join([*extras, str(self.dtype).removeprefix('torch.')])}"
        )

    @property
    def packing(self) -> Packing:
        return Packing(self.lengths) if self.parents is None else Packing.tree(self.lengths, self.parents)

    @property
    def kv_packing(self) -> Packing:
        return Packing(self.kv_lengths) if self.kv_lengths else self.packing

    def made_mask(self) -> Mask:
        """Returns the mask of attention."""
        if isinstance(self.mask, str):
            return Mask.named(self.packing, self.mask, self.kv_packing if self.kv_lengths else None)
        name, *arguments = self.mask
        made: Mask = getattr(Mask, name)(self.packing, *arguments)
        return made

    def with_scheme(self, scheme: str, **changes: Any) -> Self:
        """Returns the case with another scheme or mode, without a search for tiles if that assigns none."""
        if not may_assign_tiles(scheme):
            changes |= {"search_seconds": 0.0}
        return replace(self, scheme=scheme, **changes)

    def plan(self) -> Plan:
        mask = self.made_mask() if self.layer == "attention" else None
        wire, choice = self._wire(), self.layout_choice()
        if choice:
            layout = choice.layout
        else:
            layout = layout_by_name(
                self.layout, self.packing, self.cp, align=self.align, seed=self.seed, mask=self._of_layout(mask)
            )
        if self.layer == "attention":
            cross: dict[str, Any] = {}
            if self.kv_lengths:
                kv_layout = layout_by_name(self.kv_layout, self.kv_packing, self.cp, seed=self.seed + 1)
                cross = {"kv_packing": self.kv_packing, "kv_layout": kv_layout}
            return plan_attention(
                self.packing, layout, heads=self.heads, kv_heads=self.groups, head_dim=self.head_dim,
                value_head_dim=self.value_head_dim, mask=mask, scheme=self.scheme,
                ulysses_degree=self.ulysses_degree, search_seconds=self.search_seconds, latent=self.latent,
                latent_mode=self.latent_mode, **wire, **cross,
            )  # fmt: skip
        checked_search(self.search_seconds, [])
        return plan_linear(
            self.packing, layout, require("kind", self.layer), conv_width=self.conv_width, mode=self.scheme,
            hidden_size=self.hidden_size, **self._linear_sizes(), **wire,
        )  # fmt: skip

    def layout_choice(self) -> LayoutChoice | None:
        """Returns the reason for the layer's layout; None if it was given by name."""
        if self.layout != AUTO:
            return None
        mask = self.made_mask() if self.layer == "attention" else None
        return choose_layout(self.packing, self.cp, [self.slot()], align=self.align, mask=self._of_layout(mask))

    def _of_layout(self, mask: Mask | None) -> Mask | None:
        """Returns the mask that the balanced layout is made for."""
        return mask if self.layout_mask is None else Mask.named(self.packing, self.layout_mask)

    def _wire(self) -> dict[str, Any]:
        """Returns the arguments that plans and slots share."""
        topology = machine(self.machine).topology(self.cp, self.machine_hosts) if self.machine_hosts else None
        return {
            "head_chunks": self.head_chunks, "transport": self._transport(), "codec": self.codec,
            "hardware": self.machine, "topology": topology, "item_size": self.dtype.itemsize,
        }  # fmt: skip

    def slot(self) -> Slot:
        """Returns the layer without its batch."""
        sizes = (self.groups, self.head_dim, self.value_head_dim)
        if self.layer != "attention":
            checked_search(self.search_seconds, [])
            return LinearSpec(
                self.layer, self._linear_heads, *sizes, conv_width=self.conv_width, mode=self.scheme,
                hidden_size=self.hidden_size, num_householder=self.num_householder, **self._wire(),
            )  # fmt: skip
        if not isinstance(self.mask, str) or self.kv_lengths:
            allowed = "contiguous, zigzag or balanced for keys of their own, and masks that have no spelling"
            raise ArgumentError("layout", self.layout, allowed)
        return AttentionSpec(
            self.heads, *sizes, mask=self.mask, scheme=self.scheme, ulysses_degree=self.ulysses_degree,
            search_seconds=self.search_seconds, latent=self.latent, latent_mode=self.latent_mode, **self._wire(),
        )  # fmt: skip

    @property
    def _linear_heads(self) -> int:
        """The number of heads of a linear layer, or of channels of one without states."""
        return self.heads if KINDS[self.layer].has_state else self.heads * self.value_head_dim

    def _linear_sizes(self) -> dict[str, Any]:
        """Returns the sizes of a linear layer as arguments of `plan_linear`; conv1d has the channels of all heads."""
        kind, heads = KINDS[self.layer], self._linear_heads
        sizes = {"heads": heads, "groups": self.groups, "key_dim": self.head_dim, "value_dim": self.value_head_dim}
        sizes["steps"] = self.num_householder
        return {argument.name: sizes[argument.field] for argument in kind.arguments}

    @property
    def linear_shape(self) -> LinearShape:
        """The sizes of a linear layer, in one vocabulary."""
        return linear_shape(self.layer, self.conv_width, **self._linear_sizes())

    def _transport(self) -> Transport:
        require("transport", self.transport)
        if knows_hosts(self.transport) and self.hosts:
            return Transport(self.transport, self.hosts)
        return Transport.even_hosts(self.transport, self.cp, min(self.num_hosts, self.cp))

    def _describe_transport(self) -> str:
        hosts = self._transport().hosts
        ranks = "+".join(str(hosts.count(host)) for host in range(len(set(hosts))))
        return f"{self.transport} over {ranks} ranks" if hosts else self.transport

    @property
    def codes(self) -> bool:
        """True if any message is coded."""
        plan, item = self.plan(), self.dtype.itemsize
        exchanges = [exchange for exchange, _ in plan.exchanges(forward=True)]
        coded = any(any(each.coded([item] * len(each.sections.blocks))) for each in exchanges)
        return coded or (plan.attend is not None and plan.attend.coded_bytes(item) > 0)

    @property
    def softmax_options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout": self.dropout,
            "seed": self.seed,
        }
