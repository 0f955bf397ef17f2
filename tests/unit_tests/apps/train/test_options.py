"""Tests of the refusals of `TrainingOptions.check`: all errors that can be seen before anything starts."""

import dataclasses
import math

import pytest

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.errors import ArgumentError

NUMBERS = [
    entry
    for entry in dataclasses.fields(TrainingOptions)
    if ("int" in entry.type or "float" in entry.type) and "tuple" not in entry.type
]
MAY_BE_ZERO = {
    "seed", "lr_warmup_iters", "lr", "min_lr", "weight_decay", "clip_grad", "norm_epsilon", "adam_beta1", "adam_beta2",
    "attention_dropout", "cp_search", "validation", "sample_tokens",
}  # fmt: skip


def refused(**options):
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(**options).check()
    return caught.value


def test_the_defaults_pass():
    TrainingOptions().check()


@pytest.mark.parametrize("name", [entry.name for entry in NUMBERS])
def test_rejects_numbers_that_cannot_be(name):
    for value in [-1] if name in MAY_BE_ZERO else [-1, 0]:
        assert refused(**{name: value}).argument == name


@pytest.mark.parametrize("name", [entry.name for entry in NUMBERS if "float" in entry.type])
def test_rejects_numbers_that_are_none(name):
    for value in (math.nan, math.inf, -math.inf):
        error = refused(**{name: value})
        assert error.argument == name
        assert str(error).startswith(f"{name}: got {value}; allowed: ")


@pytest.mark.parametrize("name", sorted(MAY_BE_ZERO))
def test_allows_zero(name):
    TrainingOptions(**{name: 0}).check()


def test_other_spellings_are_replaced_by_the_tables():
    options = TrainingOptions(cp_comm_type=("ring", "Ulysses"), cp_codec="FP8", cp_layout="zig-zag")
    options.check()
    assert (options.cp_comm_type, options.cp_codec, options.cp_layout) == (("p2p", "a2a"), "fp8", "zigzag")


@pytest.mark.parametrize("scheme", ["tiled", "a2a+tiled", "auto"])
def test_allows_a_search_where_tiles_are_assigned(scheme):
    TrainingOptions(cp_search=1.0, cp_comm_type=("exact", scheme), context_parallel_size=4).check()


@pytest.mark.parametrize(
    ("options", "argument", "says"),
    [
        ({"num_query_groups": 3}, "num_query_groups", "a divisor of the 4 query heads"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads", "a divisor of the 4 value heads"),
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size", "a divisor of num-attention-heads, 4"),
        ({"tensor_model_parallel_size": 4}, "tensor_model_parallel_size", "a divisor of linear-num-key-heads, 2"),
        (
            {"tensor_model_parallel_size": 2, "num_attention_heads": 6, "num_query_groups": 3},
            "num_query_groups",
            "a multiple or a divisor of the 2 tensor-parallel ranks",
        ),
        (
            {"tensor_model_parallel_size": 2, "ffn_hidden_size": 7},
            "tensor_model_parallel_size",
            "a divisor of ffn-hidden-size, 7",
        ),
        ({"seq_length": 1}, "seq_length", "at least 2"),
        ({"seq_length": 4, "context_parallel_size": 5}, "seq_length", "one token for each of 5 ranks"),
        ({"data_parallel_size": 2}, "global_batch_size", "a multiple of the 2 replicas"),
        ({"sequence_parallel": True}, "sequence_parallel", "--tensor-model-parallel-size above 1"),
        ({"kv_channels": 15}, "kv_channels", "even numbers"),
        ({"lr_warmup_iters": 100}, "lr_warmup_iters", "less than the 100 steps"),
        ({"lr_decay_iters": 20}, "lr_warmup_iters", "less than the 20 steps"),
        ({"min_lr": 0.1}, "min_lr", "at most the learning rate, 0.001"),
        ({"adam_beta1": 1.0}, "adam_beta1", "less than 1"),
        ({"seed": 2**63}, "seed", "less than 2**63"),
        ({"seq_length": 10**25}, "seq_length", "less than 2**63"),
        ({"spec": ("os",)}, "spec", "a module and a name"),
        ({"cp_comm_type": ("a2a+p2p",), "context_parallel_size": 3}, "cp_comm_type", "3 has no other divisor"),
        (
            {"cp_comm_type": ("a2a+p2p",), "context_parallel_size": 4, "hierarchical_context_parallel_sizes": (3, 2)},
            "hierarchical_context_parallel_sizes",
            "two factors of the 4",
        ),
        ({"cp_comm_type": ("exact",), "context_parallel_size": 2, "cp_head_chunks": 9}, "cp_head_chunks", "1 to 2"),
        (
            {"cp_comm_type": ("a2a",), "cp_head_chunks": 2, "context_parallel_size": 2},
            "cp_head_chunks",
            "1, for 2 key/value heads over 2 ranks",
        ),
        ({"cp_head_chunks": 99}, "cp_head_chunks", "1 to 2, for 2 key/value heads."),
        (
            {
                "cp_codec": "fp8",
                "context_parallel_size": 2,
                "hybrid_layer_pattern": "M-",
                "linear_cp_mode": "chunkwise",
            },
            "cp_codec",
            "No layer of this model sends heads or keys",
        ),
        (
            {"cp_head_chunks": 1, "context_parallel_size": 2, "cp_comm_type": ("p2p",), "linear_cp_mode": "chunkwise"},
            "cp_head_chunks",
            "rings and chunkwise layers have none",
        ),
        ({"cp_search": 86_401.0}, "cp_search", "seconds from 0 to 86400"),
        *[
            (
                {"cp_search": 1.0, "context_parallel_size": 2, **rest},
                "cp_search",
                "No layer here assigns tiles to ranks: take tiled or a2a+tiled or auto for attention.",
            )
            for rest in ({"cp_comm_type": ("exact",)}, {"hybrid_layer_pattern": "GM"})
        ],
        ({"cp_transport": "carrier"}, "cp_transport", "collective or pairwise or hierarchical"),
        ({"cp_codec": "fp4"}, "cp_codec", "none or fp8 or fp8_e5m2 or int8"),
        ({"window_size": (-2, 0)}, "window_size", "-1 for all"),
        ({"hierarchical_context_parallel_sizes": (2, 0)}, "hierarchical_context_parallel_sizes", "at least 1"),
        ({"attention_dropout": 1.0}, "attention_dropout", "less than 1"),
        ({"cp_layout": "striped"}, "cp_layout", "balanced or contiguous or zigzag"),
        ({"cp_comm_type": ("a2a", "tiles")}, "cp_comm_type", "Did you mean tiled?"),
        ({"linear_cp_mode": "ringwise"}, "linear_cp_mode", "headwise or chunkwise"),
        ({"mamba_num_groups": 3}, "mamba_num_groups", "a divisor of the 8 Mamba heads"),
        (
            {"tensor_model_parallel_size": 2, "mamba_num_groups": 1, "hybrid_layer_pattern": "M*-"},
            "tensor_model_parallel_size",
            "a divisor of mamba-num-groups, 1",
        ),
    ],
)
def test_rejects_what_does_not_go_together(options, argument, says):
    error = refused(**options)
    assert error.argument == argument
    assert says in str(error)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data_path": 5}, "got 5; allowed: a text or nothing."),
        ({"tokenizer_model": ["a"]}, "got ['a']; allowed: a text or nothing."),
        ({"spec": ("os", 5)}, "got ('os', 5); allowed: texts."),
        ({"cp_comm_type": "a2a"}, "got 'a2a'; allowed: texts."),
        ({"window_size": (1, 2.5)}, "got (1, 2.5); allowed: integers or nothing."),
        ({"seq_length": 4096.0}, "got 4096.0; allowed: an integer."),
        ({"seq_length": True}, "got True; allowed: an integer."),
        ({"train_iters": None}, "got None; allowed: an integer."),
        ({"lr": "fast"}, "got 'fast'; allowed: a number."),
        ({"bf16": 1}, "got 1; allowed: True or False."),
    ],
)
def test_rejects_values_of_another_type(options, says):
    error = refused(**options)
    assert error.argument == next(iter(options))
    assert says in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"position_embedding_type": "none", "kv_channels": 15},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"tensor_model_parallel_size": 2, "num_query_groups": 1},
        {"tensor_model_parallel_size": 2, "mamba_num_groups": 1}, {"linear_cp_mode": "chunkwise"},
        {"context_parallel_size": 5, "seq_length": 5}, {"data_parallel_size": 3, "global_batch_size": 6},
        {"lr_warmup_iters": 20, "train_iters": 1, "lr_decay_iters": 21}, {"seed": 2**63 - 1},
    ],
)  # fmt: skip
def test_allows_what_does(options):
    TrainingOptions(**options).check()


def test_the_shape_is_what_a_checkpoint_depends_on():
    options = TrainingOptions()
    assert options.shape(257)["vocab_size"] == 257
    for changes in (
        {"hidden_size": 64},
        {"spec": ("a", "b")},
        {"hybrid_layer_pattern": "G"},
        {"qk_layernorm": True},
        {"lr": 1.0},
    ):
        assert dataclasses.replace(options, **changes).shape(257) != options.shape(257)
    for changes in ({"context_parallel_size": 3}, {"cp_layout": "random"}, {"seed": 1}, {"cp_comm_type": ("a2a",)}):
        assert dataclasses.replace(options, **changes).shape(257) == options.shape(257)
