"""Document isolation: a change in one document must not change a bit of any other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, Problem, draw, run_layer, whole


def leaks(case: Case, document: int, *, kind: str = "threads") -> dict[str, list[int]]:
    """Changes every input of one document and returns the other documents that changed, for each sharded tensor.

    An empty list for every tensor means isolation. The changed document itself must change, or nothing was tested.

    Raises:
        ArgumentError: documents that branch, of which a change may change others.
        AssertionError: the changed document's own output did not change.
    """
    case.packing.refuse_branches("case", case, "documents that share no tokens")
    before, after = (
        whole(case, run_ranks(run_layer, case.cp, case, problem, kind=kind))
        for problem in (draw(case), _changed(draw(case), case, document))
    )
    start, end = (int(edge) for edge in case.packing.cu_seqlens[document : document + 2])
    assert not torch.equal(before["out"][start:end], after["out"][start:end]), f"document {document} did not change"
    sharded = {"out", *(f"d_{name}" for name in draw(case).inputs)}
    per_token = {name: tensor for name, tensor in before.items() if name in sharded}
    return {name: _changed_documents(case, tensor, after[name], document) for name, tensor in per_token.items()}


def _changed(problem: Problem, case: Case, document: int) -> Problem:
    start, end = (int(edge) for edge in case.packing.cu_seqlens[document : document + 2])

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[start:end] = 3 - 2 * tensor[start:end]
        return tensor

    inputs = {name: moved(tensor) for name, tensor in problem.inputs.items()}
    return replace(problem, inputs=inputs, output_gradient=moved(problem.output_gradient))


def _changed_documents(case: Case, before: Tensor, after: Tensor, document: int) -> list[int]:
    edges = case.packing.cu_seqlens.tolist()
    return [
        other
        for other in range(case.packing.num_documents)
        if other != document
        and not torch.equal(before[edges[other] : edges[other + 1]], after[edges[other] : edges[other + 1]])
    ]
