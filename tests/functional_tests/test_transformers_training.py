"""Training of transformers' models over ranks: the losses and gradient norms of one rank on each document alone.

In float64, since training amplifies what a CPU rounds: in fp32 logits differ by 1e-4 after six steps on some.
"""

import copy
from functools import partial

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("trl")
import torch
from accelerate.parallelism_config import ParallelismConfig
from torch.nn import functional
from transformers import DataCollatorWithFlattening, TrainingArguments
from trl import SFTConfig, SFTTrainer

from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import ContextParallelMixin, ContextParallelTrainer, enable_context_parallel
from tests.forked_ranks import as_launched
from tests.limits import limit
from tests.transformers_cases import TRAINED, build, class_of, tokenizer, wide

STEPS, RATE = 6, 1e-2
LOGGED, FLOAT64 = 2e-6, 1e-9  # a trainer adds up the losses that it logs in fp32


def alone(model, batches, rate=RATE):
    """Losses and gradient norms of the stock class over batches of `(tokens, lengths)`."""
    model.set_attn_implementation("eager")
    optimizer, found = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0), []
    for tokens, lengths in batches:
        documents = tokens.split(lengths)
        count, total = sum(len(document) - 1 for document in documents), 0.0
        for document in documents:
            if len(document) > 1:
                logits = model(input_ids=document[None], use_cache=False).logits[0, :-1].float()
                loss = functional.cross_entropy(logits, document[1:], reduction="sum") / count
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_saved_is_the_stock_model(name, tmp_path):
    model = build(name, dtype=torch.float32, **TRAINED[name]).eval()
    cp = enable_context_parallel(model, None)
    tokens = torch.arange(3, 40)[None]
    found = model(**cp.shard({"input_ids": tokens})).logits
    model.save_pretrained(tmp_path)
    stock = class_of(name).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert type(stock).__name__ == type(model).__name__
    assert list(stock.state_dict()) == list(model.state_dict())
    assert (stock(input_ids=tokens).logits - found).abs().max() < 1e-4


class OnCpu(ParallelismConfig):
    """accelerate refuses parallelism of several CPUs, which is what a test has."""

    def _validate_accelerator(self, accelerator):
        pass


def recording(kind):
    """The trainer, with what it was given in each step."""

    class Recording(kind):
        seen = ()

        def training_step(self, model, inputs, num_items_in_batch=None):
            row = inputs["position_ids"][0]
            ends = torch.cat([(row == 0).nonzero()[:, 0], torch.tensor([len(row)])])
            self.seen = (*self.seen, (inputs["input_ids"][0].clone(), ends.diff().tolist()))
            return super().training_step(model, inputs, num_items_in_batch)

    return Recording


class PackingTrainer(ContextParallelMixin, SFTTrainer):
    """TRL's trainer."""


def arguments(kind, folder, size, **more):
    return kind(
        str(folder), per_device_train_batch_size=3, per_device_eval_batch_size=2, max_steps=STEPS, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", learning_rate=RATE, lr_scheduler_type="constant",
        weight_decay=0.0, seed=0, disable_tqdm=True, max_grad_norm=1.0, bf16=False, gradient_checkpointing=False,
        parallelism_config=OnCpu(cp_size=size), **more,
    )  # fmt: skip


@wide()
def by_trainer(kind, name, folder, size, **options):
    """Returns a trainer's logs, one rank's numbers on the same documents, and the evaluation loss of both."""
    random = torch.Generator().manual_seed(1)
    data = [{"input_ids": torch.randint(3, 97, (int(n),), generator=random).tolist()}
            for n in torch.randint(2, 40, (24,), generator=random)]  # fmt: skip
    model = build(name, **TRAINED[name])
    reference = copy.deepcopy(model)
    if not issubclass(kind, SFTTrainer):
        args = arguments(TrainingArguments, folder, size, remove_unused_columns=False)
        more = {"data_collator": DataCollatorWithFlattening(), "train_dataset": data}
    else:
        from datasets import Dataset

        args = arguments(
            SFTConfig, folder, size, packing=True, router_aux_loss_coef=0.0, max_length=64,
            dataset_kwargs={"skip_prepare_dataset": False},
        )  # fmt: skip
        more = {"train_dataset": Dataset.from_list(data), "processing_class": tokenizer()}
    trainer = recording(kind)(model=model, args=args, eval_dataset=None, **options, **more)
    trainer.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    expected, evaluated = alone(reference, trainer.seen), None
    if not issubclass(kind, SFTTrainer):
        packs = [data[:2], data[2:4]]
        evaluated = trainer.evaluate(data[:4])["eval_loss"], sum(map(partial(mean_loss, reference), packs)) / 2
        batch = DataCollatorWithFlattening()(data[:2])
        _, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
        rows = [reference(input_ids=torch.tensor([each["input_ids"]])).logits[0] for each in data[:2]]
        assert (logits[0] - torch.cat(rows)).abs().max() < FLOAT64
        assert torch.equal(labels, batch["labels"])
    return logged, expected, len(trainer.seen), evaluated


@torch.no_grad()
def mean_loss(model, data):
    """Returns the mean loss of documents alone."""
    losses = [
        functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")
        for ids in (torch.tensor(each["input_ids"]) for each in data)
    ]
    return torch.cat(losses).mean().item()


def on_rank(world, kind, name, folder, **options):
    """accelerate finds its ranks in the environment, and keeps what it found: a process has one trainer."""
    as_launched(world, 29999)
    return by_trainer(kind, name, folder, world.size, scheme="exact", **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(PackingTrainer, {}, marks=pytest.mark.any_cpu),
        pytest.param(ContextParallelTrainer, {}, marks=pytest.mark.thorough),
        pytest.param(ContextParallelTrainer, {"cp_options": {"logit_rows": 9}}, marks=pytest.mark.thorough),
    ],
)
def test_trainers_train_as_one_rank(kind, options, tmp_path):
    run = partial(on_rank, kind=kind, name="Qwen3Next", folder=tmp_path, **options)
    logged, expected, steps, evaluated = run_ranks(run, 2, kind="processes", timeout=limit(200))[0]
    assert evaluated is None or evaluated[0] == pytest.approx(evaluated[1], abs=FLOAT64)
    assert steps == STEPS
    assert [loss for loss, _ in logged] == pytest.approx([loss for loss, _ in expected], abs=LOGGED)
    assert [norm for _, norm in logged] == pytest.approx([norm for _, norm in expected], rel=FLOAT64)
