"""torch.distributed, with which every peer sends, under a watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_cp.apps.bench.timing import Watch
from megatron_cp.megatron import exchanged


@contextlib.contextmanager
def watched_wire(watch: Watch) -> Iterator[None]:
    """Times torch.distributed's transfers within the block, for every caller: megatron-core takes no group of ours.

    Ours and megatron-core's are both timed here, so that a transfer means the same for either.
    """
    names = ("all_to_all_single", "isend", "irecv")
    with exchanged(dist, **{name: _watched(getattr(dist, name), watch) for name in names}):
        yield


def _watched(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with watch.span("wire"):
            started = function(*args, **kwargs)
        return started and _WatchedWork(started, watch)

    return call


class _WatchedWork:
    def __init__(self, work: Any, watch: Watch) -> None:
        self._work, self._watch = work, watch

    def wait(self, *limit: Any) -> None:
        with self._watch.span("wire"):
            self._work.wait(*limit)


class Ranks:
    """A group that knows its size, and sends nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size
