"""flash-linear-attention's own kernels behind our interface, on the CPU: Triton's interpreter runs them in a process
of its own, since it changes Triton for good. float32, because its bfloat16 products are wrong."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import LinearCall
from megatron_cp.linear.kernels.fla import FlaGatedDelta
from megatron_cp.linear.kernels.reference import ReferenceGatedDelta

pytest.importorskip("fla")

RAGGED = [7, 1, 70, 0, 13]  # chunks have 64 tokens
CASES = {
    "rule": [
        {"lengths": RAGGED, "groups": [0, 0, 1, 1], "head_dim": 16, "value_head_dim": 16},  # as fla shares key heads
        {"lengths": RAGGED, "groups": [0, 0, 0, 1], "head_dim": 16, "value_head_dim": 32},
        {"lengths": RAGGED, "groups": [0, 1, 1], "head_dim": 24, "value_head_dim": 8},
        {"lengths": [65], "groups": [0, 1], "head_dim": 32, "value_head_dim": 16},
    ],
    "conv": [
        {"lengths": RAGGED, "channels": 24, "width": 4, "bias": True},
        {"lengths": RAGGED, "channels": 5, "width": 3, "bias": False},
        {"lengths": [1], "channels": 16, "width": 4, "bias": True},
    ],
}


@pytest.mark.parametrize("operation", CASES)
def test_matches_the_reference_forward_and_backward(operation):
    done = subprocess.run(
        [sys.executable, __file__, operation],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,  # stderr is left to pytest, which shows it on failure
        timeout=120,
        check=True,
    )
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measured) == len(CASES[operation])
    for case, errors in zip(CASES[operation], measured, strict=True):
        assert all(error <= 1e-5 for error in errors.values()), (case, errors)  # not max: NaN must fail


def _rule_errors(lengths, groups, head_dim, value_head_dim):
    tokens, heads, key_heads = sum(lengths), len(groups), max(groups) + 1
    inputs = {
        "q": torch.nn.functional.normalize(torch.randn(tokens, key_heads, head_dim), dim=-1),
        "k": torch.nn.functional.normalize(torch.randn(tokens, key_heads, head_dim), dim=-1),
        "v": torch.randn(tokens, heads, value_head_dim),
        "g": torch.nn.functional.logsigmoid(torch.randn(tokens, heads)),
        "beta": torch.rand(tokens, heads),
    }
    return _errors(lambda kernel, call, **x: kernel.rule(**x, groups=groups, scale=0.3, call=call), lengths, inputs)


def _conv_errors(lengths, channels, width, bias):
    inputs = {"x": torch.randn(sum(lengths), channels), "weight": torch.randn(channels, width)}
    if bias:
        inputs["bias"] = torch.randn(channels)
    return _errors(
        lambda kernel, call, **x: kernel.conv(x.pop("x"), x.pop("weight"), x.get("bias"), call), lengths, inputs
    )


def _errors(function, lengths, inputs):
    """The largest error of the output and of each gradient over the largest entry, which counts as 1e-3 at least."""
    results = []
    for kernel, dtype in ((FlaGatedDelta(), torch.float32), (ReferenceGatedDelta(), torch.float64)):
        call = LinearCall(Packing(lengths), dtype, torch.device("cpu"), head_dim=16)
        own = {name: _strided(x.to(dtype)).requires_grad_() for name, x in inputs.items()}
        out = function(kernel, call, **own)
        out.backward(torch.linspace(-1, 2, out.numel(), dtype=dtype).view(out.shape).cos())
        results.append({"out": out.detach(), **{name: x.grad for name, x in own.items()}})
    got, expected = results
    return {
        name: float((got[name] - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        for name, exact in expected.items()
    }


def _strided(x):
    """A copy that lies in memory as slices of an exchange buffer do: not densely."""
    return torch.stack([x, x], -1)[..., 0]


if __name__ == "__main__":
    from megatron_cp.testing.triton_interpreter import interpret_triton

    interpret_triton()
    torch.use_deterministic_algorithms(True)  # which fills torch.empty with NaN
    measure = {"rule": _rule_errors, "conv": _conv_errors}[sys.argv[1]]
    for case in CASES[sys.argv[1]]:
        torch.manual_seed(0)
        print(json.dumps(measure(**case)))
