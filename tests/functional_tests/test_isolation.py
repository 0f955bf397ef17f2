"""`leaks` sees whether a change in one document moves a bit of another; `test_nan.py` has NaN in every operation."""

import pytest

from megatron_cp.testing.parity import Case, run_layer
from tests import isolation
from tests.isolation import leaks


@pytest.mark.parametrize(
    ("layer", "scheme", "layout"),
    [("attention", "a2a", "zigzag"), ("attention", "exact", "random"), ("gdn", "chunkwise", "random"),
     ("kda", "headwise", "zigzag"), ("mamba", "chunkwise", "contiguous")],
)  # fmt: skip
def test_documents_are_isolated(layer, scheme, layout):
    for document in (1, 2):
        found = leaks(Case(layer, 3, (7, 1, 66, 64, 2), layout, scheme=scheme), document)
        assert not any(found.values()), found


def test_a_leak_is_seen(monkeypatch):
    def leaky(group, case, problem):
        results = run_layer(group, case, problem)
        results["out"] += problem.inputs["q"].sum() * 1e-12
        return results

    monkeypatch.setattr(isolation, "run_layer", leaky)
    assert leaks(Case("attention", 2, (7, 3)), 0)["out"] == [1]
