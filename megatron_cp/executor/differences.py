"""Shows where two ranks differ whose descriptions were compared by their digests.

A description is a list of lines `name: value`. The name may begin with that of a group and a comma, such as `slot 0,
scheme`. A line may end in a digest, ` #` and hexadecimal digits, of something longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from megatron_cp.layout import Layout
from megatron_cp.plan.plan import Plan

_MOST_FRAGMENTS = 4
# Lines that say nothing new where another line of their group, or of the whole batch, differs as well.
_CAUSES = {
    "layout": {"documents"}, "tokens per rank": {"documents", "layout"}, "tokens": {"documents", "seed"},
    "tokens and seed": {"documents", "input_ids"},
}  # fmt: skip


class Detail(NamedTuple):
    """The elements of which a line has the digest, and how one that differs is shown by its number and value."""

    shown: str
    elements: Sequence[Any]


def layout_details(subject: object, group: str = "") -> dict[str, Detail]:
    """Returns the elements of the lines of layouts, by the lines' names: of a layout, or of a plan's or a batch's."""
    layout = subject if isinstance(subject, Layout) else getattr(subject, "layout", None)
    found = dict[str, Detail]()
    if isinstance(layout, Layout):
        fragments = [
            [f"{start}:{end}" for start, end in layout.fragments_of(rank)] for rank in range(layout.cp_size)
        ]  # fmt: skip
        found[f"{group}documents"] = Detail("document {} has {} tokens", layout.packing.lengths.tolist())
        found[f"{group}layout"] = Detail("rank {} holds tokens {}", fragments)
    if isinstance(subject, Plan) and subject.hidden_layout is not None:
        found |= layout_details(subject.hidden_layout, f"{group}outside the run, ")
    return found


def differing_names(here: Sequence[str], there: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the names of lines that differ, each with how many lines before it have this name.

    Lines that follow from others are left out, such as the steps of a plan of another scheme.
    """
    ours, theirs = _by_name(here), _by_name(there)
    differing = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    return [name for name in differing if not any(_follows(name[0], cause) for cause, _ in differing)]


def describe_differences(
    ranks: tuple[int, int], lines: Sequence[Sequence[str]], details: Sequence[Mapping[str, Detail]]
) -> list[str]:
    """Returns two lines of text for each line in which two ranks differ.

    Args:
        ranks: the two ranks.
        lines: the description of each.
        details: elements of lines with digests, by the lines' names, of each.
    """
    ours, theirs = map(_by_name, lines)
    text = []
    for name in differing_names(*lines):
        pair = [each.get(name, "nothing") for each in (ours, theirs)]
        elements = [each.get(name[0]) for each in details]
        if elements[0] and elements[1] and all(" #" in line for line in pair):
            ends = _first_difference(elements[0], elements[1])
            pair = [line.rpartition(" #")[0] + end for line, end in zip(pair, ends, strict=True)]
        text += [f"  rank {rank}: {line}" for rank, line in zip(ranks, pair, strict=True)]
    return list(dict.fromkeys(text))


def _first_difference(here: Detail, there: Detail) -> tuple[str, str]:
    pairs = enumerate(zip_longest(here.elements, there.elements, fillvalue="none"))
    number, values = next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), (0, None))
    if values is None:
        return "", ""
    start = 0
    if all(isinstance(value, list) for value in values):  # fragments: from the first that differs on
        start = next(i for i, (a, b) in enumerate(zip_longest(*values)) if a != b)
    ours, theirs = ("; " + here.shown.format(number, _shortened(value, start)) for value in values)
    return ours, theirs


def _shortened(value: Any, start: int) -> str:
    if not isinstance(value, list):
        return f"{value}"
    shown = value[start : start + _MOST_FRAGMENTS]
    before, after = ["..."] * (start > 0), ["..."] * (start + len(shown) < len(value))
    return ", ".join([*before, *shown, *after]) or "none"


def _by_name(lines: Iterable[str]) -> dict[tuple[str, int], str]:
    found = dict[tuple[str, int], str]()
    counts = dict[str, int]()
    for line in lines:
        name = line.partition(": ")[0]
        counts[name] = counts.get(name, -1) + 1
        found[name, counts[name]] = line
    return found


def _follows(name: str, cause: str) -> bool:
    """Returns True if a line differs because another one does."""
    (group, _, own), (others, _, reason) = name.rpartition(", "), cause.rpartition(", ")
    if name == cause or not (others in (group, "") or f"{others}, ".startswith(f"{group}, ")):
        return False
    if own.startswith("step "):
        return not reason.startswith("step ")
    return (group == others and reason == "kind") or reason in _CAUSES.get(own, ())
