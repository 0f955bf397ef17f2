"""Cases of the entry of diffusers: a tiny transformer on ranks that are threads, beside the stock one on one rank."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import torch

from megatron_cp.diffusers import enable_context_parallel
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.transport import Transport, knows_hosts
from tests.diffusers_cases import problem, run


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `diffusers_cases.MODELS` and the options of `enable_context_parallel`.

    Attributes:
        text_rows: rows of text.
        image_rows: "" for the model's usual number, "one" for a single row, fewer than ranks.
        hosts: number of hosts on which the ranks seem to be, for the transport that asks.
    """

    model: str
    cp_size: int = 2
    text_rows: int = 7
    image_rows: str = ""
    text: str = "split"
    scheme: str = "auto"
    ulysses_degree: int | None = None
    head_chunks: int | None = None
    transport: str = "collective"
    hosts: int = 2
    codec: str = "none"

    @property
    def options(self):
        transport = self.transport
        if knows_hosts(transport):
            transport = Transport.even_hosts(transport, self.cp_size, min(self.hosts, self.cp_size))
        names = ("text", "scheme", "ulysses_degree", "head_chunks", "codec")
        return {name: getattr(self, name) for name in names} | {"transport": transport}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        errors: the largest distances from one rank, as a share of the largest value, of the output, of the inputs'
            gradients, and of the parameters' gradients; empty if the case was refused.
        refusal: the error that refused the case, the same on every rank; None if it ran.
        plans: for each plan, its scheme, transport, codec and head chunks.
    """

    errors: dict
    refusal: ArgumentError | None = None
    plans: tuple = ()

    @property
    def worst(self):
        return max(self.errors.values())


def outcome(case):
    """Runs a case on threads, then again in inference mode, then disabled; see `Outcome`."""
    sizes = (case.model, case.text_rows, case.image_rows)
    out, gradients, of_inputs = _alone(*sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ranks get no head")
        found = run_ranks(_on_rank, case.cp_size, case)
    refusals = [each for each in found if isinstance(each, ArgumentError)]
    if refusals:
        assert len({str(each) for each in refusals}) == 1, refusals
        assert len(refusals) == case.cp_size
        return Outcome({}, refusals[0])
    errors = {"output": 0.0, "gradients": 0.0}
    for own, by_name, _, disabled, _ in found:
        assert torch.equal(disabled, out)
        assert by_name.keys() == gradients.keys()
        errors["output"] = max(errors["output"], distance(own, out))
        errors["gradients"] = max(errors["gradients"], *(distance(by_name[key], gradients[key]) for key in gradients))
    errors["input_gradients"] = max(
        distance(sum(each[2][key] for each in found if each[2].get(key) is not None), value)
        for key, value in of_inputs.items()
    )
    return Outcome(errors, None, found[0][-1])


@functools.lru_cache(64)
def _alone(*sizes):
    return run(*problem(*sizes))


def _on_rank(group, case):
    model, inputs = problem(case.model, case.text_rows, case.image_rows)
    try:
        context = enable_context_parallel(model, group, **case.options)
        out, gradients, of_inputs = run(model, inputs, context)
    except ArgumentError as error:
        return error
    with torch.inference_mode():
        assert torch.equal(model(**inputs, return_dict=False)[0], out)
    with context.disabled(), torch.no_grad():
        disabled = model(**inputs, return_dict=False)[0]
    plans = tuple(
        {
            "scheme": plan.scheme,
            "transport": plan.transport.name,
            "degree": plan.ulysses_degree,
            "codec": "none" if plan.codec is None else plan.codec.name,
            "head_chunks": max(plan.head_chunks, plan.attend.head_chunks),
        }
        for each in context._enabled
        for plan in each.attention.plans.values()
    )
    return out, gradients, of_inputs, disabled, plans


def distance(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
