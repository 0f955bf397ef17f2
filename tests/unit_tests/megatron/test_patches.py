"""Tests that replaced functions of Megatron are in place within the block and restored after it, however it ends."""

import queue
import subprocess
import sys
import types

import pytest

from megatron_cp.megatron import patches
from megatron_cp.megatron.patches import exchanged


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


@pytest.mark.parametrize("fla", [None, len])
def test_gated_delta_net_finds_a_rule_without_fla(fla):
    """Its constructor asks for one by name, which is None where fla is not installed."""
    pytest.importorskip("megatron.core")
    from megatron.core.ssm.gated_delta_net import common, gdn

    layer = types.SimpleNamespace(
        **dict.fromkeys(("qk_dim", "v_dim", "num_value_heads", "qk_dim_local_tp", "v_dim_local_tp"), 4),
        **dict.fromkeys(("tp_size", "cp_size", "num_v_heads_local_tp"), 1),
        config=types.SimpleNamespace(deterministic_mode=False, gdn_pre_gated_delta_rule_fusion=False),
    )
    with exchanged(common, HAVE_FLA=fla is not None), exchanged(gdn, chunk_gated_delta_rule=fla):
        with patches.gated_delta_net_without_fla():
            gdn.GatedDeltaNet._setup_variant_attrs(layer)
        assert gdn.chunk_gated_delta_rule is fla
    assert layer.gated_delta_rule is (fla or gdn.torch_chunk_gated_delta_rule)


@pytest.mark.parametrize("is_there", [True, False])
def test_prediction_of_several_tokens_asks_for_no_class_of_transformer_engine(monkeypatch, is_there):
    pytest.importorskip("megatron.core")
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_token_prediction

    name = "is_inference_column_parallel_linear"
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    monkeypatch.setattr(multi_token_prediction, name, len, raising=False)
    if not is_there:
        monkeypatch.delattr(multi_token_prediction, name)
    patches.exchange_search_for_inference_layers()
    assert hasattr(multi_token_prediction, name) == is_there
    assert not is_there or multi_token_prediction.is_inference_column_parallel_linear(None) is False
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    monkeypatch.setattr(multi_token_prediction, name, len, raising=False)
    patches.exchange_search_for_inference_layers()
    assert multi_token_prediction.is_inference_column_parallel_linear is len


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
