"""`--model` of `plan` and `check`: all that a model's file says of its layers counts, unless an option replaces it."""

import json

import pytest

from megatron_cp.cli.main import main, parsed
from megatron_cp.cli.shapes import layers_of
from tests.commands import reported

MISTRAL = {
    "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64,
}  # fmt: skip
# Three layers of five have a window, all have sinks.
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_local_experts": 4,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
    "query_pre_attn_scalar": 64,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """Writes a configuration and returns the options that name it."""

    def write(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return ["--model", str(tmp_path / "config.json")]

    return write


LENGTHS = ["--lengths", "700,1,300"]


@pytest.mark.parametrize(("cp", "more"), [("3", []), ("2,4", []), ("2", ["--layout", "auto"])])
def test_a_window_of_the_model_is_planned_as_one_that_is_given(model, cp, more):
    own, given = (
        reported(["plan", "--cp", cp, *model(MISTRAL | window), *LENGTHS, *more, *mask])
        for window, mask in (({}, []), ({"sliding_window": None}, ["--mask", "window:64"]))
    )
    causal = reported(["plan", "--cp", cp, *model(MISTRAL | {"sliding_window": None}), *LENGTHS, *more])
    for data in (own[1], given[1], causal[1]):
        for each in (data, *data.get("sizes", {}).values()):
            each.pop("plan_ms")
    assert own[1] == given[1] != causal[1]
    assert "value-dim 16, window:63,0 (from --model)" in own[0]


def test_layers_of_several_masks_are_planned_each_in_one_layout(model):
    text, data = reported(["plan", "--cp", "3", *model(GPT_OSS), *LENGTHS])
    windowed, causal = data["kinds"]
    assert [kind["layers"] for kind in data["kinds"]] == [3, 2]
    alone = [
        reported(["plan", "--cp", "3", *model(GPT_OSS), *LENGTHS, "--mask", mask, "--layout", layout])[1]
        for mask, layout in (("window:8", "zigzag"), ("causal", "zigzag"))
    ]
    in_zigzag = reported(["plan", "--cp", "3", *model(GPT_OSS), *LENGTHS, "--layout", "zigzag"])[1]["kinds"]
    for kind, one in zip(in_zigzag, alone, strict=True):
        assert kind["predicted_ms"] == one["predicted_ms"]
    assert windowed["tokens_per_rank"] == causal["tokens_per_rank"]
    assert windowed["fragments_per_rank"] == causal["fragments_per_rank"]  # one batch has one layout
    assert windowed["schemes"]["exact"]["bytes_sent"] != causal["schemes"]["exact"]["bytes_sent"]
    total = sum(kind["layers"] * sum(kind["predicted_ms"].values()) for kind in data["kinds"])
    first = text.splitlines()[0]
    assert f"in 3 layers (window:7,0, learned sink), {causal['scheme']} in 2 layers (causal, learned sink)" in first
    assert f"in layout {windowed['layout']}, {total:.3f} ms predicted for all 5 on h100" in first
    assert text.count("layer: attention, heads 4") == 2


def test_sizes_are_compared_over_layers_of_several_masks(model):
    text, data = reported(["plan", "--cp", "2,3", *model(GPT_OSS), *LENGTHS])
    total = {
        int(cp): sum(kind["layers"] * sum(kind["predicted_ms"].values()) for kind in of["kinds"])
        for cp, of in data["sizes"].items()
    }
    fastest = min(total, key=total.get)
    assert text.startswith(f"fastest: cp {fastest} by ")
    assert f"{total[fastest]:.3f} ms predicted" in text.splitlines()[0]
    assert "these are times of all 5 layers" in text.splitlines()[1]


def test_given_options_replace_what_the_model_says_and_a_line_says_so(model):
    options = ["--mask", "window:9", "--no-learned-sink", "--softmax-scale", "0.5"]
    text, data = reported(["plan", "--cp", "2", *model(GPT_OSS), *LENGTHS, *options])
    assert "kinds" not in data
    (line,) = (line for line in text.splitlines() if line.startswith("as given: "))
    assert line == (
        "as given: --mask window:9 in place of the model's window:7,0 and causal; --no-learned-sink in place of the "
        "model's learned sink; --softmax-scale 0.5 in place of the model's head_dim ** -0.5"
    )
    same = reported(["plan", "--cp", "2", *model(MISTRAL), *LENGTHS, "--mask", "window:63,0"])[0]
    assert "as given" not in same


def test_check_runs_the_layers_of_the_model(model):
    small = ["--lengths", "30,7", "--cp", "2"]
    text, data = reported(["check", *model(GPT_OSS), *small, "--scheme", "exact"])
    assert "heads 4/2 window:7,0 sink float64" in text
    assert "heads 4/2 causal sink float64" in text
    assert data["cases"] == 2
    assert "d_sink" in data["max_rel_err"]
    text, data = reported(["check", *model(GEMMA2), *small, "--scheme", "p2p", "--mask", "causal"])
    assert "softcap 50 scale 0.125 float64" in text
    assert data["cases"] == 1
    text, data = reported(["check", *model(MISTRAL), *small, "--all", "--scheme", "exact", "--layout", "zigzag"])
    assert data["cases"] == 1  # the model's mask is given, as its heads are


@pytest.mark.parametrize("mode", ["expand", "absorb", "heads", "auto"])
def test_latents_of_the_model_travel_where_that_is_asked_for(model, mode):
    text, data = reported(["check", *model(DEEPSEEK), "--lengths", "30,7,1", "--cp", "3", "--latent-mode", mode])
    assert f"latents 8+4 {mode} float64" in text
    assert {"d_latent", "d_shared_key", "d_up"} < {*data["max_rel_err"]}
    options = ["--lengths", "9k,700", "--scheme", "p2p"]
    plain, latents = (
        reported(["plan", *model(DEEPSEEK), *options, *more])[1]["bytes_sent_per_rank"]["forward"]
        for more in ([], ["--cp-latent-mode", mode])
    )
    assert (sum(latents) < sum(plain)) == (mode in ("expand", "absorb", "auto"))


def test_plan_says_that_latents_do_not_travel_by_themselves(model):
    text, _ = reported(["plan", *model(DEEPSEEK), *LENGTHS])
    assert "latents: keys and values travel, made of 8 + 4 features a token" in text
    assert "latents:" not in reported(["plan", *model(DEEPSEEK), *LENGTHS, "--latent-mode", "expand"])[0]


FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --softmax-type {}"


def test_sinks_of_megatrons_flags_count():
    for kind, sink in (("vanilla", False), ("off-by-one", True), ("learnable", True)):
        (shape,) = layers_of(parsed(["plan", "--model", FLAGS.format(kind)]))
        assert shape.learned_sink == sink


@pytest.mark.parametrize("command", ["plan", "check"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--latent-mode", "expand"], "--latent-mode: got 'expand'; allowed: only with a --model whose keys"),
        (["--layer", "gdn", "--latent-mode", "expand"], "--latent-mode: got 'expand'; allowed: nothing, since gdn has"),
        (["--layer", "gdn", "--no-learned-sink"], None),
        (["--model", FLAGS.format("lernable")], "got 'lernable'; allowed: vanilla or off-by-one or learnable. Did you"),
    ],
)
def test_rejects_what_the_models_layers_do_not_have(command, options, says, capsys):
    status = main([command, "--lengths", "5,3", "--cp", "2", *options])
    assert (status == 2) == (says is not None)
    assert (says or "") in capsys.readouterr().err


TEXT = {
    "model_type": "qwen3_vl_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
QWEN3_VL = {
    "model_type": "qwen3_vl", "text_config": TEXT, "vision_config": {
        "depth": 2, "hidden_size": 24, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 4,
        "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
LLAVA = {
    "model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 3}, "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 16, "patch_size": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "images", "rows", "features"), [(QWEN3_VL, "2x8x8,1x4x12", 44, 2 * 64), (LLAVA, "2,1", 48, 4096)]
)
def test_the_tower_is_priced_beside_the_text(model, config, images, rows, features):
    options = ["plan", "--cp", "3", *model(config), *LENGTHS, "--layout", "zigzag"]
    plain, without = reported(options)
    text, data = reported([*options, "--images", images])
    tower = data.pop("tower")
    assert without.pop("tower") is None
    for each in (data, without):
        each.pop("plan_ms")
    assert data == without
    (line,) = (line for line in plain.splitlines() if line.startswith("tower:"))
    assert line == "tower: the model's vision tower is not priced; --images names the images of the batch"
    assert f"tower: 2 layers will make {rows} of the batch's tokens from 3 images or frames\n" in text
    assert sum(tower["rows_per_rank"]) == rows
    assert sum(tower["operations_per_rank"]) == tower["all_images_on_each_rank"]["operations"]
    assert tower["work_imbalance"] == 3 * max(tower["operations_per_rank"]) / sum(tower["operations_per_rank"])
    assert 0 < tower["predicted_ms"]["forward"] < tower["predicted_ms"]["backward"]
    assert all(sent % (2 * features) == 0 for sent in tower["exchange_bytes_sent_per_rank"])
    assert 0 < sum(tower["exchange_bytes_sent_per_rank"]) <= rows * features * 2
    assert tower["images_split"] == 0


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (QWEN3_VL, ["1x8x7"], "--images: got '1x8x7'; allowed: frames x rows x columns, the last two multiples of 2"),
        (QWEN3_VL, ["4"], "--images: got '4'; allowed: frames x rows x columns"),
        (QWEN3_VL, ["1x8x0"], "--images: got '0'; allowed: integers from 1"),
        (QWEN3_VL, ["9x64x64"], "--images: got '9216 rows'; allowed: at most the 1001 tokens of the batch."),
        (QWEN3_VL, ["1x8x8", "--cp", "2,4"], "--images: got '1x8x8'; allowed: only with one --cp"),
        (QWEN3_VL, ["1x8x8", "--parents", "-1,0,0"], "--images: got '1x8x8'; allowed: only without --parents"),
        (QWEN3_VL, ["1x8x8", "--whole"], "--images: got '1x8x8'; allowed: only without --whole"),
        (LLAVA, ["1x4x4"], "--images: got '1x4x4'; allowed: a number of images: those of llava have one size"),
        (MISTRAL, ["1x8x8"], "--images: got '1x8x8'; allowed: only with the config.json of a --model of the types"),
        (None, ["1x8x8"], "--images: got '1x8x8'; allowed: only with --model"),
    ],
)  # fmt: skip
def test_rejects_images_that_cannot_be_priced(model, config, options, says, capsys):
    named = [] if config is None else model(config)
    assert main(["plan", *LENGTHS, *named, "--images", *options]) == 2
    assert says in capsys.readouterr().err
