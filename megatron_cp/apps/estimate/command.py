"""`megatron-cp plan --whole`: prices a whole model's step for every size and layout, and names the best."""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_cp.apps.estimate.answer import answer_lines, verdict_lines
from megatron_cp.apps.estimate.job import GRADIENTS, PRECISIONS, SHARDINGS, Job
from megatron_cp.apps.estimate.launch import launch_of
from megatron_cp.apps.estimate.mixers import LinearMixer
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_layers import FULL, RECOMPUTATION
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.report import bytes_of, labelled, report_of
from megatron_cp.apps.estimate.search import Found, best_jobs
from megatron_cp.apps.estimate.step import StepPrice, predict_step, scheme_of
from megatron_cp.apps.estimate.step_memory import RUNTIME_BYTES
from megatron_cp.cli import MAX_TOKENS, Progress, Report, document_lengths, memory_size, positive
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask, Packing
from megatron_cp.page import check_page, save_page
from megatron_cp.plan import AUTO, MODES
from megatron_cp.planner import (
    CHOICES,
    Machine,
    described,
    layout_by_name,
    machine,
    require,
)

_MOST_TRIES, _ROUNDED = 5, 1024  # tries to find a length that fits; it is a multiple of so many tokens
_STEP_TOKENS = 1 << 22  # tokens of a step, about, where no --global-batch is given
_DEGREES = {
    "gpus": "number of GPUs: names the fastest jobs, with all degrees that are not given searched",
    "replicas": "data-parallel size (default: 1)",
    "tp": "tensor-parallel size, with sequence parallelism (default: 1)",
    "pp": "pipeline stages (default: 1)",
    "interleave": "chunks of layers of a stage (default: 1)",
    "ep": "expert-parallel size (default: 1)",
    "microbatches": "microbatches of a step in each replica (default: 1)",
    "packs": "times the pack is joined in a microbatch (default: 1)",
    "global-batch": "with --gpus: packs of a step (default: about 4M tokens)",
}
_CHOICES = "fit", "sharding", "recompute", "report", "precision", "gradients", "tp_comm_overlap"
WHOLE = (*_CHOICES, *(name.replace("-", "_") for name in _DEGREES))
_OF_A_LAYER = (
    "heads", "kv_heads", "key_heads", "groups", "head_dim", "value_dim", "state", "conv_width", "hidden_size",
    "softmax_scale", "learned_sink", "softcap", "dropout", "latent_mode",
)  # fmt: skip


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `plan` that concern a whole model's step."""
    group.add_argument("--whole", action="store_true", help="price a step of the whole --model (default: qwen3-next)")
    group.add_argument(
        "--fit",
        type=memory_size,
        metavar="SIZE",
        help="with --whole: memory of a rank with its unit, such as 70GiB or 70GB, or in bytes, such as 70e9 (default: "
        "--gpu's); the exit status is 3 if nothing fits",
    )
    group.add_argument(
        "--sharding", choices=SHARDINGS, help="with --whole: sharding of weights and optimizer (default: zero1)"
    )
    for name, words in _DEGREES.items():
        group.add_argument(f"--{name}", type=positive, metavar="N", help=f"with --whole: {words}")
    group.add_argument(
        "--precision", choices=PRECISIONS, help="with --whole: precision of products of weights (default: bf16)"
    )
    group.add_argument(
        "--gradients", choices=GRADIENTS, help="with --whole: sums of gradients, bf16 as --grad-reduce-in-bf16 "
        "(default: fp32)",
    )  # fmt: skip
    group.add_argument(
        "--tp-comm-overlap",
        action="store_const",
        const=True,
        help="with --whole: overlap transfers of --tp with products",
    )
    group.add_argument(
        "--recompute",
        choices=RECOMPUTATION,
        help="with --whole: recomputation (default: selective, or full if that does not fit; ops is torchtitan's)",
    )
    group.add_argument("--report", metavar="FILE.html", help="with --whole: save a page that shows the step")


def run_whole(args: argparse.Namespace) -> Report:
    """Prices every size and layout, and names the best that fits."""
    for option, unless in {"layer": "attention", **dict.fromkeys(_OF_A_LAYER)}.items():
        if getattr(args, option) != unless:
            allowed = "only without --whole, which prices all layers of --model"
            raise ArgumentError(f"--{option.replace('_', '-')}", getattr(args, option), allowed)
    if args.dtype not in ("bfloat16", "float16"):
        raise ArgumentError(
            "--dtype", args.dtype, "bfloat16 or float16 with --whole, which counts two bytes an element"
        )
    if args.report is not None:
        check_page("--report", args.report)
    started = time.perf_counter()
    model, on = read_model(args.model or "qwen3-next"), machine(args.gpu)
    if args.mask is not None:
        model = model.with_mask(args.mask)
    linear = any(isinstance(block.mixer, LinearMixer) for block in model.blocks)
    if args.scheme in MODES and not linear:
        raise ArgumentError("--scheme", args.scheme, f"a scheme of attention: {model.name} has no linear layer")
    limit = on.hardware.memory if args.fit is None else args.fit
    searched = None
    if args.gpus is not None:
        lengths, searched = _searched(args, model, on, limit)
        rows = searched.rows
    else:
        if args.global_batch is not None:
            raise ArgumentError("--global-batch", args.global_batch, "only with --gpus", "Give --microbatches.")
        args.cp = list(dict.fromkeys(args.cp or [4]))
        lengths = document_lengths(args, max(args.cp))
        rows = _rows(args, model, on, Packing(lengths), limit)
    if not rows:
        raise ArgumentError("--cp", args.cp, "a size that some scheme can run with these heads")
    fitting = [row for row in rows if row.memory.total <= limit]
    best = max(fitting, key=lambda row: row.tokens_per_second_per_gpu) if fitting else None
    if args.fit is not None and fitting and searched is None:
        smallest = min(row.job.cp for row in fitting)
        best = min((row for row in fitting if row.job.cp == smallest), key=lambda row: row.step)
    milliseconds = (time.perf_counter() - started) * 1e3
    chosen = best or min(rows, key=lambda row: row.memory.total)
    topology = chosen.job.topology(on, args.hosts)
    given = args.model if args.model and args.model.strip().startswith("--") else None
    data = {
        "model": model.name, "source": model.source,
        "parameters": model.parameters, "active_parameters": model.active_parameters,
        "tokens": int(sum(lengths)), "documents": len(lengths), "machine": described(on, topology),
        "memory_limit": limit, "fits": best is not None,
        "take_this": launch_of(best, model, on, given, args.hosts) if best else None,
        "best": _as_json(chosen, on, limit), "rows": [_as_json(row, on, limit) for row in rows],
        "longest": _longest(args, model, on, chosen, lengths, limit), "plan_ms": milliseconds,
    }  # fmt: skip
    if searched is not None:
        data["search"] = {"counted": searched.counted, "tried": searched.tried, "too_large": searched.too_large,
                          "bound_ms": searched.bound if np.isfinite(searched.bound) else None}  # fmt: skip
    verdict = data["verdict"] = verdict_lines(args, rows, best, limit, on.hardware.memory, data)
    text = [*verdict, "", *answer_lines(args, model, lengths, on, rows, best)]
    if args.report is not None:
        page = report_of(model, Packing(lengths), on, topology, rows, chosen, limit, verdict[0])
        save_page(page, args.report)
        text.append(f"report: {args.report}")
    return Report("\n".join(text), data, fits=best is not None)


def _searched(args: argparse.Namespace, model: ModelSpec, on: Machine, limit: float) -> tuple[tuple[int, ...], Found]:
    """Returns the pack's lengths, and the fastest jobs on `--gpus`."""
    for name in ("replicas", "microbatches", "hosts"):
        if getattr(args, name) is not None:
            raise ArgumentError(f"--{name}", getattr(args, name), "only without --gpus, from which it follows")
    if args.cp is not None and len(args.cp) > 1:
        raise ArgumentError("--cp", args.cp, "one size with --gpus, or none to search it")
    given = {name: value for name in ("tp", "pp", "ep", "interleave", "packs") if (value := getattr(args, name))}
    given |= {"cp": args.cp[0]} if args.cp else {}
    args.cp = args.cp or [1]
    lengths = document_lengths(args, args.cp[0])
    batch = args.global_batch or max(1, 1 << round(np.log2(max(_STEP_TOKENS / sum(lengths), 1))))
    layout = None if args.layout in (None, AUTO) else require("layout", args.layout)
    shown: dict[str, Progress] = {}

    def tell(what: str, done: int, total: int) -> None:
        if what not in shown:
            for other in shown.values():
                other.clear()
            shown[what] = Progress(f"jobs {what}", total)
        shown[what].step(total=max(total, done))

    try:
        return lengths, best_jobs(
            model, Packing(lengths), on, limit, _base(args, 1, layout or CHOICES[0]), gpus=args.gpus, batch=batch,
            given=given, recompute=args.recompute, layout=layout, tell=tell,
        )  # fmt: skip
    finally:
        for progress in shown.values():
            progress.clear()


def _rows(args: argparse.Namespace, model: ModelSpec, on: Machine, packing: Packing, limit: float) -> list[StepPrice]:
    if args.tp_comm_overlap and (args.tp or 1) == 1:
        raise ArgumentError("--tp-comm-overlap", "the flag", "only with --tp above 1, whose transfers overlap")
    names = CHOICES if args.layout in (None, AUTO) else (require("layout", args.layout),)
    rows = []
    packing = Packing(packing.lengths.tolist() * (args.packs or 1))
    for cp, name in itertools.product(args.cp, names):
        if cp == 1 and name != names[0]:
            continue
        try:
            rows.append(_row(args, model, on, packing, _base(args, cp, name), limit))
        except ArgumentError as error:
            if error.argument not in ("scheme", "ulysses_degree", "head_chunks") or len(args.cp) == 1:
                raise
    return rows


def _base(args: argparse.Namespace, cp: int, layout: str) -> Job:
    """Returns the job that the options name, with its defaults."""
    scheme, mode = _asked(args)
    degrees: dict[str, Any] = {
        name: getattr(args, name) or 1 for name in ("tp", "pp", "interleave", "ep", "microbatches", "packs")
    }
    return Job(
        cp, layout, scheme, args.ulysses_degree, mode, args.recompute or "selective", args.head_chunks,
        args.transport, args.codec, args.sharding or "zero1", args.replicas or 1, args.gpu,
        args.search, precision=args.precision or "bf16",
        gradients=args.gradients or "fp32", tp_overlap=bool(args.tp_comm_overlap), **degrees,
    )  # fmt: skip


def _row(
    args: argparse.Namespace, model: ModelSpec, on: Machine, packing: Packing, job: Job, limit: float
) -> StepPrice:
    """Returns the price of a job, with all layers recomputed if it would not fit otherwise."""
    mask = None if args.mask is None else Mask.named(packing, args.mask)
    topology = job.topology(on, args.hosts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        align = np.lcm(args.align, job.tp)
        layout = layout_by_name(job.layout, packing, job.cp, align=int(align), seed=args.seed, mask=mask)
        row = predict_step(model, layout, job, on, topology)
        if row.memory.total > limit and args.recompute is None:
            row = predict_step(model, layout, replace(job, recompute=FULL), on, topology)
    return row


def _asked(args: argparse.Namespace) -> tuple[str, str]:
    """Returns the scheme of attention and the mode of linear layers; `--scheme` names either."""
    if args.scheme in MODES:
        return "auto", args.scheme
    return args.scheme or "auto", "auto"


def _as_json(row: StepPrice, on: Machine, limit: float) -> dict[str, Any]:
    return {
        **{name: getattr(row.job, name) for name in _NAMES}, "gpus": row.job.gpus,
        "plans": [
            {"kind": plan.kind, "scheme": scheme_of(plan), "ulysses_degree": plan.ulysses_degree, "layers": count}
            for plan, count in row.plans
        ],
        "milliseconds": labelled(row) | {"step": row.step},
        "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu, "mfu": row.mfu(on.hardware.matrix_peak),
        "bytes": bytes_of(row), "fits": row.memory.total <= limit, "flags": row.flags,
    }  # fmt: skip


_NAMES = (
    "cp", "layout", "recompute", "tp", "pp", "interleave", "ep", "replicas", "microbatches", "packs", "sharding",
    "precision", "gradients", "tp_overlap",
)  # fmt: skip


def _longest(
    args: argparse.Namespace, model: ModelSpec, on: Machine, row: StepPrice, lengths: Sequence[int], limit: float
) -> int:
    """Returns the tokens of a pack that fit this candidate with the documents scaled to them; 0 if none is found.

    A second price confirms that they fit; it is left out if tiles are searched, and the number is then approximate.
    """
    again = argparse.Namespace(**{**vars(args), "recompute": row.job.recompute})
    tokens, found = sum(lengths), row
    least = tokens if row.memory.total <= limit else 0
    for _ in range(_MOST_TRIES):
        fixed = found.memory.parameters + found.memory.optimizer + RUNTIME_BYTES
        growing = found.memory.total - fixed
        tokens = int(min(tokens * max(limit - fixed, 0.0) / growing, MAX_TOKENS)) if growing > 0 else 0
        tokens -= tokens % _ROUNDED if tokens > _ROUNDED else 0
        if args.search or tokens <= max(least, row.job.cp - 1):
            return max(tokens if tokens >= row.job.cp else 0, least)
        edges = np.round(np.cumsum(lengths) / sum(lengths) * tokens).astype(int)
        packing = Packing(np.diff(edges, prepend=0).tolist() * row.job.packs)
        found = _row(again, model, on, packing, row.job, limit)
        if found.memory.total <= limit:
            return tokens
    return least
