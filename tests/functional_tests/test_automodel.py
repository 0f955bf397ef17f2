r"""Steps of NeMo Automodel's own recipe with our context parallelism, on CPU ranks, beside documents alone.

pip install transformers==5.18.0 torchao accelerate && pip install --no-deps nemo-automodel==0.7.0 torchdata \
        megatron-fsdp==0.5.0 flashoptim tiktoken mistral-common
python -m pytest tests/functional_tests/test_automodel.py
"""

import functools
import importlib.util
import os
from types import SimpleNamespace

import pytest

from megatron_cp.executor.launch import run_ranks
from tests.limits import limit
from tests.transformers_cases import TRAINED

ROWS = [(13, 1, 20, 14), (7, 41)]  # the documents of each row of a batch
STEPS, RATE = 2, 1e-2

is_installed = all(importlib.util.find_spec(name) for name in ("nemo_automodel", "torchao", "torchdata"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not is_installed, reason="NeMo Automodel is not installed"),
    pytest.mark.timeout(600),
]


def documents_of(step):
    """Returns tokens and labels, which are shifted already, of each document of a batch."""
    import torch

    random = torch.Generator().manual_seed(step)
    for length in (length for row in ROWS for length in row):
        tokens = torch.randint(3, 97, (length,), generator=random)
        labels = tokens.roll(-1)
        labels[-1] = -100
        yield tokens, labels.masked_fill(torch.rand(length, generator=random) < 0.2, -100)


def batch_of(step, packing):
    """Returns a batch as one of Automodel's collate functions makes it of packs."""
    import torch
    from nemo_automodel.components.datasets.utils import neat_packed_collater, packed_sequence_thd_collater

    documents, packs = list(documents_of(step)), []
    for row in ROWS:
        own, documents = documents[: len(row)], documents[len(row) :]
        pack = {"input_ids": torch.cat([tokens for tokens, _ in own]), "labels": torch.cat([each for _, each in own])}
        pads = functools.partial(torch.nn.functional.pad, pad=(0, 3))  # at the end of a pack
        pack = {"input_ids": pads(pack["input_ids"]), "labels": pads(pack["labels"], value=-100)}
        positions = torch.cat([torch.arange(length) for length in row])
        if packing == "neat":
            ids = torch.cat([torch.full((length,), number + 1) for number, length in enumerate(row)])
            pack |= {"position_ids": pads(positions), "attention_mask": pads(ids)}
        else:
            pack["position_ids"] = torch.cat([positions, positions[-1] + torch.arange(1, 4)])
            pack = {name: x.tolist() for name, x in pack.items()}
            pack |= {"seq_lens": list(row), "seq_lens_padded": [*row[:-1], row[-1] + 3]}
        packs.append(pack)
    return neat_packed_collater(packs) if packing == "neat" else packed_sequence_thd_collater(packs)


def recipe_on_cpus(world, name, folder):
    """Returns Automodel's fine-tuning recipe with a model of FSDP2, without data sets, logs and checkpoints."""
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    import nemo_automodel.recipes.llm.train_ft as module
    import torch
    import torch.distributed as dist
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.recipes._dist_utils import create_distributed_setup_from_config
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from tests.transformers_cases import build

    if world.rank == 0:
        build(name, dtype=torch.float32, **TRAINED[name]).save_pretrained(folder)
    dist.barrier()
    torch.cuda.current_device, stock = lambda: 0, module.apply_model_infrastructure
    module.apply_model_infrastructure = lambda *args, **kwargs: stock(*args, **kwargs | {"device": torch.device("cpu")})
    setup = create_distributed_setup_from_config(
        None, world.size, strategy="fsdp2", cp_size=world.size,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
    )  # fmt: skip
    node = ConfigNode({
        "_target_": "megatron_cp.integrations.automodel.from_pretrained", "cp_size": world.size,
        "load_fn": "transformers.AutoModelForCausalLM.from_pretrained", "cp_options": {"layout": "balanced"},
        "pretrained_model_name_or_path": str(folder), "dtype": "float32",
    })  # fmt: skip
    model = module.build_model(node, None, 1, has_packed_sequence=True, distributed_setup=setup)
    recipe = module.TrainFinetuneRecipeForNextTokenPrediction.__new__(module.TrainFinetuneRecipeForNextTokenPrediction)
    recipe.__dict__ |= {
        "model_parts": [model], "device_mesh": setup.mesh_context.device_mesh, "moe_mesh": None, "tokenizer": None,
        "pp_enabled": False, "te_fp8": None, "domain_mixture": None, "distributed_config": setup.strategy_config,
        "dist_env": SimpleNamespace(device=torch.device("cpu"), world_size=world.size), "cfg": ConfigNode({}),
        "loss_fn": MaskedCrossEntropy(), "optimizer": [torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)],
        "lr_scheduler": None, "checkpointer": SimpleNamespace(maybe_wait_for_staging=lambda: None), "timestamp": 0.0,
        "step_scheduler": SimpleNamespace(step=0, epoch=0),
    }  # fmt: skip
    return recipe


def trained(world, name, packing, folder):
    """Returns the loss and gradient norm of each step, of two microbatches, as the recipe logs them."""
    recipe, found = recipe_on_cpus(world, name, folder), []
    for step in range(STEPS):
        batches = [batch_of(2 * step + number, packing) for number in range(2)]
        metrics = recipe._run_train_optim_step(batches, max_grad_norm=1.0).metrics
        found.append((metrics["loss"], float(metrics["grad_norm"])))
    return found


def alone(name):
    """Returns the losses and gradient norms of the stock class on each document alone."""
    import torch
    from torch.nn import functional

    from tests.transformers_cases import build

    model = build(name, dtype=torch.float32, **TRAINED[name])
    optimizer, found = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0), []
    for step in range(STEPS):
        documents = [document for number in range(2) for document in documents_of(2 * step + number)]
        count, total = sum((labels != -100).sum() for _, labels in documents), 0.0
        for tokens, labels in documents:
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


@pytest.mark.parametrize("packing", ["neat", "thd"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", TRAINED)
def test_steps_of_the_recipe_equal_documents_alone(name, ranks, packing, tmp_path):
    expected = alone(name)
    for found in run_ranks(trained, ranks, name, packing, tmp_path, kind="processes", timeout=limit(200)):
        for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
            assert abs(loss - wanted) <= 2e-6 * wanted
            assert abs(norm - wanted_norm) <= 2e-5 * wanted_norm
