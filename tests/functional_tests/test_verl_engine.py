r"""verl's own FSDP engine with our context parallelism, on CPU ranks, beside one rank; where verl is at hand.

pip install --no-deps --target wheels verl==0.9.1 tensordict codetiming hydra-core omegaconf \
        antlr4-python3-runtime==4.9.3 pyvers orjson cloudpickle torchdata pylatexenc ray msgpack
PYTHONPATH=.:wheels python -m pytest tests/functional_tests/test_verl_engine.py
"""

import importlib.util
import os

import pytest

from megatron_cp.executor.launch import run_ranks
from tests.limits import limit

HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
MODELS = {"Llama": {}, "Qwen3Next": HYBRID}
LENGTHS, TEMPERATURES = (13, 1, 20, 7), (1.0, 0.7, 1.3, 2.0)

is_installed = all(importlib.util.find_spec(name) for name in ("verl", "tensordict", "ray"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not is_installed, reason="verl is not installed"),
    pytest.mark.timeout(600),
]


def verl_on_cpus():
    """Gives verl a platform of CPUs, which it lacks, and hides a TRL that is newer than it knows."""
    import torch
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


def trained(world, name, folder):
    """Returns losses, gradient norms, log-probabilities and entropies of two steps of verl's engine."""
    import torch
    import torch.distributed as dist

    # verl's meshes find their ranks in the environment.
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    verl_on_cpus()
    from tensordict import TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils.tensordict_utils import assign_non_tensor
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    from megatron_cp.integrations.verl import register
    from tests.transformers_cases import build, tokenizer

    if world.rank == 0:
        build(name, dtype=torch.float32, **MODELS[name]).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    dist.barrier()
    engine = register()
    assert set(EngineRegistry._engines["language_model"]["fsdp2"].values()) == {engine}
    made = engine(
        HFModelConfig(path=str(folder), use_remove_padding=True, override_config={"attn_implementation": "eager"},
                      enable_gradient_checkpointing=False),
        FSDPEngineConfig(strategy="fsdp2", ulysses_sequence_parallel_size=world.size, use_torch_compile=False,
                         model_dtype="fp32", mixed_precision=dict.fromkeys(
                             ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")),
        FSDPOptimizerConfig(lr=1e-2, clip_grad=1.0, total_training_steps=10),
        CheckpointConfig(),
    )  # fmt: skip
    made.initialize()

    def nested(rows):
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    def loss(model_output, data, dp_group):
        log_probs, entropy = (model_output[key].values() for key in ("log_probs", "entropy"))
        return (log_probs * torch.linspace(-1, 1, len(log_probs))).sum() / 10 + entropy.mean(), {}

    random, found = torch.Generator().manual_seed(1), []
    documents = [torch.randint(3, 97, (length,), generator=random) for length in LENGTHS]
    for _ in range(2):
        batch = TensorDict(
            {
                "input_ids": nested(documents),
                "position_ids": nested([torch.arange(length) for length in LENGTHS]),
                "loss_mask": nested([torch.ones(length) for length in LENGTHS]),
                "temperature": torch.tensor(TEMPERATURES),
            },
            batch_size=[len(LENGTHS)],
        )
        assign_non_tensor(
            batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=4, calculate_entropy=True, global_batch_size=4,
            return_model_output=True,
        )  # fmt: skip
        with made.train_mode():
            result = made.forward_backward_batch(batch, loss)
            norm = made.optimizer_step()
        outputs = [result["model_output"][key].values().clone() for key in ("log_probs", "entropy")]
        found.append((torch.tensor(result["loss"]), torch.tensor(norm), *outputs))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_of_one_rank(name, ranks, tmp_path):
    alone = run_ranks(trained, 1, name, tmp_path / "one", kind="processes", timeout=limit(200))[0]
    for of_rank in run_ranks(trained, ranks, name, tmp_path / "several", kind="processes", timeout=limit(200)):
        for step, expected in zip(of_rank, alone, strict=True):
            for found, value in zip(step, expected, strict=True):
                assert (found - value).abs().max() <= 1e-4
