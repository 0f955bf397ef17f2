"""`torch.compile` of transformers' models over ranks: the same losses as without, and graphs that serve every pack.

The suite compiles a hybrid on two ranks; `python -m tests.functional_tests.test_transformers_compile` all classes on
one rank and on two, and prints how often a graph breaks.

An operation is no part of a graph. Dynamo breaks at its call, then at the call of the module that called it, and so on
outwards; with `torch._dynamo.config.nested_graph_breaks`, an experiment of torch, mostly at the operation alone.
"""

import copy
import platform
import sys
import warnings
from functools import partial
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")
import torch
import torch._dynamo
import transformers
from torch._dynamo.utils import counters

from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.transformers import enable_context_parallel
from megatron_cp.transformers.attention import SLOT
from tests.limits import limit
from tests.transformers_cases import MODELS, build

PACKS = ((37, 1, 60, 22), (5, 90, 9, 40), (64, 33))
SMALL = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
}  # fmt: skip
TOLERANCE = 1e-9
SAID = "Skip inlining `torch.compiler.disable()`d function"


def losses(model, group, backend=None):
    """Returns each pack's loss, a gradient's norm, and graphs and breaks so far; and the number of operations."""
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
        broken = sum(counters["graph_break"].values())
        found.append((loss.item(), norm.item(), counters["stats"]["unique_graphs"], broken))
    return found, sum(SLOT in vars(module) for module in model.modules())


class Compared(NamedTuple):
    """The worst difference, graphs and breaks after each pack, how many operations, why graphs broke, warnings."""

    worst: float
    graphs: list[int]
    breaks: list[int]
    operations: int
    reasons: list[str]
    complaints: list[str]


def compared(group, name, backend, changed, nested=False, compiling=(0, 1)):
    """A compiled model against the same one as it is; ranks that are not `compiling` run it as it is both times."""
    torch._dynamo.reset()
    torch._dynamo.config.nested_graph_breaks = nested
    counters.clear()
    model = build(name, **changed)
    expected, _ = losses(model, group)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, operations = losses(model, group, backend if group.rank in compiling else None)
    worst = max(abs(a - b) / abs(b) for ours, theirs in zip(found, expected, strict=True)
                for a, b in zip(ours[:2], theirs[:2], strict=True))  # fmt: skip
    reasons = sorted({reason.split("\n")[0] for reason in counters["graph_break"]})
    complaints = [str(each.message) for each in said if "falling back" not in str(each.message)]
    _, _, graphs, breaks = map(list, zip(*found, strict=True))
    return Compared(worst, graphs, breaks, operations, reasons, complaints)


@pytest.mark.parametrize(
    ("name", "changed", "more"),
    [
        ("Qwen3Next", SMALL, []),
        pytest.param("StableLm", {}, ["Failed to trace builtin operator"], marks=pytest.mark.thorough),
    ],
)
def test_a_compiled_model_has_the_same_losses(name, changed, more):
    """A hybrid, and a class whose layers are made to hand the batch down; one rank compiles, which takes long."""
    run = partial(compared, name=name, backend="eager", changed=changed, compiling=(1,))
    compiled, other = run_ranks(run, 2, kind="processes", timeout=limit(240))[::-1]
    assert max(compiled.worst, other.worst) < TOLERANCE
    assert compiled.graphs[-1] == compiled.graphs[1] > 0  # the second pack has other sizes; later ones find their code
    assert compiled.reasons == [*more, SAID]
    assert compiled.complaints == other.complaints == []
    assert other.graphs[-1] == 0


def _table():
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}\n")
    print("| class | operations | ranks | worst of loss and gradient norm | graphs after each pack | breaks of the "
          "first pack | nested: breaks | nested: graphs | warnings | other reasons |")  # fmt: skip
    print(f"|---{8 * '|--:'}|---|")
    for name in sys.argv[1:] or MODELS:
        nested = _nested(name)
        for ranks in (1, 2):
            found = _of(name, ranks, "aot_eager", False)
            worst, graphs = f"{found.worst:.0e}", ", ".join(map(str, found.graphs))
            others = {*found.reasons, *(nested.reasons if nested else [])} - {SAID}
            ahead = f"| {name} | {found.operations} | {ranks} | {worst} | {graphs} | {found.breaks[0]} "
            again = f"| {nested.breaks[0]} | {nested.graphs[-1]} " if nested else "| fails in torch | "
            print(f"{ahead}{again}| {len(found.complaints)} | {'; '.join(sorted(others))} |", flush=True)


def _nested(name):
    """Compares with torch's experiment; None if it fails."""
    try:
        found = _of(name, 1, "eager", True)
    except RankError as error:
        print(f"{name}: {str(error).splitlines()[-1]}", file=sys.stderr, flush=True)
        return None
    assert found.worst < TOLERANCE
    return found


def _of(name, ranks, backend, nested):
    return run_ranks(compared, ranks, name, backend, {}, nested, kind="processes", timeout=None)[0]


if __name__ == "__main__":
    _table()
