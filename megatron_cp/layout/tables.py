"""What host data brings along once it is used on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Tables:
    """Remembers what was derived from an immutable object, so that all layers of one batch share it.

    Holds what cannot be a field because it depends on a device, such as the index tensors of an exchange. It is no
    part of the object's value, is dropped on pickling, and lives exactly as long as the object.
    """

    _tables: dict[Any, Any]

    def table(self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, called once for each key. Safe from several threads: they may all make, one result is kept."""
        tables = self.__dict__.setdefault("_tables", {})
        found = tables.get(key)
        return tables.setdefault(key, make()) if found is None else found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}
