"""`verdict_lines` and `answer_lines`: the text of `plan --whole`. No torch in here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_cp.apps.estimate.model_layers import FULL
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.report import named, plan_names
from megatron_cp.apps.estimate.step import StepPrice
from megatron_cp.plan import counted, describe_ties, size, tied
from megatron_cp.planner import Machine


def answer_lines(
    args: argparse.Namespace, model: ModelSpec, lengths: Sequence[int], on: Machine, rows: list[StepPrice],
    best: StepPrice | None,
) -> list[str]:  # fmt: skip
    """Returns the lines on model, pack, machine and jobs, with the table of jobs."""
    choice, middle = (best or rows[0]).job, sorted(lengths)[len(lengths) // 2]
    drawn = "given" if args.lengths is not None else f"drawn from the corpus {args.corpus}"
    drawn += " and scaled" if args.lengths is None and args.tokens_per_rank is not None else ""
    return [
        f"{model.name}: {model.parameters / 1e9:.2f}e9 parameters, of which a token meets "
        f"{model.active_parameters / 1e9:.2f}e9 in products; {model.source}",
        f"a pack: {counted(sum(lengths), 'token')} in "
        f"{counted(len(lengths), 'document')}, {drawn}; median {middle}, longest {max(lengths)}",
        f"predicted for {on.describe()}; a context-parallel group is on "
        f"{counted(choice.topology(on, args.hosts).num_hosts, 'host')}",
        f"sharding {choice.sharding}; products of weights in {choice.precision}, gradients in {choice.gradients}",
        "",
        *_table(rows, best, on),
        "",
        *_legend(rows),
        "Times are milliseconds of a step on the busiest stage's slowest rank. attention, linear: kernels of the mean "
        "rank; products: of weights; experts: grouped products; dispatch: experts' all-to-alls and permutations; "
        "tensor: gathers and sums of tensor parallelism; exposed: transfers of context parallelism that no kernel "
        "overlaps; imbalance: kernels of the busiest rank beyond the mean; traffic: norms, activations and sums of "
        "gradients; pipeline: waits for other stages; shards: gathers and sums of sharded weights and gradients that "
        "nothing overlaps. MFU is of the peak in bf16, in FP8 too. Memory counts parameters, gradients, optimizer, "
        "activations, buffers, and 2.8 GiB for CUDA and its libraries.",
    ]


def verdict_lines(
    args: argparse.Namespace, rows: list[StepPrice], best: StepPrice | None, limit: float, memory: float,
    data: dict[str, Any],
) -> list[str]:  # fmt: skip
    """Returns what to take, its predicted time and memory, and the tokens that would fit.

    Args:
        args: the options.
        rows, best: the jobs, and the one to take; None if none fits.
        limit, memory: bytes of a rank that a job may take, and that there are.
        data: the object of `--json`.
    """
    if best is None:
        return [_nearest(args, rows, limit, data)]
    faster = max((row for row in rows if row.memory.total <= limit), key=lambda row: row.tokens_per_second_per_gpu)
    gain = faster.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu
    is_smallest = args.fit is not None and args.gpus is None
    why = "the smallest size that fits" if is_smallest else "the most tokens/s a GPU of those that fit"
    why += _beside(rows, best, limit)
    if is_smallest and gain > 1.005:
        why += f"; cp {faster.job.cp} has {gain:.2f} times its throughput a GPU"
    sizes = [best.job.cp] if is_smallest else [row.job.cp for row in rows]
    others = {
        named(row): row.tokens_per_second_per_gpu
        for row in rows
        if row is not best and row.memory.total <= limit and row.job.cp in sizes
    }
    why += describe_ties(tied(others, best.tokens_per_second_per_gpu))
    about, longest = "about " if args.search else "", counted(data["longest"], "token")
    return [
        f"take this: {data['take_this']}",
        f"job: {_in_words(best)}",
        *([f"left out: {left}, which the model has"] if (left := data["source"].partition(", without ")[2]) else []),
        f"step: {best.step:,.1f} ms predicted, {best.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
        f"{size(int(best.memory.total))} of {size(int(limit))} a rank; up to {about}{longest} "
        f"{'a pack ' * (best.job.packs > 1)}fit this way",
        *_close(best.memory.total, memory),
        f"why: {why}",
        *_waits(best, data),
        _tenths(best),
        *([_ZERO3] if best.job.sharding == "zero3" else []),
        *([_searched_text(data["search"], rows)] if "search" in data else []),
    ]


_TOO_LOW = 0.11  # share of a published job's memory by which its prediction was too low


def _close(predicted: float, memory: float) -> list[str]:
    """Returns a warning where memory would not suffice if its prediction were as wrong as the worst that is known."""
    likely = predicted / (1 - _TOO_LOW)
    if likely <= memory:
        return []
    room = (1 - _TOO_LOW) * memory / 2**30
    return [
        f"memory is close: the prediction for a published job was {_TOO_LOW:.0%} too low, which would make this "
        f"{size(int(likely))} of {size(int(memory))}; --fit {room:.1f}GiB leaves room for that"
    ]


def _in_words(row: StepPrice) -> str:
    """Describes how a job's GPUs share the work, and what a step is."""
    job = row.job
    ranks = {"tensor-parallel ranks": job.tp, "pipeline stages": job.pp, "context-parallel ranks": job.cp}
    shared = " x ".join(f"{count} {name}" for name, count in ranks.items() if count > 1) or "1 GPU"
    packs = f"{counted(job.packs, 'pack')} joined" if job.packs > 1 else "1 pack"
    text = f"{counted(job.gpus, 'GPU')} = {counted(job.replicas, 'data-parallel replica')} of {shared}"
    text += f"; experts over {job.ep} ranks of a stage" if job.ep > 1 else ""
    text += f"; {job.interleave} chunks of layers a stage" if job.interleave > 1 else ""
    *_, (first, end) = job.layer_ranges(len(row.schemes))
    text += f"; {end - first} of {len(row.schemes)} layers in the last stage" if len(row.schemes) % job.pp else ""
    text += f"; a step is {counted(job.microbatches, 'microbatch')} of {packs} in each replica"
    again = {"none": "nothing", "full": "whole layers", "ops": "every second product and all that is no product"}
    return f"{text}; backward recomputes {again.get(job.recompute, ' and '.join(row.modules))}"


def _beside(rows: list[StepPrice], best: StepPrice, limit: float) -> str:
    """Returns a clause on the next best job that fits, with the parts of its step that make it slower."""
    others = [row for row in rows if row is not best and row.memory.total <= limit]
    if not others:
        return ", the only one that was priced"
    rate = best.tokens_per_second_per_gpu
    ties = tied({str(number): row.tokens_per_second_per_gpu for number, row in enumerate(others)}, rate)
    apart = [row for number, row in enumerate(others) if str(number) not in ties]
    if not apart:
        return ""
    other = max(apart, key=lambda row: row.tokens_per_second_per_gpu)
    longer = rate / other.tokens_per_second_per_gpu - 1
    if longer < 0:  # the smallest size was asked for, and a larger one has more throughput
        return ""
    scale = other.job.gpus * best.tokens / (other.tokens * best.job.gpus)  # of the same tokens and GPUs
    more = sorted(((other.parts[name] * scale - value, name) for name, value in best.parts.items()), reverse=True)
    slower = [f"{time:,.1f} ms more {_WORDS.get(name, name)}" for time, name in more[:2] if time > 0.05]
    saved, name = -more[-1][0], more[-1][1]
    faster = f", and {saved:,.1f} ms less {_WORDS.get(name, name)}" if saved > 0.1 * max(more[0][0], 0.5) else ""
    text = f"; next is {named(other)}, which takes {longer:.1%} longer"
    return text + f": {' and '.join(slower)}{faster}" * bool(slower)


def _waits(row: StepPrice, data: dict[str, Any]) -> list[str]:
    """Returns a remedy where pipeline stages wait for a fifth of the step and more, unless jobs were searched."""
    share = row.parts["pipeline"] / row.step
    if "search" in data or share < 0.2:
        return []
    batches = counted(row.job.microbatches, "microbatch")
    return [f"stages wait: {share:.0%} of the step, with {batches}: more --microbatches fill them"]


_ZERO3 = (
    "launch: these flags alone, without Megatron, whose sharding of weights `doctor --megatron` refuses: shard with "
    "PyTorch's fully_shard (docs/training-in-plain-pytorch.md)"
)


def _searched_text(search: dict[str, Any], rows: list[StepPrice]) -> str:
    """Says what the search left out, and why."""
    left = search["counted"] - search["tried"] - search["too_large"]
    text = (
        f"searched: {search['counted']:,} jobs; weights, optimizer and saved activations of {search['too_large']:,} "
        f"exceed the memory, {search['tried']:,} were priced"
    )
    if search["bound_ms"] is not None:
        is_proof = len(rows) > 0 and search["bound_ms"] >= rows[0].step
        text += f", and the other {left:,} cannot take less than {search['bound_ms']:,.1f} ms"
        text += ", so none of them is faster" if is_proof else ": a faster one may be among those"
    return text


def _nearest(args: argparse.Namespace, rows: list[StepPrice], limit: float, data: dict[str, Any]) -> str:
    """Names the candidate that is nearest to fitting, and the options that are left to try."""
    near = min(rows, key=lambda row: row.memory.total)
    fixed = near.memory.parameters + near.memory.optimizer
    text = f"nothing fits {size(int(limit))}: the nearest is {named(near)}, which takes {size(int(near.memory.total))}"
    more = "--gpus" if args.gpus is not None else "--cp, --tp, --pp, --ep or --replicas"
    remedies = [f"more ranks ({more})"] + ["--sharding zero3"] * (near.job.sharding != "zero3")
    remedies += ["--recompute full"] * (near.job.recompute != FULL)
    if fixed >= limit:
        text += f", {size(int(fixed))} of it weights, gradients and optimizer"
    else:
        about = "about " if args.search else ""
        text += f"; {about}{counted(data['longest'], 'token')} would fit"
    return f"{text}. Use {' or '.join(remedies)}."


def _table(rows: list[StepPrice], best: StepPrice | None, on: Machine) -> list[str]:
    """Returns a line for each job, with the parts that any of them has."""
    names = [name for name in rows[0].parts if any(row.parts[name] >= 0.05 for row in rows)]
    degrees = [name for name in _SHOWN if name == "cp" or any(getattr(row.job, name) != 1 for row in rows)]
    left = ["layout", "attention by", "linear by", "recompute"]
    cells = [[*(_SHOWN[name] for name in degrees), *left, *names]]
    cells[0] += ["step ms", "tokens/s/GPU", "MFU", "GiB a rank", ""]
    for row in rows:
        attention, linear = (
            [plan for plan, _ in row.plans if (plan.attend is None) == is_linear] for is_linear in (False, True)
        )
        cells.append(
            [
                *(str(getattr(row.job, name)) for name in degrees), row.job.layout, plan_names(attention),
                plan_names(linear), row.job.recompute, *(f"{row.parts[name]:,.1f}" for name in names),
                f"{row.step:,.1f}", f"{row.tokens_per_second_per_gpu:,.0f}",
                f"{row.mfu(on.hardware.matrix_peak):.0%}", f"{row.memory.total / 2**30:.1f}",
                "<-" if row is best else "",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first = len(degrees)
    return [
        "  ".join(
            cell.ljust(width) if first <= number < first + len(left) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _legend(rows: list[StepPrice]) -> list[str]:
    """Returns a line on those columns of the table whose names Megatron does not have."""
    words = {
        "interleave": "chunks: parts of the layers that a stage computes in turn",
        "packs": "packs: packs joined in a microbatch",
        "microbatches": "batches: microbatches of a replica in a step",
    }
    found = [text for name, text in words.items() if any(getattr(row.job, name) != 1 for row in rows)]
    return [f"{'; '.join(found)}.".capitalize()] * bool(found)


_SHOWN = {
    "tp": "tp", "pp": "pp", "interleave": "chunks", "ep": "ep", "cp": "cp", "replicas": "dp", "packs": "packs",
    "microbatches": "batches",
}  # fmt: skip
_WORDS = {
    "products": "products of weights", "dispatch": "experts' dispatch", "tensor": "tensor-parallel transfers",
    "exposed": "exposed transfers", "traffic": "memory traffic", "pipeline": "pipeline waits",
    "shards": "exposed transfers of weights and gradients",
}  # fmt: skip


def _tenths(row: StepPrice) -> str:
    """Returns by how much each large part would have to shrink for a step that is a tenth shorter."""
    shares = sorted(((value / row.step, name) for name, value in row.parts.items()), reverse=True)
    parts = [f"{_WORDS.get(name, name)} took {0.1 / share:.0%} less" for share, name in shares if share >= 0.11]
    return f"sensitive to: the step would be a tenth shorter if {', or '.join(parts)}"
