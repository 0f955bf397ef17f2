"""Writes `docs/megatron-features.md`, and the table of Megatron's parser: `python -m tools.megatron_features`."""

from __future__ import annotations

import argparse
import enum
import itertools
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_cp.megatron import flags
from megatron_cp.megatron.features import FEATURES, RELEASES

PAGE = Path(__file__).parents[1] / "docs" / "megatron-features.md"
PARSER = Path(flags.__file__).with_name("flags.json")
_INTRODUCTION = """# Megatron's flags beside context parallelism

Written by `python -m tools.megatron_features` from `megatron_cp/megatron/features.py`, for megatron-core 0.19.2;
flags that only some of 0.19.2, `main` and `dev` have, say so ([versions](versions.md#megatron-core)).
`megatron-cp doctor --megatron FLAGS...` judges a job's own flags by the rules with which the layers refuse to be built;
its exit status is then 1. It imports neither torch nor Megatron, and answers in a second or two.

- **proved**: the named test holds it to one rank, over several ranks with ragged packs, on the CPU over gloo.
- **expected**: nothing of ours touches it; the reason stands beside it.
- **refused**: all or some values, or some combinations, by name and before a step is taken; the remark says what to do.
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
            names += "" if feature.releases == RELEASES else f" ({', '.join(feature.releases)})"
            proof = f": {feature.proof}" if feature.proof else ""
            yield f"| {names} | {feature.verdict} | {feature.remark}{proof} |"
        yield ""


def parser_table() -> str:
    """Returns the table of the installed Megatron's parser, without its help, a flag a line."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    rows = ",\n".join(json.dumps([list(action.option_strings), _settings(action)]) for action in parser._actions)
    return f'{{"megatron-core": "{version("megatron-core")}", "flags": [\n{rows}\n]}}\n'


_ACTIONS = {
    argparse._StoreTrueAction: "store_true", argparse._StoreFalseAction: "store_false",
    argparse.BooleanOptionalAction: "boolean_optional",
}  # fmt: skip


def _settings(action: argparse.Action) -> dict[str, Any]:
    """Returns the arguments of `add_argument`; `reader` has the name of a function of Megatron's that reads values."""
    settings: dict[str, Any] = {"dest": action.dest}
    if type(action) in _ACTIONS:
        settings["action"] = _ACTIONS[type(action)]
        names = action.option_strings
        assert settings["action"] != "boolean_optional" or names[1] == f"--no-{names[0].removeprefix('--')}"
        return settings if settings["action"] != "boolean_optional" else {**settings, "default": action.default}
    choices = None if action.choices is None else list(action.choices)
    if action.type in (int, float, str):
        settings["type"] = action.type.__name__
    elif choices and isinstance(choices[0], enum.Enum) and not isinstance(choices[0], int):
        choices = [choice.name for choice in choices]
    elif action.type is not None:
        settings["reader"] = action.type.__name__
        choices = None
    values = {"nargs": action.nargs, "choices": choices, "default": action.default}
    return settings | {name: value for name, value in values.items() if type(value) in (int, float, str, list, bool)}


if __name__ == "__main__":
    PAGE.write_text(page())
    PARSER.write_text(parser_table())
