"""docs/megatron-bridge.md: its two functions run as they stand there, and are what Megatron-Bridge and verl would call.

The former on a small model of Megatron-Core over two ranks. The latter against the sources of both, where they are on
the path; nothing of them is imported, since that takes packages which need a GPU or a cluster.
"""

import ast
import copy
import importlib.metadata
import importlib.util
import inspect
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
KINDS = ("gpt", "hybrid")


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
    """Returns, by function and model, the output and every gradient, on two ranks and of each document alone."""
    random = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, tiny.VOCABULARY, (length,), generator=random) for length in LENGTHS]
    found = {}
    for name, step, alone in (("forward_step", bridge_step, bridge_alone), ("forward", verl_step, verl_alone)):
        for kind in KINDS:
            tiny.start(cp=1)
            model = tiny.build(kind)
            expected = alone(model, documents)
            expected = {"out": expected, **gradients_of(model)}
            tiny.start(cp=2)
            model = tiny.build(kind)
            out = step(page_function(name), model, documents)
            found[name, kind] = {"out": out, **summed(gradients_of(model))}, expected
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["forward_step", "forward"])
def test_the_page_computes_each_document_alone(ranks, name, kind):
    for found in ranks:
        errors = tiny.distances(*found[name, kind])
        assert max(errors.values()) < TOLERANCE, errors


def source(module, distribution):
    """The tree of a module that is on the path, in the version that the page names."""
    top = ".".join(module.split(".")[:2]) if module.startswith("megatron.") else module.split(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        pytest.skip(f"{distribution} is not on the path: see docs/megatron-bridge.md")
    assert f"{distribution} {importlib.metadata.version(distribution)}" in " ".join(PAGE.split())
    parts = module.removeprefix(top).strip(".").split(".")
    return ast.parse(Path(spec.origin).parent.joinpath(*parts).with_suffix(".py").read_text())


def found_in(tree, name):
    return next(each for each in ast.walk(tree) if getattr(each, "name", None) == name)


def function_of(tree, name, **space):
    """Returns a function of theirs that needs only `space` of its module; annotations are not read."""
    code = ast.Module([*ast.parse("from __future__ import annotations").body, found_in(tree, name)], type_ignores=[])
    exec(compile(ast.fix_missing_locations(code), name, "exec"), space)
    return space[name]


def parameters(function):
    return [each.arg for each in function.args.args]


def fields(kind):
    return {each.target.id for each in kind.body if isinstance(each, ast.AnnAssign)}


def bridge(module):
    return source(f"megatron.bridge.{module}", "megatron-bridge")


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_bridge_takes_a_forward_step(name):
    assert parameters(found_in(bridge(f"training.{name}"), name))[:2] == ["config", "forward_step_func"]


def test_bridge_gives_the_state_to_the_page_s_forward_step():
    tree = bridge("training.utils.train_utils")
    needs = function_of(tree, "needs_global_state_injection", inspect=inspect, GlobalState=object())
    forward_step = page_function("forward_step")
    assert needs(forward_step)
    own = found_in(bridge("training.gpt_step"), "forward_step")
    assert list(inspect.signature(forward_step).parameters) == parameters(own)


def test_bridge_builds_our_specs():
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_cp.megatron.specs import gpt_layer_spec, hybrid_stack_spec

    provider = found_in(bridge("models.gpt_provider"), "GPTModelProvider")
    assert "transformer_layer_spec" in fields(provider)
    assert "transformer_layer_spec(self, vp_stage=vp_stage)" in ast.unparse(provider)
    assert list(inspect.signature(gpt_layer_spec).parameters) == ["config", "vp_stage"]
    tree = bridge("models.hybrid.hybrid_provider")
    assert "hybrid_stack_spec" in fields(found_in(tree, "HybridModelProvider"))
    with_chunks = function_of(tree, "_configure_mamba_chunk_size", DEFAULT_MAMBA_CHUNK_SIZE=128, copy=copy)
    resolve = function_of(
        tree, "_resolve_hybrid_stack_spec", ModuleSpec=ModuleSpec, AttnBackend=SimpleNamespace(local=1),
        _configure_mamba_chunk_size=with_chunks,
    )  # fmt: skip
    chosen = SimpleNamespace(hybrid_stack_spec=hybrid_stack_spec, attention_backend=None, mamba_chunk_size=128)
    assert resolve(chosen) is hybrid_stack_spec
    chosen.mamba_chunk_size = 64
    mixers = [each.submodules.mamba_layer.submodules.mixer for each in (resolve(chosen), hybrid_stack_spec)]
    assert mixers[0].module is mixers[1].module
    assert mixers[0].params["chunk_size"] == 64


def test_bridge_takes_our_settings():
    tree = bridge("training.config")
    validate = function_of(tree, "_validate_cp_comm_type")
    validate(SimpleNamespace(model=SimpleNamespace(cp_comm_type="auto", context_parallel_size=3, num_layers=4)))
    container = ast.unparse(found_in(tree, "ConfigContainer"))
    for needed in (
        "assert self.model.calculate_per_token_loss", "assert not self.ddp.average_in_collective",
        "self.model.seq_length % (self.model.context_parallel_size * 2) == 0",
    ):  # fmt: skip
        assert needed in container
    assert "{'lm loss': reporting_loss}" in ast.unparse(found_in(bridge("training.losses"), "masked_next_token_loss"))


def test_verl_calls_the_page_s_forward():
    theirs = found_in(source("verl.models.mcore.model_forward", "verl"), "gptmodel_forward_model_engine")
    ours = inspect.signature(page_function("forward"))
    names = [name for name, each in ours.parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert parameters(theirs)[: len(names)] == names
    engine = source("verl.workers.engine.megatron.transformer_impl", "verl")
    imports = [
        each.col_offset
        for each in ast.walk(engine)
        if getattr(each, "module", None) == "verl.models.mcore"
        and "get_mcore_engine_forward_fn" in {name.name for name in each.names}
    ]
    assert min(imports) > 0  # in functions, which find what has been put there
    calls = [each for each in ast.walk(engine) if isinstance(each, ast.Call) and ast.unparse(each.func) == "forward_fn"]
    assert calls
    for call in calls:
        ours.bind(*call.args, **{each.arg: each.value for each in call.keywords})
    assert "'temperature': temperature" in ast.unparse(engine)
    assert parameters(found_in(engine, "_lm_head_logits_processor"))[1:4] == ["logits", "label", "temperature"]
    assert "preprocess_packed_seqs" not in ast.unparse(engine)
