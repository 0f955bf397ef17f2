"""`verdict_lines` and `answer_lines`: the text of `plan --whole`. No torch in here."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cp.apps.estimate.job_memory import MARGIN
from megatron_cp.apps.estimate.model_layers import FULL
from megatron_cp.apps.estimate.model_plan import ModelPlan
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.plan import Plan, counted, describe_ties, size, tied
from megatron_cp.planner import Machine


def verdict_lines(
    args: argparse.Namespace, rows: list[ModelPlan], best: ModelPlan | None, limit: float, data: dict[str, Any]
) -> list[str]:
    """Returns what to take, its predicted time and memory, and the tokens that would fit.

    Args:
        args: the options.
        rows, best: the candidates, and the one to take; None if none fits.
        limit: bytes of a rank.
        data: the object of `--json`.
    """
    if best is None:
        return [_nearest(args, rows, limit, data)]
    layers = sum(count for _, count in best.plans)
    parts = ", ".join(f"{_WORDS[name]} {value:,.1f}" for name, value in best.parts.items() if value >= 0.05)
    about = "about " if args.search else ""
    return [
        f"take this: {_named(best)}, {_by_kind(best)}",
        f"flags: {best.flags}",
        *([f"left out: {left}, which the model has"] if (left := data["source"].partition(", without ")[2]) else []),
        f"layers: {best.milliseconds:,.1f} ms predicted for a pack, forward and backward, in "
        f"{counted(layers, 'layer')} of attention or linear attention{f': {parts}' if parts else ''}",
        f"memory: {size(int(best.memory.total))} of {size(int(limit))} a rank predicted, and {MARGIN:.0%} must stay "
        f"free; up to {about}{counted(data['longest'], 'token')} fit this way",
        f"why: {_reason(rows, best, limit)}",
    ]


def _reason(rows: list[ModelPlan], best: ModelPlan, limit: float) -> str:
    """Returns why a candidate is taken, with the next layout and a size that is faster."""
    fitting = [row for row in rows if row is not best and row.memory.fits(limit)]
    text = "the smallest size that fits, in its fastest layout" if fitting else "nothing else that was planned fits"
    alike = [row for row in fitting if row.job.cp == best.job.cp]
    ties = tied({f"layout {row.job.layout}": row.milliseconds for row in alike}, best.milliseconds)
    slower = [row for row in alike if f"layout {row.job.layout}" not in ties]
    if slower:
        other = min(slower, key=lambda row: row.milliseconds)
        more = max(other.parts, key=lambda name: other.parts[name] - best.parts[name])
        text += (
            f"; next is layout {other.job.layout}, {other.milliseconds:,.1f} ms: it has "
            f"{other.parts[more] - best.parts[more]:,.1f} ms more {_WORDS[more]}"
        )
    fastest = min(fitting, key=lambda row: row.milliseconds, default=best)
    if fastest.job.cp != best.job.cp and fastest.milliseconds < best.milliseconds:
        share = fastest.milliseconds * fastest.job.cp / (best.milliseconds * best.job.cp)
        text += f"; {_named(fastest)} takes {fastest.milliseconds:,.1f} ms, {share:.2f} times the GPU time"
    return text + describe_ties(ties)


def _nearest(args: argparse.Namespace, rows: list[ModelPlan], limit: float, data: dict[str, Any]) -> str:
    """Names the candidate that is nearest to fitting, and the options that are left to try."""
    near = min(rows, key=lambda row: row.memory.total)
    fixed = near.memory.parameters + near.memory.optimizer
    text = (
        f"nothing fits {size(int(limit))} with {MARGIN:.0%} of it free: the nearest is {_named(near)}, which takes "
        f"{size(int(near.memory.total))}"
    )
    remedies = ["more ranks (--cp, --tp, --pp, --ep or --replicas)"]
    remedies += ["--sharding zero3"] * (near.job.sharding != "zero3")
    remedies += ["--recompute full"] * (near.job.recompute != FULL)
    levers = data["levers"]
    enough = next((number for number, lever in enumerate(levers) if lever["fits"]), 0)
    pairs = itertools.pairwise(levers[: enough + 1])
    remedies += [" ".join(lever["name"] for before, lever in pairs if lever["total"] < before["total"])] * bool(enough)
    if fixed >= (1 - MARGIN) * limit:
        text += f", {size(int(fixed))} of it weights, gradients and optimizer"
    else:
        about = "about " if args.search else ""
        text += f"; {about}{counted(data['longest'], 'token')} would fit"
    return f"{text}. Use {' or '.join(remedies)}."


def answer_lines(
    args: argparse.Namespace, model: ModelSpec, lengths: Sequence[int], on: Machine, rows: list[ModelPlan],
    best: ModelPlan | None, levers: Sequence[Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    """Returns the lines on model, pack, machine and job, with the tables of candidates and of levers of memory."""
    job, middle = (best or rows[0]).job, sorted(lengths)[len(lengths) // 2]
    drawn = "given" if args.lengths is not None else f"drawn from the corpus {args.corpus}"
    drawn += " and scaled" if args.lengths is None and args.tokens_per_rank is not None else ""
    degrees = {"tp": job.tp, "pp": job.pp, "ep": job.ep, "dp": job.replicas}
    given = "".join(f"{name} {value}, " for name, value in degrees.items() if value > 1)
    return [
        f"{model.name}: {model.parameters / 1e9:.2f}e9 parameters, of which "
        f"{model.active_parameters / 1e9:.2f}e9 are multiplied with each token; {model.source}",
        f"a pack: {counted(sum(lengths), 'token')} in "
        f"{counted(len(lengths), 'document')}, {drawn}; median {middle}, longest {max(lengths)}",
        f"predicted for {on.describe()}; a context-parallel group is on "
        f"{counted(job.topology(on, args.hosts).num_hosts, 'host')}",
        f"given: {given}sharding {job.sharding}, gradients in {job.gradients}",
        "",
        *_table(rows, best),
        "",
        *_lever_table(levers),
        "",
        "Times are milliseconds of one pack in all attention and linear layers of the model, forward and backward, on "
        "a rank. attention, linear: kernels of the mean rank; exposed: transfers that no kernel overlaps; imbalance: "
        "kernels of the busiest rank beyond the mean. Memory counts parameters, gradients, optimizer, activations, "
        "buffers, and 2.8 GiB for CUDA and its libraries. A lever counts with those above it; operations are products "
        "with weights, beyond those of the job as given, as a part of a step's; the host is sent its bytes and sends "
        "them back, once a step.",
    ]


def _table(rows: list[ModelPlan], best: ModelPlan | None) -> list[str]:
    """Returns a line for each candidate, with the parts that any of them has."""
    names = [name for name in rows[0].parts if any(row.parts[name] >= 0.05 for row in rows)]
    left = ["layout", "attention by", "linear by", "recompute"]
    cells = [["cp", *left, *names, "ms", "GiB a rank", ""]]
    for row in rows:
        attention, linear = (
            [plan for plan, _ in row.plans if (plan.attend is None) == is_linear] for is_linear in (False, True)
        )
        cells.append(
            [
                str(row.job.cp), row.job.layout, _plan_names(attention), _plan_names(linear), row.job.recompute,
                *(f"{row.parts[name]:,.1f}" for name in names), f"{row.milliseconds:,.1f}",
                f"{row.memory.total / 2**30:.1f}", "<-" if row is best else "",
            ]
        )  # fmt: skip
    return _aligned(cells, left=range(1, len(left) + 1))


def _lever_table(levers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what more and more levers leave of the memory, the cheapest first, and what they cost."""
    cells = [["levers of memory", "GiB a rank", "tokens that fit", "more operations", "to the host"]]
    for number, lever in enumerate(levers):
        cells.append(
            [
                ("and " if number > 1 else "") + lever["name"], f"{lever['total'] / 2**30:.1f}",
                f"{lever['longest']}", f"{lever['more_products']:.0%}", size(int(lever["host_bytes"])),
            ]
        )  # fmt: skip
    return _aligned(cells, left=range(1))


def _aligned(cells: Sequence[Sequence[str]], left: range) -> list[str]:
    """Returns a line for each row; the columns in `left` begin at the left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _named(row: ModelPlan) -> str:
    recomputed = ", all layers recomputed" if row.job.recompute == FULL else ""
    return f"cp {row.job.cp} in layout {row.job.layout}{recomputed}"


def _by_kind(row: ModelPlan) -> str:
    """Returns the scheme of each kind of layer."""
    found = []
    for plan, count in row.plans:
        what = plan.kind if plan.mask is None else f"{plan.kind} ({plan.mask.describe()})"
        found.append(f"{what} by {_plan_name(plan)} in {counted(count, 'layer')}")
    return ", ".join(found)


def _plan_names(plans: Sequence[Plan]) -> str:
    return " / ".join(dict.fromkeys(_plan_name(plan) for plan in plans)) or "-"


def _plan_name(plan: Plan) -> str:
    """Returns a plan's scheme, with its degree and chunks."""
    degree = f" (u = {plan.ulysses_degree})" if 1 < plan.ulysses_degree < plan.cp_size else ""
    return plan.strategy + degree + (f", {plan.num_chunks} chunks" if plan.num_chunks > 1 else "")


_WORDS = {
    "attention": "attention", "linear": "linear layers", "exposed": "exposed transfers", "imbalance": "imbalance",
}  # fmt: skip
