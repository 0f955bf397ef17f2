"""Kernels of flash-linear-attention and mamba_ssm behind our interface, on the CPU: Triton's interpreter runs them in a
process of its own, since it changes Triton for good. float32, because its bfloat16 products are wrong.
"""

import contextlib
import importlib.util
import json
import sys
import types
from functools import partial

import pytest
import torch

from megatron_cp.linear.kernels.fla import FlaConv, FlaRule
from megatron_cp.linear.kernels.mamba_ssm import MambaSsmRule
from tests.commands import run_module
from tests.linear_oracle import conv_errors, rule_errors

RAGGED = [7, 1, 70, 0, 13]  # fla's chunks have 64 tokens, mamba_ssm's here 16
ACROSS = [3, 150, 1, 9]  # of three ranks one holds nothing but the middle of a document
SHORT = [3, 60, 1, 9]
# Arguments of `rule_errors` or `conv_errors`; few and of few heads, because the interpreter takes seconds for each.
CASES = {
    "fla": {
        "gdn": [
            ([70, 0, 3], [0, 0, 1, 1], 16, 16),  # as fla shares key heads
            (RAGGED, [0, 0, 1], 16, 32),
            (RAGGED, [0, 1], 24, 8),
            ([65], [0], 32, 16),
            ([7, 70, 0, 0, 13], [0, 0], 16, 16, None, 1, True),
            ([1, 2, 3], [0], 16, 16, None, 1, True),  # as many chunks as there may be
            (ACROSS, [0, 0], 16, 8, "contiguous", 2),
            (ACROSS, [0, 0, 1], 16, 24, "contiguous", 3),
            ([140, 1, 5], [0, 0], 16, 16, "zigzag", 2),
            ([2], [0], 16, 16, "contiguous", 2),
            ([70, 5, 66, 3], [0, 0], 16, 16, "contiguous", 2, False, [-1, 0, 0, 2]),
        ],
        "kda": [
            ([1, 66], [0], 16, 8),
            ([7, 66, 0], [0], 16, 8, None, 1, True),
            (ACROSS, [0], 16, 8, "contiguous", 2),
            ([3, 40, 1, 9], [0], 16, 8, "contiguous", 3),
            ([13, 1, 5], [0, 0, 1], 16, 16, "zigzag", 2),
            ([30, 5, 9], [0], 16, 8, "contiguous", 1, False, [-1, 0, 0]),
        ],
        "gdn2": [
            ([3, 30, 1, 9], [0], 16, 8, "contiguous", 3),
            ([1, 66, 0], [0], 16, 8),
            ([13, 1, 5], [0, 0, 1], 16, 16, "zigzag", 2),
            ([30, 5, 9], [0], 16, 8, "contiguous", 1, False, [-1, 0, 0]),
        ],
        "conv": [
            (RAGGED, 24, 4, True, True),
            (RAGGED, 5, 3, False, False),
            ([1], 16, 4, True, True),
            (ACROSS, 12, 4, True, True, "contiguous", 3),
            ([10, 2, 1, 6], 8, 4, True, True, "zigzag", 3),
            ([9], 8, 2, False, False, "contiguous", 3),
            ([2], 8, 5, True, True, "contiguous", 2),
        ],
    },
    "mamba_ssm": {
        "mamba": [
            ([7, 1, 40, 0, 13], [0, 0, 1, 1], 16, 16),  # as mamba_ssm shares groups
            ([7, 1, 40, 13], [0, 1, 1], 16, 8),
            (SHORT, [0, 0], 16, 16, "contiguous", 2),
            (SHORT, [0, 0, 1], 16, 8, "contiguous", 3),
            ([40, 1, 5], [0, 0], 16, 16, "zigzag", 2),
            ([2], [0], 16, 16, "contiguous", 2),
        ]
    },
}
FEW, OTHERS = "few", "others"  # every third case, and those between


@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [FEW, pytest.param(OTHERS, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("package", CASES)
def test_matches_the_oracle_forward_and_backward(package, which):
    if importlib.util.find_spec(package) is None:  # whose import takes a second
        pytest.skip(f"{package} is not installed")
    printed = run_module("tests.functional_tests.test_package_kernels", package, which, TRITON_INTERPRET="1")
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    assert len(found) >= sum(len(cases) // 3 for cases in CASES[package].values())
    for case, errors in found:
        assert all(error <= 1e-5 for error in errors.values()), (case, errors)  # not max: NaN must fail


def without_a_device():
    """mamba_ssm makes the tensors' device the current one, and asks it how many processors it has."""
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=4)


if __name__ == "__main__":
    from tools.triton_interpreter import interpret_triton

    interpret_triton()
    package, which = sys.argv[1:]
    if package == "fla":
        torch.use_deterministic_algorithms(True)  # which fills torch.empty with NaN
    else:
        without_a_device()
    for operation, cases in CASES[package].items():
        rule = MambaSsmRule(16) if package == "mamba_ssm" else FlaRule()
        measure = partial(conv_errors, FlaConv()) if operation == "conv" else partial(rule_errors, rule, operation)
        for number, case in enumerate(cases):
            if (number % 3 == 0) == (which == FEW):
                torch.manual_seed(0)
                print(json.dumps([[operation, *case], measure(*case)]))
