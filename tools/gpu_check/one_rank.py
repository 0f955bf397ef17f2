"""Measures one of several ranks by itself, at real sizes: all of a layer but the network, on one GPU.

Several ranks on one device would take turns, and measure each other. A rank alone, in a group that moves nothing, has
its own kernels, copies, memory and host time, whatever stands in the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.apps.estimate import MODELS
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.executor.run import prepare
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.layers import LAYERS
from megatron_cp.testing.parity import Case
from tools.gpu_check.device_time import times

TOKENS = (32768, 131072)  # of all ranks together
RANKS = (2, 4, 8)
ATTENTION = ("a2a", "p2p", "all_gather", "exact")
LINEAR = {"qwen3-next": "gdn", "kimi-linear": "kda", "nemotron-h": "mamba"}
MODES = ("headwise", "chunkwise")
_DOCUMENTS = 8


class StillGroup(RankGroup):
    """A group of several ranks that moves nothing: received buffers keep their old contents."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        return _Done()

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return _Done()

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return _Done()

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        received.view(self.size, -1).copy_(sent.view(1, -1))  # all ranks agree

    def barrier(self) -> None:
        pass


class _Done(Pending):
    def wait(self) -> None:
        pass


def rows(repeats: int, *, small: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each layer, number of tokens and ranks: device and host time, and memory, of the middle rank.

    Args:
        repeats: of each direction.
        small: few tokens and small heads, to see that it runs.
    """
    for tokens in (96,) if small else TOKENS:
        for cp in (2,) if small else RANKS:
            for case in _cases(tokens, cp, small=small):
                name = f"{case.layer} {case.scheme}"
                try:
                    yield {"layer": name, "tokens": tokens, "cp": cp, **_measured(case, repeats)}
                except Exception as error:  # of whatever kernel: the other rows are worth having
                    why = f"{type(error).__name__}: {error}".splitlines()[0]
                    refused = isinstance(error, ArgumentError)
                    yield {"layer": name, "tokens": tokens, "cp": cp, "not_run": why, "is_refused": refused}
                torch.cuda.empty_cache()


def _cases(tokens: int, cp: int, *, small: bool) -> Iterator[Case]:
    lengths = _lengths(tokens)
    common: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "layout": "zigzag"}
    for scheme in ATTENTION:
        shape = next(iter(MODELS["tiny" if small else "llama3-8b"]["attention"]))
        yield Case(
            "attention", cp, lengths, heads=shape.heads, groups=shape.groups, head_dim=shape.head_dim,
            value_head_dim=shape.value_dim, scheme=scheme, **common,
        )  # fmt: skip
    for model, layer in LINEAR.items():
        shape = next(iter(MODELS["tiny" if small else model][layer]))
        for mode in MODES:
            # The interpreter would take minutes for other packages' kernels.
            kernel = "chunked" if small else "auto"
            yield Case(
                layer, cp, lengths, heads=shape.heads, groups=shape.groups, head_dim=shape.head_dim,
                value_head_dim=shape.value_dim, scheme=mode, kernel=kernel,
                **common | {"layout": "contiguous"},
            )  # fmt: skip


def _lengths(tokens: int) -> tuple[int, ...]:
    """Documents of unequal length: 1, 2, 3 ... shares."""
    share = tokens // (_DOCUMENTS * (_DOCUMENTS + 1) // 2)
    lengths = [share * number for number in range(1, _DOCUMENTS)]
    return (*lengths, tokens - sum(lengths))


def _measured(case: Case, repeats: int) -> dict[str, Any]:
    plan, rank = case.plan(), case.cp // 2
    group = StillGroup(rank, case.cp)
    prepare(plan, rank, torch.device("cuda"))
    inputs, parameters = _drawn(case, int(plan.layout.row_counts[rank]))

    def forward() -> Tensor:
        if case.layer == "attention":
            return attention(*inputs, plan, group, kernel=case.kernel)
        return LAYERS[case.layer].run(*inputs, plan, group, **parameters, kernel=case.kernel)

    leaves = [*inputs, *parameters.values()]

    def both() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            out = forward()
            torch.autograd.grad(out, leaves, out.detach())

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        alone = times(forward, repeats)
    found = {"forward": alone.row(), "both": times(both, repeats).row(), "launches": _launches(both), "peak": peak}
    if case.layer == "attention":
        predicted = max(peak_bytes(plan, rank, case.dtype.itemsize, forward=way) for way in (True, False))
        found |= {"peak_predicted": predicted, "buffers_predicted": buffer_bytes(plan, rank, case.dtype.itemsize)}
    return found | {"buffers": group.buffers.size}


def _drawn(case: Case, num_rows: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A rank's inputs and the parameters, of random numbers, made on the device."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device="cuda") * scale

    if case.layer == "attention":
        shapes = ((case.heads, case.head_dim), (case.groups, case.head_dim), (case.groups, case.value_head_dim))
        return [normal(num_rows, *shape).to(case.dtype).requires_grad_() for shape in shapes], {}
    inputs, parameters = LAYERS[case.layer].draw(case.linear_shape, num_rows, normal)
    own = [x.to(case.dtype).requires_grad_() for x in inputs.values()]
    return own, {name: x.to(case.dtype).requires_grad_() for name, x in parameters.items()}


def _launches(call: Any) -> int | None:
    """Kernels and copies that a call queues, or None where the profiler sees none."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return len([event for event in profile.events() if event.device_type.name == "CUDA"]) or None
