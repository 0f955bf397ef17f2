"""Tests of the way from options to Megatron's configuration: specs by name, and combinations of options."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.setup import _layer_spec, resolve_spec, transformer_config
from megatron_cp.errors import ArgumentError
from megatron_cp.megatron.specs import gpt_layer_spec, hybrid_stack_spec
from tests.refusals import rejects

CPU = torch.device("cpu")
GPT = ("megatron_cp.megatron.specs", "gpt_layer_spec")


def test_specs_are_found_with_the_model_they_are_for():
    assert resolve_spec(("megatron_cp.megatron.specs", "hybrid_stack_spec")) == (hybrid_stack_spec, True)
    assert resolve_spec(GPT) == (gpt_layer_spec, False)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("raise OSError('no disk')", "OSError: no disk"), ("spec = (", "SyntaxError"), ("other = 1", "has no 'spec'"),
        ("class spec: pass", "'spec' is neither a ModuleSpec for HybridModel nor a function for GPTModel"),
        ("spec = 'gpt'", "'spec' is neither"),
    ],
)  # fmt: skip
def test_rejects_modules_without_a_spec(source, says, tmp_path, monkeypatch):
    (tmp_path / "spec_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "spec_of_a_test", raising=False)
    with pytest.raises(ArgumentError) as caught:
        resolve_spec(("spec_of_a_test", "spec"))
    assert str(caught.value).startswith("spec: got 'spec_of_a_test spec'; allowed: a module that can be imported")
    assert says in str(caught.value)


@pytest.mark.parametrize("module", ["", ".specs", "no.such", "megatron_cp.no_such"])
def test_rejects_modules_that_are_not_there(module):
    rejects(f"Cannot import '{module}'", resolve_spec, (module, "spec"))


def test_a_spec_of_ones_own_is_a_function_of_pythons(tmp_path, monkeypatch):
    (tmp_path / "own_spec_of_a_test.py").write_text("from megatron_cp.megatron.specs import gpt_layer_spec as mine")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_spec(("own_spec_of_a_test", "mine")) == (gpt_layer_spec, False)
    rejects("'system' is neither a ModuleSpec for HybridModel nor a function", resolve_spec, ("os", "system"))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (("json", "dumps"), "dumps(config) raises TypeError"),
        (("copy", "copy"), "copy(config) is a TransformerConfig, and should be a layer spec"),
    ],
)
def test_rejects_functions_that_make_no_spec(spec, says):
    config = transformer_config(TrainingOptions(spec=spec), CPU)
    with pytest.raises(ArgumentError, match="spec: got ") as caught:
        _layer_spec(spec, config)
    assert says in str(caught.value)


def test_a_configuration_has_the_layers_that_the_flags_say():
    assert transformer_config(TrainingOptions(hybrid_layer_pattern="G*-", num_layers=7), CPU).num_layers == 3
    assert transformer_config(TrainingOptions(spec=GPT, num_layers=7), CPU).num_layers == 7
    options = TrainingOptions(hybrid_layer_pattern="MM*-", mamba_num_heads=6, mamba_num_groups=3)
    config = transformer_config(options, CPU)
    found = (config.mamba_num_heads, config.mamba_head_dim, config.mamba_state_dim, config.mamba_num_groups)
    assert found == (6, 32, 16, 3)
    options = {"spec": GPT, "num_layers": 2, "context_parallel_size": 2}
    assert transformer_config(TrainingOptions(**options), CPU).cp_comm_type == "auto"
    each = ("a2a", "auto")
    assert transformer_config(TrainingOptions(**options, cp_comm_type=each), CPU).cp_comm_type == list(each)
    for cp_size in (1, 2):
        options["context_parallel_size"] = cp_size
        with pytest.raises(ArgumentError, match=r"cp_comm_type: .* one value, or one for each of 2 layers"):
            transformer_config(TrainingOptions(**options, cp_comm_type=("a2a",) * 3), CPU)


@pytest.mark.parametrize("pattern", ["", "GX", "G*|-", "G*/G", "G-[", "|"])
def test_rejects_patterns(pattern):
    with pytest.raises(ArgumentError, match=r"hybrid_layer_pattern: got .* G for GatedDeltaNet"):
        transformer_config(TrainingOptions(hybrid_layer_pattern=pattern), CPU)


def test_rejects_gpts_variant_of_a_hybrid_model():
    with pytest.raises(ArgumentError, match=r"experimental_attention_variant: .* --hybrid-layer-pattern"):
        transformer_config(TrainingOptions(experimental_attention_variant="gated_delta_net"), CPU)


@pytest.mark.parametrize("name", ["bf16", "use_distributed_optimizer"])
def test_rejects_what_needs_cuda(name):
    options = TrainingOptions(**{name: True})
    rejects(f"{name}: got True; allowed: off on cpu", transformer_config, options, CPU)


@pytest.mark.parametrize(("vocab_size", "tp", "padded"), [(257, 1, 384), (384, 1, 384), (385, 2, 512), (1, 3, 384)])
def test_vocabularies_are_padded_as_megatron_does(vocab_size, tp, padded):
    assert TrainingOptions(tensor_model_parallel_size=tp).padded_vocab_size(vocab_size) == padded
