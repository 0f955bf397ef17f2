"""The covering arrays that other tests draw their cases from."""

import itertools

from tests.covering import covering

AXES = ("abc", range(5), [True, False], ["x", "y", "z"])


def test_every_pair_that_may_meet_does_in_few_cases():
    found = covering(*AXES)
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES), 2):
        for pair in itertools.product(first, second):
            assert any((case[i], case[j]) == pair for case in found), (i, j, pair)
    assert len(found) == len(set(found)) <= 20 < 3 * 5 * 2 * 3
    found = covering(*AXES, allowed=lambda letter, number, flag, other: not (letter == "a" and number > 2))
    assert not any(case[0] == "a" and case[1] > 2 for case in found)
    assert {case[1] for case in found if case[0] == "a"} == {0, 1, 2}
    assert {case[1] for case in found if case[0] == "b"} == set(range(5))
