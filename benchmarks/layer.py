"""`python -m benchmarks layer`: compares our Gated DeltaNet with megatron-core's own layer over the same ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.ranks import MEGATRON, RANKS, check_megatron, measured_on_ranks, megatron_case
from benchmarks.timing import BOTH, DIRECTIONS, Measure, Timing, Watch, formatted, interleaved, slowest, spread, table
from megatron_cp.cli import hidden_size_of
from megatron_cp.executor import RankGroup, TorchGroup
from megatron_cp.layout import Layout
from megatron_cp.testing import FLOOR_SHARE, Case, relative_error

OURS = "ours"
_DOCUMENTS, _TOKENS = 8, 1024
# Limits for outputs and gradients: both sides use the same kernels, but round at other places in 16 bits.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-4}
_VALUES: dict[str, Callable[[Timing], float]] = {
    "wall": lambda timing: timing.wall,
    "local": lambda timing: timing.total,
}

LEGEND = f"""\
A layer from hidden states to hidden states, projections included: ours and {MEGATRON}'s with the same parameters, on
the same documents, tokens and ranks, one after the other within every repeat. Before anything is timed, outputs and all
gradients (of parameters, summed over the ranks) are compared. Ratios above 1 mean that ours takes less time.
*Wall*: time by the clock. *Local*: time of a rank's own thread, which others on the same core do not change; on CUDA
that of its stream. Medians [quartiles] over the repeats, of the slowest rank; a ratio is taken within one repeat.
Ours plans once for a microbatch, which is not timed; {MEGATRON} computes its order of tokens in every layer: timed."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> tuple[str, dict[str, Any]]:
    """Measures both layers; returns the report and its numbers."""
    check_megatron("layer")
    cp = world.size if world else args.cp or RANKS
    case = megatron_case(args, world, cp, (args.tokens_per_rank or _TOKENS) * cp, args.documents or _DOCUMENTS)
    hidden_size = args.hidden_size or hidden_size_of(args.model or "qwen3-next")
    found = measured_on_ranks(
        measure, case, hidden_size, args.repeats, args.profile, plans=[case.plan()], cp=cp, args=args, world=world
    )
    words, errors, _ = found[0]
    data = {
        **_ratios([spent for *_, spent in found]),
        "errors": errors,
        "stand_ins": words,
        "cp": cp,
        "hidden_size": hidden_size,
        "heads": [case.heads, case.groups, case.head_dim, case.value_head_dim],
        "dtype": str(case.dtype).removeprefix("torch."),
        "lengths": list(case.lengths),
        "head_chunks": args.head_chunks or 1,
        "transport": args.transport,
        "codec": args.codec,
        "device": case.device,
    }
    return _text(data, args.profile), data


Spent = dict[tuple[str, str], list[Timing]]  # by side and direction


def measure(
    group: TorchGroup, case: Case, hidden_size: int, repeats: int, trace: str | None
) -> tuple[str, dict[str, float], Spent]:
    """Measures on one rank: compares the results first, then times them.

    Returns:
        The functions that replace others, the differences of Megatron's layer from ours, and the timings.
    """
    from benchmarks.peers import layers

    layers.start(group.size, on_cpu=case.device == "cpu")
    ours, stock, words = layers.layers(case, hidden_size)
    sides, watch = {OURS: ours, MEGATRON: stock}, Watch(torch.device(case.device).type)
    random = torch.Generator().manual_seed(case.seed)
    layout = Layout.zigzag(case.packing, case.cp)
    hidden, gradient = (
        layout.shard(torch.randn(case.packing.total, 1, hidden_size, generator=random), group.rank)
        .to(case.dtype).to(case.device)
        for _ in range(2)
    )  # fmt: skip
    hidden.requires_grad_()

    def step(name: str, measured: Measure) -> tuple[Tensor, ...]:
        layer = sides[name]
        leaves = [hidden, *layer.module.parameters()]
        out = measured("forward", lambda: layer.forward(hidden))
        # Engine threads of its own would not be on this thread's clock.
        with torch.autograd.set_multithreading_enabled(False):
            gradients = measured("backward", lambda: torch.autograd.grad(out, leaves, gradient))
        return out.detach(), *gradients

    errors = compared({name: step(name, lambda _, call: call()) for name in sides}, case, group)
    spent = interleaved({name: partial(step, name) for name in sides}, repeats, watch, group)
    if trace is not None:  # once all is timed: a profiler takes time of its own
        _write_trace(lambda: step(OURS, lambda _, call: call()), group, hidden.device, trace)
    return words, errors, spent


def _write_trace(step: Callable[[], Any], group: RankGroup, device: torch.device, path: str) -> None:
    """Runs a step under the profiler on every rank, and writes rank 0's trace."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    for last in (False, True):  # the first is not kept: in it the profiler starts up
        group.barrier()
        with profile(activities=activities, acc_events=True) as found:
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if last and group.rank == 0:
            found.export_chrome_trace(path)
            if not Path(path).is_file():  # torch says so in its log alone
                raise OSError(f"the trace could not be written to {path}")


def compared(found: Mapping[str, Sequence[Tensor]], case: Case, group: TorchGroup) -> dict[str, float]:
    """Returns the differences of the sides' output and gradients, of rows and of parameters.

    Raises:
        RuntimeError: they are larger than rounding explains.
    """
    sides = {name: [tensor.float() for tensor in of_side] for name, of_side in found.items()}
    for of_side in sides.values():
        for gradient in of_side[2:]:
            dist.all_reduce(gradient, group=group.group)  # a rank's share is of its tokens here, of its heads there
    apart = [
        relative_error(theirs, ours, FLOOR_SHARE * float(ours.abs().max()))
        for ours, theirs in zip(sides[OURS], sides[MEGATRON], strict=True)
    ]
    errors = {"out": apart[0], "gradients": max(apart[1:])}
    if case.codec == "none" and not max(apart) <= _TOLERANCES[case.dtype]:
        raise RuntimeError(
            f"{MEGATRON}'s {case.layer} differs from ours by {errors}, more than {_TOLERANCES[case.dtype]:g}: "
            "they do not compute the same"
        )
    return errors


def _ratios(ranks: list[Spent]) -> dict[str, Any]:
    def taken(name: str, way: str, value: Callable[[Timing], float]) -> Any:
        ways = DIRECTIONS if way == "both" else (way,)
        return sum(slowest(ranks, (name, one), value) for one in ways)

    found: dict[str, Any] = {}
    for end, value in (("", _VALUES["wall"]), ("_local", _VALUES["local"])):
        found[f"megatron_over_ours{end}"] = {
            way: spread(taken(MEGATRON, way, value) / taken(OURS, way, value)) for way in BOTH
        }
    for kind, value in _VALUES.items():
        found[f"{kind}_ms"] = {
            name: {way: spread(taken(name, way, value) * 1e3) for way in BOTH} for name in (OURS, MEGATRON)
        }
    return found


def _text(data: dict[str, Any], trace: str | None) -> str:
    rows = [
        [
            way, *(formatted(data[f"megatron_over_ours{end}"][way]) for end in ("", "_local")),
            *(f"{data[f'{kind}_ms'][side][way]['median']:.1f}" for side in (OURS, MEGATRON) for kind in _VALUES),
        ]
        for way in BOTH
    ]  # fmt: skip
    sides = [f"{side}, {kind} ms" for side in (OURS, MEGATRON) for kind in _VALUES]
    errors = ", ".join(f"{what} {value:.1e}" for what, value in data["errors"].items())
    return "\n".join([
        f"gdn cp={data['cp']} zigzag, headwise, heads {data['heads']}, hidden size {data['hidden_size']}, "
        f"{sum(data['lengths'])} tokens in {len(data['lengths'])} documents, {data['dtype']} on {data['device']}, "
        f"{data['head_chunks']} head chunks, transport {data['transport']}, codec {data['codec']}",
        f"Differences: {errors}. {data['stand_ins']}",
        "", *table(("",), (f"{MEGATRON} / ours, wall", "local", *sides), rows), "",
        *([f"Trace of our layer on rank 0: {trace}."] if trace else []), LEGEND,
    ])  # fmt: skip
