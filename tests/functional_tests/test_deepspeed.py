"""transformers' Trainer with DeepSpeed's ZeRO beside context parallelism: the losses and norms of one rank."""

import itertools
import os
from functools import partial

import pytest

pytest.importorskip("deepspeed")
import torch
from transformers import DataCollatorWithFlattening, TrainingArguments

from megatron_cp import ArgumentError, run_in_chunks
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import ContextParallelTrainer
from tests.forked_ranks import as_launched
from tests.functional_tests.test_transformers_training import OnCpu, alone, recording
from tests.limits import limit
from tests.transformers_cases import build

STEPS, RATE = 4, 1e-3
CLOSE = 2e-6  # of losses and norms in fp32


def config(stage):
    return {
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip


def on_rank(world, stage, folder, sizes, changed, options):
    """Returns a trainer's losses and gradient norms, and those of one rank on the batches of all replicas."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    as_launched(world, 29998)
    random = torch.Generator().manual_seed(1)
    data = [{"input_ids": torch.randint(3, 97, (int(n),), generator=random).tolist()}
            for n in torch.randint(2, 40, (24,), generator=random)]  # fmt: skip
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=3, max_steps=STEPS, logging_steps=1, use_cpu=True, report_to=[],
        save_strategy="no", learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, disable_tqdm=True,
        max_grad_norm=1.0, remove_unused_columns=False, deepspeed=config(stage), parallelism_config=OnCpu(**sizes),
    )  # fmt: skip
    model, reference = (build("Llama", dtype=torch.float32, tie_word_embeddings=False) for _ in "ab")
    trainer = recording(ContextParallelTrainer)(
        model=changed(model), args=args, data_collator=DataCollatorWithFlattening(), train_dataset=data,
        scheme="exact", cp_options=options,
    )  # fmt: skip
    trainer.train()
    logged = [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]
    batches = [trainer.seen]
    if sizes["cp_size"] < world.size:
        torch.distributed.all_gather_object(found := [None] * world.size, trainer.seen)
        batches = found[:: sizes["cp_size"]]
    steps = [list(zip(*step, strict=True)) for step in zip(*batches, strict=True)]
    joined = [(torch.cat(ids), list(itertools.chain(*lengths))) for ids, lengths in steps]
    return logged, alone(reference, joined, RATE)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"cp_size": 2}, {}),
        ({"cp_size": 2}, {"logit_rows": 7}),
        pytest.param({"dp_shard_size": 2, "cp_size": 2}, {}, marks=pytest.mark.thorough),
    ],
)
def test_trains_as_one_rank(stage, sizes, options, tmp_path):
    run = partial(on_rank, stage=stage, folder=tmp_path, sizes=sizes, changed=unchanged, options=options)
    ranks = sizes.get("dp_shard_size", 1) * sizes["cp_size"]
    logged, expected = run_ranks(run, ranks, kind="processes", timeout=limit(100))[0]
    assert len(logged) == STEPS
    assert [loss for loss, _ in logged] == pytest.approx([loss for loss, _ in expected], abs=CLOSE)
    assert [norm for _, norm in logged] == pytest.approx([norm for _, norm in expected], rel=1e-5)


def unchanged(model):
    return model


def chunked(model):
    for layer in model.model.layers:
        run_in_chunks(layer.mlp, 8)
    return model


def test_modules_in_chunks_are_refused_where_their_weights_are_sharded(tmp_path):
    run = partial(on_rank, stage=3, folder=tmp_path, sizes={"cp_size": 2}, changed=chunked, options={})
    with pytest.raises(ArgumentError, match="one whose parts gather their own weights"):
        run_ranks(run, 2, kind="processes", timeout=limit(100))
