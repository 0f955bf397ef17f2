"""Tests of the host's work for a layer on CUDA, counted without one: calls, operators and launches do not grow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.commands import ROOT
from tests.limits import limit
from tools.host_counts import CASES

MARGIN = 1.05  # of calls of Python, which torch's own code has a share in
HELD = {
    "attention a2a": ((305, 21, 4), (222, 22, 4)), "attention p2p": ((185, 53, 15), (213, 67, 7)),
    "attention all_gather": ((246, 60, 6), (325, 138, 28)), "attention exact": ((260, 60, 6), (339, 138, 28)),
    "attention a2a, 2 chunks": ((507, 40, 7), (405, 41, 7)), "attention a2a, contiguous": ((270, 21, 2), (187, 22, 2)),
    "attention a2a+p2p": ((390, 70, 19), (379, 85, 11)), "gdn headwise": ((412, 33, 5), (260, 39, 11)),
    "gdn chunkwise": ((421, 66, 8), (271, 74, 13)), "kda headwise": ((423, 36, 5), (266, 47, 16)),
    "kda chunkwise": ((427, 66, 8), (275, 75, 13)), "mamba headwise": ((433, 44, 11), (274, 57, 27)),
    "mamba chunkwise": ((431, 73, 16), (279, 82, 25)), "conv1d headwise": ((495, 20, 4), (185, 20, 6)),
    "conv1d chunkwise": ((516, 25, 3), (121, 24, 4)),
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tools.host_counts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(300), check=False)
    reason = [line for line in done.stderr.splitlines() if line.startswith("host_counts: ")]
    if done.returncode == 2 and reason:  # there is no emulated device; other errors fail
        pytest.skip(reason[0])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_host_does_no_more_than_before(found, name):
    for direction, (calls, operators, launches) in zip(("forward", "backward"), HELD[name], strict=True):
        here = found[name][direction]
        assert here["calls"] <= MARGIN * calls, direction
        assert here["operators"] <= operators, direction
        assert here["launches"] <= launches, direction
        assert min(here.values()) > 0
