"""Values that an object keeps: one for each function and its arguments."""

from megatron_cp.layout.memo import Memo, remembered


class Kept(Memo):
    def __init__(self, start):
        self.start, self.calls = start, 0


@remembered
def total(kept, number, *, more=0):
    kept.calls += 1
    return kept.start + number + more


def of_another_module(kept, number):
    return -1


of_another_module.__module__, of_another_module.__qualname__ = "another", "total"


def test_a_value_is_made_once_for_each_object_function_and_arguments():
    kept, other = Kept(10), Kept(20)
    for _ in range(2):
        assert (total(kept, 1), total(kept, 2), total(kept, 1, more=5)) == (11, 12, 16)
        assert total(other, 1) == 21
        assert remembered(of_another_module)(kept, 1) == -1
    assert (kept.calls, other.calls) == (3, 1)
