"""Random cases for `make fuzz`: `case_of(seed, number)` is the same case always."""

import dataclasses
import itertools
import random

from megatron_cp.layout.block_masks import BLOCK_TABLES
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import SCHEMES
from tests.fuzz_cases import ATTENTIONS, KINDS, LAYOUTS, OPERATIONS, Call, Case
from tests.fuzz_problem import names_of

HEADS = ((6, 2), (5, 5), (5, 1), (4, 4), (1, 1), (6, 3), (2, 1), (3, 3), (8, 2))
SIZES = ((8, 8), (24, 16), (5, 3), (2, 9), (1, 1), (8, 4), (16, 16))
# How often each is drawn: attention has most schemes and masks, and what only moves rows is soon looked through.
WEIGHTS = {"attention": 8, "projected_attention": 4, "latent_attention": 4, "gather": 2, "relayout": 2}
WEIGHTS |= dict.fromkeys((*KINDS, "sparse_attention"), 3)
MASKS = (
    "causal", "causal", "full", "window", "window", "first", "prefix", "chunk", "shared_question", "slices", "blocks",
    "table",
)  # fmt: skip
FOREST_MASKS = ("causal", "causal", "window", "first", "chunk")  # those that have a meaning along a path
FORESTS = 0.27  # of the calls that can have one; a quarter of these turn out to be documents alone
CROSS_MASKS = ("causal", "causal", "full", "window", "first", "slices")
SPECIAL = {"sink": 0.2, "softcap": 0.12, "dropout": 0.12, "scale": 0.12}
RANKS = (1, *[2] * 6, *[3] * 6, *[4] * 5, 5, 6, 8)
PLAIN = tuple(scheme.name for scheme in SCHEMES.values() if not scheme.is_product)
PRODUCTS = tuple(scheme.name for scheme in SCHEMES.values() if scheme.is_product)


def case_of(seed, number, operations=OPERATIONS):
    """Case `number` of a seed, with calls of some operations alone."""
    r = random.Random(f"{seed}/{number}")
    cp_size, weights = r.choice(RANKS), [WEIGHTS[name] for name in operations]
    calls = [_call(r, cp_size, *r.choices(operations, weights))]
    for _ in range(r.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 2))):
        calls.append(_next(r, calls[0]) if r.random() < 0.5 else _call(r, cp_size, *r.choices(operations, weights)))
    r_of_forests = random.Random(f"{seed}/{number}/forests")
    calls = [_branched(r_of_forests, call) for call in calls]
    r_of_plans = random.Random(f"{seed}/{number}/plans")
    calls = [_planned(r_of_plans, call) for call in calls]
    if r.random() < 0.03:
        calls = [_without_gradients(r, call) for call in calls]
    return Case(cp_size, tuple(calls), _schedule(r, len(calls)), poison=r.random() < 0.04, own_plans=r.random() < 0.1)


def _schedule(r, count):
    """Forward passes in order, each call's backward pass somewhere after its own."""
    events = list(range(count))
    for number in range(count):
        events.insert(r.randint(events.index(number) + 1, len(events)), number)
    return tuple(events)


def _next(r, call):
    """Returns a call of the same layer on another batch."""
    lengths, fresh = _lengths(r), r.randrange(10**6)
    if call.operation in ATTENTIONS:
        kv_lengths = tuple(_length(r) for _ in lengths) if call.kv_lengths else ()
        mask = ("causal",) if call.block else _mask(r, lengths, kv_lengths)
        return dataclasses.replace(call, lengths=lengths, mask=mask, kv_lengths=kv_lengths, seed=fresh)
    return dataclasses.replace(call, lengths=lengths, seed=fresh)


def _branched(r, call):
    """Returns the call, or a part of the calls with documents that branch."""
    if r.random() >= FORESTS or call.kv_lengths or call.operation in ("gather", "relayout"):
        return call
    lengths, parents = forest(r)
    if call.operation not in ATTENTIONS:
        return dataclasses.replace(call, lengths=lengths, parents=parents)
    kind, left = "causal" if call.block else r.choice(FOREST_MASKS), r.randint(-1, 9)
    options = {"window": (left, 0), "first": (left, 0, r.randint(1, 5)), "chunk": (r.randint(1, 12),)}
    layout = "random" if call.layout == "stripes" and sum(lengths) > 24 else call.layout
    mask = (kind, *options.get(kind, ()))
    return dataclasses.replace(call, lengths=lengths, parents=parents, mask=mask, layout=layout)


def _planned(r, call):
    """Returns the call, or a part of the calls planned by a slot, or by what "auto" chooses for some prices."""
    if call.operation in ("gather", "relayout"):
        return call
    if r.random() < 0.15 and not call.kv_lengths:
        call = dataclasses.replace(call, planner="slot")
    if call.operation in KINDS:
        return dataclasses.replace(call, prices=_prices(r)) if call.scheme == "auto" else call
    if r.random() < 0.15 and not call.whole:
        modes = {"latent_mode": None} if call.latent and r.random() < 0.5 else {}
        return dataclasses.replace(
            call, scheme="auto", ulysses_degree=None, head_chunks=None, prices=_prices(r), **modes
        )  # fmt: skip
    return call


def _prices(r):
    return r.choice(("", "h100", r.randrange(10**6), r.randrange(10**6), r.randrange(10**6)))


def forest(r):
    """Returns lengths and parents of trees: chains, stars, and any of up to six levels."""
    lengths, parents = [], []
    for _ in range(r.choice((1, 1, 2, 3))):
        root, shape, levels = len(parents), r.choice(("chain", "star", "any", "any", "any")), [1]
        for number in range(r.randint(1, 8)):
            if number:
                shallow = [segment for segment in range(number) if levels[segment] < 6]
                parent = {"chain": shallow[-1], "star": 0}.get(shape, r.choice(shallow))
                levels.append(levels[parent] + 1)
            parents.append(root + parent if number else -1)
            lengths.append(1 if not number and r.random() < 0.2 else _length(r))
    return _some_long(r, lengths), tuple(parents)


def _without_gradients(r, call):
    return dataclasses.replace(call, frozen=names_of(call), checkpoint="", twice="")


def _length(r):
    return r.randint(0, 1) if r.random() < 0.2 else r.randint(2, 16)


def _lengths(r):
    lengths = [_length(r) for _ in range(r.choice((1, 1, 2, 2, 3, 3, 4)))]
    return _some_long(r, lengths)


def _some_long(r, lengths):
    if r.random() < 0.04:
        lengths[r.randrange(len(lengths))] = r.randint(60, 140)  # more than a chunk of the chunked kernels
    return tuple(lengths)


def _call(r, cp_size, operation):
    heads, groups = r.choice(HEADS)
    head_dim, value_head_dim = r.choice(SIZES)
    call = Call(
        operation, _lengths(r), layout=r.choice((*LAYOUTS, "contiguous", "zigzag", "balanced", "random", "within")),
        align=r.choice((1, 1, 1, 2, 4)), heads=heads, groups=groups, head_dim=head_dim, value_head_dim=value_head_dim,
        seed=r.randrange(10**6), strides=r.choice(("dense", "dense", "last", "turned", "odd")), ones=r.random() < 0.1,
    )  # fmt: skip
    transport = r.choice(("collective", "collective", "pairwise", "hierarchical", "shared_memory"))
    hosts = _hosts(r, cp_size) if transport == "hierarchical" else ()
    if operation == "sparse_attention":
        call = _sparse(r, dataclasses.replace(call, transport=transport, hosts=hosts))
    elif operation in ATTENTIONS:
        call = _of_latents(r, call) if operation == "latent_attention" else call
        call = _attention(r, dataclasses.replace(call, transport=transport, hosts=hosts), cp_size)
    elif operation in KINDS:
        call = _linear(r, dataclasses.replace(call, transport=transport, hosts=hosts), cp_size)
    else:
        call = _moved(r, call)
    return _used(r, call)


def _of_latents(r, call):
    """The call with sizes of latents, and keys for each head."""
    head_dim = max(call.head_dim, 2)
    latent = (r.randint(1, head_dim - 1), r.choice((1, 3, 8, 12)))
    return dataclasses.replace(
        call, groups=call.heads, head_dim=head_dim, latent=latent, latent_mode=r.choice(LATENT_MODES)
    )


def _hosts(r, cp_size):
    hosts = [r.randrange(r.randint(1, cp_size)) for _ in range(cp_size)]
    numbers = {host: number for number, host in enumerate(sorted(set(hosts)))}
    return tuple(numbers[host] for host in hosts)


def _attention(r, call, cp_size):
    scheme = r.choice((*PLAIN, *PRODUCTS)) if cp_size in (4, 6, 8) else r.choice(PLAIN)
    degrees = [degree for degree in range(2, cp_size) if cp_size % degree == 0]
    plain_degree = cp_size if SCHEMES[scheme].exchanges_heads else 1
    degree = plain_degree if scheme in PLAIN else r.choice(degrees)
    cross = r.random() < 0.12
    chunks = None
    if SCHEMES[scheme].takes_chunks and r.random() < 0.5:
        chunks = r.randint(1, _most_groups(call, degree))
    special = {name for name, often in SPECIAL.items() if r.random() < often}
    # A ring adds up in float32 what others round, and so shows how it adds.
    narrow = call.operation != "projected_attention" and r.random() < (0.7 if scheme == "p2p" else 0.2)
    kv_lengths = tuple(_length(r) for _ in call.lengths) if cross else ()
    call = dataclasses.replace(
        call, scheme=scheme, ulysses_degree=degree if scheme in PRODUCTS else None, head_chunks=chunks,
        codec=r.choice(("fp8", "fp8_e5m2", "int8")) if not narrow and r.random() < 0.2 else "none",
        batch=r.choice((0, 0, 0, 1, 2)), mask=_mask(r, call.lengths, kv_lengths), kv_lengths=kv_lengths,
        kv_layout=r.choice(LAYOUTS) if cross else "contiguous",
        kernel=r.choice(("auto", "auto", "auto", "reference")),
    )  # fmt: skip
    if call.layout == "stripes" and sum(call.lengths) > 24:
        call = dataclasses.replace(call, layout="random")  # a kernel call for each pair of stripes takes long
    if narrow:
        call = _narrow(r, call)
    if call.whole:
        return call
    return dataclasses.replace(
        call, sink="sink" in special, softcap=1.5 * ("softcap" in special),
        dropout=0.3 * ("dropout" in special and not narrow),  # the oracle draws in float64
        scale=r.choice((-0.4, 0.0, 2.0)) if "scale" in special else None,
    )  # fmt: skip


def _sparse(r, call):
    if r.random() < 0.4:
        return dataclasses.replace(
            call, scheme=r.choice(("exact", "all_gather")), block=r.choice((1, 2, 2, 3, 4, 5, 8)),
            width=r.choice((1, 2, 2, 3, 40)), scale=r.choice((None, None, -0.4)),
        )  # fmt: skip
    options = tuple(name for name in ("dense", "relu") if r.random() < 0.5)
    return dataclasses.replace(
        call, scheme=r.choice(("exact", "all_gather")), mask=_mask(r, call.lengths), width=r.choice((1, 2, 5, 40)),
        options=options, scale=r.choice((None, None, -0.4)),
    )  # fmt: skip


def _most_groups(call, degree):
    """Key heads of the rank that has most."""
    groups = 1 if call.latent and call.latent_mode != "heads" else call.groups
    return max(1, -(-groups // degree))


def _narrow(r, call):
    dtype = r.choice(("float32", "bfloat16", "bfloat16", "bfloat16"))
    return dataclasses.replace(call, dtype=dtype, whole=r.random() < 0.65 and not call.latent)


def _mask(r, lengths, kv_lengths=()):
    kind, total = r.choice(CROSS_MASKS if kv_lengths else MASKS), sum(lengths)
    if kind in ("slices", "blocks") and total > 70:
        kind = "window"  # the oracle goes from pair to pair
    if kind in ("causal", "full"):
        return (kind,)
    if kind in ("window", "first"):
        left, right = r.randint(-1, 9), r.choice((0, 0, 1, 4, -1))
        return (kind, left, right, *([r.randint(1, 5)] if kind == "first" else []))
    if kind in ("prefix", "chunk"):
        return (kind, r.randint(1, 12))
    if kind == "table":
        table = BLOCK_TABLES[r.choice(tuple(BLOCK_TABLES))]
        return (kind, table.name, r.choice((None, table.multiple_of * r.randint(1, 3))))
    if kind == "shared_question":
        return (kind, tuple(_parts(r, length) for length in lengths))
    if kind == "slices":
        return (kind, tuple(_slice(r, total, sum(kv_lengths or lengths)) for _ in range(r.randint(0, 5))))
    size = r.randint(max(1, total // 12), max(9, total // 8))
    cells = -(-total // size)
    return (kind, tuple(tuple(r.randint(0, 1) for _ in range(cells)) for _ in range(cells)), size)


def _parts(r, length):
    cuts = sorted(r.randint(0, length) for _ in range(r.randint(0, 3)))
    return tuple(end - start for start, end in itertools.pairwise([0, *cuts, length]))


def _slice(r, *totals):
    q, k = (sorted(r.randint(0, total) for _ in range(2)) for total in totals)
    return (*q, *k, r.choice(("full", "causal", "inverse_causal", "both")))


def _linear(r, call, cp_size):
    kind = KINDS[call.operation]
    mode = r.choice(("headwise", "headwise", "chunkwise", "chunkwise", "redistribute", "auto"))
    exchanges = mode in ("headwise", "auto")
    groups = call.heads * call.value_head_dim if kind == "conv1d" else call.groups
    most = _most_groups(dataclasses.replace(call, groups=groups), cp_size)
    chunks = r.randint(1, most) if exchanges and r.random() < 0.5 else None
    codec = "none"
    if exchanges and kind != "conv1d" and r.random() < 0.3:
        codec = r.choice(("fp8", "fp8_e5m2", "int8"))
    choices = {
        "gated_delta_rule": ["norm"], "kda": ["norm"], "mamba2": ["softplus", "limit", "skip", "skips", "bias"],
        "gated_delta_net": ["bias", "three", "negative"], "kda_mixer": ["bias", "three", "bound"], "gdn2": ["norm"],
        "gdn2_mixer": ["bias", "three"], "gated_delta_product": ["norm"],
        "gated_delta_product_mixer": ["bias", "three"],
        "mamba2_mixer": ["bias", "three", "limit", "skip", "skips"], "causal_conv1d": ["bias", "three", "silu"],
    }[call.operation]  # fmt: skip
    options = tuple(name for name in choices if r.random() < 0.4)
    if "skips" in options:
        options = tuple(name for name in options if name != "skip")
    narrow = codec == "none" and r.random() < 0.15
    return dataclasses.replace(
        call, scheme=mode, head_chunks=chunks, codec=codec, width=r.choice((1, 2, 3, 4, 4, 4, 7)), options=options,
        kernel=r.choice(("auto", "auto", "auto", "reference")),
        dtype=r.choice(("float32", "bfloat16")) if narrow else "float64",
        scale=r.choice((None, None, 0.3)) if kind in ("gdn", "kda", "gdn2", "gdp") else None,
        steps=r.choice((1, 2, 3)) if kind == "gdp" else 1,
        whole=narrow and call.operation == "causal_conv1d" and r.random() < 0.7,
    )  # fmt: skip


def _moved(r, call):
    return dataclasses.replace(
        call, batch=r.randint(0, 2), scheme=r.choice(("same_loss", "own_loss")), kv_layout=r.choice(LAYOUTS),
        dtype=r.choice(("float64", "float32", "bfloat16")), whole=True,
    )  # fmt: skip


def _used(r, call):
    """Draws the form of the inputs and the use of the result."""
    if r.random() < 0.1 and call.dtype == "float64":
        call = _sharing(r, call)
    names = names_of(call)
    frozen = ()
    if r.random() < 0.25 and len(names) > 1:
        frozen = tuple(r.sample(names, r.randint(1, len(names) - 1)))
    return dataclasses.replace(
        call, frozen=frozen, checkpoint=r.choice(("", "", "", "", "reentrant", "non-reentrant")),
        twice=r.choice(("", "", "", "", "", "", "", "input", "output", "backward")),
    )  # fmt: skip


def _sharing(r, call):
    """The call with tensors that are one, if it has some of one shape."""
    if call.operation == "attention" and not call.kv_lengths:
        size = {"value_head_dim": call.head_dim}
        return dataclasses.replace(
            call, **size, **r.choice(({"shared": "+qkv"}, {"shared": "=qkv", "groups": call.heads}, {"shared": "=kv"})),
            head_chunks=None,
        )  # fmt: skip
    if call.operation in ("gated_delta_rule", "kda", "gdn2"):
        return dataclasses.replace(call, shared=r.choice(("=qk", "+qk")))
    if call.operation == "mamba2":
        return dataclasses.replace(call, shared=r.choice(("=BC", "+BC")))
    return call
