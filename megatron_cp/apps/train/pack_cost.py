"""Predicts the cost of a training run's packs from the sizes of its model alone."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.errors import ArgumentError
from megatron_cp.planner import PackCost

_PASSES = 3  # a product runs forward, and backward for each of its two factors
_FLOPS = 2 * _PASSES  # flops of a multiply-add


def pack_cost_of(options: TrainingOptions, layers: Sequence[str], vocab_size: int) -> PackCost:
    """Returns the flops of a pack, forward and backward, as Megatron counts them for its throughput; `pack` is 0.

    A token of a linear layer, or of attention with a finite window, costs the same wherever it is; attention to all
    tokens costs each pair. Rates of kernels and communication are left out: `PackCost.at_rates_of` adds the rates.

    Args:
        options: the run's options.
        layers: letters of each layer, as in `--hybrid-layer-pattern`: M Mamba-2, G GatedDeltaNet, * attention, - MLP. A
            layer of GPTModel has two.
        vocab_size: the model's vocabulary, padded.

    Example:
        >>> cost = pack_cost_of(TrainingOptions(), "GG*-GG*-", vocab_size=256)
        >>> round(cost.token / cost.pair)  # tokens of a document that cost as much as its pairs
        2880
    """
    hidden = options.hidden_size
    weights, token, features = hidden * vocab_size, 0.0, 0
    for number, part in ((number, part) for number, layer in enumerate(layers, start=1) for part in layer):
        match part:
            case "*":
                queries = options.num_attention_heads * options.kv_channels
                weights += hidden * (2 * queries + 2 * options.num_query_groups * options.kv_channels)
                seen = _window(options, number)
                features += queries if seen is None else 0
                token += 2 * _FLOPS * queries * (seen or 0)  # for scores, and for values
            case "-":
                weights += 3 * hidden * options.ffn_hidden_size
            case "G":
                keys = options.linear_num_key_heads * options.linear_key_head_dim
                values = options.linear_num_value_heads * options.linear_value_head_dim
                weights += hidden * (2 * keys + 3 * values + 2 * options.linear_num_value_heads)
                state = options.linear_key_head_dim * values
                token += _FLOPS * (4 * state + options.linear_conv_kernel_dim * (2 * keys + values))
            case "M":
                inner = options.mamba_num_heads * options.mamba_head_dim
                shared = 2 * options.mamba_num_groups * options.mamba_state_dim
                weights += hidden * (3 * inner + shared + options.mamba_num_heads)
                token += 7 * _PASSES * inner * options.mamba_state_dim
            case _:
                raise ArgumentError("layers", layers, "letters of M, G, * and - for each layer")
    return PackCost.of_flops(active_parameters=weights, softmax_features=features, token=token)


def _window(options: TrainingOptions, number: int) -> int | None:
    """Returns the keys that a token sees in layer `number`, counted from 1; None if it sees all before it."""
    every = options.window_attn_skip_freq
    if options.window_size is None or -1 in options.window_size or (every is not None and number % every == 0):
        return None
    return min(sum(options.window_size) + 1, options.seq_length)
