"""Tables of a campaign, and its summary as data."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from tools.faults.cases import FAULTS, Case
from tools.faults.classify import FAILURES, OUTCOMES, Verdict


def table(results: list[tuple[Case, Verdict]]) -> str:
    """Returns the table of kinds of faults by outcomes."""
    shown = [outcome for outcome in OUTCOMES if any(verdict.outcome == outcome for _, verdict in results)]
    rows = [["fault", "cases", *shown, "seconds (median, most)"]]
    for kind in (*FAULTS, "all"):
        own = [verdict for case, verdict in results if kind in (case.fault.kind, "all")]
        if own:
            counts = Counter(verdict.outcome for verdict in own)
            known = [verdict.seconds for verdict in own if verdict.seconds is not None]
            times = f"{median(known):.1f}, {max(known):.1f}" if known else ""
            rows.append([kind, str(len(own)), *(str(counts[outcome] or "") for outcome in shown), times])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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
