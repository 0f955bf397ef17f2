"""What the host does for a layer on CUDA, counted without one: no more calls, operators and launches than before."""

from __future__ import annotations

import pytest

from tools.host_counts import CASES, counts
from tools.nullgpu.device import UnavailableError

pytestmark = pytest.mark.slow

MARGIN = 1.05  # of calls of Python, which torch's own code has a share in
# Of forward and backward: calls of Python, operators of torch, launches of kernels. What a goal was set for:
GOALS = {
    "attention a2a": ((350, 40, 4), (350, 40, 4)),
    "gdn headwise": ((500, 60, 5), (500, 60, 11)),
}
HELD = {
    "attention a2a": ((295, 19, 4), (255, 20, 4)),
}


@pytest.fixture(scope="module")
def found():
    try:
        return counts()
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", CASES)
def test_the_host_does_no_more_than_before(found, name):
    for direction, (calls, operators, launches) in zip(("forward", "backward"), HELD[name], strict=True):
        here = found[name][direction]
        assert here["calls"] <= MARGIN * calls, direction
        assert here["operators"] <= operators, direction
        assert here["launches"] <= launches, direction
        assert min(here.values()) > 0


@pytest.mark.parametrize("name", GOALS)
def test_the_host_does_as_little_as_was_wanted(found, name):
    for direction, goal in zip(("forward", "backward"), GOALS[name], strict=True):
        here = found[name][direction]
        assert (here["calls"], here["operators"], here["launches"]) <= goal, direction
        assert all(x <= y for x, y in zip((here["calls"], here["operators"], here["launches"]), goal, strict=True))
