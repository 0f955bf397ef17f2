"""Tests of the cost of a training run's packs, by the sizes of its model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.pack_cost import pack_cost_of
from tests.refusals import rejects

OPTIONS = TrainingOptions()
LENGTHS = [700, 1, 3000, 395]


def megatron_args(options, **rest):
    """Returns the flags that Megatron's own count reads."""
    names = (
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "seq_length",
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
        "num_layers", "linear_attention_freq", "experimental_attention_variant",
    )  # fmt: skip
    none = ("num_experts", "moe_ffn_hidden_size", "moe_latent_size", "moe_shared_expert_intermediate_size",
            "mtp_num_layers")  # fmt: skip
    shape = {name: getattr(options, name) for name in names} | dict.fromkeys(none)
    shape |= {"moe_router_topk": 1, "group_query_attention": True, "swiglu": True, "multi_latent_attention": False}
    return SimpleNamespace(**shape, attention_output_gate=False, padded_vocab_size=512, **rest)


def megatron_flops(args, lengths):
    from megatron.training.training import num_floating_point_operations

    return num_floating_point_operations(
        args,
        1,
        seqlen_squared_sum_in_batch=sum(length * length for length in lengths),
        total_real_tokens_in_batch=sum(lengths),
    )


@pytest.mark.parametrize("pattern", ["GG*-GG*-", "M-M*-", "*-*-", "G"])
def test_flops_of_hybrid_models_are_those_that_megatron_counts(pattern):
    """Mamba-2 is twice as wide as the model, which Megatron takes for granted."""
    pytest.importorskip("megatron.training")
    args = megatron_args(OPTIONS, hybrid_layer_pattern=pattern)
    cost = pack_cost_of(OPTIONS, pattern, vocab_size=512)
    assert cost.of(LENGTHS) == pytest.approx(megatron_flops(args, LENGTHS), rel=1e-9)


@pytest.mark.parametrize("variant", [None, "gated_delta_net"])
def test_flops_of_gpt_models_are_those_that_megatron_counts(variant):
    pytest.importorskip("megatron.training")
    from megatron_cp.apps.train.setup import layers_of

    spec = ("megatron_cp.megatron.specs", "gpt_layer_spec")
    options = replace(OPTIONS, spec=spec, experimental_attention_variant=variant, num_layers=6)
    args = megatron_args(options, hybrid_layer_pattern=None)
    layers = layers_of(options)
    assert len(layers) == 6
    assert sum("*" in layer for layer in layers) == (6 if variant is None else 1)
    cost = pack_cost_of(options, layers, vocab_size=512)
    assert cost.of(LENGTHS) == pytest.approx(megatron_flops(args, LENGTHS), rel=1e-9)


def test_a_layer_with_a_window_costs_tokens_alone():
    whole = pack_cost_of(OPTIONS, "**", vocab_size=512)
    windowed = pack_cost_of(replace(OPTIONS, window_size=(127, 0)), "**", vocab_size=512)
    every_other = replace(OPTIONS, window_size=(127, 0), window_attn_skip_freq=2)
    mixed = pack_cost_of(every_other, "**", vocab_size=512)
    assert (windowed.pair, mixed.pair) == (0, whole.pair / 2)
    assert windowed.token - whole.token == 2 * 2 * (mixed.token - whole.token) / 2 == 2 * 12 * 128 * 4 * 32
    assert pack_cost_of(replace(OPTIONS, window_size=(-1, 0)), "**", vocab_size=512) == whole
    far = replace(OPTIONS, window_size=(10**9, 0))
    assert pack_cost_of(far, "*", vocab_size=512).token < 2 * whole.token + 12 * 4096 * 4 * 32


@pytest.mark.parametrize("layers", ["GX", ["*", "E"], "+"])
def test_rejects_layers_that_are_not_counted(layers):
    rejects(r"layers: got .* allowed: letters of M, G, \* and -", pack_cost_of, OPTIONS, layers, vocab_size=512)
