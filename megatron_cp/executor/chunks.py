"""Runs a function of rows on a few rows at a time, so that what it makes of all rows is never there at once.

The logits of a vocabulary, or the activations of an MLP, are many times the size of the rows that they are made of.
`sum_in_chunks` is for losses: it computes their gradients chunk by chunk in the forward, at no more operations.
`rows_in_chunks` is for results of a row each: its backward runs the function again.

Gradients of parameters are summed over the chunks in at least float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.no_compile import no_compile, no_compile_backward

Function = Callable[..., Tensor]


@no_compile
def sum_in_chunks(
    function: Function, rows: Tensor, *beside: Tensor, parameters: Sequence[Tensor], chunk_rows: int
) -> Tensor:
    """Returns the sum over chunks of a function that returns a scalar, such as a loss that is a sum over rows.

    Args:
        function: takes some rows, and those of the tensors beside them.
        rows: `[t, ...]`, differentiable.
        beside: `[t, ...]` each, such as labels; not differentiable.
        parameters: all other tensors whose gradients the function has.
        chunk_rows: the rows of a chunk.
    """
    found: Tensor = _Sum.apply(_Chunks.of(function, beside, rows, chunk_rows), rows, *parameters)
    return found


@no_compile
def rows_in_chunks(
    function: Function, rows: Tensor, *beside: Tensor, parameters: Sequence[Tensor], chunk_rows: int,
    adds_itself: Callable[[Tensor], bool] | None = None,
) -> Tensor:  # fmt: skip
    """Returns `[t, ...]` of a function that returns a result for each row; arguments as in `sum_in_chunks`.

    Args:
        adds_itself: asked in backward, after a chunk: True of a parameter to whose sum of gradients the function's
            backward has added the chunk's, so that what it returned stands for a gradient, and is not summed.
    """
    found: Tensor = _Rows.apply(_Chunks.of(function, beside, rows, chunk_rows, adds_itself), rows, *parameters)
    return found


@dataclass
class _Chunks:
    """A function, and how it is run: its tensors beside the rows, autocast, and random numbers from the same state."""

    function: Function
    beside: tuple[Tensor, ...]
    chunk_rows: int
    device: torch.device
    autocast: dict[str, Any]
    adds_itself: Callable[[Tensor], bool] | None = None
    random: Tensor | None = None

    @classmethod
    def of(
        cls, function: Function, beside: tuple[Tensor, ...], rows: Tensor, chunk_rows: int,
        adds_itself: Callable[[Tensor], bool] | None = None,
    ) -> _Chunks:  # fmt: skip
        kind = rows.device.type
        autocast = {
            "device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)
        }  # fmt: skip
        return cls(function, beside, chunk_rows, rows.device, autocast, adds_itself)

    def ranges(self, rows: Tensor) -> Iterator[slice]:
        """Yields the rows of each chunk; a chunk without rows if there are none, which has gradients of zero."""
        return (slice(begin, begin + self.chunk_rows) for begin in range(0, max(len(rows), 1), self.chunk_rows))

    def run(self, rows: Tensor, at: slice) -> Tensor:
        return self.function(rows, *(each[at] for each in self.beside))

    def keep_random(self) -> None:
        """Notes the state from which the forward draws random numbers."""
        module = _random_of(self.device)
        self.random = module.get_rng_state(self.device) if module is torch.cuda else torch.get_rng_state()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Makes backward run the function as forward did."""
        module = _random_of(self.device)
        own = [self.device] if module is torch.cuda else []
        with torch.random.fork_rng(own), torch.autocast(**self.autocast), torch.enable_grad():
            assert self.random is not None
            if module is torch.cuda:
                torch.cuda.set_rng_state(self.random, self.device)
            else:
                torch.set_rng_state(self.random)
            yield


def _random_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else torch


class _Gradients:
    """The gradients of rows and parameters, which chunks add to."""

    def __init__(
        self, wanted: Sequence[bool], rows: Tensor, parameters: Sequence[Tensor], num_chunks: int,
        adds_itself: Callable[[Tensor], bool] | None = None,
    ) -> None:  # fmt: skip
        self._parameters = [each for each, is_wanted in zip(parameters, wanted[1:], strict=True) if is_wanted]
        self._wanted = wanted
        self.rows = torch.empty_like(rows) if wanted[0] else None
        dtypes = [accumulation_dtype(each.dtype) if num_chunks > 1 else each.dtype for each in self._parameters]
        self._sums: list[Tensor | None] = [None] * len(dtypes)
        self._dtypes, self._adds_itself = dtypes, adds_itself

    def leaf(self, rows: Tensor, at: slice) -> Tensor:
        """Returns the rows of a chunk, whose gradient `add` computes."""
        return rows[at].detach().requires_grad_(self.rows is not None)

    def add(self, result: Tensor, gradient: Tensor | None, leaf: Tensor, at: slice) -> None:
        """Adds the gradients of a chunk's result."""
        inputs = [leaf, *self._parameters] if self.rows is not None else self._parameters
        if not result.requires_grad:
            found: Sequence[Tensor | None] = [None] * len(inputs)
        else:
            found = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
        if self.rows is not None:
            first, *found = found
            if first is None:
                self.rows[at] = 0
            else:
                self.rows[at] = first
        for number, each in enumerate(found):
            if each is None:
                continue
            before = self._sums[number]
            if self._adds_itself is not None and self._adds_itself(self._parameters[number]):
                self._sums[number] = each if before is None else before
            elif before is None:
                self._sums[number] = each.to(self._dtypes[number])
            else:
                before += each

    def result(self, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each input, None for those that are not wanted or not used."""
        sums = iter(self._sums)
        like = iter(self._parameters)
        found: list[Tensor | None] = [_scaled(self.rows, self.rows, factor)]
        scaled = (_scaled(next(sums), next(like), factor) if wanted else None for wanted in self._wanted[1:])
        return (*found, *scaled)


def _scaled(value: Tensor | None, like: Tensor | None, factor: Tensor | None) -> Tensor | None:
    if value is None or like is None:
        return None
    if factor is None:
        return value.to(like.dtype)
    return torch.mul(value, factor.to(value.dtype), out=torch.empty_like(value, dtype=like.dtype))


class _Sum(torch.autograd.Function):
    """Computes the gradients beside the sum; backward multiplies them by that of the sum."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, rows: Tensor, *parameters: Tensor) -> Tensor:
        wanted, ranges = ctx.needs_input_grad[1:], list(chunks.ranges(rows))
        ctx.gradients = gradients = _Gradients(wanted, rows, parameters, len(ranges))
        total: Tensor | None = None
        for at in ranges:
            leaf = gradients.leaf(rows, at)
            with torch.set_grad_enabled(any(wanted)):
                share = chunks.run(leaf, at)
            if any(wanted):
                gradients.add(share, None, leaf, at)
            total = share.detach() if total is None else total + share.detach()
        assert total is not None
        return total

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gradients.result(gradients[0])


class _Rows(torch.autograd.Function):
    """Computes rows without a graph; backward runs the function again."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, rows: Tensor, *parameters: Tensor) -> Tensor:
        chunks.keep_random()
        ctx.chunks = chunks
        ctx.save_for_backward(rows, *parameters)
        found: Tensor | None = None
        for at in chunks.ranges(rows):
            part = chunks.run(rows[at], at)
            if found is None:
                found = part.new_empty(len(rows), *part.shape[1:])
            found[at] = part
        assert found is not None
        return found

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), chunks = gradients, ctx.chunks
        rows, *parameters = ctx.saved_tensors
        ranges = list(chunks.ranges(rows))
        found = _Gradients(ctx.needs_input_grad[1:], rows, parameters, len(ranges), chunks.adds_itself)
        with chunks.again():
            for at in ranges:
                leaf = found.leaf(rows, at)
                found.add(chunks.run(leaf, at), gradient[at], leaf, at)
        return None, *found.result()
