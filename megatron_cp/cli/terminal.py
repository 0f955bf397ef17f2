"""Colours of verdicts at a terminal, and a line of progress on standard error."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TextIO

_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"
_GOOD, _BAD = r"^(?:ok|yes|ready|READY)\b", r"^(?:FAILED|no|NOT READY|refused|undecided)\b"
_EVERY_SECONDS = 10.0  # between lines where standard error is no terminal


def coloured(text: str, stream: TextIO | None) -> str:
    """Returns the text with verdicts at the beginning of lines in green or red, if the stream is a terminal.

    The variable NO_COLOR (no-color.org) and a terminal called dumb turn colours off.
    """
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    for pattern, colour in ((_GOOD, _GREEN), (_BAD, _RED)):
        text = re.sub(pattern, rf"{colour}\g<0>{_PLAIN}", text, flags=re.MULTILINE)
    return text


class Progress:
    """A line on standard error that says how many of a number of steps are done, and how long the rest may take.

    A terminal has one line that is written again; elsewhere there is a line every ten seconds. If `quiet`, another rank
    prints it.
    """

    def __init__(self, what: str, total: int, *, quiet: bool = False) -> None:
        self._what, self._total, self._done = what, total, 0
        self._quiet, self._is_terminal = quiet, sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._width = 0

    def step(self, name: str = "") -> None:
        """Counts one more step, by its name, and says so if it is time."""
        self._done += 1
        now = time.monotonic()
        if self._quiet or not (self._is_terminal or now - self._shown >= _EVERY_SECONDS):
            return
        self._shown = now
        left = (now - self._started) / self._done * (self._total - self._done)
        text = f"{self._done}/{self._total} {self._what}, about {left:.0f} s left{f': {name}' if name else ''}"[:100]
        if not self._is_terminal:
            print(text, file=sys.stderr, flush=True)
            return
        print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def clear(self) -> None:
        """Empties the terminal's line, for what is printed next."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0
