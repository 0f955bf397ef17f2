"""Tables of a campaign, and its summary as data."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from tools.faults.cases import FAULTS, Case
from tools.faults.classify import FAILURES, OUTCOMES, Verdict


def table(results: list[tuple[Case, Verdict]]) -> str:
    """Fault kinds by outcomes."""
    counts = Counter((case.fault.kind, verdict.outcome) for case, verdict in results)
    shown = [outcome for outcome in OUTCOMES if any(found == outcome for _, found in counts)]
    header = ["fault", "cases", *shown, "seconds (median, most)"]
    rows = [header]
    for kind in FAULTS:
        own = [verdict for case, verdict in results if case.fault.kind == kind]
        if own:
            cells = [str(counts[kind, outcome] or "") for outcome in shown]
            rows.append([kind, str(len(own)), *cells, _times([verdict.seconds for verdict in own])])
    rows.append(["all", str(len(results)), *(str(sum(v.outcome == name for _, v in results)) for name in shown),
                 _times([verdict.seconds for _, verdict in results])])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def summary(results: list[tuple[Case, Verdict]]) -> dict[str, Any]:
    """Counts over all cases: of each failure the cases in which it occurs, of which a case may have several."""
    seconds = [verdict.seconds for case, verdict in results
               if verdict.seconds is not None and case.fault.kind != "delay"]  # fmt: skip
    errors, named = (sum(verdict.named[place] for _, verdict in results) for place in (0, 1))
    return {
        "cases": len(results),
        "failed": sum(verdict.failed for _, verdict in results),
        **{name: sum(name in verdict.of.values() for _, verdict in results) for name in FAILURES},
        "errors": errors,
        "errors_that_name_the_cause": named,
        "seconds_median": round(median(seconds), 2) if seconds else None,
        "seconds_most": round(max(seconds), 2) if seconds else None,
    }


def line(case: Case, verdict: Verdict) -> str:
    """A failing case, and how to run it again."""
    parts = "; ".join(f"{name}: {outcome}" for name, outcome in verdict.of.items() if outcome in FAILURES)
    return f"FAILED {case.number} {case.fault.kind}: {parts}\n  --case '{case.text()}'"


def _times(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{median(known):.1f}, {max(known):.1f}" if known else ""
