"""Cases of the entry of diffusers: a tiny transformer on ranks that are threads, beside the stock one on one rank."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter

from megatron_cp.diffusers import enable_context_parallel
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.transport import Transport, knows_hosts
from tests.diffusers_cases import problem, run
from tests.entries import recorded


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
        calls: what went through rank 0's group, by the methods' names.
    """

    errors: dict
    refusal: ArgumentError | None = None
    plans: tuple = ()
    calls: Counter = dataclasses.field(default_factory=Counter)

    @property
    def worst(self):
        return max(self.errors.values())


def outcome(case):
    """Runs a case on threads; see `Outcome`."""
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
    errors = {"output": max(_distance(each[0], out) for each in found)}
    for name, place, expected in (("input_gradients", 2, of_inputs), ("gradients", 1, gradients)):
        errors[name] = max(
            _distance(sum(each[place][key] for each in found if each[place].get(key) is not None), value)
            for key, value in expected.items()
        )
    return Outcome(errors, None, *found[0][3:])


def _problem(model, text_rows, image_rows):
    built, inputs = problem(model, text=text_rows)
    if image_rows:
        for name, value in _one_image_row(model, inputs).items():
            inputs[name] = value
    return built, inputs


def _one_image_row(model, inputs):
    """Returns the inputs that have a row for each row of the image, with a single one."""
    hidden, timestep = inputs["hidden_states"], inputs["timestep"]
    if model in ("wan", "hunyuan"):
        return {"hidden_states": hidden[:, :, :1, :2, :2]}
    if model == "cogvideox":
        return {
            "hidden_states": hidden[:, :1, :, :2, :2],
            "image_rotary_emb": tuple(x[:1] for x in inputs["image_rotary_emb"]),
        }
    others = {
        "flux": lambda: {"img_ids": inputs["img_ids"][:1]},
        "qwen": lambda: {"img_shapes": [(1, 1, 1)] * len(hidden)},
        "ltx": lambda: {"timestep": timestep[:, :1], "width": 1},
    }
    return {"hidden_states": hidden[:, :1]} | others[model]()


@functools.lru_cache(64)
def _alone(*sizes):
    return run(*_problem(*sizes))


def _on_rank(group, case):
    model, inputs = _problem(case.model, case.text_rows, case.image_rows)
    counted = recorded(group)
    try:
        context = enable_context_parallel(model, counted, **case.options)
        out, gradients, of_inputs = run(model, inputs)
    except ArgumentError as error:
        return error
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
    return out, gradients, of_inputs, plans, counted.calls


def _distance(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
