"""The fault of one rank: when it is due, and what it does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tools.faults.cases import DISAGREE, Case

FAULT_FILE = "fault.json"
_WAIT_FOR_SIGNAL = 2.0  # seconds in which whoever watches has long sent it


class InjectedError(RuntimeError):
    """Raised by a rank as its fault."""


class Faulty:
    """The fault of a case, as one rank sees it. Nothing happens on the other ranks.

    Args:
        folder: of the job, where the moment of the fault is written; None for the job to compare with.
    """

    def __init__(self, case: Case, rank: int, folder: Path | None) -> None:
        self._case, self._fault, self._folder = case, case.fault, folder
        self._is_own = rank == self._fault.rank
        self._here = self._is_own and folder is not None
        self._is_done = False

    def differs(self, kind: str, step: int, layer: int | None = None) -> bool:
        """Returns True if this rank must differ here from the others."""
        if not self._here or not self._applies(kind, step, layer):
            return False
        self.begin()
        return True

    def drops(self, kinds: Iterable[str], step: int, layer: int) -> bool:
        """Returns True in the job to compare with, for a gradient that the faulty rank would not require."""
        return self._folder is None and self._is_own and any(self._applies(kind, step, layer) for kind in kinds)

    def _applies(self, kind: str, step: int, layer: int | None) -> bool:
        fault = self._fault
        if fault.kind != kind or kind not in DISAGREE or layer not in (None, fault.layer):
            return False
        return step == fault.step or (step > fault.step and not fault.once)

    def variant(self, count: int) -> int:
        return self._fault.variant % count

    @contextlib.contextmanager
    def during(self, phase: str, step: int, layer: int | None = None) -> Iterator[None]:
        """Runs a block of code; a fault that is due in it begins after `operation` tensor operations."""
        if not self._is_due(phase, step, layer):
            yield
            return
        mode = _AtOperation(self._fault.operation, self.act)
        with mode:
            yield
        mode.finish()  # where there were fewer

    def at(self, phase: str, step: int, layer: int | None = None) -> None:
        if self._is_due(phase, step, layer):
            self.act()

    def start_of_save(self, step: int) -> None:
        """Asks for the signal that kills a rank in its save; it is sent from outside, after a delay."""
        if self._here and self._fault.kind == "kill_in_save" and step == self._fault.step:
            self.begin(ask=["SIGKILL", "rank"])

    def begin(self, ask: list[str] | None = None) -> None:
        """Records, once, that the fault begins now, and the signal that the watching process is asked to send."""
        if self._is_done:
            return
        self._is_done = True
        assert self._folder is not None
        moment: dict[str, Any] = {"at": time.monotonic(), "pid": os.getpid(), "ask": ask}
        written = self._folder / f"{FAULT_FILE}.new"
        written.write_text(json.dumps(moment))
        written.replace(self._folder / FAULT_FILE)

    def act(self) -> None:
        """Executes the fault."""
        if self._is_done:
            return
        kind = self._fault.kind
        self.begin(ask={"kill_outside": ["SIGKILL", "rank"], "kill_parent": ["SIGKILL", "caller"],
                        "stop_and_kill_parent": ["SIGKILL", "caller"]}.get(kind))  # fmt: skip
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop" | "stop_and_kill_parent":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(0)
            case "interrupt":
                raise KeyboardInterrupt
            case "raise":
                raise InjectedError("the injected fault")
            case "delay":
                time.sleep(self._fault.seconds)
            case "kill_parent":
                time.sleep(_WAIT_FOR_SIGNAL)

    def _is_due(self, phase: str, step: int, layer: int | None) -> bool:
        fault = self._fault
        if not self._here or self._is_done or fault.kind in DISAGREE or fault.kind == "kill_in_save":
            return False
        return (phase, step) == (fault.phase, fault.step) and layer in (None, fault.layer)


class _AtOperation(TorchDispatchMode):
    """Calls `act` after `number` tensor operations."""

    def __init__(self, number: int, act: Any) -> None:
        super().__init__()
        self._left, self._act = number, act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left == 0:
            self.finish()
        self._left -= 1
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """Does it now, unless it has been done."""
        act, self._act = self._act, lambda: None
        act()
