"""Parses command lines: numbers within limits, and errors of one line that say what to do."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

from megatron_cp.errors import MAX_SIZE, ArgumentError
from megatron_cp.layout.fragments import MAX_CP_SIZE
from megatron_cp.planner.capabilities import did_you_mean, spelled

MAX_TOKENS = 2**27  # beyond any batch; the pictures and tables of a plan hold an entry for each token
MAX_SECONDS = 10**6
_LARGEST = 2**63 - 1


class UsageError(Exception):
    """A command that cannot be run as typed, or on this machine: one sentence that begins with the program's name."""


class _Help(argparse.HelpFormatter):
    """A formatter of help texts that keeps the lines of examples, and writes an option's values once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_values(action)}"

    def _format_values(self, action: argparse.Action) -> str:
        takes_none = action.nargs == 0
        return "" if takes_none else self._format_args(action, self._get_default_metavar_for_optional(action))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line.startswith("  ") else fill(line, width, indent) for line in text.split("\n"))


_SHORT = 30  # characters of an option and its values in a list of common options


class _CommonHelp(_Help):
    """A formatter that lists the options of `common` alone, by their first names."""

    def __init__(self, prog: str, common: Collection[str]) -> None:
        super().__init__(prog, max_help_position=_SHORT + 4)
        self._common = {"help", *common}

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage("%(prog)s [options]", actions, groups, prefix)

    def start_section(self, heading: str | None) -> None:
        super().start_section(argparse.SUPPRESS)

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in self._common or isinstance(action, _HelpAll):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        return f"{action.option_strings[0]} {self._values(action)}".rstrip()

    def _expand_help(self, action: argparse.Action) -> str:
        text, named = super()._expand_help(action), self._format_values(action)
        return text if "|" not in named or named == self._values(action) else f"{named.replace('|', ', ')}; {text}"

    def _values(self, action: argparse.Action) -> str:
        """Returns the option's values as they stand beside its name; VALUE if they are too long."""
        values = self._format_values(action)
        return values if len("".join(action.option_strings[:1])) + len(values) < _SHORT else "VALUE"


class _HelpAll(argparse.Action):
    """`--help-all`: prints the help text with every option."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **rest)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.formatter_class = _Help
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are raised, as one line that says what is allowed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An option may not change with its neighbours.
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1,0 is a value too

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print after its usage."""
        text = message.removeprefix("argument ").rstrip()
        names = text.partition(":")[0]
        if "/" in names and names.startswith("--"):
            text = as_typed(names.split("/"), self._words) + text.removeprefix(names)
        end = "" if text.endswith((".", "?")) else "."
        raise UsageError(f"{self.prog}: {text}{end} See {self.prog} --help.")

    def list_common(self, common: Collection[str]) -> None:
        """Makes `--help` list the options with these destinations, and adds `--help-all`, which lists every one."""
        self.formatter_class = cast(type[argparse.HelpFormatter], partial(_CommonHelp, common=common))
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every option and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, and keeps the words for errors."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def refuse_unknown(self, words: Sequence[str], left: Mapping[str, str]) -> NoReturn:
        """Raises for the first word that no option takes; `left` has flags that left, and what to take instead."""
        word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        if not word.startswith("-"):
            self.error(f"got {word!r}, which is no option and no option's value")
        known = [option for action in self._actions for option in action.option_strings]
        self.error(f"{word}: there is no such option. {left.get(word) or did_you_mean(word, known, alike=0.6)}")

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
    """Returns the error's text with the argument spelled as the flag of the command line, and its value as typed."""
    name = _FLAGS.get(error.argument, error.argument)
    given = name.removeprefix("--").replace("-", "_")
    text = str(error).removeprefix(error.argument)
    if given not in vars(args):
        return f"{error.argument}{text}"
    names, value = flags(given.replace("_", "-")), getattr(args, given)
    typed, understood = _value_typed(names, args.words), f": got {value!r};"
    if typed and isinstance(value, str) and text.startswith(understood):  # such as ring, which is understood as p2p
        text = f": got {_short(typed)};{text.removeprefix(understood)}"
    return f"{as_typed(names, args.words)}{text}"


def _value_typed(names: Sequence[str], words: Sequence[str]) -> str | None:
    """Returns the last value of an option among the words of a command line; None if it has none."""
    values = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name in names:
            values.append(value if has_value else following)
    return values[-1] if values else None


def as_typed(names: Sequence[str], words: Sequence[str]) -> str:
    """Returns the one of an option's names that is among the words of a command line, or else the first."""
    given = {word.partition("=")[0] for word in words}
    return next((name for name in names if name in given), names[0])


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
    return _integer(text, 1, MAX_TOKENS, "such as 16", _scaled)


def tokens(text: str) -> int:
    """Parses a number of tokens from 1 that fits a batch, such as 256k."""
    return _integer(text, 1, MAX_TOKENS, "such as 4096, 4k or 1M", _scaled)


def document_tokens(text: str) -> list[int]:
    """Parses the tokens of documents, separated by commas, such as 130,256k."""
    return [_integer(part, 0, MAX_TOKENS, "as in 7,1,130, 4k or 1M", _scaled) for part in text.split(",")]


def parents(text: str) -> list[int]:
    """Parses the segment that each segment continues, -1 for none, separated by commas, such as -1,0,0."""
    return [_integer(part, -1, _LARGEST, "as in --parents -1,0,0") for part in text.split(",")]


def grids(text: str) -> list[tuple[int, ...]]:
    """Parses grids of images, separated by commas, such as 1x64x48, or numbers of images, such as 4."""
    example = "such as 1x64x48 for frames, rows and columns of patches, or 4 for images of one size"
    return [tuple(_integer(each, 1, MAX_TOKENS, example) for each in part.split("x")) for part in text.split(",")]


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


def _integer(text: str, least: int, most: int, example: str, parse: Callable[[str], int] = int) -> int:
    try:
        value = parse(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"got {_short(text)}; allowed: integers from {least} to {most}, {example}")
    return value


def _scaled(text: str) -> int:
    """Returns the integer of a text such as 262144 or 256k, in which k is 1024 and M is 1024 * 1024."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kKmM])", text)
    if not found:
        return int(text)
    value = float(found[1]) * {"k": 2**10, "m": 2**20}[found[2].lower()]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def of_kind(argument: str) -> Callable[[str], str]:
    """Parses a value of an argument of `planner/capabilities.py` in any spelling, such as ring or zig-zag."""
    return lambda text: str(spelled(argument, text))


def scheme_or_mode(text: str) -> str:
    """Parses a scheme of attention or a mode of linear layers in any spelling."""
    return str(spelled("scheme", spelled("mode", text)))


def mask_name(text: str) -> str:
    """Parses the spelling of a mask, whose numbers may be such as 4k."""
    plain = text.strip().lower()
    try:
        return re.sub(r"[0-9]+(?:\.[0-9]+)?[km]\b", lambda found: str(_scaled(found[0])), plain)
    except ValueError:  # refused as it was typed, where masks are made
        return plain


# The command line's own names of options, and Megatron's names of the same ones: every command takes both.
_MEGATRONS = {
    "cp": "context-parallel-size", "heads": "num-attention-heads", "kv-heads": "num-query-groups",
    "head-dim": "kv-channels", "layout": "cp-layout", "scheme": "cp-comm-type", "transport": "cp-transport",
    "codec": "cp-codec", "head-chunks": "cp-head-chunks", "gpu": "cp-hardware", "search": "cp-search",
    "latent-mode": "cp-latent-mode",
}  # fmt: skip


def flags(name: str) -> tuple[str, ...]:
    """Returns the flag of an option by this name, and its flag by the other of its two names if it has two."""
    other = _MEGATRONS.get(name) or next((short for short, long in _MEGATRONS.items() if long == name), None)
    return (f"--{name}",) if other is None else (f"--{name}", f"--{other}")


def _short(text: str) -> str:
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}... ({len(text)} characters)"
