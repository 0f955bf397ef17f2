"""Tiny random models, and what the stock class makes of each document alone in fp32 on one process."""

import contextlib
import dataclasses
import functools
import importlib
import sys

import torch

_LLAMA = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
# The type of the model, and its configuration.
LANGUAGE = {
    "Llama, 4 and 2 heads": ("llama", _LLAMA),
    "Llama, 3 and 3 heads": ("llama", {**_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "Gemma-2": ("gemma2", {
        **_LLAMA, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 30.0,
    }),
    "GptOss": ("gpt_oss", {**_LLAMA, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-Next": ("qwen3_next", {
        **_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    }),
    "Mamba-2": ("mamba2", {
        "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 16, "n_groups": 2,
        "state_size": 8, "expand": 2, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }),
}  # fmt: skip
LENGTHS = {"48": (48,), "7, 1, 13, 2": (7, 1, 13, 2), "1": (1,)}
DIFFUSION = {"Flux, 4 heads": 4, "Flux, 3 heads": 3}
ROWS = {"36, 6": (36, 6), "37, 7": (37, 7), "37, 1": (37, 1)}  # of image and of text


@dataclasses.dataclass(frozen=True)
class Problem:
    """A language model, documents end to end and the expected results.

    Attributes:
        model: in fp32, in eager mode; each call of `language` makes a new one with the same values.
        input_ids, position_ids: `[1, total]`; positions begin again with each document, as collators make them.
        lengths: tokens of each document.
        weight: `[total, vocabulary]`, what outputs are multiplied by before they are summed to a loss.
        logits, gradient: of the stock class on each document alone; the gradient of the embedding.
    """

    model: torch.nn.Module
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    weight: torch.Tensor
    logits: torch.Tensor
    gradient: torch.Tensor


def preload() -> None:
    """Imports what the ranks need before they are forked.

    Kernels that want a GPU are hidden: the stock classes would take them where they are installed, also on a CPU.
    """
    sys.modules.update(dict.fromkeys(("fla", "mamba_ssm", "causal_conv1d")))
    names = [f"transformers.models.{module}.modeling_{module}" for module, _ in LANGUAGE.values()]
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", *names):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("diffusers.models.transformers.transformer_flux")


def _randomise(model):
    """Gives sinks values and moves vectors from their initial zeros and ones, which hide what they multiply."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or not parameter.isfinite().all():
                parameter.normal_(0, 0.5)
            elif parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.normal_(0, 0.15)


def language(name: str, lengths: tuple[int, ...]) -> Problem:
    """Builds a model with random parameters and runs it on each document alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, config = LANGUAGE[name]
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **config)
    settings._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").train()
    _randomise(model)
    total = sum(lengths)
    ids = torch.randint(3, 97, (1, total))
    weight = torch.randn(total, 97)
    outputs, begin = [], 0
    for length in lengths:
        rows = model(input_ids=ids[:, begin : begin + length], use_cache=False).logits[0]
        (rows * weight[begin : begin + length]).sum().backward()
        outputs.append(rows.detach())
        begin += length
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad(set_to_none=True)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return Problem(model, ids, positions, lengths, weight, torch.cat(outputs), gradient)


@functools.cache
def flux(heads: int, image: int, text: int):
    """Returns a Flux transformer in fp32, its inputs, the expected output and the gradient of an early weight."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    inputs = {
        "hidden_states": torch.randn(1, image, 4), "encoder_hidden_states": torch.randn(1, text, 12),
        "pooled_projections": torch.randn(1, 8), "timestep": torch.full((1,), 0.3), "img_ids": torch.randn(image, 3),
        "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip
    weight = torch.randn(image, 4)
    out = model(**inputs, return_dict=False)[0]
    (out[0] * weight).sum().backward()
    gradient = model.get_parameter(FLUX_EARLY).grad.clone()
    model.zero_grad(set_to_none=True)
    return model, inputs, weight, out.detach()[0], gradient


FLUX_EARLY = "transformer_blocks.0.attn.to_k.weight"
