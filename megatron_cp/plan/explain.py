"""A plan in words: who owns what, what travels, and what the user should know. No torch in here."""

from __future__ import annotations

from typing import assert_never

import numpy as np

from megatron_cp.layout import Layout
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE

STRIP_WIDTH = 96  # characters of the ownership strip
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_RANKS_SHOWN = 64


def explain(plan: Plan, item_size: int) -> str:
    """The text of `Plan.explain`."""
    layout, packing = plan.layout, plan.packing
    about = plan.mask.describe() if plan.mask else "the state starts anew with each document"
    way = plan.scheme if plan.redistribution is None else "redistribute"
    lines = [
        f"{plan.kind} by {way} over {plan.cp_size} ranks: {packing.num_documents} documents, "
        f"{packing.total} tokens, {about}",
        "",
        *ownership(layout),
        "",
        *_table(plan),
        "",
    ]
    for number, step in enumerate(plan.steps, start=1):
        lines.extend(f"step {number}: {line}" for line in _step(plan, step, item_size))
    lines.append("")
    spare = "alignment and keys that nobody sees" if plan.attend else "alignment"
    for name, forward in (("forward", True), ("backward", False)):
        sent, needed = (f(item_size, forward=forward) for f in (plan.bytes_sent, plan.bytes_needed))
        lines.append(
            f"{name}: a rank starts {plan.collectives(forward=forward)} transfers and sends at most {size(max(sent))}; "
            f"{size(max(needed))} without {spare}; at {item_size} bytes an element"
        )
    if plan.transport != COLLECTIVE:
        lines.append(f"transport: {plan.transport.describe()}")
    lines.append(f"busiest rank: {plan.work_imbalance:.3f} x the mean work")
    if plan.redistribution is not None:
        layers = f"{plan.redistribution.layers} linear layers" if plan.redistribution.layers > 1 else "this layer"
        most = size(max(plan.redistribution.bytes_sent(layout, item_size)))
        lines.append(
            f"around a run of {layers} hidden states are redistributed: 2 transfers more forward and 2 backward, of at "
            f"most {most} a rank together; outside the run tokens are held so:"
        )
        lines.extend(ownership(plan.redistribution.hidden_layout))
    for number, price in enumerate(plan.prices):
        what = "chosen" if number == 0 else "other "
        least = "at least " if price.is_bound else ""
        most = "ranks send at least" if price.is_bound else "a rank sends at most"
        lines.append(
            f"{what} {price.scheme:<9} predicted {least}{price.forward:.3f} ms forward, {price.backward:.3f} ms "
            f"backward; {most} {size(price.bytes_sent)} forward"
        )
    lines.extend(f"predicted for {price.hardware}" for price in plan.prices[:1])
    lines.extend(f"note: {note}" for note in plan.notes)
    return "\n".join(lines)


def ownership(layout: Layout, width: int = STRIP_WIDTH) -> list[str]:
    """The packed stream as a strip of characters: whose tokens, and where documents begin."""
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
    for start, _ in layout.packing.spans():
        marks[int(np.searchsorted(cuts, start, side="right")) - 1] = "|"
    per_cell = "1 token" if width == total else f"about {total / width:.0f} tokens"
    return [
        f"documents  {''.join(marks)}",
        f"owner      {''.join(_SYMBOLS[rank % len(_SYMBOLS)] for rank in cells)}   ({per_cell} a character)",
    ]


def _step(plan: Plan, step: Step, item_size: int) -> list[str]:
    match step:
        case Compute(name):
            share = "all heads of own tokens" if plan.recurrent_steps else "own heads of all tokens"
            return [f"compute {name} on {share}"]
        case Attend():
            return _attend(step)
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
            among = "" if exchange.degree == plan.cp_size else f" among {exchange.degree} ranks"
            parts = len(exchange.parts)
            times = "one collective" if parts == 1 else f"{parts} collectives, each of a chunk of heads"
            if exchange.codec is not None and any(exchange.coded([item_size] * len(exchange.sections.blocks))):
                times += f", coded as {exchange.codec.name}"
            return [f"{way}{among}, {'nothing moves' if exchange.is_local else times}: {blocks}"]
    assert_never(step)


def _way(step: Halo | Scan) -> str:
    return "one exchange" if step.crosses else "nothing moves: no document is on two ranks"


def _attend(step: Attend) -> list[str]:
    if step.num_kv_ranks == 1:
        return ["attention of own heads, all tokens at hand"]
    among = "" if step.num_head_ranks == 1 else f", each of {step.num_head_ranks} ranks with other heads"
    row = step.head_dim + step.value_head_dim
    ways = {
        "p2p": f"keys pass round a ring of {step.num_kv_ranks} ranks, each computed while the next is under way",
        "all_gather": f"all keys gathered from {step.num_kv_ranks} ranks, in {step.head_chunks} chunks of heads",
        "exact": f"the keys that own queries see, of {step.num_kv_ranks} ranks, in {step.head_chunks} chunks of heads",
    }
    return [f"attention: {ways[step.kv_schedule]}{among}; a key and its value are {row} elements a head"]


def _table(plan: Plan) -> list[str]:
    layout, work = plan.layout, plan.work_per_rank()
    whole = max(sum(work), 1)
    group = {"attention": "kv heads", "mamba": "groups", "conv1d": "channels"}.get(plan.kind, "key heads")
    lines = [f"{'rank':>5} {'tokens':>9} {'pad':>5} {'fragments':>9}  {'heads':<11} {group:<11} {'work':>6}"]
    fragments = np.diff(layout.fragment_offsets)
    lines.extend(
        f"{rank:>5} {layout.token_counts[rank]:>9} {layout.pad_rows[rank]:>5} {fragments[rank]:>9}  "
        f"{_heads(plan.heads_of(rank)):<11} {_heads(plan.groups_of(rank)):<11} {work[rank] / whole:>6.1%}"
        for rank in range(min(plan.cp_size, _RANKS_SHOWN))
    )
    if plan.cp_size > _RANKS_SHOWN:
        lines.append(f"{'...':>5} and {plan.cp_size - _RANKS_SHOWN} more ranks")
    return lines


def _heads(span: tuple[int, int]) -> str:
    lo, hi = span
    return "none" if lo == hi else str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}"


def size(count: int) -> str:
    """A number of bytes for people: `1536` is "1.5 KiB"."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
