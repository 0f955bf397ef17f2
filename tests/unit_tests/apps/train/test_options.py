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
    "seed", "lr_warmup_iters", "lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "cp_search",
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


@pytest.mark.parametrize(
    ("options", "argument", "says"),
    [
        ({"num_query_groups": 3}, "num_query_groups", "a divisor of the 4 query heads"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads", "a divisor of the 4 value heads"),
        ({"seq_length": 1}, "seq_length", "at least 2"),
        ({"seq_length": 4, "context_parallel_size": 5}, "seq_length", "one token for each of 5 ranks"),
        ({"data_parallel_size": 2}, "global_batch_size", "a multiple of the 2 replicas"),
        ({"kv_channels": 15}, "kv_channels", "an even number"),
        ({"lr_warmup_iters": 100}, "lr_warmup_iters", "less than the 100 steps"),
        ({"adam_beta1": 1.0}, "adam_beta1", "less than 1"),
        ({"seed": 2**63}, "seed", "less than 2**63"),
        ({"seq_length": 10**25}, "seq_length", "less than 2**63"),
        ({"spec": ("os",)}, "spec", "megatron_cp.megatron.specs hybrid_stack_spec or"),
        ({"cp_hardware": "no_such_machine"}, "cp_hardware", "h100"),
        ({"window_size": (-2, 0)}, "window_size", "-1 for all"),
        ({"hierarchical_context_parallel_sizes": (2, 0)}, "hierarchical_context_parallel_sizes", "at least 1"),
        ({"mamba_num_groups": 3}, "mamba_num_groups", "a divisor of the 8 Mamba heads"),
    ],
)
def test_rejects_what_does_not_go_together(options, argument, says):
    error = refused(**options)
    assert error.argument == argument
    assert says in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"linear_cp_mode": "chunkwise"},
        {"context_parallel_size": 5, "seq_length": 5}, {"data_parallel_size": 3, "global_batch_size": 6},
        {"seed": 2**63 - 1},
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
