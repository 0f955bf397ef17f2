"""Tiny random vision-language models of transformers, documents with images, and what the stock class makes of them."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import threading
import warnings
from importlib.metadata import version

import pytest
import torch
from torch.nn import functional

from megatron_cp.executor.launch import run_ranks
from tests.transformers_cases import gradients_of, summed, without

IMAGE, VIDEO = 90, 91  # tokens
_TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WIDE = {**_TEXT, "head_dim": 16}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
_GRID_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2_TOWER = {**_GRID_TOWER, "hidden_size": 24, "intermediate_size": 32, "out_hidden_size": 48}
_QWEN3_TOWER = {**_QWEN2_TOWER, "num_position_embeddings": 16}
_GLM_TOWER = {**_QWEN2_TOWER, "image_size": 32}
_VIT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_AUDIO = {
    "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16,
    "max_source_positions": 8, "output_dim": 48,
}  # fmt: skip
_OMNI = {
    "audio_config": _AUDIO,
    "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 89, "vision_start_token_id": 92,
    "vision_end_token_id": 93, "audio_start_token_id": 94, "audio_end_token_id": 95,
}  # fmt: skip


def _rope(*sections, **others):
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **others}


# Module under transformers.models, class, and the configuration.
MODELS = {
    "Qwen2VL": (
        "qwen2_vl", "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _rope(1, 1, 2)},
            "vision_config": {**_GRID_TOWER, "embed_dim": 24, "hidden_size": 48, "mlp_ratio": 2}, **_TOKENS,
        },
    ),
    "Qwen2_5_VL": (
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _rope(1, 1, 2)},
            "vision_config": {**_QWEN2_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}, **_TOKENS,
        },
    ),
    "Qwen3VL": (
        "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**_WIDE, "rope_parameters": _rope(4, 2, 2)},
            "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]}, **_TOKENS,
        },
    ),
    "Qwen3VLMoe": (
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**_WIDE, **_EXPERTS, "rope_parameters": _rope(4, 2, 2)},
            "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [1]}, **_TOKENS,
        },
    ),
    "Qwen3_5": (
        "qwen3_5", "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {**_WIDE, **_HYBRID, "rope_parameters": _rope(4, 2, 2, partial_rotary_factor=1.0)},
            "vision_config": _QWEN3_TOWER, **_TOKENS,
        },
    ),
    "Qwen3_5Moe": (
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {
                **_WIDE, **_HYBRID, **_EXPERTS, "rope_parameters": _rope(4, 2, 2, partial_rotary_factor=1.0),
            },
            "vision_config": _QWEN3_TOWER, **_TOKENS,
        },
    ),
    "Glm4v": (
        "glm4v", "Glm4vForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _rope(1, 1, 2, partial_rotary_factor=1.0)},
            "vision_config": _GLM_TOWER, "image_token_id": IMAGE, "video_token_id": VIDEO,
        },
    ),
    "Glm4vMoe": (
        "glm4v_moe", "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                **_TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
                "rope_parameters": _rope(1, 1, 2, partial_rotary_factor=1.0),
            },
            "vision_config": _GLM_TOWER, "image_token_id": IMAGE, "video_token_id": VIDEO,
        },
    ),
    "Glm46V": (
        "glm46v", "Glm46VForConditionalGeneration",
        {
            "text_config": {
                **_TEXT, "model_type": "glm4v_text", "rope_parameters": _rope(1, 1, 2, partial_rotary_factor=1.0),
            },
            "vision_config": {**_GLM_TOWER, "model_type": "glm4v_vision"}, "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
    ),
    "Qwen3Omni": (
        "qwen3_omni_moe", "Qwen3OmniMoeThinkerForConditionalGeneration",
        {
            "text_config": {**_WIDE, **_EXPERTS, "rope_parameters": _rope(4, 2, 2)}, **_OMNI,
            "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "Qwen2_5Omni": (
        "qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": _rope(1, 1, 2)}, **_OMNI,
            "vision_config": {**_QWEN2_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        },
    ),
    "Gemma4": (
        "gemma4", "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **_WIDE, "sliding_window": 6, "use_bidirectional_attention": "vision", "global_head_dim": 16,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
            },
            "vision_config": {
                **_VIT, "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2,
                "position_embedding_size": 32,
            },
            "audio_config": None, "image_token_id": IMAGE, "video_token_id": VIDEO,
        },
    ),
    "Gemma3": (
        "gemma3", "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_WIDE, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {**_VIT, "image_size": 32, "patch_size": 8}, "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
        },
    ),
    "Llava": (
        "llava", "LlavaForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"}, "vision_feature_layer": -1, "image_token_id": IMAGE,
            "vision_config": {**_VIT, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
        },
    ),
    "InternVL": (
        "internvl", "InternVLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"}, "image_token_id": IMAGE,
            "vision_config": {**_VIT, "image_size": [16, 16], "patch_size": [4, 4]},
        },
    ),
}  # fmt: skip
WITH_TILES = ("Gemma3", "Llava", "InternVL")


def build(name, *, dtype=torch.float64, **changed):
    """Makes a tiny random model, none of whose parameters is at its initial zero or one."""
    module, kind, config = MODELS[name]
    if importlib.util.find_spec(f"transformers.models.{module}") is None:
        pytest.skip(f"transformers {version('transformers')} has no {kind}")
    with without("fla", "causal_conv1d"):
        found = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), kind)
    torch.manual_seed(0)
    made = found.config_class(**copy.deepcopy({**config, **changed}))
    for each in (made, made.text_config):
        each._experts_implementation = "eager"
    model = found(made).to(dtype).train()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in label:
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif parameter.std() < 0.05:
                parameter.normal_(0, 0.1)
    return model


def document(model, text, images=(), videos=(), seed=0):
    """Makes the batch of one document, as a processor does: text, and after it each image and video with some text.

    Args:
        text: the number of its first tokens.
        images, videos: frames, rows and columns of patches; any value for models that take images of one size.
    """
    generator = torch.Generator().manual_seed(seed)
    config, parts, types, made = model.config, [], [], {}
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)

    def add_text(count):
        parts.append(torch.randint(3, 80, (count,), generator=generator))

    is_omni = config.model_type.endswith("omni_moe_thinker") or config.model_type.endswith("omni_thinker")
    add_text(text)
    for token, suffix, given in ((IMAGE, "", images), (VIDEO, "_videos", videos)):
        for grid in given:
            if config.model_type == "gemma4":  # a row of patches for each frame, filled up to 128
                frames, height, width = grid
                places = torch.full((frames, 128, 2), -1)
                places[:, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
                pixels, counts = draw(frames, 128, 3 * 16), [height * width // 4] * frames
                made.setdefault("video_position_ids" if suffix else "image_position_ids", []).append(places)
                if suffix:
                    made.setdefault("num_frames_per_video", []).append(torch.tensor([frames]))
            elif config.model_type in ("gemma3", "llava", "internvl"):
                size = config.vision_config.image_size
                pixels, counts = draw(1, 3, *((size, size) if isinstance(size, int) else size)), [4]
            else:
                frames, height, width = grid
                pixels, counts = draw(frames * height * width, 3 * 2 * 16), [frames * height * width // 4]
                whole = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
                if token == VIDEO and config.model_type not in whole:  # a timestamp stands before each frame
                    counts = [height * width // 4] * frames
                made.setdefault("video_grid_thw" if suffix else "image_grid_thw", []).append(grid)
            made.setdefault(f"pixel_values{suffix}", []).append(pixels)
            if is_omni and suffix:
                made.setdefault("video_second_per_grid", []).append(torch.tensor([0.5 * len(pixels) / 100]))
            for count in counts:
                if is_omni:
                    parts.append(torch.tensor([92]))
                in_ids = IMAGE if config.model_type.startswith("glm") else token
                parts.append(torch.full((count,), in_ids))
                types.append((sum(map(len, parts)) - count, count, 1 if token == IMAGE else 2))
                if is_omni:
                    parts.append(torch.tensor([93]))
                add_text(text // 2 + 1)
    ids = torch.cat(parts)[None]
    numbers = torch.zeros_like(ids)
    for begin, count, number in types:
        numbers[0, begin : begin + count] = number
    found = {name: torch.tensor(values) if name.endswith("thw") else torch.cat(values) for name, values in made.items()}
    name = {"gemma3": "token_type_ids", "llava": None, "internvl": None}.get(config.model_type, "mm_token_type_ids")
    if is_omni:
        name, found["attention_mask"] = None, torch.ones_like(ids)
    return {"input_ids": ids, **found, **({name: numbers} if name else {})}


def packed(documents):
    """Puts documents end to end, with labels."""
    rows = ("input_ids", "token_type_ids", "mm_token_type_ids", "attention_mask")
    names = dict.fromkeys(name for each in documents for name in each)
    found = {
        name: torch.cat([each[name] for each in documents if name in each], 1 if name in rows else 0) for name in names
    }
    lengths = [each["input_ids"].shape[1] for each in documents]
    return {**found, "labels": found["input_ids"], "lengths": lengths}


@contextlib.contextmanager
def sampled_wide():
    """Samples a grid in the type of what is sampled: GLM's tower has the one in fp32, and float64 of the other."""
    sample = functional.grid_sample
    functional.grid_sample = lambda values, grid, **named: sample(values, grid.to(values.dtype), **named)
    try:
        yield
    finally:
        functional.grid_sample = sample


def stock(model, documents, autocast=None, changed=None):
    """Loss, logits `[total, vocabulary]` and gradients of the stock class in eager mode, on each document alone.

    Args:
        autocast: a type, under autocast to which forward is.
        changed: returns what is trained of the model, such as the model with adapters.
    """
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    text = alone
    if changed is not None:
        alone = changed(alone)
    count = sum(each["input_ids"].shape[1] - 1 for each in documents)
    total, logits = 0.0, []
    for each in documents:
        for owner in (text, text.model):
            owner.rope_deltas = None
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            rows = alone(**each, use_cache=False).logits[0]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        logits.append(rows.detach())
        loss = functional.cross_entropy(rows[:-1], each["input_ids"][0, 1:], reduction="sum") / count
        if loss.requires_grad:  # nothing is trained of text where only a tower or a projector is
            loss.backward()
        total += loss.item()
    return total, torch.cat(logits), gradients_of(alone)


def over_ranks(model, batch, size, autocast=None, changed=None, **options):
    """Loss, logits and gradients of a copy of the model over `size` ranks, and the tower's rows of each rank.

    `autocast` and `changed` are those of `stock`.
    """
    from megatron_cp.transformers import enable_context_parallel

    lock = threading.Lock()  # ranks share torch's random numbers

    def main(group):
        own = copy.deepcopy(model)
        parallel = enable_context_parallel(own, group, **options)
        if changed is not None:
            with lock:
                own = changed(own)
        shard = parallel.shard(batch)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out = own(**shard, num_items_in_batch=shard.num_items)
        out.loss.backward()
        patches = {name: len(shard[name]) for name in ("pixel_values", "pixel_values_videos") if name in shard}
        return out.loss.item(), parallel.gather(out.logits.detach(), shard)[0], gradients_of(own), patches

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*compute nothing here.*")
        losses, logits, gradients, patches = zip(*run_ranks(main, size), strict=True)
    return sum(losses), logits[0], summed(gradients), patches
