"""Ranks that are forks of the process that starts them, since imports take most of the time of a short job."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron_cp.executor import launch


@contextmanager
def ranks_are_forks() -> Iterator[list[Any]]:
    """Makes `run_ranks` fork its processes within it. Yields a list, to which it adds them."""
    context, processes = multiprocessing.get_context("fork"), list[Any]()

    def process(**options: Any) -> Any:
        processes.append(context.Process(**options))
        return processes[-1]

    forking = SimpleNamespace(Process=process)
    replaced = SimpleNamespace(get_context=lambda _: forking, parent_process=multiprocessing.parent_process)
    with patch.object(launch, "multiprocessing", replaced):
        yield processes
