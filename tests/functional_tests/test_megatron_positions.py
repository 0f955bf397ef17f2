"""Positions of several axes (M-RoPE): over ranks as in Megatron's own model on each document alone."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("megatron.core")
import torch

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

LENGTHS = (24, 1, 40, 7)
SETTINGS = {"mrope_section": [2, 1, 1], "params_dtype": torch.float64, "num_layers": 2, "qk_layernorm": False}
POSITIONS = np.random.default_rng(0).integers(0, 90, (3, sum(LENGTHS)))
LAYOUTS = ("zigzag", "contiguous", "random", "balanced")


def model_of(spec=None):
    config = tiny.configure("gpt", **SETTINGS)
    return tiny.build("gpt", spec=spec, config=config, arguments={"position_embedding_type": "mrope"})


def gradients_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def alone(group):
    """Megatron's own attention, a document at a time and without packing."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    tiny.start()
    model, first, total = model_of(get_gpt_layer_local_spec(normalization="RMSNorm")), 0, 0.0
    tokens, _ = tiny.stream(0, sum(LENGTHS))
    for length in LENGTHS:
        ids = tokens[None, first : first + length]
        positions = torch.from_numpy(POSITIONS[:, None, first : first + length])
        losses = model(ids, positions, None, labels=ids.roll(-1))[:, :-1]
        if length > 1:
            losses.sum().backward()
            total += losses.sum().item()
        first += length
    return total, gradients_of(model)


def spread(group, cp):
    from megatron.core import parallel_state

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    tiny.start(cp=cp)
    tokens, _ = tiny.stream(0, sum(LENGTHS))
    found = {}
    for layout in LAYOUTS:
        model, cp_group = model_of(), parallel_state.get_context_parallel_group()
        batch = shard_batch(
            tokens, tiny.layout_of(layout, LENGTHS, cp, 4), cp_group, slots=slots_of(model), position_ids=POSITIONS
        )
        losses = model(
            batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed_seq_params
        )
        loss = (losses * batch.loss_mask).sum()
        loss.backward()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        gradients = gradients_of(model)
        for gradient in gradients.values():
            torch.distributed.all_reduce(gradient)
        found[layout] = total.item(), gradients
    plain = dataclasses.replace(batch.packed_seq_params, has_axes=False)
    try:
        model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=plain)
    except ArgumentError as error:
        found["refusal"] = str(error)
    return found


@pytest.fixture(scope="module")
def expected():
    return run_ranks(alone, 1, kind="processes", timeout=limit(120))[0]


@pytest.mark.parametrize("cp", [2, 3])
def test_positions_of_three_axes_are_those_of_each_document_alone(cp, expected):
    for found in run_ranks(spread, cp, cp, kind="processes", timeout=limit(180)):
        for layout in LAYOUTS:
            loss, gradients = found[layout]
            assert abs(loss - expected[0]) <= 1e-6 * abs(expected[0])
            errors = tiny.distances(gradients, expected[1])
            assert max(errors.values()) <= 1e-5, (layout, list(errors.items())[:3])
        assert "--mrope-section" in found["refusal"]
        assert "position_ids" in found["refusal"]
