"""Tests of the refusals of the adapter for transformers: models, batches and calls that it would compute wrongly."""

import copy

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import ContextParallel, enable_context_parallel, token_log_probs
from megatron_cp.transformers.attention import planned_attention
from megatron_cp.transformers.sources import passes
from tests.refusals import rejects
from tests.transformers_cases import LENGTHS, TOKENS, batch, build

NUMBERS = torch.tensor([[0] * 5 + [1] + [2] * 7])  # of each token's document


@pytest.fixture(scope="module")
def llama():
    return build("Llama", num_hidden_layers=1, dtype=torch.float32)


@pytest.fixture
def enabled(llama):
    model = copy.deepcopy(llama)
    return model, enable_context_parallel(model, None)


@pytest.mark.parametrize(
    "said",
    [
        {"lengths": LENGTHS},
        {"lengths": torch.tensor(LENGTHS)},
        {"seq_lengths": np.array(LENGTHS)},
        {"cu_seq_lens_q": torch.tensor([0, 5, 6, 13], dtype=torch.int32), "max_length_q": 7},
        {"cu_seq_lens_k": [0, 5, 6, 13], "max_length_k": 7},
        {"seq_idx": NUMBERS},
        {"attention_mask": NUMBERS + 1},
        {"cu_seq_lens_q": [0, 5, 6, 13], "cu_seq_lens_k": [0, 5, 6, 6, 13], "seq_idx": NUMBERS,
         "attention_mask": NUMBERS + 1, "lengths": LENGTHS,
         "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]])},
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]])},
        {"lengths": LENGTHS, "attention_mask": torch.ones(1, 13, dtype=torch.int64)},
    ],
)  # fmt: skip
def test_documents_are_told_from_what_collators_say(enabled, said):
    found = enabled[1].shard({"input_ids": TOKENS, "labels": TOKENS, **said})
    assert found.layout.packing.lengths.tolist() == LENGTHS
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]]
    assert found["labels"].tolist() == [[4, 5, 6, 7, -100, -100, 10, 11, 12, 13, 14, 15, -100]]
    assert found.num_items == 10
    assert {"lengths", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "attention_mask"}.isdisjoint(found)


def test_positions_that_count_through_documents_and_other_values_are_left_alone(enabled):
    said = {
        "position_ids": torch.arange(13)[None],
        "shown": [0, 5, 9],
        "names": ("a", "b"),
        "scale": 2,
        "flags": [True],
    }
    found = enabled[1].shard(batch(**said, labels=None))
    assert found.layout.packing.lengths.tolist() == LENGTHS
    assert found["position_ids"].tolist() == said["position_ids"].tolist()
    assert [found[name] for name in ("shown", "names", "scale", "flags")] == [[0, 5, 9], ("a", "b"), 2, [True]]


def test_numbers_for_each_token_go_beside_the_tokens(enabled):
    model, context = enabled
    extra = {"loss_weights": torch.rand(1, 13), "teacher": torch.rand(1, 13, 4)}
    rows = context.shard(batch(**extra))
    assert torch.equal(model(**rows).logits, model(**context.shard(batch())).logits)
    assert all(torch.equal(rows[name], value) for name, value in extra.items())


def test_without_lengths_a_row_is_one_document_and_shifted_labels_stay(enabled):
    found = enabled[1].shard({"input_ids": TOKENS})
    assert found.layout.packing.lengths.tolist() == [13]
    assert "labels" not in found
    assert found.num_items == 0
    shifted = torch.full((1, 13), -100)
    shifted[0, 3] = 8
    found = enabled[1].shard({"input_ids": TOKENS, "lengths": LENGTHS, "shift_labels": shifted})
    assert torch.equal(found["labels"], shifted)
    assert found.num_items == 1


def test_pad_rows_predict_nothing_and_options_reach_the_batch(llama):
    context = enable_context_parallel(copy.deepcopy(llama), None, align=8, kernel="reference")
    shifted = TOKENS.clone()
    shifted[0, 2] = -100
    found = context.shard({"input_ids": TOKENS, "lengths": LENGTHS, "shift_labels": shifted})
    assert found["cp_batch"].kernel == "reference"
    assert found["shift_labels"].tolist() == [[*shifted[0].tolist(), -100, -100, -100]]
    assert found.num_items == 12


def test_temperature_divides_logits(enabled):
    sharded, logits = enabled[1].shard(batch()), torch.randn(1, 13, 97, dtype=torch.float64)
    chosen = token_log_probs(logits, sharded, temperature=2.5)
    expected = -nn.functional.cross_entropy(logits[0] / 2.5, sharded["labels"][0], reduction="none")
    assert (chosen[0] - expected).abs().max() < 1e-12
    assert (chosen - token_log_probs(logits, sharded)).abs().max() > 0.1
    assert torch.equal(token_log_probs(logits, sharded, temperature=torch.tensor(2.5)), chosen)
    of_rows = torch.linspace(0.5, 3, 13, dtype=torch.float64)[None]
    chosen = token_log_probs(logits, sharded, temperature=of_rows)
    divided = logits[0] / of_rows[0, :, None]
    expected = -nn.functional.cross_entropy(divided, sharded["labels"][0], reduction="none")
    assert (chosen[0] - expected).abs().max() < 1e-12


def test_positions_of_several_axes_and_values_of_each_token_are_dealt(llama):
    positions, weights = torch.arange(39).reshape(3, 1, 13), torch.rand(1, 13, 2)

    def main(group):
        context = enable_context_parallel(copy.deepcopy(llama), group, layout="zigzag")
        found = context.shard(batch(position_ids=positions, token_weights=weights, return_dict=True))
        axes = torch.stack([context.gather(axis, found)[0] for axis in found["position_ids"]])
        return axes, context.gather(found["token_weights"], found), found["return_dict"]

    axes, dealt, passed = run_ranks(main, 2)[0]
    assert torch.equal(axes, positions[:, 0])
    assert torch.equal(dealt, weights)
    assert passed is True


REFUSED_BATCHES = [
    ({"input_ids": torch.ones(2, 13, dtype=torch.int64)}, "input_ids", "2 rows"),
    ({"input_ids": torch.ones(13, dtype=torch.int64)}, "input_ids", r"\[13\]"),
    ({"input_ids": torch.ones(1, 13)}, "input_ids", "float32"),
    ({"input_ids": [[1, 2]]}, "input_ids", "token ids"),
    ({"attention_mask": torch.tensor([[1] * 12 + [0]])}, "attention_mask", "zeros in it"),
    ({"attention_mask": torch.ones(1, 1, 13, 13)}, "attention_mask", r"\[1, 1, 13, 13\]"),
    ({"attention_mask": torch.ones(1, 12)}, "attention_mask", r"\[1, 12\]"),
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
            ("ends", [0, 5, 13]),
            ("ends", torch.tensor([0, 5, 13])),
            ("ends", np.array([0, 13])),
        )
    ),
    ({"lengths": [5, 9]}, "lengths", "documents of 14 tokens"),
    ({"lengths": [0, 5, 13]}, "lengths", "documents of 18 tokens.*name them cu_seq_lens_q"),
    ({"lengths": [5.0, 8.0]}, "lengths", "integers"),
    ({"lengths": None, "cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q", "documents of 5 tokens"),
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


def test_rejects_a_batch_that_was_sharded(enabled):
    rejects("batch: got .*sharded before.*Shard each batch once", enabled[1].shard, enabled[1].shard(batch()))


def test_rejects_batches_of_other_documents_and_losses_that_shift(enabled):
    rejects("a collator returns", enabled[1].shard, [TOKENS])
    rejects("this batch's documents", enabled[1].shard, batch(cp_plans=enabled[1].planner([6, 7])))
    model, context = enabled
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    rejects("takes shift_labels", context.shard, batch())
    context.shard({"input_ids": TOKENS})  # without labels it is not called


@pytest.mark.parametrize("name", ["lengths", "cu_seq_lens_q", "position_ids", "attention_mask", "input_ids", "labels"])
def test_rejects_what_is_on_a_device(enabled, name):
    on_device = torch.zeros(1, 13, dtype=torch.int64, device="meta")
    with pytest.raises(ArgumentError, match=r"tensor on meta.*Shard the batch before it is moved") as refused:
        enabled[1].shard(
            batch(**({} if name == "lengths" else {"lengths": None}), **{name: on_device})
            if name in ("cu_seq_lens_q", "position_ids")
            else batch(**{name: on_device})
        )
    assert refused.value.argument == name


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_rejects_seeds(enabled, seed):
    rejects("seed", enabled[1].shard, batch(), seed=seed)


def test_ranks_with_other_batches_are_told(llama):
    def main(group):
        context = enable_context_parallel(copy.deepcopy(llama), group)
        with pytest.raises(cp.PlanMismatchError):
            context.shard(batch(input_ids=TOKENS + group.rank))

    run_ranks(main, 2)


def test_rejects_models_that_are_wrapped_or_enabled_and_groups(llama, enabled):
    for wrapped in (torch.compile(llama), nn.Sequential(llama), object()):
        rejects("before fully_shard", enable_context_parallel, wrapped, None)
    rejects("once", enable_context_parallel, enabled[0], None)
    rejects("group", enable_context_parallel, llama, "cp")
    model = copy.deepcopy(llama)
    model.model.layers[0].self_attn.is_causal = False
    rejects("is_causal=False", enable_context_parallel, model, None)


@pytest.mark.parametrize("name", ["output_router_logits", "output_attentions"])
def test_rejects_outputs_of_the_configuration(llama, name):
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    setattr(model.config, name, True)
    rejects(name, enable_context_parallel, model, None)


_OPTIONS = [
    ("layout", "ring"), ("scheme", "rong"), ("linear_mode", "ring"), ("align", 0), ("transport", "ring"),
    ("codec", "fp3"), ("ulysses_degree", 0), ("head_chunks", 0), ("hardware", "abacus"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), _OPTIONS)
def test_rejects_options(argument, value):
    model = build("Qwen3Next", num_hidden_layers=4, dtype=torch.float32)
    with pytest.raises(ArgumentError):
        enable_context_parallel(model, None, **{argument: value})


def test_rejects_unknown_mixers():
    from transformers.models import jamba, minimax, recurrent_gemma

    tiny = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 2, "num_hidden_layers": 2}  # fmt: skip
    models = {
        "MambaMixer": jamba.JambaForCausalLM(jamba.JambaConfig(**tiny, num_experts=1, attn_layer_offset=1,
                                                              attn_layer_period=2, use_mamba_kernels=False)),
        "linear_attention|LightningAttention": minimax.MiniMaxForCausalLM(
            minimax.MiniMaxConfig(**tiny, num_local_experts=2, head_dim=16)
        ),
        "Recurrent": recurrent_gemma.RecurrentGemmaForCausalLM(
            recurrent_gemma.RecurrentGemmaConfig(**tiny, lru_width=32)
        ),
    }  # fmt: skip
    for text, model in models.items():
        rejects(text, enable_context_parallel, model, None)
        assert not any("cp_slot" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "longrope"}},
    ],
)
def test_rejects_phases_that_depend_on_the_longest_position(llama, rope):
    model = copy.deepcopy(llama)
    model.config.rope_parameters = rope
    rejects(r"rope_parameters: got '(dynamic|longrope)'", enable_context_parallel, model, None)


def test_rejects_temperatures_by_the_number_of_the_row():
    model = build("Llama4", num_hidden_layers=1, no_rope_layers=[0], attn_temperature_tuning=True, dtype=torch.float32)
    rejects("attn_temperature_tuning", enable_context_parallel, model, None)


def test_a_forward_passes_what_a_call_in_it_has_as_a_name():
    """A text of that name is none, beside which the bytecode of Python 3.14 has the names of a call with `**kwargs`."""

    @pytest.mark.parametrize("window", [], ids=None)
    def reads(config, **kwargs):
        return dict(left=getattr(config, "window", None), **kwargs)

    without_source = eval("lambda config: dict(window=config, left=1)")
    assert [passes(reads, name) for name in ("left", "window", "ids")] == [True, False, False]
    assert [passes(without_source, name) for name in ("window", "right")] == [True, False]


@pytest.mark.parametrize(("name", "window"), [("Llama", 4), ("Mistral", None), ("Mistral", 15), ("Llama4", 16)])
def test_rejects_another_window_in_a_call(name, window):
    model = build(name, dtype=torch.float32)
    sharded = enable_context_parallel(model, None).shard(batch())
    heads = torch.zeros(1, 6, 13, 16)
    attend = next(module for module in model.modules() if hasattr(module, "cp_slot"))
    with pytest.raises(ArgumentError, match="sliding_window"):
        planned_attention(attend, heads, heads, heads, None, sliding_window=window, cp_batch=sharded["cp_batch"])


def test_rejects_a_bias_a_mask_and_a_cache_in_a_call(enabled):
    attend = enabled[0].model.layers[0].self_attn
    heads = torch.zeros(1, 6, 13, 16)
    options = {"cp_batch": enabled[1].shard(batch())["cp_batch"], "position_bias": torch.zeros(1, 6, 13, 13)}
    rejects("position_bias", planned_attention, attend, heads, heads, heads, None, **options)
    rejects("is_causal", planned_attention, attend, heads, heads, heads, None, **options, is_causal=False)
    model, context = enabled
    attend = model.model.layers[0].self_attn
    sharded = context.shard(batch())
    with pytest.raises(ArgumentError, match="attention_mask"):
        attend(
            torch.zeros(1, 13, 48), (torch.ones(1, 13, 16),) * 2, torch.ones(1, 1, 13, 13), cp_batch=sharded["cp_batch"]
        )
    model = build("Mamba2", num_hidden_layers=1, dtype=torch.float32)
    context = enable_context_parallel(model, None)
    sharded = context.shard(batch())
    with pytest.raises(ArgumentError, match="cache_params"):
        model.backbone.layers[0].mixer(torch.zeros(1, 13, 48), cache_params=object(), cp_batch=sharded["cp_batch"])


def test_rejects_calls_without_a_planned_batch_or_of_a_model_that_was_not_enabled(enabled, llama):
    rejects("cp_batch", enabled[0], input_ids=TOKENS)
    stranger = copy.deepcopy(llama)
    stranger.set_attn_implementation("megatron_cp")
    rejects("enable_context_parallel", stranger, **enabled[1].shard(batch()))
    sharded = enabled[1].shard(batch())
    rejects(r"\[1, t, ...\]", enabled[1].gather, torch.zeros(13), sharded)


def test_rejects_dropout_without_a_seed():
    model = build("Llama", num_hidden_layers=1, attention_dropout=0.5, dtype=torch.float32)
    context = enable_context_parallel(model, None)
    rejects("seed=step", model, **context.shard(batch()))
    same = [model(**context.shard(batch(), seed=3)).logits for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], model(**context.shard(batch(), seed=4)).logits)
    model.eval()
    model(**context.shard(batch()))


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


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2"])
def test_disabled_is_the_stock_model(name):
    model = build(name, dtype=torch.float32).eval()
    kinds = [type(module) for module in model.modules()]
    before = model(input_ids=TOKENS, use_cache=False).logits
    keys = list(model.state_dict())
    context = enable_context_parallel(model, None)
    assert list(model.state_dict()) == keys
    ours = [type(module) for module in model.modules()]
    assert ours != kinds
    with context.disabled(), context.disabled():
        assert [type(module) for module in model.modules()] == kinds
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
        with context.disabled():
            pass
        assert model.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (1, 15)
    assert [type(module) for module in model.modules()] == ours
    after = model(**context.shard({"input_ids": TOKENS})).logits
    assert (after - before).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2"])
def test_a_model_that_is_enabled_can_be_pickled_and_copied(name, tmp_path):
    model = build(name, dtype=torch.float32).eval()
    rows = enable_context_parallel(model, None).shard({"input_ids": TOKENS, "lengths": LENGTHS})
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(other(**rows).logits, model(**rows).logits)


def test_explains_plans_and_a_batch_can_be_made_again_of_its_arguments(enabled):
    sharded = enabled[1].shard(batch())
    moved = type(sharded)(dict(sharded.items()))
    assert (moved.num_items, moved.layout, moved.plans) == (10, sharded.layout, sharded.plans)
    context = enabled[1]
    assert isinstance(context, ContextParallel)
    assert "model.layers.0.self_attn: AttentionSpec" in context.explain()
    assert "attention by a2a over 1 rank: 3 documents, 13 tokens" in context.explain(context.shard(batch()))


def rejects_no_group_and_is_disabled_after_fully_shard(group):
    model = build("Mamba2", dtype=torch.float32).eval()
    before = model(input_ids=TOKENS, use_cache=False).logits
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    rejects("2 dimensions", enable_context_parallel, model, square)
    for takes_a_group in (enable_context_parallel, cp.reduce_gradients):
        rejects(r"world of 2 ranks.*dist\.group\.WORLD", takes_a_group, model, None)
    context = enable_context_parallel(model, mesh := square["cp"])
    assert (context.cp_size, context.rank) == (2, group.rank)
    for block in model.backbone.layers:
        fully_shard(block.mixer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours = [type(module) for module in model.modules()]
    rows = context.shard({"input_ids": TOKENS, "lengths": LENGTHS})
    first = model(**rows).logits
    with context.disabled():
        off = (model(input_ids=TOKENS, use_cache=False).logits - before).abs().max().item()
    return off, torch.equal(model(**rows).logits, first), [type(module) for module in model.modules()] == ours


def test_rejects_no_group_and_is_disabled_after_fully_shard():
    for off, is_same, is_back in run_ranks(
        rejects_no_group_and_is_disabled_after_fully_shard, 2, kind="processes", timeout=120
    ):
        assert off < 1e-5
        assert is_same
        assert is_back


def test_vision_towers_stay_on_their_own_attention():
    from transformers.models import clip, llama, llava

    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = llava.LlavaConfig(
        vision_config=clip.CLIPVisionConfig(**tiny, image_size=8, patch_size=4),
        text_config=llama.LlamaConfig(**tiny, num_key_value_heads=2, vocab_size=97),
    )
    model = llava.LlavaForConditionalGeneration(config).eval()
    before = model(input_ids=TOKENS, use_cache=False).logits
    context = enable_context_parallel(model, None)
    assert len(context.slots) == 2
    assert model.config.text_config._attn_implementation == "megatron_cp"
    assert model.config.vision_config._attn_implementation != "megatron_cp"
    after = model(**context.shard({"input_ids": TOKENS})).logits
    assert (after - before).abs().max() < 1e-5
