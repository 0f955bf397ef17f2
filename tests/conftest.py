"""Fixtures, and a thread for each rank: ranks are threads or processes already, and the machine has few cores."""

import gc
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from megatron_cp.data import corpus
from megatron_cp.executor import launch
from megatron_cp.testing.case import LayerCase
from tests.covering import few_of
from tests.forked_ranks import forking_context, use_server
from tests.shared import plan_once, read_once

torch.set_num_threads(1)
# A test draws the same cases in each run, and may take its time to draw and run each: the machine may do other things.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption("--megatron", metavar="PATH", help="a checkout of Megatron-LM to test with, not the installed one")


def pytest_configure(config):
    """Puts the checkout of `--megatron` before the installed Megatron, in this process and those that it starts."""
    given = config.getoption("--megatron")
    if given is None:
        return
    root, checkout = Path(__file__).parents[1], Path(given).resolve()
    if config.rootpath != root:  # pytest takes a path behind a space for a test's as long as it looks for its settings
        raise pytest.UsageError(f"--megatron: write --megatron={given}, in one word")
    if not (checkout / "megatron" / "core" / "__init__.py").is_file():
        raise pytest.UsageError(f"--megatron: got {given}; allowed: a checkout of Megatron-LM, with megatron/core")
    # By a link, since the checkout's own `tests` and `tools` would take the place of ours.
    folder = tempfile.mkdtemp(prefix="megatron-")
    config.add_cleanup(lambda: shutil.rmtree(folder))
    Path(folder, "megatron").symlink_to(checkout / "megatron")
    sys.path.insert(0, folder)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([others] if others else [])])


def pytest_report_header(config):
    """Tells which Megatron is tested, whose `dev` branch has the version of a release."""
    given = config.getoption("--megatron")
    return None if given is None else f"Megatron-LM: {given}"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    """Marks `thorough` those cases of a test marked `few` whose values `make test` has in its other cases."""
    cases = {}
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and item.get_closest_marker("thorough") is None:
            values = few.kwargs["of"](**item.callspec.params) if "of" in few.kwargs else _values(item.callspec)
            test = (item.parent.nodeid, item.originalname)
            cases.setdefault(test, (few.kwargs.get("together", 1), {}))[1].setdefault(values, []).append(item)
    for together, with_values in cases.values():
        chosen = few_of(list(with_values), together, spread=True)
        for values, those in with_values.items():
            for item in those[values in chosen :]:
                item.add_marker("thorough")
    items.sort(key=_turn)


# These take half of the time: the dearest first, so that at the end no process is left alone with one of them.
_DEAR = (
    "test_entries", "transformers_generation", "transformers_preference", "transformers_evaluation", "megatron_models",
    "transformers_compile", "transformers_training", "test_schemes", "megatron_stock", "tiles/test_search",
    "test_train", "test_cli", "megatron_matrix", "test_options", "wire_options", "test_codecs", "test_tiled",
    "test_compile", "test_parity", "softmax/test_kernels", "emulated_device", "triton_compiled", "flex_compiled",
    "test_memory", "test_launch", "package_kernels", "tiny_layouts", "test_fuzz", "megatron_batch", "triton_kernels",
    "gates_compiled", "message_buffers", "test_gather", "kernel_copies", "layout_choice",
)  # fmt: skip


def _turn(item):
    """Returns the place of a test's file in the order of the whole suite; other files keep theirs, behind."""
    path = item.path.with_suffix("").as_posix()
    return next((turn for turn, name in enumerate(_DEAR) if path.endswith(name)), len(_DEAR))


def pytest_collection_finish():
    """Keeps what was imported out of later garbage collections, which take half a second with it."""
    gc.collect()
    gc.freeze()


def _values(callspec):
    """Returns a case's parameters; cases share the object of one that cannot be hashed."""
    return tuple(value if isinstance(value, Hashable) else id(value) for value in callspec.params.values())


# By what modules name, the imports of the process whose forks are their ranks.
_IMPORTS = {
    "megatron": r"(from |import |skip\(.)megatron\.(core|training)|(tiny|whole)_megatron|train_runs|apps\.train",
    "trainers": r"\btests\.(compile|transformers)_cases\b|fsdp2_hybrid",  # which import torch's compiler too
    "torch": "",
}


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(request, tmp_path_factory):
    """Processes of `run_ranks` are forks of one that has imported torch, and Megatron or trainers if the module does.

    A module whose subject is how ranks start has a fixture of this name that does nothing, or `spawned` for some tests.
    """
    forking = SimpleNamespace(
        get_context=lambda method: forking_context(), parent_process=multiprocessing.parent_process
    )
    kind = next(kind for kind, names in _IMPORTS.items() if re.search(names, request.path.read_text()))
    with use_server(tmp_path_factory, kind), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", forking)
        yield
    assert torch.get_num_threads() == 1, "tests after these would compute with as many threads, which wait for others"


@pytest.fixture(scope="session", autouse=True)
def plans_are_shared():
    """Threads plan one at a time, so that each planning for itself would take as many times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCase, "plan", plan_once())
        yield


@pytest.fixture(scope="session", autouse=True)
def default_corpus_is_shared():
    """Commands that draw documents read 1,700 files, which takes more than most of them do otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "read_corpus", read_once())
        yield


@pytest.fixture(scope="module")
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns: NaN, and 0xFF in bytes
    assert torch.empty(2).isnan().all()
    assert (torch.zeros(1).new_empty(2, dtype=torch.uint8) == 255).all()
    yield
    torch.use_deterministic_algorithms(False)
