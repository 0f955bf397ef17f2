"""Remedies of refusals that are code: each is taken from the message, run on two ranks, and gives what one rank has."""

import copy
import re
from typing import NamedTuple

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import accelerate
import torch
from transformers import Trainer

from megatron_cp import Packing
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import (
    ContextParallelMixin,
    ContextParallelPreferenceMixin,
    enable_context_parallel,
    token_log_probs,
)
from tests.refusals import rejects
from tests.transformers_cases import LENGTHS, TOKENS, batch, build, stock

PACKING = Packing(LENGTHS)
WHOLE = {"input_ids": TOKENS, "use_cache": False}


class Remedy(NamedTuple):
    """A wrong use, and the remedy that its refusal names.

    Attributes:
        wrong: code that is refused.
        said: the part of the message that is code, or nothing where `then` is the only way to take the remedy.
        then: code with `{said}` in it, which leaves the logits of the whole batch in `found`.
        before: code that makes both possible.
        documents: the lengths of the documents whose logits the stock model is asked for.
        argument: the argument that the refusal names.
    """

    argument: str
    wrong: str
    said: str
    then: str
    before: str = ""
    documents: tuple[int, ...] = tuple(LENGTHS)


GATHERED = "found = parallel.gather({said}.logits, rows)"
ALONE = (13,)
REMEDIES = {
    "a whole batch": Remedy("cp_batch", "model(**WHOLE)", "model(**parallel.shard(batch))", GATHERED),
    "a whole batch on one rank": Remedy(
        "cp_batch", "model(**WHOLE)", "with parallel.disabled()", "{said}: found = model(**WHOLE).logits", "", ALONE
    ),
    "a cache": Remedy(
        "use_cache", "model(**rows | {'use_cache': True})", "with parallel.disabled(): model.generate(...)",
        "{said}\nwith parallel.disabled(): found = model(input_ids=TOKENS).logits", "", ALONE,
    ),
    "the last rows": Remedy(
        "logits_to_keep", "model(**rows, logits_to_keep=2)", "parallel.gather(out.logits, batch)[:, -n:]",
        "out, batch, n = model(**rows), rows, 13; found = {said}",
    ),
    "labels of a rank": Remedy(
        "labels", "model(**rows, labels=rows['input_ids'])", "",
        "rows = parallel.shard({**batch, 'labels': TOKENS}); "
        "found = parallel.gather(model(**rows, num_items_in_batch=rows.num_items).logits, rows)",
    ),
    "labels without their number": Remedy(
        "num_items_in_batch", "model(**learnt)", "num_items_in_batch=batch.num_items",
        "batch = learnt; out = model(**batch, {said}); found = parallel.gather(out.logits, batch)",
        "learnt = parallel.shard({**batch, 'labels': TOKENS})",
    ),
    "dropout": Remedy(
        "dropout", "model(**rows)", "parallel.shard(batch, seed=step)",
        "step = 3; model(**{said}); model.eval(); found = parallel.gather(model(**rows).logits, rows)",
        "model.train(); model.model.layers[0].self_attn.attention_dropout = 0.5",
    ),
    "another attention": Remedy(
        "model", "model(**rows)", 'model.set_attn_implementation("megatron_cp")',
        "{said}; found = parallel.gather(model(**rows).logits, rows)", "model.set_attn_implementation('eager')",
    ),
    "a teacher": Remedy(
        "model", "teacher(**rows)", "Call enable_context_parallel on every model",
        "enable_context_parallel(teacher, group); found = parallel.gather(teacher(**rows).logits, rows)",
    ),
    "a teacher with the whole batch": Remedy(
        "model", "teacher(**rows)", "", "found = teacher(**WHOLE).logits", "", ALONE
    ),
    "rows of a rank in the stock model": Remedy(
        "model", "with parallel.disabled(): model(**rows)", "",
        "with parallel.disabled(): found = model(**WHOLE).logits", "", ALONE,
    ),
    "tokens of a rank that are embedded by hand": Remedy(
        "model", "embed(rows['input_ids'])", "input_ids.as_subclass(torch.Tensor)",
        "input_ids = rows.pop('input_ids'); out = model(**rows, inputs_embeds=embed({said})); "
        "found = parallel.gather(out.logits, rows)",
        "embed = model.get_input_embeddings()",
    ),
    "weights that are elsewhere": Remedy(
        "device", "parallel.shard(batch)", "parallel.shard(batch, device=...)",
        "rows = eval('{said}'.replace('...', '\"cpu\"')); found = parallel.gather(model(**rows).logits, rows)",
        "accelerate.cpu_offload(model, torch.device('cpu'))",
    ),
    "a configuration of an enabled model": Remedy(
        "model.config", "enable_context_parallel(type(model).__bases__[1](model.config), group)",
        "copy.deepcopy(config) within parallel.disabled()",
        "config = model.config\nwith parallel.disabled(): other = type(model)(copy.deepcopy(config)).double()\n"
        "other.load_state_dict(model.state_dict()); other.eval(); enable_context_parallel(other, group)\n"
        "found = parallel.gather(other(**rows).logits, rows)",
    ),
    "offsets as lengths": Remedy(
        "lengths", "parallel.shard({'input_ids': TOKENS, 'lengths': [0, 5, 6, 13]})", "cu_seq_lens_q",
        "rows = parallel.shard({'input_ids': TOKENS, '{said}': torch.tensor([0, 5, 6, 13])}); "
        "found = parallel.gather(model(**rows).logits, rows)",
    ),
    "a packing alone": Remedy(
        "batch", "parallel.shard(PACKING)", "{'input_ids': ids, 'lengths': packing}",
        "ids, packing = TOKENS, PACKING; rows = parallel.shard({said}); "
        "found = parallel.gather(model(**rows).logits, rows)",
    ),
    "a head that pools": Remedy(
        "model", "enable_context_parallel(pooling, group)",
        "parallel.gather(model.base_model(**batch).last_hidden_state, batch)",
        "head = model.lm_head; model = pooling; parallel = enable_context_parallel(model.base_model, group); "
        "batch = parallel.shard(batch); found = head({said})",
        "pooling = LlamaForSequenceClassification(teacher.config).double().eval(); "
        "pooling.model.load_state_dict(teacher.model.state_dict())",
    ),
    "a mode that moves hidden states": Remedy(
        "linear_mode", "enable_context_parallel(teacher, group, linear_mode='redistribute')", "auto",
        "enable_context_parallel(teacher, group, linear_mode='{said}'); "
        "found = parallel.gather(teacher(**rows).logits, rows)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    return build("Llama", num_hidden_layers=1).eval()


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_that_is_code_gives_what_one_rank_has(llama, name):
    from transformers import LlamaForSequenceClassification

    case = REMEDIES[name]
    expected = stock(llama, Packing(case.documents), TOKENS[0])[1]

    def main(group):
        model = copy.deepcopy(llama)
        parallel = enable_context_parallel(model, group)
        whole = {name: value for name, value in batch().items() if name != "labels"}
        # Remedies have dots where a user has arguments of their own.
        generate = type(model).generate
        model.generate = lambda *given: generate(model, TOKENS, max_new_tokens=2, do_sample=False)
        names = globals() | {
            "accelerate": accelerate,
            "LlamaForSequenceClassification": LlamaForSequenceClassification, "model": model, "parallel": parallel,
            "batch": whole, "group": group, "teacher": copy.deepcopy(llama), "rows": parallel.shard(whole),
        }  # fmt: skip
        exec(case.before, names)
        with pytest.raises(ArgumentError) as refused:
            exec(case.wrong, names)
        assert refused.value.argument == case.argument
        assert case.said in str(refused.value)
        with torch.no_grad():
            exec(case.then.replace("{said}", case.said), names)
        return (names["found"][0] - expected).abs().max().item()

    assert max(run_ranks(main, 2)) < 1e-6


def test_the_loop_that_trainers_are_told_to_write_has_the_log_probabilities_of_one_rank(llama):
    """TRL's trainers that no mixin is for."""
    kind = type("DistillationTrainer", (Trainer,), {"__module__": "trl.trainer"})
    with pytest.raises(ArgumentError) as refused:
        type("Ours", (ContextParallelMixin, kind), {})
    told = str(refused.value)
    statement, expression = re.search(r"(logits = .*?), (parallel\.gather\(.*?same_loss=True\))", told).groups()
    logits = stock(llama, PACKING, TOKENS[0])[1]

    def main(group):
        parallel = enable_context_parallel(model := copy.deepcopy(llama), group)
        rows = parallel.shard(batch())
        names = {"parallel": parallel, "token_log_probs": token_log_probs, "model": model, "batch": rows}
        exec(statement, names)
        return eval(expression, names)[0].detach()

    labels = torch.cat([torch.cat([part[1:], part.new_tensor([-100])]) for part in TOKENS[0].split(LENGTHS)])
    expected = -torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    assert max((found - expected).abs().max().item() for found in run_ranks(main, 2)) < 1e-6


@pytest.mark.parametrize(("kind", "mistakes"), [("Trainer", 1), ("DPOTrainer", 2)])
def test_the_class_that_a_refusal_of_bases_names_is_accepted(kind, mistakes):
    base = Trainer if kind == "Trainer" else type(kind, (Trainer,), {"__module__": "trl.trainer"})
    names = {
        kind: base, "ContextParallelMixin": ContextParallelMixin,
        "ContextParallelPreferenceMixin": ContextParallelPreferenceMixin,
    }  # fmt: skip
    wrong = f"class Mine({kind}, ContextParallelMixin): pass"
    for _ in range(mistakes):  # in the wrong order; and with the wrong mixin
        with pytest.raises(ArgumentError) as refused:
            exec(wrong, names)
        wrong = re.search(r"class \w+\([\w, ]+\)", str(refused.value))[0] + ": pass"
    exec(wrong, names)


def test_a_forward_that_is_taken_off_is_refused_no_more():
    model = build("Mamba2", num_hidden_layers=1)
    mixer = model.backbone.layers[0].mixer
    mixer.forward = lambda *args, **named: type(mixer).forward(mixer, *args, **named)
    rejects(r"\(del model\.backbone\.layers\.0\.mixer\.forward\)", enable_context_parallel, model, None)
    exec("del model.backbone.layers[0].mixer.forward")
    enable_context_parallel(model, None)
