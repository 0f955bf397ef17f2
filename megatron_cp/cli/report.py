"""`Report`: what a command has to say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """What a command has to say.

    Attributes:
        text: for people; with `--json` on standard error.
        data: for programs, printed by `--json`.
        ok: False makes the exit status 1.
        quiet: another rank prints.
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    ok: bool = True
    quiet: bool = False
