"""Parses command lines: numbers within limits, and errors of one line that say what to do."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.fragments import MAX_CP_SIZE
from megatron_cp.planner.capabilities import did_you_mean

MAX_TOKENS = 2**27  # beyond any batch; the pictures and tables of a plan hold an entry for each token
MAX_SIZE = 2**16  # heads or features, beyond any model; with MAX_TOKENS, bytes stay below 2**63
MAX_SECONDS = 10**6
_LARGEST = 2**63 - 1


class UsageError(Exception):
    """A command that cannot be run as typed, or on this machine: one sentence that begins with the program's name."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are raised, as one line that says what is allowed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # an option may not change with its neighbours

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print after its usage."""
        text = message.removeprefix("argument ").rstrip()
        end = "" if text.endswith((".", "?")) else "."
        raise UsageError(f"{self.prog}: {text}{end} See {self.prog} --help.")

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Raises for the first word that no option takes."""
        word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        if not word.startswith("-"):
            self.error(f"got {word!r}, which is no option and no option's value")
        known = [option for action in self._actions for option in action.option_strings]
        self.error(f"{word}: there is no such option. {did_you_mean(word, known, alike=0.6)}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops "--", even as the value of `--opt=--`, and would leave an empty list where a value is expected.
        if action.option_strings and action.nargs != argparse.REMAINDER and "--" in arg_strings:
            self._check_value(action, self._get_value(action, "--"))  # refuses it, if the option takes no text
            allowed = action.metavar if isinstance(action.metavar, str) else "a value"
            raise argparse.ArgumentError(action, f"got '--'; allowed: {allowed}")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            raise argparse.ArgumentError(
                action, f"got {value!r}; allowed: {' or '.join(known)}. {did_you_mean(str(value), known)}"
            )


# Arguments of functions whose flags have other names.
_FLAGS = {"cp_size": "cp", "mode": "scheme", "hardware": "gpu", "search_seconds": "search"}


def as_flag(error: ArgumentError, args: argparse.Namespace) -> str:
    """Returns the error's text with the argument spelled as the flag of the command line."""
    name = _FLAGS.get(error.argument, error.argument)
    flag = f"--{name.replace('_', '-')}" if name in vars(args) else error.argument
    return f"{flag}{str(error).removeprefix(error.argument)}"


def positive(text: str) -> int:
    """Parses an integer from 1 that fits 63 bits."""
    return _integer(text, 1, _LARGEST, "such as 4")


def natural(text: str) -> int:
    """Parses an integer from 0 that fits 63 bits."""
    return _integer(text, 0, _LARGEST, "such as 4")


def whole(text: str) -> int:
    """Parses any integer that fits 64 bits."""
    return _integer(text, -_LARGEST, _LARGEST, "such as 4")


def size(text: str) -> int:
    """Parses heads or features of a layer."""
    return _integer(text, 1, MAX_SIZE, "such as 4")


def rows(text: str) -> int:
    """Parses tokens that fit a batch."""
    return _integer(text, 1, MAX_TOKENS, "such as 16")


_UNITS = {
    "": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


_LEAST_MEMORY = 2**20  # no device has less: 70 alone is bytes, where 70GiB was meant


def memory_size(text: str) -> float:
    """Parses bytes of a device, such as 70GiB."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper(), 0) if found else 0
    try:
        value = float(found[1]) * unit if found else 0.0
    except ValueError:
        value = 0.0
    if not _LEAST_MEMORY <= value < _LARGEST:
        understood = f", which is {value:g} bytes" if 0 < value < _LEAST_MEMORY else ""
        allowed = "at least 1MiB, with its unit, such as 70GiB or 70GB, or in bytes, such as 70e9"
        raise argparse.ArgumentTypeError(f"got {_short(text)}{understood}; allowed: {allowed}") from None
    return value


def integers(least: int, most: int = _LARGEST, example: str = "as in 7,1,130") -> Callable[[str], list[int]]:
    """Parses integers from `least` to `most`, separated by commas."""
    return lambda text: [_integer(part, least, most, example) for part in text.split(",")]


def cp_sizes(text: str) -> list[int]:
    """Parses numbers of ranks that a layout may have, separated by commas."""
    return integers(1, MAX_CP_SIZE, "as in 4,8")(text)


def number(text: str) -> float:
    """Parses a floating-point number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {_short(text)}; allowed: numbers, such as 0.001") from None


def minutes(text: str) -> float:
    """Parses minutes above 0."""
    try:
        return seconds(str(60 * float(text))) / 60
    except (ValueError, argparse.ArgumentTypeError):
        message = f"got {_short(text)}; allowed: minutes above 0, at most {MAX_SECONDS / 60:g}"
        raise argparse.ArgumentTypeError(message) from None


def seconds(text: str) -> float:
    """Parses a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"got {_short(text)}; allowed: seconds above 0, at most {MAX_SECONDS}")
    return value


def _integer(text: str, least: int, most: int, example: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"got {_short(text)}; allowed: integers from {least} to {most}, {example}")
    return value


def _short(text: str) -> str:
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}... ({len(text)} characters)"
