"""Tiny random models of transformers, one of each class, and what the stock class makes of documents."""

import contextlib
import copy
import importlib
import importlib.util
import sys
import threading
import warnings
from importlib.metadata import version

import pytest
import torch
from torch.nn import functional

from megatron_cp.executor.launch import run_ranks

LENGTHS = [5, 1, 7]
TOKENS = torch.arange(3, 16)[None]
TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
BASE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in BASE.items() if name != "head_dim"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
_MLA = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16}
_SHORT = {"num_hidden_layers": 2}
_DSA = {
    **_NO_HEAD_DIM, **_SHORT, **_MLA, "num_key_value_heads": 6, "q_lora_rank": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "index_topk": 8, "index_n_heads": 3, "index_head_dim": 12,
}  # fmt: skip
# What is changed of the models that trainers train: two layers of Qwen3-Next, one of each kind, without experts.
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
TRAINED = {"Llama": {}, "Qwen3Next": HYBRID}

_NEMOTRON = {
    **{name: value for name, value in BASE.items() if name != "num_hidden_layers"},
    "layers_block_type": ["mamba", "attention", "mamba", "moe"], "mamba_num_heads": 6, "mamba_head_dim": 16,
    "n_groups": 2, "ssm_state_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip

# Module and class under transformers.models, and the configuration.
MODELS = {
    "Llama": ("llama", "LlamaForCausalLM", {**BASE, **_SHORT}),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", {**BASE, **_SHORT}),
    "Mistral": ("mistral", "MistralForCausalLM", {**BASE, **_SHORT, "sliding_window": 16}),
    "Gemma2": ("gemma2", "Gemma2ForCausalLM", {**BASE, **_SHORT, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "GptOss": (
        "gpt_oss", "GptOssForCausalLM",
        {**BASE, **_SHORT, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Llama4": (
        "llama4", "Llama4ForCausalLM",
        {
            **BASE, "attention_chunk_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64, "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4,
            "attn_temperature_tuning": False,
        },
    ),
    "DeepseekV3": (
        "deepseek_v3", "DeepseekV3ForCausalLM",
        {
            **_NO_HEAD_DIM, **_SHORT, **_MLA, "num_key_value_heads": 6, "q_lora_rank": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "MiMoV2Flash": (  # layers with a window have sinks, and other key heads
        "mimo_v2_flash", "MiMoV2FlashForCausalLM",
        {
            **BASE, **_SHORT, "num_key_value_heads": 3, "v_head_dim": 12, "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                for kind in ("full_attention", "sliding_attention")
            },
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
    ),
    "Qwen3Next": (
        "qwen3_next", "Qwen3NextForCausalLM", {**BASE, **_GDN, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "Qwen3_5": ("qwen3_5", "Qwen3_5ForCausalLM", {**BASE, **_GDN}),
    "Qwen3_5Moe": (
        "qwen3_5_moe", "Qwen3_5MoeForCausalLM",
        {**BASE, **_GDN, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "KimiLinear": (
        "kimi_linear", "KimiLinearForCausalLM",
        {
            **_NO_HEAD_DIM, **_MLA, **_EXPERTS, "num_key_value_heads": 6, "linear_num_heads": 3, "linear_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "OlmoHybrid": (
        "olmo_hybrid", "OlmoHybridForCausalLM",
        {**_NO_HEAD_DIM, **_GDN, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "BailingHybrid": (
        "bailing_hybrid", "BailingHybridForCausalLM",
        {
            **BASE, **_MLA, **_EXPERTS, "num_key_value_heads": 6, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "layer_group_size": 2, "num_nextn_predict_layers": 0,
        },
    ),
    "Mamba2": (
        "mamba2", "Mamba2ForCausalLM",
        {
            "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 16, "n_groups": 2,
            "state_size": 8, "expand": 2, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "Bamba": (
        "bamba", "BambaForCausalLM", {**_NO_HEAD_DIM, **_MAMBA, "mamba_expand": 2, "attn_layer_indices": [1]},
    ),
    "FalconH1": (
        "falcon_h1", "FalconH1ForCausalLM",
        {
            **BASE, **_MAMBA, **_SHORT, "mamba_d_ssm": 96, "ssm_in_multiplier": 0.7,
            "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        },
    ),
    "GraniteMoeHybrid": (
        "granitemoehybrid", "GraniteMoeHybridForCausalLM",
        {
            **_NO_HEAD_DIM, **_MAMBA, "mamba_expand": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
        },
    ),
    "NemotronH": ("nemotron_h", "NemotronHForCausalLM", _NEMOTRON),
    "NemotronHOmni": (  # the head is its text model's, the loss its own
        "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3",
        {
            "text_config": {"model_type": "nemotron_h", **_NEMOTRON}, "image_token_id": 2,
            "vision_config": {
                "model_type": "radio", **TINY, "num_hidden_layers": 1, "image_size": 32, "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 32, "projector_hidden_size": 32,
        },
    ),
    "Nemotron": (  # its layers do not hand keyword arguments on
        "nemotron", "NemotronForCausalLM", {**BASE, **_SHORT, "partial_rotary_factor": 0.5, "hidden_dropout": 0.0},
    ),
    "StableLm": (
        "stablelm", "StableLmForCausalLM", {**_NO_HEAD_DIM, **_SHORT, "partial_rotary_factor": 0.5},
    ),
    "Lfm2": (
        "lfm2", "Lfm2ForCausalLM",
        {**_NO_HEAD_DIM, "conv_bias": True, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    "Lfm3": (
        "lfm3", "Lfm3ForCausalLM",
        {**BASE, "sliding_window": 16, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    ),
    "Zamba2": (
        "zamba2", "Zamba2ForCausalLM",
        {
            **_NO_HEAD_DIM, "num_key_value_heads": 6, "mamba_ngroups": 2, "mamba_d_state": 8, "n_mamba_heads": 6,
            "mamba_expand": 2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1,
            "use_mem_rope": True, "chunk_size": 16,
        },
    ),
}  # fmt: skip
# Classes whose attention chooses keys. Which of equal scores the stock class takes is not defined.
CHOOSING = {
    "DeepseekV32": ("deepseek_v32", "DeepseekV32ForCausalLM", _DSA),
    "GlmMoeDsa": (
        "glm_moe_dsa", "GlmMoeDsaForCausalLM",
        {**_DSA, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "AXK2": ("axk2", "AXK2ForCausalLM", {**_DSA, "index_head_dim": 16}),
    "Dots3Note": (  # attention with a window beside it, of other sizes
        "dots3_note", "Dots3NoteForCausalLM",
        {
            **_DSA, "num_hidden_layers": 3, "n_group": 1, "head_dim": 24, "shared_experts_intermediate_size": 32,
            "sliding_window": 16, "swa_num_attention_heads": 3, "swa_num_key_value_heads": 3, "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 24, "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 16,
        },
    ),
    "HYV4": ("hy_v4", "HYV4ForCausalLM", {**_DSA, "indexer_types": ["full", "shared"], "n_group": 1}),  # sinks
    "MistralLarge4": (  # layers without positions, layers that share latents
        "mistral_large4", "MistralLarge4ForConditionalGeneration",
        {
            "text_config": {
                **{name: value for name, value in _DSA.items() if name != "q_lora_rank"}, "num_hidden_layers": 3,
                "no_rope_layers": [1, 1, 0], "indexer_types": ["full", "shared", "full"],
                "kv_source_layers": [0, 0, 2],
            },
            "vision_config": {"model_type": "pixtral", **TINY},
        },
    ),
}  # fmt: skip


@contextlib.contextmanager
def without(*packages):
    """transformers takes these packages' kernels where they are installed, and they want a GPU."""
    before = {name: sys.modules.get(name) for name in packages}
    sys.modules.update(dict.fromkeys(packages))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def class_of(name):
    """The stock class."""
    return _class_named(*(MODELS | CHOOSING)[name][:2])


def _class_named(module, model):
    if importlib.util.find_spec(f"transformers.models.{module}") is None:
        pytest.skip(f"transformers {version('transformers')} has no {model}")
    with without("fla", "mamba_ssm", "causal_conv1d"):
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), model)


def build(name, *, dtype=torch.float64, **changed):
    """A tiny random model, none of whose parameters is at its initial zero or one."""
    kind = class_of(name)
    config = kind.config_class(**{**(MODELS | CHOOSING)[name][2], **changed})
    config._experts_implementation = config.get_text_config()._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).to(dtype).train()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if not parameter.isfinite().all() or "sinks" in label:
                parameter.normal_(0, 0.5)
            elif parameter.ndim == 1 and "A_log" not in label:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.config._experts_implementation = model.config.get_text_config()._experts_implementation = "eager"
    return model


def tiny(module, name, **changed):
    """A random model in float64 of a class that the cases do not have."""
    kind = _class_named(module, name)
    torch.manual_seed(0)
    sizes = {**TINY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changed}
    return kind(kind.config_class(**{key: value for key, value in sizes.items() if value is not None})).double().eval()


def tokenizer():
    """Makes a tokenizer of the words t0 to t96."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(97)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t0")


@contextlib.contextmanager
def wide():
    """Makes everything float64: transformers and TRL compute norms, softmax, delta rules and losses in fp32 otherwise.

    Those roundings, and not an exchange, are most of what two ways of computing a model differ by.
    """
    tensor, softmax, zeros, full = torch.Tensor, functional.softmax, torch.zeros, torch.full
    to_fp32, to, of_type = tensor.float, tensor.to, tensor.type

    def stay(self, *args, **named):
        if not self.is_floating_point():  # positions, which transformers 5.5 multiplies with frequencies
            return self.double()
        return self if self.dtype == torch.float64 else to_fp32(self, *args, **named)

    def widened(dtype):
        return torch.float64 if dtype is torch.float32 else dtype

    def to_wide(self, *args, **named):
        if self.dtype != torch.float64:
            return to(self, *args, **named)
        return to(self, *map(widened, args), **{name: widened(value) for name, value in named.items()})

    def type_wide(self, *args, **named):
        return of_type(self, *(map(widened, args) if self.dtype == torch.float64 else args), **named)

    def wide_softmax(values, *args, dtype=None, **named):
        return softmax(values, *args, dtype=widened(dtype), **named)

    def made_wide(make):
        return lambda *args, dtype=None, **named: make(*args, dtype=widened(dtype), **named)

    tensor.float, tensor.to, tensor.type, functional.softmax = stay, to_wide, type_wide, wide_softmax
    torch.zeros, torch.full = made_wide(zeros), made_wide(full)
    try:
        yield
    finally:
        tensor.float, tensor.to, tensor.type, functional.softmax = to_fp32, to, of_type, softmax
        torch.zeros, torch.full = zeros, full


def stock(model, packing, tokens, autocast=None):
    """Loss, logits `[total, vocabulary]` and gradients of the stock class in eager mode, on each document alone.

    Forward is under autocast to a type, if one is given.
    """
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    count = sum(max(length - 1, 0) for length in packing.lengths.tolist())
    total, logits = 0.0, []
    for begin, end in packing.spans():
        if begin == end:
            continue
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            rows = alone(input_ids=tokens[None, begin:end], use_cache=False).logits[0]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        logits.append(rows.detach())
        if end - begin > 1:
            loss = functional.cross_entropy(rows[:-1], tokens[begin + 1 : end], reduction="sum") / max(count, 1)
            loss.backward()
            total += loss.item()
    return total, torch.cat(logits), gradients_of(alone)


def over_ranks(model, tokens, lengths, size, autocast=None, changed=None, **options):
    """Loss, logits, gradients and log-probabilities of a copy of the model over `size` ranks.

    Args:
        autocast: a type, under autocast to which forward is.
        changed: returns what is trained of the enabled model, such as the model with adapters.
    """
    from megatron_cp.transformers import enable_context_parallel, token_log_probs  # `wide` needs no transformers

    lock = threading.Lock()  # ranks share torch's random numbers

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own, group, **options)
        if changed is not None:
            with lock:
                own = changed(own)
        batch = cp.shard({"input_ids": tokens[None], "labels": tokens[None], "lengths": list(lengths)})
        planned = len(batch.plans.kinds)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out = own(**batch, num_items_in_batch=max(batch.num_items, 1))
        out.loss.backward()
        assert len(batch.plans.kinds) == planned  # every layer is of a kind that was planned
        gradients = gradients_of(own)
        assert {each.dtype for each in gradients.values()} <= {own.dtype}
        with torch.no_grad():
            log_probs = cp.gather(token_log_probs(out.logits, batch), batch)[0]
        with cp.disabled():
            own(input_ids=tokens[None, :5], use_cache=False)
        return out.loss.item(), cp.gather(out.logits.detach(), batch)[0], gradients, log_probs

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*compute nothing here.*")
        losses, logits, gradients, log_probs = zip(*run_ranks(main, size), strict=True)
    return sum(losses), logits[0], summed(gradients), log_probs[0]


def gradients_of(model):
    """Returns the gradients that a model's parameters have, by their names."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def summed(gradients):
    """Sums gradients over ranks, each of which may have none of some parameters."""
    names = {name: None for of_rank in gradients for name in of_rank}
    return {name: sum(each[name] for each in gradients if name in each) for name in names}


def worst_gradient(found, expected):
    """The largest error of a parameter's gradient over its largest element, and which parameter's it is."""
    top = max(gradient.abs().max().item() for gradient in expected.values())
    errors = {
        name: (found[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), 1e-3 * top)
        for name, gradient in expected.items()
    }
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def assert_same_step(found, expected, close):
    """Fails if loss, logits or a gradient, as `over_ranks` and `stock` return them, are further apart than `close`."""
    assert found[2].keys() == expected[2].keys()
    worst, parameter = worst_gradient(found[2], expected[2])
    errors = {
        "loss": abs(found[0] - expected[0]), "logits": (found[1] - expected[1]).abs().max().item(),
        f"gradient of {parameter}": worst,
    }  # fmt: skip
    assert [name for name, error in errors.items() if not error < close] == [], errors


def batch(**changed):
    return {"input_ids": TOKENS, "labels": TOKENS, "lengths": LENGTHS, **changed}


def audio_model():
    """A model of text with a tower for audio, whose loss is in its own code."""
    from transformers.models import llama, qwen2_audio

    audio = qwen2_audio.Qwen2AudioEncoderConfig(
        num_mel_bins=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, d_model=32,
        max_source_positions=8,
    )  # fmt: skip
    config = qwen2_audio.Qwen2AudioConfig(audio_config=audio, text_config=llama.LlamaConfig(**TINY))
    return qwen2_audio.Qwen2AudioForConditionalGeneration(config)
