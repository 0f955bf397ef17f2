"""Forks that ranks of tests are: they have this checkout's modules, whichever others Python would find."""

from pathlib import Path

import pytest
import torch

import megatron_cp
from megatron_cp.executor.launch import run_ranks
from tests.forked_ranks import forking_context

PACKAGE = Path(__file__).parents[2] / "megatron_cp"


def module_of_rank(group):
    return megatron_cp.__file__


def test_ranks_have_this_checkout():
    assert run_ranks(module_of_rank, 1, kind="processes") == [str(PACKAGE / "__init__.py")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA cannot be used after a fork: there ranks are new processes")
def test_forks_have_it_before_they_import_anything(tmp_path):
    note = tmp_path / "note"
    code = f"import sys; open({str(note)!r}, 'w').write(sys.modules['megatron_cp.testing.parity'].__file__)"
    fork = forking_context().Process(target=exec, args=(code,))
    fork.start()
    fork.join(120)
    assert fork.exitcode == 0
    assert note.read_text() == str(PACKAGE / "testing" / "parity.py")
