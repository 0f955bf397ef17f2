"""Trainers that train and evaluate, beside the stock ones: cp 2 beside one rank, dp 2 x cp 2 beside two replicas.

Data sets that the batch does not divide, packed batches and padded ones, TRL's defaults, accumulation, metrics.
"""

import contextlib
import copy
import importlib.util
import os
from collections import defaultdict
from functools import partial

import pytest

# Nothing of transformers is imported here: a process does once, and all ranks are forks of it.
from megatron_cp.executor.launch import run_ranks
from tests.forked_ranks import as_launched
from tests.functional_tests.test_transformers_launch import (
    LOSS_PRINTED,
    PAGE,
    TRAINED,
    assert_near,
    printed_by_the_page,
    trained_like_the_page,
)
from tests.limits import limit
from tests.shared import once, selected

if not all(importlib.util.find_spec(name) for name in ("accelerate", "datasets", "transformers", "trl")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # the first test waits for the runs of up to three worlds, each of many trainers

KINDS = {
    "Trainer": {"sft": False, "scheme": "auto", "anew": True},
    "Trainer, flattened": {"sft": False, "flatten": True},
    "Trainer, a model that takes no number of labels": {"sft": False, "flatten": True, "means": True},
    "SFTTrainer": {"sft": True},
    "SFTTrainer, packing": {"sft": True, "packing": True},
    "SFTTrainer, padding-free": {"sft": True, "padding_free": True, "max_length": None},
    "SFTTrainer, bf16": {"sft": True, "bf16": True},
}


def documents(count, seed, labels=slice(None)):
    """Makes documents of a few tokens each, `labels` of which are learnt."""
    import torch
    from datasets import Dataset

    random, rows = torch.Generator().manual_seed(seed), []
    for length in torch.randint(8, 30, (count,), generator=random).tolist():
        ids = torch.randint(3, 97, (length,), generator=random)
        learnt = torch.full_like(ids, -100)
        learnt[labels] = ids[labels]
        rows.append({"input_ids": ids.tolist(), "labels": learnt.tolist()})
    return Dataset.from_list(rows)


def nll(found):
    """The loss of all tokens by the logits that metrics are given, and how many they are."""
    import torch

    logits, labels = torch.as_tensor(found.predictions).double()[:, :-1], torch.as_tensor(found.label_ids)[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return {"nll": losses.sum().item() / (labels != -100).sum().item(), "count": (labels != -100).sum().item()}


def trainer_of(folder, cp, *, sft, flatten=False, means=False, anew=False, seed=0, scheme="a2a", **changed):
    """Ours over `cp` ranks, or the stock trainer if it is None. One kind prices schemes.

    Args:
        anew: the trainer is given `model_init`, which makes the model again for each training.
        means: the model takes no number of labels, and the first of its batches' documents have few to learn.
    """
    import torch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from megatron_cp.transformers import ContextParallelMixin
    from tests.transformers_cases import build, tokenizer

    AcceleratorState._reset_state(True)
    kind, size, own, parallelism = SFTTrainer if sft else Trainer, int(os.environ["WORLD_SIZE"]), {}, None
    if cp is not None:
        kind = type("Ours", (ContextParallelMixin, kind), {})
        parallelism = ParallelismConfig(cp_size=cp, **({"dp_shard_size": size // cp} if size > cp else {}))
        own = {"scheme": scheme} | ({"layout": "contiguous"} if means else {})
    args = (SFTConfig if sft else TrainingArguments)(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, log_level="error", seed=0, logging_steps=1,
        learning_rate=1e-2, parallelism_config=parallelism, include_num_input_tokens_seen="non_padding",
        **{"bf16": False, "max_steps": 2, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 2,
           "save_strategy": "no", "gradient_accumulation_steps": 2, **changed},
    )  # fmt: skip
    if sft:
        own["processing_class"] = tokenizer()
    else:
        own["data_collator"] = (
            DataCollatorWithFlattening() if flatten else DataCollatorForLanguageModeling(pad_token_id=0)
        )
    model = build("Llama", dtype=torch.float32, num_hidden_layers=1)
    if seed:
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(seed))
    model.set_attn_implementation("eager")
    if means:
        model.accepts_loss_kwargs = False
    # Contiguous ranks of one document have its halves: the first rank has nothing to learn.
    size, labels = (1, slice(-3, None)) if means else (args.per_device_train_batch_size, slice(None))
    args.per_device_train_batch_size = size
    own |= {"model_init": lambda: copy.deepcopy(model)} if anew else {"model": model}
    return kind(args=args, train_dataset=documents(40, 1, labels), compute_metrics=nll, **own)


def numbers_of(trainer, **how):
    """Returns the numbers that training logs, and those of evaluations and predictions, without times."""
    trainer.train(**how)
    found = {f"{name} {entry['step']}": value for entry in trainer.state.log_history for name, value in entry.items()}
    found |= {f"{name} of 5": value for name, value in trainer.evaluate(documents(5, 2)).items()}
    context = getattr(trainer, "context_parallel", None)
    assert context is None or trainer.accelerator.unwrap_model(trainer.model) is context._model
    with context.disabled() if context else contextlib.nullcontext():
        found["eval_loss of 5, disabled"] = trainer.evaluate(documents(5, 2))["eval_loss"]
    trainer.compute_metrics, trainer.args.prediction_loss_only = None, True
    found["eval_loss of 7 alone"] = trainer.evaluate(documents(7, 2))["eval_loss"]
    trainer.args.prediction_loss_only, data = False, documents(5, 2)
    if hasattr(trainer, "_prepare_dataset"):  # predict leaves it to who calls it
        packing = trainer.args.packing
        data = trainer._prepare_dataset(data, trainer.processing_class, trainer.args, packing, None, "test")
    predicted = trainer.predict(data)
    found["test_loss"], found["rows"] = predicted.metrics["test_loss"], float(len(predicted.predictions))
    timed = ("runtime", "per_second", "time", "step", "epoch")
    return {name: value for name, value in found.items() if not any(word in name for word in timed)}


def all_numbers(world, folder, kinds):
    """Returns the numbers of stock trainers on 1 and 2 ranks, and ours on 2 and 4, of the kinds named for each size."""
    as_launched(world, 29998)
    found, folder = {}, folder / str(world.size)
    for name in kinds["stock", world.size]:
        found["stock", name] = numbers_of(trainer_of(folder, None, **KINDS[name]))
    for name in kinds["ours", world.size]:
        if name != "resumed":
            found["ours", name] = numbers_of(trainer_of(folder, 2, **KINDS[name]))
    if "resumed" in kinds["ours", world.size]:
        trainer_of(folder, 2, sft=True, save_strategy="steps", save_steps=1).train()
        first = {"resume_from_checkpoint": str(folder / "checkpoint-1")}
        found["ours", "resumed"] = numbers_of(trainer_of(folder, 2, sft=True, seed=3), **first)
    if world.size == 2:
        found["the page's script"] = printed_by_the_page(folder)
        found["the page's script of SFT"] = printed_by_the_page(folder, TRAINED["SFT"])
    return found


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Numbers by how many ranks, and by trainer, of the kinds that are selected."""
    kinds = defaultdict(dict)  # in place of sets, whose order ranks would not share
    for case in selected(request, test_trains_and_evaluates_as_the_stock_trainer):
        kinds["stock", case["replicas"]][case["name"]] = kinds["ours", 2 * case["replicas"]][case["name"]] = True
    for case in selected(request, test_goes_on_from_what_was_saved):
        kinds["ours", case["ranks"]]["SFTTrainer"] = kinds["ours", case["ranks"]]["resumed"] = True
    sizes = sorted({2, *(size for (_, size), names in kinds.items() if names)})
    numbers = partial(all_numbers, folder=tmp_path_factory.mktemp("trainer"), kinds=kinds)

    def run():
        worlds = {n: run_ranks(numbers, n, kind="processes", timeout=limit(240)) for n in sizes}
        return {size: ranks[0] for size, ranks in worlds.items()}

    return once(tmp_path_factory, "trainers", run)


# Two replicas of the kinds in which they have unlike numbers of tokens to learn, of documents, or of both.
OF_TWO = ("SFTTrainer", "SFTTrainer, packing", "Trainer, a model that takes no number of labels")
CASES = [(name, replicas) for replicas, names in ((1, KINDS), (2, OF_TWO)) for name in names]
# One replica of the kinds that lay out a batch in ways of their own, and two of TRL's defaults; the page's script has a
# flattened batch.
FIRST = {("Trainer", 1), ("SFTTrainer, packing", 1), ("SFTTrainer", 2)}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [pytest.param(*case, marks=() if case in FIRST else pytest.mark.thorough) for case in CASES],
)
def test_trains_and_evaluates_as_the_stock_trainer(name, replicas, found):
    ours, stock = found[2 * replicas]["ours", name], found[replicas]["stock", name]
    assert_near(ours, stock, **({"rel": 2e-2, "abs": 2e-2} if "bf16" in name else {"rel": 2e-4}))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_goes_on_from_what_was_saved(ranks, found):
    resumed, whole = found[ranks]["ours", "resumed"], found[ranks]["ours", "SFTTrainer"]
    assert "loss 2" in resumed
    differ = {key for key in whole if resumed.get(key) != pytest.approx(whole[key], rel=1e-5)}
    # TRL counts tokens, and the trainer averages, from 0 again.
    assert {key for key in differ if "num_tokens" not in key and "train_loss" not in key} == set()


def test_the_script_of_the_page_prints_its_loss(found):
    (loss,) = LOSS_PRINTED.findall(found[2]["the page's script"])
    assert float(loss) == pytest.approx(float(LOSS_PRINTED.search(PAGE)[1]), abs=1e-3)


def test_the_script_of_sft_prints_its_loss(found):
    trained_like_the_page("SFT", found[2]["the page's script of SFT"])
