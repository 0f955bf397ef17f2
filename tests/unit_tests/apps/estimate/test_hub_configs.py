"""A model read from a `config.json` has the layers and the parameters of the published one."""

import json

import pytest

from megatron_cp.apps.estimate.hub_configs import MODEL_TYPES
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.errors import ArgumentError

# What of published configurations shapes the model, and the parameters of the checkpoints that belong to them.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "vocab_size": 128256, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "vocab_size": 32000, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "model_type": "mixtral", "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 3584, "vocab_size": 152064, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "use_sliding_window": False,
    "sliding_window": 131072, "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "vocab_size": 151936, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "vocab_size": 151936, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "vocab_size": 151936, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 3584, "vocab_size": 256000, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336,
    "sliding_window": 4096,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 1152, "vocab_size": 262144, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912,
    "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "vocab_size": 201088, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "hidden_size": 4096, "vocab_size": 131072, "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
    "use_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR = {
    "model_type": "kimi_linear", "hidden_size": 2304, "vocab_size": 163840, "num_hidden_layers": 27, "head_dim": 72,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": FULL_LAYERS, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL_LAYERS],
    },
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "vocab_size": 129280, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_nextn_predict_layers": 1, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
MAMBA2 = {  # Mamba-Codestral-7B
    "model_type": "mamba2", "hidden_size": 4096, "vocab_size": 32768, "num_hidden_layers": 64, "num_heads": 128,
    "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "use_bias": False,
    "use_conv_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
BAMBA = {
    "model_type": "bamba", "hidden_size": 4096, "vocab_size": 128256, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE = {  # Granite-4.0-H-Tiny
    "model_type": "granitemoehybrid", "hidden_size": 1536, "vocab_size": 100352, "num_hidden_layers": 40,
    "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 512, "num_local_experts": 64,
    "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "mamba_n_heads": 48, "mamba_d_head": 64,
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "tie_word_embeddings": True,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
}  # fmt: skip
QWEN3_5 = {  # the text of Qwen3.5-9B
    "model_type": "qwen3_5_text", "hidden_size": 4096, "vocab_size": 248320, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {  # the text of Qwen3.5-35B-A3B
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "moe_intermediate_size": 512,
    "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
}  # fmt: skip

# Parameters of the published checkpoints, exactly, or as far as their names say.
PUBLISHED = [
    (LLAMA, 8_030_261_248, 0),
    (MISTRAL, 7_241_732_096, 0),
    (MIXTRAL, 46_702_792_704, 0),
    (QWEN2, 7_615_616_512, 0),
    (QWEN3, 8_190_735_360, 0),
    (QWEN3_MOE, 30_532_122_624, 0),
    (QWEN3_NEXT, 79_674_391_296, 0),
    (GEMMA2, 9_241_705_984, 0),
    (GEMMA3, 999_885_952, 0),
    (GPT_OSS, 20_914_757_184, 0),
    (NEMOTRON_H, 8_100_852_736, 0),
    (KIMI_LINEAR, 49_122_681_728, 0),
    (DEEPSEEK_V3, 671_026_419_200, 0),  # without the layer of multi-token prediction that the checkpoint has as well
    (MAMBA2, 7.29e9, 0.005e9),
    (BAMBA, 9.78e9, 0.005e9),
    (GRANITE, 6_939_037_248, 0),
    # The text of Qwen2-VL-7B, Qwen2.5-VL-7B, Qwen3-VL-8B and Qwen3-VL-30B-A3B has the shape of models above.
    (QWEN2 | {"model_type": "qwen2_vl_text"}, 7_615_616_512, 0),
    (QWEN2 | {"model_type": "qwen2_5_vl_text"}, 7_615_616_512, 0),
    (QWEN3 | {"model_type": "qwen3_vl_text"}, 8_190_735_360, 0),
    (QWEN3_MOE | {"model_type": "qwen3_vl_moe_text"}, 30_532_122_624, 0),
    (QWEN3_5, 8_953_803_264, 0),  # as transformers builds it, like the next
    (QWEN3_5_MOE, 34_660_610_688, 0),
]


@pytest.fixture
def read(tmp_path):
    """Reads a configuration as the file that it would be."""

    def reader(config, **changes):
        path = tmp_path / "model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config | changes))
        return read_model(str(path))

    return reader


def without(config, *names):
    assert set(names) <= set(config)
    return {name: value for name, value in config.items() if name not in names}


def masks(model):
    return [slot.mask for slot in model.slots()]


def test_every_type_has_a_published_configuration():
    assert {config["model_type"] for config, *_ in PUBLISHED} == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("config", "parameters", "margin"), PUBLISHED, ids=[config["model_type"] for config, *_ in PUBLISHED]
)
def test_parameters_are_those_of_the_published_checkpoint(read, config, parameters, margin):
    assert abs(read(config).parameters - parameters) <= margin


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"), (QWEN3, "qwen3-8b"), (QWEN3_NEXT, "qwen3-next"), (NEMOTRON_H, "nemotron-h"),
        (KIMI_LINEAR, "kimi-linear"),
    ],
)  # fmt: skip
def test_presets_are_their_configurations(read, config, name):
    model, preset = read(config), PRESETS[name]
    assert model.blocks == preset.blocks
    for name in ("hidden_size", "vocab_size", "tied_embeddings"):
        assert getattr(model, name) == getattr(preset, name)
    assert (model.name, model.source.endswith("config.json, model type " + config["model_type"])) == ("model", True)


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (LLAMA, {}, ["causal"] * 32),
        (MISTRAL, {}, ["window:4095,0"] * 32),
        (MISTRAL, {"sliding_window": None}, ["causal"] * 32),
        (GEMMA2, {}, ["window:4095,0", "causal"] * 21),
        (GEMMA3, {}, (["window:511,0"] * 5 + ["causal"]) * 4 + ["window:511,0"] * 2),
        (GPT_OSS, {}, ["window:127,0", "causal"] * 12),
        (GPT_OSS, {"layer_types": None, "sliding_window": 9}, ["window:8,0", "causal"] * 12),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 26}, ["causal"] * 26 + ["window:131071,0"] * 2),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 64}, ["window:63,0"] * 48),
    ],
)
def test_windows_are_in_their_layers(read, config, changes, expected):
    assert masks(read(config, **changes)) == expected


def test_left_out_sizes_follow_from_others(read):
    slot = read(without(LLAMA, "num_key_value_heads")).slots()[0]
    assert (slot.heads, slot.kv_heads, slot.head_dim) == (32, 32, 128)
    # Mistral's usual number is 8, which a configuration with null does not mean.
    mistral = without(MISTRAL, "num_key_value_heads"), MISTRAL | {"num_key_value_heads": None}
    assert [read(config).slots()[0].kv_heads for config in mistral] == [8, 32]
    bamba = without(BAMBA, "mamba_d_head")
    assert read(bamba).blocks == read(BAMBA, mamba_d_head="auto").blocks == read(BAMBA).blocks


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (MIXTRAL, ["num_local_experts", "num_experts_per_tok"]),
        (QWEN3, ["head_dim", "use_sliding_window", "tie_word_embeddings"]),
        (QWEN3_MOE, ["mlp_only_layers", "decoder_sparse_step"]),
        (QWEN3_NEXT, ["head_dim", "num_key_value_heads", "linear_conv_kernel_dim", "full_attention_interval"]),
        (GEMMA2, ["head_dim", "sliding_window"]),
        (GEMMA3, ["head_dim", "sliding_window_pattern"]),
        (GPT_OSS, ["head_dim", "num_experts_per_tok", "sliding_window", "attention_bias", "layer_types"]),
        (NEMOTRON_H, ["head_dim", "n_groups", "conv_kernel", "use_conv_bias", "num_hidden_layers"]),
        (KIMI_LINEAR, ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_layer_freq"]),
        (
            DEEPSEEK_V3,
            ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_layer_freq", "first_k_dense_replace"],
        ),
        (MAMBA2, ["n_groups", "conv_kernel", "use_conv_bias"]),
        (BAMBA, ["mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_conv_bias"]),
        (GRANITE, ["shared_intermediate_size", "mamba_n_groups", "mamba_d_conv"]),
    ],
)
def test_sizes_that_are_as_usual_can_be_left_out(read, config, names):
    """Files lack what their model type has without them."""
    assert read(without(config, *names)).blocks == read(config).blocks


def test_deepseek_attends_with_a_latent_and_has_dense_layers_first(read):
    model = read(DEEPSEEK_V3)
    (slot,) = set(model.slots())
    assert (slot.heads, slot.kv_heads, slot.head_dim, slot.value_head_dim) == (128, 128, 192, 128)
    assert [block.mlp.experts for block in model.blocks] == [0] * 3 + [256] * 58
    assert "without layers of multi-token prediction (1)" in model.source
    embedding = 129280 * 7168  # which those who say "37B activated" count as well
    assert 37e9 < model.active_parameters + embedding < 38e9
    assert "without" not in read(DEEPSEEK_V3, num_nextn_predict_layers=0).source
    every_other = read(DEEPSEEK_V3, moe_layer_freq=2, num_hidden_layers=7, n_shared_experts=None)
    assert [block.mlp.experts for block in every_other.blocks] == [0, 0, 0, 0, 256, 0, 256]
    assert every_other.blocks[4].mlp.shared_size == 0


def test_models_of_experts_have_dense_layers_only_where_they_say_so(read):
    # The stock class has its first three layers dense unless the configuration says otherwise.
    rest = without(DEEPSEEK_V3, "intermediate_size")
    model = read(rest, first_k_dense_replace=0)
    assert [block.mlp.experts for block in model.blocks] == [256] * 61
    assert model.blocks == read(DEEPSEEK_V3, first_k_dense_replace=0).blocks
    for dense in ({"first_k_dense_replace": 1}, {"first_k_dense_replace": None}, {"moe_layer_freq": 2}):
        with pytest.raises(ArgumentError, match=r"intermediate_size: got None.*Add intermediate_size"):
            read(rest, **{"first_k_dense_replace": 0, **dense})
    model = read(without(KIMI_LINEAR, "num_shared_experts", "first_k_dense_replace"))
    assert {(block.mlp.experts, block.mlp.shared_size) for block in model.blocks} == {(256, 0)}


def test_only_gemma_ties_embeddings_unless_told_otherwise(read):
    tied = set()
    for config, *_ in PUBLISHED:
        rest = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
        tied |= {config["model_type"]} if read(rest).tied_embeddings else set()
    assert tied == {"gemma2", "gemma3_text"}


FULL_RANK = {"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | {"use_full_rank_gate": True}}


@pytest.mark.parametrize(
    ("config", "changes", "more"),
    [
        (KIMI_LINEAR, FULL_RANK, 20 * (2304 * 4096 - 128 * (2304 + 4096))),  # a gate that is one projection
        (LLAMA, {"attention_bias": True}, 32 * (32 + 8 + 8 + 32) * 128),
        (LLAMA, {"mlp_bias": True}, 32 * (2 * 14336 + 4096)),
        (LLAMA, {"tie_word_embeddings": True}, -4096 * 128256),
        (QWEN3_NEXT, {"mlp_only_layers": [0, 7]}, 2 * 3 * 2048 * 5120 - 2 * (513 * 3 * 2048 * 512 + 513 * 2048)),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, 24 * (3 * 2048 * 6144 - 128 * 3 * 2048 * 768 - 128 * 2048)),
        (QWEN3_NEXT, {"shared_expert_intermediate_size": 0}, -48 * (3 * 2048 * 512 + 2048)),
        (KIMI_LINEAR, {"q_lora_rank": 1536}, 7 * (1536 * (2304 + 6144) + 1536 - 2304 * 6144)),
        (KIMI_LINEAR, {"mla_use_output_gate": True}, 7 * 2304 * 6144),
        (GRANITE, {"num_local_experts": 0}, -40 * 1536 * (64 * 3 * 512 + 64)),
        (MAMBA2, {"use_conv_bias": False}, -64 * (128 * 64 + 2 * 8 * 128)),
    ],
)
def test_an_option_adds_its_parameters(read, config, changes, more):
    assert read(config, **changes).parameters - read(config).parameters == more


def test_layers_of_nemotron_have_names_of_two_generations_and_mixtures(read):
    letters = {"M": "mamba", "*": "attention", "-": "mlp"}
    words = [letters[letter] for letter in NEMOTRON_H["hybrid_override_pattern"]]
    older = read(NEMOTRON_H, hybrid_override_pattern=None, layers_block_type=words)
    newer = {"mamba": "linear_attention", "attention": "full_attention", "mlp": "mlp"}
    words = [newer[word] for word in words]
    assert older.blocks == read(NEMOTRON_H).blocks
    assert read(NEMOTRON_H, hybrid_override_pattern=None, layers_block_type=words).blocks == older.blocks
    sizes = {
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    }  # fmt: skip
    model = read(NEMOTRON_H, hybrid_override_pattern="ME*E", num_hidden_layers=4, **sizes)
    (mlp,) = {block.mlp for block in model.blocks} - {None}
    assert (mlp.experts, mlp.experts_per_token, mlp.intermediate_size, mlp.shared_size, mlp.gated) == (
        128, 6, 1856, 3712, False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": "qwen3vl"}, "model_type: got 'qwen3vl'; allowed: the model types llama, mistral"),
        (LLAMA, {"model_type": "qwen3_nxt"}, "Did you mean qwen3_next?"),
        (LLAMA, {"model_type": ["llama"]}, "model_type: got ['llama']"),
        (LLAMA, {"hidden_size": None}, "hidden_size: got None; allowed: an integer of at least 1"),
        (LLAMA, {"hidden_size": True}, "hidden_size: got True"),
        (LLAMA, {"hidden_size": 4095}, "num_attention_heads: got 32; allowed: a divisor of 4095. Or give head_dim."),
        (LLAMA, {"num_key_value_heads": 7}, "kv_heads: got 7; allowed: a divisor of heads, 32"),
        (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers: got 1000000000000; allowed: an integer from 1 to"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no'; allowed: true or false"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window: got 0"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "experts_per_token: got 9; allowed: an integer from 1 to 8"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types: got '1 types'; allowed: the types of all 36 layers"),
        (QWEN3, {"layer_types": ["full_atention"] * 36}, "layer_types[0]: got 'full_atention'; allowed: full_att"),
        (QWEN3_NEXT, {"mlp_only_layers": 3}, "mlp_only_layers: got 3; allowed: a list of layers"),
        (QWEN3_NEXT, {"linear_num_key_heads": 12}, "key_heads: got 12; allowed: a divisor of heads, 32"),
        (QWEN3_NEXT, {"num_experts": None}, "num_experts: got None"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
        (NEMOTRON_H, {"moe_latent_size": 1024}, "moe_latent_size: got 1024; allowed: nothing, 0 or false"),
        (NEMOTRON_H, {"hybrid_override_pattern": "MX", "num_hidden_layers": 2}, "hybrid_override_pattern[1]: got 'X'"),
        (NEMOTRON_H, {"hybrid_override_pattern": None}, "layers_block_type: got None"),
        (KIMI_LINEAR, {"linear_attn_config": 5}, "linear_attn_config: got 5; allowed: the sizes of the linear layers"),
        (BAMBA, {"mamba_n_heads": 96, "mamba_d_head": "auto"}, "mamba_n_heads: got 96; allowed: a divisor of 8192"),
    ],
)
def test_rejects_configurations_that_cannot_be(read, config, changes, message):
    with pytest.raises(ArgumentError) as error:
        read(config, **changes)
    assert message in str(error.value)
    assert "config.json" in str(error.value)
