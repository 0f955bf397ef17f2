"""Answers of `auto` for the layers of real models, which the table of entries forces at every entry."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest

import megatron_cp as cp
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.predict import machine
from tests.covering import few_of
from tests.entries import ANSWERS, ENTRIES, refusals, table

# The sizes are those of the published configurations.
_MLA = {"head_dim": 192, "value_head_dim": 128, "latent": (64, 512)}
LAYERS = {
    "Qwen3-Next attention": cp.AttentionSpec(16, 2, 256),
    "Qwen3-Next GDN": cp.LinearSpec("gdn", 32, 16, 128, 128, hidden_size=2048),
    "Kimi-Linear latents": cp.AttentionSpec(32, 32, **_MLA),
    "Kimi-Linear KDA": cp.LinearSpec("kda", 32, 32, 128, 128, hidden_size=2304),
    "Nemotron-H attention": cp.AttentionSpec(32, 8, 128),
    "Nemotron-H Mamba-2": cp.LinearSpec("mamba", 128, 8, 128, 64, hidden_size=4096),
    "Llama-3-8B": cp.AttentionSpec(32, 8, 128),
    "GPT-OSS, window": cp.AttentionSpec(64, 8, 64, mask="window:128"),
    "GPT-OSS": cp.AttentionSpec(64, 8, 64),
    "Gemma-3-27B, window": cp.AttentionSpec(32, 16, 128, mask="window:1024"),
    "Gemma-3-27B": cp.AttentionSpec(32, 16, 128),
    "DeepSeek-V3": cp.AttentionSpec(128, 128, **_MLA),
}
PACKS, HOSTS = ("one document", "many short"), ("full", "many")


def packing_of(pack, size):
    if pack == "one document":
        return cp.Packing([8192 * size])
    lengths = np.random.default_rng(size).integers(16, 1200, 8 * size)
    return cp.Packing(lengths.tolist())


def answer(name, size, pack, layout, hosts):
    """Returns the layer's kind, and the scheme that `auto` takes."""
    slot, h100 = LAYERS[name], machine("h100")
    if hosts == "many":
        slot = dataclasses.replace(slot, topology=h100.topology(size, max(2, size // 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        plan = slot.plan(layout_by_name(layout, packing_of(pack, size), size))
    if plan.attend is None:
        return plan.kind, "redistribute" if plan.redistribution else plan.scheme
    return "latent" if slot.latent else "attention", plan.scheme


def check(cells):
    exact = {(row.entry, row.layer, row.scheme) for row in table() if not refusals(row)}
    refused = {(row.entry, row.layer, row.scheme) for row in table() if refusals(row)}
    for layer, scheme in {answer(*cell) for cell in cells}:
        assert scheme in ANSWERS[layer], f"auto takes {scheme} for {layer}: add it to ANSWERS of tests/entries.py"
        for name, entry in ENTRIES.items():
            if layer in entry.layers:
                assert (name, layer, scheme) in exact | refused, f"{scheme} of {layer} is never run in {name}"


def test_answers_are_forced_at_every_entry():
    check(itertools.product(LAYERS, (4,), PACKS, ("zigzag",), HOSTS))


@pytest.mark.thorough
def test_answers_for_other_sizes_and_layouts_are_forced_at_every_entry():
    """Any three of layer, size, pack, layout and hosts meet."""
    cells = itertools.product(LAYERS, (2, 8, 32), PACKS, ("balanced", "zigzag", "contiguous"), HOSTS)
    check(few_of(list(cells), together=3))
