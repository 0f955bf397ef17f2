"""The page of `megatron-cp bench --report`: the same texts and tables that the command prints, losses marked."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.timing import BOTH
from megatron_cp.cli import Report, command_line, environment, environment_facts
from megatron_cp.page import blocks_of, save_page

_PEER_OVER_OURS = re.compile(r"/ (ours|this)\b|^(speed-up|gain)$")
_OURS_OVER_PEER = re.compile(r"^even over ")


def save_bench(args: argparse.Namespace, report: Report) -> None:
    """Writes the page of a benchmark to `args.report`: verdicts, then all tables with the ratios to their limits."""
    tables = blocks_of(report.text, lambda columns, row: [place for place, lost in compared(columns, row) if lost])
    met, missed = report.text.count(": met."), report.text.count("NOT met")
    ratios = [lost for table in tables for row in table["rows"] for _, lost in compared(table["columns"], row)]
    words = [f"{met} of {met + missed} targets met"] * (met + missed > 0)
    words += [f"a peer is ahead in {sum(ratios)} of {len(ratios)} ratios, marked ✗"] * (len(ratios) > 0)
    page = {
        "title": f"bench {args.what}",
        "verdict": {"text": "; ".join(words) or "measured; there is no peer and no target here", "ok": not missed},
        "command": command_line(args),
        "environment": environment_facts(environment()),
        "tables": tables,
    }
    save_page(page, args.report)


def compared(columns: Sequence[str], row: Sequence[str]) -> list[tuple[int, bool]]:
    """Returns the places of a row's cells that compare with a peer, each with True if the peer is ahead.

    A column whose name is short, such as "backward", goes on with the comparison that the columns before it began, up
    to a column of milliseconds.
    """
    found, is_peer_over_ours = [], False
    for place, (column, cell) in enumerate(zip(columns, row, strict=True)):
        is_peer_over_ours = bool(_PEER_OVER_OURS.search(column)) or (
            is_peer_over_ours and "/" not in column and " ms" not in f" {column}"
        )
        is_ours_over_peer = bool(_OURS_OVER_PEER.search(column))
        is_peers_row = row[0].endswith(MEGATRON) and column in BOTH
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", cell.partition("[")[0])]
        if numbers and "naive" not in " ".join(row) and (is_peer_over_ours or is_ours_over_peer or is_peers_row):
            found.append((place, any((number > 1) if is_ours_over_peer else (number < 1) for number in numbers)))
    return found
