"""mamba_ssm's own kernels behind our interface, on the CPU: Triton's interpreter runs them in a process of its own."""

import json

import pytest
import torch

from megatron_cp.linear.kernels.mamba_ssm import MambaSsmRule
from tests.forked_commands import run_module
from tests.linear_oracle import rule_errors

CHUNK = 16  # tokens, so that a few dozen make several chunks
ACROSS = [3, 60, 1, 9]  # of three ranks one holds nothing but the middle of a document
CASES = [
    {"lengths": [7, 1, 40, 0, 13], "groups": [0, 0, 1, 1], "dk": 16, "dv": 16},  # as mamba_ssm shares groups
    {"lengths": [7, 1, 40, 13], "groups": [0, 1, 1], "dk": 16, "dv": 8},
    {"lengths": ACROSS, "groups": [0, 0], "dk": 16, "dv": 16, "layout": "contiguous", "ranks": 2},
    {"lengths": ACROSS, "groups": [0, 0, 1], "dk": 16, "dv": 8, "layout": "contiguous", "ranks": 3},
    {"lengths": [40, 1, 5], "groups": [0, 0], "dk": 16, "dv": 16, "layout": "zigzag", "ranks": 2},
    {"lengths": [2], "groups": [0], "dk": 16, "dv": 16, "layout": "contiguous", "ranks": 2},
]


def test_matches_the_oracle_forward_and_backward():
    pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    printed = run_module("tests.functional_tests.test_mamba_ssm_kernels", TRITON_INTERPRET="1")
    measured = [json.loads(line) for line in printed.splitlines()]
    assert len(measured) == len(CASES)
    for case, found in zip(CASES, measured, strict=True):
        assert all(error <= 1e-5 for error in found.values()), (case, found)  # not max: NaN must fail


def _without_a_device():
    """The package makes the tensors' device the current one, and asks it how many processors it has."""
    import contextlib
    import types

    torch.cuda.device = contextlib.nullcontext
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=4)


if __name__ == "__main__":
    from tools.triton_interpreter import interpret_triton

    interpret_triton()
    _without_a_device()
    for case in CASES:
        torch.manual_seed(0)
        print(json.dumps(rule_errors(MambaSsmRule(CHUNK), "mamba", **case)))
