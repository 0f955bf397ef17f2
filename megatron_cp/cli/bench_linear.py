"""`megatron-cp bench linear`: what segments cost beside whole documents, what a mixer saves, headwise and chunkwise."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megatron_cp.cli.main import Report
from megatron_cp.cli.measure import (
    DIRECTIONS,
    Timing,
    Watch,
    WatchedGroup,
    formatted,
    interleaved_order,
    kept_blocks,
    spread,
    with_defaults,
)
from megatron_cp.cli.options import case_of, hosts_of_job
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.agreement import check_agreement
from megatron_cp.executor.groups import Message, Pending, RankGroup, ThreadGroup, TorchGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear.activations import softplus
from megatron_cp.linear.kernels import Delta, Inputs, StateSpace, choose_conv, choose_rule
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.linear.reductions import l2_normalised
from megatron_cp.testing.memory import PeakMemory
from megatron_cp.testing.parity import TOLERANCES, Case, Problem, draw, relative_error, run_linear

LAYERS = ("gdn", "kda", "mamba", "conv1d")
MODES = ("headwise", "chunkwise")
PLACES = ("first", "middle", "last", "few")
MEGATRON = "megatron-core"
TARGET = 1.35  # of the time of a middle segment over that of a whole document, forward and backward together
_RANKS, _PIECES = 3, 32
_SHAPES = {
    "gdn": {"heads": 4, "key_heads": 2, "head_dim": 128},
    "kda": {"heads": 4, "key_heads": 4, "head_dim": 128},
    "mamba": {"heads": 8, "groups": 1, "head_dim": 64, "state": 128},
    "conv1d": {"heads": 8, "head_dim": 128},
}

LEGEND = f"""\
A rank's tokens: {{rule}}, on one thread and without a wire: what others send is zero.
first, middle, last: as that segment of a document over {_RANKS} ranks, over the plain kernel on the same tokens as one
document. few: as up to {_PIECES} pieces, the first continuing a document and the last continued, over the plain
kernel on the same pieces as whole documents. {MEGATRON}: its own function over ours, on one document.
Whole mixers, on all ranks: local leaves transfers out, wall is by the clock, with transfers and with whatever else
shares the cores; both of the slowest rank. wait: the share of all ranks' wall time spent starting and awaiting
transfers. sent: MiB to other ranks, of the rank that sends most, counted as they were sent. saved: KiB a token, of all
ranks, that autograd keeps from forward to backward, the mixer's inputs included, its parameters not.
Medians [quartiles] over the repeats, of ratios within each. On the CPU local time is that of a rank's own thread, which
others on the same core do not change; on CUDA it is that of its stream."""


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """What the command prints."""
    args = with_defaults(args, world, LAYERS, _SHAPES)
    if args.scheme is not None:
        raise ArgumentError("--scheme", args.scheme, "nothing", f"This benchmark measures {' and '.join(MODES)}.")
    args.layout = args.layout or "contiguous"
    hosts = hosts_of_job(args, world, args.cp)
    cases = {mode: case_of(args, args.cp, kernel=args.kernel, device=args.device, hosts=hosts) for mode in MODES}
    cases = {mode: replace(case, scheme=mode) for mode, case in cases.items()}
    for case in cases.values():
        case.refuse_early()
    ranks = _measured(cases, args, world)
    data = {
        **_ratios(cases, ranks),
        "cp": args.cp,
        "layer": args.layer,
        "lengths": list(cases["chunkwise"].lengths),
        "repeats": args.repeats,
        "device": args.device,
        "kernel": ranks[0].kernel,
        "torch": torch.__version__,
        "megatron_core": None if MEGATRON in ranks[0].not_run else version(MEGATRON),
        "cores": os.cpu_count(),
        "not_run": ranks[0].not_run,
    }
    return Report(_text(cases["chunkwise"], data), data, quiet=world is not None and world.rank != 0)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Saved:
    """Bytes that one forward of a mixer leaves for its backward on one rank.

    Attributes:
        numbers: what autograd saved, the mixer's inputs included, its parameters not.
        masks: booleans that it saved.
        indices: integers that this forward made and that anything still holds.
        tables: of integers that were there before, made once for all layers of the batch, what autograd refers to.
    """

    numbers: int = 0
    masks: int = 0
    indices: int = 0
    tables: int = 0


@dataclass
class Seen:
    """What one rank measured.

    Attributes:
        kernel: its name.
        local: the first rank's work on its own tokens, for each way that they may stand and each direction.
        spent: of whole mixers, for each mode and direction: every repeat.
        saved: of each mode.
        not_run: peers, and why.
    """

    kernel: str
    local: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    spent: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


Measure = Callable[[str, Callable[[], Any]], Any]


@dataclass
class Work:
    """A differentiable computation that may be run again and again."""

    forward: Callable[[RankGroup], Tensor]
    inputs: list[Tensor]
    gradient: Tensor
    group: RankGroup

    def step(self, measure: Measure, watch: Watch) -> None:
        """Forward and backward, each through `measure(direction, call)`."""
        group = WatchedGroup(self.group, watch)
        out = measure("forward", lambda: self.forward(group))
        # Engine threads of its own would not be on this thread's clock.
        with torch.autograd.set_multithreading_enabled(False):
            measure("backward", lambda: torch.autograd.grad(out, self.inputs, self.gradient))


def _measured(cases: dict[str, Case], args: argparse.Namespace, world: TorchGroup | None) -> list[Seen]:
    if world is not None:
        for case in cases.values():
            check_agreement(case.plan(), world)
        return world.all_gather_object(measure_in_process(world, cases, args.repeats))
    function = measure if args.ranks == "threads" else measure_in_process
    with kept_blocks():
        return run_ranks(function, args.cp, cases, args.repeats, kind=args.ranks, timeout=args.timeout)


def measure_in_process(group: RankGroup, cases: dict[str, Case], repeats: int) -> Seen:
    """`measure`, on a rank that has its process to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return measure(group, cases, repeats)


def measure(group: RankGroup, cases: dict[str, Case], repeats: int) -> Seen:
    """Everything on one rank: whole mixers, then, on the first rank alone, what it does with its tokens."""
    case = cases["chunkwise"]
    watch = Watch(torch.device(case.device).type)
    problem = draw(case)
    seen = Seen(_kernel_of(case))
    mixers = {mode: mixer(one, problem, group) for mode, one in cases.items()}
    seen.saved = {mode: saved_bytes(work, work.inputs[len(problem.inputs) :]) for mode, work in mixers.items()}
    seen.spent = _interleaved(mixers, repeats, watch, group.barrier)
    if group.rank == 0:
        works = segments(case, int(case.plan().layout.token_counts.max()))
        try:
            works |= _peer(case, works["plain"])
        except ImportError as error:
            seen.not_run[MEGATRON] = str(error)
        seen.local = _interleaved(works, repeats, watch)
    group.barrier()
    return seen


def _interleaved(
    works: Mapping[str, Work], repeats: int, watch: Watch, barrier: Callable[[], None] = lambda: None
) -> dict[tuple[str, str], list[Timing]]:
    """What each work took in each direction, one after the other within every repeat."""
    spent: dict[tuple[str, str], list[Timing]] = {(name, way): [] for name in works for way in DIRECTIONS}
    for work in works.values():
        work.step(lambda _, call: call(), watch)
    for name in interleaved_order(list(works), repeats):

        def timed(way: str, call: Callable[[], Any], name: str = name) -> Any:
            barrier()
            result, took = watch.timed(call)
            spent[name, way].append(took)
            return result

        works[name].step(timed, watch)
    return spent


# -- whole mixers ------------------------------------------------------------------------------------------------------


def mixer(case: Case, problem: Problem, group: RankGroup) -> Work:
    """A case's layer on one rank; the parameters are the last inputs."""
    plan = case.plan()

    def own(stream: Tensor) -> Tensor:
        return plan.layout.shard(stream, group.rank).detach().clone()

    inputs = {name: own(x).requires_grad_() for name, x in problem.inputs.items()}
    parameters = {name: x.detach().clone().requires_grad_() for name, x in problem.parameters.items()}
    return Work(
        lambda ranks: run_linear(ranks, case, plan, inputs, parameters),
        [*inputs.values(), *parameters.values()], own(problem.output_gradient), group,
    )  # fmt: skip


Storages = dict[int, tuple[StorageWeakRef, int]]  # with their bytes, by an address that none shares while it is here


class _Types(PeakMemory):
    """Also remembers the storages that operators take or make as integers, and as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._integers: Storages = {}
        self._numbers: Storages = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket is torch.ops.aten.resize_:
            self._numbers |= _storage(result)  # one of the group's buffers, in which numbers travel as bytes
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                storages = {"indices": self._integers, "numbers": self._numbers}.get(_kind(leaf))
                if storages is not None:
                    storages |= _storage(leaf)
        return result

    def indices(self) -> dict[int, int]:
        """The bytes of storages in use that hold integers: not what numbers travelled in as bytes."""
        return {
            key: size
            for key, (storage, size) in self._integers.items()
            if key not in self._numbers and not storage.expired()
        }


def _kind(tensor: Tensor) -> str:
    return "numbers" if tensor.is_floating_point() else "masks" if tensor.dtype == torch.bool else "indices"


def _storage(tensor: Tensor) -> Storages:
    storage = tensor.untyped_storage()
    reference = StorageWeakRef(storage)
    return {reference.cdata: (reference, storage.nbytes())}


def saved_bytes(work: Work, parameters: Sequence[Tensor]) -> Saved:
    """What one forward leaves for backward once the batch's tables are there: in the second layer of a model."""
    kept: Storages = {}
    kinds: dict[int, str] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        kept.update(storage)
        kinds.update(dict.fromkeys(storage, _kind(tensor)))
        return tensor.detach()

    first, second = _Types(), _Types()
    with first:
        before = work.forward(first.watch(work.group))
    with second, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = work.forward(second.watch(work.group))
    own = second.indices().keys() - first.indices().keys()  # both graphs are there, and so all that they hold
    found = Saved(indices=sum(second.indices()[key] for key in own))
    of_parameters = {key for parameter in parameters for key in _storage(parameter)}
    for key, (storage, size) in kept.items():
        if key not in of_parameters and key not in own and not storage.expired():
            what = {"indices": "tables"}.get(kinds[key], kinds[key])
            setattr(found, what, getattr(found, what) + size)
    del before, out
    return found


# -- a rank's own tokens -----------------------------------------------------------------------------------------------


class _NoWire(RankGroup):
    """One rank of several, to whom the others send zeros at once."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.agreed.compares_calls = False  # with whom?

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        received.detach().zero_()
        return _Done()

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        received.detach().zero_()
        return _Done()

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in receives:
            message.tensor.detach().zero_()
        return _Done()

    def barrier(self) -> None:
        pass


class _Done(Pending):
    def wait(self) -> None:
        pass


def segments(case: Case, tokens: int) -> dict[str, Work]:
    """A rank's own part of the rule, or of the convolution where that is all, for every way its tokens may stand.

    Since what others send is zero, segments compute what whole documents do.
    """
    values = _drawn(case, tokens)
    pieces = piece_lengths(tokens)
    # The first piece continues a document of the rank before, the last one goes on on the rank after.
    begun, continued = min(pieces[0], tokens - 1), min(pieces[-1], tokens - 1)
    cut = [tokens - begun, begun + pieces[0], *pieces[1:-1], pieces[-1] + continued, tokens - continued]
    if len(pieces) == 1:
        cut = [_RANKS * tokens]
    alone = {"plain": [tokens], "few plain": pieces}
    spread_out = {name: (rank, [_RANKS * tokens]) for rank, name in enumerate(PLACES[:_RANKS])} | {"few": (1, cut)}
    works = {
        name: _own_part(case, lengths, 1, ThreadGroup.create(1)[0], "headwise", values)
        for name, lengths in alone.items()
    }
    for name, (rank, lengths) in spread_out.items():
        works[name] = _own_part(case, lengths, _RANKS, _NoWire(rank, _RANKS), "chunkwise", values)
    return works


def piece_lengths(tokens: int) -> list[int]:
    """Up to `_PIECES` documents of very different lengths, `tokens` in all; always the same."""
    draws = np.random.default_rng(0).lognormal(mean=3.0, sigma=1.2, size=_PIECES)
    edges = np.unique(np.round(np.cumsum(draws) / draws.sum() * tokens).astype(int))
    lengths: list[int] = np.diff(edges, prepend=0).tolist()
    return [length for length in lengths if length]


def _own_part(
    case: Case, lengths: Sequence[int], ranks: int, group: RankGroup, mode: str, values: list[Tensor]
) -> Work:
    case = replace(case, cp=ranks, lengths=tuple(lengths), layout="contiguous", align=1, scheme=mode)
    plan = case.plan()
    inputs = [x.detach().clone().requires_grad_() for x in values]
    random = torch.Generator().manual_seed(case.seed)

    def conv(group: RankGroup) -> Tensor:
        share = LinearOnRank(plan, group, case.kernel, "values", inputs[0])
        x = inputs[0] if share.is_chunkwise else inputs[0][..., None]
        return share.convolved([x], *inputs[1:], count=1)[0].flatten(1)

    def rule(group: RankGroup) -> Tensor:
        share = LinearOnRank(plan, group, case.kernel, "values", inputs[0])
        named = StateSpace(*inputs) if case.layer == "mamba" else Delta(*inputs)
        return share.recurrence(named, 1.0 if case.layer == "mamba" else case.head_dim**-0.5)

    values_of = inputs[2] if case.layer in ("gdn", "kda") else inputs[0]
    gradient = torch.randn(values_of.shape, generator=random, dtype=torch.float64).to(values_of)
    return Work(conv if case.layer == "conv1d" else rule, inputs, gradient, group)


def _drawn(case: Case, tokens: int) -> list[Tensor]:
    """What the rule takes, as the mixers of `draw` would hand it over; of conv1d what the layer takes."""
    random = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    heads, groups, dk, dv = case.heads, case.groups, case.head_dim, case.value_head_dim
    if case.layer == "conv1d":
        problem = draw(replace(case, lengths=(tokens,)))
        return [*problem.inputs.values(), *problem.parameters.values()]
    rates = (0.3 * normal(heads) - 1).exp()
    steps = softplus(normal(tokens, heads) - 1)
    inputs: Inputs
    if case.layer == "mamba":
        inputs = StateSpace(
            normal(tokens, heads, dv), steps, -rates, normal(tokens, groups, dk), normal(tokens, groups, dk)
        )
    else:
        decay = -rates * steps if case.layer == "gdn" else -rates[:, None] * softplus(normal(tokens, heads, dk) - 1)
        q, k = (l2_normalised(normal(tokens, groups, dk)) for _ in "qk")
        inputs = Delta(q, k, normal(tokens, heads, dv), decay, normal(tokens, heads).sigmoid())
    return [x.to(case.dtype).to(case.device) for x in inputs]


def _kernel_of(case: Case) -> str:
    group = ThreadGroup.create(case.cp)[0]
    share = LinearOnRank(
        case.plan(), group, case.kernel, "values", torch.empty(0, dtype=case.dtype, device=case.device)
    )
    return (choose_conv if case.layer == "conv1d" else choose_rule)(case.kernel, share.call).name


def _peer(case: Case, plain: Work) -> dict[str, Work]:
    """megatron-core's own function for the same, in plain torch.

    Raises:
        ImportError: it is not installed, or has nothing for this layer.
    """
    if case.layer != "gdn":
        raise ImportError(f"it has nothing of its own in plain torch for {case.layer}")
    from megatron_cp.megatron.peers import gated_delta_rule

    inputs = [x.detach().clone().requires_grad_() for x in plain.inputs]
    theirs = Work(lambda _: gated_delta_rule(*inputs), inputs, plain.gradient, plain.group)
    tolerance = 10 * max(TOLERANCES[case.dtype], TOLERANCES[torch.float32])  # they compute in float32
    with torch.no_grad():
        error = relative_error(theirs.forward(plain.group), plain.forward(plain.group), 1e-3)
    if not error <= tolerance:
        raise RuntimeError(f"megatron-core's gated delta rule is {error:.2g} from ours, more than {tolerance:.0e}")
    return {MEGATRON: theirs}


# -- the report --------------------------------------------------------------------------------------------------------

_BOTH = (*DIRECTIONS, "both")


def _ratios(cases: dict[str, Case], ranks: list[Seen]) -> dict[str, Any]:
    """What the ranks found, ratios first."""
    local, plans = ranks[0].local, {mode: case.plan() for mode, case in cases.items()}
    item_size = cases["chunkwise"].dtype.itemsize
    tokens = sum(cases["chunkwise"].lengths)

    def alone(name: str, way: str) -> Any:
        return _summed(way, lambda one: np.array([spent.busy for spent in local[name, one]]))

    def slowest(mode: str, way: str, what: str) -> Any:
        return _summed(
            way, lambda one: np.array([[getattr(s, what) for s in rank.spent[mode, one]] for rank in ranks]).max(0)
        )

    def over(name: str, other: str) -> dict[str, Any]:
        return {way: spread(alone(name, way) / alone(other, way)) for way in _BOTH}

    def headwise_over(what: str) -> dict[str, Any]:
        return {way: spread(slowest("headwise", way, what) / slowest("chunkwise", way, what)) for way in _BOTH}

    def waiting(mode: str, way: str) -> dict[str, float]:
        wire, wall = (
            np.array([[getattr(s, what) for s in rank.spent[mode, way]] for rank in ranks]).sum(0)
            for what in ("wall_wire", "wall")
        )
        return spread(wire / wall)

    def milliseconds(what: str) -> dict[str, Any]:
        return {mode: {way: spread(slowest(mode, way, what) * 1e3) for way in _BOTH} for mode in MODES}

    def of_directions(value: Callable[[str, str], Any]) -> dict[str, Any]:
        return {mode: {way: value(mode, way) for way in DIRECTIONS} for mode in MODES}

    def saved(what: str) -> dict[str, int]:
        return {mode: sum(getattr(rank.saved[mode], what) for rank in ranks) for mode in MODES}

    kept = saved("numbers")
    over_plain = {name: over(name, "few plain" if name == "few" else "plain") for name in PLACES}
    middle = over_plain["middle"]["both"]["median"]
    return {
        "chunkwise_over_plain": over_plain,
        "target": {"middle_both_at_most": TARGET, "met": middle <= TARGET},
        "megatron_over_ours": over(MEGATRON, "plain") if (MEGATRON, "forward") in local else None,
        "headwise_over_chunkwise": headwise_over("wall"),
        "headwise_over_chunkwise_local": headwise_over("busy"),
        "wait_share": of_directions(waiting),
        "saved_headwise_over_chunkwise": kept["headwise"] / kept["chunkwise"],
        "saved_bytes_per_token": {mode: kept[mode] / tokens for mode in MODES},
        "saved_mask_bytes": saved("masks"),
        "saved_index_bytes": saved("indices"),
        "shared_table_bytes": saved("tables"),
        "local_ms": {
            name: {way: spread(alone(name, way) * 1e3) for way in _BOTH} for name in dict.fromkeys(n for n, _ in local)
        },
        "busy_ms": milliseconds("busy"),
        "transfer_ms": milliseconds("wall_wire"),
        "wall_ms": milliseconds("wall"),
        "bytes_sent_per_rank": of_directions(lambda mode, way: [rank.spent[mode, way][-1].sent for rank in ranks]),
        "bytes_planned_per_rank": of_directions(
            lambda mode, way: plans[mode].bytes_sent(item_size, forward=way == "forward")
        ),
    }


def _summed(way: str, value: Callable[[str], Any]) -> Any:
    """Of one direction, or of both together."""
    return sum(value(one) for one in DIRECTIONS) if way == "both" else value(way)


def _text(case: Case, data: dict[str, Any]) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    what = "the convolution" if case.layer == "conv1d" else "the rule, conv and gates apart"
    target = data["target"]
    middle, few = (data["chunkwise_over_plain"][name]["both"]["median"] for name in ("middle", "few"))
    return "\n".join([
        f"{case.layer} cp={data['cp']} {case.layout}, {sum(data['lengths'])} tokens in {len(data['lengths'])} "
        f"documents, {_shape(case)}, {dtype} on {data['device']}, kernel {data['kernel']}, {data['repeats']} repeats; "
        f"torch {data['torch']}, {data['cores']} cores",
        "",
        *_local_table(data),
        "",
        f"Middle segment, both directions: {middle:.2f} of a whole document, at most {target['middle_both_at_most']} "
        f"is the target: {'met' if target['met'] else 'NOT met'}. Few pieces continue: {few:.2f}.",
        *(f"{name} was not run: {reason}." for name, reason in data["not_run"].items()),
        "",
        *_mixer_table(data),
        "",
        "Index tables that a layer saves: "
        + ", ".join(f"{mode} {count} bytes" for mode, count in data["saved_index_bytes"].items())
        + "; of the batch's, made once, autograd refers to "
        + ", ".join(f"{count}" for count in data["shared_table_bytes"].values())
        + ".",
        LEGEND.format(rule=what),
    ])  # fmt: skip


def _shape(case: Case) -> str:
    if case.layer == "conv1d":
        return f"{case.heads * case.value_head_dim} channels, {case.conv_width} taps"
    if case.layer == "mamba":
        return f"{case.heads} heads of {case.value_head_dim}, {case.groups} groups of {case.head_dim}"
    return f"heads {case.heads}/{case.groups} of {case.head_dim}/{case.value_head_dim}"


def _local_table(data: dict[str, Any]) -> list[str]:
    lines = [
        "| a rank's tokens | forward | backward | both | forward ms | backward ms |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    names = {"plain": "one document", "few plain": "whole pieces", MEGATRON: f"one document, {MEGATRON}"}
    ratios = {**data["chunkwise_over_plain"], MEGATRON: data["megatron_over_ours"]}
    for name, milliseconds in data["local_ms"].items():
        ratio = ratios.get(name)
        cells = [formatted(ratio[way]) if ratio else "" for way in _BOTH]
        cells += [f"{milliseconds[way]['median']:.1f}" for way in DIRECTIONS]
        lines.append(f"| {' | '.join([names.get(name, name), *cells])} |")
    return lines


def _mixer_table(data: dict[str, Any]) -> list[str]:
    lines = [
        "| mixer |  | local ms | transfers ms | wall ms | wait | sent | saved |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for mode in MODES:
        for way in DIRECTIONS:
            cells = [
                mode, way,
                *(f"{data[name][mode][way]['median']:.1f}" for name in ("busy_ms", "transfer_ms", "wall_ms")),
                formatted(data["wait_share"][mode][way], percent=True),
                f"{max(data['bytes_sent_per_rank'][mode][way]) / 2**20:.2f}",
                f"{data['saved_bytes_per_token'][mode] / 2**10:.2f}" if way == "forward" else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    ratios = {"local": "headwise_over_chunkwise_local", "wall": "headwise_over_chunkwise"}
    shares = [
        f"{what} " + ", ".join(f"{way} {formatted(data[name][way])}" for way in _BOTH) for what, name in ratios.items()
    ]
    saved = f"saved {data['saved_headwise_over_chunkwise']:.2f}"
    return [*lines, "", f"headwise / chunkwise: {'; '.join([*shares, saved])}."]
