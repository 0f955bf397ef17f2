"""Rows of `tests/entries.csv`: ways into the library with their options are exact, or refused by name."""

import dataclasses
import inspect
import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytest.importorskip("megatron.core")

import megatron_cp as cp
from megatron_cp.nn.base import Layer
from megatron_cp.plan.transport import COLLECTIVE
from megatron_cp.transformers import enable_context_parallel
from tests import entries
from tests.entries import COLUMNS, ENTRIES, HERE, EntryError, Row, drawn, judged, pairs_of, refusals, table
from tests.entries_megatron import outcomes
from tests.shared import once

ROWS = table()
OF_MEGATRON = [row for row in ROWS if row.entry not in HERE]


@pytest.mark.parametrize("row", [row for row in ROWS if row.entry in HERE], ids=str)
def test_a_row_is_exact_or_refused_by_name(row):
    assert judged(row) in {"", *refusals(row)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    outcome_of = once(tmp_path_factory, "rows_of_megatron", lambda: outcomes(OF_MEGATRON))
    return dict(zip(OF_MEGATRON, outcome_of, strict=True))


@pytest.mark.parametrize("row", OF_MEGATRON, ids=str)
def test_a_row_of_megatron_is_exact_or_refused_by_name(row, found):
    assert judged(row, entries.of_megatron(row, found[row])) in {"", *refusals(row)}


def test_any_two_values_meet_in_a_row_that_is_exact_if_any_is():
    draws = random.Random(1)
    possible = [drawn(draws, [name]) for name in ENTRIES for _ in range(400)]
    met, exact = set(), set()
    for row in ROWS:
        met |= pairs_of(row)
        exact |= set() if refusals(row) else pairs_of(row)
    for row in possible:
        missing = pairs_of(row) - (met if refusals(row) else exact)
        assert not missing, f"{missing}: write the table anew with python -m tests.entries"


# What takes an option of a plan, and the options that are no column, each with the reason.
NO_COLUMN = {
    "packing", "layout", "kv_packing", "kv_layout", "lengths", "kind", "heads", "kv_heads", "key_heads", "groups",
    "head_dim", "value_head_dim", "state", "channels", "conv_width", "latent", "topk", "indexer", "block",
    "num_householder", "hidden_size", "layers", "run",  # the batch, and the sizes of a layer
    "mask",  # a row has the causal one: the fuzz draws the others
    "hardware", "topology", "item_size",  # prices, by which "auto" chooses: the fuzz draws them
    "search_seconds",  # with the tests of tiles
    "ulysses_degree",  # of 4 ranks a product has one degree
    "kernel",  # the same plan by another kernel, with the tests of kernels
    "logit_rows",  # of the head, and no option of a plan: with the tests of logits
    "model", "group",
}  # fmt: skip
NAMES = {"mode": "scheme", "linear_mode": "scheme", "head_chunks": "chunks", "latents": "latent_mode"}


def options_of(taker):
    if dataclasses.is_dataclass(taker):
        return [each.name for each in dataclasses.fields(taker)]
    return list(inspect.signature(taker).parameters)


@pytest.mark.parametrize(
    "taker", [cp.plan_attention, cp.plan_linear, cp.AttentionSpec, cp.LinearSpec, enable_context_parallel]
)
def test_every_option_is_a_column(taker):
    unknown = [name for name in options_of(taker) if NAMES.get(name, name) not in NO_COLUMN | {*COLUMNS}]
    assert not unknown, f"give {unknown} a column in tests/entries.py, or the reason for none here"


def test_every_operation_and_layer_is_in_the_table():
    takes_plan = {
        name
        for name in dir(cp)
        if inspect.isfunction(getattr(cp, name)) and "plan" in inspect.signature(getattr(cp, name)).parameters
    }
    run = {*entries.OPERATIONS.values(), "projected_attention"}
    # The rules between the gates have the plans of their mixers, and the fuzz draws them; two check or continue calls.
    rules = {"gated_delta_rule", "kda", "gdn2", "gated_delta_product", "mamba2"}
    assert takes_plan - run - rules == {"check_agreement", "held_attention"}
    layers = {
        name
        for name in cp.nn.__all__
        if inspect.isclass(getattr(cp.nn, name)) and issubclass(getattr(cp.nn, name), Layer)
    }
    of_linear = {"GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProduct", "KimiDeltaAttention", "Mamba2"}
    assert layers == {"Attention", *of_linear}
    rooms = {path.name for path in Path(cp.__file__).parent.iterdir() if (path / "__init__.py").exists()}
    assert {"nn", "transformers", "diffusers", "megatron"} <= rooms & {name.lower() for name in ENTRIES}


# An entry that ignores one column. Each is seen in a row that has another value there than the one that is taken.
HIDDEN = {
    "scheme": ("attention", {"scheme": "p2p"}, {"scheme": "a2a"}),
    "transport": ("gdn", {"transport": "pairwise", "scheme": "headwise"}, {"transport": COLLECTIVE}),
    "codec": ("kda", {"codec": "int8", "scheme": "headwise"}, {"codec": "none"}),
    "chunks": ("mamba", {"chunks": 2, "scheme": "headwise"}, {"head_chunks": None}),
    "mode": ("gdn", {"scheme": "chunkwise"}, {"mode": "headwise"}),
}


@pytest.mark.parametrize("column", HIDDEN)
def test_an_entry_that_ignores_an_option_is_seen(column, monkeypatch):
    layer, options, taken = HIDDEN[column]
    run = Layer._run

    def ignoring(self, operation, inputs, batch, ranks, **more):
        slot, self.slot = self.slot, dataclasses.replace(self.slot, **taken)
        try:
            return run(self, operation, inputs, batch, ranks, **more)
        finally:
            self.slot = slot

    monkeypatch.setattr(Layer, "_run", ignoring)
    with pytest.raises(EntryError, match="ran other plans than was asked for"):
        judged(Row("nn", layer, **options))
