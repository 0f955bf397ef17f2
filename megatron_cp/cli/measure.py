"""What the benchmarks share: which layer and batch they measure, a watch for each rank, medians and quartiles."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.cli.bench import RANKS
from megatron_cp.cli.options import MAX_LOCAL_RANKS
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import Message, Pending, RankGroup, TorchGroup

DIRECTIONS = ("forward", "backward")
# As a GPU's caching allocator does, freed blocks (to 32 MiB, glibc's limit) are kept: paging memory in anew for each
# buffer would be most of the time outside of kernels.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**36)}


def with_defaults(
    args: argparse.Namespace,
    world: TorchGroup | None,
    layers: Sequence[str],
    shapes: Mapping[str, Mapping[str, int]],
) -> argparse.Namespace:
    """What was asked for, and for the rest a layer and a batch on which ratios mean something.

    Args:
        layers: that the benchmark measures; the first if none was asked for.
        shapes: of each layer where neither a model nor heads are asked for, by the names of options.
    """
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


@contextlib.contextmanager
def kept_blocks() -> Iterator[None]:
    """Within it, processes start with an allocator that keeps what is freed."""
    before = {name: os.environ.get(name) for name in _ALLOCATOR}
    os.environ.update(_ALLOCATOR)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """What one direction took on one rank: seconds of its thread or stream and by the clock on the wall, and bytes.

    Attributes:
        kernel, wire, total: of its thread or stream: inside kernels, starting and awaiting transfers, and in all.
        wall_wire, wall: by the clock.
        sent: bytes to other ranks.
    """

    kernel: float
    wire: float
    total: float
    wall_wire: float
    wall: float
    sent: int

    @property
    def busy(self) -> float:
        return self.total - self.wire


class Watch(threading.local):
    """What the calling rank does: the time it spends in each kind of work, and whether kernels show their tensors.

    Ranks may be threads, which share the kernels and not what these report.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.hides_kernels, self.kernel, self.sent = device, False, "", 0
        self.spans: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.spans.append((name, start, self._now()))

    def timed[T](self, call: Callable[[], T]) -> tuple[T, Timing]:
        """What a call returns, and took."""
        self.spans.clear()
        self.sent = 0
        with self.span("total"):
            result = call()
        return result, self._taken()

    def _taken(self) -> Timing:
        sums = {name: np.zeros(2) for name in ("kernel", "wire", "total")}
        for name, start, end in self.spans:
            sums[name] += self._between(start, end)
        (kernel, _), (wire, wall_wire), (total, wall) = (sums[name].tolist() for name in ("kernel", "wire", "total"))
        return Timing(kernel, wire, total, wall_wire, wall, self.sent)

    def _now(self) -> Any:
        if self.device == "cpu":
            return np.array([time.thread_time(), time.perf_counter()])
        event = torch.cuda.Event(enable_timing=True)  # the host waits for none of them before the direction is over
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> Any:
        if self.device == "cpu":
            return end - start
        end.synchronize()
        return np.full(2, start.elapsed_time(end) / 1e3)


class WatchedGroup(RankGroup):
    """A group that says when it starts and awaits transfers, and how much it sends."""

    def __init__(self, group: RankGroup, watch: Watch) -> None:
        self._group, self._watch = group, watch
        self.rank, self.size, self.agreed = group.rank, group.size, group.agreed

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        self._watch.sent += (sum(sent_splits) - sent_splits[self.rank]) * sent.element_size()
        return self._started(self._group.start_all_to_all, received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        self._watch.sent += sent.nbytes * (self.size - 1)
        return self._started(self._group.start_all_gather, received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._watch.sent += sum(message.tensor.nbytes for message in sends)
        return self._started(self._group.start_messages, sends, receives)

    def barrier(self) -> None:
        self._group.barrier()

    def _started(self, start: Callable[..., Pending], *args: Any) -> Pending:
        with self._watch.span("wire"):
            return _WatchedPending(start(*args), self._watch)


class _WatchedPending(Pending):
    def __init__(self, pending: Pending, watch: Watch) -> None:
        self._pending, self._watch = pending, watch

    def wait(self) -> None:
        with self._watch.span("wire"):
            self._pending.wait()


def interleaved_order(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Every name once a round, on every rank in the same order: nobody always comes first, or after the same one."""
    for repeat in range(repeats):
        yield from random.Random(repeat).sample(names, len(names))


# -- the report --------------------------------------------------------------------------------------------------------


def spread(values: Any) -> dict[str, float]:
    """The median and the quartiles on either side."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def formatted(value: Mapping[str, float], *, percent: bool = False) -> str:
    """A spread as text."""
    low, median, high = (value[name] * (100 if percent else 1) for name in ("low", "median", "high"))
    digits, unit = (1, " %") if percent else (2, "")
    return f"{median:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"
