"""The head exchanges that `megatron-cp bench exchange` compares: ours, and megatron-core's two.

Shapes: `t` a rank's tokens, `T` all tokens, `f` features of all sections, `h` heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.section_batch import ALL, GATES, SENT, Batch, compare, in_place, leaf
from megatron_cp.apps.bench.timing import Measure
from megatron_cp.exchange import Exchange
from megatron_cp.executor import Communicator, ToHeadsInParts, TorchGroup, ToTokensInParts
from megatron_cp.testing import Case

LOOP = "loop"
PROJECTION = (("q", "k", "v"), ("z",), ("beta",), ("alpha",))
CUT = "without the gate, cut from one projection"
SEPARATE, IN_PLACE = "separate", "in place"
Outputs = list[Tensor]
Gradients = tuple[Outputs, list[Tensor]]  # the tensors to differentiate and the gradient of each
Forms = dict[str, Callable[[Outputs], Gradients]]


@dataclass
class Contender:
    """An implementation of one exchange.

    The gradient of every element is the element itself, so that the gradient of each input must be the input.

    Attributes:
        way: "inbound" (tokens to heads) or "outbound".
        inputs: leaves of the graph.
        entering: bytes of the tensors that enter the exchange; copies are counted in this unit.
        forward: makes the tensors with which the layer goes on from the inputs.
        gradients: for each form in which gradients arrive, a function that makes them.
        expected: the tensors that `forward` must return.
    """

    name: str
    way: str
    inputs: list[Tensor]
    entering: int
    forward: Callable[[], Outputs]
    gradients: Forms
    expected: list[Tensor]
    case: Case

    def check(self) -> None:
        """Raises unless the results are as expected, forward and backward."""
        outputs = self.forward()
        compare(f"{self.name}, {self.way}", outputs, self.expected, self.case)
        for form, gradients_of in self.gradients.items():
            outs, gradients = gradients_of(outputs)
            found = torch.autograd.grad(outs, self.inputs, gradients, retain_graph=True)
            compare(f"{self.name}, {self.way}, gradients {form}", found, self.inputs, self.case)

    def run(self, measure: Measure) -> None:
        """Runs forward, and backward for each form of gradients, every stage through `measure(key, call)`."""
        outputs = measure(self.key("forward"), self.forward)
        for form, gradients_of in self.gradients.items():
            outs, gradients = gradients_of(outputs)
            measure(self.key("backward", form), partial(self._backward, outs, gradients))

    def _backward(self, outs: Outputs, gradients: list[Tensor]) -> Any:
        with torch.autograd.set_multithreading_enabled(False):  # another thread would not be on this one's clock
            return torch.autograd.grad(outs, self.inputs, gradients, retain_graph=True)

    def key(self, direction: str, form: str = "") -> str:
        """Returns the key of a stage in the results."""
        return "|".join((f"{self.way} {direction}", self.name, form))


def ours(batch: Batch, layout: str, comm: Communicator) -> list[Contender]:
    """Returns both directions from one layout: with the gate, as Megatron sends it, and without, as ours does."""
    rank, case = comm.rank, batch.case

    def separate(outputs: Outputs) -> Gradients:
        return outputs, [output.detach().clone(memory_format=torch.contiguous_format) for output in outputs]

    def arrive(exchange: Exchange, *tensors: Tensor) -> Outputs:
        inbound = ToHeadsInParts(exchange, comm)
        inbound.start(*tensors)
        return [section for part in range(inbound.num_parts) for section in inbound.finish(part)]

    def placed(exchange: Exchange, inputs: list[Tensor]) -> Callable[[Outputs], Gradients]:
        count = len(exchange.sections.blocks)

        def gradients(_: Outputs) -> Gradients:
            # Row-major outputs can be sent in place.
            outputs = arrive(replace(exchange, section_major=False), *inputs)
            values = [output.detach() for output in outputs]
            parts = [values[start : start + count] for start in range(0, len(values), count)]
            return outputs, [gradient for part in parts for gradient in in_place(part)]

        return gradients

    def wanted(exchange: Exchange) -> list[Tensor]:
        return [section for part in exchange.parts for section in batch.own(part, rank)]

    found = []
    for gate, tensors in GATES.items():
        exchange = batch.exchange(layout, tensors)
        inputs = [leaf(batch.local(layout, names, rank)) for names in tensors]
        found.append(Contender(
            f"{layout}, {gate}", "inbound", inputs, sum(x.nbytes for x in inputs),
            lambda exchange=exchange, inputs=inputs: arrive(exchange, *inputs),  # type: ignore[misc]
            {IN_PLACE: placed(exchange, inputs), SEPARATE: separate}, wanted(exchange), case,
        ))  # fmt: skip
    exchange, projection = batch.exchange(layout, SENT), leaf(batch.local(layout, ALL, rank))
    widths = [sum(batch.widths[name] for name in names) for names in PROJECTION]

    def cut_projection() -> Outputs:
        qkv, z, beta, alpha = projection.split(widths, -1)
        return [*arrive(exchange, qkv, beta, alpha), z]

    found.append(Contender(
        f"{layout}, {CUT}", "inbound", [projection], found[-1].entering, cut_projection, {SEPARATE: separate},
        [*wanted(exchange), batch.local(layout, "z", rank)], case,
    ))  # fmt: skip
    back = batch.back(layout)
    outs = [leaf(section) for part in back.parts for section in batch.own(part, rank)]

    def leave() -> Outputs:
        in_flight = ToTokensInParts(back, comm)
        for part, out in enumerate(outs):
            in_flight.start(part, out)
        return in_flight.finish()

    found.append(Contender(
        layout, "outbound", list(outs), sum(out.nbytes for out in outs), leave, {"": separate},
        [batch.local(layout, "v", rank)], case,
    ))  # fmt: skip
    return found


def megatrons(batch: Batch, group: TorchGroup) -> tuple[list[Contender], Callable[[], None]]:
    """Returns both directions, fused and in loops, and the checks of the documents that precede them."""
    from megatron_cp.apps.bench.peers.head_exchange import StockExchange

    rank, size, case = group.rank, group.size, replace(batch.case, codec="none")
    stock = StockExchange(batch.packing, list(batch.widths.values()), size, group.group, batch.device)
    split = [sum(batch.widths[name] for name in names) // size for names in PROJECTION]
    local = leaf(batch.local("zigzag", ALL, rank)[:, None])
    own = batch.own(batch.exchange("zigzag", (ALL,)).sections, rank)
    out = leaf(own[ALL.index("v")].flatten(1)[:, None])

    def whole(outputs: Outputs) -> Gradients:
        return outputs, [output.detach().clone() for output in outputs]

    def separate(outputs: Outputs) -> Gradients:
        return whole(list(outputs[0].split(split, -1)))

    joined, back = torch.cat([heads.flatten(1) for heads in own], -1), batch.local("zigzag", "v", rank)

    def contenders(
        name: str, to_heads: Callable[[Tensor], Tensor], to_tokens: Callable[[Tensor], Tensor]
    ) -> list[Contender]:
        forms: Forms = {IN_PLACE: whole, SEPARATE: separate}
        whole_only: Forms = {"": whole}
        return [
            Contender(name, "inbound", [local], local.nbytes, lambda: [to_heads(local)], forms, [joined], case),
            Contender(name, "outbound", [out], out.nbytes, lambda: [to_tokens(out)], whole_only, [back], case),
        ]

    fused = contenders(MEGATRON, stock.to_heads, stock.to_tokens)
    in_loops = contenders(LOOP, stock.to_heads_in_loops, stock.to_tokens_in_loops)
    return [*fused, *in_loops], stock.check_offsets
