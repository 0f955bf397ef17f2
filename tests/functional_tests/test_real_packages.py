"""Tests with Transformer Engine, causal-conv1d, mamba-ssm and flash-attn 4, on the CPU, where they are installed.

`python -m tools.real_packages` makes them. Transformer Engine's modules ask whether there is a GPU when they are built,
and are told that there is one; no kernel of any package runs, though flash-attn 4 compiles its own.
"""

import inspect
import json
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.extras import installed_version
from tests.commands import command, run_module, run_python
from tests.flash_attn_4_calls import CALLS
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit
from tests.shared import selected
from tools.nullgpu import flash_attn_4

pytest.importorskip("megatron.core")

with_transformer_engine = pytest.mark.skipif(
    installed_version("transformer-engine") is None, reason="Transformer Engine is not installed"
)
with_mamba = pytest.mark.skipif(find_spec("mamba_ssm") is None, reason="mamba-ssm is not installed")
with_flash_attn_4 = pytest.mark.skipif(
    installed_version("flash-attn-4") is None, reason="flash-attn 4 is not installed"
)
with_conv = pytest.mark.skipif(find_spec("causal_conv1d") is None, reason="causal-conv1d is not installed")
KINDS = (
    "gpt", "gpt_gdn", "mla", "fused_mla", "dsa_mla", "hybrid", "hybrid_mla", "hybrid_dsa_mla", "hybrid_mamba",
    "hybrid_both",
)  # fmt: skip
CHANGES = {"fused_mla": {"mla_down_proj_fusion": True}}
# Megatron's names of a latent's norms are others without Transformer Engine, where they are no part of a linear layer.
LATENT = ("mla", "fused_mla", "dsa_mla", "hybrid_mla", "hybrid_dsa_mla")
OF_MAMBA = ("hybrid_mamba", "hybrid_both")  # Megatron's own need mamba-ssm


@pytest.fixture(scope="module")
def built(request, tmp_path_factory):
    chosen = selected(request, test_specs_of_transformer_engine_have_the_parameters_of_megatrons_own)
    kinds = [case["kind"] for case in chosen] or list(KINDS)
    return run_ranks(build_all, 1, kinds, tmp_path_factory.mktemp("saved"), kind="processes", timeout=limit(400))[0]


def build_all(group, kinds, folder):
    """Parameters, keys and checkpoints of each kind: of our spec, of Megatron's, and of ours without the package."""
    tiny.start()
    torch.cuda.is_available = lambda: True
    found = {}
    for kind in kinds:
        models = {"ours": tiny.build(kind, **CHANGES.get(kind, {}))}
        if find_spec("mamba_ssm") or kind not in OF_MAMBA:
            models["megatron"] = tiny.build(kind, spec=megatrons_own(kind), **CHANGES.get(kind, {}))
        if kind != "fused_mla":  # whose one projection Megatron has with Transformer Engine only
            local = tiny.configure(kind, transformer_impl="local")
            models["local"] = tiny.build(kind, spec=without_it(kind, local), config=local)
        found[kind] = {name: described(model) for name, model in models.items()}
        found[kind]["loaded"] = {
            (one, other): load(models[one], models[other], folder / f"{kind}-{one}-{other}")
            for one, other in (("ours", "megatron"), ("megatron", "ours"), ("ours", "local"), ("local", "ours"))
            if {one, other} <= models.keys() and not ("local" in (one, other) and kind in LATENT)
        }
    return found


def megatrons_own(kind):
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    if kind.startswith("hybrid"):
        return hybrid_stack_spec
    config = tiny.configure(kind, **CHANGES.get(kind, {}))
    if config.experimental_attention_variant:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(config)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=config.normalization)


def without_it(kind, config):
    from megatron_cp.megatron import specs

    return specs.local_hybrid_stack_spec if kind.startswith("hybrid") else specs.gpt_layer_spec(config)


def described(model):
    return {
        "parameters": {name: (tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()},
        "keys": sorted(model.sharded_state_dict()),
        "saved": sorted(saved_weights(model)),
        "modules": sorted({type(module).__name__ for module in model.modules()}),
    }


def saved_weights(model):
    """Weights by the keys in checkpoints, halves of gated layers one by one."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

    state = model.sharded_state_dict()
    apply_factories(state)
    found = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    assert not any(isinstance(value, ShardedTensorFactory) for value in nested_values(state))
    return {(value.key, value.global_offset): value.data for value in found}


def load(source, target, folder):
    """Loads a checkpoint of one model into another, zeroed before, and returns names of weights that differ.

    Extra states, which only some layers of either implementation have, hold scales of eight bits, and here nothing.
    """
    from megatron.core import dist_checkpointing

    from megatron_cp.megatron.patches import checkpoint_results_in_this_process

    folder.mkdir()
    before = {name: weight.detach().clone() for name, weight in target.named_parameters()}
    with torch.no_grad(), checkpoint_results_in_this_process():
        dist_checkpointing.save(source.sharded_state_dict(), str(folder))
        for weight in target.parameters():
            weight.zero_()
        loaded = dist_checkpointing.load(target.sharded_state_dict(), str(folder), strict="ignore_all")
        target.load_state_dict(loaded, strict=False)
        saved, found = saved_weights(source), saved_weights(target)
        wrong = [key for key, weight in found.items() if key not in saved or not torch.equal(weight, saved[key])]
        for name, weight in target.named_parameters():
            weight.copy_(before[name])
    return wrong


@with_transformer_engine
@pytest.mark.parametrize("kind", KINDS)
def test_specs_of_transformer_engine_have_the_parameters_of_megatrons_own(built, kind):
    ours = built[kind]["ours"]
    assert any(name.startswith("TE") for name in ours["modules"])
    if "megatron" not in built[kind]:
        pytest.skip("Megatron's own layers of this kind need mamba-ssm")
    assert ours["parameters"] == built[kind]["megatron"]["parameters"]
    assert ours["keys"] == built[kind]["megatron"]["keys"]
    assert ours["saved"] == built[kind]["megatron"]["saved"]


@with_transformer_engine
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_loaded_by_the_other_implementation(built, kind):
    assert built[kind]["loaded"]
    assert not any(built[kind]["loaded"].values()), built[kind]["loaded"]


@with_transformer_engine
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fused_mla"])
def test_local_layers_have_nothing_of_an_installed_transformer_engine(built, kind):
    modules = built[kind]["local"]["modules"]
    assert not [name for name in modules if name.startswith("TE")]
    assert (built[kind]["local"]["saved"] == built[kind]["ours"]["saved"]) == (kind not in LATENT)


@with_transformer_engine
@pytest.mark.parametrize("spec", ["hybrid_stack_spec", "gpt_layer_spec"])
def test_trains_on_the_cpu_where_transformer_engine_is_installed(tmp_path, spec):
    sizes = "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 1 --seq-length 256"
    layers = "--hybrid-layer-pattern *-" if spec == "hybrid_stack_spec" else "--num-layers 1"
    options = f"{sizes} {layers} --spec megatron_cp.megatron.specs {spec} --train-iters 2 --context-parallel-size 1"
    done = command("train", *options.split(), "--run-dir", str(tmp_path / "run"), seconds=300)
    assert "2 steps, loss" in done.stdout + done.stderr


@with_transformer_engine
@pytest.mark.parametrize(
    "layers", ["--hybrid-layer-pattern G*-", "--num-layers 2 --spec megatron_cp.megatron.specs gpt_layer_spec"]
)
def test_transformer_engines_layers_train_on_the_emulated_device(tmp_path, layers):
    """At CP=2 as at CP=1. Its operators are torch's there; without them the process ends by a signal."""
    sizes = "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 1 --seq-length 64"
    options = f"{sizes} {layers} --train-iters 2 --context-parallel-size 2 --compare --device cuda"
    train = [sys.executable, "-m", "megatron_cp", "train", *options.split(), "--run-dir", tmp_path / "run"]
    done = run_python("-m", "tools.nullgpu", *train, seconds=300)
    assert "2 steps, loss" in done.stdout + done.stderr


@with_mamba
def test_mamba_ssm_has_the_arguments_that_we_pass():
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    scan, norm = inspect.signature(mamba_chunk_scan_combined), inspect.signature(rmsnorm_fn)
    bound = scan.bind("x", "dt", "A", "B", "C", 256, seq_idx=0, return_final_states=True).arguments
    assert list(bound) == ["x", "dt", "A", "B", "C", "chunk_size", "seq_idx", "return_final_states"]
    bound = norm.bind("x", "weight", None, z=0, eps=0, group_size=0, norm_before_gate=False).arguments
    assert list(bound)[:3] == ["x", "weight", "bias"]


@with_conv
def test_causal_conv1d_has_the_arguments_that_we_pass():
    from causal_conv1d import causal_conv1d_fn

    bound = inspect.signature(causal_conv1d_fn).bind("x", "weight", None, seq_idx=0, activation=None).arguments
    assert list(bound) == ["x", "weight", "bias", "seq_idx", "activation"]


@with_flash_attn_4
@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_the_emulated_flash_attn_4_has_the_packages_arguments(name):
    package = inspect.signature(getattr(import_module("flash_attn.cute.interface"), name)).parameters
    for argument in inspect.signature(getattr(flash_attn_4, name)).parameters.values():
        assert package[argument.name].default == argument.default


@with_flash_attn_4
@pytest.mark.parametrize("device", CALLS)
def test_flash_attn_4_compiles_our_calls(device):
    """Without a GPU, as its own tests do: tensors have shapes and no values."""
    assert json.loads(run_module("tests.flash_attn_4_calls", device).splitlines()[-1]) == [
        [[100, 4, value], [4, 100], [100, 4, key], [90, 2, key], [90, 2, value]] for key, value, *_ in CALLS[device]
    ]
