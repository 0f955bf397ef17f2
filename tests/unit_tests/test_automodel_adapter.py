"""The adapter for NeMo Automodel, with stand-ins of what it imports, which have the originals' signatures.

Automodel's own recipe runs with it in `tests/functional_tests/test_automodel.py`.
"""

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
import torch
from torch.nn import functional

from megatron_cp.executor.launch import run_ranks
from megatron_cp.integrations.automodel import own_batches
from tests.refusals import rejects
from tests.stand_ins import stand_in
from tests.transformers_cases import build

LENGTHS = [(5, 1, 6), (9, 3)]


class ContextParallelSharder:
    def __init__(
        self, model=None, device_mesh=None, batch=None, *, shard_batch=None, local_token_global_indices=None,
        shard_layout=None, padding_token_id=0, num_chunks=1, loss_mask=None, invoke_pre_embed=True,
        extra_seq_buffers=None,
    ):  # fmt: skip
        self.shard_batch = shard_batch


def attach_capabilities_and_validate(model, mesh):
    assert mesh is None
    return model


@pytest.fixture(autouse=True)
def automodel(monkeypatch):
    path = "nemo_automodel.components.distributed.context_parallel"
    attach = {"attach_capabilities_and_validate": attach_capabilities_and_validate}
    sharder = {"ContextParallelSharder": ContextParallelSharder}
    stand_in(monkeypatch, {path: sharder, "nemo_automodel._transformers.capabilities": attach})


def mesh_of(size, rank):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def batch_of(packing):
    """Returns a batch of packs of 14 tokens with 2 pads, as Automodel's collate functions make them."""
    tokens = torch.arange(28).view(2, 14) * 7 % 97
    pads = torch.tensor([[False] * 12 + [True] * 2] * 2)
    positions = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(2, 12)
    positions = functional.pad(positions, (0, 2))
    labels = tokens.roll(-1, 1).masked_fill((positions.roll(-1, 1) == 0) | pads, -100)
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if packing != "thd":
        ids = [torch.full((n,), number + 1) for row in LENGTHS for number, n in enumerate(row)]
        ids = functional.pad(torch.cat(ids).view(2, 12), (0, 2))
        if packing == "mask":
            return batch | {"attention_mask": ids}
        return batch | {"_packed_seq_ids": ids, "attention_mask": torch.zeros(2, 1, 14, 14, dtype=torch.bool)}
    positions[:, 12:] = positions[:, 11:12] + torch.arange(1, 3)
    return batch | {"seq_lens": torch.zeros(2, 3), "seq_lens_padded": torch.zeros(2, 3), "qkv_format": "thd"}


def share_of(group, stock, packing):
    model = copy.deepcopy(stock)
    parallel = own_batches(model, group)
    assert model._owns_cp_attention
    batch = batch_of(packing)
    sharder = model.prepare_model_inputs_for_cp(batch, num_chunks=1)["cp_sharder"]
    mesh = mesh_of(group.size, group.rank)
    context, rows, layout = sharder.shard_batch(mesh, None, batch, loss_mask=None, padding_token_id=0)
    labels, documents = rows.pop("labels"), rows["cp_batch"].plans.layout.packing.lengths
    with_pads = {"neat": [5, 1, 6, 1, 1, 9, 3, 1, 1], "mask": [5, 1, 6, 1, 1, 9, 3, 1, 1], "thd": [5, 1, 8, 9, 5]}
    assert documents.tolist() == with_pads[packing]
    with context():
        logits = model(**rows).logits
    assert (layout, parallel.rank) == (None, group.rank)
    return functional.cross_entropy(logits[0], labels[0], reduction="sum", ignore_index=-100).item()


@pytest.mark.parametrize("packing", ["neat", "mask", "thd"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_ranks_add_up_to_documents_alone(ranks, packing):
    model, whole, expected = build("Llama"), batch_of(packing), 0.0
    for row, lengths in enumerate(LENGTHS):
        documents = (whole[name][row, :12].split(lengths) for name in ("input_ids", "labels"))
        for tokens, labels in zip(*documents, strict=True):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            expected += functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()
    assert abs(sum(run_ranks(share_of, ranks, model, packing)) - expected) < 1e-10


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"cp_mesh": mesh_of(2, 0)}, "distributed.cp_size: got 2; allowed: 1"),
        ({}, {"tp_mesh": mesh_of(2, 0)}, "distributed.tp_size: got 2; allowed: 1"),
        ({}, {"loss_mask": torch.ones(2, 14)}, "batch: got 'a loss mask'"),
        ({"position_ids": None, "seq_lens": torch.ones(2, 1)}, {}, "position_ids: got None; allowed: the positions"),
        ({"pixel_values": torch.ones(1)}, {}, r"batch: got \['pixel_values'\]"),
        (
            {"qkv_format": None, "attention_mask": torch.tensor([[0, 1] * 7] * 2)},
            {},
            "attention_mask: got 'pads before",
        ),
        ({"_packed_seq_ids": torch.ones(2, 14)}, {}, r"position_ids: got .*\[5, 1, 8, 9, 5\].*lengths's \[14, 14\]"),
    ],
)
def test_rejects_what_it_does_not_shard(changes, arguments, message):
    model = build("Llama")
    own_batches(model, None)
    batch = batch_of("thd") | changes
    sharder = model.prepare_model_inputs_for_cp(batch)["cp_sharder"]
    arguments = {"cp_mesh": mesh_of(1, 0), "tp_mesh": None, "batch": batch, **arguments}
    rejects(message, sharder.shard_batch, **arguments)
    rejects("num_chunks: got 2; allowed: 1", model.prepare_model_inputs_for_cp, {}, num_chunks=2)


@pytest.mark.parametrize("name", ["backend", "prepare_model_inputs_for_cp"])
def test_rejects_models_with_automodels_own_attention(name):
    model = build("Llama")
    setattr(model, name, "te")
    rejects(f"model: got 'LlamaForCausalLM, which has `{name}`'", own_batches, model, None)


def test_rejects_logits_of_a_few_rows_from_which_automodel_computes_no_loss():
    says = "cp_options.logit_rows: got 4; allowed: None. Automodel computes its losses from all logits"
    rejects(says, own_batches, build("Llama"), None, logit_rows=4)
