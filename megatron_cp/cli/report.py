"""`Report`: the output of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """The output of a command.

    Attributes:
        text: the readable report.
        data: the same for programs, which `--json` prints instead.
        ok: False makes the exit status 1.
        fits: False makes it 3: no candidate fits the memory.
        quiet: True prints nothing, since another rank does.
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    ok: bool = True
    fits: bool = True
    quiet: bool = False

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return 1 if not self.ok else 0 if self.fits else 3
