"""Logits of a few rows at a time (`logit_rows`): wrappers of models, log-probabilities, and what is refused."""

import copy
import gc
import weakref
from functools import partial

import pytest

pytest.importorskip("transformers")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_cp import Packing, run_in_chunks, saved_on_host
from megatron_cp.batch import memory
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel, token_log_probs
from megatron_cp.transformers.logits import ROWS, ChunksRows
from tests.functional_tests.test_transformers_autocast import errors
from tests.limits import limit
from tests.refusals import rejects
from tests.transformers_cases import (
    assert_same_step,
    build,
    gradients_of,
    over_ranks,
    stock,
    summed,
    wide,
    worst_gradient,
)

LENGTHS = (37, 1, 22)
CLOSE = 2e-12


def tokens_of():
    return torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def batch_of(parallel, *, learns=True):
    """Returns this rank's rows of the tokens, with labels or without."""
    tokens = tokens_of()[None]
    return parallel.shard({"input_ids": tokens, "lengths": list(LENGTHS), **({"labels": tokens} if learns else {})})


def with_lora(model):
    """Returns the model with an adapter of its attention and its head."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    return get_peft_model(model, adapter)


def with_views(model):
    """Returns the model with a hook that returns a view of what the head returns, as those of ZeRO-3 do."""
    model.lm_head.register_forward_hook(
        lambda module, given, found: found.view_as(found) if isinstance(found, torch.Tensor) else found
    )
    return model


@pytest.mark.parametrize(
    "changed", [None, with_lora, with_views, lambda model: model.model.requires_grad_(False) and model]
)
def test_gradients_are_those_of_all_logits(changed):
    model, tokens = build("Gemma2", tie_word_embeddings=False), tokens_of()
    with wide():
        expected, found = (
            over_ranks(model, tokens, LENGTHS, 2, changed=changed, logit_rows=rows) for rows in (None, 7)
        )
    assert_same_step(found, expected, CLOSE)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_is_as_near_as_with_all_logits(weights):
    tokens, exact = tokens_of(), build("Gemma2", dtype=torch.float32)
    autocast, given = torch.bfloat16 if weights == torch.float32 else None, copy.deepcopy(exact).to(weights)
    expected = over_ranks(exact, tokens, LENGTHS, 2)
    (_, _, whole), (loss, _, gradients) = (
        errors(over_ranks(given, tokens, LENGTHS, 2, autocast, logit_rows=rows), expected[:3]) for rows in (None, 7)
    )
    assert loss < 2e-3
    assert gradients < 1.1 * whole


def on_the_head(model):
    """Returns the model with an adapter that adds to its logits."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))


class Scores(torch.nn.Module):
    """A head of another kind."""

    def forward(self, rows):
        return rows


def with_head(head):
    model = build("Llama")
    model.lm_head = head
    return model


def with_hook(model):
    """Returns the model with a hook that changes its logits, which is called when they are used, too."""
    model.lm_head.register_forward_hook(lambda module, given, found: found * 2)
    return model


@pytest.mark.parametrize(
    ("message", "model", "rows", "changed"),
    [
        ("logit_rows: got 0", lambda: build("Llama"), 0, None),
        ("logit_rows: got True", lambda: build("Llama"), True, None),
        ("logit_rows: got 'no head'", lambda: build("Llama").model, 4, None),
        ("logit_rows: got 'no head'", lambda: build("NemotronHOmni"), 4, None),
        ("logit_rows: got 'a tests.*Scores'", lambda: with_head(Scores()), 4, None),
        ("logit_rows: got 'a call of add with logits", lambda: build("Llama"), 4, on_the_head),
        ("logit_rows: got 'a head whose hooks change what it returns", lambda: build("Llama"), 4, with_hook),
    ],
)
def test_refusals(message, model, rows, changed):
    rejects(message, call, model(), rows, changed)


def call(model, rows, changed):
    parallel = enable_context_parallel(model, None, logit_rows=rows)
    changed(model)(**batch_of(parallel))


@pytest.mark.parametrize(
    ("message", "function"),
    [
        ("a call of eq with logits", lambda logits: logits == 0),
        ("a call of eq with logits", lambda logits: logits != 0),
        ("a call of mul with logits", lambda logits: torch.mul(input=logits, other=2.0)),
        ("a call of mul with logits", lambda logits: logits * torch.ones(5, 97)),
        ("a call of argmax with logits", lambda logits: logits.argmax(-1)),
        ("a call of cat with logits", lambda logits: torch.cat([logits, logits])),
    ],
)
def test_what_else_is_done_with_logits_is_refused(message, function):
    parallel = enable_context_parallel(model := build("Llama"), None, logit_rows=4)
    logits = model(**batch_of(parallel, learns=False)).logits
    rejects(message, function, logits)


def test_a_loss_of_the_models_own_is_refused():
    parallel = enable_context_parallel(model := build("Llama"), None, logit_rows=4)
    batch = batch_of(parallel)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().sum()
    rejects("logit_rows: got 'a call of sum with logits", model, **batch)


@pytest.mark.parametrize("temperature", [0.7, "rows"])
def test_log_probabilities_and_their_gradients(temperature):
    found = []
    for rows in (None, 7):
        model = build("Gemma2")
        batch = batch_of(enable_context_parallel(model, None, logit_rows=rows))
        by = 1 + batch["input_ids"].as_subclass(torch.Tensor) / 97 if temperature == "rows" else temperature
        log_probs = token_log_probs(model(**batch).logits, batch, temperature=by)
        (log_probs * torch.linspace(-1, 1, log_probs.shape[1])).sum().backward()
        found.append((log_probs.detach(), {name: each.grad for name, each in model.named_parameters()}))
    assert (found[0][0] - found[1][0]).abs().max() < CLOSE
    assert worst_gradient(found[1][1], found[0][1])[0] < CLOSE


def test_log_probabilities_of_sequences_that_branch():
    tokens = tokens_of().numpy()
    sequences = [tokens[:20], [*tokens[:12], *tokens[30:45]], [*tokens[:12], *tokens[50:55]]]
    tree = Packing.from_sequences(sequences, min_shared=2)
    stock_model = build("Llama")

    def main(group, rows):
        model = copy.deepcopy(stock_model)
        cp = enable_context_parallel(model, group, logit_rows=rows)
        batch = cp.shard(tree)
        log_probs = token_log_probs(model(**batch).logits, batch, temperature=0.7)
        whole = cp.gather(log_probs, batch, are_labels=True)
        log_probs.square().sum().backward()
        return whole.detach(), gradients_of(model)

    expected, found = ([*zip(*run_ranks(main, 2, rows), strict=True)] for rows in (None, 3))
    assert (expected[0][0] - found[0][0]).abs().max() < CLOSE
    assert worst_gradient(summed(found[1]), summed(expected[1]))[0] < CLOSE


def test_log_probabilities_keep_only_what_hooks_return():
    """Otherwise `saved_on_host` would not free the rows."""
    head = build("Llama").lm_head
    head.__class__ = type("Head", (ChunksRows, torch.nn.Linear), {})
    setattr(head, ROWS, 7)
    rows = torch.randn(1, 20, head.in_features, dtype=torch.float64).requires_grad_() * 1
    kept = weakref.ref(rows)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        found = head(rows).rows_of(lambda logits: logits.logsumexp(-1))
    del rows
    gc.collect()
    assert kept() is None
    found.sum().backward()


def in_chunks(model):
    for layer in model.model.layers:
        run_in_chunks(layer.mlp, 5)
    return model


def recomputed(model, *, chunks=True):
    """Returns the model with each layer recomputed, its MLP in chunks, and what it saves in other memory."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    forward, made = model.forward, in_chunks(model) if chunks else model

    def saving(*args, **given):
        with saved_on_host(0):
            return forward(*args, **given)

    model.forward = saving
    return made


@pytest.mark.parametrize("changed", [in_chunks, recomputed, partial(recomputed, chunks=False)])
@pytest.mark.parametrize("name", ["Qwen3Next", "Gemma2"])
def test_levers_together(monkeypatch, name, changed):
    monkeypatch.setattr(memory, "_on_host", lambda saved: False)
    model, tokens = build(name), tokens_of()
    with wide():
        expected = over_ranks(model, tokens, LENGTHS, 2)
        found = over_ranks(model, tokens, LENGTHS, 2, changed=changed, logit_rows=7)
    assert_same_step(found, expected, CLOSE)


def steps_with_fsdp(world, separately):
    """Returns loss, logits and gradients under FSDP2, where the head and each MLP are shards of their own or not."""
    mesh, own = init_device_mesh("cpu", (world.size,)), build("Gemma2", tie_word_embeddings=False)
    cp = enable_context_parallel(own, mesh, logit_rows=7)
    own = in_chunks(own)
    apart = [own.lm_head, *(layer.mlp for layer in own.model.layers)] if separately else []
    for each in (*apart, *own.model.layers, own):
        fully_shard(each, mesh=mesh)
    for _ in range(2):
        own.zero_grad()
        with wide():
            batch = batch_of(cp)
            out = own(**batch, num_items_in_batch=batch.num_items)
            with torch.no_grad():
                logits = cp.gather(out.logits, batch)[0]  # before backward, after which weights are sharded again
            (out.loss * world.size).backward()
    dist.all_reduce(total := out.loss.detach().clone())
    gradients = {name: parameter.grad.full_tensor() for name, parameter in own.named_parameters()}
    return total.item(), logits, gradients


@pytest.mark.parametrize("separately", [False, True])
def test_fsdp_equals_the_stock_class(separately):
    found = run_ranks(partial(steps_with_fsdp, separately=separately), 2, kind="processes", timeout=limit(60))[0]
    with wide():
        expected = stock(build("Gemma2", tie_word_embeddings=False), Packing(LENGTHS), tokens_of())
    assert_same_step(found, expected, CLOSE)


def step_with_an_own_loss(world):
    """Returns gradients under FSDP2 whose outermost weights are sharded again after the model's forward."""
    mesh, own = init_device_mesh("cpu", (world.size,)), build("Llama")
    cp = enable_context_parallel(own, mesh, logit_rows=7)
    for each in (own.lm_head, *own.model.layers, own):
        fully_shard(each, mesh=mesh, reshard_after_forward=True)
    batch = batch_of(cp)
    with wide():
        logits = own(**batch, num_items_in_batch=batch.num_items).logits
    (token_log_probs(logits, batch).sum() * -world.size).backward()
    return batch.num_items, {name: parameter.grad.full_tensor() for name, parameter in own.named_parameters()}


def test_fsdp_gathers_the_outermost_weights_for_a_loss_of_the_callers():
    count, found = run_ranks(step_with_an_own_loss, 2, kind="processes", timeout=limit(60))[0]
    with wide():
        gradients = stock(build("Llama"), Packing(LENGTHS), tokens_of())[2]
    assert worst_gradient(found, {name: each * count for name, each in gradients.items()})[0] < CLOSE


def parts_of_a_module(world):
    mesh, own = init_device_mesh("cpu", (world.size,)), build("Gemma2")
    cp = enable_context_parallel(own, mesh)
    for layer in in_chunks(own).model.layers:
        fully_shard(layer.mlp.down_proj, mesh=mesh)
    batch = batch_of(cp, learns=False)
    rejects("one whose parts gather their own weights", own, **batch)


def test_a_module_whose_parts_are_sharded_is_refused():
    run_ranks(parts_of_a_module, 2, kind="processes", timeout=limit(60))
