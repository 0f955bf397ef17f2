"""Tests of the refusals of `TrainingOptions.check`: all errors that can be seen before anything starts."""

import dataclasses
import math

import pytest

from megatron_cp.apps.train.options import TrainingOptions
from tests.refusals import rejects

NUMBERS = [
    entry
    for entry in dataclasses.fields(TrainingOptions)
    if ("int" in entry.type or "float" in entry.type) and "tuple" not in entry.type
]
MAY_BE_ZERO = {
    "seed", "lr_warmup_iters", "lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "cp_search",
}  # fmt: skip


def test_the_defaults_and_zeros_pass():
    for given in (
        {},
        *({name: 0} for name in MAY_BE_ZERO),
        {"linear_cp_mode": "chunkwise"},
        {"seed": 2**63 - 1},
        {"context_parallel_size": 5, "seq_length": 5},
        {"data_parallel_size": 3, "global_batch_size": 6},
    ):
        TrainingOptions(**given).check()


@pytest.mark.parametrize("entry", NUMBERS, ids=lambda entry: entry.name)
def test_rejects_numbers_that_cannot_be(entry):
    least = [-1] if entry.name in MAY_BE_ZERO else [-1, 0]
    for value in [*least, *([math.nan, math.inf, -math.inf] if "float" in entry.type else [])]:
        rejects(f"^{entry.name}: got {value}; allowed: ", TrainingOptions(**{entry.name: value}).check)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_query_groups": 3}, "num_query_groups: .* a divisor of the 4 query heads"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads: .* a divisor of the 4 value heads"),
        ({"mamba_num_groups": 3}, "mamba_num_groups: .* a divisor of the 8 Mamba heads"),
        ({"seq_length": 1}, "seq_length: .* at least 2"),
        ({"seq_length": 4, "context_parallel_size": 5}, "seq_length: .* one token for each of 5 ranks"),
        ({"data_parallel_size": 2}, "global_batch_size: .* a multiple of the 2 replicas"),
        ({"kv_channels": 15}, "kv_channels: .* an even number"),
        ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim: got 65"),
        ({"lr_warmup_iters": 100}, "lr_warmup_iters: .* less than the 100 steps"),
        ({"adam_beta1": 1.0}, "adam_beta1: .* less than 1"),
        ({"seed": 2**63}, "seed: .* less than 2\\*\\*63"),
        ({"spec": ("os",)}, "spec: .* hybrid_stack_spec or .* To train other layers, use a Megatron job of your own"),
        ({"cp_hardware": "no_such_machine"}, "cp_hardware: .* h100"),
        ({"cp_comm_type": ("a2a", "nonsense")}, "cp_comm_type: got 'nonsense'"),
        ({"window_size": (-2, 0)}, "window_size: .* -1 for all"),
        ({"hierarchical_context_parallel_sizes": (2, 0)}, "hierarchical_context_parallel_sizes: .* at least 1"),
    ],
)
def test_rejects_what_does_not_go_together(options, says):
    rejects(f"^{says}", TrainingOptions(**options).check)


def test_the_shape_is_what_a_checkpoint_depends_on():
    options = TrainingOptions()
    assert options.shape(257)["vocab_size"] == 257
    for changes in ({"hidden_size": 64}, {"spec": ("a", "b")}, {"qk_layernorm": True}, {"lr": 1.0}):
        assert dataclasses.replace(options, **changes).shape(257) != options.shape(257)
    for changes in ({"context_parallel_size": 3}, {"cp_layout": "random"}, {"seed": 1}, {"cp_comm_type": ("a2a",)}):
        assert dataclasses.replace(options, **changes).shape(257) == options.shape(257)
