"""`Fields`: looks up the values of a model file or command line by name, and checks them. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_cp.apps.estimate.model_layers import Block
from megatron_cp.apps.estimate.models import MAX_LAYERS
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.planner import did_you_mean


class Fields:
    """Values by name; None counts as not given.

    Every method raises an `ArgumentError` that names the value, if it is something else than the method returns, or is
    missing and has no default.

    Args:
        values: integers, truth values, strings, and lists of them.

    Attributes:
        nulls: the names that were given as None.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.nulls = {name for name, value in values.items() if value is None}
        self._values = {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value, unchecked."""
        return self._values.get(name, default)

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """Returns an integer."""
        if name in self._values:
            return checked_integer(name, self._values[name], least, most)
        if default is None:
            allowed = f"an integer of at least {least}"
            raise ArgumentError(name, None, allowed, f"Add {name}: the model's size depends on it.")
        return default

    def optional(self, name: str) -> int | None:
        """Returns an integer of at least 1, or None if it is missing."""
        return self.size(name) if name in self._values else None

    def layers(self, name: str) -> int:
        """Returns the number of layers."""
        return self.size(name, most=MAX_LAYERS)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Returns a number above 0, or the default if it is missing."""
        value = self._values.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ArgumentError(name, value, "a number above 0")
        return None if value is None else float(value)

    def part(self, *names: str) -> Fields:
        """Returns the fields of the first of these names that is given; no fields if none is."""
        name = next((name for name in names if name in self._values), names[0])
        values = self._values.get(name, {})
        if not isinstance(values, Mapping):
            raise ArgumentError(name, values, "values by name")
        return Fields(values)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ArgumentError(name, value, "true or false")
        return value

    def quotient(self, name: str, number: int, over: str, divisor: int) -> int:
        """Returns the value of `name`, or `number / divisor` if it is not given."""
        if name in self._values:
            return self.size(name)
        if number % divisor:
            raise ArgumentError(over, divisor, f"a divisor of {number}", f"Or give {name}.")
        return number // divisor

    def indices(self, name: str) -> set[int]:
        """Returns a list of layers, counted from 0; empty if it is missing."""
        numbers = self._values.get(name, [])
        if not isinstance(numbers, list):
            raise ArgumentError(name, numbers, "a list of layers")
        return {checked_integer(f"{name}[{place}]", number, 0) for place, number in enumerate(numbers)}

    def refuse(self, *names: str) -> None:
        """Refuses fields that change a model's shape in a way that is not known here."""
        for name in names:
            if self._values.get(name):
                raise ArgumentError(name, self._values[name], "nothing, 0 or false", "plan cannot read such models.")


def chosen_blocks(name: str, words: object, types: Mapping[str, Block], layers: int) -> tuple[Block, ...]:
    """Returns the block of each word in a list, or of each letter of a string.

    Args:
        name: name of the list.
        words: one of `types` for each layer.
        types: the block of each type.
        layers: the number of layers.
    """
    if not isinstance(words, list | tuple | str) or len(words) != layers:
        given = f"{len(words)} types" if isinstance(words, list | tuple | str) else words
        raise ArgumentError(name, given, f"the types of all {layers} layers")
    for place, word in enumerate(words):
        if not isinstance(word, str) or word not in types:
            raise ArgumentError(f"{name}[{place}]", word, " or ".join(types), did_you_mean(word, types))
    return tuple(types[word] for word in words)
