"""`Memo`: a value remembers what was derived from it, so that all layers of a batch share that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np


class Memo:
    """An immutable object that remembers what was derived from it.

    `memo` keeps what cannot be a field because it depends on a device, such as the index tensors of an exchange.
    Nothing derived is part of the object's value: pickling drops all of it.
    """

    def memo[T](self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, called once for each key. Safe from several threads: they may all make, one result is kept."""
        memo = self.__dict__.setdefault("_memo", {})
        found = memo.get(key)
        return memo.setdefault(key, make()) if found is None else found

    def remember(self, key: Any, value: Any) -> None:
        """Keeps what `memo` is to return, made elsewhere."""
        self.__dict__.setdefault("_memo", {})[key] = value

    def recall(self, key: Any) -> Any:
        """What `memo` has to return, or None."""
        return self.__dict__.get("_memo", {}).get(key)

    def memories(self) -> list[Any]:
        """All that `memo` has to return."""
        return list(self.__dict__.get("_memo", {}).values())

    def remembers(self, key: Any) -> bool:
        """Whether `memo` has something to return."""
        return key in self.__dict__.get("_memo", {})

    def share_memo(self, other: Memo) -> None:
        """Takes what was and will be derived from `other` for its own; what differs between the two is in the keys."""
        self.__dict__["_memo"] = other.__dict__.setdefault("_memo", {})

    def __getstate__(self) -> dict[str, Any]:
        # A cached hash above all must stay behind: hashes of bytes differ from process to process.
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


def frozen[Array: np.ndarray](array: Array) -> Array:
    """The array, which nobody can write to any more."""
    array.flags.writeable = False
    return array
