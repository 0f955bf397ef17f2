"""Writes `docs/megatron-features.md` out of the table of Megatron's flags: `python -m tools.megatron_features`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from megatron_cp.megatron.features import FEATURES

PAGE = Path(__file__).parents[1] / "docs" / "megatron-features.md"
_INTRODUCTION = """# Megatron's flags beside context parallelism

Written by `python -m tools.megatron_features` from `megatron_cp/megatron/features.py`, for megatron-core 0.19.2.
`megatron-cp doctor --megatron FLAGS...` says the same of a job's own flags, and refuses what a model would refuse to be
built with; its exit status is then 1.

- **proved**: the named test holds it to one rank, over several ranks with ragged packs, on the CPU over gloo.
- **expected**: nothing of ours touches it; the reason stands beside it.
- **refused**: with the remedy; by name, before a step is taken.
- **untried**: neither. Compare a step with one rank before you trust it. `doctor` says which flags are not here.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join([_INTRODUCTION, *_tables()])


def _tables() -> Iterator[str]:
    for group, features in itertools.groupby(FEATURES, lambda feature: feature.group):
        yield f"## {group[0].upper()}{group[1:]}\n"
        yield "| flags | verdict | by, or because, or instead |\n|---|---|---|"
        for feature in features:
            names = ", ".join(f"`{flag}`" for flag in feature.flags)
            some = " with some values" if feature.depends else ""
            yield f"| {names} | {feature.verdict}{some} | {feature.remark} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
