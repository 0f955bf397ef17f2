"""Spellings of masks on the command line and in layers' options."""

from __future__ import annotations

import re
from difflib import get_close_matches

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.block_masks import BLOCK_TABLES

# No pack has a length of more than 15 digits.
_NUMBER, _LIMIT = "([0-9]{1,15})", "(-1|[0-9]{1,15})"
SPELLINGS = {
    "causal": "causal",
    "full": "full",
    "window:LEFT,RIGHT": f"window:{_LIMIT},{_LIMIT}",
    "window:N": "window:([1-9][0-9]{0,14})",
    "prefix:N": f"prefix:{_NUMBER}",
    "chunk:N": "chunk:([1-9][0-9]{0,14})",
    "first:N+window:LEFT,RIGHT": rf"first:{_NUMBER}\+window:{_LIMIT},{_LIMIT}",
    **{table.spelling: f"{table.name}(?::{_NUMBER})?" for table in BLOCK_TABLES.values()},
}
NUMBERS = "A chunk or window of N has at least 1 token; -1 as LEFT or RIGHT is no limit; BLOCKS may be left out."


def parsed_mask(spec: str) -> tuple[str, list[int]]:
    """Returns the first word of a spelling and its numbers; "" if it is not a spelling."""
    for form, pattern in SPELLINGS.items():
        found = re.fullmatch(pattern, spec) if isinstance(spec, str) else None
        if found:
            return re.split(r"\W", form)[0], [int(number) for number in found.groups() if number is not None]
    return "", []


def checked_spelling(spec: str) -> tuple[str, list[int]]:
    """Returns the first word of a spelling and its numbers."""
    kind, numbers = parsed_mask(spec)
    if not kind:
        forms, word = {re.split(r"[:\[]", form)[0]: form for form in SPELLINGS}, str(spec).partition(":")[0]
        near = [] if word in forms else get_close_matches(word.lower(), forms, 1, 0.75)
        remedy = f"Did you mean {forms[near[0]]}?" if near else NUMBERS
        raise ArgumentError("mask", spec, " | ".join(SPELLINGS), remedy)
    return kind, numbers
