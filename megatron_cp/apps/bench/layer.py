"""`megatron-cp bench layer`: compares our layers with megatron-core's own over the same ranks."""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.apps.bench.allocator import keep_freed_memory
from megatron_cp.apps.bench.defaults import RANKS, with_defaults
from megatron_cp.apps.bench.peer_limits import MEGATRON, aligned_lengths, check_megatron_takes, megatron_missing
from megatron_cp.apps.bench.peers.distributed import watched_wire
from megatron_cp.apps.bench.profile import trace_files, write_trace
from megatron_cp.apps.bench.spread import formatted, spread, table
from megatron_cp.apps.bench.timing import BOTH, DIRECTIONS, Measure, Timing, Watch, interleaved
from megatron_cp.apps.bench.watched_kernels import WatchedLinearKernel, watched
from megatron_cp.cli import Report, case_of, hidden_size_of, known_shapes
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import TorchGroup, run_ranks
from megatron_cp.layout import Layout
from megatron_cp.plan import KINDS, MAMBA, counted
from megatron_cp.testing import FLOOR_SHARE, Case, HostWork, host_work, relative_error

LAYERS = ("gdn", "mamba")
OURS = "ours"
_MODELS = {"gdn": "qwen3-next", "mamba": "nemotron-h"}  # the models of the default shapes
_DOCUMENTS, _TOKENS = 8, 1024
# Limits for outputs and gradients: both sides use the same kernels, but round at other places in 16 bits.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-4}
_LEAST = 1.0  # megatron-core's time over ours, at least
_RATIOS = ("megatron_over_ours", "megatron_over_ours_local", "megatron_over_ours_rest")

LEGEND = f"""\
A layer from hidden states to hidden states, projections included: ours and {MEGATRON}'s with the same parameters, on
the same documents, tokens and ranks, one after the other within every repeat. Before anything is timed, outputs and all
gradients (of parameters, summed over the ranks) are compared. Ratios above 1 mean that ours takes less time.
*Wall*: time by the clock. *Local*: time without transfers; on the CPU that of a rank's own thread, which others on the
same core do not change, on CUDA that of its stream. It consists of *alike*, in functions that both sides use
(projections, convolution and rule), and *rest*: packing, norm, gates. *Wire*: time by the clock in which transfers are
started and awaited. *Host us*: time by the clock until the call returns, which on the CPU is all of it; *calls* of
Python functions, *operators* of torch with views, and on CUDA *launches*, on one rank.
Medians [quartiles] over the repeats, of the slowest rank; a ratio is taken within one repeat.
Ours plans once for a microbatch, which is not timed; {MEGATRON} computes its order of tokens in every layer: timed."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Measures the layers and returns the report."""
    allowed_values = {"ranks": "processes", "kernel": "auto", "layout": "zigzag", "scheme": "headwise"}
    for name, allowed in allowed_values.items():
        given = getattr(args, name)
        if given not in (None, allowed):
            raise ArgumentError(f"--{name}", given, allowed, f"{MEGATRON} can be compared with nothing else.")
    if args.layer not in (None, *LAYERS):
        raise ArgumentError("--layer", args.layer, " or ".join(LAYERS), "That is what this benchmark measures.")
    for reason in megatron_missing().values():
        remedy = f"Both layers are modules of Megatron's: {reason}. bench linear measures mixers without it."
        raise ArgumentError("benchmark", "layer", f"a machine with {MEGATRON}", remedy)
    wanted = [args.layer] if args.layer else list(LAYERS)
    traces = {} if args.profile is None else trace_files(args.profile, wanted)
    works = [replace(_work(layer, args, world), trace=traces.get(layer)) for layer in wanted]
    if world is not None:
        ranks = world.all_gather_object(measure(world, works, args.repeats))
    else:
        ranks = run_ranks(measure, works[0].case.cp, works, args.repeats, kind="processes", timeout=args.timeout)
    layers = {
        name: _ratios([of_rank[number] for of_rank in ranks], work)
        for number, (name, work) in enumerate(zip(wanted, works, strict=True))
    }
    data = {
        **{ratio: {name: layer[ratio] for name, layer in layers.items()} for ratio in _RATIOS},
        "layers": layers,
        "cp": works[0].case.cp,
        "head_chunks": args.head_chunks or 1,
        "transport": args.transport,
        "codec": args.codec,
        "repeats": args.repeats,
        "traces": traces,
        "device": works[0].case.device,
        "torch": torch.__version__,
        "megatron_core": version(MEGATRON),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    return Report(_text(data), data, quiet=world is not None and world.rank != 0)


@dataclass(frozen=True)
class Work:
    """A layer of a model, and a batch for it; `trace` is the file for a profiler's trace of our layer."""

    case: Case
    hidden_size: int
    trace: str | None = None


def _work(layer: str, args: argparse.Namespace, world: TorchGroup | None) -> Work:
    """Returns the given layer and batch, with defaults from a known model and a batch that Megatron can shard."""
    args = argparse.Namespace(**vars(args))
    args.layer, args.scheme, args.layout = layer, "headwise", "zigzag"
    args.dtype = args.dtype or "bfloat16"
    args.cp = world.size if world else args.cp or RANKS
    if args.lengths is None:
        tokens = (args.tokens_per_rank or _TOKENS) * args.cp
        args.lengths = aligned_lengths(tokens, args.documents or _DOCUMENTS, 2 * args.cp, "--tokens-per-rank")
        args.tokens_per_rank = args.documents = None
    hidden_size = args.hidden_size or hidden_size_of(args.model or _MODELS[layer])
    args.hidden_size = None  # nothing is redistributed here
    known = next(iter(known_shapes(_MODELS[layer])[layer]))
    shape = {"heads": known.heads, "key_heads": known.groups, "head_dim": known.head_dim}
    if KINDS[layer] is MAMBA:
        shape = {
            "heads": known.heads, "groups": known.groups, "head_dim": known.value_dim, "state": known.head_dim,
        }  # fmt: skip
    args = with_defaults(args, world, (layer,), {layer: shape})
    case = case_of(args, args.cp, device=args.device)
    check_megatron_takes(case)
    case.refuse_early()
    return Work(case, hidden_size)


@dataclass
class Seen:
    """The measurements of one rank.

    Attributes:
        words: the functions that replace others, or why Megatron's layer was not run.
        errors: differences of Megatron's layer from ours: of the output, and the largest of the gradients.
        spent: timings of every repeat, by side and direction.
        work: the host's work, by side and direction.
    """

    words: str
    errors: dict[str, float] = field(default_factory=dict)
    spent: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    work: dict[str, dict[str, HostWork]] = field(default_factory=dict)


def measure(group: TorchGroup, works: list[Work], repeats: int) -> list[Seen]:
    """Measures every layer on one rank: compares the results first, then times them."""
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about packages that nothing here uses
        from megatron_cp.apps.bench.peers import layers

        layers.start(group.size, on_cpu=works[0].case.device == "cpu")
        return [_measured(group, work, repeats) for work in works]


def _measured(group: TorchGroup, work: Work, repeats: int) -> Seen:
    from megatron_cp.apps.bench.peers import layers

    case, hidden_size = work.case, work.hidden_size
    watch = Watch(torch.device(case.device).type)
    pair = layers.layers(case, hidden_size, partial(watched, watch), WatchedLinearKernel(watch))
    sides = {OURS: pair.ours, **({MEGATRON: pair.stock} if pair.stock else {})}
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
            gradients = measured("backward", lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True))
        return out.detach(), *gradients

    with watched_wire(watch):
        found = {name: step(name, lambda _, call: call()) for name in sides}
        seen = Seen(pair.words, _compared(found, case, group) if MEGATRON in found else {})
        del found
        for name in sides:
            seen.work[name] = {}

            def worked(way: str, call: Callable[[], Any], name: str = name) -> Any:
                seen.work[name][way] = host_work(call, watch.device)
                return call()

            step(name, worked)
        seen.spent = interleaved({name: partial(step, name) for name in sides}, repeats, watch, group)
    if work.trace is not None:  # once all is timed: a profiler takes time of its own
        write_trace(lambda: step(OURS, lambda _, call: call()), group, hidden.device, work.trace)
    return seen


def _compared(found: Mapping[str, Sequence[Tensor]], case: Case, group: TorchGroup) -> dict[str, float]:
    """Returns the differences of the sides' output and gradients, of rows and of parameters."""
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


def _ratios(ranks: list[Seen], work: Work) -> dict[str, Any]:
    sides, case, words = list(ranks[0].work), work.case, ranks[0].words

    def slowest(name: str, way: str, value: Callable[[Timing], float]) -> Any:
        ways = DIRECTIONS if way == "both" else (way,)
        return sum(np.array([[value(s) for s in rank.spent[name, one]] for rank in ranks]).max(0) for one in ways)

    def over(value: Callable[[Timing], float]) -> dict[str, Any] | None:
        if MEGATRON not in sides:
            return None
        return {way: spread(slowest(MEGATRON, way, value) / slowest(OURS, way, value)) for way in BOTH}

    def milliseconds(value: Callable[[Timing], float]) -> dict[str, Any]:
        return {name: {way: spread(slowest(name, way, value) * 1e3) for way in BOTH} for name in sides}

    return {
        "megatron_over_ours": over(lambda spent: spent.wall),
        "megatron_over_ours_local": over(lambda spent: spent.busy),
        "megatron_over_ours_rest": over(_rest),
        "wall_ms": milliseconds(lambda spent: spent.wall),
        "rest_ms": milliseconds(_rest),
        "wire_ms": milliseconds(lambda spent: spent.wall_wire),
        "alike_ms": milliseconds(lambda spent: spent.kernel),
        "host_us": {
            name: {way: spread(slowest(name, way, lambda spent: spent.host) * 1e6) for way in BOTH} for name in sides
        },
        "work": {name: {way: asdict(ranks[0].work[name][way]) for way in DIRECTIONS} for name in sides},
        "errors": ranks[0].errors,
        "not_run": {} if MEGATRON in sides else {MEGATRON: words},
        "stand_ins": words if MEGATRON in sides else "",
        "hidden_size": work.hidden_size,
        "heads": [case.heads, case.groups, case.head_dim, case.value_head_dim],
        "dtype": str(case.dtype).removeprefix("torch."),
        "lengths": list(case.lengths),
    }


def _rest(spent: Timing) -> float:
    return spent.busy - spent.kernel


def _text(data: dict[str, Any]) -> str:
    chunks = counted(data["head_chunks"], "head chunk")
    lines = [
        f"cp={data['cp']} zigzag, headwise on {data['device']}, {chunks}, transport {data['transport']}, codec "
        f"{data['codec']}, {data['repeats']} repeats; torch {data['torch']}, {MEGATRON} "
        f"{data['megatron_core']}, python {data['python']}, {data['cores']} cores"
    ]
    lines += ["", *(_verdict(name, layer) for name, layer in data["layers"].items() if layer["megatron_over_ours"])]
    for name, layer in data["layers"].items():
        heads, groups, key_dim, value_dim = layer["heads"]
        errors, stand_ins = layer["errors"], layer["stand_ins"]
        lines += [
            "",
            f"{name}, hidden size {layer['hidden_size']}, heads {heads}/{groups} of {key_dim}/{value_dim}, "
            f"{sum(layer['lengths'])} tokens in {counted(len(layer['lengths']), 'document')}, {layer['dtype']}",
            "",
            *_table(layer),
            "",
            *_work_table(layer),
            "",
            *(f"{peer} was not run: {reason}." for peer, reason in layer["not_run"].items()),
            *([f"Not as on a GPU: {stand_ins}."] if stand_ins else []),
            *(
                [f"Apart: outputs {errors['out']:.1e}, gradients at most {errors['gradients']:.1e} of the largest."]
                if errors else []
            ),
        ]  # fmt: skip
    traces = [
        f"Trace of one forward and backward of our {name} on rank 0: {path}." for name, path in data["traces"].items()
    ]
    return "\n".join([*lines, "", *traces, *[""] * bool(traces), LEGEND])


def _verdict(name: str, layer: dict[str, Any]) -> str:
    ratios = layer["megatron_over_ours"]
    way = min(ratios, key=lambda way: ratios[way]["median"])
    found = ratios[way]["median"]
    met = "met" if found >= _LEAST else "NOT met"
    least = f"{MEGATRON} / ours, the least of all directions: {found:.2f} ({way})"
    return f"{name}: {least}, at least {_LEAST} is the target: {met}."


def _work_table(layer: dict[str, Any]) -> list[str]:
    rows = []
    for name, ways in layer["work"].items():
        for way, work in ways.items():
            launches = "" if work["launches"] is None else str(work["launches"])
            host = f"{layer['host_us'][name][way]['median']:.0f}"
            rows.append([name, way, host, str(work["calls"]), str(work["operators"]), launches])
    return table(("", ""), ("host us", "calls", "operators", "launches"), rows)


def _table(layer: dict[str, Any]) -> list[str]:
    columns = (
        f"{MEGATRON} / ours, wall", "local", "rest", "ours, ms: wall", "alike", "rest", "wire",
        f"{MEGATRON}, ms: wall", "alike", "rest", "wire",
    )  # fmt: skip
    rows = []
    kinds = ("wall_ms", "alike_ms", "rest_ms", "wire_ms")
    for way in BOTH:
        ratios = [layer[name] for name in _RATIOS]
        rows.append([
            way,
            *(formatted(ratio[way]) if ratio else "" for ratio in ratios),
            *(f"{layer[kind][name][way]['median']:.1f}" if name in layer[kind] else ""
              for name in (OURS, MEGATRON) for kind in kinds),
        ])  # fmt: skip
    return table(("",), columns, rows)
