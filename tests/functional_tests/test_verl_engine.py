r"""verl's own FSDP engine with our context parallelism, on CPU ranks, beside one rank; where verl is at hand.

pip install --no-deps --target wheels verl==0.9.1 tensordict codetiming hydra-core omegaconf \
        antlr4-python3-runtime==4.9.3 pyvers orjson cloudpickle torchdata pylatexenc ray msgpack \
        jsonschema jsonschema-specifications referencing rpds-py attrs
rm -r wheels/tests  # verl's, which would be imported in place of ours
PYTHONPATH=.:wheels python -m pytest tests/functional_tests/test_verl_engine.py
"""

import importlib.util
import os

import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from tests.limits import limit
from tests.transformers_cases import TRAINED

LENGTHS, TEMPERATURES = (13, 1, 20, 7), (1.0, 0.7, 1.3, 2.0)
WITH_IMAGES = ("Qwen2_5_VL", "Qwen3VL", "Qwen3_5")
# Text, images and videos of each document.
IMAGES = ((5, [(1, 4, 4)], []), (9, [], []), (3, [(1, 8, 4), (1, 12, 8)], []), (6, [(1, 4, 4)], [(2, 8, 4)]))

is_installed = all(importlib.util.find_spec(name) for name in ("verl", "tensordict", "ray"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not is_installed, reason="verl is not installed"),
    pytest.mark.timeout(600),
]


def verl_on_cpus():
    """Gives verl a platform of CPUs, which it lacks, and hides a TRL that is newer than it knows."""
    import verl.models.transformers.monkey_patch as patches
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

        def current_device(self):
            return torch.device("cpu")

        def is_available(self):
            return True

    platform_manager.set_platform(PlatformCPU())
    patches.is_trl_available = lambda: False


def made(name):
    """Makes a model, documents `[tokens]`, their positions, and what else each has."""
    from tests import image_cases
    from tests.transformers_cases import build

    if name in WITH_IMAGES:
        model = image_cases.build(name, dtype=torch.float32)
        documents = [image_cases.document(model, *each, seed=number) for number, each in enumerate(IMAGES)]
        ids, others = [each.pop("input_ids") for each in documents], documents
        axes = [model.model.get_rope_index(each, **other)[0][:, 0] for each, other in zip(ids, others, strict=True)]
        for other in others:
            del other["mm_token_type_ids"]  # as verl does
            if "image_grid_thw" in other:
                other["images_seqlens"] = other["image_grid_thw"].prod(1)
            other |= {key: value.float() for key, value in other.items() if "pixel" in key}
        texts = [torch.arange(each.shape[1])[None] for each in ids]
        return model, [each[0] for each in ids], list(map(torch.cat, zip(texts, axes, strict=True))), others
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 97, (length,), generator=random) for length in LENGTHS]
    model = build(name, dtype=torch.float32, **TRAINED.get(name, {}))
    return model, ids, [torch.arange(length) for length in LENGTHS], None


def stock(name):
    """Log-probabilities by the stock class, on each document alone."""
    model, documents, positions, others = made(name)
    found = []
    for number, (ids, temperature) in enumerate(zip(documents, TEMPERATURES, strict=True)):
        given = {key: value for key, value in others[number].items() if key != "images_seqlens"} if others else {}
        with torch.no_grad():
            rows = model(ids[None], position_ids=positions[number].reshape(-1, 1, len(ids)).squeeze(0), **given).logits
        scores = (rows[0, :-1] / temperature).log_softmax(-1)
        found.append(scores.gather(-1, ids[1:, None])[:, 0])
    return torch.cat(found)


def trained(world, name, folder, logit_rows=None):
    """Returns log-probabilities of a pass of verl's engine without gradients, and those of two steps.

    Beside the steps' are their losses, gradient norms and entropies.
    """
    import torch.distributed as dist

    # verl's meshes find their ranks in the environment.
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    verl_on_cpus()
    from verl.trainer.config import CheckpointConfig
    from verl.utils.tensordict_utils import assign_non_tensor, get_tensordict, nested_tensor_from_tensor_list
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    from megatron_cp.integrations.verl import register
    from tests.transformers_cases import tokenizer

    model, documents, positions, others = made(name)
    if world.rank == 0:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    dist.barrier()
    engine = register(logit_rows=logit_rows)
    assert set(EngineRegistry._engines["language_model"]["fsdp2"].values()) == {engine}
    own = engine(
        HFModelConfig(path=str(folder), use_remove_padding=True, override_config={"attn_implementation": "eager"},
                      enable_gradient_checkpointing=False),
        FSDPEngineConfig(strategy="fsdp2", ulysses_sequence_parallel_size=world.size, use_torch_compile=False,
                         model_dtype="fp32", mixed_precision=dict.fromkeys(
                             ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")),
        FSDPOptimizerConfig(lr=1e-3 if name in WITH_IMAGES else 1e-2, clip_grad=1.0, total_training_steps=10),
        CheckpointConfig(),
    )  # fmt: skip
    own.initialize()

    def loss(model_output, data, dp_group):
        log_probs, entropy = (model_output[key].values() for key in ("log_probs", "entropy"))
        return (log_probs * torch.linspace(-1, 1, len(log_probs))).sum() / 10 + entropy.mean(), {}

    found = []
    for number in range(3):
        is_step = number > 0
        rows = {
            "input_ids": documents, "position_ids": positions,
            "loss_mask": [torch.ones(len(each)) for each in documents],
        }  # fmt: skip
        batch = get_tensordict(
            {
                **{key: nested_tensor_from_tensor_list(value) for key, value in rows.items()},
                "temperature": torch.tensor(TEMPERATURES), **({"multi_modal_inputs": others} if others else {}),
            },
        )  # fmt: skip
        assign_non_tensor(
            batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=4, calculate_entropy=is_step, global_batch_size=4,
            return_model_output=True,
        )  # fmt: skip
        if not is_step:
            with own.eval_mode(), torch.no_grad():
                result = own.forward_backward_batch(batch, None, forward_only=True)
            found.append((result["model_output"]["log_probs"].values(),))
            continue
        with own.train_mode():
            result = own.forward_backward_batch(batch, loss)
            norm = own.optimizer_step()
        outputs = [result["model_output"][key].values().clone() for key in ("log_probs", "entropy")]
        found.append((torch.tensor(result["loss"]), torch.tensor(norm), *outputs))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "logit_rows"),
    # Gemma2's head is the table of its embeddings, and it caps its logits.
    [*((name, None) for name in (*TRAINED, *WITH_IMAGES)), *((name, 5) for name in (*TRAINED, "Gemma2"))],
)
def test_a_step_equals_that_of_one_rank_and_of_the_stock_class(name, logit_rows, ranks, tmp_path):
    alone = run_ranks(trained, 1, name, tmp_path / "one", kind="processes", timeout=limit(200))[0]
    of_documents = alone[0][0].split([len(ids) for ids in made(name)[1]])
    assert (torch.cat([each[:-1] for each in of_documents]) - stock(name)).abs().max() <= 1e-4
    several = run_ranks(trained, ranks, name, tmp_path / "several", logit_rows, kind="processes", timeout=limit(200))
    for of_rank in several:
        for step, expected in zip(of_rank, alone, strict=True):
            for found, value in zip(step, expected, strict=True):
                size = value.abs().max().clamp(min=1) if name in WITH_IMAGES else 1  # their gradients' norms are 40
                assert (found - value).abs().max() <= 1e-4 * size
