"""Limits follow the machine, and are limits."""

import math

from tests import limits


def test_limits_grow_with_the_time_that_ranks_take_to_start(monkeypatch):
    for start_up, expected in ((0.1, 20), (limits.IDLE, 20), (3 * limits.IDLE, 60)):
        monkeypatch.setattr(limits, "start_up", lambda seconds=start_up: seconds)
        assert math.isclose(limits.limit(20), expected)
    assert 0.2 < limits.start_up() < 240
    assert limits.start_up() == limits.start_up()
