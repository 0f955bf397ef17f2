"""Text for the parts of a plan: owners of tokens, steps, and what each rank has. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import assert_never

from megatron_cp.exchange.sections import HeadRange
from megatron_cp.layout import Layout
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens

STRIP_WIDTH = 96  # characters of the ownership strip
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_RANKS_SHOWN = 64


def ownership(layout: Layout, width: int = STRIP_WIDTH) -> list[str]:
    """Returns the packed stream as a strip of characters that shows owners and document starts."""
    total = layout.packing.total
    if total == 0:
        return ["the packed stream is empty"]
    width = min(width, total)
    cuts = np.array([total * cell // width for cell in range(width + 1)])
    starts = np.union1d(cuts[:-1], layout.starts)
    tokens = np.zeros((width, layout.cp_size), dtype=np.int64)
    places = np.searchsorted(cuts, starts, side="right") - 1, layout.located(starts)[0]
    np.add.at(tokens, places, np.diff(starts, append=total))
    cells = tokens.argmax(1)
    marks = [" "] * width
    for start in layout.packing.starts.tolist():
        marks[int(np.searchsorted(cuts, start, side="right")) - 1] = "|"
    per_cell = "1 token" if width == total else f"about {total / width:.1f} tokens"
    if layout.cp_size <= len(_SYMBOLS):
        owners, way = ["".join(_SYMBOLS[rank] for rank in cells)], ""
    else:  # the numbers of the ranks, from above to below
        digits = len(str(layout.cp_size - 1))
        columns = [f"{rank:0{digits}d}" for rank in cells.tolist()]
        owners, way = ["".join(row) for row in zip(*columns, strict=True)], ", read downwards"
    first, *others = owners
    return [
        f"{'documents' if layout.packing.branches is None else 'segments '}  {''.join(marks)}",
        f"owner      {first}   ({per_cell} a character{way})",
        *(f"           {row}" for row in others),
    ]


def describe_step(step: Step, cp_size: int, item_size: int, *, chunkwise: bool) -> list[str]:
    """Returns lines of text for a step of a plan over `cp_size` ranks; chunkwise local work is on own tokens."""
    match step:
        case Compute(name):
            share = "all heads of own tokens" if chunkwise else "own heads of all tokens"
            return [f"compute {name} on {share}"]
        case Attend():
            return _attend(step, item_size)
        case Halo():
            return [f"convolution: the {step.reach} tokens before own segments, {_way(step)}; {step.channels} channels"]
        case Scan():
            maps = "matrices" if step.dense else "numbers"
            return [
                f"rule of all heads on own tokens; maps of segments, {_way(step)}: {step.heads} states of "
                f"{step.key_dim} x {step.value_dim} and their transitions, which are {maps}"
            ]
        case ToHeads(exchange) | ToTokens(exchange):
            blocks = ", ".join(f"{b.name} {b.num_heads} x {b.head_dim}" for b in exchange.sections.blocks)
            way = "own tokens -> own heads" if isinstance(step, ToHeads) else "own heads -> own tokens"
            among = "" if exchange.degree == cp_size else f" among {exchange.degree} ranks"
            parts = len(exchange.parts)
            times = "one collective" if parts == 1 else f"{parts} collectives, each of a chunk of heads"
            if exchange.codec is not None and any(exchange.coded([item_size] * len(exchange.sections.blocks))):
                times += f", coded as {exchange.codec.name}"
            return [f"{way}{among}, {'nothing moves' if exchange.is_local else times}: {blocks}"]
    assert_never(step)


def _way(step: Halo | Scan) -> str:
    if step.crosses and isinstance(step, Scan) and step.gathers:
        return "one all-gather"
    return "one exchange" if step.crosses else "nothing moves: no document is on two ranks"


def _attend(step: Attend, item_size: int) -> list[str]:
    if step.num_kv_ranks == 1:
        return ["attention of own heads, all tokens at hand"]
    among = "" if step.num_head_ranks == 1 else f", each of {step.num_head_ranks} ranks with other heads"
    row, width = sum(step.key_features), step.coded_bytes(item_size)
    coded = f" coded as {step.codec.name} in {width} bytes" if step.codec is not None and width else ""
    if step.tiled is not None:
        return _tiled(step, among, coded and f"; keys and values{coded} a head")
    way = " and ".join(dict.fromkeys(stage.keys.describe() for stage in step.stages if stage.keys is not None))
    latents = step.latent is not None and step.latent.travels
    what, each = ("a latent and its key are", "") if latents else ("a key and its value are", " a head")
    if step.selection is not None:
        what, each = f"{step.selection.describe()}; a token's row is", ""
    return [f"attention: {way}{among}; {what} {row} elements{each}{coded and ','}{coded}"]


def _tiled(step: Attend, among: str, coded: str) -> list[str]:
    """Describes the assigned tiles, with the numbers of the busiest rank."""
    lines = [
        f"attention: tiles of the mask assigned to {step.num_kv_ranks} ranks, in "
        f"{counted(step.head_chunks, 'chunk of heads')}{among}; those of own rows first{coded}"
    ]
    for name, forward in (("forward", True), ("backward", False)):
        transfers = step.transfers(forward=forward)
        rows = ", ".join(f"{payload.value} {int(flow.rows_sent_by_ranks().max())}" for payload, flow in transfers)
        lines.append(f"{name}, rows that a rank sends at most: {rows or 'none'}")
    return lines


def rank_table(
    layout: Layout, group: str, heads: Sequence[HeadRange], groups: Sequence[HeadRange], work: Sequence[int]
) -> list[str]:
    """Returns a line for each rank: its tokens, heads, groups that those share (named `group`), and work."""
    total = max(sum(work), 1)
    lines = [f"{'rank':>5} {'tokens':>9} {'pad':>5} {'fragments':>9}  {'heads':<11} {group:<11} {'work':>6}"]
    fragments = np.diff(layout.fragment_offsets)
    lines.extend(
        f"{rank:>5} {layout.token_counts[rank]:>9} {layout.pad_rows[rank]:>5} {fragments[rank]:>9}  "
        f"{_heads(heads[rank]):<11} {_heads(groups[rank]):<11} {work[rank] / total:>6.1%}"
        for rank in range(min(layout.cp_size, _RANKS_SHOWN))
    )
    if layout.cp_size > _RANKS_SHOWN:
        lines.append(f"{'...':>5} and {layout.cp_size - _RANKS_SHOWN} more ranks")
    return lines


def _heads(span: tuple[int, int]) -> str:
    lo, hi = span
    return "none" if lo == hi else str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}"


def size(count: int) -> str:
    """Formats a number of bytes: `1536` is "1.5 KiB"."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def plural(noun: str, count: int = 2) -> str:
    """Returns the plural of a noun: "groups of B and C"; the noun itself if `count` is 1."""
    if count == 1:
        return noun
    first, _, rest = noun.partition(" of ")
    first += "es" if first.endswith("ch") else "s"
    return f"{first} of {rest}" if rest else first


_TIE = 0.005  # relative difference of predictions below which neither of two candidates is faster


def tied(values: Mapping[str, float], taken: float) -> list[str]:
    """Returns the names of the candidates whose values are within 0.5 % of the taken one's, the nearest first."""
    apart = {name: abs(value / taken - 1) for name, value in values.items()} if taken else {}
    return sorted((name for name, share in apart.items() if share <= _TIE), key=lambda name: apart[name])


def describe_ties(names: Sequence[str]) -> str:
    """Returns a clause that names candidates that are as fast as the one before it; nothing without names."""
    if not names:
        return ""
    shown = [*names[:2], *([f"{len(names) - 2} more"] if len(names) > 2 else [])]
    first, last = ", ".join(shown[:-1]), shown[-1]
    return f"; {f'{first} and {last} are' if first else f'{last} is'} within {100 * _TIE:g} %"


def counted(count: int, noun: str) -> str:
    """Formats a number with its noun, in the singular if it is one."""
    return f"{count} {plural(noun, count)}"
