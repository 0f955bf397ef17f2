"""One thread a rank: ranks are threads or processes already, and the machine has few cores."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.executor import launch
from tests.forked_ranks import forking_context

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """Says how much of CUDA's path has run without a GPU: see `test_emulated_device`."""
    reports = [
        report
        for of_kind in terminalreporter.stats.values()
        for report in of_kind
        if getattr(report, "when", "") == "call"
    ]
    properties = [pair for report in reports for pair in report.user_properties]
    ran, known = (sum(value for name, value in properties if name == key) for key in ("cuda_tests", "all_cuda_tests"))
    if ran:
        of_all = f" of {known}" if known else ""
        terminalreporter.write_line(f"CUDA: {ran}{of_all} tests ran on an emulated device; make test-cuda runs all")


@pytest.fixture(scope="module", autouse=True)
def forked_ranks():
    """Processes of `run_ranks` are forks of one that has imported torch and Megatron; see `tests.forked_ranks`.

    A module whose subject is how ranks start has a fixture of this name that does nothing, or `spawned` for some tests.
    """
    forking = SimpleNamespace(
        get_context=lambda method: forking_context(), parent_process=multiprocessing.parent_process
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", forking)
        yield
