"""`megatron-cp plan --whole`: plans all layers of a model for every size and layout, and names the one to take."""

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
from megatron_cp.apps.estimate.job import GRADIENTS, SHARDINGS, Job
from megatron_cp.apps.estimate.job_memory import MARGIN, RUNTIME_BYTES, RankMemory, memory_of
from megatron_cp.apps.estimate.levers import repeated_products, with_levers
from megatron_cp.apps.estimate.mixers import LinearMixer
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_layers import FULL, RECOMPUTATION
from megatron_cp.apps.estimate.model_plan import ModelPlan, plan_model
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.cli import MAX_TOKENS, Report, document_lengths, memory_size, positive
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask, Packing
from megatron_cp.plan import AUTO, MODES
from megatron_cp.planner import CHOICES, Machine, described, layout_by_name, machine, require

_MOST_TRIES, _ROUNDED = 5, 1024  # tries to find a length that fits; it is a multiple of so many tokens
_CLOSE = 1.02  # times a length that fits: a longer one is not tried
_SIZES = {
    "replicas": "data-parallel size; weights and optimizer are sharded over these ranks too",
    "tp": "tensor-parallel size, with sequence parallelism",
    "pp": "pipeline stages",
    "ep": "expert-parallel size",
}
_LEVERS = {
    "logit_rows": "the head computes logits of N rows at a time, as enable_context_parallel(logit_rows=N)",
    "mlp_rows": "MLPs run on N rows at a time, as run_in_chunks(mlp, N), and again in backward",
}
_OF_JOBS = ("sharding", "recompute", "gradients", *_SIZES, *_LEVERS, "saved_on_host")
WHOLE = ("fit", *_OF_JOBS)
_OF_A_LAYER = (
    "heads", "kv_heads", "key_heads", "groups", "head_dim", "value_dim", "state", "conv_width", "hidden_size",
    "softmax_scale", "learned_sink", "softcap", "dropout", "latent_mode",
)  # fmt: skip
_NO_STEPS = "plan no longer predicts steps, only layers under context parallelism and memory"
# Flags of `plan` that left, and what to take instead.
LEFT = {
    "--gpus": "plan no longer searches jobs: give --cp 8,16,32 and the job's --tp --pp --ep --replicas.",
    "--global-batch": f"{_NO_STEPS}.",
    "--microbatches": f"{_NO_STEPS}: that of as many microbatches as stages can hold.",
    "--interleave": f"{_NO_STEPS}: that of stages in one piece.",
    "--packs": "Give the lengths of all documents of a microbatch to --lengths.",
    "--precision": f"{_NO_STEPS}; weights in FP8 take the bytes of bf16.",
    "--tp-comm-overlap": f"{_NO_STEPS}.",
}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `plan` that concern a whole model."""
    group.add_argument(
        "--whole", action="store_true", help="plan all layers of --model (default: qwen3-next), and predict the memory"
    )
    group.add_argument(
        "--fit",
        type=memory_size,
        metavar="SIZE",
        help="with --whole: memory of a rank, such as 70GiB, 70GB or 70e9 for bytes (default: --gpu's). A tenth must "
        "stay free. The exit status is 3 if nothing fits",
    )
    group.add_argument(
        "--sharding", choices=SHARDINGS, help="with --whole: sharding of weights and optimizer (default: zero1)"
    )
    for name, words in _SIZES.items():
        group.add_argument(f"--{name}", type=positive, metavar="N", help=f"with --whole: {words} (default: 1)")
    group.add_argument(
        "--gradients", choices=GRADIENTS, help="with --whole: type of gradient sums; bf16 is --grad-reduce-in-bf16 "
        "(default: fp32)",
    )  # fmt: skip
    group.add_argument(
        "--recompute",
        choices=RECOMPUTATION,
        help="with --whole: recomputation (default: selective, or full if that does not fit; ops is torchtitan's)",
    )
    for name, words in _LEVERS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=positive, metavar="N", help=f"with --whole: {words} (default: all rows)")
    group.add_argument(
        "--saved-on-host", action="store_const", const=True,
        help="with --whole: all layers are recomputed, with their inputs in host memory, as by saved_on_host()",
    )  # fmt: skip


def run_whole(args: argparse.Namespace) -> Report:
    """Plans every size and layout, and names the smallest size that fits in its fastest layout."""
    for option, unless in {"layer": "attention", **dict.fromkeys(_OF_A_LAYER)}.items():
        if getattr(args, option) != unless:
            allowed = "only without --whole, which plans all layers of --model"
            raise ArgumentError(f"--{option.replace('_', '-')}", getattr(args, option), allowed)
    if args.dtype not in ("bfloat16", "float16"):
        raise ArgumentError(
            "--dtype", args.dtype, "bfloat16 or float16 with --whole, which counts two bytes an element"
        )
    started = time.perf_counter()
    model, on = read_model(args.model or "qwen3-next"), machine(args.gpu)
    if args.mask is not None:
        model = model.with_mask(args.mask)
    linear = any(isinstance(block.mixer, LinearMixer) for block in model.blocks)
    if args.scheme in MODES and not linear:
        raise ArgumentError("--scheme", args.scheme, f"a scheme of attention: {model.name} has no linear layer")
    limit = on.hardware.memory if args.fit is None else args.fit
    args.cp = list(dict.fromkeys(args.cp))
    lengths = document_lengths(args, max(args.cp))
    rows = _rows(args, model, on, Packing(lengths), limit)
    if not rows:
        raise ArgumentError("--cp", args.cp, "a size that some scheme can run with these heads")
    fitting = [row for row in rows if row.memory.fits(limit)]
    best = min(fitting, key=lambda row: (row.job.cp, row.milliseconds), default=None)
    milliseconds = (time.perf_counter() - started) * 1e3
    chosen = best or min(rows, key=lambda row: row.memory.total)
    levers = _levers(args, model, on, chosen, lengths, limit)
    data = {
        "model": model.name, "source": model.source,
        "parameters": model.parameters, "active_parameters": model.active_parameters,
        "tokens": int(sum(lengths)), "documents": len(lengths),
        "machine": described(on, chosen.job.topology(on, args.hosts)),
        "memory_limit": limit, "margin": MARGIN, "fits": best is not None,
        "take_this": best.flags if best else None,
        "best": _as_json(chosen, limit), "rows": [_as_json(row, limit) for row in rows],
        "levers": levers, "longest": levers[0]["longest"], "plan_ms": milliseconds,
    }  # fmt: skip
    verdict = data["verdict"] = verdict_lines(args, rows, best, limit, data)
    text = [*verdict, "", *answer_lines(args, model, lengths, on, rows, best, levers)]
    return Report("\n".join(text), data, fits=bool(best))


def _rows(args: argparse.Namespace, model: ModelSpec, on: Machine, packing: Packing, limit: float) -> list[ModelPlan]:
    names = CHOICES if args.layout in (None, AUTO) else (require("layout", args.layout),)
    # `--scheme` names a scheme of attention, or the mode of linear layers.
    scheme, mode = (AUTO, args.scheme) if args.scheme in MODES else (args.scheme or AUTO, AUTO)
    given = {name: getattr(args, name) for name in _OF_JOBS}
    if args.saved_on_host and args.recompute is None:
        given["recompute"] = FULL  # whose layers' inputs it moves
    rows = []
    for cp, name in itertools.product(args.cp, names):
        if cp == 1 and name != names[0]:
            continue
        job = Job(
            cp, name, scheme, args.ulysses_degree, mode, head_chunks=args.head_chunks, transport=args.transport,
            codec=args.codec, hardware=args.gpu, search_seconds=args.search,
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
        try:
            rows.append(_row(args, model, on, packing, job, limit))
        except ArgumentError as error:
            if error.argument not in ("scheme", "ulysses_degree", "head_chunks") or len(args.cp) == 1:
                raise
    return rows


def _row(
    args: argparse.Namespace, model: ModelSpec, on: Machine, packing: Packing, job: Job, limit: float
) -> ModelPlan:
    """Returns the plan of a job, with all layers recomputed if it would not fit otherwise."""
    mask = None if args.mask is None else Mask.named(packing, args.mask)
    topology = job.topology(on, args.hosts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        align = np.lcm(args.align, job.tp)
        layout = layout_by_name(job.layout, packing, job.cp, align=int(align), seed=args.seed, mask=mask)
        row = plan_model(model, layout, job, on, topology)
        if not row.memory.fits(limit) and args.recompute is None:
            row = plan_model(model, layout, replace(job, recompute=FULL), on, topology)
    return row


_NAMES = ("cp", "layout", *_OF_JOBS, "gpus")


def _as_json(row: ModelPlan, limit: float) -> dict[str, Any]:
    return {
        **{name: getattr(row.job, name) for name in _NAMES},
        "plans": [
            {"kind": plan.kind, "scheme": plan.strategy, "ulysses_degree": plan.ulysses_degree, "layers": count}
            for plan, count in row.plans
        ],
        "milliseconds": {**row.parts, "layers": row.milliseconds},
        **_bytes(row.memory), "fits": row.memory.fits(limit), "flags": row.flags,
    }  # fmt: skip


def _bytes(memory: RankMemory) -> dict[str, Any]:
    on_device = dict(vars(memory))
    return {"host_bytes": on_device.pop("host"), "bytes": on_device}


def _levers(
    args: argparse.Namespace, model: ModelSpec, on: Machine, row: ModelPlan, lengths: Sequence[int], limit: float
) -> list[dict[str, Any]]:
    """Returns what a candidate takes with more and more levers of memory, and what these cost."""
    found = []
    for name, job in with_levers(model, row.job):
        memory = memory_of(model, row.layout, job, row.plans)
        more = repeated_products(model, job) - repeated_products(model, row.job)
        longest = _longest(args, model, on, replace(row, job=job, memory=memory), lengths, limit)
        of_job = {key: getattr(job, key) for key in (*_LEVERS, "recompute", "saved_on_host")}
        found.append(
            {
                "name": name, **of_job, **_bytes(memory), "total": memory.total, "fits": memory.fits(limit),
                "longest": longest, "more_products": more,
            }
        )  # fmt: skip
    return found


def _longest(
    args: argparse.Namespace, model: ModelSpec, on: Machine, row: ModelPlan, lengths: Sequence[int], limit: float
) -> int:
    """Returns the tokens of a pack that fit this candidate with the documents scaled to them; 0 if none is found.

    A second plan confirms that they fit; it is left out if tiles are searched, and the number is then approximate.
    """
    again = argparse.Namespace(**{**vars(args), "recompute": row.job.recompute})
    tokens, found, allowed = sum(lengths), row, (1 - MARGIN) * limit
    least = tokens if row.memory.fits(limit) else 0
    before, total_before = 0, found.memory.parameters + found.memory.optimizer + RUNTIME_BYTES
    for _ in range(_MOST_TRIES):
        # Chunks take memory that does not grow with tokens, so the line goes through the last two plans.
        slope = (found.memory.total - total_before) / (tokens - before)
        before, total_before = tokens, found.memory.total
        tokens = int(min(tokens + (allowed - total_before) / slope, MAX_TOKENS)) if slope > 0 else MAX_TOKENS
        tokens -= tokens % _ROUNDED if tokens > _ROUNDED else 0
        if args.search:
            return max(tokens if tokens >= row.job.cp else 0, least)
        # Another try must be worth its plan.
        if tokens == before or tokens < row.job.cp or tokens <= (least if found is row else _CLOSE * least):
            return least
        edges = np.round(np.cumsum(lengths) / sum(lengths) * tokens).astype(int)
        found = _row(again, model, on, Packing(np.diff(edges, prepend=0)), row.job, limit)
        if found.memory.fits(limit):
            least = max(least, tokens)
    return least
