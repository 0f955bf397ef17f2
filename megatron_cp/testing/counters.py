"""`Counters`: counts an operation's collectives, copies and waits of the host."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.testing.modes import OneThreadMode

T = TypeVar("T")

# Operators that write a result without computing anything: each is a pass over memory.
_COPIES = {
    "_to_copy", "add", "add_", "cat", "clone", "constant_pad_nd", "copy_", "fill_", "gather", "index", "index_add",
    "index_add_", "index_put", "index_put_", "index_select", "new_zeros", "ones", "repeat", "scatter", "scatter_",
    "select_backward", "slice_backward", "split_with_sizes_copy", "stack", "zero_", "zeros", "zeros_like",
}  # fmt: skip
# Operators that make the host wait for the device, because a value or a size depends on data.
_SYNCS = {
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim",
}  # fmt: skip
# Python methods that wait and that the dispatcher does not see, at least for tensors that are on the host already.
_SYNC_METHODS = ("__array__", "cpu", "numpy", "tolist")


class Counters(OneThreadMode):
    """Counts on this thread, within `with counters:`, forward and backward.

    Attributes:
        collectives: operations on a group that `watch` wrapped; on other groups each call of torch.distributed: over
            gloo one of our collectives is a message to each rank and one from it there.
        copied: bytes written by each copy-like operator.
        host_syncs: uses of each operator or method that makes the host wait for a device. On the CPU nothing waits, so
            this counts what would.

    Example:
        >>> counters = Counters()
        >>> with counters:
        ...     _ = torch.ones(4).tolist()
        >>> dict(counters.host_syncs)
        {'tolist': 1}
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.copied: Counter[str] = Counter()
        self.host_syncs: Counter[str] = Counter()

    def watch(self, group: RankGroup) -> RankGroup:
        """Returns the same group, with its operations counted here."""
        return _WatchedGroup(group, self)

    def __enter__(self) -> Self:
        _sync_methods.report_to(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _sync_methods.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.collectives += 1
        elif name in _SYNCS or _reads_data_for_size(name, args, kwargs) or _leaves_device(name, args, result):
            self.host_syncs[name] += 1
        elif name in _COPIES and isinstance(result, Tensor):
            self.copied[name] += result.nbytes
        return result


def _reads_data_for_size(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    if name == "index":
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name == "repeat_interleave" and (kwargs or {}).get("output_size") is None


def _leaves_device(name: str, args: Sequence[Any], result: Any) -> bool:
    if name not in ("_to_copy", "copy_") or not isinstance(result, Tensor) or result.device.type != "cpu":
        return False
    return any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args)


class _WatchedGroup(RankGroup):
    def __init__(self, group: RankGroup, counters: Counters) -> None:
        self.group, self.counters = group, counters
        self.rank, self.size, self.agreed = group.rank, group.size, group.agreed
        self.buffers = group.buffers

    def _once(self, call: Callable[..., T], *args: Any) -> T:
        seen = self.counters.collectives
        result = call(*args)
        self.counters.collectives = seen + 1  # counted once, even if torch.distributed's operator was seen as well
        return result

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        return self._once(self.group.start_all_to_all, received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self._once(self.group.start_all_gather, received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._once(self.group.start_messages, sends, receives)

    def barrier(self) -> None:
        self._once(self.group.barrier)

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        self._once(self.group.host_all_gather, received, sent)


class _SyncMethods:
    """The methods of torch.Tensor that wait, which report to counters as long as any thread counts.

    A TorchFunctionMode would see them too, but is switched off inside a backward pass.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting: dict[int, list[Counters]] = {}  # by thread
        self._stock: dict[str, Any] = {}  # the class's own methods; None for one that it inherits

    def report_to(self, counters: Counters) -> None:
        """Reports this thread's calls to counters, beside those that count already."""
        with self._lock:
            if not self._counting:
                for name in _SYNC_METHODS:
                    self._stock[name] = torch.Tensor.__dict__.get(name)
                    setattr(torch.Tensor, name, self._reporting(name, getattr(torch.Tensor, name)))
            self._counting.setdefault(threading.get_ident(), []).append(counters)

    def stop(self) -> None:
        """Stops reports to the counters that this thread named last."""
        with self._lock:
            own = self._counting[threading.get_ident()]
            own.pop()
            if not own:
                del self._counting[threading.get_ident()]
            for name in () if self._counting else _SYNC_METHODS:
                if self._stock[name] is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, self._stock[name])

    def _reporting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def reporting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            for counters in self._counting.get(threading.get_ident(), ()):
                counters.host_syncs[name] += 1
            return method(tensor, *args, **kwargs)

        return reporting


_sync_methods = _SyncMethods()  # of the process, as torch.Tensor is
