"""`plan_attention`: plans a softmax attention layer on a batch."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer, checked_size
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.block_masks import is_block_table
from megatron_cp.layout.filled_layout import FilledLayout
from megatron_cp.layout.mask import Mask, MaskLike, mask_over
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import AUTO, SCHEMES, alternatives, scheme_named
from megatron_cp.plan.selection import Selection, checked_selection
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport
from megatron_cp.planner.capabilities import hints_keywords, require
from megatron_cp.planner.checks import check_layout, checked_heads, checked_setting, notes_on_heads
from megatron_cp.planner.choose import fastest
from megatron_cp.planner.predict.hardware import Machine, Setting, Topology
from megatron_cp.planner.request import AttentionShape, Choice, Request
from megatron_cp.planner.tiled import checked_search, notes_of_search

_LARGEST_ON_DEVICES = 256  # features of a head in flash kernels


@hints_keywords
def plan_attention(
    packing: Packing,
    layout: Layout,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_head_dim: int | None = None,
    latent: tuple[int, int] | None = None,
    topk: int | None = None,
    indexer: tuple[int, int] | None = None,
    block: int | None = None,
    latent_mode: str | None = None,
    mask: MaskLike | None = None,
    kv_packing: Packing | None = None,
    kv_layout: Layout | None = None,
    scheme: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    transport: Transport | str = COLLECTIVE,
    codec: str = "none",
    hardware: Machine | str | None = None,
    topology: Topology | None = None,
    item_size: int = 2,
    search_seconds: float = 0.0,
) -> Plan:
    """Plans a softmax attention layer on a batch.

    A scheme is a head exchange among `u` neighbouring ranks (DeepSpeed Ulysses, arXiv 2309.14509) and a schedule by
    which keys and values travel between the `cp_size / u` groups of such ranks:

        a2a              u = cp_size: nothing else travels
        p2p              u = 1, keys pass round a ring (arXiv 2310.01889)
        all_gather       u = 1, every rank gathers all keys (Llama 3, arXiv 2407.21783)
        exact            u = 1, every rank receives the keys that its queries see and no others
        exact_by_host    exact over several hosts: a key crosses once to each other host that sees it, and goes on there
        tiled            u = 1, tiles of the mask are assigned to ranks, evenly and so that little travels: keys, and
                         queries, whose partial results return (after UltraAttn, doi 10.1145/3712285.3759894)
        a2a+p2p, a2a+all_gather, a2a+exact, a2a+tiled    1 < u < cp_size

    Args:
        packing: the documents.
        layout: the assignment of tokens to ranks, for q and the output, and for k and v.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; `heads` if None.
        head_dim: features of a query or key head.
        value_head_dim: features of a value head; `head_dim` if None.
        latent: for `latent_attention`, features of the shared rotary key and of the latent of a token, such as
            (64, 512); None for `attention`.
        latent_mode: "expand": latents travel and are expanded where they arrive; "absorb": latents travel and queries
            are multiplied by the up-projection; "heads": keys and values travel; "auto": whichever is predicted to be
            fastest. If None, "auto" with scheme "auto", else "expand".
        topk: for `sparse_attention`, the most keys that a query attends to; None where it attends to all that the mask
            shows. Only schemes that bring all keys of a query at once can do it: exact,
            exact_by_host and all_gather.
        indexer: heads and features of the indexer that chooses these keys, such as (64, 128), whose keys travel too;
            None where the caller has chosen them.
        block: with `topk`, the keys of a block, counted from the start of each document: each query head then chooses
            `topk` blocks for itself, as in MoBA, under a causal mask. None where keys are chosen one by one.
        mask: the keys that each query sees: a `Mask`, a spelling of `Mask.named`, such as "window:128", or a function
            of the packing that returns a `Mask`; causal in each document if None, or full if `kv_packing` or
            `kv_layout` is given.
        kv_packing, kv_layout: for cross-attention, the documents of the keys (as many as those of the queries) and
            their layout; None for self-attention.
        scheme: one of the above, or "auto", which takes the candidate that is predicted to be fastest: the scheme, its
            degree and, unless given, the number of head chunks.
        ulysses_degree: `u`, for the last four; the largest divisor of `cp_size` by which the key/value heads can be
            shared out evenly if None. With "auto", only candidates with this degree are compared.
        head_chunks: parts in which heads travel, while the one before is computed: keys of all_gather, exact, tiled
            and their products with a2a, where None is 2 if a rank has as many key/value heads; heads of the exchange in
            a2a and a2a+p2p, where None is 1. At most as many as a rank has key/value heads.
        transport: the transport of messages: "collective", "pairwise", "shared_memory", "symmetric_memory", or a
            `Transport`, which hierarchical needs.
        codec: the codec of messages: "none", "fp8" (E4M3), "fp8_e5m2" (gradients of exchanged heads in E5M2) or "int8",
            each with a scale for each token and head. Coded are the heads of an exchange, and their gradients; and
            keys and values, or latents, that travel, once by their owner: every rank, the owner too, computes with the
            decoded ones. The gradients of keys are not coded.
        hardware: the machine of predictions: a preset such as "h100", its file, or a `Machine`; "h100" if None.
        topology: the hosts of the ranks; full hosts of that machine if None.
        item_size: bytes of an activation, for predictions and for the bytes of tiles.
        search_seconds: the time limit, for each of forward and backward, of a further search for better tiles in tiled
            and a2a+tiled, with OR-Tools (the extra `solver`). All ranks find the same. "auto" compares these two
            schemes only if this is above 0, since they take seconds to plan; other schemes refuse a search.

    Raises:
        ArgumentError: an argument that does not fit the others or that no scheme can run.
    """
    scheme, codec = require("scheme", scheme), require("codec", codec)
    check_layout(packing, layout)
    # The arguments decide, not equal lengths by chance: the default mask must not depend on the batch.
    is_cross = kv_packing is not None or kv_layout is not None
    kv_packing, kv_layout = _key_side(packing, layout, kv_packing, kv_layout)
    if mask is None:
        mask = Mask.full(packing, kv_packing) if is_cross else Mask.causal(packing)
    mask = mask_over(packing, mask, kv_packing)
    for side in (layout, kv_layout):
        if isinstance(side, FilledLayout):
            _check_filler_is_unseen(side, mask, is_cross=is_cross)
    for name, value in {"head_chunks": head_chunks, "ulysses_degree": ulysses_degree}.items():
        if value is not None:
            checked_integer(name, value, 1)
    heads, kv_heads = checked_heads(heads=heads, kv_heads=heads if kv_heads is None else kv_heads)
    head_dim = checked_size("head_dim", head_dim, heads)
    value_head_dim = head_dim if value_head_dim is None else checked_size("value_head_dim", value_head_dim, heads)
    transport = checked_transport(transport, layout.cp_size)
    setting = checked_setting(transport, hardware, topology, item_size, layout.cp_size)
    search_seconds = checked_search(search_seconds, [scheme])
    latent_mode = checked_latent_mode(latent_mode, latent)
    latent = None if latent is None else checked_latent(latent, heads, kv_heads, head_dim)
    selection = checked_selection(topk, indexer, block, kv_heads if latent is None else 1, scheme)
    _check_blocks(mask, selection)
    shape = AttentionShape(heads, kv_heads, head_dim, value_head_dim, latent, selection)
    request = Request(layout, kv_layout, mask, shape, setting, search_seconds)
    modes = _latent_modes(latent_mode, scheme, shape, setting)
    wanted = None if scheme == AUTO else scheme_named(scheme)
    if layout.cp_size == 1 or isinstance(layout, FilledLayout):
        modes, wanted = modes[:1], scheme_named(scheme, selects=selection is not None)
    asked = Choice(wanted, ulysses_degree, head_chunks, codec, transport, modes[0])
    is_open = wanted is None or len(modes) > 1
    plan = fastest(request, asked, modes) if is_open else request.plan(asked)
    on_heads = notes_on_heads(plan.partition, plan.cp_size, "head", "key/value head", "exact and p2p use them all")
    on_bands = _note_on_bands(plan)
    warned = [*on_heads[:1], *on_bands] if plan.partition.idle_ranks else on_bands
    for note in warned:
        warnings.warn(note, stacklevel=3)
    return replace(plan, notes=(*on_heads, *on_bands, *notes_of_search(plan), *plan.notes))


def _key_side(
    packing: Packing, layout: Layout, kv_packing: Packing | None, kv_layout: Layout | None
) -> tuple[Packing, Layout]:
    """Returns the documents and the layout of the keys, by default those of the queries."""
    if kv_packing is None and kv_layout is None:
        return packing, layout
    if not isinstance(kv_packing, Packing) or kv_packing.num_documents != packing.num_documents:
        raise ArgumentError(
            "kv_packing", kv_packing, f"a Packing of {packing.num_documents} documents, as the queries'"
        )
    if not isinstance(kv_layout, Layout) or kv_layout.packing != kv_packing or kv_layout.cp_size != layout.cp_size:
        raise ArgumentError(
            "kv_layout", kv_layout, f"a layout of {kv_packing!r} over {layout.cp_size} ranks, such as Layout.zigzag"
        )
    return kv_packing, kv_layout


def _check_filler_is_unseen(layout: FilledLayout, mask: Mask, *, is_cross: bool) -> None:
    given, lengths = layout.given.lengths, layout.packing.lengths
    filled = np.flatnonzero(lengths[: given.size] > given)
    if not filled.size:
        return
    own = lengths.copy()
    own[: given.size] = given
    first, bands = filled[0], mask.bands.copy()
    if not is_cross and not is_block_table(mask.name):  # both depend on a document's padded length
        ends = (layout.packing.cu_seqlens[:-1] + own)[layout.packing.documents_of(bands[:, 0])]
        bands[:, 1] = np.minimum(bands[:, 1], ends)
        seen = band.area(bands)
        bands[:, 3] = np.minimum(bands[:, 3], ends)
        if band.area(bands) == seen:
            return
    allowed = "causal, full or a window under which no token sees the pads of its document"
    if is_cross:
        allowed = "one of a pack to itself if documents are padded"
    remedy = (
        f"Document {first} has {given[first]} tokens and is padded to {lengths[first]}. With a2a, GraphTables with "
        "align_documents=1 pad no document; with p2p, lengths must already be multiples."
    )
    raise ArgumentError("mask", mask.name, allowed, remedy)


def _check_blocks(mask: Mask, selection: Selection | None) -> None:
    """Refuses a choice of blocks unless queries see all keys of their document before them."""
    if selection is None or not selection.block:
        return
    if not mask.is_cross:
        causal = Mask.causal(mask.packing)
        if mask.packing.branches is None:  # documents may end in pads, which see nothing
            see = np.concatenate([[0], np.cumsum(mask.seen > 0)])[mask.packing.cu_seqlens]
            causal = causal.unpadded(np.diff(see))
        if mask == causal:
            return
    given = f"{mask.name} over other documents of keys" if mask.is_cross else mask.name
    raise ArgumentError("mask", given, "causal with block", "Without block, topk keys are chosen under any mask.")


def checked_latent(latent: object, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns the features of a shared key and of a latent after checking them.

    Raises:
        ArgumentError: other than two numbers of features, or heads that share keys.
    """
    if not isinstance(latent, tuple | list) or len(latent) != 2:
        raise ArgumentError("latent", latent, "features of the shared key and of the latent, such as (64, 512)")
    shared, rank = checked_size("latent[0]", latent[0]), checked_size("latent[1]", latent[1])
    if shared >= head_dim:
        raise ArgumentError("latent", latent, f"a shared key of fewer than head_dim, {head_dim} features")
    if kv_heads != heads:
        raise ArgumentError("kv_heads", kv_heads, f"None with latent: each of {heads} heads has keys of its own")
    return shared, rank


def checked_latent_mode(latent_mode: str | None, latent: object) -> str | None:
    """Returns the spelling of a mode of latents, or None for none.

    Raises:
        ArgumentError: an unknown mode, or one without latents.
    """
    if latent_mode is None:
        return None
    if latent is None:
        raise ArgumentError("latent_mode", latent_mode, "None without latent", "Keys and values are given.")
    return require("latent_mode", latent_mode)


def _latent_modes(asked: str | None, scheme: str, shape: AttentionShape, setting: Setting) -> tuple[str, ...]:
    """Returns the modes of latents to compare: the one that was asked for, or those that "auto" has.

    Raises:
        ArgumentError: keys or absorbed queries where queries select among latents.
    """
    if shape.selection is not None:  # among latents, which no mode changes
        if asked not in (None, AUTO, "expand"):
            raise ArgumentError("latent_mode", asked, "None with topk", "Queries select among latents as they are.")
        return ("expand",)
    if shape.latent is None or (asked is None and scheme != AUTO):
        return ("expand",)
    if asked not in (None, AUTO):
        return (asked,)
    is_possible = setting.machine.hardware.cores or sum(shape.latent) <= _LARGEST_ON_DEVICES
    return tuple(mode for mode in LATENT_MODES if is_possible or mode != "absorb")


# A ring makes a kernel call for each pair of fragments of two ranks that see one another; a document cut in zigzag has
# two or three such pairs a stage. These layouts stay far below this many calls for each stage.
_MANY, _AT_LEAST = 8, 1000


def _note_on_bands(plan: Plan) -> tuple[str, ...]:
    """Returns a note where a ring needs very many kernel calls and other schemes need few."""
    attend, scheme = plan.attend, SCHEMES[plan.scheme]
    assert attend is not None
    if attend.num_stages == 1 or attend.tiled is not None:
        return ()
    last_rank = attend.num_kv_ranks - 1  # which sees most in stream order
    staged_calls, gathered_calls = attend.count_bands(last_rank)
    if staged_calls < max(_AT_LEAST, _MANY * attend.num_kv_ranks * gathered_calls):
        return ()
    gathering = [
        other.name for other in alternatives(scheme) if replace(attend, kv_schedule=other.kv_schedule).num_stages == 1
    ]
    return (
        f"{scheme.name} computes {staged_calls} pieces of attention on a rank, a call of the CPU's kernel each, since "
        f"fragments are short or the mask cuts them up: take {' or '.join(gathering)}, which gather keys "
        f"and compute {gathered_calls}",
    )
