"""Vision-language models in trainers, over 2 and 3 ranks: the losses of the stock trainer on one rank.

Batches are those of TRL's collator for images and of processors: padded rows, with and without images.
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
from tests.functional_tests.test_transformers_launch import assert_near
from tests.limits import limit
from tests.shared import once, selected

if not all(importlib.util.find_spec(name) for name in ("accelerate", "datasets", "PIL", "transformers", "trl")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(1500)  # the first test waits for the runs of all worlds, each of many trainers

STEPS = 20
KINDS = {
    "SFTTrainer, Qwen2_5_VL": {"sft": True, "name": "Qwen2_5_VL"},
    "SFTTrainer, Gemma3": {"sft": True, "name": "Gemma3", "prompts": True, "max_steps": 8},
    "SFTTrainer, Qwen3VL, adapters": {"sft": True, "name": "Qwen3VL", "adapters": True, "max_steps": 5},
    "SFTTrainer, Qwen3VL, bf16": {"sft": True, "name": "Qwen3VL", "bf16": True, "max_steps": 2},
    "SFTTrainer, one document": {
        "sft": True, "name": "Qwen2_5_VL", "per_device_train_batch_size": 1, "max_steps": 5,
    },
    "Trainer, Qwen3VL": {
        "sft": False, "name": "Qwen3VL", "prompts": True, "gradient_accumulation_steps": 2, "max_steps": 5,
    },
    "Trainer, Gemma3": {"sft": False, "name": "Gemma3", "max_steps": 5},
    "DPOTrainer, Qwen2_5_VL": {"name": "Qwen2_5_VL", "preference": "DPO", "max_steps": 4},
    "KTOTrainer, Qwen2_5_VL": {"name": "Qwen2_5_VL", "preference": "KTO", "max_steps": 4},
    "DPOTrainer, Gemma3": {"name": "Gemma3", "preference": "DPO", "max_steps": 3},
}  # fmt: skip


def processor(name):
    """A processor of the stock class, with a tokenizer of the words t0 to t96, some of which stand for images."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tests.image_cases import IMAGE, VIDEO

    special = {"image_token": IMAGE, "video_token": VIDEO, "boi_token": 92, "eoi_token": 93}
    words = {f"t{n}": n for n in range(97) if n not in special.values()}
    made = Tokenizer(models.WordLevel(words | {f"<{name}>": n for name, n in special.items()}, "t3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="t2",
        pad_token="t0",
        extra_special_tokens={each: f"<{each}>" for each in special},
    )
    if name == "Gemma3":
        return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), tokens, image_seq_length=4)

    class ImageProcessor(Qwen2_5_VLProcessor):
        """Without one of videos, which needs torchvision."""

        def __init__(self, image_processor, tokenizer, chat_template=None):
            super(Qwen2_5_VLProcessor, self).__init__(image_processor, tokenizer, chat_template=chat_template)
            self.image_token, self.image_token_id = tokenizer.image_token, IMAGE
            self.video_token, self.video_token_id = tokenizer.video_token, VIDEO

    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096}
    return ImageProcessor(Qwen2VLImageProcessorPil(**sizes), tokens)


def documents(name, count, seed, *, prompts=False, preference=None):
    """Makes documents of text and up to two images of noise, or of such prompts with one completion or two."""
    import numpy as np
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature
    from PIL import Image

    random, rows, token = np.random.default_rng(seed), [], "<boi_token>" if name == "Gemma3" else "<image_token>"

    def text(least):
        return [f"t{n}" for n in random.integers(4, 90, random.integers(least, least + 12))]

    for _ in range(count):
        words, images = text(2), []
        for _ in range(random.integers(0, 3)):
            height, width = 8 * random.integers(1, 5, 2)
            images.append(Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)))
            words += [token, *text(1)]
        answers = ("chosen", "rejected") if preference == "DPO" else ("completion",) if prompts or preference else ()
        row = {each: f" {' '.join(text(1))}" for each in answers}
        if preference == "KTO":
            row["label"] = len(rows) % 3 > 0
        rows.append({"images": images, "prompt" if answers else "text": " ".join(words), **row})
    kinds = {column: Value("bool" if column == "label" else "string") for column in rows[0] if column != "images"}
    return Dataset.from_list(rows, features=Features({"images": List(ImageFeature()), **kinds}))


def trainer_of(folder, cp, *, name, sft=False, preference=None, prompts=False, adapters=False, **changed):
    """Ours over `cp` ranks, or the stock trainer if it is None."""
    import torch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from megatron_cp.transformers import ContextParallelMixin, ContextParallelPreferenceMixin
    from tests.image_cases import build

    AcceleratorState._reset_state(True)
    kinds = {"DPO": (DPOTrainer, DPOConfig), "KTO": (KTOTrainer, KTOConfig)}
    kind, config = kinds.get(preference) or ((SFTTrainer, SFTConfig) if sft else (Trainer, TrainingArguments))
    of_trl, own, parallelism = issubclass(kind, (SFTTrainer, DPOTrainer, KTOTrainer)), {}, None
    if cp is not None:
        replicas = int(os.environ["WORLD_SIZE"]) // cp
        parallelism = ParallelismConfig(cp_size=cp, **({"dp_shard_size": replicas} if replicas > 1 else {}))
        kind = type("Ours", (ContextParallelPreferenceMixin if preference else ContextParallelMixin, kind), {})
    options = {"remove_unused_columns": bool(preference)} | ({"max_length": None} if of_trl else {})
    args = config(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, log_level="error", seed=0, logging_steps=1,
        learning_rate=3e-3, parallelism_config=parallelism, include_num_input_tokens_seen="non_padding",
        **{"bf16": False, "max_steps": STEPS, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 2,
           "save_strategy": "no", **options, **changed},
    )  # fmt: skip
    if of_trl:
        own["processing_class"] = processor(name)
    else:
        own["data_collator"] = DataCollatorForVisionLanguageModeling(processor(name), completion_only_loss=prompts)
    if adapters:
        from peft import LoraConfig

        own["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
    model = build(name, dtype=torch.float32)
    model.set_attn_implementation("eager")
    if preference:
        own["ref_model"] = copy.deepcopy(model)
    return kind(
        model=model, args=args, train_dataset=documents(name, 30, 1, prompts=prompts, preference=preference), **own
    )


def nll(found):
    """The loss of all tokens by the logits that metrics are given, and how many they are."""
    import torch

    logits, labels = torch.as_tensor(found.predictions).double()[:, :-1], torch.as_tensor(found.label_ids)[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return {"nll": losses.sum().item() / (labels != -100).sum().item(), "count": (labels != -100).sum().item()}


def numbers_of(trainer, **documents_of):
    """Returns the numbers that training logs, and those of evaluations and metrics, without times."""
    trainer.train()
    found = {f"{name} {entry['step']}": value for entry in trainer.state.log_history for name, value in entry.items()}
    held_out, context = documents(count=5, seed=2, **documents_of), getattr(trainer, "context_parallel", None)
    found |= {f"{name} of 5": value for name, value in trainer.evaluate(held_out).items()}
    with context.disabled() if context else contextlib.nullcontext():
        found["eval_loss of 5, disabled"] = trainer.evaluate(held_out)["eval_loss"]
    if documents_of["preference"]:  # metrics are its own
        return without_times(found)
    trainer.compute_metrics = nll
    # The stock trainer cannot put together outputs that only batches with images have.
    ignored = None if context else ["past_key_values", "image_hidden_states", "rope_deltas"]
    found |= {f"{name} with metrics": value for name, value in trainer.evaluate(held_out, ignored).items()}
    return without_times(found)


def without_times(numbers):
    timed = ("runtime", "per_second", "time", "step", "epoch")
    return {name: value for name, value in numbers.items() if not any(word in name for word in timed)}


def all_numbers(world, folder, kinds):
    """Returns the numbers of stock trainers, by kind, and of ours, by kind and by their ranks."""
    as_launched(world, 29996)
    found = {}
    for name, cp in kinds[world.size]:
        of = {each: KINDS[name].get(each) for each in ("name", "prompts", "preference")}
        found[name, cp] = numbers_of(trainer_of(folder / f"{world.size} {cp}", cp, **KINDS[name]), **of)
    return found


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Numbers of the stock trainers, whose `cp` is None, and of ours, of the kinds that are selected."""
    kinds = defaultdict(dict)  # in place of sets, whose order ranks would not share
    for case in selected(request, test_trains_and_evaluates_as_the_stock_trainer):
        replicas, cp = case["replicas"], case["cp"]
        kinds[replicas][case["name"], None] = kinds[replicas * cp][case["name"], cp] = True
    numbers = partial(all_numbers, folder=tmp_path_factory.mktemp("trainer"), kinds=dict(kinds))

    def run():
        worlds = {n: run_ranks(numbers, n, kind="processes", timeout=limit(700)) for n in sorted(kinds)}
        return {size: ranks[0] for size, ranks in worlds.items()}

    return once(tmp_path_factory, "trainers of images", run)


# Each kind on 2 or 3 ranks, in turn; the first, and two replicas, beside.
CASES = [(name, 1, 2 + number % 2) for number, name in enumerate(KINDS)]
CASES += [("SFTTrainer, Qwen2_5_VL", 1, 3), ("SFTTrainer, one document", 2, 2)]


@pytest.mark.parametrize(
    ("name", "replicas", "cp"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.thorough) for case in CASES],
)
def test_trains_and_evaluates_as_the_stock_trainer(name, replicas, cp, found):
    ours, stock = found[replicas * cp][name, cp], found[replicas][name, None]
    rewards = (
        {"abs": 1e-5} if "preference" in KINDS[name] else {}
    )  # differences of log-probabilities, some of which are 0
    assert_near(ours, stock, **({"rel": 2e-2, "abs": 2e-2} if "bf16" in name else {"rel": 1e-4, **rewards}))
    if "max_steps" not in KINDS[name]:
        losses = [abs(ours[f"loss {step}"] - stock[f"loss {step}"]) for step in range(1, STEPS + 1)]
        assert max(losses) < 1e-3
