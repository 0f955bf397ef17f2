"""The cases of `make fuzz`, as data: some operations over some ranks, under way together. A case is a line of JSON."""

import contextlib
import dataclasses
import itertools
import json
import random

import numpy as np

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.predict import machine
from tests import mask_oracle

KINDS = {
    "gated_delta_rule": "gdn", "gated_delta_net": "gdn", "kda": "kda", "kda_mixer": "kda", "gdn2": "gdn2",
    "gdn2_mixer": "gdn2", "gated_delta_product": "gdp", "gated_delta_product_mixer": "gdp", "mamba2": "mamba",
    "mamba2_mixer": "mamba", "causal_conv1d": "conv1d",
}  # fmt: skip
ATTENTIONS = ("attention", "projected_attention", "latent_attention", "sparse_attention")
OPERATIONS = (*ATTENTIONS, *KINDS, "gather", "relayout")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one operation on one batch.

    Attributes:
        operation: one of `OPERATIONS`.
        lengths: of the documents.
        parents: the segment that each length continues, if documents branch; see `Packing.tree`.
        layout, align: who holds which tokens; see `layout_named`. Or the fragments of every rank themselves.
        scheme: of attention, or the mode of a linear layer. Of gather: "same_loss" or "own_loss".
        ulysses_degree, head_chunks, codec: as the planning functions take them.
        transport, hosts: how messages travel; the host of each rank where it is hierarchical.
        heads, groups: query and key/value heads, value and key heads, heads and groups of B and C.
        latent, latent_mode: of latent attention, as `plan_attention` takes them.
        head_dim, value_head_dim: of keys and of values; of mamba of B and C, and of a head of x.
            conv1d has `heads * value_head_dim` channels.
        batch: entries of SBHD; 0 for packed THD without one. Of gather and relayout the number of feature axes.
        mask: a name of `mask_oracle` and its arguments, of attention.
        kv_lengths, kv_layout: of cross-attention; of relayout the layout that rows go to.
        sink, softcap, dropout, scale: of attention; scale also of delta rules.
        width: taps of a convolution; the keys that a query of sparse attention chooses, or the blocks.
        block: keys of these blocks; 0 if an indexer chooses keys.
        steps: of a token of gdp.
        options: of sparse attention, which of "dense" (the indexer's loss) and "relu"; of a linear layer, which of
            "bias", "three" (axes of the taps), "silu", "norm", "softplus", "limit", "bound", "negative" (eigenvalues),
            "skip", "skips" (one for each feature).
        kernel: "auto" or "reference".
        dtype: of all tensors.
        whole: inputs are whole numbers, and sums of them exact.
        checkpoint: "", "reentrant" or "non-reentrant".
        frozen: tensors that need no gradient.
        shared: tensors, end to end as "qk" or "qkv", that are one tensor ("="), or views of one ("+", as in "+qkv").
        twice: "", "input" (the operation runs twice on the same tensors), "output" (its result is used twice) or
            "backward" (through a graph that is kept).
        strides: how tensors lie in memory: "dense", "last", "turned" or "odd".
        ones: the gradient is one number, expanded.
        planner: "function" of planning, or the layer's "slot", whose plan must be the function's.
        prices: by which "auto" chooses: "" for the default, the name of a machine, or a number of `machine_drawn`.
        seed: of all numbers and of random layouts.
    """

    operation: str
    lengths: tuple = (7,)
    parents: tuple = ()
    layout: str = "contiguous"
    align: int = 1
    scheme: str = "auto"
    ulysses_degree: int | None = None
    head_chunks: int | None = None
    codec: str = "none"
    transport: str = "collective"
    hosts: tuple = ()
    heads: int = 1
    groups: int = 1
    latent: tuple = ()
    latent_mode: str = "expand"
    head_dim: int = 4
    value_head_dim: int = 4
    batch: int = 0
    mask: tuple = ("causal",)
    kv_lengths: tuple = ()
    kv_layout: str = "contiguous"
    sink: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    scale: float | None = None
    width: int = 4
    block: int = 0
    steps: int = 1
    options: tuple = ()
    kernel: str = "auto"
    dtype: str = "float64"
    whole: bool = False
    checkpoint: str = ""
    frozen: tuple = ()
    shared: str = ""
    twice: str = ""
    strides: str = "dense"
    ones: bool = False
    planner: str = "function"
    prices: str | int = ""
    seed: int = 0

    @property
    def packing(self):
        return Packing.tree(self.lengths, self.parents) if self.parents else Packing(self.lengths)

    def paths(self):
        """The places in the stream of each document's tokens, of those that branch: from a root to each leaf."""
        ends = list(itertools.accumulate(self.lengths))
        own = [list(range(end - length, end)) for end, length in zip(ends, self.lengths, strict=True)]
        whole = []
        for parent, tokens in zip(self.parents, own, strict=True):
            whole.append((whole[parent] if parent >= 0 else []) + tokens)
        return [tokens for segment, tokens in enumerate(whole) if segment not in self.parents and tokens]

    def alone(self, tokens):
        """The call of one of these documents by itself."""
        return dataclasses.replace(self, lengths=(len(tokens),), parents=())

    @property
    def kv_packing(self):
        return Packing(self.kv_lengths) if self.kv_lengths else self.packing

    def mask_and_pairs(self):
        """The mask, and the pairs that the oracle says are visible."""
        kind, *arguments = self.mask
        if kind == "table":
            name, count = arguments
            spelled = name if count is None else f"{name}:{count}"
            return Mask.named(self.packing, spelled), mask_oracle.table(self.packing, name, count)
        if kind == "blocks":
            table, size = arguments
            cells = -(-self.packing.total // size)
            arguments = [np.array(table, dtype=bool).reshape(cells, cells), size]
        of, keys = (self.packing, *arguments), self.kv_packing if self.kv_lengths else None
        if kind in ("window", "first"):
            left, right, *first = arguments
            named = {"first": first[0] if first else 0, "kv_packing": keys}
            return tuple(made.window(self.packing, left, right, **named) for made in (Mask, mask_oracle))
        if keys is not None:
            of = (*of, keys)
        name = {"slices": "from_slices", "blocks": "from_blocks"}.get(kind, kind)
        return getattr(Mask, name)(*of), getattr(mask_oracle, kind)(*of)

    def transport_of_ranks(self):
        return Transport("hierarchical", self.hosts) if self.transport == "hierarchical" else self.transport

    def machine(self):
        """Returns the machine that predictions are for; None for the default."""
        return machine_drawn(self.prices) if isinstance(self.prices, int) else self.prices or None

    def has(self, option):
        return option in self.options


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls over one group of ranks.

    Attributes:
        cp_size: the ranks.
        calls: in the order of their forward passes.
        schedule: numbers of calls, each twice: first its forward pass, then its backward pass.
        poison: memory that nobody has written is NaN.
        own_plans: each rank makes its own plan, as ranks in processes do.
    """

    cp_size: int
    calls: tuple
    schedule: tuple = (0, 0)
    poison: bool = False
    own_plans: bool = False

    def line(self):
        """Returns the case as JSON on one line, without default values."""
        return json.dumps(_unusual(self) | {"calls": [_unusual(call) for call in self.calls]}, separators=(",", ":"))

    @classmethod
    def read(cls, line):
        fields = json.loads(line)
        calls = tuple(Call(**{name: _frozen(value) for name, value in call.items()}) for call in fields.pop("calls"))
        return cls(calls=calls, **{name: _frozen(value) for name, value in fields.items()})


def _unusual(thing):
    found = {}
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if value != field.default and field.name != "calls":
            found[field.name] = value
    return found


def _frozen(value):
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value


def machine_drawn(number):
    """Returns a machine whose rates and links are off by up to a thousand times, so that any candidate may be the
    cheapest.
    """
    r, real = random.Random(number), machine("h100")

    def off(value):
        return value * 10 ** r.uniform(-3, 3)

    links = {
        name: dataclasses.replace(link, latency=off(link.latency), bandwidth=off(link.bandwidth))
        for name, link in (("within", real.within), ("between", real.between))
    }
    rates = {name: off(getattr(real.hardware, name)) for name in ("matrix", "copy", "call", "launch", "rule_floor")}
    attention = tuple((size, *map(off, rates_of)) for size, *rates_of in real.hardware.attention)
    hardware = dataclasses.replace(real.hardware, attention=attention, **rates)
    return dataclasses.replace(real, hardware=hardware, ranks_per_host=r.randint(1, 4), **links)


LAYOUTS = (
    "contiguous", "zigzag", "balanced", "random", "edges", "stripes", "one", "pack", "within", "turned", "singles",
)  # fmt: skip


def layout_named(name, packing, cp_size, *, align=1, seed=0, mask=None):
    """Returns a layout of the library, or one of odd fragments.

    edges      cuts beside the first and last tokens of documents        stripes    token i on rank i modulo the ranks
    one        all tokens on one rank, which the others have none of     pack       zigzag of the whole pack at once
    within     each rank a block of the stream, rank after rank, whose   turned     blocks in another order of ranks,
               tokens stand in any order there                                      each in stream order
    singles    one token a rank, but for the one with all others
    """
    if not isinstance(name, str):
        return Layout.from_fragments(packing, name, align=align)
    if name in ("contiguous", "zigzag", "balanced", "random"):
        return layout_by_name(name, packing, cp_size, align=align, seed=seed, mask=mask)
    total, random = packing.total, np.random.default_rng(seed)
    if name == "pack":
        whole = Layout.zigzag(Packing([total]), cp_size)
        fragments = [whole.fragments_of(rank) for rank in range(cp_size)]
    elif name == "stripes":
        fragments = [[(token, token + 1) for token in range(rank, total, cp_size)] for rank in range(cp_size)]
    elif name == "one":
        fragments = [[] for _ in range(cp_size)]
        fragments[seed % cp_size] = [(total // 2, total), (0, total // 2)]
    elif name in ("within", "turned"):
        # Equal blocks as often as not: an all-gather takes those as they stand.
        is_even, is_within = random.integers(2), name == "within"
        cuts = np.arange(1, cp_size) * total // cp_size if is_even else random.integers(0, total + 1, cp_size - 1)
        edges = [0, *np.sort(cuts).tolist(), total]
        blocks = [_parts(random, *block) if is_within else [block] for block in itertools.pairwise(edges)]
        fragments = blocks if is_within else [blocks[block] for block in random.permutation(cp_size).tolist()]
    elif name == "singles":
        edges = [*range(min(cp_size, total + 1)), *[total] * (cp_size + 1 - min(cp_size, total + 1))]
        fragments = [[block] for block in itertools.pairwise(edges)]
        fragments = [fragments[block] for block in random.permutation(cp_size).tolist()]
    else:
        begins = packing.cu_seqlens if packing.branches is None else packing.branches.starts
        near = (begins[:, None] + np.arange(-1, 2)).clip(0, total).ravel()
        cuts = np.unique([0, total, *random.choice(near, size=2 * cp_size)])
        fragments = [[] for _ in range(cp_size)]
        for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            fragments[random.integers(cp_size)].append((start, end))
    return Layout.from_fragments(packing, fragments, align=align)


def _parts(random, start, end):
    """A range in up to four pieces, in any order."""
    cuts = np.unique([start, end, *random.integers(start, end + 1, size=3)])
    pieces = list(itertools.pairwise(cuts.tolist()))
    return [pieces[number] for number in random.permutation(len(pieces)).tolist()]


def simpler(case):
    """Cases that are simpler in one way each, the largest steps first. Some may make no sense."""
    for number in range(len(case.calls)) if len(case.calls) > 1 else ():
        yield dataclasses.replace(case, calls=(case.calls[number],), schedule=(0, 0))
    for ranks in range(1, case.cp_size):
        calls = tuple(
            dataclasses.replace(call, hosts=_hosts(call.hosts[:ranks]) if call.hosts else ()) for call in case.calls
        )
        yield dataclasses.replace(case, cp_size=ranks, calls=calls)
    for name in ("poison", "own_plans"):
        if getattr(case, name):
            yield dataclasses.replace(case, **{name: False})
    for number, call in enumerate(case.calls):
        for other in _simpler_calls(call):
            calls = (*case.calls[:number], other, *case.calls[number + 1 :])
            yield dataclasses.replace(case, calls=calls)


def _simpler_calls(call):
    kept = ("operation", "lengths", "kv_lengths", "seed", "latent")
    for field in dataclasses.fields(call):
        if field.name not in kept and getattr(call, field.name) != field.default:
            yield dataclasses.replace(call, **{field.name: field.default})
    for removed in call.frozen:
        yield dataclasses.replace(call, frozen=tuple(name for name in call.frozen if name != removed))
    for removed in call.options:
        yield dataclasses.replace(call, options=tuple(name for name in call.options if name != removed))
    if call.mask[0] in ("slices", "blocks", "shared_question"):
        return  # which fit their lengths alone
    for number, length in enumerate(call.lengths):
        rest = [(*lengths[:number], *lengths[number + 1 :]) for lengths in (call.lengths, call.kv_lengths)]
        if len(call.lengths) > 1:
            parents = _parents_without(call.parents, number) if call.parents else ()
            yield dataclasses.replace(call, lengths=rest[0], kv_lengths=rest[1], parents=parents)
        for smaller in {length // 2, length - 1} - {length, -1}:
            yield dataclasses.replace(call, lengths=(*call.lengths[:number], smaller, *call.lengths[number + 1 :]))


def _parents_without(parents, number):
    """Parents of the segments that are left without one, whose children its parent gets."""
    left = [parents[number] if parent == number else parent for parent in parents]
    return tuple(parent - (parent > number) for segment, parent in enumerate(left) if segment != number)


def _hosts(hosts):
    """Hosts numbered from 0 without gaps."""
    numbers = {host: number for number, host in enumerate(sorted(set(hosts)))}
    return tuple(numbers[host] for host in hosts)


def shrunk(case, fails, tries=200):
    """The simplest case that `fails` still, found by taking whatever simpler one does."""
    left, found = tries, True
    while found and left > 0:
        found = False
        for other in simpler(case):
            left -= 1
            with contextlib.suppress(Exception):  # what makes no sense does not fail
                if fails(other):
                    case, found = other, True
                    break
            if left <= 0:
                break
    return case
