"""What host data brings along: things derived from it, kept once for everyone who shares it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np


class Tables:
    """Remembers what was derived from an immutable object, so that all layers of one batch share it.

    `table` holds what cannot be a field because it depends on a device, such as the index tensors of an exchange.
    Nothing derived is part of the object's value: pickling drops all of it.
    """

    def table[T](self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, called once for each key. Safe from several threads: they may all make, one result is kept."""
        tables = self.__dict__.setdefault("_tables", {})
        found = tables.get(key)
        return tables.setdefault(key, make()) if found is None else found

    def share_tables(self, other: Tables) -> None:
        """Takes what was and will be derived from `other` for its own; what differs between the two is in the keys."""
        self.__dict__["_tables"] = other.__dict__.setdefault("_tables", {})

    def __getstate__(self) -> dict[str, Any]:
        # A cached hash above all must stay behind: hashes of bytes differ from process to process.
        derived = {
            "_tables",
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
