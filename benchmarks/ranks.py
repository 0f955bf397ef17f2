"""The ranks of a benchmark: their number, layer and batch by default, and where they run."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.cli import INSTALL_MEGATRON, MAX_LOCAL_RANKS, case_of, hosts_of_job, known_shapes
from megatron_cp.errors import ArgumentError

if TYPE_CHECKING:
    from megatron_cp.executor import RankGroup, TorchGroup
    from megatron_cp.plan import Plan
    from megatron_cp.testing import Case

MEGATRON = "megatron-core"
RANKS, EXCHANGE_RANKS, WIRE_RANKS = 2, (2, 4), (3, 4, 5, 8)  # of local runs without --cp
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def with_defaults(
    args: argparse.Namespace, world: TorchGroup | None, layers: Sequence[str], shapes: Mapping[str, Mapping[str, int]]
) -> argparse.Namespace:
    """Returns the options, with a layer and a batch on which ratios mean something for those that are not given.

    The first of `layers` is the default; `shapes` are defaults too, by the names of options.
    """
    import torch
    import torch.distributed as dist

    args = argparse.Namespace(**vars(args))
    args.layer = args.layer or layers[0]
    if args.layer not in layers:
        raise ArgumentError("--layer", args.layer, " or ".join(layers), "That is what this benchmark measures.")
    on_cuda = dist.get_backend() == "nccl" if world else torch.cuda.is_available()
    args.device = args.device or ("cuda" if on_cuda else "cpu")
    if args.device == "cuda" and not on_cuda:
        raise ArgumentError("--device", "cuda", "cpu", "Every rank of this job would need a CUDA device.")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.model is None:
        heads_given = args.heads is not None
        for name, value in shapes[args.layer].items():
            of_heads = name in ("heads", "kv_heads", "key_heads", "groups")
            if getattr(args, name) is None and not (of_heads and heads_given):
                setattr(args, name, value)
    if args.lengths is None and args.tokens_per_rank is None:
        args.tokens_per_rank = 2048
    if world and args.cp not in (None, world.size):
        raise ArgumentError("--cp", args.cp, f"the {world.size} ranks of this job")
    args.cp = world.size if world else args.cp or RANKS
    if not world and args.cp > MAX_LOCAL_RANKS:
        raise ArgumentError(
            "--cp", args.cp, f"at most {MAX_LOCAL_RANKS} local ranks", "Run larger sizes under torchrun."
        )
    return args


def measured_on_ranks(
    measure: Callable[..., Any], *arguments: Any, plans: Iterable[Plan], cp: int, args: argparse.Namespace,
    world: TorchGroup | None,
) -> list[Any]:  # fmt: skip
    """Returns the result of `measure(group, *arguments)` on each rank; the ranks of a job compare the plans first."""
    from megatron_cp.executor import check_agreement, run_ranks

    if world is not None:
        for plan in plans:
            check_agreement(plan, world)
        return world.all_gather_object(_in_process(measure, world, *arguments))
    function = measure if args.ranks == "threads" else partial(_in_process, measure)
    return run_ranks(function, cp, *arguments, kind=args.ranks, timeout=args.timeout)


def _in_process(measure: Callable[..., Any], group: RankGroup, *arguments: Any) -> Any:
    """Measures on a rank with a process of its own, without warnings."""
    _keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ranks without heads, and Megatron's about packages that nothing uses
        return measure(group, *arguments)


def _keep_freed_memory() -> None:
    """Makes the C library keep freed memory of any size: otherwise a block above 32 MiB is paged in anew each time.

    That would be most of the time of any code that makes one. A GPU's caching allocator keeps blocks too.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, -1)


def check_megatron(name: str) -> None:
    """Refuses a benchmark that compares with megatron-core where that is not installed."""
    try:
        version(MEGATRON)  # only the ranks import it: that takes seconds
    except PackageNotFoundError:
        remedy = f"It is not installed; {INSTALL_MEGATRON}. linear and attention measure layers without it."
        raise ArgumentError("benchmark", name, f"a machine with {MEGATRON}", remedy) from None


def megatron_case(args: argparse.Namespace, world: TorchGroup | None, cp: int, tokens: int, documents: int) -> Case:
    """Returns a Gated DeltaNet over `cp` ranks as megatron-core can run it: its shape, and documents it can shard."""
    args = argparse.Namespace(**vars(args))
    allowed_values = {"ranks": "processes", "kernel": "auto", "layout": "zigzag", "scheme": "headwise", "layer": "gdn"}
    for name, allowed in allowed_values.items():
        if getattr(args, name) not in (None, allowed):
            remedy = f"{MEGATRON} can be compared with nothing else."
            raise ArgumentError(f"--{name}", getattr(args, name), allowed, remedy)
    args.layer, args.scheme, args.layout, args.dtype, args.cp = (
        "gdn",
        "headwise",
        "zigzag",
        args.dtype or "bfloat16",
        cp,
    )
    given, args.lengths = args.lengths, args.lengths or [2 * cp]
    args.tokens_per_rank = args.documents = None
    known = next(iter(known_shapes("qwen3-next")["gdn"]))
    shape = {"heads": known.heads, "key_heads": known.groups, "head_dim": known.head_dim}
    args = with_defaults(args, world, ("gdn",), {"gdn": shape})
    case = case_of(args, cp, device=args.device, hosts=hosts_of_job(args, world, cp))
    if case.cp < 2 or case.groups % case.cp:
        allowed = f"divisors of the {case.groups} key heads above 1"
        raise ArgumentError("--cp", case.cp, allowed, f"{MEGATRON} exchanges no others.")
    case = replace(case, lengths=tuple(given or aligned_lengths(tokens, documents, 2 * cp)))
    if any(not length or length % (2 * case.cp) for length in case.lengths):
        allowed = f"multiples of 2 * cp = {2 * case.cp}"
        raise ArgumentError("--lengths", list(case.lengths), allowed, f"{MEGATRON} shards no others.")
    case.refuse_early()
    return case


def aligned_lengths(tokens: int, documents: int, multiple: int) -> list[int]:
    """Returns documents of very different lengths, always the same, all multiples of what Megatron can shard."""
    units, given = tokens // multiple, f"{tokens} tokens in {documents} documents"
    if tokens % multiple or units < documents:
        raise ArgumentError("--tokens-per-rank", given, f"multiples of 2 * cp = {multiple}, one a document")
    draws = np.random.default_rng(0).lognormal(mean=3.0, sigma=1.2, size=documents)
    cuts = np.round(np.cumsum(draws) / draws.sum() * (units - documents)).astype(int)  # each has one already
    return ((np.diff(cuts, prepend=0) + 1) * multiple).tolist()
