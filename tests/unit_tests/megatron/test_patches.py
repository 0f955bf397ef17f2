"""Tests that replaced functions of Megatron are in place within the block and restored after it, however it ends."""

import queue
import subprocess
import sys
import types

import pytest

from megatron_cp.megatron import patches
from megatron_cp.megatron.patches import exchanged

SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def module():
    made = types.ModuleType("of_a_test")
    made.first, made.second = 1, 2
    return made


def test_other_values_are_there_for_a_block_alone():
    made = module()
    with exchanged(made, first=3):
        assert (made.first, made.second) == (3, 2)
    assert (made.first, made.second) == (1, 2)
    made = module()
    with pytest.raises(RuntimeError, match="inside"), exchanged(made, first=3, second=4):
        raise RuntimeError("inside")
    assert (made.first, made.second) == (1, 2)
    # An update of Megatron may rename it: then nothing would be replaced, without a word.
    made = module()
    with pytest.raises(KeyError, match="third"), exchanged(made, first=3, third=5):
        pass
    assert (made.first, made.second, hasattr(made, "third")) == (1, 2, False)


def test_importing_the_patches_imports_neither_torch_nor_megatron():
    """Benchmarks without Megatron use `exchanged`; and `__init__` of the room has nothing but its docstring."""
    code = "import sys, megatron_cp.megatron.patches\nassert not {'torch', 'megatron.core'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def names(*modules):
    return [{**vars(each)} for each in modules]


def test_mixers_are_built_without_their_kernels_and_megatron_is_as_it_was():
    pytest.importorskip("megatron.core")
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.ssm.gated_delta_net import common

    from megatron_cp.megatron.layers.norms import GatedRMSNorm

    before = names(mamba_mixer, mamba_context_parallel, common)
    with patches.mamba_mixer_without_its_kernels(), patches.gated_delta_net_without_fla():
        flags = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.MAMBA_HAS_STATE_DTYPE, mamba_mixer.HAVE_EINOPS
        assert flags == (True, True, True)
        assert mamba_mixer.ExtendedRMSNorm is GatedRMSNorm
        assert mamba_context_parallel.HAVE_EINOPS
        assert common.HAVE_FLA
    assert names(mamba_mixer, mamba_context_parallel, common) == before


@pytest.mark.parametrize("fla", [None, len])
def test_gated_delta_net_finds_a_rule_without_fla(fla):
    """Its constructor asks for one by name, which is None where fla is not installed."""
    pytest.importorskip("megatron.core")
    from megatron.core.ssm.gated_delta_net import common, gdn

    layer = types.SimpleNamespace(
        **dict.fromkeys(("qk_dim", "v_dim", "num_value_heads", "qk_dim_local_tp", "v_dim_local_tp"), 4),
        **dict.fromkeys(("tp_size", "cp_size", "num_v_heads_local_tp"), 1),
        config=types.SimpleNamespace(deterministic_mode=False),
    )
    with exchanged(common, HAVE_FLA=fla is not None), exchanged(gdn, chunk_gated_delta_rule=fla):
        with patches.gated_delta_net_without_fla():
            gdn.GatedDeltaNet._setup_variant_attrs(layer)
        assert gdn.chunk_gated_delta_rule is fla
    assert layer.gated_delta_rule is (fla or common.torch_chunk_gated_delta_rule)


def test_results_of_writers_need_no_other_process():
    pytest.importorskip("megatron.core")
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._results_queue
    with patches.checkpoint_results_in_this_process():
        assert isinstance(filesystem_async.get_write_results_queue(), queue.SimpleQueue)
    assert filesystem_async._results_queue is before


class FailingAtTheEnd:
    def __del__(self):
        raise RuntimeError("in a destructor")


def test_failing_destructors_print_nothing(capsys):
    hook = sys.unraisablehook
    with patches.silent_destructors():
        FailingAtTheEnd()
    assert sys.unraisablehook is hook
    assert capsys.readouterr().err == ""
