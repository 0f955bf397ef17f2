"""ms-swift's own training with our context parallelism, on CPU ranks, beside one rank; where ms-swift is at hand.

pip install ms-swift==4.6.0    # in an environment of its own: it wants transformers<5.20, trl<1.0
python -m pytest tests/functional_tests/test_swift.py
"""

import importlib.util
import inspect
import json

import pytest

from megatron_cp.executor.launch import run_ranks
from tests.forked_ranks import as_launched
from tests.limits import limit
from tests.transformers_cases import HYBRID

MODELS = {"Llama": ("llama", {}), "Qwen3Next": ("qwen3_next", HYBRID)}

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("swift") is None, reason="ms-swift is not installed"),
    pytest.mark.timeout(600),
]


def write_conversations(path):
    """Writes conversations of different lengths; the answers are learnt."""
    import torch

    random = torch.Generator().manual_seed(3)

    def words(length):
        return " ".join(f"t{word}" for word in torch.randint(3, 97, (length,), generator=random).tolist())

    rows = [
        [{"role": "user", "content": words(2 + n % 5)}, {"role": "assistant", "content": f" {words(3 + 7 * n % 23)}"}]
        for n in range(12)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))


def trained(world, name, folder):
    """Returns what ms-swift logs in three steps and in an evaluation: over ranks without padding, alone padded.

    The evaluation is one batch: with sequence parallelism ms-swift shuffles what it evaluates.
    """
    import torch
    import torch.distributed as dist

    # ms-swift finds its ranks in the environment.
    as_launched(world, 29995, HF_HUB_OFFLINE="1", MODELSCOPE_CACHE=str(folder / "cache"))
    from swift import SftArguments
    from swift.pipelines import SwiftSft

    from megatron_cp.integrations.swift import register
    from tests.transformers_cases import build, tokenizer

    kind, changed = MODELS[name]
    if world.rank == 0:
        folder.mkdir(parents=True)
        build(name, dtype=torch.float32, **changed).save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
        write_conversations(folder / "data.jsonl")
    dist.barrier()
    args = SftArguments(
        model=str(folder / "model"), model_type=kind, template="dummy", dataset=[str(folder / "data.jsonl")],
        val_dataset=[str(folder / "data.jsonl")], output_dir=str(folder / "out"), tuner_type="full",
        sequence_parallel_size=world.size, per_device_train_batch_size=4, per_device_eval_batch_size=12, max_steps=3,
        logging_steps=1, learning_rate=1e-2, torch_dtype="float32", use_cpu=True, report_to=[], save_strategy="no",
        eval_strategy="steps", eval_steps=3, attn_impl="eager", gradient_checkpointing=True, seed=1, data_seed=1,
        dataloader_num_workers=0, gradient_accumulation_steps=2, lr_scheduler_type="constant", warmup_ratio=0.0,
        dataset_num_proc=1, load_from_cache_file=False, add_version=False,
    )  # fmt: skip
    if world.size > 1:
        register()
        args.padding_free = True  # ms-swift wants flash attention with it, which no layer of ours calls
    return SwiftSft(args).main()["log_history"]


NUMBERS = ("loss", "grad_norm", "eval_loss", "token_acc", "eval_token_acc", "train_loss")


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_that_of_one_rank(name, tmp_path):
    (alone,) = run_ranks(trained, 1, name, tmp_path / "1", kind="processes", timeout=limit(200))
    assert [sorted(set(entry) & set(NUMBERS)) for entry in alone[2:]] == [
        ["grad_norm", "loss", "token_acc"], ["eval_loss", "eval_token_acc"], ["train_loss"],
    ]  # fmt: skip
    for ranks in (2, 3):
        for of_rank in run_ranks(trained, ranks, name, tmp_path / str(ranks), kind="processes", timeout=limit(200)):
            for found, expected in zip(of_rank, alone, strict=True):
                numbers = {key: value for key, value in expected.items() if key in NUMBERS}
                assert {key: found.get(key) for key in numbers} == pytest.approx(numbers, abs=1e-4)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(
    ("name", "pack"), [("Qwen2_5_VL", "both"), ("Qwen3VL", "both"), ("Qwen3VL", "text"), ("Qwen3_5", "images")]
)
def test_images_pass_swifts_forwards_and_hooks(name, pack, is_wrapped):
    from swift.model.models import qwen
    from swift.sequence_parallel import SequenceParallel
    from swift.template.base import Template

    from tests.unit_tests import test_trainer_images as images

    class Sequence(images.Sequence, SequenceParallel):
        rp_group = rp_rank = None  # properties in ms-swift's class

        def __init__(self, ranks):
            SequenceParallel.__init__(self)
            self.ranks = ranks

    def load(model):
        if name == "Qwen3VL":
            qwen._compat_qwen3_vl_mixed_data(model.model, None)

    images.case(name, pack)  # before ms-swift replaces a forward for good
    if name == "Qwen3_5":
        qwen._patch_qwen3_5_linear_attention_sequence_parallel()
    images.compare_swift(name, pack, is_wrapped, Sequence, Template, load)


@pytest.mark.parametrize("name", ["prepare", "prepare_inputs", "pad", "split", "gather", "_init_device_mesh"])
def test_methods_have_the_arguments_that_ours_have(name):
    from swift.sequence_parallel import SequenceParallel

    from megatron_cp.integrations.swift import ContextParallelSequenceMixin
    from tests.unit_tests import test_swift_mixin

    expected = list(inspect.signature(getattr(SequenceParallel, name)).parameters)
    for kind in (ContextParallelSequenceMixin, test_swift_mixin.SequenceParallel):
        if hasattr(kind, name):
            assert list(inspect.signature(getattr(kind, name)).parameters) == expected


def test_rejects_to_be_registered_late(monkeypatch):
    from swift.sequence_parallel import sequence_parallel

    from megatron_cp import ArgumentError
    from megatron_cp.integrations.swift import register

    monkeypatch.setattr(sequence_parallel, "world_size", 2)
    with pytest.raises(ArgumentError, match=r"register: got .*allowed: .*such as in a plugin"):
        register()
