"""Models by Megatron's flags; `test_megatron_parameters.py` compares them with Megatron's own."""

import pytest

from megatron_cp.apps.estimate.megatron_flags import read_flags
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.errors import ArgumentError

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --swiglu --vocab-size 128256 --untie-embeddings-and-output-weights --disable-bias-linear "
)
NEMOTRON = (
    "--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size 4096 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --ffn-hidden-size 21504 "
    "--squared-relu --mamba-num-heads 128 --vocab-size 131072 --untie-embeddings-and-output-weights "
    "--disable-bias-linear"
)
QWEN = (
    "--num-layers 48 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 2 "
    "--kv-channels 256 --ffn-hidden-size 5120 --swiglu --vocab-size 151936 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --qk-layernorm --attention-output-gate --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --make-vocab-size-divisible-by 128 "
)
SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 "


def vocabulary(model):
    return model.vocab_size


def masks(model):
    return [slot.mask for slot in model.slots()]


@pytest.mark.parametrize(
    ("flags", "name"), [(LLAMA, "llama3-8b"), (NEMOTRON, "nemotron-h"), (QWEN, "qwen3-next")], ids=lambda x: x[:9]
)
def test_presets_can_be_said_in_flags(flags, name):
    model, preset = read_flags(flags), PRESETS[name]
    assert model.blocks == preset.blocks
    assert (model.parameters, model.tied_embeddings) == (preset.parameters, False)


def test_flags_are_read_as_megatron_spells_them_and_others_are_named():
    quoted = LLAMA.replace("--num-layers 32", "'--num-layers=32'").replace("--hidden-size", "--hidden_size")
    assert read_flags(quoted).blocks == read_flags(LLAMA).blocks
    assert len(read_flags(LLAMA + "--num-layers 7").blocks) == 7  # the last of two
    assert read_flags(LLAMA).from_megatron
    model = read_flags(LLAMA + "--lr 1e-4 --seed -1 --data-path 0.5 a 0.5 b --bf16 --lr 2")
    assert model.source == "Megatron's flags; not read: --lr --seed --data-path --bf16"
    assert model.blocks == PRESETS["llama3-8b"].blocks
    assert read_flags(LLAMA + "--tensor-model-parallel-size 2").source.endswith(": --tensor-model-parallel-size")


def mlp(model):
    return [(block.mlp.intermediate_size, block.mlp.gated, block.mlp.bias) for block in model.blocks[:1]]


def kv_heads(model):
    return model.blocks[0].mixer.kv_heads


def experts(model):
    return "".join("E" if block.mlp.experts else "-" for block in model.blocks)


def layers(model):
    return "".join("*" if block.mixer.layer == "attention" else "G" for block in model.blocks)


MIXTURE = "--num-experts 4 --moe-layer-freq "
GDN = "--experimental-attention-variant gated_delta_net --linear-attention-freq "


@pytest.mark.parametrize(
    ("more", "read", "expected"),
    [
        ("", vocabulary, 1024), ("--make-vocab-size-divisible-by 7", vocabulary, 1001),
        ("--padded-vocab-size 1500", vocabulary, 1500), ("--tensor-model-parallel-size 8", vocabulary, 1024),
        ("--tensor-model-parallel-size 16", vocabulary, 2048),
        ("", mlp, [(256, False, True)]), ("--swiglu", mlp, [(128, True, True)]),
        ("--ffn-hidden-size 80", mlp, [(80, False, True)]), ("--quick-geglu", mlp, [(256, True, True)]),
        ("--num-query-groups 2", kv_heads, 4), ("--num-query-groups 2 --group-query-attention", kv_heads, 2),
        ("--window-size 127,0", masks, ["window:127,0"] * 4), ("--window-size '(127, 0)'", masks, ["window:127,0"] * 4),
        ("--window-size 127 0", masks, ["window:127,0"] * 4), ("--window-size -1 0", masks, ["causal"] * 4),
        ("--window-size -1,0", masks, ["causal"] * 4),
        ("--window-size 9,0 --window-attn-skip-freq 2", masks, ["window:9,0", "causal"] * 2),
        ("--window-size 9,0 --window-attn-skip-freq [1]*3+[0]", masks, ["window:9,0"] * 3 + ["causal"]),
        (MIXTURE + "1", experts, "EEEE"), (MIXTURE + "2", experts, "E-E-"), (MIXTURE + "3", experts, "E--E"),
        (MIXTURE + "[1,0]*2", experts, "E-E-"), (MIXTURE + "[0]+[1]*3", experts, "-EEE"),
        (MIXTURE + "2*([0]+[1])", experts, "-E-E"),
        (GDN + "2", layers, "G*G*"), (GDN + "4", layers, "GGG*"), (GDN + "1", layers, "****"),
        (GDN + "[0,1,1,0]", layers, "*GG*"), (GDN.replace("gated_delta_net", "gdn") + "2", layers, "G*G*"),
    ],
)  # fmt: skip
def test_flags_are_read_with_megatrons_defaults(more, read, expected):
    assert read(read_flags(SMALL + more)) == expected


def test_sizes_that_are_not_given_are_megatrons():
    model = read_flags("--hybrid-layer-pattern M|M --hidden-size 512 --vocab-size 10")
    assert [(slot.heads, slot.key_heads, slot.head_dim, slot.value_head_dim) for slot in model.slots()] == [
        (16, 8, 128, 64)
    ] * 2
    mixer = read_flags(SMALL + "--multi-latent-attention").blocks[0].mixer
    sizes = (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.value_head_dim, mixer.kv_rank, mixer.shared_key_dim)
    assert sizes == (4, 4, 192, 128, 32, 64)
    assert (mixer.query_rank, mixer.qk_norm) == (None, False)


PATTERN = "allowed: a list of 0 and 1 such as [1]*3+[0]"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-expert 8 " + SMALL, "got '--num-expert'; allowed: flags of Megatron. Did you mean --num-experts?"),
        ("--num-layers", "--num-layers: got None; allowed: one value"),
        ("num-layers 4 --hidden-size 64", "model: got 'num-layers'; allowed: flags, which begin with --"),
        ("--num-layers 4 5", "--num-layers: got '4 5'; allowed: one value"),
        ("--num-layers four", "--num-layers: got 'four'; allowed: an integer"),
        ("--num-layers 100000000 --hidden-size 64", "--num-layers: got 100000000; allowed: an integer from 1 to 10000"),
        ("--swiglu yes", "--swiglu: got 'yes'; allowed: no value"),
        ("--num-layers 4 --hidden-size 64", "--num-attention-heads: got None"),
        ("--num-layers 4 --num-attention-heads 4", "--hidden-size: got None"),
        (SMALL.replace("1000", "0"), "--vocab-size: got 0; allowed: an integer of at least 1"),
        (SMALL.replace("64", "65"), "--num-attention-heads: got 4; allowed: a divisor of 65. Or give --kv-channels."),
        (SMALL + "'--swiglu", "flags with closed quotes"),
        (SMALL + "--group-query-attention --num-query-groups 3", "kv_heads: got 3; allowed: a divisor of heads"),
        (SMALL + "--moe-latent-size 32", "--moe-latent-size: got 'the flag'; allowed: models without it"),
        (SMALL + "--mtp-num-layers 1", "--mtp-num-layers: got 'the flag'"),
        (SMALL + "--experimental-attention-variant dsa", "variant: got 'dsa'; allowed: gated_delta_net or gdn"),
        (SMALL + "--experimental-attention-variant gated_delta_net", "--linear-attention-freq: got None"),
        (SMALL + "--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq: got 0; allowed: an integer of at least 1"),
        (SMALL + "--num-experts 4 --moe-layer-freq [1]*3", "allowed: 0 or 1 for each of the 4 layers"),
        (SMALL + "--num-experts 4 --moe-layer-freq [2]*4", "allowed: 0 or 1 for each of the 4 layers"),
        (SMALL + "--num-experts 4 --moe-layer-freq [1]*1000000000", PATTERN),
        (SMALL + "--num-experts 4 --moe-layer-freq [1]*2*[2]", PATTERN),
        (SMALL + "--num-experts 4 --moe-layer-freq [1.0]*4", PATTERN),
        (SMALL + "--num-experts 4 --moe-layer-freq [1", PATTERN),
        (SMALL + "--num-experts 4 --moe-layer-freq exit(0)", PATTERN),
        (SMALL + "--num-experts 4 --moe-router-topk 5", "experts_per_token: got 5; allowed: an integer from 1 to 4"),
        (SMALL + "--window-size 9,9", "--window-size: got '9,9'; allowed: LEFT,0"),
        (SMALL + "--window-size 9 0 1", "--window-size: got '9 0 1'; allowed: two values, or both in one"),
        (SMALL + "--window-size", "--window-size: got None; allowed: two values, or both in one"),
        (SMALL + "--hybrid-layer-pattern MM/M", "--hybrid-layer-pattern: got 'MM/M'; allowed: a pattern without /"),
        (SMALL + "--hybrid-layer-pattern *X", "layer-pattern[1]: got 'X'; allowed: M or G or * or + or - or E"),
        (SMALL + "--hybrid-layer-pattern ''", "blocks: got 0; allowed: an integer from 1"),
        (SMALL + "--hybrid-layer-pattern M --hybrid-override-pattern M", "nothing together with --hybrid-layer"),
        (SMALL + "--hybrid-layer-pattern E", "--num-experts: got None"),
    ],
)
def test_rejects_flags_that_make_no_model(flags, message):
    with pytest.raises(ArgumentError) as error:
        read_flags(flags)
    assert message in str(error.value)
