"""`report_of`: gathers what the web page of a step shows. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cp.apps.estimate.step import StepPrice, scheme_of
from megatron_cp.apps.estimate.together import chunks_of
from megatron_cp.plan import Plan

_MOST_EVENTS = 60_000  # events in a report's timeline, so that a browser opens it at once
_LABELS = {
    "linear": "linear layers", "exposed": "exposed transfers", "traffic": "memory traffic", "shards": "sharded weights",
}  # fmt: skip


def labelled(row: StepPrice) -> dict[str, float]:
    """Returns the milliseconds of a step's parts by the names that reports have for them."""
    return {_LABELS.get(name, name): value for name, value in row.parts.items()}


def named(row: StepPrice) -> str:
    """Returns a job's sizes and layout, as far as they are not one."""
    job = row.job
    degrees = {"tp": job.tp, "pp": job.pp, "ep": job.ep, "dp": job.replicas, "packs": job.packs}
    more = "".join(f"{name} {value}, " for name, value in degrees.items() if value > 1)
    return f"{more}cp {job.cp} in layout {job.layout}"


def bytes_of(row: StepPrice) -> dict[str, float]:
    """Returns the bytes of a rank by their use."""
    memory = row.memory
    return {
        "parameters": memory.parameters, "optimizer": memory.optimizer, "activations": memory.activations,
        "buffers": memory.buffers,
    }  # fmt: skip


def plan_names(plans: Sequence[Plan]) -> str:
    """Returns the schemes of plans, with their degrees and chunks."""
    return " / ".join(dict.fromkeys(_name(plan) for plan in plans)) or "-"


def _name(plan: Plan) -> str:
    exchanged = 1 < plan.ulysses_degree < plan.cp_size
    chunks = chunks_of(plan)
    return (
        scheme_of(plan)
        + (f" (u = {plan.ulysses_degree})" if exchanged else "")
        + (f", {chunks} chunks" if chunks > 1 else "")
    )
