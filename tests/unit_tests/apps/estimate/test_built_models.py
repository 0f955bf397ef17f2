"""Models that transformers builds without memory: all parameters are counted, as where fields are read."""

import json
from dataclasses import replace

import pytest

from megatron_cp.apps.estimate import layer_shapes
from megatron_cp.apps.estimate.built_models import read_built
from megatron_cp.apps.estimate.model_files import read_model
from tests.refusals import rejects

pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 512, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "rope_theta": 10000.0}
KNOWN = {
    "llama": {"num_experts_per_tok": None},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 16},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 30.0},
    "deepseek_v3": _LATENT | {"rope_scaling": _YARN},
}
GLM = {
    "glm4": {"pad_token_id": 0},
    "glm4_moe": {**_LATENT, "num_key_value_heads": 2, "use_qk_norm": True, "pad_token_id": 0},
    "glm4_moe_lite": {**_LATENT, "pad_token_id": 0},
}


def values(kind, **change):
    found = {"model_type": kind, **_SMALL, **{**KNOWN, **GLM}.get(kind, {}), **change}
    return {name: value for name, value in found.items() if value is not None}


def read(tmp_path, **given):
    (tmp_path / "config.json").write_text(json.dumps(given))
    return read_model(str(tmp_path))


@pytest.mark.parametrize("kind", KNOWN)
def test_fields_and_modules_say_the_same(kind, tmp_path):
    by_fields, built = read(tmp_path, **values(kind)), read_built(values(kind), "built", "")
    weights = [[block.weights(each.hidden_size) for block in each.blocks] for each in (built, by_fields)]
    assert weights[0] == weights[1]
    assert [slot.mask for slot in built.slots()] == [slot.mask for slot in by_fields.slots()]
    ((layer, ours),) = layer_shapes(by_fields).items()
    ((other, theirs),) = layer_shapes(built).items()
    assert layer == other
    for (one, layers), (same, count) in zip(ours.items(), theirs.items(), strict=True):
        assert layers == count
        assert one.softmax_scale == pytest.approx(same.softmax_scale)
        assert replace(one, softmax_scale=None) == replace(same, softmax_scale=None)
    biases = 8 * 3 if kind == "deepseek_v3" else 0  # of routers, which transformers holds as buffers
    assert built.parameters == by_fields.parameters - biases


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_moe", "gemma2", "gpt_oss"])
def test_key_heads_that_a_configuration_leaves_out_are_those_of_transformers(kind, tmp_path):
    given = values(kind, num_key_value_heads=None, num_attention_heads=8)
    by_fields, built = read(tmp_path, **given), read_built(given, "built", "")
    assert [slot.kv_heads for slot in built.slots()] == [
        slot.kv_heads for slot in by_fields.slots() if hasattr(slot, "kv_heads")
    ]


@pytest.mark.parametrize("kind", GLM)
def test_glm_is_read_by_building_it(kind, tmp_path):
    found = read(tmp_path, **values(kind))
    assert len(found.blocks) == 4
    assert "built by transformers without memory" in found.source
    experts = [block.mlp.experts for block in found.blocks]
    assert experts == ([0, 8, 8, 8] if kind != "glm4" else [0] * 4)
    assert found.blocks[-1].post_norms == (kind == "glm4")
    assert found.blocks[-1].mixer.kv_rank == (16 if kind == "glm4_moe_lite" else None)


def test_rejects_what_is_not_understood(tmp_path):
    dsa = values("glm_moe_dsa", **_LATENT, pad_token_id=0)
    rejects("model_type: got 'GlmMoeDsaDecoderLayer with .* parameters, of which", lambda: read(tmp_path, **dsa))
    olmo = values("olmo2", head_dim=None)  # norms of all heads together
    rejects("model_type: got 'Olmo2DecoderLayer with .* parameters, of which", lambda: read(tmp_path, **olmo))
    rejects("model_type: got 'bert'", lambda: read(tmp_path, **values("bert")))
    rejects("model_type: got 'no_such_model'", lambda: read(tmp_path, **values("no_such_model")))
