"""Parity cases of attention in any scheme against dense softmax attention that is none of ours."""

import contextlib
import warnings

import numpy as np
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan import schemes
from megatron_cp.testing import parity
from megatron_cp.testing.parity import run_layer
from megatron_cp.testing.poison import poisoned
from tests import mask_oracle
from tests.limits import limit
from tests.softmax_oracle import attend, kept_by_dropout

TOLERANCE = 1e-12
SCHEMES = tuple(schemes.SCHEMES)


def draw_problem(case):
    """The case's inputs; of every third case with a sink, one head is without."""
    problem = parity.draw(case)
    if case.learned_sink and case.seed % 3 == 0:
        problem.parameters["sink"][0] = -torch.inf
    return problem


def run_rank(group, case):
    """This rank's output and gradients; of every eighth case with unwritten memory full of NaN, which takes long."""
    with poisoned() if case.seed % 8 == 0 else contextlib.nullcontext():
        return run_layer(group, case, draw_problem(case))


def over_ranks(case):
    """The whole output and gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        plan = case.plan()  # which all share while it is held
        found = parity.whole(case, run_ranks(run_rank, case.cp, case, timeout=limit(60)))
        del plan
        return found


def dense(case):
    """Computes one softmax over all keys of the stream, with torch's autograd, in float64."""
    problem, pairs = draw_problem(case), mask_oracle.pairs_of_case(case)
    leaves = {name: x.double().requires_grad_() for name, x in (problem.inputs | problem.parameters).items()}
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    kept = None
    if case.dropout:
        places = [np.arange(n) for n in pairs.shape]
        of_heads = [kept_by_dropout(*places, head, case.seed, case.dropout) for head in range(case.heads)]
        kept = torch.from_numpy(np.array(of_heads))
    out, _ = attend(
        *(leaves[name] for name in "qkv"), torch.from_numpy(np.asarray(pairs)), scale=scale, softcap=case.softcap,
        sink=leaves["sink"] if case.learned_sink else None, kept=kept, dropout=case.dropout,
    )  # fmt: skip
    gradient = problem.output_gradient.double()
    gradients = torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True, materialize_grads=True)
    names = (f"d_{name}" for name in leaves)
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def check(case):
    """Fails unless the case over its ranks is dense attention, output and every gradient."""
    check_results(case, over_ranks(case))


def check_results(case, actual):
    """Fails unless these are dense attention's output and gradients."""
    for name, value in dense(case).items():
        assert actual[name].shape == value.shape
        if value.numel():
            error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-1)
            assert error <= TOLERANCE, (name, float(error))
