"""torchtitan's own trainer with our context parallelism, on CPU ranks, beside documents alone; where it is at hand.

pip install torch==2.14.1 && pip install --no-deps torchtitan==0.3.0 torchdata==0.11.0 spmd_types==0.2.3
pip install tyro tensorboard einops datasets tokenizers safetensors pillow
python -m pytest tests/functional_tests/test_torchtitan.py
"""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megatron_cp.executor.launch import run_ranks
from tests.limits import limit

is_installed = all(importlib.util.find_spec(name) for name in ("torchtitan", "spmd_types", "torchdata"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not is_installed, reason="torchtitan is not installed"),
    pytest.mark.timeout(600),
]

ROWS = [(13, 1, 20, 14), (7, 41)]  # the documents of each row of a batch
STEPS, RATE, EPS = 3, 1e-2, 0.1  # with a small epsilon Adam makes steps of the roundings of small gradients
# The registry's name of a debug model. GPT-OSS has windows, sinks and experts, DeepSeek latent attention and experts.
MODELS = ["llama3", "qwen3", "deepseek_v3", "gpt_oss"]


def torchtitan_on_cpus(rank, size):
    """Gives torchtitan a device of CPUs, which it lacks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    import torch
    import torchtitan.tools.utils as utils
    from torch.distributed.fsdp import FSDPModule

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None, current_device=lambda: 0, synchronize=lambda: None, empty_cache=lambda: None,
        get_device_name=lambda device: "cpu", get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        reset_peak_memory_stats=lambda: None, memory_stats=lambda device: {}, is_available=lambda: False,
    )  # fmt: skip
    utils.get_local_device = lambda: torch.device("cpu")
    divide = FSDPModule.set_gradient_divide_factor

    def divide_apart(self, factor):
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies too

    FSDPModule.set_gradient_divide_factor = divide_apart
    torch.Tensor.bfloat16 = torch.Tensor.contiguous  # its experts cast to it, whatever the type of training


def batch_of(step):
    """Returns a batch's tokens, labels and positions `[2, 48]`, as torchtitan's data sets make them."""
    import torch

    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 97, (len(ROWS), sum(ROWS[0])), generator=random)
    positions = torch.cat([torch.arange(length) for row in ROWS for length in row]).view_as(tokens)
    labels = tokens.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = -100
    labels[:, 3:6] = -100  # a question
    return tokens, labels, positions


def configuration(name, chunks):
    """Returns the trainer's configuration of two layers of a debug model, with batches of `batch_of`."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config.configs import TrainingConfig
    from torchtitan.trainer import Trainer

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, tokenizer_path):
            self.eos_id = 0

        def encode(self, *args):
            raise NotImplementedError

        decode = get_vocab_size = encode

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config, **kwargs):
            pass

        def __iter__(self):
            for step in range(STEPS):
                tokens, labels, positions = batch_of(step)
                yield {"input": tokens, "positions": positions}, labels

        def state_dict(self):
            return {}

        load_state_dict = None

    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
    spec = registry("debugmodel", attn_backend="varlen")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None  # a bias that the trainer's optimizer moves by the sign of counts
    loss = CrossEntropyLoss.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss) if chunks > 1 else loss,
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=RATE, eps=EPS),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=len(ROWS), seq_len=sum(ROWS[0]), steps=STEPS, mixed_precision_param="float32",
            max_norm=1e9, disable_cuda_graphs=True,
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        validator=Validator.Config(enable=True, freq=STEPS, steps=1, dataloader=Loader.Config()),
    )  # fmt: skip


def draw_weights(model):
    """Gives the model the same small random weights on any number of ranks; norms stay 1."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    for number, weight in enumerate(model.parameters()):
        if weight.ndim > 1 or not (weight == 1).all():
            drawn = 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            is_split = isinstance(weight, DTensor)
            weight.data.copy_(distribute_tensor(drawn, weight.device_mesh, weight.placements) if is_split else drawn)


def trained(world, name, chunks):
    """Returns what torchtitan's trainer logs of each step and its validation, first gradients, and exact norms."""
    torchtitan_on_cpus(world.rank, world.size)
    from torch.distributed.tensor import DTensor
    from torchtitan.config import ConfigManager

    from megatron_cp.integrations.torchtitan import context_parallel

    # As torchtitan.train reads its arguments.
    sys.modules["jobs"] = SimpleNamespace(mine=lambda: context_parallel(configuration(name, chunks)))
    arguments = ["--module", "jobs", "--config", "mine", "--parallelism.context_parallel_degree", str(world.size)]
    trainer = ConfigManager().parse_args(arguments).build()
    draw_weights(trainer.model_parts[0])
    found = []
    trainer.metrics_processor.log = lambda step, loss, most, norm, **others: found.append((loss, norm))
    trainer.metrics_processor.log_validation = lambda loss, step, **others: found.append((loss, 0.0))
    first, norms, step = [], [], trainer.optimizers.step

    def kept():
        split = [weight.grad for weight in trainer.model_parts[0].parameters()]
        gradients = [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in split]
        first.extend([] if first else gradients)
        norms.append(sum(each.double().square().sum() for each in gradients).sqrt().item())
        step()

    trainer.optimizers.step = kept
    trainer.train()
    return found, first, norms


def plain_attention(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, out_transform=None, **others):  # noqa: N803
    """Causal attention of one document, as `VarlenAttention` computes it on CUDA."""
    import torch

    q, k, v = (x[0].transpose(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    places = torch.arange(q.shape[1])
    behind, left = places[:, None] - places, self.window_size[0]
    hidden = (behind < 0) | ((behind > left) if left >= 0 else False)
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(hidden, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1)[None]
    return out if out_transform is None else out_transform(out, scores.logsumexp(-1).T[None])


def alone(name):
    """Returns what `trained` should: the stock model on each document alone, and AdamW as torchtitan makes it."""
    import torch
    import torchtitan.models.common.attention as stock
    from torch.nn import functional

    stock.VarlenAttention.forward = plain_attention
    config = configuration(name, 1)
    config.model_spec.model.update_from_config(config=config)
    model = config.model_spec.model.build()
    model.init_weights()
    draw_weights(model)
    optimizer, found = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), EPS, 0.1), []
    first = []

    def losses(step):
        tokens, labels, positions = batch_of(step)
        lengths, count = [length for row in ROWS for length in row], (labels != -100).sum()
        for ids, targets, places in zip(
            *(x.flatten().split(lengths) for x in (tokens, labels, positions)), strict=True
        ):
            logits = model(ids[None], positions=places[None])[0].float()
            yield functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / count

    for step in range(STEPS):
        total = 0.0
        for loss in losses(step):
            loss.backward()
            total += loss.item()
        norm = sum(weight.grad.double().square().sum() for weight in model.parameters()).sqrt().item()
        first = first or [weight.grad.clone() for weight in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
        if step in (0, STEPS - 1):
            found.append((sum(loss.item() for loss in losses(0)), 0.0))  # torchtitan validates here
    return found, first


def trained_and_alone(world, name, chunks):
    return trained(world, name, chunks), alone(name)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_documents_alone(name, ranks):
    chunks = 4 if name == "llama3" else 1
    results = run_ranks(trained_and_alone, ranks, name, chunks, kind="processes", timeout=limit(300))
    for (found, gradients, norms), (expected, wanted_gradients) in results:
        assert norms == pytest.approx([norm for _, norm in expected if norm], rel=1e-5)
        assert len(found) == STEPS + 2
        for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
            assert abs(loss - wanted) <= 2e-6 * abs(wanted)
            # torch adds up squares in fp32, of one rank 12 million: GPT-OSS's are then 1.3e-4 too small.
            assert abs(norm - wanted_norm) <= 2e-4 * max(wanted_norm, 1)
        for gradient, wanted in zip(gradients, wanted_gradients, strict=True):
            assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()
