"""Measures on the ranks of the job that the benchmark runs in, or on local ones that it starts."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from megatron_cp.apps.bench.allocator import kept_blocks
from megatron_cp.executor import RankGroup, TorchGroup, check_agreement, run_ranks
from megatron_cp.plan import Plan


def measured_on_ranks(
    measure: Callable[..., Any], *arguments: Any, plans: Iterable[Plan], cp: int, args: argparse.Namespace,
    world: TorchGroup | None,
) -> list[Any]:  # fmt: skip
    """Returns the result of `measure(group, *arguments)` on each rank; the ranks of a job compare the plans first."""
    if world is not None:
        for plan in plans:
            check_agreement(plan, world)
        return world.all_gather_object(_in_process(measure, world, *arguments))
    function = measure if args.ranks == "threads" else partial(_in_process, measure)
    with kept_blocks():
        return run_ranks(function, cp, *arguments, kind=args.ranks, timeout=args.timeout)


def _in_process(measure: Callable[..., Any], group: RankGroup, *arguments: Any) -> Any:
    """Measures on a rank with a process of its own, without warnings about ranks without heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return measure(group, *arguments)
