"""A recurrence over segments as a differentiable step: local maps, one exchange of them, a fold, and the outputs.

    forward     (E, M) of own segments -> exchange -> S_in of each waiting segment, in document order -> outputs
    backward    (R, M^T) likewise -> exchange -> dS_out of each segment, against document order -> gradients

Shapes: `n` segments that leave a map, `m` those of them that also wait, `h` heads, state `[K, V]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.communicator import Communicator, direction, over
from megatron_cp.executor.groups import Pending, RankGroup
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.recurrence import Scan


class LocalScan(ABC):
    """The local work of a recurrence on one rank's segments, in the order of its rows.

    Methods are pure functions of tensors, and `scan` makes them differentiable. In forward a segment *waits* for a
    state if its document began before it (`OwnSegments.past`), and *leaves* a map if the document goes on (`future`);
    in backward it is the other way round. States and maps are in at least float32.
    """

    @abstractmethod
    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        """Computes the maps: E `[n, h, K, V]` of segments with a future, M `[m, h, ...]` of those with a past, too.

        The third value is passed on to `meanwhile` and `finish`, so that they need not compute it again.
        """

    def meanwhile(self, tensors: Sequence[Tensor], begun: Any) -> Any:
        """Computes, while maps travel, all that does not need the states of waiting segments."""
        return begun

    @abstractmethod
    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the outputs, given the states before the segments with a past, and tensors to save for backward."""

    @abstractmethod
    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        """Computes R `[.., h, K, V]` of segments with a past: the gradient of the state before each, from it alone.

        The second value is passed on to `meanwhile_backward` and `finish_backward`.
        """

    def meanwhile_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor) -> Any:
        """Computes, while maps travel, all that does not need the gradients of states."""
        return begun

    @abstractmethod
    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        """Returns the gradients of `tensors`, given those of the states after the segments with a future."""


def scan(step: Scan, comm: RankGroup | Communicator, local: LocalScan, *tensors: Tensor) -> Tensor:
    """Runs a recurrence over all ranks of `group`; differentiable.

    Args:
        step: the segments of all ranks, in document order.
        comm: the ranks of the layout, and the transport between them.
        tensors: the inputs of `local`. On a rank without tokens they, and the output, have no elements.
    """
    return _ScanFunction.apply(step, over(comm), local, *tensors)


def continued_scan(
    step: Scan, comm: RankGroup | Communicator, local: LocalScan, initial: Tensor, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs a recurrence from given states, without gradients.

    Returns:
        The outputs, and `[documents, h, K, V]` the states after the documents.
    """
    out, _, _, final = _forward(step, over(comm), local, tensors, initial)
    assert final is not None
    return out, final


def _forward(
    step: Scan, comm: Communicator, local: LocalScan, tensors: Sequence[Tensor], initial: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None]:
    with comm.traced("scan leave", forward=True) if profiling() else NO_RANGE:
        empty, transitions, begun = local.leave(tensors)
    maps = _Maps(step, comm, empty, transitions, forward=True, initial=initial)
    with comm.traced("scan meanwhile", forward=True) if profiling() else NO_RANGE:
        begun = local.meanwhile(tensors, begun)
    states = maps.fold()
    with comm.traced("scan finish", forward=True) if profiling() else NO_RANGE:
        out, kept = local.finish(tensors, begun, states)
    return out, kept, transitions, maps.final


class _ScanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Scan, comm: Communicator, local: LocalScan, *tensors: Tensor) -> Tensor:
        out, kept, transitions, _ = _forward(step, comm, local, tensors, None)
        ctx.scan = (step, comm, local, len(tensors))
        ctx.save_for_backward(*tensors, *kept, transitions)
        return out

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step, comm, local, count = ctx.scan
        *saved, transitions = ctx.saved_tensors
        tensors, kept = saved[:count], saved[count:]
        with comm.traced("scan leave", forward=False) if profiling() else NO_RANGE:
            wanted, begun = local.leave_backward(tensors, kept, gradients[0])
        maps = _Maps(step, comm, wanted, transitions, forward=False)
        with comm.traced("scan meanwhile", forward=False) if profiling() else NO_RANGE:
            begun = local.meanwhile_backward(tensors, kept, begun, gradients[0])
        states = maps.fold()
        with comm.traced("scan finish", forward=False) if profiling() else NO_RANGE:
            return None, None, None, *local.finish_backward(tensors, kept, begun, gradients[0], states)


class _Maps:
    """Exchanges the maps of one direction and folds them.

    Args:
        constants: E or R of own segments that leave a map, in the order of the rows.
        transitions: M of own segments that both wait and leave, in the order of the rows; transposed in backward.
        initial: `[documents, h, K, V]` the states before the documents; None for zero.

    Attributes:
        final: the states after the documents, after `fold`, if there are initial ones.
    """

    def __init__(
        self, step: Scan, comm: Communicator, constants: Tensor, transitions: Tensor, *, forward: bool,
        initial: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.step, self.comm, self.forward = step, comm, forward
        self.final = None if initial is None else initial.clone()  # that of a document without tokens stays
        self.segments = step.segments
        self.local = self.segments.local(comm.rank)
        leaving, waiting = (ids(forward=forward) for ids in (self.local.leaving, self.local.waiting))
        local_transitions = dict(
            zip(self.local.ids[self.local.past & self.local.future].tolist(), transitions, strict=True)
        )
        self.maps: dict[int, tuple[Tensor, Tensor | None]] = {
            number: (constant, local_transitions.get(number))
            for number, constant in zip(self.local.ids[leaving].tolist(), constants, strict=True)
        }
        self.slots = {number: slot for slot, number in enumerate(self.local.ids[waiting].tolist())}
        self.like = constants
        self.under_way: tuple[Pending, Tensor, Tensor] | None = None  # and what is sent and received
        if step.crosses:
            with comm.traced("scan send", forward=forward) if profiling() else NO_RANGE:
                self.under_way = self._start()

    def _start(self) -> tuple[Pending, Tensor, Tensor]:
        size, forward, activity = self.comm.size, self.forward, f"maps of segments, {direction(forward=self.forward)}"
        if self.step.gathers:
            share = self.step.share(forward=forward)
            own = self.step.leaving(self.comm.rank, forward=forward).tolist()
            parts = [part.reshape(-1) for number in own for part in self.maps[number] if part is not None]
            sent = self.comm.buffers.acquire_like(self.like, share)
            received = self.comm.acquire_like(self.like, share * size)
            if parts:
                torch.cat(parts, out=sent[: sum(part.numel() for part in parts)])
            return self.comm.start_all_gather(received, sent, activity), sent, received
        messages = [
            part.reshape(-1)
            for target in range(size)
            for number in self.segments.sent(self.comm.rank, target, forward=forward).tolist()
            for part in self.maps[number]
            if part is not None
        ]
        split_counts = self.step.split_counts(forward=forward)
        sent = self.comm.buffers.acquire_like(self.like, sum(split_counts.sent_by(self.comm.rank)))
        received = self.comm.acquire_like(self.like, sum(split_counts.received_by(self.comm.rank)))
        if messages:
            torch.cat(messages, out=sent)
        return self.comm.start_all_to_all(received, sent, split_counts, activity), sent, received

    def fold(self) -> Tensor:
        """Waits for the maps and composes them; call it once.

        Returns the state before each waiting segment; in backward, the gradient of the state after it.
        """
        if self.under_way is not None:
            with self.comm.traced("scan wait", forward=self.forward) if profiling() else NO_RANGE:
                self.under_way[0].wait()
        with self.comm.traced("scan fold", forward=self.forward) if profiling() else NO_RANGE:
            return self._folded()

    def _folded(self) -> Tensor:
        step = self.step
        if self.under_way is not None:
            self._sort_arrivals(self.under_way[2])
        states = self.like.new_zeros(len(self.slots), step.heads, step.key_dim, step.value_dim)
        needed, parents = self.segments.needed(self.comm.rank, forward=self.forward), self.segments.parent
        if self.forward:
            self._fold_states(states, needed.tolist(), parents)
        else:
            self._fold_gradients(states, needed[::-1].tolist(), parents)
        if self.under_way is not None:
            self.comm.release(*self.under_way[1:])  # maps that arrived are views of what was received
        return states

    def _fold_states(self, states: Tensor, order: list[int], parents: IntArray) -> None:
        children: dict[int, list[int]] = {}
        for number in self.slots:
            children.setdefault(int(parents[number]), []).append(number)
        last_use = {int(parents[number]): number for number in order}
        after: dict[int, Tensor] = {}
        if self.final is not None:
            after = {-1 - document: state for document, state in enumerate(self.final.clone())}
            for parent in children.keys() & after.keys():
                for child in children[parent]:
                    states[self.slots[child]] = after[parent]
        for number in order:
            constant, transition = self.maps[number]
            parent = int(parents[number])
            if transition is not None:  # a document's first segment has none, unless documents are continued
                constant = _applied(transition, after[parent], transpose=False) + constant
                if last_use[parent] == number:
                    del after[parent]
            for child in children.get(number, []):
                states[self.slots[child]] = constant
            if number in last_use:
                after[number] = constant
            elif self.final is not None:
                self.final[self.segments.document[number]] = constant

    def _fold_gradients(self, states: Tensor, order: list[int], parents: IntArray) -> None:
        after: dict[int, Tensor] = {}  # the gradient of the state after a segment: a sum over those that continue it
        for number in order:
            constant, transition = self.maps[number]
            if transition is not None:  # a document's last segment has none
                constant = _applied(transition, after.pop(number), transpose=True) + constant
            parent = int(parents[number])
            after[parent] = after[parent] + constant if parent in after else constant
            if parent in self.slots:
                states[self.slots[parent]] = after[parent]

    def _sort_arrivals(self, received: Tensor) -> None:
        step, at, rank = self.step, 0, self.comm.rank
        for source in range(self.comm.size):
            if step.gathers:
                at = source * step.share(forward=self.forward)
                numbers = step.leaving(source, forward=self.forward) if source != rank else ()
            else:
                numbers = self.segments.sent(source, rank, forward=self.forward)
            for number in map(int, numbers):
                constant = received[at : at + step.state_size].view(step.heads, step.key_dim, step.value_dim)
                at += step.state_size
                transition = None
                if (self.segments.past if self.forward else self.segments.future)[number]:
                    transition = received[at : at + step.transition_size].view(step.transition_shape)
                    at += step.transition_size
                self.maps[number] = (constant, transition)


def _applied(transition: Tensor, state: Tensor, *, transpose: bool) -> Tensor:
    if transition.shape[-1] == 1:
        return transition * state
    return torch.bmm(transition.transpose(-1, -2) if transpose else transition, state)
