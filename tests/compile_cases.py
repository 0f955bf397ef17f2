"""Operations between compiled projections, as tests run them."""

import contextlib
import dataclasses
import logging
import math
import warnings

import torch
from torch import nn
from torch._dynamo.utils import counters

import megatron_cp as cp
from megatron_cp.executor.groups import TorchGroup

HIDDEN, HEADS, GROUPS, DIM, WIDTH = 16, 8, 4, 4, 4
TOLERANCE = 1e-12
# Of other lengths every time. No rank has 0 rows or 1, for which a compiler always makes code of its own.
PACKS = ((7, 1, 40, 16), (5, 50, 1, 3), (33, 2, 2, 40), (64,), (9, 9, 70, 1))
VALUES, KEYS = HEADS * DIM, GROUPS * DIM
OPERATIONS = {
    "attention": ("a2a", "a2a, 2 chunks", "p2p", "all_gather", "exact"),
    "projected_attention": ("a2a, 2 chunks", "p2p"), "gated_delta_rule": ("headwise", "chunkwise"),
    "gated_delta_net": ("headwise", "chunkwise"), "kda": ("headwise", "chunkwise"),
    "kda_mixer": ("headwise", "chunkwise"), "mamba2": ("headwise", "chunkwise"),
    "mamba2_mixer": ("headwise", "chunkwise"), "causal_conv1d": ("headwise", "chunkwise"), "gather": ("",),
    "relayout": ("",),
}  # fmt: skip
_KINDS = {"gated": "gdn", "kda": "kda", "mamba2": "mamba", "causal": "conv1d"}
# Features of each tensor that an operation takes.
_INPUTS = {
    "attention": (VALUES, KEYS, KEYS), "projected_attention": (HIDDEN,),
    "gated_delta_rule": (KEYS, KEYS, VALUES, HEADS, HEADS), "gated_delta_net": (2 * KEYS + VALUES, HEADS, HEADS),
    "kda": (KEYS, KEYS, VALUES, VALUES, HEADS), "kda_mixer": (2 * KEYS + VALUES, VALUES, HEADS),
    "mamba2": (VALUES, HEADS, KEYS, KEYS), "mamba2_mixer": (VALUES + 2 * KEYS, HEADS), "causal_conv1d": (VALUES,),
    "gather": (VALUES,), "relayout": (VALUES,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans and layouts of a batch. `plan` is None for operations without a plan."""

    layout: cp.Layout
    target: cp.Layout
    plan: cp.Plan | None


def plans(operation, mode, lengths, cp_size):
    packing = cp.Packing(lengths)
    layout, target = cp.Layout.zigzag(packing, cp_size), cp.Layout.contiguous(packing, cp_size)
    scheme, _, chunks = mode.partition(", ")
    shape = {"heads": HEADS, "head_dim": DIM, "head_chunks": 2 if chunks else None}
    if operation in ("gather", "relayout"):
        return Plans(layout, target, None)
    if "attention" in operation:
        return Plans(layout, target, cp.plan_attention(packing, layout, kv_heads=GROUPS, scheme=scheme, **shape))
    kind = _KINDS[operation.split("_")[0]]
    sizes = {"gdn": {"key_heads": GROUPS}, "kda": {"key_heads": GROUPS}, "mamba": {"groups": GROUPS, "state": DIM}}
    shape = {"channels": VALUES} if kind == "conv1d" else shape | sizes[kind]
    return Plans(layout, target, cp.plan_linear(packing, layout, kind, mode=scheme, conv_width=WIDTH, **shape))


class Layer(nn.Module):
    """The parameters around an operation: a projection before it, those that it takes, a projection after it."""

    def __init__(self, operation):
        super().__init__()
        self.widths = _INPUTS[operation]
        torch.manual_seed(0)
        self.before = nn.Linear(HIDDEN, sum(self.widths))
        self.after = nn.Linear(VALUES, HIDDEN)
        self.heads = nn.Parameter(torch.randn(HEADS) * 0.3 - 1)
        self.features = nn.Parameter(torch.randn(VALUES) * 0.3 - 1)
        self.conv = nn.Parameter(torch.randn(self.widths[0], WIDTH) / WIDTH)
        self.rows = nn.Parameter(torch.randn(3, HEADS, DIM, HIDDEN))
        self.double()

    def projected(self, x):
        """Returns the inputs of the operation, each `[t, features]`."""
        return self.before(x).split(self.widths, -1)

    def finished(self, out):
        return torch.tanh(self.after(out.flatten(1)))


def _by_heads(*tensors):
    return [x.unflatten(1, (-1, DIM)) for x in tensors]


# A function for each operation, which is called in it and in nothing deeper: a compiler that cannot look into a call
# breaks the graph in every function around it that it would have inlined.


def attention(layer, x, batch, group):
    q, k, v = _by_heads(*layer.projected(x))
    return layer.finished(cp.attention(q, k, v, batch.plan, group, sink=layer.heads))


def projected_attention(layer, x, batch, group):
    x = torch.tanh(layer.before(x))

    def project(heads, kv_heads):
        rows = (layer.rows[0, heads], layer.rows[1, kv_heads], layer.rows[2, kv_heads])
        return tuple((x @ row.flatten(0, 1).T).unflatten(1, (-1, DIM)) for row in rows)

    return layer.finished(cp.projected_attention(project, batch.plan, group))


def gated_delta_rule(layer, x, batch, group):
    *qkv, g, beta = layer.projected(x)
    q, k, v = _by_heads(*qkv)
    g, beta = -g.exp(), beta.sigmoid()
    return layer.finished(cp.gated_delta_rule(q, k, v, g, beta, batch.plan, group, use_qk_l2norm_in_kernel=True))


def gated_delta_net(layer, x, batch, group):
    parameters = {"conv": layer.conv, "A_log": layer.heads, "dt_bias": layer.heads}
    return layer.finished(cp.gated_delta_net(*layer.projected(x), batch.plan, group, **parameters))


def kda(layer, x, batch, group):
    *qkvg, beta = layer.projected(x)
    q, k, v, g = _by_heads(*qkvg)
    g, beta = -g.exp(), beta.sigmoid()
    return layer.finished(cp.kda(q, k, v, g, beta, batch.plan, group, use_qk_l2norm_in_kernel=True))


def kda_mixer(layer, x, batch, group):
    parameters = {"conv": layer.conv, "A_log": layer.heads, "dt_bias": layer.features}
    return layer.finished(cp.kda_mixer(*layer.projected(x), batch.plan, group, **parameters))


def mamba2(layer, x, batch, group):
    values, dt, b, c = layer.projected(x)
    values, b, c = _by_heads(values, b, c)
    decay = -layer.heads.exp()
    out = cp.mamba2(
        values, dt, decay, b, c, batch.plan, group, D=layer.heads, dt_bias=layer.heads, dt_softplus=True
    )  # fmt: skip
    return layer.finished(out)


def mamba2_mixer(layer, x, batch, group):
    parameters = {"conv": layer.conv, "A_log": layer.heads, "D": layer.heads, "dt_bias": layer.heads}
    return layer.finished(cp.mamba2_mixer(*layer.projected(x), batch.plan, group, **parameters))


def causal_conv1d(layer, x, batch, group):
    (x,) = layer.projected(x)
    return layer.finished(cp.causal_conv1d(x, layer.conv, layer.features, batch.plan, group, activation="silu"))


def gather(layer, x, batch, group):
    (x,) = layer.projected(x)
    return layer.finished(cp.gather(x, batch.layout, group))


def relayout(layer, x, batch, group):
    (x,) = layer.projected(x)
    return layer.finished(cp.relayout(x, batch.layout, batch.target, group))


FUNCTIONS = {
    function.__name__: function
    for function in (
        attention, projected_attention, gated_delta_rule, gated_delta_net, kda, kda_mixer, mamba2, mamba2_mixer,
        causal_conv1d, gather, relayout,
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """The results of compiling an operation.

    Attributes:
        breaks: graph breaks, of the first pack.
        graphs: graphs so far, after each pack.
        difference: of the output and of all gradients from the uncompiled ones, at most, as a share of the largest.
        complaints: warnings, and what torch logs as such.
    """

    breaks: int
    graphs: tuple[int, ...]
    difference: float
    complaints: tuple[str, ...]


def compile_and_compare(group, operation, mode, backend, packs=PACKS[:1], compiles=True):
    """Runs an operation forward and backward over some packs on one rank, compiled and not, and compares.

    A rank that does not compile runs it as it is both times.
    """
    torch._dynamo.reset()
    counters.clear()
    function, layer = FUNCTIONS[operation], Layer(operation)
    compiled = torch.compile(function, backend=backend) if compiles else function
    breaks, graphs, differences = 0, [], []
    with complaints() as found:
        for number, lengths in enumerate(packs):
            batch = plans(operation, mode, lengths, group.size)
            x = drawn(batch, number, group.rank)
            expected, had = (results(run, layer, x, batch, given(group)) for run in (function, compiled))
            differences.append(difference(had, expected))
            breaks = breaks or sum(counters["graph_break"].values())
            graphs.append(counters["stats"]["unique_graphs"])
    return Found(breaks, tuple(graphs), max(differences), tuple(found))


def given(group):
    """A group as users have it."""
    return group.group if isinstance(group, TorchGroup) else group


def drawn(batch, seed, rank):
    """This rank's rows of hidden states."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch.layout.packing.total, HIDDEN, dtype=torch.float64, generator=random)
    return batch.layout.shard(hidden, rank)


def results(run, layer, x, batch, group):
    """The output and the gradient of every tensor that has one."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    out = run(layer, leaves[0], batch, group)
    gradients = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def difference(had, expected):
    """Returns the difference of the worst tensor, as a share of its largest value; infinite if any number is NaN."""
    shares = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(had, expected, strict=True)]
    return max(float("inf") if math.isnan(share) else share for share in shares)


@contextlib.contextmanager
def complaints():
    """Collects the warnings of Python and of torch's log in a block of code."""
    found = []

    class Listener(logging.Handler):
        def emit(self, record):
            if "No CUDA runtime is found" not in record.getMessage():  # of a machine that has the toolkit alone
                found.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("torch").addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
        found += [str(warning.message) for warning in warned]
    finally:
        logging.getLogger("torch").removeHandler(listener)
