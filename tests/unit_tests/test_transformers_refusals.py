"""Tests of the refusals of the adapter for transformers: models, batches and calls that it would compute wrongly."""

import copy
import functools
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


@functools.cache
def built(name):
    """A model that no test changes."""
    return build(name, dtype=torch.float32)


@pytest.fixture(scope="module")
def llama():
    return build("Llama", num_hidden_layers=1, dtype=torch.float32)


@pytest.fixture
def enabled(llama):
    model = copy.deepcopy(llama)
    return model, enable_context_parallel(model, None)


# -- models, when they are enabled ------------------------------------------------------------------------------------


def rejects_enabling(says, model, group=None, **options):
    rejects(says, enable_context_parallel, model, group, **options)
    assert not any("cp_slot" in vars(module) for module in model.modules())


FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("module", "name", "changed", "text"),
    [
        ("jamba", "JambaForCausalLM", {"num_experts": 1, "attn_layer_offset": 1, "attn_layer_period": 2,
                                       "use_mamba_kernels": False}, "MambaMixer"),
        ("minimax", "MiniMaxForCausalLM", {"num_local_experts": 2, "head_dim": 16},
         "linear_attention|LightningAttention"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {"lru_width": 32}, "Recurrent"),
        ("phimoe", "PhimoeForCausalLM", {"sliding_window": 8, "num_local_experts": 2},
         "PhimoeAttention.*leaves the window"),
        ("qwen2_moe", "Qwen2MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
                                              **FEW_EXPERTS}, "Qwen2MoeAttention.*leaves the window"),
        ("moshi", "MoshiForCausalLM", {"sliding_window": 8, "ffn_dim": 64, "intermediate_size": None},
         "Moshi(Sdpa)?Attention.*leaves the window"),
        ("doge", "DogeForCausalLM", {}, "DogeAttention.*does not depend"),
        ("opt", "OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.2}, r"layerdrop: got 0\.2"),
        ("biogpt", "BioGptForCausalLM", {"layerdrop": 0.2}, r"layerdrop: got 0\.2"),
    ],
)  # fmt: skip
def test_rejects_classes_whose_layers_it_does_not_compute(module, name, changed, text):
    rejects_enabling(text, tiny(module, name, **changed))


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


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    [
        *((name, {"hidden_act": "gelu"}, "'gelu'; allowed: silu or swish")
          for name in ("Mamba2", "KimiLinear", "Bamba", "FalconH1", "GraniteMoeHybrid", "Qwen3Next")),
        ("NemotronH", {"mamba_hidden_act": "gelu"}, "'gelu'; allowed: silu or swish"),
        ("Llama4", {"num_hidden_layers": 1, "no_rope_layers": [0], "attn_temperature_tuning": True},
         "attn_temperature_tuning"),
        ("DeepseekV32", {"attention_dropout": 0.1}, r"attention_dropout: got 0\.1"),
    ],
)  # fmt: skip
def test_rejects_models_that_are_built_otherwise(name, changed, text):
    rejects_enabling(text, build(name, dtype=torch.float32, **changed))


def test_swish_is_silu():
    assert enable_context_parallel(build("Mamba2", dtype=torch.float32, hidden_act="swish"), None).slots


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("output_router_logits", True, "True"), ("output_attentions", True, "True"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "'dynamic'"),
        ("rope_parameters", {"full": {"rope_type": "default"}, "sliding": {"rope_type": "longrope"}}, "'longrope'"),
    ],
)  # fmt: skip
def test_rejects_values_of_the_configuration(llama, name, value, shown):
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    setattr(model.config, name, value)
    rejects_enabling(f"{name}: got {shown}", model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("Qwen3Next", {name: value}) for name, value in
          (("layout", "ring"), ("scheme", "rong"), ("linear_mode", "ring"), ("align", 0), ("transport", "ring"),
           ("codec", "fp3"), ("ulysses_degree", 0), ("head_chunks", 0), ("hardware", "abacus"))),
        ("Llama", {"latents": True}), ("DeepseekV32", {"scheme": "p2p"}), ("DeepseekV32", {"codec": "fp8"}),
        ("DeepseekV32", {"kernel": "reference"}),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_options(name, options):
    ((argument, value),) = options.items()
    rejects_enabling(rf"{argument}: got {value!r}; allowed", built(name), **options)


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
    ({"seq_lengths": [6, 7]}, "seq_lengths", r"documents of \[6, 7\].*Leave out what is not true"),
    ({"seq_idx": NUMBERS[:, :12]}, "seq_idx", r"\[1, 12\]"),
    ({"seq_idx": NUMBERS // 2}, "seq_idx", r"documents of \[6, 7\]"),
    ({"position_ids": torch.tensor([[*range(6), *range(7)]])}, "position_ids", r"\[6, 7\].*lengths's \[5, 1, 7\]"),
    ({"lengths": [13], "position_ids": NUMBERS * 0}, "position_ids", r"lengths's \[13\]"),
    ({"max_length_q": 6}, "max_length_q", "at least 7, the longest document of lengths"),
    ({"lengths": None, "max_length_q": 13, "position_ids": torch.arange(7, 20)[None]}, "position_ids", "say lengths"),
    *(
        ({name: value}, name, "cu_seq_lens_q if they are offsets")
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
    ({"lengths": None, "position_ids": torch.arange(7, 20)[None]}, "position_ids", "say lengths"),
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
    ({"output_router_logits": True}, "output_router_logits", "no shard has"),
    ({"cp_plans": object()}, "cp_plans", "planner"),
    ({"token_type_ids": torch.ones(1, 13, dtype=torch.int64)}, "token_type_ids", "see both ways"),
    ({"pixel_values": torch.ones(1, 13, 8)}, "pixel_values", "text alone"),
]


@pytest.mark.parametrize(("changed", "argument", "text"), REFUSED_BATCHES)
def test_rejects_batches(enabled, changed, argument, text):
    with pytest.raises(ArgumentError, match=text) as refused:
        enabled[1].shard(batch(**changed))
    assert refused.value.argument == argument


def test_rejects_what_is_no_batch_of_the_model(enabled):
    model, context = enabled
    rejects("batch: got .*sharded before.*Shard each batch once", context.shard, context.shard(batch()))
    rejects("a collator returns", context.shard, [TOKENS])
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
    with pytest.raises(ArgumentError, match=r"tensor on meta.*Shard the batch before it is moved") as refused:
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


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_forward_passes_what_a_call_in_it_has_as_a_name():
    """A text of that name is none, beside which the bytecode of Python 3.14 has the names of a call with `**kwargs`."""

    @pytest.mark.parametrize("window", [], ids=None)
    def reads(config, **kwargs):
        return dict(left=getattr(config, "window", None), **kwargs)

    without_source = eval("lambda config: dict(window=config, left=1)")
    assert [passes(reads, name) for name in ("left", "window", "ids")] == [True, False, False]
    assert [passes(without_source, name) for name in ("window", "right")] == [True, False]


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"output_attentions": True}, "in one place"), ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep"),
        ({"output_router_logits": True}, "no shard has"), ({"past_key_values": object()}, "no cache"),
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
        ("DeepseekV32", {"s_aux": 0.5}, "sink"), ("DeepseekV32", {"dropout": 0.5}, "dropout"),
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


def test_rejects_calls_of_a_model_that_was_not_enabled_and_rows_without_an_axis(enabled, llama):
    stranger = copy.deepcopy(llama)
    stranger.set_attn_implementation("megatron_cp")
    sharded = enabled[1].shard(batch())
    rejects("enable_context_parallel", stranger, **sharded)
    rejects(r"\[1, t, ...\]", enabled[1].gather, torch.zeros(13), sharded)


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
