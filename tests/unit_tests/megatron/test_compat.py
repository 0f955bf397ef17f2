"""Releases of Megatron-Core that differ: shared flags, options and layers that some have, parts that are gone."""

import argparse
import importlib
import sys
import types

import pytest
import torch

from megatron_cp.errors import ArgumentError
from tests.commands import run_python
from tests.refusals import rejects

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_cp.megatron import compat
from megatron_cp.megatron import config as our_config
from megatron_cp.megatron.layers.base import LinearModule
from megatron_cp.megatron.layers.refusals import refuse_unsupported
from megatron_cp.megatron.packed_seq_params import planned
from megatron_cp.megatron.rules import unsupported_spec

SETTINGS = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


def parser_with(*flag, **settings):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(*flag, **settings)
    return parser


@pytest.mark.parametrize("choices", [None, ("headwise", "chunkwise")])
def test_a_flag_of_megatrons_takes_our_values_and_keeps_its_default(choices):
    parser = parser_with("--linear-cp-mode", type=str, default="chunkwise", choices=choices)
    our_config.add_arguments(parser)
    assert parser.parse_args([]).linear_cp_mode == "chunkwise"
    assert "default is Megatron's, chunkwise" in " ".join(parser.format_help().split())
    for mode in ("headwise", "chunkwise", "redistribute", "auto"):
        assert parser.parse_args(["--linear-cp-mode", mode]).linear_cp_mode == mode
    assert parser.parse_args(["--cp-layout", "zigzag"]).cp_layout == "zigzag"


def test_without_megatrons_flag_the_default_is_ours():
    assert our_config.add_arguments(argparse.ArgumentParser()).parse_args([]).linear_cp_mode == "auto"


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--linear-cp-mode", {"type": int}),
        ("--linear-cp-mode", {"action": "store_true"}),
        ("--linear-cp-mode", {"nargs": "+"}),
        ("--linear-cp-mode", {"dest": "mode_of_linear_layers"}),
        ("--cp-layout", {"choices": ("rows", "columns"), "help": "the layout of checkpoints"}),
    ],
)
def test_rejects_a_flag_of_megatrons_that_means_something_else(flag, settings):
    says = rf"^{flag}: got a flag of Megatron's own, .*; allowed: a Megatron-Core"
    rejects(says, our_config.add_arguments, parser_with(flag, **settings))


def test_the_configuration_has_megatrons_default_where_megatron_has_the_field():
    theirs = getattr(TransformerConfig(**SETTINGS), "linear_cp_mode", "auto")
    assert our_config.TransformerConfig(**SETTINGS).linear_cp_mode == theirs == compat.LINEAR_CP_MODE


class Linear(LinearModule):
    """A linear layer on the first of several ranks, as far as its spec needs."""

    def __init__(self, mode, ranks):
        self.config = types.SimpleNamespace(linear_cp_mode=mode, params_dtype=torch.float32)
        self.ranks = types.SimpleNamespace(size=ranks)

    def agree(self, **settings):
        pass


def test_says_which_mode_megatrons_default_is(monkeypatch, recwarn):
    sizes = {"heads": 2, "key_heads": 2, "head_dim": 4, "value_head_dim": 4, "conv_width": 4}
    for has_field, mode, ranks in ((False, "chunkwise", 2), (True, "headwise", 2), (True, "chunkwise", 1)):
        monkeypatch.setattr(compat, "HAS_LINEAR_CP_MODE", has_field)
        monkeypatch.setattr(compat, "LINEAR_CP_MODE", "chunkwise")
        Linear(mode, ranks).set_slot("gdn", "Gated DeltaNet", **sizes)
    assert not recwarn
    with pytest.warns(UserWarning, match="Linear layers run chunkwise, the default of --linear-cp-mode in this"):
        Linear("chunkwise", 2).set_slot("gdn", "Gated DeltaNet", **sizes)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dynamic_context_parallel", True), ("enable_hyper_connections", True), ("enable_mhc_connections", True),
        ("mtp_hsm", True), ("rotary_base_per_layer", [1e4, 1e6]), ("cp_partition_mode", "contiguous"),
    ],
)  # fmt: skip
def test_rejects_options_of_some_releases(option, value):
    config = TransformerConfig(**SETTINGS)
    setattr(config, option, value)
    rejects(f"^--{option.replace('_', '-')}: got .*; allowed: ", refuse_unsupported, config)


@pytest.mark.parametrize("scheme", ["a2a", ["p2p", "a2a"]])
def test_local_layers_take_every_scheme(scheme):
    settings = {"transformer_impl": "local", "context_parallel_size": 2, "cp_comm_type": scheme}
    assert our_config.TransformerConfig(**SETTINGS, **settings).cp_comm_type == scheme


@pytest.mark.parametrize("variant", ["gated_delta_net", "gdn"])
def test_both_names_of_gated_delta_net_are_taken(variant):
    config = types.SimpleNamespace(experimental_attention_variant=variant, transformer_impl="local")
    assert not list(unsupported_spec(config))
    config.experimental_attention_variant = "gdn2"
    assert [error.argument for error in unsupported_spec(config)] == ["--experimental-attention-variant"]


def test_rejects_layers_of_some_releases():
    compat.refuse_other_layers("MG*-E")
    says = r"^--hybrid-layer-pattern: got 'CH'; allowed: layers M, G"
    rejects(says, compat.refuse_other_layers, ["H", "M", "C", "*"])


def test_a_batch_that_megatron_cut_in_ranges_is_rejected():
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    group = types.SimpleNamespace(size=2, rank=0)
    assert planned(params, group, "document").layout.cp_size == 2
    del params.__dict__["_megatron_cp"]
    params.cp_partition_mode = "contiguous"
    rejects(r"cp_partition_mode 'contiguous'.*; allowed: zigzag, or a batch of", planned, params, group, "document")


def test_packs_of_megatrons_scheduler_are_cut_by_documents():
    config = our_config.TransformerConfig(**SETTINGS)
    assert config.cp_packed_order is None
    config.sequence_packing_scheduler = "dp_balanced"
    our_config._derive_options(config)
    assert config.cp_packed_order == "document"


def check():
    with compat.refused_if_incomplete():
        pass


def test_this_megatron_has_all_parts():
    check()


def test_names_what_an_import_does_not_find():
    says = r"without megatron\.core\.utils\.no_such_name, of /.*; allowed: 0\.19\.2"
    with pytest.raises(ArgumentError, match=says), compat.refused_if_incomplete():
        from megatron.core.utils import no_such_name  # noqa: F401
    with pytest.raises(ImportError, match="no_such_package"), compat.refused_if_incomplete():
        import no_such_package  # noqa: F401


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("megatron.core.transformer.multi_token_prediction", "roll_tensor"),
        ("megatron.core.transformer.multi_latent_attention", "MLASelfAttention._qkv_down_projection"),
        ("megatron.core.ssm.mamba_mixer", "ExtendedRMSNorm"),
    ],
)
def test_rejects_a_release_without_a_part(monkeypatch, module, part):
    owner = importlib.import_module(module)
    *classes, name = part.split(".")
    monkeypatch.delattr(getattr(owner, classes[0]) if classes else owner, name)
    rejects(rf"^megatron-core: got .* without {module}\.{part}, of", check)


def test_rejects_a_release_without_a_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.router", None)
    rejects(r"without megatron\.core\.transformer\.moe\.router, of /.*; allowed", check)


@pytest.mark.thorough  # it imports Megatron in a process of its own
def test_the_specs_reject_it_before_an_import_fails():
    gone = "megatron.core.models.gpt.moe_module_specs"
    code = f"import sys\nsys.modules['{gone}'] = None\nimport megatron_cp.megatron.specs"
    last = run_python("-c", code, status=1).stderr.strip().splitlines()[-1]
    assert last.startswith("megatron_cp.errors.ArgumentError: megatron-core: got ")
    assert f"without {gone}, of /" in last
