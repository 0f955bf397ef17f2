"""`Pairwise`: disjoint pairs of ranks exchange messages, round by round.

    start   copies the rank's piece for itself, and starts the first rounds
    wait    starts each further round when the oldest is done

In each round a rank receives from one other rank, so that no rank receives from all others at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, Wire, empty_message, keep_own
from megatron_cp.plan.transport import Transport, num_rounds, round_robin_peer

ROUNDS_IN_FLIGHT = 4  # enough that a slow pair does not delay others; more would congest one link again


class Pairwise(Wire):
    """A round robin: in each round a rank exchanges messages with one other rank, and with each rank once.

    Args:
        rounds_in_flight: number of rounds that are started before the first is waited for.
    """

    def __init__(self, group: RankGroup, transport: Transport, *, rounds_in_flight: int = ROUNDS_IN_FLIGHT) -> None:
        self.group, self.buffers = group, group.buffers
        self._rounds_in_flight = rounds_in_flight

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        return self._start_rounds(received.split(received_splits), sent.split(sent_splits))

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self._start_rounds(received.split([sent.numel()] * self.group.size), [sent] * self.group.size)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self.group.start_messages(sends, receives)

    def _start_rounds(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Pending:
        rank, size = self.group.rank, self.group.size
        keep_own(incoming[rank], outgoing[rank])
        rounds = []
        for number in range(num_rounds(size)):
            peer = round_robin_peer(rank, size, number)
            if peer is None:
                rounds.append((empty_message(outgoing[rank], rank), empty_message(incoming[rank], rank)))
            else:
                rounds.append((Message(outgoing[peer], peer), Message(incoming[peer], peer)))
        return _Rounds(self.group, rounds, self._rounds_in_flight)


class _Rounds(Pending):
    """Rounds of one message in each direction, several rounds at a time."""

    def __init__(self, group: RankGroup, rounds: Sequence[tuple[Message, Message]], in_flight: int) -> None:
        self._group, self._ahead, self._activity = group, deque(rounds), group.activity
        self._under_way: deque[Pending] = deque()
        for _ in range(min(in_flight, len(rounds))):
            self._start_next()

    def _start_next(self) -> None:
        sent, received = self._ahead.popleft()
        self._group.activity = self._activity  # other operations may have been started meanwhile
        self._under_way.append(self._group.start_messages([sent], [received]))

    def wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()
            if self._ahead:
                self._start_next()
