"""A model read from flags has as many parameters as the one that Megatron builds from them."""

import pytest

from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.executor.launch import run_ranks
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

pytest.importorskip("megatron.core")

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 64 "
    "--swiglu --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --mamba-num-heads 6 --mamba-head-dim 6 --mamba-state-dim 5 --mamba-num-groups 2 "
    "--padded-vocab-size 64 --untie-embeddings-and-output-weights "
)
PLAIN = COMMON + "--disable-bias-linear "
LATENT = PLAIN + (
    "--num-layers 2 --multi-latent-attention --qk-layernorm --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6"
)
LATENT_KEYS = LATENT.replace("--q-lora-rank 16 ", "").replace("--qk-layernorm ", "")
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40,
    "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "none",
}  # fmt: skip
EXPERT_FLAGS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40 "
    "--moe-layer-freq [0]+[1]"
)
# A kind of `tiny.KINDS`, changes of its configuration, and its flags.
CASES = {
    "gpt": ("gpt", {}, PLAIN + "--num-layers 2 --qk-layernorm"),
    "wide heads": ("gpt", {"kv_channels": 12}, PLAIN + "--num-layers 2 --qk-layernorm --kv-channels 12"),
    "biases": ("gpt", {"add_bias_linear": True}, COMMON + "--num-layers 2 --qk-layernorm"),
    "biases of qkv": ("gpt", {"add_qkv_bias": True}, PLAIN + "--num-layers 2 --qk-layernorm --add-qkv-bias"),
    "gates": ("gpt", {"attention_output_gate": True}, PLAIN + "--num-layers 2 --qk-layernorm --attention-output-gate"),
    "experts": ("gpt", EXPERTS, PLAIN + "--num-layers 2 --qk-layernorm " + EXPERT_FLAGS),
    "gated shared experts": (
        "gpt",
        EXPERTS | {"moe_shared_expert_gate": True},
        PLAIN + "--num-layers 2 --qk-layernorm --moe-shared-expert-gate " + EXPERT_FLAGS,
    ),
    "gdn": (
        "gpt_gdn",
        {},
        PLAIN + "--num-layers 2 --experimental-attention-variant gated_delta_net --linear-attention-freq 2",
    ),
    "latent": ("mla", {}, LATENT),
    "latent without ranks of queries": ("mla", {"q_lora_rank": None, "qk_layernorm": False}, LATENT_KEYS),
    "hybrid with mamba": ("hybrid_mamba", {}, PLAIN + "--hybrid-layer-pattern MM*-"),
    "hybrid with both": ("hybrid_both", {}, PLAIN + "--hybrid-override-pattern MG*-"),
    "hybrid with latent": ("hybrid_mla", {}, LATENT + " --hybrid-layer-pattern G|++-"),
}


def count_parameters(group, cases):
    tiny.start()
    return {name: tally(kind, changes) for name, (kind, changes, _) in cases.items() if tiny.is_there(kind)}


def tally(kind, changes):
    arguments = {"share_embeddings_and_output_weights": False}
    return sum(parameter.numel() for parameter in tiny.build(kind, arguments=arguments, **changes).parameters())


@pytest.fixture(scope="module")
def counts():
    return run_ranks(count_parameters, 1, CASES, kind="processes", timeout=limit(200))[0]


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_megatrons_model(name, counts):
    if not tiny.is_there(CASES[name][0]):
        pytest.skip("this Megatron's HybridModel has no latent attention")
    assert read_model(CASES[name][2]).parameters == counts[name]
