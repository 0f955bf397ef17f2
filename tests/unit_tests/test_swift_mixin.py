"""The adapter for ms-swift, with a class in place of ms-swift's, which runs in test_swift."""

import copy
from typing import ClassVar

import pytest

pytest.importorskip("transformers")
import torch
from torch.nn import functional
from transformers.integrations.neftune import activate_neftune

from megatron_cp.executor.launch import run_ranks
from megatron_cp.integrations.swift import ContextParallelSequenceMixin
from tests.refusals import rejects
from tests.transformers_cases import LENGTHS, TOKENS, build

POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
LABELS = TOKENS.where(POSITIONS > 0, -100)
WEIGHTS = torch.linspace(0.5, 1.5, TOKENS.numel())[None]


class SequenceParallel:
    """Calls the mixin's methods as ms-swift's class does, with its signatures."""

    device_mesh, world_size = None, None

    def __init__(self, ranks):
        self.ranks, self.extra_kwargs = ranks, {}

    def _init_device_mesh(self):
        assert self.num_heads == 1  # all ranks are a ring
        self.device_mesh, self.rp_group, self.rp_rank = "mesh", self.ranks, self.ranks.rank

    def prepare(self, sp_size, model, tokenizer, padding_free):
        raise AssertionError

    def pad(self, tensor, padding_value, position_ids=None, dim=1):
        raise AssertionError

    def split(self, input, dim, position_ids=None):  # noqa: A002
        raise AssertionError

    def gather(self, local_output, dim, position_ids=None):
        raise AssertionError

    def prepare_inputs(self, inputs):
        for name in ("labels", "loss_scale"):
            values = self.pad(inputs[name], padding_value=0, position_ids=inputs["position_ids"])
            inputs[name] = self.split(torch.roll(values, -1, -1), dim=-1, position_ids=inputs["position_ids"])


class Sequence(ContextParallelSequenceMixin, SequenceParallel):
    cp_options: ClassVar = {"layout": "zigzag"}


class GatherLoss(torch.autograd.Function):
    """Gathers losses and splits their gradients as ms-swift's function of this name does over a ring."""

    @staticmethod
    def forward(ctx, loss, sequence):
        ctx.sequence = sequence
        return sequence.gather(loss, dim=1, position_ids=POSITIONS)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.sequence.split(gradient * ctx.sequence.world_size, dim=1, position_ids=POSITIONS), None


@pytest.fixture(scope="module")
def llama():
    return build("Llama", num_hidden_layers=1)


def prepared(ranks, model):
    sequence, model = Sequence(ranks), copy.deepcopy(model)
    sequence.prepare(ranks.size, model=model, tokenizer=None, padding_free=True)
    return sequence, model


def trained(ranks, model):
    """Returns the weighted losses of all tokens, and a gradient as the mean over ranks."""
    sequence, model = prepared(ranks, model)
    inputs = {"input_ids": TOKENS, "position_ids": POSITIONS, "labels": LABELS, "loss_scale": WEIGHTS}
    sequence.prepare_inputs(inputs)
    labels, weights = inputs.pop("labels"), inputs.pop("loss_scale")
    assert inputs["shift_labels"] is labels  # as transformers counts them in evaluations
    logits = model(**inputs, use_cache=False).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    losses = GatherLoss.apply(losses, sequence) * sequence.gather(weights, dim=1)
    losses.sum().backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    assert torch.equal(sequence.gather(labels, dim=1), torch.roll(LABELS, -1, -1))
    return losses.detach(), gradient


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_and_gradients_are_those_of_one_rank(ranks, llama):
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    expected = []
    for document, labels, weights in zip(*(x[0].split(LENGTHS) for x in (TOKENS, LABELS, WEIGHTS)), strict=True):
        logits = model(input_ids=document[None]).logits[0]
        after = functional.pad(labels[1:], (0, 1), value=-100)
        losses = functional.cross_entropy(logits, after, reduction="none")
        expected.append(losses * functional.pad(weights[1:], (0, 1)))
    torch.cat(expected).sum().backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    found = run_ranks(trained, ranks, llama)
    for losses, _ in found:
        assert (losses[0] - torch.cat(expected)).abs().max() < 1e-6
    mean = sum(each for _, each in found) / ranks
    assert (mean - gradient).abs().max() < 1e-6 * gradient.abs().max()


def test_rejects_passes_that_are_not_the_trainers_and_other_documents(llama):
    inputs = {"input_ids": TOKENS, "position_ids": POSITIONS, "labels": LABELS, "loss_scale": WEIGHTS}

    def main(ranks):
        sequence, model = prepared(ranks, llama)
        sequence.prepare_inputs(dict(inputs))
        says = r"model: got 'a call with input_ids \[1, 1\]'; allowed: the trainer's batch"
        rejects(says, model, input_ids=TOKENS[:, :1])
        sequence.prepare_inputs(given := {**inputs, "cu_seq_lens_k": torch.tensor([0, 6, 13])})
        rejects(r"cu_seq_lens_k: got .*\[6, 7\].*lengths's \[5, 1, 7\]", model, **given)
        activate_neftune(model, 0.5)
        rejects("neftune_noise_alpha: got 0.5", model, **given | {"cu_seq_lens_k": None})
        sequence.world_size = 1  # as where ms-swift generates
        assert sequence.split(TOKENS, 1) is sequence.gather(TOKENS, 1) is TOKENS
        rejects("generate and score with other processes", model, input_ids=TOKENS, position_ids=POSITIONS)

    run_ranks(main, 2)


def test_rejects_logits_of_a_few_rows_from_which_ms_swift_computes_no_loss(llama):
    class Chunked(Sequence):
        cp_options: ClassVar = {"logit_rows": 4}

    given = {"model": llama, "tokenizer": None, "padding_free": True}
    says = "cp_options.logit_rows: got 4; allowed: None. ms-swift computes its losses from all logits"
    rejects(says, Chunked(None).prepare, 2, **given)


def test_rejects_padded_batches():
    given = {"model": None, "tokenizer": None, "padding_free": False}
    rejects(r"padding_free: got False; allowed: True. Pass --packing true", Sequence(None).prepare, 2, **given)
    rejects(r"inputs: got .*input_ids and position_ids of one", Sequence(None).prepare_inputs, {"input_ids": TOKENS})
