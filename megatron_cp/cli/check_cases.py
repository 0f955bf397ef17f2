"""Runs the cases of `megatron-cp check` once its arguments have been read."""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.cli.case_options import MAX_LOCAL_RANKS, case_of, given_axes, hosts_of_job
from megatron_cp.cli.check_report import save_check
from megatron_cp.cli.parser import as_flag
from megatron_cp.cli.report import Report
from megatron_cp.cli.shapes import layers_of
from megatron_cp.cli.terminal import Progress
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.agreement import check_agreement
from megatron_cp.executor.groups import RankGroup, TorchGroup, set_timeout
from megatron_cp.executor.launch import in_torchrun, run_ranks, start_torchrun_rank
from megatron_cp.plan.describe import counted
from megatron_cp.plan.schemes import DEFAULT, SCHEMES
from megatron_cp.planner.tiled import checked_search
from megatron_cp.testing.parity import Case, Parity, compare, judge, one_rank, run_layer, whole
from megatron_cp.testing.sweep import sweep


def report(args: argparse.Namespace) -> Report:
    """Runs every case, on local ranks or on the ranks that torchrun started."""
    torch.set_num_threads(1)
    world = start_torchrun_rank(args.timeout) if in_torchrun() else None
    try:
        return _report(args, world)
    finally:
        if world is not None:
            dist.destroy_process_group()


def _report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    asked = args.cp or ([world.size] if world else [2, 3, 4, 5] if args.all else [2, 3, 5])
    cases, not_run = _fitting(args, asked, world)
    sizes = [size for size in asked if size not in not_run]
    progress = Progress("cases", len(cases), quiet=world is not None and world.rank != 0)
    results = []
    try:
        for result in _on_torchrun(cases, world, args) if world else _on_local_ranks(cases, args):
            results.append(result)
            progress.step(f"cp={result.case.cp} {result.case.scheme}")
    finally:
        progress.clear()
    passed = all(result.passed for result in results)
    names = dict.fromkeys(name for result in results for name in result.errors)
    worst = {name: _worst([r.errors[name] for r in results if name in r.errors]) for name in names}
    kernels = {name: _worst([r.kernel_errors[name] for r in results if name in r.kernel_errors]) for name in names}
    backend = dist.get_backend() if world else "gloo" if args.ranks == "processes" else args.ranks
    where = {"backend": backend, "device": cases[0].device, "dtype": args.dtype}
    lines = [_verdict(results, ", ".join(where.values()))]
    lines += _summary(results, args.details) if args.all else [_line(result, args.details) for result in results]
    if args.all and args.layer == "attention" and args.scheme is None:
        products = [scheme.name for scheme in SCHEMES.values() if scheme.is_product]
        lines += [f"{' and '.join(products)} were not run at cp={size}, which is no product" for size in sizes
                  if not any(case.cp == size and case.scheme in products for case in cases)]  # fmt: skip
    if args.scheme is None and not args.all:
        lines.append(
            f"{'schemes' if args.layer == 'attention' else 'modes'}: all that auto may choose; the first of each cp is "
            "its choice for these documents"
        )
    lines += [f"cp={size} was not run: {reason}" for size, reason in not_run.items()]
    data = {
        **where,
        "pass": passed,
        "bitwise_forward": all(result.bitwise_forward for result in results),
        "bitwise_backward": all(result.bitwise_backward for result in results),
        "max_rel_err": worst,
        "kernel_err": kernels,
        "cases": len(results),
        "cp": sizes,
        "cp_not_run": list(not_run),
        "not_run": not_run,
    }
    quiet = world is not None and world.rank != 0
    if args.report is not None and not quiet:
        save_check(args, results, lines[0])
    return Report("\n".join(lines), data, ok=passed, quiet=quiet)


def _fitting(args: argparse.Namespace, sizes: list[int], world: TorchGroup | None) -> tuple[list[Case], dict[int, str]]:
    """Returns the cases of all sizes that can be run, and the reason for each size that cannot."""
    device = "cuda" if world and dist.get_backend() == "nccl" else "cpu"
    given, layers = given_axes(args), layers_of(args)
    fitting: list[Case] = []
    refused: dict[int, ArgumentError] = {}
    for size in sizes:
        try:
            _check_size(size, world)
            of_case: dict[str, Any] = {
                "kernel": args.kernel,
                "device": device,
                "hosts": hosts_of_job(args, world, size),
            }
            cases = [each for shape in layers for each in _cases(args, case_of(args, size, shape, **of_case), given)]
            for each in cases:
                each.refuse_early()
        except ArgumentError as error:
            refused[size] = error
        else:
            fitting += cases
    if not fitting:
        raise next(iter(refused.values()))
    return fitting, {size: as_flag(error, args) for size, error in refused.items()}


def _cases(args: argparse.Namespace, case: Case, given: list[str]) -> list[Case]:
    """Returns the cases of one size and shape: all that are named, or by each scheme that "auto" may take.

    What it takes depends on the documents, and those of a job are longer; so the first case is by what it takes here.
    """
    if args.all:
        return sweep(case, given)
    if args.scheme is not None:
        return [case]
    checked_search(case.search_seconds, [DEFAULT.name])  # a search is for schemes that are named
    width = case.heads * case.value_head_dim
    wide = case if case.layer == "attention" or case.hidden_size else replace(case, hidden_size=width)
    schemes = dict.fromkeys(price.scheme for price in wide.plan().prices)
    return [wide.with_scheme(scheme) for scheme in schemes] or [case]


def _check_size(size: int, world: TorchGroup | None) -> None:
    if world and size > world.size:
        raise ArgumentError("--cp", size, f"sizes of at most the {world.size} ranks of this job")
    if not world and size > MAX_LOCAL_RANKS:
        allowed = f"at most {MAX_LOCAL_RANKS} local ranks"
        raise ArgumentError("--cp", size, allowed, "Run larger sizes under torchrun.")


def _on_local_ranks(cases: list[Case], args: argparse.Namespace) -> Iterator[Parity]:
    if args.ranks == "threads":
        for case in cases:
            yield compare(case, timeout=args.timeout)
        return
    for size, of_size in itertools.groupby(cases, key=lambda case: case.cp):  # starting processes takes seconds
        batch = list(of_size)
        ranks = run_ranks(
            _run_cases, size, batch, 60 * args.distributed_timeout_minutes, kind=args.ranks, timeout=args.timeout
        )
        for number, case in enumerate(batch):
            yield judge(case, whole(case, [rank[number] for rank in ranks]), one_rank(case))


def _run_cases(group: RankGroup, cases: list[Case], wait: float) -> list[dict[str, Tensor]]:
    """Returns this rank's tensors of each case; from the second case on, it waits at most `wait` seconds for a rank."""
    results = []
    for case in cases:
        results.append(run_layer(group, case))
        if isinstance(group, TorchGroup):
            set_timeout(wait)
    return results


def _on_torchrun(cases: list[Case], world: TorchGroup, args: argparse.Namespace) -> Iterator[Parity]:
    for number, case in enumerate(cases):
        wait = timedelta(seconds=60 * args.distributed_timeout_minutes if number else args.timeout)
        ranks_of_case = list(range(case.cp))
        members = dist.new_group(ranks_of_case, backend=dist.get_backend(), timeout=wait)
        host = dist.new_group(ranks_of_case, backend="gloo", timeout=wait) if world.host_group else None
        result = None
        if world.rank < case.cp:
            group = TorchGroup(members, host)
            check_agreement(case.plan(), group)
            own = {name: tensor.cpu() for name, tensor in run_layer(group, case).items()}
            ranks = group.all_gather_object(own)
            result = judge(case, whole(case, ranks), {name: tensor.cpu() for name, tensor in one_rank(case).items()})
            for mine in (members, host):
                if mine is not None:
                    dist.destroy_process_group(mine)
        yield world.all_gather_object(result)[0]  # every rank leaves with the same verdict


def _verdict(results: list[Parity], where: str) -> str:
    """Returns the first line: whether all cases passed, by how much, and where they ran."""
    failed = sum(not result.passed for result in results)
    count = counted(len(results), "case")
    said = f"ok: {count} as on one rank" if not failed else f"FAILED: {failed} of {count}"
    return f"{said}, {_largest(results)}; {where}"


def _largest(results: list[Parity]) -> str:
    """Returns the largest error of all tensors with its limit, beside the kernel's own error if that is not float64."""
    limits = Counter(result.tolerance for result in results)
    shown = " and ".join(f"{limit:g}" if len(limits) == 1 else f"{limit:g} for {n}" for limit, n in limits.items())
    error = _number(_worst([error for result in results for error in result.errors.values()]))
    own = [error for result in results for error in result.kernel_errors.values()]
    kernel = f", the kernel's own {_number(_worst(own))}" if own else ""
    return f"largest error {error} (limit {shown}{kernel})"


def _line(result: Parity, details: bool) -> str:
    if result.passed and not details:
        return f"ok     {result.case}: {_largest([result])}"
    forward, backward = (
        "bitwise" if same else "not bitwise" for same in (result.bitwise_forward, result.bitwise_backward)
    )
    verdict = "ok    " if result.passed else "FAILED"
    limit = f"limit {result.tolerance:g}"
    return f"{verdict} {result.case}: {limit}, forward {forward}, backward {backward}; {_errors([result])}"


def _summary(results: list[Parity], details: bool) -> list[str]:
    """Returns a line for each scheme and number of ranks, and one for each case that failed."""
    lines = []
    for (cp, scheme), group in itertools.groupby(results, key=lambda result: (result.case.cp, result.case.scheme)):
        cases = list(group)
        failed = [result for result in cases if not result.passed]
        verdict = "FAILED" if failed else "ok    "
        shown = f"at most {_errors(cases)}" if details or failed else _largest(cases)
        lines.append(f"{verdict} cp={cp} {scheme:<15} {len(cases):>4} cases; {shown}")
        lines += [f"  {_line(result, details)}" for result in failed]
    return lines


def _errors(results: list[Parity]) -> str:
    """Returns the largest error of each tensor as text, beside the kernel's own error if that is not float64."""
    names = dict.fromkeys(name for result in results for name in result.errors)
    texts = []
    for name in names:
        error = _worst([result.errors[name] for result in results if name in result.errors])
        own = [result.kernel_errors[name] for result in results if name in result.kernel_errors]
        texts.append(f"{name} {_number(error)}" + (f" (kernel {_number(_worst(own))})" if own else ""))
    return "  ".join(texts)


def _number(error: float | None) -> str:
    return "nan" if error is None else f"{error:.1e}"


def _worst(errors: list[float]) -> float | None:
    """Returns the largest error; None, which JSON can express, if one is NaN or there is none."""
    return None if not errors or any(math.isnan(error) for error in errors) else max(errors)
