"""The table of entries: each way into the library with each option, which is exact there or refused by name.

A row is data. `outcome` runs it over ranks that are threads, and holds its outputs and gradients to those of one rank,
and the plan that its operations ran to the one that `plan_attention` or `plan_linear` makes of the row's options: an
entry that drops an option is seen even where dropping it changes no number. In the rows of `entries.csv` any two values
of any two columns meet; `python -m tests.entries` writes it anew, for a new entry or value.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import megatron_cp as cp
from megatron_cp.cli.case_options import case_of
from megatron_cp.cli.main import parsed
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.sections import partition_heads
from megatron_cp.executor.groups.base import Agreed
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import MODES, SCHEMES, may_exchange_heads
from megatron_cp.plan.transport import TRANSPORTS
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.testing.tolerances import CODEC_TOLERANCES
from tests.counting_group import CountingGroup
from tests.fuzz_cases import Call
from tests.fuzz_check import operate
from tests.fuzz_problem import INDEX_DIM, INDEX_HEADS, problem_of

LENGTHS, PARENTS = (11, 1, 18, 0, 7), (-1, 0, 0, -1, 3)
HEADS, GROUPS, DIM, WIDTH, TOPK, LATENT, HIDDEN = 8, 4, 8, 4, 5, (2, 6), 24
STEPS = 2  # of a token of gdp
SOFTMAX = ("attention", "latent", "sparse")
OPERATIONS = {
    "attention": "attention", "latent": "latent_attention", "sparse": "sparse_attention", "gdn": "gated_delta_net",
    "kda": "kda_mixer", "gdn2": "gdn2_mixer", "gdp": "gated_delta_product_mixer", "mamba": "mamba2_mixer",
    "conv1d": "causal_conv1d",
}  # fmt: skip
COLUMNS: dict[str, tuple[Any, ...]] = {
    "layer": (*SOFTMAX, *KINDS),
    "scheme": ("auto", *SCHEMES, *MODES),
    "layout": ("balanced", "zigzag", "contiguous"),
    "transport": TRANSPORTS,
    "codec": ("none", *CODECS),
    "chunks": (None, 2),
    "latent_mode": ("", "auto", *LATENT_MODES),
    "align": (1, 4),
    "cp": (2, 3, 4, 5),
}

# The schemes that "auto" takes for the layers of real models (`test_auto_answers`): each is run at every entry.
_FETCHING = ("a2a", "all_gather", "exact", "exact_by_host", "a2a+all_gather")
ANSWERS: dict[str, tuple[str, ...]] = {
    "attention": (*_FETCHING, "a2a+exact"), "latent": _FETCHING, "sparse": ("exact", "all_gather"),
    **dict.fromkeys(KINDS, tuple(MODES)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A use of the library.

    Attributes:
        entry: one of `ENTRIES`.
        layer: "attention", "latent" (attention to latents), "sparse" (queries choose keys), or a kind of linear layer.
        scheme: of attention, or the mode of a linear layer.
        chunks: the number of head chunks.
        latent_mode: for latents alone; else "".
    """

    entry: str = "plan"
    layer: str = "attention"
    scheme: str = "auto"
    layout: str = "balanced"
    transport: str = "collective"
    codec: str = "none"
    chunks: int | None = None
    latent_mode: str = ""
    align: int = 1
    cp: int = 2

    def __str__(self) -> str:
        return " ".join(str(value) for value in (getattr(self, each.name) for each in fields(self)) if value != "")

    def line(self) -> str:
        """Returns the row as values between commas, as the table has it."""
        return ",".join("" if value is None else str(value) for value in vars(self).values())

    @classmethod
    def read(cls, line: str) -> Row:
        values = dict(zip((each.name for each in fields(cls)), line.split(","), strict=True))
        numbers = {"chunks": int(values["chunks"]) if values["chunks"] else None, "align": int(values["align"])}
        return cls(**values | numbers | {"cp": int(values["cp"])})

    @property
    def is_softmax(self) -> bool:
        return self.layer in SOFTMAX

    @property
    def is_possible(self) -> bool:
        """True if the columns belong together: a layer's schemes, and modes of latents."""
        schemes, entry = SCHEMES if self.is_softmax else MODES, ENTRIES[self.entry]
        fits = self.layer in entry.layers and all(getattr(self, name) in known for name, known in entry.only.items())
        return fits and self.scheme in ("auto", *schemes) and (self.layer == "latent") == (self.latent_mode != "")

    @property
    def options(self) -> dict[str, Any]:
        """The row's options of a plan, as every planning function and spec takes them."""
        made = {
            "scheme" if self.is_softmax else "mode": self.scheme, "codec": self.codec, "head_chunks": self.chunks,
            "transport": cp.Transport.even_hosts(self.transport, self.cp, min(2, self.cp)), "item_size": 8,
        }  # fmt: skip
        return made | ({"latent_mode": self.latent_mode} if self.latent_mode not in ("", "auto") else {})

    @property
    def tolerance(self) -> float:
        """The largest error that is allowed."""
        several: float = 4 if ENTRIES[self.entry].cost > 1 else 1  # layers of a model, each of which codes
        if self.layer == "gdn2":
            # Rounded keys are written by one gate and erased by another: fp8 is off by 0.203, whatever the layout.
            several *= 1.25
        return ENTRIES[self.entry].tolerance if self.codec == "none" else several * CODEC_TOLERANCES[self.codec]

    def alone(self) -> Row:
        """The same layer on one rank, without an option."""
        scheme = {"sparse": "exact"}.get(self.layer, "a2a") if self.is_softmax else "headwise"
        mode = "expand" if self.latent_mode else ""
        return Row(self.entry, self.layer, scheme, "contiguous", latent_mode=mode, cp=1)

    def layout_of(self, packing: cp.Packing, min_rows: int = 0) -> cp.Layout:
        return layout_by_name(self.layout, packing, self.cp, align=self.align, min_rows=min_rows)


@dataclass
class Result:
    """The tensors of a rank after a forward and a backward pass.

    Attributes:
        rows: tensors with this rank's rows, by name, and their layout.
        whole: gradients of parameters, of which each rank has a share.
        asked: makes the plans that the row's options ask for. The operations must have run these and no others of their
            kind.
        places: the tokens of a layout's stream that count; None for all.
    """

    rows: dict[str, tuple[Tensor, cp.Layout]]
    whole: dict[str, Tensor] = field(default_factory=dict)
    asked: Callable[[], list[cp.Plan]] = list
    places: Any = None


class Recorder(Agreed):
    """Notes the calls and plans that operations compare between ranks, as each of them does.

    Attributes:
        operations: the name of each operation that ran, and its options.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self._texts: dict[bytes, tuple[str, ...]] = {}
        self._digests: list[bytes] = []

    def call(self, key: Any) -> str | None:
        operation, _, options, _ = key
        self.operations.append((operation, dict(options)))
        return super().call(key)

    def plan(self, key: bytes) -> str | None:
        self._digests.append(key)
        return super().plan(key)

    def add_plan(self, key: bytes, lines: Any) -> str:
        self._texts[key] = tuple(lines)
        return super().add_plan(key, lines)

    @property
    def plans(self) -> set[tuple[str, ...]]:
        """The lines of each plan that ran, without those of layouts, which rows are moved between."""
        texts = {self._texts[digest] for digest in self._digests if digest in self._texts}
        return {lines for lines in texts if lines[0].startswith("kind: ")}


def recorded(group: Any) -> Any:
    """Returns a group whose `agreed` is a `Recorder`."""
    counting = CountingGroup(group)
    counting.agreed, counting.buffers = Recorder(), group.buffers
    return counting


# How each entry runs a row


def planned(row: Row, layout: cp.Layout, **more: Any) -> cp.Plan:
    """Returns the plan of a row's options by the planning functions themselves. `more` are sizes, or other keys."""
    options = _sizes_of(slot_of(row)) | row.options | more
    if row.is_softmax:
        return cp.plan_attention(layout.packing, layout, **options)
    return cp.plan_linear(layout.packing, layout, row.layer, **options)


def slot_of(row: Row, **options: Any) -> Any:
    """Returns the spec of the row's layer."""
    if row.layer == "latent":
        return cp.AttentionSpec(HEADS, HEADS, DIM, latent=LATENT, **options)
    if row.layer == "sparse":
        return cp.AttentionSpec(HEADS, GROUPS, DIM, topk=TOPK, indexer=(INDEX_HEADS, INDEX_DIM), **options)
    if row.layer == "attention":
        return cp.AttentionSpec(HEADS, GROUPS, DIM, **options)
    heads, groups = (HEADS * DIM, GROUPS) if row.layer == "conv1d" else (HEADS, HEADS if row.layer == "kda" else GROUPS)
    steps = STEPS if row.layer == "gdp" else 1
    return cp.LinearSpec(
        row.layer, heads, groups, DIM, DIM, conv_width=WIDTH, hidden_size=HIDDEN, num_householder=steps, **options
    )


def call_of(row: Row) -> Call:
    """Returns the row's operation as the fuzz has it: its tensors, and how it is called."""
    operation = "projected_attention" if row.entry == "projected" else OPERATIONS[row.layer]
    return Call(
        operation, heads=HEADS, groups=HEADS if row.layer in ("latent", "kda") else GROUPS, head_dim=DIM,
        value_head_dim=DIM, scheme=row.scheme, width=TOPK if row.layer == "sparse" else WIDTH, seed=1, lengths=LENGTHS,
        parents=PARENTS if row.entry == "tree" else (), latent=LATENT if row.layer == "latent" else (),
        latent_mode=row.latent_mode, steps=STEPS if row.layer == "gdp" else 1,
    )  # fmt: skip


def _as_it_is(x: Tensor) -> Tensor:
    return x


def operated(
    row: Row, plan: cp.Plan, group: Any, asked: Callable[[], list[cp.Plan]],
    place: Callable[[Tensor], Tensor] = _as_it_is,
) -> Result:  # fmt: skip
    """Runs the row's operation by a plan, there and back; `place` puts a stream's rows where a layout has them."""
    call, rank = call_of(row), 0 if group is None else group.rank
    problem, layout = problem_of(call, row.cp), plan.hidden_layout or plan.layout
    leaves = {
        name: (x.clone() if name in problem.whole else layout.shard(place(x), rank)).requires_grad_()
        for name, x in problem.leaves.items()
    }
    out = operate(call, plan, group, leaves)
    out.backward(layout.shard(place(problem.gradients[0]), rank))
    rows = {name: (x.grad, layout) for name, x in leaves.items() if name not in problem.whole}
    whole = {name: leaves[name].grad for name in problem.whole if name in leaves}
    return Result(rows | {"out": (out.detach(), layout)}, whole, asked)


def run_plan(row: Row, group: Any, _: Any = None) -> Result:
    packing = cp.Packing.tree(LENGTHS, PARENTS) if row.entry == "tree" else cp.Packing(LENGTHS)
    plan = planned(row, row.layout_of(packing))
    return operated(row, plan, group, lambda: [plan])


def asked_of_slot(row: Row, layout: cp.Layout, **more: Any) -> cp.Plan:
    """Returns the plan that a spec stands for.

    A linear layer's spec asks for the most head chunks, since a rank may have fewer key heads, and uses them and a
    codec only in modes that exchange heads.
    """
    if not row.is_softmax and row.chunks is not None:
        row = replace(row, chunks=min(row.chunks, most_groups(row, row.cp, more)))
    if not row.is_softmax and not may_exchange_heads(row.scheme):
        row = replace(row, codec="none", chunks=None)
    return planned(row, layout, **more)


def most_groups(row: Row, degree: int, sizes: Mapping[str, Any] = MappingProxyType({})) -> int:
    """The key heads of the rank that has most, where `degree` ranks exchange heads."""
    entry = ENTRIES[row.entry]
    heads, groups = sizes.get("heads", entry.heads), sizes.get("kv_heads", sizes.get("groups", entry.groups))
    groups = sizes.get("key_heads", groups)
    if row.layer == "conv1d":
        heads = groups = sizes.get("channels", HEADS * DIM)
    elif row.layer == "kda" or (row.layer == "latent" and row.latent_mode == "heads"):
        groups = heads
    elif row.layer in ("latent", "sparse"):
        groups = 1
    return partition_heads(heads, groups, degree).most_groups


def run_slot(row: Row, group: Any, _: Any = None) -> Result:
    """Plans by a slot where the batch is sharded."""
    layout, slot = row.layout_of(cp.Packing(LENGTHS)), slot_of(row, **row.options)
    batch = cp.shard_batch(_ids(sum(LENGTHS)), layout, group, slots=[slot])
    return operated(row, batch.plan(slot), group, lambda: [asked_of_slot(row, layout)])


def _ids(total: int) -> Tensor:
    return torch.arange(total) % 7


def run_graph_tables(row: Row, group: Any, _: Any = None) -> Result:
    """Plans by a slot for tables that one CUDA graph reads; here the CPU reads them."""
    step = 2 * row.cp if row.align > 1 else 1
    tables = cp.GraphTables(24 * row.cp, 6, row.cp, align_documents=step, layout=row.layout)
    layout, slot = tables.layout(LENGTHS), slot_of(row, **row.options)
    plan = cp.shard_batch(_ids(sum(LENGTHS)), layout, group, slots=[slot], into=tables).plan(slot)
    starts = layout.packing.cu_seqlens[: len(LENGTHS)]
    places = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, LENGTHS, strict=True)])

    def place(x: Tensor) -> Tensor:
        filled = x.new_zeros(tables.capacity_tokens, *x.shape[1:])
        filled[places] = x
        return filled

    found = operated(row, plan, group, lambda: [asked_of_slot(row, layout)], place)
    found.places = places
    return found


def run_cache(row: Row, group: Any, _: Any = None) -> Result:
    """Continues documents, whose tokens come in two steps."""
    call, rank = call_of(row), 0 if group is None else group.rank
    problem, cache, steps = problem_of(call, row.cp), cp.Cache(len(LENGTHS), row.cp), []
    total = np.array(LENGTHS)
    done, begins = np.zeros_like(total), np.cumsum(total) - total
    with torch.no_grad():
        for new in (total // 2, total - total // 2):
            layout = row.layout_of(cp.Packing(new.tolist()))
            tokens = np.concatenate([np.arange(b, b + n) for b, n in zip(begins + done, new, strict=True)])
            keys = cache.extend(layout)
            plan = planned(
                row,
                layout,
                **({"kv_packing": keys.packing, "kv_layout": keys, "mask": "causal"} if row.is_softmax else {}),
            )
            local = {
                name: x if name in problem.whole else layout.shard(x[tokens], rank)
                for name, x in problem.leaves.items()
            }
            steps.append((operate(call, plan, group, local, cache=cache.layer(0)), layout, plan, tokens))
            done = done + new
    rows = {f"out of step {number}": (out, layout) for number, (out, layout, *_) in enumerate(steps)}
    return Result(rows, {}, lambda: [plan for *_, plan, _ in steps], [tokens for *_, tokens in steps])


def nn_model(row: Row) -> Any:
    """Returns a layer of `cp.nn`, or a run of two."""
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    makers: dict[str, Callable[[], Any]] = {
        "attention": lambda: cp.nn.Attention(HIDDEN, HEADS, GROUPS, DIM, **wide),
        "gdn": lambda: cp.nn.GatedDeltaNet(HIDDEN, HEADS, GROUPS, head_dim=DIM, **wide),
        "kda": lambda: cp.nn.KimiDeltaAttention(HIDDEN, HEADS, head_dim=DIM, **wide),
        "gdn2": lambda: cp.nn.GatedDeltaNet2(HIDDEN, HEADS, GROUPS, head_dim=DIM, **wide),
        "gdp": lambda: cp.nn.GatedDeltaProduct(HIDDEN, HEADS, GROUPS, head_dim=DIM, num_householder=STEPS, **wide),
        "mamba": lambda: cp.nn.Mamba2(HIDDEN, HEADS, head_dim=DIM, state=DIM, groups=GROUPS, **wide),
    }
    make = makers[row.layer]
    return cp.nn.LinearRun([_Block(make()), _Block(make())]) if row.entry == "nn run" else make()


class _Block(nn.Module):
    """A block of a run, with a residual."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, batch: Any, group: Any) -> Tensor:
        return hidden + self.layer(hidden.tanh(), batch, group)


def run_nn(row: Row, group: Any, model: Any) -> Result:
    layout, layers = row.layout_of(cp.Packing(LENGTHS)), [each for each in model.modules() if hasattr(each, "slot")]
    for layer in layers:
        layer.slot = replace(layer.slot, **row.options)
    batch = cp.shard_batch(_ids(sum(LENGTHS)), layout, group, slots=[layer.slot for layer in layers])
    draws, rank = torch.Generator().manual_seed(1), 0 if group is None else group.rank
    hidden, gradient = (torch.randn(sum(LENGTHS), HIDDEN, generator=draws, dtype=torch.float64) for _ in range(2))
    local = layout.shard(hidden, rank).requires_grad_()
    out = model(local, batch, group)
    out.backward(layout.shard(gradient, rank))
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    run = {} if row.is_softmax else {"layers": len(layers)}
    asked = lambda: [asked_of_slot(row, layout, **run)]  # noqa: E731
    return Result({"out": (out.detach(), layout), "hidden": (local.grad, layout)}, whole, asked)


TRANSFORMERS = {
    "attention": "Llama", "latent": "DeepseekV3", "sparse": "DeepseekV32", "gdn": "Qwen3Next", "kda": "KimiLinear",
    "mamba": "Mamba2", "conv1d": "Lfm2",
}  # fmt: skip


def transformers_model(row: Row) -> Any:
    from tests.transformers_cases import build

    return build(TRANSFORMERS[row.layer])


def run_transformers(row: Row, group: Any, model: Any) -> Result:
    """Runs a tiny model of transformers, all of whose layers of the row's kind have its options."""
    from megatron_cp.transformers import enable_context_parallel

    options = {name: value for name, value in row.options.items() if name not in ("mode", "item_size", "latent_mode")}
    if not row.is_softmax:
        options["linear_mode"] = row.scheme
    parallel = enable_context_parallel(
        model, group, layout=row.layout, align=row.align, latents=row.layer == "latent", **options
    )
    tokens = torch.arange(sum(LENGTHS))[None] * 5 % 89 + 3
    batch = parallel.shard({"input_ids": tokens, "labels": tokens, "lengths": list(LENGTHS)})
    out = model(**batch, num_items_in_batch=batch.num_items)
    out.loss.backward()
    layout = row.layout_of(cp.Packing(LENGTHS), min_rows=1)  # the stock layers cannot run on none
    own = [slot for slot in batch.plans.kinds if isinstance(slot, cp.AttentionSpec) == row.is_softmax]
    asked = lambda: [asked_of_slot(row, layout, **_sizes_of(slot)) for slot in own]  # noqa: E731
    whole = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Result({"logits": (out.logits.detach()[0], layout)}, whole, asked)


def _sizes_of(slot: Any) -> dict[str, Any]:
    """Returns a slot's sizes as the planning functions take them."""
    if isinstance(slot, cp.AttentionSpec):
        names = ("heads", "kv_heads", "head_dim", "value_head_dim", "latent", "topk", "indexer", "mask")
        return {name: getattr(slot, name) for name in (*names, "item_size", "topology")}
    sizes = {"heads": slot.heads, "groups": slot.key_heads, "key_dim": slot.head_dim, "value_dim": slot.value_head_dim}
    sizes["steps"] = slot.num_householder
    own = {argument.name: sizes[argument.field] for argument in KINDS[slot.kind].arguments}
    own |= {"conv_width": slot.conv_width, "hidden_size": slot.hidden_size, "layers": max(1, len(slot.run))}
    return own | {"item_size": slot.item_size, "topology": slot.topology}


MEGATRON = {"attention": "gpt", "latent": "mla", "sparse": "D-", "gdn": "G-", "mamba": "M-"}


def of_megatron(row: Row, found: Any) -> ArgumentError | float:
    """Returns the refusal or the error of a row, from its outcome in `tests.entries_megatron`."""
    if isinstance(found, ArgumentError):
        return found
    errors, ran, slots = found
    layout = row.layout_of(cp.Packing(LENGTHS), min_rows=1)
    if row.layer == "sparse":  # a warning says that its layers use neither
        row = replace(row, codec="none", chunks=None)
    if row.latent_mode == "heads":  # its layers expand latents before they attend
        row = replace(row, layer="attention", latent_mode="")
    own = [slot for slot in slots if isinstance(slot, cp.AttentionSpec) == row.is_softmax]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        wanted = {tuple(asked_of_slot(row, layout, **_sizes_of(slot)).inside.describe()) for slot in own}
    if wanted != ran:
        raise EntryError(f"{row}: the operations ran other plans than was asked for: {_differing(wanted, ran)}")
    return _worst(row, errors)


def _worst(row: Row, errors: dict[str, float]) -> float:
    """Returns the largest error; of the output alone, if nearly zero gradients, as of a key's bias, are coded."""
    return errors["output"] if row.codec != "none" else max(errors.values())


def megatron_alone(row: Row) -> ArgumentError | float:
    """Runs a row in a process of its own, which takes long to start: tests and the fuzz run many in one."""
    from tests.entries_megatron import outcomes

    return of_megatron(row, outcomes([row])[0])


def diffusers_model(row: Row) -> ArgumentError | float:
    """Runs a tiny transformer of diffusers."""
    from tests.diffusers_cases import over_ranks

    asked = {name: row.options[name] for name in ("scheme", "transport", "codec", "head_chunks")}
    errors, plans = over_ranks("flux", row.cp, **asked)
    for plan in plans:
        codec, chunks = plan.codec.name if plan.codec else "none", max(plan.head_chunks, plan.attend.head_chunks)
        ran = {"scheme": plan.scheme, "transport": plan.transport, "codec": codec, "head_chunks": chunks}
        if any(ran[name] != value for name, value in asked.items() if value not in (None, "auto")):
            raise EntryError(f"{row}: the operations ran other plans than was asked for: {plan.explain()}")
    return _worst(row, errors)


def check_command(row: Row) -> float:
    """Runs `megatron-cp check`, and returns the largest error that it reports."""
    arguments = ["check", "--layer", row.layer, "--cp", str(row.cp), "--lengths", ",".join(map(str, LENGTHS))]
    sizes = {"--heads": HEADS, "--kv-heads": GROUPS, "--head-dim": DIM}
    if row.layer in ("gdn", "kda", "gdn2", "gdp"):
        sizes = {"--heads": HEADS, "--key-heads": HEADS if row.layer == "kda" else GROUPS, "--head-dim": DIM}
        sizes |= {"--num-householder": STEPS} if row.layer == "gdp" else {}
    elif row.layer == "mamba":
        sizes = {"--heads": HEADS, "--groups": GROUPS, "--head-dim": DIM, "--state": DIM}
    elif row.layer == "conv1d":
        sizes = {"--heads": HEADS, "--head-dim": DIM}
    options = {
        "--scheme": row.scheme, "--layout": row.layout, "--transport": row.transport, "--codec": row.codec,
        "--align": row.align, "--dtype": "float64",
    }  # fmt: skip
    options |= sizes | ({} if row.chunks is None else {"--head-chunks": row.chunks})
    options |= {} if row.is_softmax else {"--hidden-size": HIDDEN, "--conv-width": WIDTH}
    options |= {"--hosts": min(2, row.cp)} if row.transport == "hierarchical" else {}
    args = parsed([*arguments, *(str(each) for pair in options.items() for each in pair)])
    report = args.run(args)
    layout = row.layout_of(cp.Packing(LENGTHS))
    plan, asked = case_of(args, row.cp).plan(), planned(row, layout)
    if plan.describe() != asked.describe():
        raise EntryError(f"{row}: the command checks another plan than was asked for: {plan.explain()}")
    if not report.data["pass"]:
        raise EntryError(f"{row}: {report.text}")
    return max(report.data["max_rel_err"].values())


@dataclass(frozen=True)
class Entry:
    """A way into the library.

    Attributes:
        layers: the layers that it has.
        run: runs a row on a rank of a group, or None for one rank, with a copy of the model.
        alone: the entry whose result on one rank is compared with.
        model: makes a row's model, before there are ranks: those are threads, which share torch's random numbers.
        whole: runs a row on all of its ranks, in place of `run`, and returns the largest error.
        only: the values of columns for which it has no argument of its own.
        heads, groups: query and key/value heads of softmax attention.
        tolerance: the largest error without a codec. Models of transformers compute in fp32 in places.
        cost: the time of a row, in that of an operation.
    """

    layers: tuple[str, ...]
    run: Callable[[Row, Any, Any], Result] = run_plan
    alone: str = ""
    model: Callable[[Row], Any] = lambda row: None
    whole: Callable[[Row], ArgumentError | float] | None = None
    only: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    heads: int = HEADS
    groups: int = GROUPS
    tolerance: float = 1e-11
    cost: float = 1.0


EVERY = COLUMNS["layer"]
ENTRIES = {
    "plan": Entry(EVERY, run_plan),
    "projected": Entry(("attention",), run_plan),
    "slot": Entry(EVERY, run_slot, "plan"),
    "tree": Entry(EVERY, run_plan),
    "graph tables": Entry(EVERY, run_graph_tables, "plan"),
    "cache": Entry(("attention", *KINDS), run_cache, "plan"),
    "nn": Entry(("attention", "gdn", "kda", "gdn2", "gdp", "mamba"), run_nn, model=nn_model),
    "nn run": Entry(("gdn", "kda", "gdn2", "gdp", "mamba"), run_nn, model=nn_model),
    "check": Entry(("attention", *KINDS), whole=check_command),
    "transformers": Entry(
        tuple(TRANSFORMERS),
        run_transformers,
        model=transformers_model,
        only={"latent_mode": ("", "auto")},
        heads=6,
        groups=2,
        tolerance=1e-7,
        cost=20.0,
    ),
    "diffusers": Entry(
        ("attention",), whole=diffusers_model, only={"layout": ("balanced",), "align": (1,)}, tolerance=1e-7, cost=20.0
    ),
    "Megatron": Entry(
        tuple(MEGATRON),
        whole=megatron_alone,
        only={"latent_mode": ("", *LATENT_MODES)},
        heads=4,
        groups=2,
        tolerance=1e-5,
        cost=10.0,
    ),
}


# Those whose rows run in this process.
HERE = tuple(name for name in ENTRIES if name != "Megatron")


class EntryError(AssertionError):
    """A row that is neither exact nor refused as the table says."""


def on_rank(group: Any, row: Row, model: Any) -> tuple[Result, Any]:
    group = recorded(group)
    return ENTRIES[row.entry].run(row, group, copy.deepcopy(model)), group.agreed


def outcome(row: Row) -> ArgumentError | float:
    """Runs a row: returns its refusal, or its largest error beside one rank.

    Raises:
        EntryError: an operation ran another plan than the one that the row asks for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        try:
            if (whole := ENTRIES[row.entry].whole) is not None:
                return whole(row)
            model = ENTRIES[row.entry].model(row)
            ranks = run_ranks(on_rank, row.cp, row, model)
        except RankError as error:
            if isinstance(error.__cause__, ArgumentError):
                return error.__cause__
            raise
        except ArgumentError as error:  # of a command, before there are ranks
            return error
        alone = replace(row.alone(), entry=ENTRIES[row.entry].alone or row.entry)
        expected = ENTRIES[alone.entry].run(alone, None, model)
        asked = ranks[0][0].asked()
        for _, ran in ranks:
            _hold_to_plans(row, asked, ran)
    return max(_errors([result for result, _ in ranks], expected).values())


def _hold_to_plans(row: Row, asked: list[cp.Plan], ran: Recorder) -> None:
    kinds = {plan.kind for plan in asked}
    wanted = {tuple(plan.inside.describe()) for plan in asked}
    found = {lines for lines in ran.plans if lines[0].removeprefix("kind: ") in kinds}
    if found != wanted:
        raise EntryError(f"{row}: the operations ran other plans than was asked for: {_differing(wanted, found)}")
    transport = asked[0].transport.describe()
    moved = [options["transport"] for operation, options in ran.operations if operation == "relayout"]
    if any(each != transport for each in moved):
        raise EntryError(f"{row}: rows were moved by {moved}, not by {transport}")


def _differing(wanted: Set[tuple[str, ...]], found: Set[tuple[str, ...]]) -> list[list[str]]:
    """Returns the lines of each plan that not all have, of those that were asked for first."""
    both = set.intersection(*map(set, found | wanted))
    return [[line for line in each if line not in both] for plans in (wanted, found) for each in plans]


def _errors(ranks: list[Result], expected: Result) -> dict[str, float]:
    errors = {}
    for name, (_, layout) in ranks[0].rows.items():
        found = layout.unshard([rank.rows[name][0] for rank in ranks])
        places = ranks[0].places
        if isinstance(places, list):  # of steps
            wanted = expected.rows["out"][0][places[int(name[-1])]]
        else:
            found = found if places is None else found[places]
            wanted = expected.rows[name][0]
        errors[name] = _off(found, wanted)
    for name in ranks[0].whole:
        shares = [rank.whole[name] for rank in ranks if rank.whole.get(name) is not None]
        errors[name] = _off(sum(shares[1:], shares[0]), expected.whole[name])
    return errors


def _off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest number; NaN if there is one."""
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=0.1))


# Which rows are refused, and the few that are run


def refusals(row: Row) -> set[str]:
    """Returns the arguments that a refusal of the row may name; none if the row must be exact."""
    found, linear = set(), not row.is_softmax
    scheme = SCHEMES.get(row.scheme)
    is_spec = row.entry in ("slot", "nn", "nn run", "transformers", "graph tables", "Megatron")
    uses = not (row.entry == "Megatron" and row.layer == "sparse")  # codec and head chunks; else a warning is given
    if row.transport == "symmetric_memory":
        found.add("transport")
    if scheme is not None and scheme.is_product and row.cp != 4:
        found.add("scheme")
    if row.layer == "sparse" and row.scheme not in ("auto", "all_gather", "exact", "exact_by_host"):
        found.add("scheme")
    exchanges = may_exchange_heads(row.scheme)
    if row.codec != "none" and uses:
        if row.layer == "sparse" or (row.layer == "conv1d" and exchanges):
            found.add("codec")
        if linear and not exchanges and not is_spec:  # of a specification a note of the plan says that it is unused
            found.add("codec")
    if row.chunks is not None and uses and not (linear and is_spec):
        degree = row.cp if linear or row.scheme in ("auto", "a2a") else 2 if scheme and scheme.is_product else 1
        takes = exchanges if linear else scheme is None or scheme.takes_chunks
        if not takes or most_groups(row, degree) < row.chunks:
            found.add("head_chunks")
    if row.entry == "graph tables":
        found |= _refusals_of_tables(row)
    if row.entry == "Megatron":
        return found | {f"cp_{name.replace('scheme', 'comm_type')}" for name in found}
    if row.entry == "transformers" and row.scheme == "redistribute":
        found |= {"linear_mode", "hidden_size"}
    return found


def _refusals_of_tables(row: Row) -> set[str]:
    found, way = set(), {**SCHEMES, **MODES}.get(row.scheme)
    moves_keys = row.is_softmax and (way is None or way.exchanges_keys)
    continues = not row.is_softmax and (way is None or way.name == "chunkwise")
    suits = {"zigzag"} if moves_keys else {"contiguous"} if continues else {"zigzag", "contiguous"}
    if row.layout not in suits:
        found.add("layout")
    if moves_keys and row.align == 1:  # documents are not aligned, see `run_graph_tables`
        found.add("align_documents")
    if way is None or not way.sends_alike:
        found.add("scheme" if row.is_softmax else "mode")
    if row.layer == "sparse":
        found.add("slots")
    return found


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], ...]]:
    """Returns each two values of the row, with their columns, and the answer of "auto" that the row forces."""
    pairs = set(itertools.combinations(((each.name, getattr(row, each.name)) for each in fields(row)), 2))
    if row.scheme in ANSWERS[row.layer]:
        pairs.add((("entry", row.entry), ("layer", row.layer), ("scheme", row.scheme), ("mode", row.latent_mode)))
    return pairs


def drawn(draws: random.Random, entries: Sequence[str] = HERE) -> Row:
    """Draws a row whose columns belong together, oftener of an entry that costs less."""
    while True:
        (entry,) = draws.choices(entries, [1 / ENTRIES[name].cost for name in entries])
        layer = draws.choice(ENTRIES[entry].layers)
        values = COLUMNS | ENTRIES[entry].only
        columns = {name: draws.choice(values[name]) for name in COLUMNS} | {"layer": layer}
        columns["scheme"] = draws.choice(("auto", *(SCHEMES if layer in SOFTMAX else MODES)))
        modes = [mode for mode in values["latent_mode"] if mode]
        row = Row(entry, **columns | {"latent_mode": draws.choice(modes) if layer == "latent" else ""})
        if row.is_possible:
            return row


def covering_rows(seed: int = 0) -> list[Row]:
    """Returns few rows in which any two values of any two columns meet, in a row that is exact if there is one.

    Greedy: takes of many drawn rows the one in which most pairs meet that have not met, for its cost.
    """
    draws = random.Random(seed)
    pool = [drawn(draws, [name]) for name in ENTRIES for _ in range(4_000)]
    left, chosen = set().union(*map(pairs_of, pool)), []
    for is_refused in (False, True):
        pairs = {row: pairs_of(row) for row in pool if bool(refusals(row)) == is_refused}
        while pairs:
            gains = {row: len(left & own) / ENTRIES[row.entry].cost for row, own in pairs.items()}
            best = max(gains, key=gains.__getitem__)
            if not gains[best]:
                break
            left -= pairs[best]
            chosen.append(best)
            pairs = {row: own for row, own in pairs.items() if gains[row]}
    return sorted(chosen, key=lambda row: ([*ENTRIES].index(row.entry), str(row)))


TABLE = Path(__file__).with_suffix(".csv")


def table() -> list[Row]:
    """Reads the rows of the table."""
    return [Row.read(line) for line in TABLE.read_text().splitlines()[1:]]


def write_table() -> None:
    """Writes the rows of the table anew: `python -m tests.entries`."""
    lines = [",".join(each.name for each in fields(Row)), *(row.line() for row in covering_rows())]
    TABLE.write_text("\n".join(lines) + "\n")


# What is refused with some schemes: with "auto" it depends on the one that it takes.
_BY_CHOICE = {"head_chunks", "cp_head_chunks", "mode", "scheme", "cp_comm_type", "layout", "align_documents"}


def judged(row: Row, found: ArgumentError | float | None = None) -> str:
    """Runs a row, or takes its outcome: returns the argument that its refusal names, or "" if it is exact.

    Raises:
        EntryError: it is neither, or not the one that `refusals` says.
    """
    found, allowed = outcome(row) if found is None else found, refusals(row)
    if isinstance(found, ArgumentError):
        name = found.argument.removeprefix("--").replace("-", "_")
        if name not in allowed:
            raise EntryError(f"{row}: refused, and must be exact: {found}") from found
        return name
    never = {"layout"} if row.layout == "balanced" else set()  # with any scheme
    if allowed - (_BY_CHOICE - never if row.scheme == "auto" else set()):
        raise EntryError(f"{row}: ran, and was to be refused by {', '.join(sorted(allowed))}")
    if not found <= row.tolerance:
        raise EntryError(f"{row}: off by {found:.1e} beside one rank; allowed {row.tolerance:g}")
    return ""


if __name__ == "__main__":
    write_table()
