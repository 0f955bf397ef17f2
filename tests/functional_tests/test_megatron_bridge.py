"""docs/megatron-bridge.md: its functions run as they stand there, on small models of Megatron-Core over two ranks."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")
import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_cp import Layout, Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.megatron.batch import shard_batch
from megatron_cp.megatron.modules import slots_of
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

PAGE = (Path(__file__).parents[2] / "docs/megatron-bridge.md").read_text()
LENGTHS, TOLERANCE = (37, 1, 64, 22), 1e-5
TEMPERATURE = 0.7
KINDS = {"forward_step": "hybrid", "forward": "gpt"}  # of each function


def page_function(name):
    """Returns the function of this name from the page's Python."""
    block = next(
        each for each in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.M) if f"def {name}(" in each
    )
    models = SimpleNamespace(mcore=SimpleNamespace())
    space = {"verl": SimpleNamespace(models=models)}
    exec(block, space)
    if name == "forward":
        assert models.mcore.get_mcore_engine_forward_fn(None) is space["forward"]
    return space[name]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run, 2, kind="processes", timeout=limit(200))


def run(group):
    """Returns, by function, the output and every gradient, on two ranks and of each document alone."""
    random = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, tiny.VOCABULARY, (length,), generator=random) for length in LENGTHS]
    found = {}
    for name, step, alone in (("forward_step", bridge_step, bridge_alone), ("forward", verl_step, verl_alone)):
        tiny.start(cp=1)
        model = tiny.build(KINDS[name])
        expected = alone(model, documents)
        expected = {"out": expected, **gradients_of(model)}
        tiny.start(cp=2)
        model = tiny.build(KINDS[name])
        out = step(page_function(name), model, documents)
        found[name] = {"out": out, **summed(gradients_of(model))}, expected
    return found


def gradients_of(model):
    return {name: each.grad for name, each in model.named_parameters()}


def log_probs_alone(model, document, temperature):
    """Returns the log-probabilities of a document's tokens after the first."""
    layout = Layout.contiguous(Packing([len(document)]), 1)
    batch = shard_batch(document, layout, tiny_group(), slots=slots_of(model))
    logits = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)[0]
    scores = functional.log_softmax(logits[:-1].float() / temperature, -1)
    return scores.gather(-1, document[1:, None])[:, 0]


def bridge_alone(model, documents):
    log_probs = torch.cat([log_probs_alone(model, each, 1.0) for each in documents])
    (-log_probs.sum()).backward()
    return torch.stack([-log_probs.sum().detach(), torch.tensor(float(len(log_probs)))])


def verl_alone(model, documents):
    rows = torch.cat([functional.pad(log_probs_alone(model, each, TEMPERATURE), (0, 1)) for each in documents])
    rows.square().sum().backward()
    return rows.detach()


def summed(values):
    """Over both ranks."""
    for each in values.values():
        dist.all_reduce(each)
    return values


def bridge_step(function, model, documents):
    """The sums that go to Megatron's schedule: of losses, and of tokens."""
    packing, tokens = Packing([len(each) for each in documents]), torch.cat(documents)
    pack = SimpleNamespace(packing=packing, tokens=tokens, labels=None, loss_mask=None)
    losses, reduce = function(None, iter([pack]), model)
    total, count, logged = reduce(losses)
    total.backward()
    assert torch.equal(logged["lm loss"], torch.stack([total.detach(), count.float()]))
    sums = torch.stack([total.detach(), count.float()])
    return summed({"": sums})[""]


def verl_step(function, model, documents):
    """Log-probabilities `[total]`, of each document's last token 0; the loss is one and the same on all ranks."""
    ids = torch.nested.nested_tensor(documents, layout=torch.jagged)
    temperature = torch.nested.nested_tensor_from_jagged(
        torch.full((ids.values().shape[0],), TEMPERATURE), ids.offsets()
    )

    def processor(logits, label, temperature):
        assert logits.shape[:2] == label.shape[:2] == temperature.shape
        scaled = logits.float() / temperature[..., None]
        return {"log_probs": functional.log_softmax(scaled, -1).gather(-1, label[..., None])[..., 0]}

    arguments = {"label": ids, "temperature": temperature, "loss_mask": None, "response_attention_mask": None}
    found = function(model, ids, {}, logits_processor=processor, logits_processor_args=arguments, cp_layout="zigzag")
    assert torch.equal(found["log_probs"].offsets(), ids.offsets())
    rows = found["log_probs"].values().clone()
    rows[ids.offsets()[1:] - 1] = 0
    rows.square().sum().backward()  # a loss whose gradient differs from token to token
    return rows.detach()


def tiny_group():
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


@pytest.mark.parametrize("name", KINDS)
def test_the_page_computes_each_document_alone(ranks, name):
    for found in ranks:
        errors = tiny.distances(*found[name])
        assert all(error < TOLERANCE for error in errors.values()), errors
