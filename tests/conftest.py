"""One thread a rank: ranks are threads or processes already, and the machine has few cores."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.executor import launch
from tests.forked_ranks import forking_context

torch.set_num_threads(1)


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
