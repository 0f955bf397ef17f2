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
from tests.fuzz_cases import Call
from tests.fuzz_check import plan_of

HIDDEN, HEADS, GROUPS, DIM, WIDTH = 16, 8, 4, 4, 4
TOLERANCE = 1e-12
# Of other lengths every time. No rank has 0 rows or 1, for which a compiler always makes code of its own.
PACKS = ((7, 1, 40, 16), (5, 50, 1, 3), (33, 2, 2, 40), (64,), (9, 9, 70, 1))
VALUES, KEYS = HEADS * DIM, GROUPS * DIM
MODES = ("headwise", "chunkwise")
OPERATIONS = {
    "attention": ("a2a", "a2a, 2 chunks", "p2p", "all_gather", "exact"),
    "projected_attention": ("a2a, 2 chunks", "p2p"), "gated_delta_rule": MODES, "gated_delta_net": MODES, "kda": MODES,
    "kda_mixer": MODES, "mamba2": MODES, "mamba2_mixer": MODES, "causal_conv1d": MODES, "gather": ("",),
    "relayout": ("",),
}  # fmt: skip
# Features of each tensor that an operation takes.
_INPUTS = {
    "attention": (VALUES, KEYS, KEYS), "projected_attention": (HIDDEN,),
    "gated_delta_rule": (KEYS, KEYS, VALUES, HEADS, HEADS), "gated_delta_net": (2 * KEYS + VALUES, HEADS, HEADS),
    "kda": (KEYS, KEYS, VALUES, VALUES, HEADS), "kda_mixer": (2 * KEYS + VALUES, VALUES, HEADS),
    "mamba2": (VALUES, HEADS, KEYS, KEYS), "mamba2_mixer": (VALUES + 2 * KEYS, HEADS), "causal_conv1d": (VALUES,),
    "gather": (VALUES,), "relayout": (VALUES,),
}  # fmt: skip


def plans(operation, mode, lengths, cp_size):
    """Returns what an operation is told of a batch: its plan, or a layout, or two; the first is that of the rows."""
    scheme, _, chunks = mode.partition(", ")
    call = Call(
        operation, lengths, layout="zigzag", scheme=scheme, head_chunks=2 if chunks else None, heads=HEADS,
        groups=GROUPS, head_dim=DIM, value_head_dim=DIM, width=WIDTH,
    )  # fmt: skip
    plan = plan_of(call, cp_size)
    return (plan,) if isinstance(plan, cp.Plan) else plan[: 1 + (operation == "relayout")]


class Layer(nn.Module):
    """An operation and the parameters around it: a projection before it, those that it takes, a projection after it."""

    def __init__(self, operation):
        super().__init__()
        self.widths, self.name = _INPUTS[operation], operation
        torch.manual_seed(0)
        self.before = nn.Linear(HIDDEN, sum(self.widths))
        self.after = nn.Linear(VALUES, HIDDEN)
        self.heads = nn.Parameter(torch.randn(HEADS) * 0.3 - 1)
        self.features = nn.Parameter(torch.randn(VALUES) * 0.3 - 1)
        self.conv = nn.Parameter(torch.randn(self.widths[0], WIDTH) / WIDTH)
        self.rows = nn.Parameter(torch.randn(3, HEADS, DIM, HIDDEN))
        self.double()

    def forward(self, x, batch, group):
        """Calls the operation itself: a compiler that cannot look into a call breaks every function around it."""
        out = getattr(cp, self.name)(*self._inputs(x), *batch, group, **self._options())
        return torch.tanh(self.after(out.flatten(1)))

    def _inputs(self, x):
        parts = self.before(x).split(self.widths, -1)
        match self.name:
            case "attention":
                return [x.unflatten(1, (-1, DIM)) for x in parts]
            case "projected_attention":
                return (self._projection(torch.tanh(parts[0])),)
            case "gated_delta_rule":
                q, k, v = (x.unflatten(1, (-1, DIM)) for x in parts[:3])
                return q, k, v, -parts[3].exp(), parts[4].sigmoid()
            case "kda":
                q, k, v, g = (x.unflatten(1, (-1, DIM)) for x in parts[:4])
                return q, k, v, -g.exp(), parts[4].sigmoid()
            case "mamba2":
                x, b, c = (x.unflatten(1, (-1, DIM)) for x in (parts[0], *parts[2:]))
                return x, parts[1], -self.heads.exp(), b, c
            case "causal_conv1d":
                return parts[0], self.conv, self.features
        return parts

    def _projection(self, x):
        def project(heads, kv_heads):
            rows = (self.rows[0, heads], self.rows[1, kv_heads], self.rows[2, kv_heads])
            return tuple((x @ row.flatten(0, 1).T).unflatten(1, (-1, DIM)) for row in rows)

        return project

    def _options(self):
        match self.name:
            case "attention":
                return {"sink": self.heads}
            case "gated_delta_rule" | "kda":
                return {"use_qk_l2norm_in_kernel": True}
            case "gated_delta_net":
                return {"conv": self.conv, "A_log": self.heads, "dt_bias": self.heads}
            case "kda_mixer":
                return {"conv": self.conv, "A_log": self.heads, "dt_bias": self.features}
            case "mamba2":
                return {"D": self.heads, "dt_bias": self.heads, "dt_softplus": True}
            case "mamba2_mixer":
                return {"conv": self.conv, "A_log": self.heads, "D": self.heads, "dt_bias": self.heads}
            case "causal_conv1d":
                return {"activation": "silu"}
        return {}


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
    vars(cp).pop(operation, None)  # as in a program that compiles before it has looked an operation up
    layer = Layer(operation)
    compiled = torch.compile(layer, backend=backend) if compiles else layer
    breaks, graphs, differences = 0, [], []
    with complaints() as found:
        for number, lengths in enumerate(packs):
            batch = plans(operation, mode, lengths, group.size)
            x = drawn(batch, number, group.rank)
            had, expected = (results(run, layer, x, batch, given(group)) for run in (compiled, layer))
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
    layout = batch[0] if isinstance(batch[0], cp.Layout) else batch[0].layout
    return layout.shard(torch.randn(layout.packing.total, HIDDEN, dtype=torch.float64, generator=random), rank)


def results(run, layer, x, batch, group):
    """The output of `run`, which is the layer or a compiled one, and the gradient of every tensor that has one."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    out = run(leaves[0], batch, group)
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
