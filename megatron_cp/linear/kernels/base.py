"""What a linear-layer kernel is given and what it returns.

Shapes, everywhere in these folders: `T` tokens, `h` heads, `g` key heads or groups, each read by consecutive heads,
`dk` and `dv` features of a key and of a value head, `c` channels. State-space duality (Mamba-2, arXiv 2405.21060) makes
one vocabulary of both families: C is a query, B a key and x a value; a head's state is `[dk, dv]`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp.executor.kernels import Kernel
from megatron_cp.executor.scan import LocalScan
from megatron_cp.layout import Packing
from megatron_cp.layout.segments import LocalSegments


@dataclass(frozen=True)
class LinearCall:
    """Everything about a call but the tensors.

    Attributes:
        kind: of layer whose recurrence is computed: "gdn", "kda" or "mamba"; "conv1d" where there is none.
        packing: the pieces of documents in this rank's rows, whole documents headwise; states start anew with each.
        dtype, device: of the values.
        head_dim: of a key head.
        conv_width: taps of the convolution.
        channels: that it is given at a time, here or on any other rank, so that all ranks refuse or none.
        segments: chunkwise, which of the pieces continue a document or are continued; None headwise.
        for_graphs: kernels that serve no CUDA graph are passed over.
    """

    kind: str
    packing: Packing
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    conv_width: int = 1
    channels: tuple[int, ...] = ()
    segments: LocalSegments | None = None
    for_graphs: bool = False

    def segments_table[T](self, key: Any, make: Callable[[], T]) -> T:
        """What a kernel derives from the segments, made once for all layers of a batch."""
        assert self.segments is not None
        found: T = self.segments.packing.memo((key, self.device), make)
        return found


class Delta(NamedTuple):
    """What a gated delta rule reads: q, k `[T, g, dk]`, v `[T, h, dv]`, beta `[T, h]`; decays in logarithms, <= 0.

    `g` is `[T, h]` (Gated DeltaNet) or `[T, h, dk]` (KDA).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def keys(self) -> Tensor:
        return self.k

    @property
    def values(self) -> Tensor:
        return self.v

    def piece(self, start: int, end: int) -> Delta:
        """Of some tokens."""
        return Delta(*(x[start:end] for x in self))


class StateSpace(NamedTuple):
    """What Mamba-2 reads: x `[T, h, dv]`, dt `[T, h]` (positive), A `[h]` (negative), B and C `[T, g, dk]`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    @property
    def keys(self) -> Tensor:
        return self.B

    @property
    def values(self) -> Tensor:
        return self.x

    def piece(self, start: int, end: int) -> StateSpace:
        """Of some tokens; decays are the heads'."""
        return StateSpace(self.x[start:end], self.dt[start:end], self.A, self.B[start:end], self.C[start:end])


Inputs = Delta | StateSpace


@dataclass(frozen=True)
class ScanWork:
    """A rule in three parts, for segments: what is differentiable and local, the scan, and the way out.

    Attributes:
        tensors: what the scan computes on.
        local: the scan.
        finish: from the scan's output to `[T, h, dv]`.
    """

    tensors: list[Tensor]
    local: LocalScan
    finish: Callable[[Tensor], Tensor]


class RuleKernel(Kernel):
    """The recurrence of one rank's heads over its tokens. T, h and g are at least 1. Differentiable.

    Attributes:
        kinds: of layers whose recurrence it computes.
    """

    kinds: tuple[str, ...]

    @abstractmethod
    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        """Each piece of `call.packing` from a state of zero.

        Args:
            inputs: of the recurrence.
            groups: the key head or group that each head reads.
            scale: what queries are multiplied by.

        Returns:
            `[T, h, dv]` in the type of the values.
        """

    @abstractmethod
    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        """The same for segments, whose states come from elsewhere and go on."""


class ConvKernel(Kernel):
    """The causal depthwise convolution of one rank's channels over its tokens. Differentiable."""

    @abstractmethod
    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        *,
        silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """`[T, c]` in the type of x or a wider one: the caller rounds.

        Args:
            x: `[T, c]`
            weight: `[c, width]`, whose last column meets the current token.
            bias: `[c]`
            silu: whether to apply SiLU.
            history: chunkwise, waits for and returns `[n, width - 1, c]`, what stands before each of the segments that
                continue a document, in the order of the rows, zero before the document. To be called exactly once.
        """


class LinearKernel(RuleKernel, ConvKernel):
    """Both in one: what an operation takes for its `kernel` instead of a name."""
