"""Documents that branch: every layer gives each root-to-leaf path what it gives that document alone."""

import pytest
import torch

from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, Problem, draw, run_layer, whole


def paths(packing):
    """Returns the stream's tokens of each root-to-leaf path, found from predecessors alone."""
    branches = packing.branches
    inner = set(branches.parents.tolist())
    found = []
    for leaf in range(branches.lengths.size):
        if leaf not in inner:
            segment, tokens = leaf, []
            while segment >= 0:
                start = int(branches.lengths[:segment].sum())
                tokens = [*range(start, start + int(branches.lengths[segment])), *tokens]
                segment = int(branches.parents[segment])
            found.append(tokens)
    return found


def documents_alone(case):
    """Runs each path as a document of its own on one rank; a shared token's output gradient counts in one of them."""
    problem, packing = draw(case), case.packing
    out, gradients, done = torch.zeros_like(problem.output_gradient), {}, set()
    for tokens in paths(packing):
        if not tokens:
            continue
        alone = Case(
            **{
                **case.__dict__,
                "lengths": (len(tokens),),
                "parents": None,
                "cp": 1,
                "layout": "contiguous",
                "scheme": "p2p" if case.layer == "attention" else "headwise",
                "head_chunks": None,
            }
        )
        gradient = problem.output_gradient[tokens].clone()
        gradient[[place for place, token in enumerate(tokens) if token in done]] = 0
        inputs = {name: x[tokens] for name, x in problem.inputs.items()}
        results = run_layer(ThreadGroup.create(1)[0], alone, Problem(inputs, problem.parameters, gradient))
        for name, value in results.items():
            if name == "out":
                out[tokens] = value
            elif name.removeprefix("d_") in problem.inputs:
                gradients.setdefault(name, torch.zeros_like(problem.inputs[name.removeprefix("d_")]))[tokens] += value
            else:
                gradients[name] = gradients.get(name, 0) + value
        done |= set(tokens)
    return {"out": out, **gradients}


def error(case):
    found = whole(case, run_ranks(lambda group: run_layer(group, case), case.cp))
    exact = documents_alone(case)
    assert found.keys() == exact.keys()
    return max(
        float((found[name] - exact[name]).abs().max() / exact[name].abs().max().clamp(min=1e-3)) for name in exact
    )


FORESTS = {
    "star": ([7, 3, 5, 1, 4], [-1, 0, 0, 0, 0]),
    "deep": ([3, 2, 2, 1, 4, 6, 2, 5], [-1, 0, 1, 2, 2, 1, -1, 6]),
    "two, and empty segments": ([0, 4, 3, 0, 5, 1, 9, 2], [-1, 0, 1, 1, 3, 3, -1, 6]),
}


@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("layer", ["attention", "gdn", "kda", "mamba", "conv1d"])
def test_layers_equal_each_document_alone(layer, name):
    lengths, parents = FORESTS[name]
    rest = {
        "lengths": tuple(lengths),
        "parents": tuple(parents),
        "heads": 4,
        "groups": 2,
        "head_dim": 4,
        "value_head_dim": 4,
        "layer": layer,
    }
    schemes = ["p2p", "a2a", "all_gather", "exact", "tiled"] if layer == "attention" else ["headwise", "chunkwise"]
    for scheme in schemes:
        for cp, layout in ((1, "contiguous"), (3, "zigzag"), (2, "balanced"), (5, "random")):
            assert error(Case(cp=cp, layout=layout, scheme=scheme, **rest)) < 1e-12, (scheme, cp, layout)
