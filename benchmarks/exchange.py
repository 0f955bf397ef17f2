"""The head exchange of a Gated DeltaNet layer beside megatron-core's own: copies, collectives, waits and time.

    python benchmarks/exchange.py --tokens 2048 --cp 2 --repeats 20

Local gloo processes with one thread each run both over the same values, one after the other within every repeat. The
layer has the shape of Qwen3-Next's. Megatron's side is what `GatedDeltaNet.forward` of megatron-core 0.19.2 does around
its two collectives, with its own functions. Before anything is timed, both must deliver the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp import Layout, Packing, Plan, plan_linear
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.pack import like_rows
from megatron_cp.exchange.sections import Section, Sections
from megatron_cp.executor.exchange import to_heads, to_tokens
from megatron_cp.executor.groups import TorchGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.counters import Counters

HEADS, KEY_HEADS, HEAD_DIM = 32, 16, 128  # of Qwen3-Next-80B-A3B's Gated DeltaNet layers
HEADS_OF = {"q": KEY_HEADS, "k": KEY_HEADS, "v": HEADS, "z": HEADS, "beta": HEADS, "alpha": HEADS}  # Megatron's order
DIM_OF = {"q": HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM, "z": HEAD_DIM, "beta": 1, "alpha": 1}
WIDTH_OF = {name: HEADS_OF[name] * DIM_OF[name] for name in HEADS_OF}
ALL = tuple(WIDTH_OF)
NO_GATE = ("q", "k", "v", "beta", "alpha")
PROJECTION = [sum(WIDTH_OF[name] for name in part) for part in (("q", "k", "v"), ("z",), ("beta",), ("alpha",))]
MEGATRON = "megatron-core"
STAGES = ("inbound forward", "inbound backward", "outbound forward", "outbound backward")

LEGEND = """\
*gradients*: how they arrive on the head side: *in place* is where the inputs stood, as a kernel that asked `like_rows`
for its buffers writes them (for megatron-core, one tensor of all sections); *separate* is a tensor of its own for each,
which most kernels return (for megatron-core, after its own `torch.split`). *Cut from one projection*: what travels is
columns of one tensor with the gate, and autograd joins the gradients of all: that is counted and timed.
*passes*: bytes written by copy-like operators in units of what enters the exchange; *MiB*: the same bytes on a rank.
*syncs*: operators and methods that make the host wait. Ratios of times are medians [quartiles] over the repeats, of the
slowest rank; *local*: without the time inside the collective; *copy*: one warm copy of what enters the exchange."""

Outputs = list[Tensor]
Gradients = tuple[Outputs, list[Tensor]]  # the tensors to differentiate and the gradient of each


@dataclass
class Contender:
    """One way to do one exchange.

    Attributes:
        way: "inbound" (tokens to heads) or "outbound".
        inputs: leaves of the graph.
        entering: bytes of what enters the exchange: the unit of copy passes.
        forward: from the inputs to what the layer goes on with.
        gradients: for each form in which the gradients of those arrive, how to get them.
        expected: what `forward` must return, bit for bit, each flattened to `[rows, features]`.
    """

    name: str
    way: str
    inputs: list[Tensor]
    entering: int
    forward: Callable[[], Outputs]
    gradients: dict[str, Callable[[Outputs], Gradients]]
    expected: list[Tensor]


@dataclass
class Seen:
    """What one stage of one contender did on one rank."""

    entering: int
    written: int = 0
    collectives: int = 0
    host_syncs: int = 0
    seconds: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)  # without the collective
    copy: list[float] = field(default_factory=list)  # a warm copy of `entering` bytes


class Wire:
    """Times torch.distributed's all-to-all, whoever calls it."""

    def __init__(self) -> None:
        self.seconds, self._all_to_all = 0.0, dist.all_to_all_single

    def __enter__(self) -> Wire:
        dist.all_to_all_single = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._all_to_all

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._all_to_all(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


class Batch:
    """One rank's share of a packed batch: the stream of all sections, which every rank draws alike, and its parts."""

    def __init__(self, lengths: tuple[int, ...], group: TorchGroup) -> None:
        self.packing, self.group = Packing(lengths), group
        random = torch.Generator().manual_seed(0)
        self.stream = torch.randn(self.packing.total, sum(WIDTH_OF.values()), generator=random).bfloat16()
        self.columns = dict(zip(ALL, self.stream.split(list(WIDTH_OF.values()), -1), strict=True))

    def plan_of(self, layout: Layout) -> Plan:
        """The layer's plan, without the gate."""
        return plan_linear(
            self.packing, layout, "gdn", heads=HEADS, key_heads=KEY_HEADS, head_dim=HEAD_DIM, value_head_dim=HEAD_DIM,
            mode="headwise",
        )  # fmt: skip

    def own_heads(self, name: str) -> Tensor:
        """`[T, h, d]` this rank's heads of a section, in a tensor of its own."""
        heads = self.columns[name].unflatten(-1, (HEADS_OF[name], DIM_OF[name]))
        return heads.chunk(self.group.size, 1)[self.group.rank].contiguous()

    def local(self, layout: Layout, *names: str) -> Tensor:
        """`[t, f]` this rank's tokens of some sections."""
        return layout.shard(torch.cat([self.columns[name] for name in names], -1), self.group.rank)


# -- the contenders ----------------------------------------------------------------------------------------------------
# The gradient of every element is the element itself, so that the gradient of each input must be the input.


def ours(batch: Batch, layout_name: str, layout: Layout) -> list[Contender]:
    """Both directions from one layout: with the gate, as Megatron sends it, and without, as the layer does it."""
    plan, group = batch.plan_of(layout), batch.group
    inbound, outbound = plan.steps[0].exchange, plan.steps[-1].exchange
    ranges = {name: plan.deal.groups if name in ("q", "k") else plan.deal.heads for name in ALL}
    with_gate = Exchange(layout, Sections(tuple(Section(n, HEADS_OF[n], DIM_OF[n], ranges[n]) for n in ALL)))

    def in_place(outputs: Outputs) -> Gradients:
        gradients = like_rows(*outputs)
        for gradient, output in zip(gradients, outputs, strict=True):
            gradient.copy_(output.detach())
        return outputs, gradients

    def separate(outputs: Outputs) -> Gradients:
        return outputs, [output.detach().clone(memory_format=torch.contiguous_format) for output in outputs]

    def inbound_of(what: str, names: tuple[str, ...], exchange: Exchange, inputs: list[Tensor]) -> Contender:
        return Contender(
            f"{layout_name}, {what}", "inbound", inputs, sum(x.nbytes for x in inputs),
            lambda: to_heads(exchange, group, *inputs), {"in place": in_place, "separate": separate},
            [batch.own_heads(name) for name in names],
        )  # fmt: skip

    parts = [("q", "k", "v"), ("beta",), ("alpha",)]
    projection = leaf(batch.local(layout, *ALL))

    def cut_projection() -> Outputs:
        qkv, z, beta, alpha = projection.split(PROJECTION, -1)
        return [*to_heads(inbound, group, qkv, beta, alpha), z]

    sent = [leaf(batch.local(layout, *part)) for part in parts]
    cut = Contender(
        f"{layout_name}, without the gate, cut from one projection", "inbound", [projection],
        sum(x.nbytes for x in sent), cut_projection, {"separate": separate},
        [*(batch.own_heads(name) for name in NO_GATE), batch.local(layout, "z")],
    )  # fmt: skip
    out = leaf(batch.own_heads("v"))  # as wide as the layer's output
    back = Contender(
        layout_name, "outbound", [out], out.nbytes, lambda: to_tokens(outbound, group, out), {"": separate},
        [batch.local(layout, "v")],
    )  # fmt: skip
    return [
        inbound_of("with the gate", ALL, with_gate, [leaf(batch.local(layout, *ALL))]),
        inbound_of("without the gate", NO_GATE, inbound, sent),
        cut,
        back,
    ]


def megatron(batch: Batch) -> list[Contender]:
    """Both directions as `GatedDeltaNet.forward` and `_gated_norm_and_a2a` do them for a packed batch."""
    import megatron.core.ssm.gated_delta_net.common as gdn

    group, size = batch.group.group, batch.group.size
    layout, total = Layout.zigzag(batch.packing, size), batch.packing.total
    cu_seqlens = torch.from_numpy(batch.packing.cu_seqlens.astype(np.int32))
    split = [sum(WIDTH_OF[name] for name in part) // size for part in (("q", "k", "v"), ("z",), ("beta",), ("alpha",))]
    local = leaf(batch.local(layout, *ALL)[:, None])

    def inbound() -> Outputs:
        heads = gdn._build_head_perm_for_split_sections(tuple(WIDTH_OF.values()), size, local.device)
        x = local.index_select(-1, heads)
        x = gdn.tensor_a2a_cp2hp(x, 0, -1, group, undo_attention_load_balancing=False)
        index, _ = gdn._build_thd_cp_a2a_perm(cu_seqlens, size, total)
        return [x.index_select(0, index)]

    out = leaf(batch.own_heads("v").flatten(1)[:, None])
    _, inverse = gdn._build_thd_cp_a2a_perm(cu_seqlens, size, total)  # the inbound stage has made it

    def outbound() -> Outputs:
        return [gdn.tensor_a2a_hp2cp(out.index_select(0, inverse), 0, -1, group, redo_attention_load_balancing=False)]

    def whole(outputs: Outputs) -> Gradients:
        return outputs, [output.detach().clone() for output in outputs]

    def separate(outputs: Outputs) -> Gradients:
        return whole(list(outputs[0].split(split, -1)))

    own = torch.cat([batch.own_heads(name).flatten(1) for name in ALL], -1)
    forms = {"in place": whole, "separate": separate}
    back = [batch.local(layout, "v")]
    return [
        Contender(MEGATRON, "inbound", [local], local.nbytes, inbound, forms, [own]),
        Contender(MEGATRON, "outbound", [out], out.nbytes, outbound, {"": whole}, back),
    ]


def leaf(tensor: Tensor) -> Tensor:
    """A dense tensor that gradients are wanted for."""
    return tensor.contiguous().requires_grad_()


# -- measuring ---------------------------------------------------------------------------------------------------------


def rank_main(group: TorchGroup, lengths: tuple[int, ...], repeats: int) -> tuple[dict[str, Seen], dict[str, int]]:
    """Everything on one rank: the same bits first, then counts, then times."""
    batch = Batch(lengths, group)
    contenders = megatron(batch)
    contenders += ours(batch, "zigzag", Layout.zigzag(batch.packing, group.size))
    contenders += ours(batch, "contiguous", Layout.contiguous(batch.packing, group.size))
    for contender in contenders:
        check(contender)

    seen: dict[str, Seen] = {}
    with Wire() as wire:
        for contender in contenders:
            run(contender, lambda key, call, c=contender: counted(seen, c, key, call))
        for repeat in range(repeats):
            turn = repeat % len(contenders)  # nobody always comes first
            for contender in contenders[turn:] + contenders[:turn]:
                copy = copy_seconds(group, contender.entering)

                def timed(key: str, call: Callable[[], Any], copy: float = copy) -> Any:
                    group.barrier()
                    wire.seconds, start = 0.0, time.perf_counter()
                    result = call()
                    elapsed = time.perf_counter() - start
                    seen[key].seconds.append(elapsed)
                    seen[key].local.append(elapsed - wire.seconds)
                    seen[key].copy.append(copy)
                    return result

                run(contender, timed)
    return seen, megatron_checks(batch)


def run(contender: Contender, measure: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Forward, and backward for each form of gradients, every stage through `measure(key, call)`."""
    outputs = measure(key_of(contender, "forward"), contender.forward)
    for form, gradients_of in contender.gradients.items():
        outs, gradients = gradients_of(outputs)
        measure(
            key_of(contender, "backward", form),
            lambda outs=outs, gradients=gradients: torch.autograd.grad(
                outs, contender.inputs, gradients, retain_graph=True
            ),
        )


def key_of(contender: Contender, direction: str, form: str = "") -> str:
    """What a stage is known by."""
    return "|".join((f"{contender.way} {direction}", contender.name, form))


def check(contender: Contender) -> None:
    """The right bits, forward and backward."""
    outputs = contender.forward()
    for actual, expected in zip(outputs, contender.expected, strict=True):
        assert torch.equal(actual.flatten(1), expected.flatten(1)), contender.name
    for gradients_of in contender.gradients.values():
        outs, gradients = gradients_of(outputs)
        found = torch.autograd.grad(outs, contender.inputs, gradients, retain_graph=True)
        assert all(map(torch.equal, found, contender.inputs)), contender.name


def megatron_checks(batch: Batch) -> dict[str, int]:
    """What makes the host wait in `GatedDeltaNet.forward` before its exchange: its checks of the document offsets."""
    from megatron.core.ssm.gated_delta_net.common import _GDNBase as Base

    offsets, counters = torch.from_numpy(batch.packing.cu_seqlens.astype(np.int32)), Counters()
    with counters:
        q, kv = (Base._resolve_cu_seqlens(None, None, offsets, batch.packing.total, n, batch.group.size) for n in "qk")
        torch.equal(q, kv)
    return dict(counters.host_syncs)


def counted(seen: dict[str, Seen], contender: Contender, key: str, call: Callable[[], Any]) -> Any:
    """`call()` under `Counters`."""
    counters = Counters()
    with counters:
        result = call()
    seen[key] = Seen(
        contender.entering, sum(counters.copied.values()), counters.collectives, sum(counters.host_syncs.values())
    )
    return result


def copy_seconds(group: TorchGroup, size: int) -> float:
    """A copy between two buffers that are in memory already, on all ranks at once."""
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    group.barrier()
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


# -- the report --------------------------------------------------------------------------------------------------------


def combined(ranks: list[dict[str, Seen]]) -> list[dict[str, Any]]:
    """One row a stage, contender and form of gradients: counts of the busiest rank, times of the slowest."""

    def slowest(key: str, what: str) -> np.ndarray:
        return np.max([getattr(rank[key], what) for rank in ranks], axis=0)

    rows = []
    for stage in STAGES:
        for key in (key for key in ranks[0] if key.startswith(f"{stage}|")):
            _, name, form = key.split("|")
            theirs = f"{stage}|{MEGATRON}|{form}"
            busiest = max((rank[key] for rank in ranks), key=lambda seen: seen.written)
            rows.append({
                "stage": stage,
                "contender": name,
                "gradients": form,
                "copy_passes": busiest.written / busiest.entering,
                "bytes_written": busiest.written,
                "collectives": busiest.collectives,
                "host_syncs": busiest.host_syncs,
                "megatron_over_ours": spread(slowest(theirs, "seconds") / slowest(key, "seconds")),
                "megatron_over_ours_local": spread(slowest(theirs, "local") / slowest(key, "local")),
                "over_copy": spread(slowest(key, "seconds") / slowest(key, "copy")),
                "local_over_copy": spread(slowest(key, "local") / slowest(key, "copy")),
                "milliseconds": spread(slowest(key, "seconds") * 1e3),
            })  # fmt: skip
    return rows


def spread(values: np.ndarray) -> dict[str, float]:
    """The median and the quartiles on either side."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, one table a stage."""
    lines = []
    for stage in STAGES:
        lines += [
            f"\n### {stage.capitalize()}\n",
            "| | gradients | passes | MiB | collectives | syncs | megatron / this | same, local | this / copy "
            "| same, local | ms |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for row in (row for row in rows if row["stage"] == stage):
            megatrons = row["contender"] == MEGATRON
            ratios = ["", ""] if megatrons else [shown(row[f"megatron_over_ours{end}"]) for end in ("", "_local")]
            cells = [
                row["contender"], row["gradients"], f"{row['copy_passes']:.2f}", f"{row['bytes_written'] / 2**20:.1f}",
                row["collectives"], row["host_syncs"], *ratios, shown(row["over_copy"]), shown(row["local_over_copy"]),
                shown(row["milliseconds"], 1),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def shown(value: dict[str, float], digits: int = 2) -> str:
    """A spread as text."""
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def ragged_lengths(tokens: int, multiple: int) -> tuple[int, ...]:
    """Up to 7 documents of very different lengths, all multiples of `multiple` as Megatron needs, `tokens` in all."""
    units = tokens // multiple
    cuts = np.unique(np.round(units * np.array([0, 0.01, 0.05, 0.17, 0.2, 0.45, 0.52, 1])).astype(int))
    return tuple((np.diff(cuts) * multiple).tolist())


def main() -> int:
    """Reads the command line, runs the ranks and prints what they found."""
    parser = argparse.ArgumentParser(description="The head exchange of a Gated DeltaNet layer beside megatron-core's.")
    parser.add_argument("--tokens", type=int, default=2048, help="in the whole batch (default: 2048)")
    parser.add_argument("--cp", type=int, default=2, help="ranks, each a process with one thread (default: 2)")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds, after one for warming (default: 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of standard output")
    args = parser.parse_args()
    if args.cp < 2 or KEY_HEADS % args.cp:
        parser.error(f"--cp: got {args.cp}; allowed: divisors of {KEY_HEADS} above 1, as Megatron needs")
    if args.repeats < 1 or args.tokens < 1 or args.tokens % (2 * args.cp):
        parser.error(f"--tokens: got {args.tokens}; allowed: multiples of 2 * cp = {2 * args.cp}; --repeats: 1 or more")
    try:
        megatron_version = version("megatron-core")
    except PackageNotFoundError:
        parser.error("megatron-core is not installed; pip install 'megatron_cp[megatron]'")

    # As a GPU's caching allocator does: freed blocks (to 32 MiB, glibc's limit) are kept, not paged in anew each time.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the ranks: Megatron warns about packages that nothing here uses
    lengths = ragged_lengths(args.tokens, 2 * args.cp)
    answers = run_ranks(rank_main, args.cp, lengths, args.repeats, kind="processes", timeout=60 + 20 * args.repeats)
    rows = combined([stages for stages, _ in answers])
    versions = {"megatron-core": megatron_version, "torch": torch.__version__, "python": platform.python_version()}
    data = {
        "tokens": args.tokens, "lengths": lengths, "cp": args.cp, "repeats": args.repeats, "versions": versions,
        "cores": os.cpu_count(), "megatron_host_syncs_in_checks": answers[0][1], "stages": rows,
    }  # fmt: skip
    print(f"documents {list(lengths)}, cp {args.cp}, {args.repeats} repeats; {versions}, {data['cores']} cores")
    print(table(rows))
    print(f"\n{LEGEND}\nNot in the tables: Megatron's checks of the offsets before each exchange wait: {answers[0][1]}")
    if args.json:
        print(json.dumps(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
