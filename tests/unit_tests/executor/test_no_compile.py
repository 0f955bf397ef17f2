"""Public operations, and the backward of every autograd function, are marked so that no compiler traces them."""

import ast
from pathlib import Path

import pytest

import megatron_cp as cp

HOUSE = Path(cp.__file__).parent
OPERATIONS = (
    "attention", "projected_attention", "gated_delta_rule", "gated_delta_net", "kda", "kda_mixer", "gdn2", "gdn2_mixer",
    "gated_delta_product", "gated_delta_product_mixer", "mamba2", "mamba2_mixer", "causal_conv1d", "gather", "relayout",
    "shard_batch", "token_loss", "reduce_gradients", "merge", "held_attention",
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_not_compiled(name):
    operation = getattr(cp, name)
    assert operation._torchdynamo_disable
    assert "exchange tensors between ranks" in operation._torchdynamo_disable_msg


def test_the_backward_of_every_autograd_function_is_not_compiled():
    found = {
        f"{path.relative_to(HOUSE)}: {function.name}": {ast.unparse(mark) for mark in backward.decorator_list}
        for path in HOUSE.rglob("*.py")
        if path.relative_to(HOUSE).parts[0] != "apps"  # which nobody compiles
        if "torch.autograd.Function" in (source := path.read_text())
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, function.bases)
        for backward in function.body
        if isinstance(backward, ast.FunctionDef) and backward.name == "backward"
    }
    assert len(found) > 15
    assert [name for name, marks in found.items() if not marks & {"no_compile", "no_compile_backward"}] == []
