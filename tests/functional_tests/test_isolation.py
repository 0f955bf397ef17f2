"""A change in one document moves no bit of another, forward or backward."""

import pytest

from megatron_cp.testing.parity import Case, run_layer
from tests import isolation
from tests.isolation import leaks
from tests.random_tiles import TILED, assign_at_random


@pytest.mark.parametrize("document", [0, 1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.parametrize(
    ("layer", "scheme"),
    [("attention", "a2a"), *((layer, way) for layer in ("gdn", "kda", "mamba") for way in ("headwise", "chunkwise"))],
)
@pytest.mark.few(of=lambda layer, scheme, layout, document: ((layer, scheme), layout, document))
def test_documents_are_isolated(layer, scheme, layout, document):
    found = leaks(Case(layer, 3, (7, 1, 66, 64, 2), layout, scheme=scheme), document)
    assert found["out"] == []
    assert not any(found.values()), found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scheme", TILED)
@pytest.mark.few
def test_documents_are_isolated_whichever_rank_computes_a_tile(scheme, seed, monkeypatch):
    assign_at_random(monkeypatch, seed)
    for document in (1, 2):
        found = leaks(Case("attention", 4, (7, 1, 66, 64, 2), scheme=scheme, learned_sink=True), document)
        assert not any(found.values()), found


def test_a_leak_is_seen(monkeypatch):
    def leaky(group, case, problem):
        results = run_layer(group, case, problem)
        results["out"] += problem.inputs["q"].sum() * 1e-12
        return results

    monkeypatch.setattr(isolation, "run_layer", leaky)
    assert leaks(Case("attention", 2, (7, 3)), 0)["out"] == [1]
