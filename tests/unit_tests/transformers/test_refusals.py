"""Tests of the refusals of the adapter for transformers: models, batches and calls that it would compute wrongly."""

import copy
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
from torch import nn

from megatron_cp.errors import ArgumentError
from megatron_cp.transformers import enable_context_parallel, token_log_probs
from megatron_cp.transformers.attention import planned_attention
from megatron_cp.transformers.slots import mask_of
from megatron_cp.transformers.sources import passes
from tests.refusals import rejects
from tests.transformers_cases import TOKENS, audio_model, batch, build, class_of, tiny

NUMBERS = torch.tensor([[0] * 5 + [1] + [2] * 7])  # of each token's document


@cache
def built(name):
    """A model that no test changes."""
    return build(name, dtype=torch.float32)


# -- models, when they are enabled ------------------------------------------------------------------------------------


def rejects_enabling(says, model, group=None, **options):
    rejects(says, enable_context_parallel, model, group, **options)
    assert not any("cp_slot" in vars(module) for module in model.modules())


def made_of(name, **changed):
    return build(name, dtype=torch.float32, **changed)


def with_values(**values):
    """A model whose configuration has other values since it was built."""
    model = copy.deepcopy(built("Llama"))
    model.set_attn_implementation("eager")
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


GELU, FEW_EXPERTS = "'gelu'; allowed: silu or swish", {"num_experts": 2, "num_experts_per_tok": 1}
DSA = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 8, **FEW_EXPERTS}
QWEN4 = {
    "head_dim": 16, "hc_count": 2, "hc_lowrank": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, **FEW_EXPERTS,
}  # fmt: skip
SCALED, MIXED = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, {"rope_type": "longrope"}
REFUSED_MODELS = [
    # Classes whose layers it does not compute.
    ("MambaMixer", lambda: tiny("jamba", "JambaForCausalLM", num_experts=1, attn_layer_offset=1, attn_layer_period=2,
                                use_mamba_kernels=False)),
    ("linear_attention|LightningAttention",
     lambda: tiny("minimax", "MiniMaxForCausalLM", num_local_experts=2, head_dim=16)),
    ("Recurrent", lambda: tiny("recurrent_gemma", "RecurrentGemmaForCausalLM", lru_width=32)),
    ("PhimoeAttention.*leaves the window",
     lambda: tiny("phimoe", "PhimoeForCausalLM", sliding_window=8, num_local_experts=2)),
    ("Qwen2MoeAttention.*leaves the window",
     lambda: tiny("qwen2_moe", "Qwen2MoeForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2,
                  **FEW_EXPERTS)),
    ("Qwen3OmniMoeThinkerTextAttention.*leaves the window",  # which has a window of None itself
     lambda: tiny("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel", sliding_window=8, head_dim=16, **FEW_EXPERTS)),
    ("Moshi(Sdpa)?Attention.*leaves the window",
     lambda: tiny("moshi", "MoshiForCausalLM", sliding_window=8, ffn_dim=64, intermediate_size=None)),
    *((f"{says}.*indexer scores single tokens", make) for says, make in (
        ("Glm5NextTextAttention with a Glm5NextTextIndexer",
         lambda: tiny("glm5_next", "Glm5NextTextModel", layer_types=["linear_attention", "full_attention"],
                      linear_num_heads=2, linear_head_dim=8, **DSA, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=8,
                      q_lora_rank=8)),
        ("MiniMaxM3VLAttention with a MiniMaxM3VLIndexer",
         lambda: tiny("minimax_m3_vl", "MiniMaxM3VLTextModel", layer_types=["full_attention", "minimax_m3_sparse"],
                      head_dim=16, index_n_heads=2, index_head_dim=8, rotary_dim=8, num_experts_per_tok=1,
                      num_local_experts=2)),
        ("Qwen4ExpTextAttention with a Qwen4ExpTextQSAIndexer",
         lambda: tiny("qwen4_exp", "Qwen4ExpTextModel", layer_types=["linear_attention", "full_attention"],
                      **QWEN4, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
                      indexer_compress_ratio=4)),
    )),
    ("Qwen4ExpTextPLELayer", lambda: tiny("qwen4_exp", "Qwen4ExpTextModel", layer_types=["linear_attention"] * 2,
                                          **QWEN4, ple_layer_ids=[2], ngram_vocab_size_base=50, heads_per_ngram=2)),
    ("hybrid_sliding", lambda: tiny("inkling2", "Inkling2TextModel", head_dim=16, moe_intermediate_size=32,
                                    n_routed_experts=2, num_experts_per_tok=1)),
    ("ZayaCCAProjection", lambda: tiny("zaya", "ZayaModel", head_dim=16, layer_types=["hybrid"] * 2,
                                       num_experts_per_tok=1, num_experts=2)),
    ("MllamaTextCrossAttention.*to one another",
     lambda: tiny("mllama", "MllamaForCausalLM", cross_attention_layers=[1])),
    ("DogeAttention.*does not depend", lambda: tiny("doge", "DogeForCausalLM")),
    (r"layerdrop: got 0\.2", lambda: tiny("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.2)),
    (r"layerdrop: got 0\.2", lambda: tiny("biogpt", "BioGptForCausalLM", layerdrop=0.2)),
    # Layers that are built otherwise.
    *((GELU, partial(made_of, name, hidden_act="gelu"))
      for name in ("Mamba2", "KimiLinear", "Bamba", "FalconH1", "GraniteMoeHybrid", "Qwen3Next")),
    (GELU, lambda: made_of("NemotronH", mamba_hidden_act="gelu")),
    ("attn_temperature_tuning",
     lambda: made_of("Llama4", num_hidden_layers=1, no_rope_layers=[0], attn_temperature_tuning=True)),
    (r"attention_dropout: got 0\.1", lambda: made_of("DeepseekV32", attention_dropout=0.1)),
    # Values of the configuration.
    ("output_router_logits: got True", lambda: with_values(output_router_logits=True)),
    ("output_attentions: got True", lambda: with_values(output_attentions=True)),
    ("rope_parameters: got 'dynamic'", lambda: with_values(rope_parameters=SCALED)),
    ("rope_parameters: got 'longrope'",
     lambda: with_values(rope_parameters={"full": {"rope_type": "default"}, "sliding": MIXED})),
]  # fmt: skip


@pytest.mark.parametrize(("says", "make"), REFUSED_MODELS)
def test_rejects_models(says, make):
    rejects_enabling(says, make())


REFUSED_OPTIONS = [
    *(("Qwen3Next", name, value) for name, value in
      (("layout", "ring"), ("scheme", "rong"), ("linear_mode", "ring"), ("align", 0), ("transport", "ring"),
       ("codec", "fp3"), ("ulysses_degree", 0), ("head_chunks", 0), ("hardware", "abacus"))),
    ("Llama", "latents", True), ("DeepseekV32", "scheme", "p2p"), ("DeepseekV32", "codec", "fp8"),
    ("DeepseekV32", "kernel", "reference"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "value"), REFUSED_OPTIONS)
def test_rejects_options(name, option, value):
    rejects_enabling(rf"{option}: got {value!r}; allowed", built(name), **{option: value})


def test_rejects_layers_that_are_skipped_at_random_since_the_model_was_built():
    model = tiny("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.0)
    holder = next(each for each in model.modules() if "layerdrop" in vars(each))
    holder.layerdrop = 0.1
    rejects_enabling(r"layerdrop: got 0\.1", model)
    holder.layerdrop = 0.0
    enable_context_parallel(model, None)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("qwen3", "Qwen3ForSequenceClassification"), ("llama", "LlamaForTokenClassification"),
        ("llama", "LlamaForQuestionAnswering"), ("gpt2", "GPT2DoubleHeadsModel"),
    ],
)  # fmt: skip
def test_rejects_heads_that_are_no_causal_language_model(module, name):
    model = tiny(module, name)
    rejects_enabling(f"'{name}'.*model.base_model", model)
    enable_context_parallel(model.base_model, None)


def test_rejects_heads_by_what_they_are_and_not_by_their_names(llama):
    stock = class_of("Llama")

    class LlamaForCausalLM(stock):
        def forward(self, input_ids, **others):
            return {"logits": self.lm_head(self.model(input_ids, **others).last_hidden_state[:, -1])}

    class LlamaForSequenceClassification(stock):
        def get_input_embeddings(self):
            return super().get_input_embeddings()

    class OfItsOwn(stock):
        def forward(self, input_ids, labels=None, **others):
            logits = self.lm_head(self.model(input_ids, **others).last_hidden_state)
            return {"loss": self.loss_function(logits, labels, self.vocab_size, **others), "logits": logits}

    for kind in (LlamaForSequenceClassification, OfItsOwn):
        enable_context_parallel(kind(llama.config), None)
    rejects_enabling("LlamaForCausalLM", LlamaForCausalLM(llama.config))


def test_swish_is_silu():
    assert enable_context_parallel(build("Mamba2", dtype=torch.float32, hidden_act="swish"), None).slots


@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_rejects_layers_whose_keys_are_made_of_several_tokens(kind):
    """DeepSeek-V4's; its layers of a window alone are taken."""
    layer, config = SimpleNamespace(layer_idx=1), SimpleNamespace(layer_types=["sliding_attention", kind])
    rejects(rf"a layer of type '{kind}'.*more-layers\.md", mask_of, layer, config)


def test_rejects_models_that_are_wrapped_or_enabled_and_groups(llama, enabled):
    for wrapped in (torch.compile(llama), nn.Sequential(llama), object()):
        rejects("before fully_shard", enable_context_parallel, wrapped, None)
    rejects("once", enable_context_parallel, enabled[0], None)
    rejects("group", enable_context_parallel, llama, "cp")
    model = copy.deepcopy(llama)
    model.model.layers[0].self_attn.is_causal = False
    rejects_enabling("is_causal=False", model)


# -- batches ----------------------------------------------------------------------------------------------------------

REFUSED_BATCHES = [
    ({"input_ids": torch.ones(2, 13, dtype=torch.int64)}, "input_ids", "2 rows"),
    ({"input_ids": torch.ones(13, dtype=torch.int64)}, "input_ids", r"\[13\]"),
    ({"input_ids": torch.ones(1, 13)}, "input_ids", "float32"),
    ({"input_ids": [[1, 2]]}, "input_ids", "token ids"),
    ({"attention_mask": torch.tensor([[1] * 12 + [0]])}, "attention_mask", "zeros in it"),
    ({"attention_mask": torch.ones(1, 1, 13, 13)}, "attention_mask", r"\[1, 1, 13, 13\]"),
    ({"attention_mask": NUMBERS.flip(1) + 1}, "attention_mask", r"documents of \[7, 1, 5\]'; .*lengths's \[5, 1, 7\]"),
    ({"attention_mask": torch.tensor([[1] * 6 + [2] * 7])}, "attention_mask", r"\[6, 7\].*lengths's \[5, 1, 7\]"),
    ({"cu_seq_lens_q": [0, 6, 13]}, "cu_seq_lens_q", r"documents of \[6, 7\].*lengths's \[5, 1, 7\]"),
    ({"lengths": None, "cu_seq_lens_q": [0, 5, 13], "cu_seq_lens_k": [0, 6, 13]}, "cu_seq_lens_k", "cu_seq_lens_q's"),
    ({"lengths": None, "cu_seq_lens_k": [0, 5]}, "cu_seq_lens_k", "documents of 5 tokens"),
    ({"seq_lengths": [6, 7]}, "seq_lengths", r"documents of \[6, 7\].*Leave out the wrong one"),
    ({"seq_idx": NUMBERS[:, :12]}, "seq_idx", r"\[1, 12\]"),
    ({"seq_idx": NUMBERS // 2}, "seq_idx", r"documents of \[6, 7\]"),
    ({"position_ids": torch.tensor([[*range(6), *range(7)]])}, "position_ids", r"\[6, 7\].*lengths's \[5, 1, 7\]"),
    ({"lengths": [13], "position_ids": NUMBERS * 0}, "position_ids", r"lengths's \[13\]"),
    ({"max_length_q": 6}, "max_length_q", "at least 7, the longest document of lengths"),
    ({"lengths": None, "max_length_q": 13, "position_ids": torch.arange(7, 20)[None]}, "position_ids", "give lengths"),
    *(
        ({name: value}, name, "If they are offsets, name them cu_seq_lens_q")
        for name, value in (
            ("cu_seqlens", [0, 5, 13]),
            ("segment_ids", NUMBERS),
            ("document_ids", NUMBERS),
            ("seqlens", [5, 1, 7]),
            ("ends", np.array([0, 13])),
        )
    ),
    ({"lengths": [5, 9]}, "lengths", "documents of 14 tokens"),
    ({"lengths": [0, 5, 13]}, "lengths", "documents of 18 tokens.*name them cu_seq_lens_q"),
    ({"lengths": [5.0, 8.0]}, "lengths", "integers"),
    ({"lengths": None, "position_ids": torch.arange(7, 20)[None]}, "position_ids", "give lengths"),
    ({"lengths": None, "position_ids": torch.tensor([[0, 2] + [0] * 11])}, "position_ids", "count up from 0"),
    ({"lengths": None, "position_ids": torch.zeros(3, 1, 13, dtype=torch.int64)}, "position_ids", "several axes"),
    ({"position_ids": torch.zeros(13, 1, dtype=torch.int64)}, "position_ids", r"\[13, 1\]"),
    ({"labels": TOKENS[:, 1:]}, "labels", r"\[1, 12\]"),
    ({"labels": TOKENS + 0.5}, "labels", "allowed: integers"),
    ({"labels": None, "shift_labels": TOKENS + 0.5}, "shift_labels", "allowed: integers"),
    ({"position_ids": (TOKENS - 2**63).view(torch.uint64)}, "position_ids", r"below 2\*\*63"),
    ({"weights": torch.rand(13)}, "weights", r"\[13\]"),
    ({"past_key_values": object()}, "past_key_values", "no cache"),
    ({"use_cache": True}, "use_cache", "no cache"),
    ({"output_attentions": True}, "output_attentions", "in one place"),
    ({"output_router_logits": True}, "output_router_logits", "no rank knows"),
    ({"cp_plans": object()}, "cp_plans", "planner"),
    ({"token_type_ids": torch.ones(1, 13, dtype=torch.int64)}, "token_type_ids", "in both directions"),
    ({"pixel_values": torch.ones(1, 13, 8)}, "pixel_values", "only text.*take images: qwen2_vl"),
]


@pytest.mark.parametrize(("changed", "argument", "text"), REFUSED_BATCHES)
def test_rejects_batches(enabled, changed, argument, text):
    with pytest.raises(ArgumentError, match=text) as refused:
        enabled[1].shard(batch(**changed))
    assert refused.value.argument == argument


def test_rejects_what_is_no_batch_of_the_model(enabled):
    model, context = enabled
    rejects("batch: got .*sharded before.*Shard each batch once", context.shard, context.shard(batch()))
    rejects("batch: got 'a Tensor'; allowed: a mapping", context.shard, TOKENS)
    rejects("this batch's documents", context.shard, batch(cp_plans=context.planner([6, 7])))
    for seed in (-1, 1.5, True):
        rejects("seed", context.shard, batch(), seed=seed)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    rejects("takes shift_labels", context.shard, batch())
    context.shard({"input_ids": TOKENS})  # without labels it is not called


@pytest.mark.parametrize("name", ["lengths", "cu_seq_lens_q", "position_ids", "attention_mask", "input_ids", "labels"])
def test_rejects_what_is_on_a_device(enabled, name):
    given = batch(**{name: torch.zeros(1, 13, dtype=torch.int64, device="meta")})
    if name in ("cu_seq_lens_q", "position_ids"):
        del given["lengths"]
    with pytest.raises(ArgumentError, match=r"tensor on meta.*Shard the batch before you move it") as refused:
        enabled[1].shard(given)
    assert refused.value.argument == name


def test_rejects_labels_for_a_loss_of_the_models_own():
    model = audio_model()
    context = enable_context_parallel(model, None)
    for name in ("labels", "shift_labels"):
        rejects("a loss in Qwen2Audio", context.shard, {"input_ids": TOKENS, name: TOKENS})
    context.shard({"input_ids": TOKENS, "targets": TOKENS})
    slotted = [name for name, module in model.named_modules() if "cp_slot" in vars(module)]
    assert len(slotted) == 2
    assert all("language_model" in name for name in slotted)  # and none in the tower


def test_rejects_labels_where_a_forward_keeps_shift_labels_from_its_loss(llama):
    model = copy.deepcopy(llama)

    def forward(self, input_ids=None, labels=None, **others):
        logits = self.lm_head(self.model(input_ids, **others).last_hidden_state)
        return logits if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=97)

    model.__class__ = type("LlamaForCausalLM", (type(model),), {"forward": forward, "__module__": __name__})
    context = enable_context_parallel(model, None)
    rejects("a loss in LlamaForCausalLM.forward", context.shard, batch())
    context.shard({"input_ids": TOKENS})


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_forward_passes_what_a_call_in_it_has_as_a_name():
    @pytest.mark.parametrize("window", [], ids=None)
    def reads(config, **kwargs):
        return dict(left=getattr(config, "window", None), **kwargs)

    assert [passes(reads, name) for name in ("left", "window", "ids")] == [True, False, False]
    assert passes(eval("lambda config: dict(window=config)"), "window") is None


def test_rejects_a_class_that_keeps_the_batch_from_its_layers(llama):
    model = copy.deepcopy(llama)
    layer = model.model.layers[0]
    stock = type(layer)

    def forward(self, hidden, position_embeddings=None, **others):
        return stock.forward(self, hidden, position_embeddings=position_embeddings)

    layer.__class__ = type("Mine", (stock,), {"forward": forward})
    rows = enable_context_parallel(model, None).shard(batch())
    rejects(r"cp_batch: got None.*passes its \*\*kwargs on", model, **rows)


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"output_attentions": True}, "in one place"), ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep"),
        ({"output_router_logits": True}, "no rank knows"), ({"past_key_values": object()}, "no cache"),
    ],
)  # fmt: skip
def test_rejects_arguments_of_a_call(enabled, named, text):
    model, context = enabled
    rows = context.shard({"input_ids": TOKENS})
    with pytest.raises(ArgumentError, match=text) as refused:
        model(**rows, **named)
    assert refused.value.argument == next(iter(named))
    model(**rows, output_attentions=False, logits_to_keep=0)


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("Llama", {"sliding_window": 4}, "sliding_window"), ("Mistral", {"sliding_window": None}, "sliding_window"),
        ("Mistral", {"sliding_window": 15}, "sliding_window"), ("Llama4", {"sliding_window": 16}, "sliding_window"),
        ("Llama", {"position_bias": torch.zeros(1, 6, 13, 13)}, "position_bias"),
        ("Llama", {"is_causal": False}, "is_causal"), ("DeepseekV32", {"softcap": 0.5}, "softcap"),
        ("DeepseekV32", {"dropout": 0.5}, "dropout"),
        ("DeepseekV32", {}, "indices"),
    ],
)  # fmt: skip
def test_rejects_calls_that_a_layer_does_not_compute(name, options, argument):
    model = copy.deepcopy(built(name))
    planned = enable_context_parallel(model, None).shard(batch(), seed=1)["cp_batch"]
    attend, heads = next(module for module in model.modules() if hasattr(module, "cp_slot")), torch.zeros(1, 6, 13, 16)
    with pytest.raises(ArgumentError) as refused:
        planned_attention(attend, heads, heads, heads, None, **options, cp_batch=planned)
    assert refused.value.argument == argument


def test_rejects_a_mask_and_a_cache_in_a_layer(enabled):
    model, context = enabled
    hidden, phases = torch.zeros(1, 13, 48), (torch.ones(1, 13, 16),) * 2
    attend, planned = model.model.layers[0].self_attn, context.shard(batch())["cp_batch"]
    rejects("attention_mask", attend, hidden, phases, torch.ones(1, 1, 13, 13), cp_batch=planned)
    model = build("Mamba2", num_hidden_layers=1, dtype=torch.float32)
    planned = enable_context_parallel(model, None).shard(batch())["cp_batch"]
    rejects("cache_params", model.backbone.layers[0].mixer, hidden, cache_params=object(), cp_batch=planned)


def test_rejects_a_projection_of_latents_that_is_none():
    model = copy.deepcopy(built("DeepseekV3"))
    context = enable_context_parallel(model, None, latents=True)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = nn.Sequential(module.kv_b_proj)
    rejects("kv_b_proj", model, **context.shard({"input_ids": TOKENS}))


def test_rejects_rows_without_an_axis(enabled):
    rejects(r"\[1, t, ...\]", enabled[1].gather, torch.zeros(13), enabled[1].shard(batch()))


@pytest.mark.parametrize(
    ("logits", "without", "options", "text"),
    [
        (torch.zeros(1, 12, 97), (), {}, "logits"),
        (torch.zeros(1, 13, 97), ("labels", "shift_labels"), {}, "no labels"),
        (torch.zeros(1, 13, 97), (), {"temperature": 0.0}, "temperature"),
        (torch.zeros(1, 13, 97), (), {"temperature": float("nan")}, "temperature"),
        (torch.zeros(1, 13, 97), (), {"temperature": torch.ones(13)}, r"temperature: .* rows, \[1, 13\]"),
        (torch.zeros(1, 13, 97), (), {"temperature": torch.zeros(1, 13)}, r"temperature: got 'torch.float32 \[1, 13\]"),
        (torch.zeros(1, 13, 97), (), {"temperature": "hot"}, "temperature: got 'hot'"),
    ],
)
def test_rejects_log_probs(enabled, logits, without, options, text):
    sharded = enabled[1].shard(batch())
    for name in without:
        del sharded[name]
    rejects(text, token_log_probs, logits, sharded, **options)
