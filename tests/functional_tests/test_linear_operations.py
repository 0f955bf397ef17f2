"""The linear operations beside the parity of whole mixers: bare rules over ranks, what needs no gradient, refusals."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear.kernels import Delta, StateSpace
from megatron_cp.testing.parity import Case, draw, run_layer
from tests import linear_oracle
from tests.refusals import rejects

LENGTHS = (9, 1, 80, 0, 4)
HEADS, GROUPS, DIM, VALUE_DIM, STATE, CHANNELS = 4, 2, 8, 6, 8, 24
SIZES = {
    "gdn": {"heads": HEADS, "key_heads": GROUPS, "head_dim": DIM, "value_head_dim": VALUE_DIM},
    "kda": {"heads": HEADS, "key_heads": GROUPS, "head_dim": DIM, "value_head_dim": VALUE_DIM},
    "mamba": {"heads": HEADS, "groups": GROUPS, "head_dim": VALUE_DIM, "state": STATE},
    "conv1d": {"channels": CHANNELS},
}


def plan_for(kind, cp_size=1, mode="auto", name="contiguous", **more):
    packing = cp.Packing(LENGTHS)
    return cp.plan_linear(packing, getattr(cp.Layout, name)(packing, cp_size), kind, mode=mode, **SIZES[kind] | more)


def tensors_of(kind):
    """Returns the inputs of a bare rule, over the whole stream, in the order of its arguments."""
    total = sum(LENGTHS)
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    keys = {name: torch.nn.functional.normalize(normal(total, GROUPS, DIM), dim=-1) for name in "qk"}
    match kind:
        case "mamba":
            x, dt, rate = normal(total, HEADS, VALUE_DIM), normal(total, HEADS), -normal(HEADS).exp()
            return {"x": x, "dt": dt, "A": rate, "B": normal(total, GROUPS, STATE), "C": normal(total, GROUPS, STATE)}
        case "conv1d":
            return {"x": normal(total, CHANNELS), "weight": normal(CHANNELS, 4), "bias": normal(CHANNELS)}
    decay = (total, HEADS, DIM) if kind == "kda" else (total, HEADS)
    return keys | {
        "v": normal(total, HEADS, VALUE_DIM), "g": -normal(*decay).exp(), "beta": normal(total, HEADS).sigmoid(),
    }  # fmt: skip


PARAMETERS = {"A", "weight", "bias"}
OPTIONS = {
    "gdn": {"use_qk_l2norm_in_kernel": True, "scale": 0.3},
    "kda": {"scale": 0.3},
    "mamba": {"dt_softplus": True, "dt_limit": (0.1, 1.5)},
    "conv1d": {"activation": "silu"},
}
OPERATIONS = {"gdn": cp.gated_delta_rule, "kda": cp.kda, "mamba": cp.mamba2, "conv1d": cp.causal_conv1d}


def run_rule(group, kind, plan):
    local = {
        name: (x if name in PARAMETERS else plan.layout.shard(x, group.rank)).clone().requires_grad_()
        for name, x in tensors_of(kind).items()
    }
    out = OPERATIONS[kind](*local.values(), plan, group, **OPTIONS[kind])
    gradient = torch.linspace(-1, 1, sum(LENGTHS) * out[0].numel(), dtype=torch.float64)
    out.backward(plan.layout.shard(gradient.view(-1, *out.shape[1:]), group.rank))
    return {"out": out.detach()} | {name: x.grad for name, x in local.items()}


def whole(kind, plan, ranks):
    return {
        name: sum(rank[name] for rank in ranks)
        if name in PARAMETERS
        else plan.layout.unshard([rank[name] for rank in ranks])
        for name in ranks[0]
    }


@pytest.mark.any_cpu
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("kind", OPERATIONS)
def test_bare_rules_equal_one_rank(kind, mode):
    alone = plan_for(kind)
    expected = whole(kind, alone, run_ranks(run_rule, 1, kind, alone))
    plan = plan_for(kind, 3, mode, "balanced")
    found = whole(kind, plan, run_ranks(run_rule, 3, kind, plan))
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max().clamp(min=1), name


def test_a_bare_rule_is_its_equation():
    """Mamba-2 in its quadratic form, each document alone."""
    plan, t = plan_for("mamba"), tensors_of("mamba")
    skip, bias = torch.randn(HEADS, dtype=torch.float64), torch.randn(HEADS, dtype=torch.float64)
    out = cp.mamba2(*t.values(), plan, D=skip, dt_bias=bias, dt_softplus=True)
    step = torch.nn.functional.softplus(t["dt"] + bias)
    for start, end in plan.packing.spans():
        decay = (step[start:end] * t["A"]).cumsum(0)
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)[..., None]
        weights = (decay[:, None] - decay[None]).masked_fill(later, -torch.inf).exp().permute(2, 0, 1)
        scores = torch.einsum("ign,jgn->gij", t["C"][start:end], t["B"][start:end]).repeat_interleave(2, 0)
        x = t["x"][start:end] * step[start:end, :, None]
        expected = torch.einsum("hij,jhp->ihp", weights * scores, x) + skip[:, None] * t["x"][start:end]
        assert torch.allclose(out[start:end], expected, atol=1e-12)


def sequential(kind, t, *, scale=1.0, normalised=False):
    """The recurrence token by token, written apart from the kernels."""
    inputs = StateSpace(t["x"], t["dt"], t["A"], t["B"], t["C"]) if kind == "mamba" else Delta(*t.values())
    if normalised:
        inputs = inputs._replace(**{
            name: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for name, x in zip("qk", inputs[:2], strict=True)
        })  # fmt: skip
    oracle = linear_oracle.state_space if kind == "mamba" else linear_oracle.delta_rule
    return oracle(inputs, [0, 0, 1, 1], scale, LENGTHS)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_delta_rule_has_the_scale_and_the_norms_that_it_is_given(kind, normalised):
    tensors = tensors_of(kind)
    tensors["q"], tensors["k"] = tensors["q"] * 3, tensors["k"] * 0.7
    out = OPERATIONS[kind](*tensors.values(), plan_for(kind), scale=0.3, use_qk_l2norm_in_kernel=normalised)
    expected = sequential(kind, tensors, scale=0.3, normalised=normalised)
    assert torch.allclose(out, expected, atol=1e-12)
    usual = OPERATIONS[kind](*tensors.values(), plan_for(kind), use_qk_l2norm_in_kernel=normalised)
    assert torch.allclose(usual, expected * DIM**-0.5 / 0.3, atol=1e-12)


@pytest.mark.parametrize("softplus", [True, False])
def test_steps_are_shifted_made_positive_and_clamped(softplus):
    tensors, limit = tensors_of("mamba"), (0.2, 0.9)
    bias = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
    out = cp.mamba2(*tensors.values(), plan_for("mamba"), dt_bias=bias, dt_softplus=softplus, dt_limit=limit)
    step = tensors["dt"] + bias
    step = (torch.nn.functional.softplus(step) if softplus else step).clamp(*limit)
    assert torch.allclose(out, sequential("mamba", tensors | {"dt": step}), atol=1e-12)


def skips(group, skip):
    plan = plan_for("mamba", group.size, "headwise")
    tensors = {n: x if n == "A" else plan.layout.shard(x, group.rank) for n, x in tensors_of("mamba").items()}
    tensors["dt"] = tensors["dt"].exp()
    with_skip, without = (cp.mamba2(*tensors.values(), plan, group, D=d) for d in (skip, None))
    return torch.allclose(with_skip - without, skip.view(HEADS, -1) * tensors["x"], atol=1e-12)


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, VALUE_DIM)])
def test_each_head_has_its_own_skip(shape):
    assert run_ranks(skips, 3, torch.randn(shape, dtype=torch.float64)) == [True] * 3


def backward_of_some(group, case, wanted):
    """Gradients of `wanted` alone; the rest needs none."""
    problem, plan = draw(case), case.plan()
    inputs = {name: plan.layout.shard(x, group.rank) for name, x in problem.inputs.items()}
    leaves = inputs | {name: x.clone() for name, x in problem.parameters.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    out = cp.gated_delta_net(*[leaves[name] for name in problem.inputs], plan, group,
                             **{name: leaves[name] for name in problem.parameters})  # fmt: skip
    out.backward(plan.layout.shard(problem.output_gradient, group.rank))
    return {f"d_{name}": leaves[name].grad for name in wanted}


@pytest.mark.any_cpu
@pytest.mark.parametrize("wanted", [("qkv",), ("beta",), ("conv",), ("A_log", "dt_bias"), ("alpha", "conv")], ids=str)
@pytest.mark.parametrize("scheme", ["headwise", "chunkwise"])
def test_gradients_of_some_tensors_are_those_of_all(scheme, wanted):
    case = Case("gdn", 3, (7, 1, 40), "contiguous", scheme=scheme, value_head_dim=8)
    every = run_ranks(run_layer, 3, case)
    for rank, some in enumerate(run_ranks(backward_of_some, 3, case, wanted)):
        for name, gradient in some.items():
            assert torch.equal(gradient, every[rank][name]), name


def without_gradients(group, case, context):
    problem, plan = draw(case), case.plan()
    inputs = [plan.layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]
    with context():
        out = cp.gated_delta_net(*inputs, plan, group, **problem.parameters)
    assert not out.requires_grad
    return out


@pytest.mark.any_cpu
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scheme", ["headwise", "chunkwise"])
def test_evaluation_has_the_bits_of_training(scheme, context):
    case = Case("gdn", 3, (7, 1, 40), "balanced", scheme=scheme)
    expected = run_ranks(run_layer, 3, case)
    for rank, out in enumerate(run_ranks(without_gradients, 3, case, context)):
        assert torch.equal(out, expected[rank]["out"])


def evaluated_before_training(group, case):
    problem, plan = draw(case), case.plan()
    for evaluating in (True, False):
        inputs = [plan.layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]
        with torch.inference_mode(evaluating):
            out = cp.gated_delta_net(*inputs, plan, group, **problem.parameters)
    out.backward(plan.layout.shard(problem.output_gradient, group.rank))
    return inputs[0].grad


@pytest.mark.parametrize("scheme", ["headwise", "chunkwise"])
def test_a_plan_that_was_evaluated_can_be_trained(scheme):
    case = Case("gdn", 3, (7, 1, 40), "contiguous", scheme=scheme)
    expected = run_ranks(run_layer, 3, case)
    for rank, gradient in enumerate(run_ranks(evaluated_before_training, 3, case)):
        assert torch.equal(gradient, expected[rank]["d_qkv"])


def mixer_tensors(kind):
    case = Case(kind, 1, LENGTHS, "contiguous", HEADS, GROUPS, DIM, VALUE_DIM, dtype=torch.float32)
    problem = draw(case)
    return case.plan(), problem.inputs | problem.parameters


MIXERS = {"gdn": cp.gated_delta_net, "kda": cp.kda_mixer, "mamba": cp.mamba2_mixer}
OF_MIXERS = [(kind, name) for kind in MIXERS for name in mixer_tensors(kind)[1]]


@pytest.mark.parametrize(("kind", "name"), OF_MIXERS)
def test_rejects_mixer_tensors_that_do_not_fit_the_plan(kind, name):
    plan, tensors = mixer_tensors(kind)
    tensors[name] = tensors[name][:-1]
    rejects(f"^{name}: got ", MIXERS[kind], **tensors, plan=plan)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in OPERATIONS for name in tensors_of(kind)])
def test_rejects_rule_tensors_that_do_not_fit_the_plan(kind, name):
    tensors = tensors_of(kind)
    tensors[name] = tensors[name][:-1]
    rejects(f"^{name}: got ", OPERATIONS[kind], *tensors.values(), plan_for(kind))


@pytest.mark.parametrize("kind", OPERATIONS)
def test_rejects_plans_of_another_kind_and_what_is_no_tensor(kind):
    other = "gdn" if kind == "mamba" else "mamba"
    rejects(f'plan_linear\\(kind="{kind}"\\)', OPERATIONS[kind], *tensors_of(kind).values(), plan_for(other))
    tensors = tensors_of(kind)
    name = "v" if kind in ("gdn", "kda") else "x"
    with pytest.raises(cp.ArgumentError, match=f"{name}: got None; allowed: a tensor"):
        OPERATIONS[kind](*(tensors | {name: None}).values(), plan_for(kind))


def test_rejects_taps_that_the_plan_is_not_for():
    tensors = tensors_of("conv1d")
    with pytest.raises(cp.ArgumentError, match=r"the plan's 3 taps\. Plan with conv_width=the taps"):
        cp.causal_conv1d(*tensors.values(), plan_for("conv1d", conv_width=3))


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        ("mamba", "dt_limit", (2.0, 1.0)), ("mamba", "dt_limit", (-1.0, 1.0)), ("mamba", "dt_limit", 0.5),
        ("mamba", "D", torch.zeros(HEADS - 1)), ("conv1d", "activation", "gelu"), ("kda", "scale", float("nan")),
        ("gdn", "kernel", "mamba_ssm"), ("mamba", "kernel", "fla"),
    ],
)  # fmt: skip
def test_rejects_options_that_make_no_sense(kind, argument, value):
    with pytest.raises(cp.ArgumentError, match=f"^{argument}: got "):
        OPERATIONS[kind](*tensors_of(kind).values(), plan_for(kind), **OPTIONS[kind] | {argument: value})


def test_a_skip_may_be_flat_and_a_decay_has_a_lower_bound_below_zero():
    plan, tensors = mixer_tensors("mamba")
    for skip in (torch.randn(HEADS * VALUE_DIM), torch.randn(HEADS, VALUE_DIM)):
        tensors["D"] = skip
        shaped = cp.mamba2_mixer(**tensors | {"D": skip.view(HEADS, VALUE_DIM)}, plan=plan)
        assert torch.equal(cp.mamba2_mixer(**tensors, plan=plan), shaped)
    without = cp.mamba2_mixer(**tensors | {"D": None}, plan=plan)
    assert not torch.equal(without, shaped)
    plan, tensors = mixer_tensors("kda")
    rejects("lower_bound", cp.kda_mixer, **tensors, plan=plan, lower_bound=0.5)
    bounded = cp.kda_mixer(**tensors, plan=plan, lower_bound=-5.0)
    assert bounded.isfinite().all()
    assert not torch.equal(bounded, cp.kda_mixer(**tensors, plan=plan))
