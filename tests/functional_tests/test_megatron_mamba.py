"""Mamba-2 layers against Megatron's own mixer: each document alone, and the packed batch, on one rank.

mamba_ssm is for CUDA alone. Megatron's mixer gets a recurrence in its place that is written here, token by token, and
resets where `seq_idx` says so; ours is never told of it.
"""

import importlib.machinery
import sys
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from tests.functional_tests import test_megatron_stock as stock
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit
from tests.shared import once, selected

pytest.importorskip("megatron.core")

# By name: arguments of the mixer, and what is not as usual in its configuration.
LAYERS = {
    "mamba": ({}, {}),
    "three taps and D for each feature": ({"d_conv": 3, "D_has_hdim": True}, {}),
    "one group and no norm": ({"rmsnorm": False}, {"mamba_num_groups": 1}),
}
# Ranks, layout, --linear-cp-mode, and whose sharding. Megatron's packed parameters have no total_tokens, without which
# its own mixer sees one document.
PLACES = [
    (1, "contiguous", "auto"), (2, "zigzag", "headwise"), (2, "balanced", "headwise"), (4, "contiguous", "headwise"),
    (4, "random", "headwise"), (2, "zigzag", "chunkwise"), (2, "balanced", "chunkwise"), (4, "contiguous", "chunkwise"),
    (4, "random", "chunkwise"),
]  # fmt: skip
FEW = (PLACES[0], PLACES[1], PLACES[-1])
each_place = pytest.mark.parametrize(
    "place", [pytest.param(place, marks=() if place in FEW else pytest.mark.thorough) for place in PLACES], ids=str
)
ALIGNED = (24, 8, 64, 16)  # what Megatron can shard over 4 ranks
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Ranks whose Megatron finds a stand-in for mamba_ssm."""
    places = [case["place"] for case in selected(request, test_documents_are_apart)]
    run = partial(run_ranks, compare, 4, places, kind="processes", timeout=limit(200))
    return once(tmp_path_factory, "megatron_mamba", run)


def compare(group, places):
    stand_in_for_mamba_ssm()
    tiny.start()
    oracles = [None] * group.size
    dist.all_gather_object(oracles, [megatrons(name) for name in [*LAYERS, ALIGNED][group.rank :: group.size]])
    oracles = {name: others for rank in oracles for name, *others in rank}
    alone, packed = ({name: both[way] for name, both in oracles.items()} for way in (0, 1))
    found = {("two ways", name): worst(packed[name], alone[name]) for name in LAYERS}
    found |= {("states", name): stock.exchanged_states(our_layer(name), stock_layer(name)) for name in LAYERS}
    found["leak"] = worst(packed[ALIGNED], alone[ALIGNED])
    found["inference"] = [attempt(infer)]
    for place in places:
        tiny.start(cp=place[0])
        for name in LAYERS:
            ours = packed_layer(name, *place)
            found[place, name] = worst(ours, alone[name]), worst(ours, packed[name])
        found["isolation", place] = changed_documents(*place)
        found["megatron's sharding", place] = worst(packed_layer("mamba", *place, how="megatron"), alone[ALIGNED])
    found["inference"].append(attempt(infer))
    found["two rows"] = attempt(run_two_packed_rows)
    tiny.start(tp=2)
    found["tensor parallel"] = [stock.stored(make("mamba")) for make in (our_layer, stock_layer)]
    found["names"] = [name for name, *_ in stock.stored(tiny.build("hybrid_mamba"))]
    return found


def megatrons(name):
    """Returns a layer's name, or ALIGNED, with the results of Megatron's mixer: on each document, and on the pack."""
    if name == ALIGNED:
        return (
            name,
            on_each_document(stock_layer("mamba"), ALIGNED),
            megatrons_packed(stock_layer("mamba"), ALIGNED, None),
        )
    return name, on_each_document(stock_layer(name), tiny.RAGGED), megatrons_packed(stock_layer(name), tiny.RAGGED)


def worst(actual, expected):
    return next(iter(tiny.distances(actual, expected).values()))


def attempt(action):
    try:
        return action()
    except (ArgumentError, NotImplementedError) as error:
        return str(error)


def stand_in_for_mamba_ssm():
    """Has Megatron's mixer imported anew, with packages by the names that it imports."""
    from megatron.core.ssm import mamba_mixer

    assert not mamba_mixer.HAVE_MAMBA_SSM
    contents = {
        "mamba_ssm": {"__version__": "2.3.2"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_split_conv1d_scan_combined": split_conv1d_scan,
            "mamba_chunk_scan_combined": None,
        },
        "causal_conv1d": {"__version__": "1.7.0", "causal_conv1d_fn": None},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
    from megatron.core.utils import get_mamba_version, is_causal_conv1d_min_version

    importlib.reload(mamba_mixer)  # classes that are derived from the old one have its functions, and these its names
    mamba_mixer.MAMBA_HAS_STATE_DTYPE = False
    assert mamba_mixer.HAVE_MAMBA_SSM
    # Megatron remembers the versions. Nothing else is to take these for the packages.
    get_mamba_version()
    is_causal_conv1d_min_version("1.4.0")
    for name in contents:
        del sys.modules[name]


class RMSNorm(nn.Module):
    """mamba_ssm's, without the gate, which its fused kernel has applied."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def split_conv1d_scan(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups, norm_before_gate,  # noqa: N803
    seq_idx=None,
):  # fmt: skip
    """`mamba_split_conv1d_scan_combined` for a batch of one: `[1, l, z | x | B | C | dt]` to y silu(z)."""
    assert (activation, norm_before_gate, len(zxbcdt)) == ("silu", False, 1)
    tokens = zxbcdt.shape[1]
    starts = [0]
    if seq_idx is not None:
        starts += [token for token in range(1, tokens) if seq_idx[0, token] != seq_idx[0, token - 1]]
    heads, features = len(A), D.shape[1] if D.ndim == 2 else headdim
    inner = heads * features
    state = (zxbcdt.shape[2] - 2 * inner - heads) // (2 * ngroups)
    rows = []
    for start, end in zip(starts, [*starts[1:], tokens], strict=True):
        z, xbc, dt = zxbcdt[0, start:end].split([inner, inner + 2 * ngroups * state, heads], -1)
        window = torch.cat([xbc.new_zeros(conv1d_weight.shape[1] - 1, xbc.shape[1]), xbc])
        xbc = F.silu((window.unfold(0, conv1d_weight.shape[1], 1) * conv1d_weight).sum(-1) + conv1d_bias)
        x, b, c = xbc.split([inner, ngroups * state, ngroups * state], -1)
        x = x.view(-1, heads, features)
        b, c = (of.view(-1, ngroups, 1, state).repeat_interleave(heads // ngroups, 1) for of in (b, c))
        dt = F.softplus(dt + dt_bias)[..., None, None]
        memory = torch.zeros(heads, features, state)
        for token in range(end - start):
            memory = (dt[token] * A[:, None, None]).exp() * memory + dt[token] * b[token] * x[token, ..., None]
            y = (c[token] * memory).sum(-1) + (D if D.ndim == 2 else D[:, None]) * x[token]
            rows.append(y.flatten() * F.silu(z[token]))
    return torch.stack(rows)[None]


def build_layer(name, mixer, linear_cp_mode=None):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    arguments, changes = LAYERS[name]
    changes = changes if linear_cp_mode is None else changes | {"linear_cp_mode": linear_cp_mode}
    config = tiny.configure("hybrid_mamba", **changes)
    parts = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    layer = mixer(config, parts, config.hidden_size, layer_number=1, pg_collection=groups, **arguments)
    tiny.fill(layer, config)
    return layer


def stock_layer(name):
    from megatron.core.ssm.mamba_mixer import MambaMixer

    return build_layer(name, MambaMixer)


def on_each_document(layer, lengths):
    rows, gradient = rows_and_gradient(lengths)
    pieces = [layer(rows[start:end]) for start, end in Packing(lengths).spans() if end > start]
    return results(layer, torch.cat([out for out, _ in pieces]), rows, gradient)


def megatrons_packed(layer, lengths, total_tokens="all"):
    """Through Megatron's mixer in one call, as its data pipeline for hybrid models has it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    rows, gradient = rows_and_gradient(lengths)
    cu_seqlens = torch.tensor(Packing([length for length in lengths if length]).cu_seqlens, dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        total_tokens=sum(lengths) if total_tokens else None,
    )
    out, _ = layer(rows, packed_seq_params=params)
    return results(layer, out, rows, gradient)


def our_layer(name, linear_cp_mode=None):
    from megatron_cp.megatron.layers.mamba_mixer import MambaMixer

    return build_layer(name, MambaMixer, linear_cp_mode)


def rows_and_gradient(lengths):
    generator = torch.Generator().manual_seed(7)
    rows, gradient = (torch.randn(sum(lengths), 1, stock.HIDDEN, generator=generator) for _ in range(2))
    return rows.requires_grad_(), gradient


def results(layer, out, rows, gradient):
    """The output and all gradients, which a layer that is used again starts anew."""
    layer.zero_grad()
    out.backward(gradient)
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "rows": rows.grad, **gradients}


def packed_layer(name, cp_size, layout, linear_cp_mode, how="planned"):
    lengths = tiny.RAGGED if how == "planned" else ALIGNED
    rows, gradient = (tensor.detach() for tensor in rows_and_gradient(lengths))
    layer = our_layer(name, linear_cp_mode)
    layer.config.cp_packed_order = "document"  # Megatron's own class does not have it
    params = tiny.shards(layer, lengths, layout, 0, how).packed_seq_params
    layout, rank = tiny.layout_of(layout if how == "planned" else "zigzag", lengths, cp_size), dist.get_rank() % cp_size
    own = layout.shard(rows, rank).requires_grad_()
    out, bias = layer(own, packed_seq_params=params)
    assert (params.total_tokens, params.seq_idx, bias) == (None, None, None)
    found = results(layer, out, own, layout.shard(gradient, rank))
    placed = {name: stock.stream_of(found.pop(name), layout) for name in ("out", "rows")}
    return placed | stock.summed(found, cp_size)


def changed_documents(cp_size, layout, linear_cp_mode):
    """The documents of which some bit of the output is another one after their neighbours' tokens are."""
    layer, documents = our_layer("mamba", linear_cp_mode), list(Packing(tiny.RAGGED).spans())
    params = tiny.shards(layer, tiny.RAGGED, layout, 0).packed_seq_params
    layout, rank = params.plans.layout, dist.get_rank() % cp_size
    rows, _ = rows_and_gradient(tiny.RAGGED)
    others, found = rows.detach().clone(), []
    for start, end in documents[::2]:
        others[start:end] += 1
    with torch.no_grad():
        outs = [layer(layout.shard(tensor, rank), packed_seq_params=params)[0] for tensor in (rows.detach(), others)]
    before, after = (stock.stream_of(out, layout) for out in outs)
    for document, (start, end) in enumerate(documents):
        if not torch.equal(before[start:end], after[start:end]):
            found.append(document)
    return found


def infer():
    from megatron.core.inference.contexts import StaticInferenceContext

    layer, context = our_layer("mamba"), StaticInferenceContext(1, 8)
    rows = torch.randn(5, 1, stock.HIDDEN)
    with torch.no_grad():
        return torch.equal(layer(rows, context)[0], stock_layer("mamba")(rows, context)[0])


def run_two_packed_rows():
    layer = our_layer("mamba")
    params = tiny.shards(layer, (24, 8), "zigzag", 0).packed_seq_params
    layer(torch.zeros(8, 2, stock.HIDDEN), packed_seq_params=params)


@pytest.mark.parametrize("name", LAYERS)
def test_megatrons_mixer_agrees_with_itself_and_states_are_its(ranks, name):
    for found in ranks:
        assert found["two ways", name] <= TOLERANCE
    for found in ranks:
        (mine, theirs), (my_checkpoint, their_checkpoint) = found["states", name]
        assert mine == theirs
        assert my_checkpoint == their_checkpoint
        assert len(my_checkpoint) > 10


@each_place
@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_batch_is_megatrons_mixer(ranks, name, place):
    for found in ranks:
        assert max(found[place, name]) <= TOLERANCE


@each_place
def test_documents_are_apart(ranks, place):
    # Megatron's mixer mixes the documents in this case.
    for found in ranks:
        assert found["leak"] > 1000 * TOLERANCE
        assert found["megatron's sharding", place] <= TOLERANCE
    for found in ranks:
        assert found["isolation", place] == [0, 2, 4]  # of six


def test_checkpoints_of_tensor_parallel_ranks_are_megatrons(ranks):
    for found in ranks:
        mine, theirs = found["tensor parallel"]
        assert mine == theirs
        assert {offset for name, _, offset, _ in mine if name == "norm.weight"} in ({(0,)}, {(18,)})


def test_norms_inference_and_batches_of_two_rows(ranks):
    for found in ranks:
        assert "decoder.layers.1.mixer.in_proj.layer_norm_weight" in found["names"]
    for found in ranks:
        assert found["inference"] == [True, "Mamba has inference at --context-parallel-size 1 alone"]
    for found in ranks:
        assert found["two rows"].startswith("--micro-batch-size: got 2; allowed: 1 for packed batches")
