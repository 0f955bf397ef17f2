"""`Memo`: an object that remembers values derived from it, so that all layers of a batch share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

T = TypeVar("T")
P = ParamSpec("P")
Frozen = TypeVar("Frozen", bound=np.ndarray)


class Memo:
    """An immutable object that remembers values derived from it.

    `memo` keeps what cannot be a field because it depends on a device, such as the index tensors of an exchange.
    Nothing derived is part of the object's value: pickling drops all of it. Nothing else can be stored, so that equal
    objects do the same; tables of other origin are arguments, see `CallTables`.
    """

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """Returns `make()`, called once for each key. Thread-safe: several threads may call `make`, one result is
        kept.
        """
        memo = self.__dict__.setdefault("_memo", {})
        found = memo.get(key)
        return memo.setdefault(key, make()) if found is None else found

    def share_memo(self, other: Memo) -> None:
        """Shares the stored values of `other`, now and later; the keys must contain what differs between the two."""
        self.__dict__["_memo"] = other.__dict__.setdefault("_memo", {})

    def __getstate__(self) -> dict[str, Any]:
        # A cached hash in particular must not be pickled: hashes of bytes differ between processes.
        derived = {
            "_memo",
            *(name for name in self.__dict__ if isinstance(getattr(type(self), name, None), cached_property)),
        }
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for value in state.values():
            if isinstance(value, np.ndarray):
                frozen(value)  # numpy does not pickle the flag
        self.__dict__.update(state)


def remembered(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Makes a method of a `Memo`, or a function of one, keep its results there, one for each set of other arguments.

    The arguments must be hashable. Where several objects share a memo, the result must be the same for all of them.
    """
    name = f"{method.__module__}.{method.__qualname__}"

    @wraps(method)
    def found(self: Memo, *args: P.args, **options: P.kwargs) -> T:
        key = (name, *args, *options.items()) if options else (name, *args)
        return self.memo(key, lambda: method(self, *args, **options))

    return found


def frozen(array: Frozen) -> Frozen:
    """Marks the array as read-only and returns it."""
    array.flags.writeable = False
    return array
