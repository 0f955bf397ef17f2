"""Operations and layers under `torch.autocast`: what is cast, and in which types gradients come back.

`test_cuda.py` calls some of it on a device.
"""

import copy

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import RankError, run_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (7, 1, 70)
ROWS, HEADS, GROUPS, DIM = sum(LENGTHS), 4, 2, 8
CHANNELS = {"conv1d": HEADS * DIM, "mixer": (2 * GROUPS + HEADS) * DIM, "kda": 3 * HEADS * DIM}
CHANNELS["steps"] = (3 * GROUPS + 2 * HEADS) * DIM
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def plan_for(kind, cp_size=1):
    packing = cp.Packing(LENGTHS)
    layout = cp.Layout.zigzag(packing, cp_size)
    if kind == "attention":
        return cp.plan_attention(packing, layout, heads=HEADS, kv_heads=GROUPS, head_dim=DIM)
    sizes = {
        "conv1d": {"channels": HEADS * DIM},
        "gdn": {"heads": HEADS, "key_heads": GROUPS, "head_dim": DIM},
        "kda": {"heads": HEADS, "head_dim": DIM},
        "gdn2": {"heads": HEADS, "key_heads": GROUPS, "head_dim": DIM},
        "gdp": {"heads": HEADS, "key_heads": GROUPS, "head_dim": DIM, "num_householder": 2},
        "mamba": {"heads": HEADS, "groups": GROUPS, "head_dim": DIM, "state": DIM},
    }[kind]
    return cp.plan_linear(packing, layout, kind=kind, conv_width=4, **sizes)


def drawn(*shape, low=None):
    """Numbers of float32; below 0 or between 0 and 1 if asked."""
    x = torch.randn(*shape, generator=RANDOM)
    return (x if low is None else low * x.sigmoid()).to(DEVICE)


def projected(q, k, v, plan, **options):
    def project(heads, kv_heads):
        return q[:, heads], k[:, kv_heads], v[:, kv_heads]

    return cp.projected_attention(project, plan, **options)


RANDOM = torch.Generator().manual_seed(0)
QKV = {"q": drawn(ROWS, HEADS, DIM), "k": drawn(ROWS, GROUPS, DIM), "v": drawn(ROWS, GROUPS, DIM)}
RULE = {"q": drawn(ROWS, GROUPS, DIM), "k": drawn(ROWS, GROUPS, DIM), "v": drawn(ROWS, HEADS, DIM)}
GATES = {"g": drawn(ROWS, HEADS, low=-1), "beta": drawn(ROWS, HEADS, low=1)}
DECAY = {"A_log": drawn(HEADS), "dt_bias": drawn(HEADS)}
# By name: the operation, the kind of its plan, all tensors, and which of them have one type.
LOWERED = {
    "attention": (cp.attention, "attention", QKV, "qkv"),
    "projected_attention": (projected, "attention", QKV, "qkv"),
    "causal_conv1d": (
        cp.causal_conv1d, "conv1d",
        {"x": drawn(ROWS, HEADS * DIM), "weight": drawn(HEADS * DIM, 4), "bias": drawn(HEADS * DIM)}, "x",
    ),
    "gated_delta_net": (
        cp.gated_delta_net, "gdn",
        {"qkv": drawn(ROWS, CHANNELS["mixer"]), "beta": drawn(ROWS, HEADS), "alpha": drawn(ROWS, HEADS),
         "conv": drawn(CHANNELS["mixer"], 4), **DECAY}, ["qkv"],
    ),
    "kda_mixer": (
        cp.kda_mixer, "kda",
        {"qkv": drawn(ROWS, CHANNELS["kda"]), "g": drawn(ROWS, HEADS * DIM), "beta": drawn(ROWS, HEADS),
         "conv": drawn(CHANNELS["kda"], 4), **DECAY, "dt_bias": drawn(HEADS * DIM)}, ["qkv"],
    ),
    "gdn2_mixer": (
        cp.gdn2_mixer, "gdn2",
        {"qkv": drawn(ROWS, CHANNELS["mixer"]), "g": drawn(ROWS, GROUPS * DIM), "b": drawn(ROWS, GROUPS * DIM),
         "w": drawn(ROWS, HEADS * DIM), "conv": drawn(CHANNELS["mixer"], 4), "A_log": drawn(GROUPS),
         "dt_bias": drawn(GROUPS * DIM)}, ["qkv"],
    ),
    "gated_delta_product_mixer": (
        cp.gated_delta_product_mixer, "gdp",
        {"vkq": drawn(ROWS, CHANNELS["steps"]), "beta": drawn(ROWS, 2 * HEADS), "alpha": drawn(ROWS, HEADS),
         "conv": drawn(CHANNELS["steps"], 4), **DECAY}, ["vkq"],
    ),
    "mamba2_mixer": (
        cp.mamba2_mixer, "mamba",
        {"xBC": drawn(ROWS, CHANNELS["mixer"]), "dt": drawn(ROWS, HEADS), "conv": drawn(CHANNELS["mixer"], 4),
         "D": drawn(HEADS), **DECAY}, ["xBC"],
    ),
}  # fmt: skip
WIDENED = {
    "gated_delta_rule": (cp.gated_delta_rule, "gdn", {**RULE, **GATES}, "qkv"),
    "kda": (
        cp.kda, "kda",
        {**{name: drawn(ROWS, HEADS, DIM) for name in "qkv"}, **GATES, "g": drawn(ROWS, HEADS, DIM, low=-1)}, "qkv",
    ),
    "gdn2": (
        cp.gdn2, "gdn2",
        {**RULE, "g": drawn(ROWS, GROUPS, DIM, low=-1), "b": drawn(ROWS, GROUPS, DIM, low=1),
         "w": drawn(ROWS, HEADS, DIM, low=1)}, "qkv",
    ),
    "gated_delta_product": (
        cp.gated_delta_product, "gdp",
        {"q": RULE["q"], "k": drawn(2 * ROWS, GROUPS, DIM), "v": drawn(2 * ROWS, HEADS, DIM),
         "g": drawn(ROWS, HEADS, low=-1), "beta": drawn(2 * ROWS, HEADS, low=1)}, "qkv",
    ),
    "mamba2": (
        cp.mamba2, "mamba",
        {"x": drawn(ROWS, HEADS, DIM), "B": drawn(ROWS, GROUPS, DIM), "C": drawn(ROWS, GROUPS, DIM),
         "dt": drawn(ROWS, HEADS, low=1), "A": drawn(HEADS, low=-1)}, "xBC",
    ),
}  # fmt: skip
ALL = LOWERED | WIDENED


def trained(name, tensors, dtype=None, kernel="auto"):
    """The output and all gradients, of what stands and is differentiated under autocast to a type, or without."""
    operation, kind, *_ = ALL[name]
    leaves = {each: tensor.clone().requires_grad_() for each, tensor in tensors.items()}
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        out = operation(**leaves, plan=plan_for(kind), kernel=kernel)
        out.float().square().sum().backward()
    return {"out": out.detach(), **{each: leaf.grad for each, leaf in leaves.items()}}


def given_as(name, given, dtype):
    """An operation's tensors: all in float32, those of one type in the lower one, or the last of these alone."""
    _, _, tensors, of_one_type = ALL[name]
    lower = {"float32": [], "mixed": of_one_type[-1:], "lower": of_one_type}[given]
    return {each: tensor.to(dtype) if each in lower else tensor for each, tensor in tensors.items()}


def assert_is_that_of(found, tensors, expected):
    """Checks for equal bits, and gradients in the types of the tensors."""
    for name, tensor in expected.items():
        dtype = tensors[name].dtype if name in tensors else tensor.dtype
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.bfloat16, "reference"), (torch.bfloat16, "auto"), (torch.float16, "auto")], ids=str
)
@pytest.mark.parametrize("given", ["float32", "mixed", "lower"])
@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.few(together=2)
def test_lowered_inputs_are_cast_and_nothing_else_is(name, given, dtype, kernel):
    tensors, of_one_type = given_as(name, given, dtype), ALL[name][3]
    cast = {each: tensor.to(dtype) if each in of_one_type else tensor for each, tensor in tensors.items()}
    found = trained(name, tensors, dtype, kernel)
    assert found["out"].dtype == dtype
    assert_is_that_of(found, tensors, trained(name, cast, kernel=kernel))


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("given", ["float32", "mixed", "lower"])
@pytest.mark.parametrize("name", WIDENED)
def test_inputs_of_recurrences_are_cast_to_the_widest(name, given, kernel):
    tensors, of_one_type = given_as(name, given, torch.bfloat16), ALL[name][3]
    widest = torch.bfloat16 if given == "lower" else torch.float32
    cast = {each: tensor.to(widest) if each in of_one_type else tensor for each, tensor in tensors.items()}
    found = trained(name, tensors, torch.bfloat16, kernel)
    assert found["out"].dtype == widest
    assert_is_that_of(found, tensors, trained(name, cast, kernel=kernel))


def test_float64_is_not_cast():
    with torch.autocast(DEVICE, torch.bfloat16):
        out = cp.attention(*(x.double() for x in QKV.values()), plan_for("attention"))
    assert out.dtype == torch.float64


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if len(case[3]) > 1])
@pytest.mark.parametrize("wider", [torch.float32, torch.float64], ids=str)
def test_rejects_mixed_types_without_autocast_and_float64_under_it(name, wider):
    operation, kind, _, of_one_type = ALL[name]
    tensors = given_as(name, "mixed", torch.bfloat16)
    tensors[of_one_type[0]] = tensors[of_one_type[0]].to(wider)
    with (
        torch.autocast(DEVICE, torch.bfloat16, enabled=wider == torch.float64),
        pytest.raises(cp.ArgumentError, match=r"got 'torch.\w+ \[.*allowed: torch\.\w+ \["),
    ):
        operation(**tensors, plan=plan_for(kind))


def test_rejects_autocast_on_some_ranks_alone():
    plan = plan_for("attention", 2)

    def rank(group):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=group.rank == 1):
            cp.attention(*(plan.layout.shard(x, group.rank) for x in QKV.values()), plan, group)

    with pytest.raises(RankError, match=r"q: bfloat16.*"):
        run_ranks(rank, 2)


HIDDEN = 24
LAYERS = {
    "Attention": lambda: cp.nn.Attention(HIDDEN, 6, 2, 8, qk_norm=True, device=DEVICE),
    "GatedDeltaNet": lambda: cp.nn.GatedDeltaNet(HIDDEN, 6, 3, head_dim=16, value_head_dim=8, device=DEVICE),
    "KimiDeltaAttention": lambda: cp.nn.KimiDeltaAttention(HIDDEN, 3, head_dim=8, device=DEVICE),
    "Mamba2": lambda: cp.nn.Mamba2(HIDDEN, 6, head_dim=4, state=8, groups=2, device=DEVICE),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_fp32_weights_has_their_gradients_in_fp32(name, dtype):
    torch.manual_seed(0)
    layer, packing = LAYERS[name](), cp.Packing(LENGTHS)
    hidden = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(group, dtype=None):
        own, layout = copy.deepcopy(layer), cp.Layout.zigzag(packing, 1 if group is None else group.size)
        local = layout.shard(hidden, 0 if group is None else group.rank).requires_grad_()
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            out = own(local, cp.BatchPlan(layout, [own.slot]), group)
        out.float().square().sum().backward()
        assert out.dtype == (dtype or torch.float32)
        return [local.grad], [each.grad for each in own.parameters()]

    _, exact = run(None)
    found = run_ranks(lambda group: run(group, dtype), 2)
    assert {each.dtype for _, gradients in found for each in gradients} == {torch.float32}
    sums = [sum(shares) for shares in zip(*(gradients for _, gradients in found), strict=True)]
    found, exact = (torch.cat([each.flatten() for each in gradients]) for gradients in (sums, exact))
    assert (found - exact).norm() < ROUNDING[dtype] * exact.norm()
