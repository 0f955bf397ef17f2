"""flash-linear-attention's own kernels behind our interface, on the CPU: Triton's interpreter runs them in a process
of its own, since it changes Triton for good. float32, because its bfloat16 products are wrong.
"""

import importlib.util
import json
import sys
from functools import partial

import pytest
import torch

from megatron_cp.linear.kernels.fla import FlaConv, FlaRule
from tests.forked_commands import run_module
from tests.linear_oracle import conv_errors, rule_errors
from tests.shared import once, selected

if importlib.util.find_spec("fla") is None:  # whose import takes a second, of every process that collects
    pytest.skip("fla is not installed", allow_module_level=True)

RAGGED = [7, 1, 70, 0, 13]  # chunks have 64 tokens
ACROSS = [3, 150, 1, 9]  # of three ranks one holds nothing but the middle of a document
CASES = {
    "gdn": [  # few and of few heads, because the interpreter takes seconds for each
        {"lengths": [70, 0, 3], "groups": [0, 0, 1, 1], "dk": 16, "dv": 16},  # as fla shares key heads
        {"lengths": RAGGED, "groups": [0, 0, 1], "dk": 16, "dv": 32},
        {"lengths": RAGGED, "groups": [0, 1], "dk": 24, "dv": 8},
        {"lengths": [65], "groups": [0], "dk": 32, "dv": 16},
        {"lengths": [7, 70, 0, 0, 13], "groups": [0, 0], "dk": 16, "dv": 16, "fixed": True},
        {"lengths": [1, 2, 3], "groups": [0], "dk": 16, "dv": 16, "fixed": True},  # as many chunks as there may be
        {"lengths": ACROSS, "groups": [0, 0], "dk": 16, "dv": 8, "layout": "contiguous", "ranks": 2},
        {"lengths": ACROSS, "groups": [0, 0, 1], "dk": 16, "dv": 24, "layout": "contiguous", "ranks": 3},
        {"lengths": [140, 1, 5], "groups": [0, 0], "dk": 16, "dv": 16, "layout": "zigzag", "ranks": 2},
        {"lengths": [2], "groups": [0], "dk": 16, "dv": 16, "layout": "contiguous", "ranks": 2},
        {
            "lengths": [70, 5, 66, 3], "parents": [-1, 0, 0, 2], "groups": [0, 0], "dk": 16, "dv": 16,
            "layout": "contiguous", "ranks": 2,
        },
    ],
    "kda": [
        {"lengths": [1, 66], "groups": [0], "dk": 16, "dv": 8},
        {"lengths": [7, 66, 0], "groups": [0], "dk": 16, "dv": 8, "fixed": True},
        {"lengths": ACROSS, "groups": [0], "dk": 16, "dv": 8, "layout": "contiguous", "ranks": 2},
        {"lengths": [3, 40, 1, 9], "groups": [0], "dk": 16, "dv": 8, "layout": "contiguous", "ranks": 3},
        {"lengths": [13, 1, 5], "groups": [0, 0, 1], "dk": 16, "dv": 16, "layout": "zigzag", "ranks": 2},
        {
            "lengths": [30, 5, 9], "parents": [-1, 0, 0], "groups": [0], "dk": 16, "dv": 8, "layout": "contiguous",
            "ranks": 1,
        },
    ],
    "conv": [
        {"lengths": RAGGED, "channels": 24, "width": 4, "bias": True, "silu": True},
        {"lengths": RAGGED, "channels": 5, "width": 3, "bias": False, "silu": False},
        {"lengths": [1], "channels": 16, "width": 4, "bias": True, "silu": True},
        {"lengths": ACROSS, "channels": 12, "width": 4, "bias": True, "silu": True, "layout": "contiguous", "ranks": 3},
        {
            "lengths": [10, 2, 1, 6], "channels": 8, "width": 4, "bias": True, "silu": True, "layout": "zigzag",
            "ranks": 3,
        },
        {"lengths": [9], "channels": 8, "width": 2, "bias": False, "silu": False, "layout": "contiguous", "ranks": 3},
        {"lengths": [2], "channels": 8, "width": 5, "bias": True, "silu": True, "layout": "contiguous", "ranks": 2},
    ],
}  # fmt: skip


FEW, OTHERS = "0::3", "others"  # every third case, and those between


def cases_of(operation, which):
    return [case for number, case in enumerate(CASES[operation]) if (number % 3 == 0) == (which == FEW)]


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """Returns the errors of each case of an operation, by which cases they are; all of a kind in one process."""

    def run(which):
        return json.loads(
            run_module("tests.functional_tests.test_fla_kernels", which, TRITON_INTERPRET="1").splitlines()[-1]
        )

    chosen = selected(request, test_matches_the_oracle_forward_and_backward)
    kinds = sorted({case["which"] for case in chosen})
    return once(tmp_path_factory, "fla_kernels", lambda: {which: run(which) for which in kinds})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [FEW, pytest.param(OTHERS, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("operation", CASES)
def test_matches_the_oracle_forward_and_backward(operation, which, measured):
    for case, found in zip(cases_of(operation, which), measured[which][operation], strict=True):
        assert all(error <= 1e-5 for error in found.values()), (case, found)  # not max: NaN must fail


if __name__ == "__main__":
    from tools.triton_interpreter import interpret_triton

    interpret_triton()
    torch.use_deterministic_algorithms(True)  # which fills torch.empty with NaN
    (which,) = sys.argv[1:]
    errors = {}
    for operation in CASES:
        measure = partial(conv_errors, FlaConv()) if operation == "conv" else partial(rule_errors, FlaRule(), operation)
        for case in cases_of(operation, which):
            torch.manual_seed(0)
            errors.setdefault(operation, []).append(measure(**case))
    print(json.dumps(errors))
