"""`megatron-cp bench`: how far an operation is from its limits, in ratios that were taken in one run."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.cli.check import MAX_LOCAL_RANKS
from megatron_cp.cli.main import Report
from megatron_cp.cli.options import add_batch_arguments, add_layer_arguments, case_of, positive, seconds
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import Message, Pending, RankGroup, ThreadGroup, TorchGroup
from megatron_cp.executor.launch import RANK_KINDS, in_torchrun, run_ranks, start_torchrun_rank
from megatron_cp.executor.memory import peak_bytes
from megatron_cp.executor.plan import Plan
from megatron_cp.executor.run import check_agreement
from megatron_cp.planner.capabilities import working
from megatron_cp.softmax import attention as operation
from megatron_cp.softmax.kernels import AttentionCall, AttentionKernel
from megatron_cp.testing.memory import PeakMemory
from megatron_cp.testing.parity import Case, Problem, draw

HELP = "measure attention: local work over the ideal, merging and copying, waiting, memory over its formula"
BENCHMARKS = ("attention",)
_LATER = ("exchange", "linear", "layer", "planner", "wire")
DIRECTIONS = ("forward", "backward")
DEVICES = ("cpu", "cuda")
# As a GPU's caching allocator does, freed blocks (to 32 MiB, glibc's limit) are kept: paging memory in anew for each
# buffer would be most of the time outside of kernels.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
_HEADS = (8, 2, 64)  # query and key/value heads and their size, where neither a model nor heads are asked for

LEGEND = """\
compute: time inside kernels on the slowest rank, over that of the same kernel on one rank that has the whole batch,
divided by cp (all ranks run that at once, so that cores and memory are as busy). outside: the share of the busiest
rank's time, transfers left out, that is not inside kernels: merging, packing, copying. wait: the share of all ranks'
time by the clock on the wall spent starting and awaiting transfers. Medians [quartiles] over the repeats. On the CPU
time is that of a rank's own thread, which others on the same core do not change; on CUDA it is that of its stream.
peak: bytes of all tensors at the worst moment over the formula of executor/memory.py; + kernel: with those that the
kernel makes for itself. sent: MiB to other ranks, of the rank that sends most.
kernel ms, rank ms: of the slowest rank, inside kernels and in all but transfers; wall ms: by the clock, with transfers
and with whatever else shares the cores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("what", metavar="|".join(BENCHMARKS), help="what to measure")
    parser.add_argument("--cp", type=positive, metavar="N", help="context-parallel size (default: 2)")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="timed rounds (default: 5)")
    add_layer_arguments(parser, dtype="float32")
    add_batch_arguments(parser)
    for action in parser._actions:
        if action.dest == "scheme":
            action.help = "one scheme; all that the ranks can run if left out"
        elif action.dest == "model":
            action.help = "the layer's shape in a known model (default: heads 8/2 of 64)"
    parser.set_defaults(dtype=None)  # depends on the device
    parser.add_argument("--kernel", default="auto", help="a kernel that doctor lists (default: auto)")
    parser.add_argument("--device", choices=DEVICES, help="default: cuda, in bfloat16, where there is one")
    parser.add_argument("--ranks", choices=RANK_KINDS, default="processes", help="local ranks; torchrun brings its own")
    parser.add_argument("--timeout", type=seconds, default=600.0, help="seconds the run may take (default: 600)")


def run(args: argparse.Namespace) -> Report:
    """Measures, on local ranks or on those of torchrun."""
    if args.what not in BENCHMARKS:
        later = f"{args.what} is not built yet." if args.what in _LATER else ""
        raise ArgumentError("benchmark", args.what, " or ".join(BENCHMARKS), later)
    if args.layer != "attention":
        raise ArgumentError("--layer", args.layer, "attention", "That is what this benchmark measures.")
    torch.set_num_threads(1)
    world = start_torchrun_rank(args.timeout) if in_torchrun() else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # ranks without heads are part of what is measured
            return _report(args, world)
    finally:
        if world is not None:
            dist.destroy_process_group()


def _report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    args = _with_defaults(args, world)
    cases, not_run = _cases(args)
    ranks = _measured(cases, args, world)
    plans = {scheme: case.plan() for scheme, case in cases.items()}
    item_size = next(iter(cases.values())).dtype.itemsize
    data = {
        **_ratios(cases, ranks, args.cp),
        "bytes_sent_per_rank": _each(
            cases, lambda scheme, way: plans[scheme].bytes_sent(item_size, forward=way == "forward")
        ),
        "work_imbalance": {scheme: plan.work_imbalance for scheme, plan in plans.items()},
        "cp": args.cp,
        "lengths": list(next(iter(cases.values())).lengths),
        "repeats": args.repeats,
        "device": args.device,
        "kernel": ranks[0].kernel,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "not_run": not_run,
    }
    return Report(_text(next(iter(cases.values())), data), data, quiet=world is not None and world.rank != 0)


def _with_defaults(args: argparse.Namespace, world: TorchGroup | None) -> argparse.Namespace:
    """What was asked for, and for the rest a layer and a batch on which ratios mean something."""
    args = argparse.Namespace(**vars(args))
    on_cuda = dist.get_backend() == "nccl" if world else torch.cuda.is_available()
    args.device = args.device or ("cuda" if on_cuda else "cpu")
    if args.device == "cuda" and not on_cuda:
        raise ArgumentError("--device", "cuda", "cpu", "Every rank of this job would need a CUDA device.")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.model is None:
        heads, groups, size = _HEADS
        if args.heads is None:
            args.heads, args.kv_heads = heads, args.kv_heads or groups
        args.head_dim = args.head_dim or size
    if args.lengths is None and args.tokens_per_rank is None:
        args.tokens_per_rank = 2048
    if world and args.cp not in (None, world.size):
        raise ArgumentError("--cp", args.cp, f"the {world.size} ranks of this job")
    args.cp = world.size if world else args.cp or 2
    if not world and args.cp > MAX_LOCAL_RANKS:
        raise ArgumentError(
            "--cp", args.cp, f"at most {MAX_LOCAL_RANKS} local ranks", "Run larger sizes under torchrun."
        )
    return args


def _cases(args: argparse.Namespace) -> tuple[dict[str, Case], dict[str, str]]:
    """The case of each scheme, and why the others cannot be run: one that was asked for raises that."""
    asked = [args.scheme] if args.scheme else [scheme for scheme in working("scheme") if scheme != "auto"]
    base = case_of(args, args.cp, kernel=args.kernel, device=args.device)
    cases, not_run = {}, {}
    for scheme in asked:
        case = replace(base, scheme=scheme)
        try:
            case.refuse_early()
        except ArgumentError as error:
            if args.scheme or error.argument not in ("scheme", "ulysses_degree", "head_chunks"):
                raise
            not_run[scheme] = str(error)
        else:
            cases[scheme] = case
    if not cases:
        raise ArgumentError("--scheme", None, " or ".join(asked), " ".join(not_run.values()))
    return cases, not_run


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Spent:
    """Seconds that one direction took on one rank: of its thread or stream, and by the clock on the wall."""

    kernel: float
    wire: float
    total: float
    wall_wire: float
    wall: float

    @property
    def busy(self) -> float:
        return self.total - self.wire


@dataclass
class Seen:
    """What one rank measured.

    Attributes:
        kernel: its name.
        spent: for each scheme, and "" for one rank with the whole batch, and each direction: every repeat.
        peaks: for each scheme and direction the most bytes, without and with what the kernel makes for itself.
    """

    kernel: str
    spent: dict[tuple[str, str], list[Spent]] = field(default_factory=dict)
    peaks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


class Watch(threading.local):
    """What the calling rank does: the time it spends in each kind of work, and whether kernels show their tensors.

    Ranks may be threads, which share the kernels and not what these report.
    """

    def __init__(self) -> None:
        self.device, self.hides_kernels, self.kernel = "cpu", False, ""
        self.spans: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.spans.append((name, start, self._now()))

    def taken(self) -> Spent:
        """What the spans since the last call add up to."""
        sums = {name: np.zeros(2) for name in ("kernel", "wire", "total")}
        for name, start, end in self.spans:
            sums[name] += self._between(start, end)
        self.spans.clear()
        (kernel, _), (wire, wall_wire), (total, wall) = (sums[name].tolist() for name in ("kernel", "wire", "total"))
        return Spent(kernel, wire, total, wall_wire, wall)

    def _now(self) -> Any:
        if self.device == "cpu":
            return np.array([time.thread_time(), time.perf_counter()])
        event = torch.cuda.Event(enable_timing=True)  # the host waits for none of them before the direction is over
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> Any:
        if self.device == "cpu":
            return end - start
        end.synchronize()
        return np.full(2, start.elapsed_time(end) / 1e3)


class WatchedKernel(AttentionKernel):
    """A kernel that says when it runs."""

    def __init__(self, kernel: AttentionKernel, watch: Watch) -> None:
        self._kernel, self._watch = kernel, watch
        self.name, self.package, self.devices = kernel.name, kernel.package, kernel.devices
        self.wide_partials = kernel.wide_partials

    def refusal(self, call: AttentionCall) -> str | None:
        return self._kernel.refusal(call)

    def forward(self, *args: Any) -> None:
        self._run(self._kernel.forward, *args)

    def backward(self, *args: Any) -> None:
        self._run(self._kernel.backward, *args)

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        self._watch.kernel = self.name
        hidden = _disable_current_modes() if self._watch.hides_kernels else contextlib.nullcontext()
        with hidden, self._watch.span("kernel"):
            call(*args)


class WatchedGroup(RankGroup):
    """A group that says when it starts and awaits transfers."""

    def __init__(self, group: RankGroup, watch: Watch) -> None:
        self._group, self._watch = group, watch
        self.rank, self.size = group.rank, group.size

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        return self._started(self._group.start_all_to_all, received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self._started(self._group.start_all_gather, received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._started(self._group.start_messages, sends, receives)

    def barrier(self) -> None:
        self._group.barrier()

    def _started(self, start: Callable[..., Pending], *args: Any) -> Pending:
        with self._watch.span("wire"):
            return _WatchedPending(start(*args), self._watch)


class _WatchedPending(Pending):
    def __init__(self, pending: Pending, watch: Watch) -> None:
        self._pending, self._watch = pending, watch

    def wait(self) -> None:
        with self._watch.span("wire"):
            self._pending.wait()


@contextlib.contextmanager
def watched_kernels() -> Iterator[Watch]:
    """Within it, whatever kernel `attention` chooses reports to the watch."""
    watch, own = Watch(), operation.KERNELS
    operation.KERNELS = tuple(WatchedKernel(kernel, watch) for kernel in own)
    try:
        yield watch
    finally:
        operation.KERNELS = own


def _measured(cases: dict[str, Case], args: argparse.Namespace, world: TorchGroup | None) -> list[Seen]:
    if world is not None:
        for case in cases.values():
            check_agreement(case.plan(), world)
        return world.all_gather_object(measure_in_process(world, cases, args.repeats))
    if args.ranks == "threads":
        with watched_kernels() as watch:
            return run_ranks(measure, args.cp, cases, args.repeats, watch, kind="threads", timeout=args.timeout)
    before = {name: os.environ.get(name) for name in _ALLOCATOR}
    os.environ.update(_ALLOCATOR)
    try:
        return run_ranks(measure_in_process, args.cp, cases, args.repeats, kind="processes", timeout=args.timeout)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure_in_process(group: RankGroup, cases: dict[str, Case], repeats: int) -> Seen:
    """`measure`, on a rank that has its process to itself."""
    with warnings.catch_warnings(), watched_kernels() as watch:
        warnings.simplefilter("ignore", UserWarning)
        return measure(group, cases, repeats, watch)


def measure(group: RankGroup, cases: dict[str, Case], repeats: int, watch: Watch) -> Seen:
    """Everything on one rank: memory first, which also makes the batch's tables, then times, schemes in turn."""
    whole = replace(
        next(iter(cases.values())),
        cp=1, layout="contiguous", align=1, scheme="a2a", ulysses_degree=None, head_chunks=None,
    )  # fmt: skip
    problem = draw(whole)
    watch.device = torch.device(whole.device).type
    runs = {scheme: _Run(case, problem, group) for scheme, case in cases.items()}
    runs[""] = _Run(whole, problem, ThreadGroup.create(1)[0])
    seen = Seen("", {(name, way): [] for name in runs for way in DIRECTIONS})
    for name, each in runs.items():
        each.step(lambda _, call: call(), group)
        if name:
            without, with_kernel = (each.peaks(watch, group, hides=hides) for hides in (True, False))
            seen.peaks |= {(name, way): (without[way], with_kernel[way]) for way in DIRECTIONS}
    watch.spans.clear()
    names = list(runs)
    for repeat in range(repeats):
        turn = repeat % len(names)  # nobody always comes first
        for name in names[turn:] + names[:turn]:

            def timed(way: str, call: Callable[[], Any], name: str = name) -> Any:
                group.barrier()
                with watch.span("total"):
                    result = call()
                seen.spent[name, way].append(watch.taken())
                return result

            runs[name].step(timed, WatchedGroup(group, watch))
    return replace(seen, kernel=watch.kernel)


class _Run:
    """One case on one rank, which may be run again and again."""

    def __init__(self, case: Case, problem: Problem, group: RankGroup) -> None:
        self.case, self.plan, self.alone = case, case.plan(), group if case.cp == 1 else None
        self.inputs = [self._own(x, group.rank).requires_grad_() for x in problem.inputs.values()]
        self.sink = problem.parameters.get("sink")
        self.gradient = self._own(problem.output_gradient, group.rank)

    def step(self, measure: Callable[[str, Callable[[], Any]], Any], group: RankGroup) -> None:
        """Forward and backward, each through `measure(direction, call)`."""
        q, k, v = self.inputs
        out = measure(
            "forward",
            lambda: operation.attention(
                q, k, v, self.plan, self.alone or group, sink=self.sink, kernel=self.case.kernel,
                **self.case.softmax_options,
            ),
        )  # fmt: skip
        # Engine threads of its own would not be on this thread's clock.
        with torch.autograd.set_multithreading_enabled(False):
            measure("backward", lambda: torch.autograd.grad(out, self.inputs, self.gradient))

    def peaks(self, watch: Watch, group: RankGroup, *, hides: bool) -> dict[str, int]:
        """The most bytes of each direction; those of tensors that kernels make are left out if `hides`."""
        watch.hides_kernels = hides
        memory, peaks = PeakMemory(), {}

        def tracked(way: str, call: Callable[[], Any]) -> Any:
            memory.restart()
            result = call()
            peaks[way] = memory.peak
            return result

        with memory:
            self.step(tracked, memory.watch(group))
        watch.hides_kernels = False
        return peaks

    def _own(self, stream: Tensor, rank: int) -> Tensor:
        return self.plan.layout.shard(stream, rank).detach().clone()


# -- the report --------------------------------------------------------------------------------------------------------


def _ratios(cases: dict[str, Case], ranks: list[Seen], cp: int) -> dict[str, Any]:
    """What the ranks found, ratios first: for each measure, scheme and direction."""

    def spent(scheme: str, way: str, what: str) -> Any:
        return np.array([[getattr(each, what) for each in rank.spent[scheme, way]] for rank in ranks])

    def over_ideal(scheme: str, way: str) -> dict[str, float]:
        return _spread(spent(scheme, way, "kernel").max(0) * cp / spent("", way, "kernel").mean(0))

    def outside(scheme: str, way: str) -> dict[str, float]:
        busy, kernel = spent(scheme, way, "busy"), spent(scheme, way, "kernel")
        shares = 1 - kernel / busy
        return _spread(np.take_along_axis(shares, busy.argmax(0)[None], 0)[0])

    def waiting(scheme: str, way: str) -> dict[str, float]:
        return _spread(spent(scheme, way, "wall_wire").sum(0) / spent(scheme, way, "wall").sum(0))

    def over_formula(scheme: str, way: str, which: int) -> float:
        formulas = _formulas(cases[scheme].plan(), cases[scheme].dtype.itemsize, way)
        return max(rank.peaks[scheme, way][which] / most for rank, most in zip(ranks, formulas, strict=True) if most)

    def milliseconds(what: str) -> Callable[[str, str], dict[str, float]]:
        return lambda scheme, way: _spread(spent(scheme, way, what).max(0) * 1e3)

    def peak(scheme: str, way: str) -> int:
        return max(rank.peaks[scheme, way][0] for rank in ranks)

    return {
        "compute_over_ideal": _each(cases, over_ideal),
        "outside_kernel_share": _each(cases, outside),
        "peak_over_formula": _each(cases, lambda scheme, way: over_formula(scheme, way, 0)),
        "peak_with_kernel_over_formula": _each(cases, lambda scheme, way: over_formula(scheme, way, 1)),
        "wait_share": _each(cases, waiting),
        "kernel_ms": _each(cases, milliseconds("kernel")),
        "busy_ms": _each(cases, milliseconds("busy")),
        "wall_ms": _each(cases, milliseconds("wall")),
        "one_rank_kernel_ms": {way: milliseconds("kernel")("", way) for way in DIRECTIONS},
        "peak_bytes": _each(cases, peak),
    }


def _formulas(plan: Plan, item_size: int, way: str) -> list[int]:
    return [peak_bytes(plan, rank, item_size, forward=way == "forward") for rank in range(plan.cp_size)]


def _each(cases: dict[str, Case], value: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
    return {scheme: {way: value(scheme, way) for way in DIRECTIONS} for scheme in cases}


def _spread(values: Any) -> dict[str, float]:
    """The median and the quartiles on either side."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def _text(case: Case, data: dict[str, Any]) -> str:
    columns = (
        "scheme", "", "compute", "outside", "wait", "peak", "+ kernel", "kernel ms", "rank ms", "wall ms", "peak MiB",
        "sent",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'--:|' * (len(columns) - 2)}"]
    for scheme in data["compute_over_ideal"]:
        for way in DIRECTIONS:

            def of(name: str, scheme: str = scheme, way: str = way) -> Any:
                return data[name][scheme][way]

            cells = [
                scheme, way, _shown(of("compute_over_ideal")), _shown(of("outside_kernel_share"), percent=True),
                _shown(of("wait_share"), percent=True), f"{of('peak_over_formula'):.2f}",
                f"{of('peak_with_kernel_over_formula'):.2f}",
                *(f"{of(name)['median']:.1f}" for name in ("kernel_ms", "busy_ms", "wall_ms")),
                f"{of('peak_bytes') / 2**20:.1f}", f"{max(of('bytes_sent_per_rank')) / 2**20:.1f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    alone = ", ".join(f"{way} {data['one_rank_kernel_ms'][way]['median']:.1f} ms" for way in DIRECTIONS)
    tokens = f"{sum(data['lengths'])} tokens in {len(data['lengths'])} documents"
    heads = f"heads {case.heads}/{case.groups} of {case.head_dim}/{case.value_head_dim}"
    dtype = str(case.dtype).removeprefix("torch.")
    return "\n".join([
        f"attention cp={data['cp']} {case.layout} {case.mask}, {tokens}, {heads}, {dtype} on {data['device']}, "
        f"kernel {data['kernel']}, {data['repeats']} repeats; torch {data['torch']}, {data['cores']} cores",
        "",
        *lines,
        "",
        f"The whole batch on one rank, inside the kernel: {alone}.",
        *(f"{scheme} was not run: {reason}" for scheme, reason in data["not_run"].items()),
        LEGEND,
    ])  # fmt: skip


def _shown(value: dict[str, float], *, percent: bool = False) -> str:
    low, median, high = (value[name] * (100 if percent else 1) for name in ("low", "median", "high"))
    digits, unit = (1, " %") if percent else (2, "")
    return f"{median:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"
