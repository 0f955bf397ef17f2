"""`plan_attention` and `plan_linear`: from a batch and a layer to the steps that run it."""

from __future__ import annotations

import warnings

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadDeal, Section, Sections, deal_heads
from megatron_cp.executor.plan import Compute, Plan, ToHeads, ToTokens
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.planner.capabilities import require


def plan_attention(
    packing: Packing,
    layout: Layout,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_head_dim: int | None = None,
    mask: Mask | None = None,
    kv_packing: Packing | None = None,
    kv_layout: Layout | None = None,
    scheme: str = "auto",
) -> Plan:
    """How to run softmax attention over a batch.

    Args:
        packing: the documents.
        layout: who holds which tokens of q, k, v and the output.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; `heads` if None.
        head_dim: features of a query or key head.
        value_head_dim: features of a value head; `head_dim` if None.
        mask: which keys a query sees; causal in each document if None.
        kv_packing, kv_layout: for cross-attention, which is refused so far.
        scheme: "a2a" (a full head exchange; DeepSpeed Ulysses, arXiv 2309.14509) or "auto", which is "a2a" so far.

    Raises:
        ArgumentError: an argument that does not fit the others, or that no scheme here can run.
    """
    require("scheme", scheme)
    _check_layout(packing, layout)
    for argument, other, own in (("kv_packing", kv_packing, packing), ("kv_layout", kv_layout, layout)):
        if other is not None and other != own:
            remedy = "Cross-attention is not built yet; pass None for self-attention."
            raise ArgumentError(argument, other, f"None or {own!r}", remedy)
    mask = Mask.causal(packing) if mask is None else mask
    if not isinstance(mask, Mask) or mask.packing != packing:
        raise ArgumentError("mask", mask, "a mask over the same packing, such as Mask.causal(packing)")
    head_dim = checked_integer("head_dim", head_dim, 1)
    value_head_dim = head_dim if value_head_dim is None else checked_integer("value_head_dim", value_head_dim, 1)
    kv_heads = heads if kv_heads is None else kv_heads
    deal = _deal(layout, heads=heads, kv_heads=kv_heads)
    q = Section("q", heads, head_dim, deal.heads)
    k = Section("k", kv_heads, head_dim, deal.groups)
    v = Section("v", kv_heads, value_head_dim, deal.groups)
    out = Section("out", heads, value_head_dim, deal.heads)
    return Plan(
        "attention", "a2a", layout, deal, mask,
        steps=(
            ToHeads(Exchange(layout, Sections((q, k, v)))),
            Compute("attention"),
            ToTokens(Exchange(layout, Sections((out,)))),
        ),
        notes=_notes(deal, layout, "head", "key/value head"),
    )  # fmt: skip


def plan_linear(
    packing: Packing,
    layout: Layout,
    kind: str = "gdn",
    *,
    heads: int,
    key_heads: int | None = None,
    head_dim: int,
    value_head_dim: int | None = None,
    mode: str = "auto",
) -> Plan:
    """How to run a linear layer over a batch.

    Args:
        packing: the documents; the state starts anew with each.
        layout: who holds which tokens.
        kind: "gdn", the gated delta rule of Gated DeltaNet (arXiv 2412.06464).
        heads: value heads, each with a state of its own.
        key_heads: query/key heads, a divisor of `heads`; `heads` if None.
        head_dim: features of a query or key head.
        value_head_dim: features of a value head; `head_dim` if None.
        mode: "headwise" (whole documents on a share of the heads) or "auto", which is "headwise" so far.

    Raises:
        ArgumentError: an argument that does not fit the others, or that no mode here can run.
    """
    require("kind", kind)
    require("mode", mode)
    _check_layout(packing, layout)
    head_dim = checked_integer("head_dim", head_dim, 1)
    value_head_dim = head_dim if value_head_dim is None else checked_integer("value_head_dim", value_head_dim, 1)
    key_heads = heads if key_heads is None else key_heads
    deal = _deal(layout, heads=heads, key_heads=key_heads)
    sections = Sections((
        Section("q", key_heads, head_dim, deal.groups),
        Section("k", key_heads, head_dim, deal.groups),
        Section("v", heads, value_head_dim, deal.heads),
        Section("beta", heads, 1, deal.heads),
        Section("alpha", heads, 1, deal.heads),
    ))  # fmt: skip
    out = Sections((Section("out", heads, value_head_dim, deal.heads),))
    return Plan(
        kind, "headwise", layout, deal, None,
        steps=(ToHeads(Exchange(layout, sections)), Compute(kind), ToTokens(Exchange(layout, out))),
        notes=_notes(deal, layout, "value head", "key head"),
    )  # fmt: skip


def _deal(layout: Layout, **counts: int) -> HeadDeal:
    """`deal_heads` with errors that name the arguments of the caller: the heads first, then their groups."""
    (heads_name, heads), (groups_name, groups) = (
        (name, checked_integer(name, count, 1)) for name, count in counts.items()
    )
    if heads % groups:
        raise ArgumentError(groups_name, groups, f"a divisor of {heads_name}, {heads}")
    return deal_heads(heads, groups, layout.cp_size)


def _check_layout(packing: Packing, layout: Layout) -> None:
    if not isinstance(packing, Packing):
        raise ArgumentError("packing", packing, "a Packing, as in Packing([7, 1, 130])")
    if not isinstance(layout, Layout) or layout.packing != packing:
        raise ArgumentError("layout", layout, f"a layout of the packing that is planned for, {packing!r}")


def _notes(deal: HeadDeal, layout: Layout, head: str, group: str) -> tuple[str, ...]:
    notes = []
    if deal.idle_ranks:
        notes.append(
            f"{deal.idle_ranks} of {layout.cp_size} ranks get no {head} and compute nothing here: "
            f"a head exchange uses at most as many ranks as there are heads"
        )
        warnings.warn(notes[-1], stacklevel=3)
    if deal.replicated:
        notes.append(f"some ranks share a {group}: it is sent to each of them and its gradient is summed")
    return tuple(notes)
