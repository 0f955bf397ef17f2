"""Measures one of several ranks by itself, at real sizes: all of a layer but the network, on one GPU.

Several ranks on one device would take turns, and measure each other. A rank alone, in a group that moves nothing, has
its own kernels, copies, memory and host time, whatever stands in the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_cp.apps.estimate import MODELS
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.executor.groups.base import Done
from megatron_cp.executor.run import prepare
from megatron_cp.extras import installed_version
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from megatron_cp.planner.predict.price import timelines
from megatron_cp.softmax import attention as softmax
from megatron_cp.testing.layers import LAYERS
from megatron_cp.testing.parity import Case
from tools.gpu_check.device_time import times

# Tokens of all ranks together, and ranks: the first two have what is furthest apart, should there be no time for more.
CELLS = ((32768, 2), (131072, 8), (32768, 8), (131072, 2))
SCHEMES = ("a2a", "p2p", "all_gather", "exact")
# By kernel: its package; measured where it is installed, in one scheme.
FLASH_ATTENTION = {"flash_attn": "flash-attn", "flash_attn_3": "flash_attn_3", "flash_attn_4": "flash-attn-4"}
# By layer: the model with its shape, and the kernel; without `mamba_ssm` Mamba-2 is not measured.
LINEAR = {"gdn": ("qwen3-next", "fla"), "kda": ("kimi-linear", "fla"), "mamba": ("nemotron-h", "mamba_ssm")}
MODES = ("headwise", "chunkwise")
_DOCUMENTS = 8


class StillGroup(RankGroup):
    """A group of several ranks that moves nothing: received buffers keep their old contents."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        return Done()

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return Done()

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return Done()

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        received.view(self.size, -1).copy_(sent.view(1, -1))  # all ranks agree

    def barrier(self) -> None:
        pass


def rows(cases: Callable[..., Iterator[tuple[str, Case]]], repeats: int, *, small: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each layer, number of tokens and ranks: device and host time, and memory, of the middle rank.

    Args:
        cases: `_softmax` or `_linear`.
        repeats: of each direction.
        small: few tokens and small heads, to see that it runs.
    """
    for tokens, cp in ((96, 2),) if small else CELLS:
        common = {"cp": cp, "lengths": _lengths(tokens), "dtype": torch.bfloat16, "device": "cuda"}
        for name, case in cases(common, small=small):
            row = {"row": name, "column": f"{tokens // 1024}k cp{cp}", "kernel": case.kernel}
            try:
                yield row | _measured(case, repeats)
            except Exception as error:  # of whatever kernel: the other rows are worth having
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                yield row | {"not_run": why, "is_refused": isinstance(error, ArgumentError)}
            torch.cuda.empty_cache()


def _softmax(common: dict[str, Any], *, small: bool) -> Iterator[tuple[str, Case]]:
    found = [(scheme, "varlen") for scheme in SCHEMES]
    found += [(SCHEMES[0], name) for name, package in FLASH_ATTENTION.items() if installed_version(package)]
    for scheme, kernel in found:
        name = f"attention {scheme if kernel == 'varlen' else kernel}"
        shape = next(iter(MODELS["tiny" if small else "llama3-8b"]["attention"]))
        yield name, Case("attention", **_sizes(shape), scheme=scheme, kernel=kernel, layout="zigzag", **common)


def _linear(common: dict[str, Any], *, small: bool) -> Iterator[tuple[str, Case]]:
    for layer, (model, kernel) in LINEAR.items():
        shape = next(iter(MODELS["tiny" if small else model][layer]))
        # The interpreter would take minutes for other packages' kernels.
        how = {"kernel": "chunked" if small else kernel, "layout": "contiguous"}
        for mode in MODES:
            yield f"{layer} {mode}", Case(layer, **_sizes(shape), scheme=mode, **how, **common)


def _sizes(shape: Any) -> dict[str, int]:
    names = {"heads": "heads", "groups": "groups", "head_dim": "head_dim", "value_head_dim": "value_dim"}
    return {name: getattr(shape, field) for name, field in names.items()}


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
            return softmax.attention(*inputs, plan, group, kernel=case.kernel)
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
    # A rank alone waits for nothing: what it is predicted to compute and copy.
    predicted = [each.busy[rank] * 1e6 for each in timelines(plan, machine("h100"), item_size=case.dtype.itemsize)]
    found = times(both, repeats).row() | {
        "predicted_us": round(sum(predicted), 1),
        "forward": alone.row() | {"predicted_us": round(predicted[0], 1)},
        "launches": _launches(both), "peak": peak, "buffers": group.buffers.size,
    }  # fmt: skip
    if case.layer == "attention":
        most = max(peak_bytes(plan, rank, case.dtype.itemsize, forward=way) for way in (True, False))
        found |= {"peak_predicted": most, "buffers_predicted": buffer_bytes(plan, rank, case.dtype.itemsize)}
    return found


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


# Each in a process, so that a fault of one leaves the other's rows.
attention, linear = partial(rows, _softmax), partial(rows, _linear)
