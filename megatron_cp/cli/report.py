"""`Report`: the output of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """The output of a command.

    Attributes:
        text: the readable report; `--json` prints it on standard error.
        data: the same for programs, printed by `--json`.
        ok: False makes the exit status 1.
        quiet: True prints nothing, since another rank does.
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    ok: bool = True
    quiet: bool = False
