"""Many cases from one: every scheme, layout, mask and kind of heads that was not given by name."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megatron_cp.layout.block_masks import BLOCK_TABLES
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import AUTO, MODES, SCHEMES, may_exchange_heads, scheme_named
from megatron_cp.planner.capabilities import require, working
from megatron_cp.planner.tiled import checked_search
from megatron_cp.testing.parity import Case

MASKS = (
    "causal", "full", "window:5,0", "window:4,2", "prefix:5", "chunk:6", "first:2+window:4,0", *BLOCK_TABLES,
)  # fmt: skip
ALONG_PATHS = ("causal", "window:5,0", "chunk:6", "first:2+window:4,0")  # those of documents that branch
HEADS: tuple[dict[str, Any], ...] = (
    {"heads": 6, "groups": 2},
    {"heads": 7, "groups": 7},
    {"heads": 7, "groups": 1},
    {"heads": 4, "groups": 4, "head_dim": 24, "value_head_dim": 16},
    {"heads": 6, "groups": 2, "learned_sink": True},
    {"heads": 6, "groups": 3, "softcap": 2.0},
    {"heads": 6, "groups": 2, "dropout": 0.2},
)


def sweep(case: Case, fixed: Collection[str]) -> list[Case]:
    """Returns cases that differ from `case` in all that is not in `fixed`: "scheme", "layout", "mask", "heads".

    Every scheme meets every layout and mask; kinds of heads take turns. Schemes with a degree that does not divide the
    case's number of ranks are left out.
    """
    case = replace(case, scheme=require("mode" if case.layer in KINDS else "scheme", case.scheme, name="--scheme"))
    layouts = [case.layout] if "layout" in fixed else [name for name in working("layout") if name != AUTO]
    if case.layer != "attention":
        checked_search(case.search_seconds, [])
        modes = [case.scheme] if "scheme" in fixed else list(MODES)
        width = case.heads * case.value_head_dim
        cases = [
            replace(
                case, layout=layout, scheme=mode, hidden_size=width if MODES[mode].redistributes else case.hidden_size
            )
            for mode, layout in itertools.product(modes, layouts)
        ]
        return [_drop_unsupported(one) for one in cases]
    schemes = [case.scheme] if "scheme" in fixed else list(SCHEMES)
    if "scheme" not in fixed and not any(case.cp % u == 0 for u in range(2, case.cp)):
        schemes = [scheme for scheme in schemes if not SCHEMES[scheme].is_product]
    checked_search(case.search_seconds, schemes)
    masks = [case.mask] if "mask" in fixed else [mask for mask in MASKS if case.parents is None or mask in ALONG_PATHS]
    heads = [{}] if "heads" in fixed else HEADS
    cases = [
        # Shifted by one in every round of the masks, so that each mask meets each kind of heads.
        case.with_scheme(
            scheme,
            layout=layout,
            mask=mask,
            seed=case.seed + number,
            **heads[(number + number // len(masks)) % len(heads)],
        )
        for number, (scheme, layout, mask) in enumerate(itertools.product(schemes, layouts, masks))
    ]
    return [_drop_unsupported(one) for one in cases]


def _drop_unsupported(case: Case) -> Case:
    """Returns the case without a degree, head chunks or a codec if its scheme or layer has none."""
    scheme = None if case.layer in KINDS else scheme_named(case.scheme)
    exchanges = may_exchange_heads(case.scheme)
    if scheme is None or not scheme.is_product:
        case = replace(case, ulysses_degree=None)
    if not (exchanges if scheme is None else scheme.takes_chunks):
        case = replace(case, head_chunks=None)
    has_codec = scheme is not None or (exchanges and KINDS[case.layer].takes_codec)
    return case if has_codec else replace(case, codec="none")
