"""Tests of the way from options to Megatron's configuration: specs by name, and combinations of options."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.setup import transformer_config
from tests.refusals import rejects

CPU = torch.device("cpu")
GPT = ("megatron_cp.megatron.specs", "gpt_layer_spec")


def test_a_configuration_has_the_layers_that_the_flags_say():
    assert transformer_config(TrainingOptions(hybrid_layer_pattern="G*-"), CPU).num_layers == 3
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
        given = TrainingOptions(**options | {"context_parallel_size": cp_size}, cp_comm_type=("a2a",) * 3)
        rejects(r"cp_comm_type: .* one value, or one for each of 2 layers", transformer_config, given, CPU)


def test_nothing_is_dropped():
    config = transformer_config(TrainingOptions(), CPU)
    assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)


@pytest.mark.parametrize("pattern", ["", "GX", "G*|-", "G*/G", "G-["])
def test_rejects_patterns(pattern):
    given = TrainingOptions(hybrid_layer_pattern=pattern)
    rejects(r"hybrid_layer_pattern: got .* G for GatedDeltaNet", transformer_config, given, CPU)
