"""A group that counts what goes through it."""

from collections import Counter

from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.groups import Pending, RankGroup
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.parity import draw, run_linear


class CountingGroup(RankGroup):
    """Counts what goes through another group, and the bytes that this rank sends to the others.

    Attributes:
        calls: what was started, by the method's name.
        bytes_sent: to other ranks.
        under_way: what was started and is not awaited yet.
    """

    def __init__(self, inner: RankGroup) -> None:
        self.inner, self.rank, self.size, self.agreed = inner, inner.rank, inner.size, inner.agreed
        self.calls: Counter[str] = Counter()
        self.bytes_sent = self.under_way = 0

    def start_all_to_all(self, received, sent, received_splits, sent_splits, split_counts=None):
        self.calls["all_to_all"] += 1
        self.bytes_sent += (sum(sent_splits) - sent_splits[self.rank]) * sent.itemsize
        return _Counted(self, self.inner.start_all_to_all(received, sent, received_splits, sent_splits))

    def start_all_gather(self, received, sent):
        self.calls["all_gather"] += 1
        self.bytes_sent += (self.size - 1) * sent.nbytes
        return _Counted(self, self.inner.start_all_gather(received, sent))

    def start_messages(self, sends, receives):
        self.calls["messages"] += 1
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        return _Counted(self, self.inner.start_messages(sends, receives))

    def barrier(self):
        self.calls["barrier"] += 1
        self.inner.barrier()


class _Counted(Pending):
    def __init__(self, group, pending):
        self.group, self.pending = group, pending
        group.under_way += 1

    def wait(self):
        self.pending.wait()
        self.group.under_way -= 1


class Diary(CountingGroup):
    """Writes down when exchanges start and are awaited.

    Attributes:
        events: what happened, in order; others may write into it too.
    """

    def __init__(self, inner: RankGroup) -> None:
        super().__init__(inner)
        self.events: list[str] = []

    def start_all_to_all(self, *args):
        self.events.append("start")
        return _Noted(super().start_all_to_all(*args), self.events)


class _Noted(Pending):
    def __init__(self, pending, events):
        self.pending, self.events = pending, events

    def wait(self):
        self.events.append("wait")
        self.pending.wait()


def bytes_of_layer(group, case):
    """Returns the bytes that this rank's operation of a parity case sends to others, forward and backward."""
    compare_calls(group, False)  # what a plan costs once is not part of it
    counting, problem, plan = CountingGroup(group), draw(case), case.plan()
    inputs = {name: plan.layout.shard(x, group.rank).requires_grad_() for name, x in problem.inputs.items()}
    if case.layer == "attention":
        out = attention(*inputs.values(), plan, counting)
    else:
        out = run_linear(counting, case, plan, inputs, problem.parameters)
    forward = counting.bytes_sent
    out.backward(plan.layout.shard(problem.output_gradient, group.rank))
    return forward, counting.bytes_sent - forward
