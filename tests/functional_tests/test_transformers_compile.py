"""`torch.compile` of transformers' models over ranks: the same losses as without, and graphs that serve every pack.

An operation is no part of a graph. Dynamo breaks at its call, then at the call of the module that called it, and so on
outwards.
"""

import copy
import warnings
from functools import partial
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.limits import limit
from tests.transformers_cases import HYBRID, build, gradients_of

PACKS = ((37, 1, 60, 22), (5, 90, 9, 40), (64, 33))
TOLERANCE = 1e-9
SAID = "Skip inlining `torch.compiler.disable()`d function"


def losses(model, group, backend=None):
    """Returns each pack's loss, a gradient's norm, and the number of graphs so far."""
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
        norm = torch.stack([each.norm() for each in gradients_of(model).values()]).norm()
        found.append((loss.item(), norm.item(), counters["stats"]["unique_graphs"]))
    return found


class Compared(NamedTuple):
    """The worst difference, the number of graphs after each pack, the reasons why graphs broke, and warnings."""

    worst: float
    graphs: list[int]
    reasons: list[str]
    warnings: list[str]


def compared(group, name, changed, compiling):
    """A compiled model against the same one as it is; ranks that are not `compiling` run it as it is both times."""
    torch._dynamo.reset()
    counters.clear()
    model = build(name, **changed)
    expected = losses(model, group)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = losses(model, group, "eager" if group.rank in compiling else None)
    worst = max(abs(a - b) / abs(b) for ours, theirs in zip(found, expected, strict=True)
                for a, b in zip(ours[:2], theirs[:2], strict=True))  # fmt: skip
    reasons = sorted({reason.split("\n")[0] for reason in counters["graph_break"]})
    messages = [str(each.message) for each in said if "falling back" not in str(each.message)]
    return Compared(worst, [graphs for *_, graphs in found], reasons, messages)


@pytest.mark.parametrize(
    ("name", "changed", "more"),
    [
        ("Qwen3Next", HYBRID, []),
        pytest.param("StableLm", {}, ["Failed to trace builtin operator"], marks=pytest.mark.thorough),
    ],
)
def test_a_compiled_model_has_the_same_losses(name, changed, more):
    """A hybrid, and a class whose layers are made to hand the batch down; one rank compiles, which takes long."""
    run = partial(compared, name=name, changed=changed, compiling=(1,))
    compiled, other = run_ranks(run, 2, kind="processes", timeout=limit(240))[::-1]
    assert max(compiled.worst, other.worst) < TOLERANCE
    assert compiled.graphs[-1] == compiled.graphs[1] > 0  # the second pack has other sizes; later ones find their code
    assert compiled.reasons == [*more, SAID]
    assert compiled.warnings == other.warnings == []
    assert other.graphs[-1] == 0
