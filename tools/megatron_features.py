"""Writes `docs/megatron-features.md` out of the table of Megatron's flags: `python -m tools.megatron_features`."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from megatron.training.arguments import add_megatron_arguments

from megatron_cp.megatron.features import FEATURE_BY_FLAG, FEATURES

PAGE = Path(__file__).parents[1] / "docs" / "megatron-features.md"
# Groups of Megatron's parser that touch sequence, batch, layers, ranks, precision, the optimizer or a run.
GROUPS = (
    "transformer configuration", "network size", "regularization", "training", "mixed precision", "distributed init",
    "validation", "data and dataloader", "moe", "mla", "experimental_attention_variant", "heterogeneous architecture",
    "Transformer-Engine", "experimental", "sft", "checkpointing", "inference", "rl", "Logits Distillation",
)  # fmt: skip
_INTRODUCTION = """# Megatron's flags beside context parallelism

Written by `python -m tools.megatron_features` from `megatron_cp/megatron/features.py`, for megatron-core 0.19.2.
`megatron-cp doctor --megatron FLAGS...` says the same of a job's own flags, and refuses what a model would refuse to be
built with; its exit status is then 1.

- **proved**: the named test holds it to one rank, over several ranks with ragged packs, on the CPU over gloo.
- **expected**: nothing of ours touches it; the reason stands beside it.
- **refused**: with the remedy; by name, before a step is taken.
- **untried**: neither. Compare a step with one rank before you trust it.
"""


def flags() -> dict[str, list[str]]:
    """By group of Megatron's parser the flags in it, as they are spelled first."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    groups = {group.title: group for group in parser._action_groups}
    return {name: [action.option_strings[0] for action in groups[name]._group_actions] for name in GROUPS}


def page() -> str:
    """All of it."""
    return "\n".join([_INTRODUCTION, *_tables(), *_others()]) + "\n"


def _tables() -> Iterator[str]:
    for group, features in itertools.groupby(FEATURES, lambda feature: feature.group):
        yield f"## {group[0].upper()}{group[1:]}\n"
        yield "| flags | verdict | by, or because, or instead |\n|---|---|---|"
        for feature in features:
            names = ", ".join(f"`{flag}`" for flag in feature.flags)
            some = " with some values" if feature.depends else ""
            yield f"| {names} | {feature.verdict}{some} | {feature.remark} |"
        yield ""


def _others() -> Iterator[str]:
    yield "## Not in the table\n"
    yield "Flags of the same groups of Megatron's parser. `doctor` calls them unknown.\n"
    for group, names in flags().items():
        left = [f"`{name}`" for name in names if name not in FEATURE_BY_FLAG]
        if left:
            line = f"- {group}: {', '.join(left)}"
            yield textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
