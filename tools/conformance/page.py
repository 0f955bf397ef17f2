"""The result page: what the words mean, the packages, counts and a table for each way."""

import platform
from collections import Counter
from importlib import metadata

from tools.conformance import models
from tools.conformance.cells import Cell
from tools.conformance.judge import BOUND, HUNG, REFUSED, RIGHT, WRONG, Outcome
from tools.conformance.ways import DIFFUSION_WAYS, LANGUAGE_WAYS

_PACKAGES = ("torch", "transformers", "diffusers", "accelerate", "axolotl-ringmaster", "verl", "megatron_cp")
_HOW = """# Which context parallelism is right for which model

Ways of context parallelism that `pip` installs, each on tiny models with random weights in fp32, on CPU and gloo, held
against the stock class in eager mode on one process, each document alone.

- **right**: outputs and the gradient of one early weight are within {bound:g} of the largest element.
- **wrong**: no exception and a larger error, which is shown.
- **refused**: an exception on some rank; its first line is at the end. **not runnable**: an import fails or an error
  names the CPU: it says nothing about a GPU. **hung**: nothing after {seconds:g} seconds.

A way that refuses does its duty: only a wrong cell misleads. Ours is used as its page says, like the others. A column
is the lengths of the documents (or rows of image and text) and the number of ranks. Tiny models say whether a way
computes the model's function, and nothing about speed, memory or training at scale.
fla, mamba_ssm and causal_conv1d are hidden, since stock classes would take their GPU kernels on a CPU too; what needs
them says so and is refused.

    python -m tools.conformance --out benchmarks/results/conformance.md    # {count} cells
"""


def text_of(found: dict[Cell, Outcome], seconds: float) -> str:
    """Returns the page."""
    lines = [_HOW.format(bound=BOUND, seconds=seconds, count=len(found))]
    lines += ["| package | version |", "|---|---|", f"| Python | {platform.python_version()} |"]
    lines += [f"| {name} | {_version(name)} |" for name in _PACKAGES]
    lines += ["", "## In short", "", *_counts(found)]
    notes = dict[str, str]()  # the first lines of errors, each once
    both = (("Language models", LANGUAGE_WAYS, models.LANGUAGE), ("Flux", DIFFUSION_WAYS, models.DIFFUSION))
    for title, ways, kinds in both:
        lines += ["", f"## {title}", *_tables({c: o for c, o in found.items() if c.model in kinds}, ways, notes)]
    lines += ["", "## Errors", "", *(f"- {number} `` {words[:300]} ``" for words, number in notes.items())]
    return "\n".join(lines) + "\n"


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _counts(found):
    yield "| way | right | wrong without a word | refused | hung | other |"
    yield "|---|---|---|---|---|---|"
    ways = dict.fromkeys((cell.model in models.DIFFUSION, cell.way) for cell in found)
    for diffusion, way in ways:
        count = Counter(o.name for c, o in found.items() if (c.model in models.DIFFUSION, c.way) == (diffusion, way))
        shown = [count.pop(name, 0) for name in (RIGHT, WRONG, REFUSED, HUNG)]
        other = ", ".join(f"{number} {name}" for name, number in count.items()) or "0"
        name = f"{way} (Flux)" if diffusion and way == "ours" else way
        yield f"| {name} | {' | '.join(map(str, shown))} | {other} |"


def _tables(found, ways, notes):
    for name, way in ways.items():
        mine = {cell: outcome for cell, outcome in found.items() if cell.way == name}
        if not mine:
            continue
        yield from ["", f"### {name}", "", f"{way.package}: {way.used}.", ""]
        columns = dict.fromkeys((cell.lengths, cell.ranks) for cell in mine)
        yield f"| model | {' | '.join(f'{lengths} x{ranks}' for lengths, ranks in columns)} |"
        yield "|---" * (1 + len(columns)) + "|"
        for model in dict.fromkeys(cell.model for cell in mine):
            row = [_shown(mine.get(Cell(name, model, *column)), notes) for column in columns]
            yield f"| {model} | {' | '.join(row)} |"


def _shown(outcome, notes):
    if outcome is None:
        return "not run"
    if outcome.error is None:
        note = notes.setdefault(outcome.words, f"[{len(notes) + 1}]") if outcome.words else ""
        return f"{outcome.name} {note}".strip()
    return "right" if outcome.name == RIGHT else f"**wrong** {max(outcome.error, outcome.gradient or 0):.1e}"
