"""The examples run as their first lines say, on local threads and under torchrun; docs/trees.md quotes one."""

import pytest

from tests.commands import ROOT, run_python

EXAMPLES = sorted((ROOT / "examples").glob("*_without_megatron.py"))
COMPARED = {
    "attention_without_megatron": [f"step {number}, {what}" for number in range(3) for what in ("loss", "gradients")],
    "gated_delta_net_without_megatron": ["out", "gradient of qkv", "gradient of conv"],
}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}  # wherever this runs: two ranks need two devices or none


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(("ranks", "launcher"), [(4, ()), pytest.param(2, TORCHRUN, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, ranks, launcher):
    printed = run_python(*launcher, example, **ON_CPU).stdout
    assert f"over {ranks} ranks: 4 documents" in printed
    for name in COMPARED[example.stem]:
        assert f"{name}: {ranks} ranks and each document alone differ by at most" in printed


@pytest.mark.thorough
def test_grpo_on_trees():
    printed = run_python(EXAMPLES[0].parent / "grpo_on_trees.py", **ON_CPU).stdout
    assert "32 sequences of 2783 tokens in 37 segments of 864" in printed
    assert "trees and 32 documents alone differ by at most" in printed
