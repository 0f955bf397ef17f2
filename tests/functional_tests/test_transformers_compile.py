"""`torch.compile` of transformers' models over ranks: the same losses as without, and graphs that serve every pack.

The suite compiles a hybrid on two ranks; `python -m tests.functional_tests.test_transformers_compile` all classes on
one rank and on two, and prints how often a graph breaks.
"""

import copy
import sys
import warnings

import pytest

pytest.importorskip("transformers")
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.transformers_cases import MODELS, build

PACKS = ((37, 1, 60, 22), (5, 90, 9, 40), (64, 33), (70, 2, 3, 3, 51))
SMALL = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
}  # fmt: skip
TOLERANCE = 1e-9


def losses(model, group, backend=None):
    """Of one pack after another, with a gradient's norm; and what is counted after the first packs."""
    model = copy.deepcopy(model)
    cp = enable_context_parallel(model, group, scheme="exact", linear_mode="headwise")
    called = model if backend is None else torch.compile(model, backend=backend)
    random, found = torch.Generator().manual_seed(1), []
    for lengths in PACKS:
        tokens = torch.randint(3, 97, (1, sum(lengths)), generator=random)
        batch = cp.shard({"input_ids": tokens, "labels": tokens, "lengths": list(lengths)})
        loss = called(**batch, num_items_in_batch=batch.num_items).loss
        model.zero_grad()
        loss.backward()
        norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
        found.append((loss.item(), norm.item(), counters["stats"]["unique_graphs"]))
    return found


def compared(group, name, backend, changed):
    """The worst difference, graphs after each pack, and why and how often a graph broke."""
    torch._dynamo.reset()
    counters.clear()
    model = build(name, **changed)
    expected = losses(model, group)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = losses(model, group, backend)
    worst = max(abs(a - b) / abs(b) for ours, theirs in zip(found, expected, strict=True)
                for a, b in zip(ours[:2], theirs[:2], strict=True))  # fmt: skip
    breaks = {reason.split("\n")[0]: count for reason, count in counters["graph_break"].items()}
    complaints = [str(each.message) for each in said if "falling back" not in str(each.message)]
    return worst, [graphs for _, _, graphs in found], breaks, complaints


@pytest.mark.slow
def test_a_compiled_hybrid_has_the_same_losses():
    found = run_ranks(compared, 2, "Qwen3Next", "eager", SMALL, kind="processes", timeout=240)
    for worst, graphs, breaks, complaints in found:
        assert worst < TOLERANCE
        assert graphs[-1] == graphs[1] > 0  # the second pack has other sizes; later ones find their code
        assert list(breaks) == ["Skip inlining `torch.compiler.disable()`d function"]
        assert complaints == []


def _table():
    print("| class | ranks | worst of loss and gradient norm | graphs | breaks |\n|---|--:|--:|--:|--:|")
    for name in sys.argv[1:] or MODELS:
        for ranks in (1, 2):
            worst, graphs, breaks, _ = run_ranks(
                compared, ranks, name, "aot_eager", {}, kind="processes", timeout=None
            )[0]
            print(f"| {name} | {ranks} | {worst:.0e} | {graphs[-1]} | {breaks} |", flush=True)


if __name__ == "__main__":
    _table()
