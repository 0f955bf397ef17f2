"""`read_flags`: reads a model from the flags of Megatron's training scripts. No torch and no Megatron in here."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from dataclasses import replace

from megatron_cp.apps.estimate.mixers import AttentionMixer, LinearMixer, gated_delta_net, mamba2
from megatron_cp.apps.estimate.model_fields import Fields, chosen_blocks
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.models import MAX_LAYERS, ModelSpec
from megatron_cp.errors import ArgumentError
from megatron_cp.planner import did_you_mean

_SIZES = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
    "--kv-channels", "--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by",
    "--tensor-model-parallel-size", "--mamba-state-dim", "--mamba-head-dim", "--mamba-num-groups",
    "--mamba-num-heads", "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size", "--linear-conv-kernel-dim", "--linear-key-head-dim",
    "--linear-value-head-dim", "--linear-num-key-heads", "--linear-num-value-heads", "--q-lora-rank",
    "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--mtp-num-layers",
)  # fmt: skip
_SWITCHES = (
    "--group-query-attention", "--swiglu", "--quick-geglu", "--untie-embeddings-and-output-weights",
    "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm", "--attention-output-gate",
    "--multi-latent-attention", "--moe-shared-expert-gate",
)  # fmt: skip
_WORDS = (
    "--hybrid-layer-pattern", "--hybrid-override-pattern", "--experimental-attention-variant",
    "--linear-attention-freq", "--moe-layer-freq", "--window-size", "--window-attn-skip-freq", "--softmax-type",
)  # fmt: skip
_PADS = "--tensor-model-parallel-size"  # is read for the padded vocabulary; the degree of a job is --tp
_READ = (*_SIZES, *_SWITCHES, *_WORDS)
_PAIRS = ("--window-size",)  # Megatron takes these as one word, newer versions as two
# Flags that change the model in ways that are not known here.
_REFUSED = (
    "--moe-latent-size", "--mtp-hybrid-override-pattern", "--encoder-num-layers", "--decoder-num-layers",
    "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json", "--yaml-cfg",
    "--use-checkpoint-args",
)  # fmt: skip
_VARIANTS = ("gated_delta_net", "gdn")  # two names of one layer; main and dev call the first deprecated


def read_flags(text: str) -> ModelSpec:
    """Returns the model that Megatron-core 0.19 builds from these flags.

    Flags that do not shape a model, such as --lr, are left out, and named in the model's `source`. Without
    `--disable-bias-linear` projections have biases, as in Megatron; the vocabulary is padded as Megatron pads it.

    Args:
        text: flags with their values, as on a command line.

    Raises:
        ArgumentError: a flag that seems to be misspelled, has a wrong value, or makes a model that is not known here.

    Example:
        >>> read_flags("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000").vocab_size
        1024
    """
    given, others = _parsed(text)
    for flag in (*_REFUSED, *(["--mtp-num-layers"] if given.get("--mtp-num-layers") else [])):
        if flag in given or flag in others:
            raise ArgumentError(
                flag, "the flag", "models without it", f"Leave out {flag}, and what it adds to the model."
            )
    patterns = [flag for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern") if flag in given]
    if len(patterns) > 1:
        raise ArgumentError(patterns[1], given.get(patterns[1]), f"nothing together with {patterns[0]}")
    blocks = _hybrid(given, patterns[0]) if patterns else _transformer(given)
    source = "Megatron's flags" + (f"; not read: {' '.join(others)}" if others else "")
    tied = not given.flag("--untie-embeddings-and-output-weights")
    sizes = given.size("--hidden-size"), _vocab_size(given)
    return ModelSpec("megatron", *sizes, tied, blocks, source, from_megatron=True)


def _parsed(text: str) -> tuple[Fields, list[str]]:
    """Returns the values of the flags that shape a model, and the names of the others."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentError("model", text, f"flags with closed quotes ({error})") from None
    values: dict[str, object] = {}
    others: list[str] = []
    for flag, given in flags_in(words):
        if flag in _SWITCHES:
            if given:
                raise ArgumentError(flag, " ".join(given), "no value")
            values[flag] = True
        elif flag in _READ:
            others += [flag] * (flag == _PADS)
            if flag in _PAIRS and len(given) == 2:
                given = [",".join(given)]
            if len(given) != 1:
                allowed = "two values, or both in one with a comma" if flag in _PAIRS else "one value"
                raise ArgumentError(flag, " ".join(given) or None, allowed)
            values[flag] = _integer(flag, given[0]) if flag in _SIZES else given[0]
        else:
            remedy = did_you_mean(flag, _READ, alike=0.9)
            if remedy:
                raise ArgumentError("model", flag, "flags of Megatron", remedy)
            others += [flag] if flag not in others else []
    return Fields(values), others


def flags_in(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields every flag, in Megatron's spelling with hyphens, with its values."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    if words and (not starts or starts[0]):
        raise ArgumentError("model", words[0], "flags, which begin with --")
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        name, equals, value = words[start].partition("=")
        yield name.replace("_", "-"), ([value] if equals else []) + words[start + 1 : end]


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(flag, text, "an integer") from None


def _vocab_size(given: Fields) -> int:
    if "--padded-vocab-size" in given:
        return given.size("--padded-vocab-size")
    parts = given.size("--make-vocab-size-divisible-by", 128) * given.size("--tensor-model-parallel-size", 1)
    return -(-given.size("--vocab-size") // parts) * parts


# -- layers ------------------------------------------------------------------------------------------------------------


def _transformer(given: Fields) -> tuple[Block, ...]:
    """Returns the layers of GPTModel: attention or a linear layer, followed by an MLP or a mixture."""
    layers = given.size("--num-layers", most=MAX_LAYERS)
    variant = given.get("--experimental-attention-variant")
    if variant not in (None, *_VARIANTS):
        remedy, allowed = did_you_mean(variant, _VARIANTS), f"{' or '.join(_VARIANTS)}, or none"
        raise ArgumentError("--experimental-attention-variant", variant, allowed, remedy)
    linear = None
    is_linear = [False] * layers
    if variant:
        linear = _gated_delta_net(given)
        # The last of so many layers attends; without a number there is no default.
        is_linear = _pattern(given, "--linear-attention-freq", layers, None, last=True)
    windowed, slides = _window(given), [False] * layers
    if windowed is not None:
        slides = [True] * layers
        if "--window-attn-skip-freq" in given:
            slides = _pattern(given, "--window-attn-skip-freq", layers, None, last=True)
    mixer = _latent(given) if given.flag("--multi-latent-attention") else _attention(given)
    sliding = replace(mixer, mask=windowed) if windowed else mixer
    dense, experts = _mlp(given), _experts(given) if "--num-experts" in given else None
    is_mixture = _pattern(given, "--moe-layer-freq", layers, 1, last=False) if experts else [False] * layers
    return tuple(
        Block(linear if is_linear[n] else sliding if slides[n] else mixer, experts if is_mixture[n] else dense)
        for n in range(layers)
    )


def _hybrid(given: Fields, flag: str) -> tuple[Block, ...]:
    """Returns the layers of HybridModel: a mixer or an MLP alone."""
    pattern = str(given.get(flag)).replace("|", "")  # the ends of pipeline stages
    if "/" in pattern:
        raise ArgumentError(flag, pattern, "a pattern without /", "Leave out layers of multi-token prediction.")
    types = {
        "M": lambda: Block(_mamba(given)),
        "G": lambda: Block(_gated_delta_net(given)),
        "*": lambda: Block(_attention(given)),
        "+": lambda: Block(_latent(given)),
        "-": lambda: Block(mlp=_mlp(given)),
        "E": lambda: Block(mlp=_experts(given)),
    }
    present = set(pattern)
    # Sizes are needed only for the layers in the pattern.
    made = {letter: make() if letter in present else _PLACEHOLDER for letter, make in types.items()}
    return chosen_blocks(flag, pattern, made, len(pattern))


_PLACEHOLDER = Block(mlp=MLP(1))


def _attention(given: Fields) -> AttentionMixer:
    heads = given.size("--num-attention-heads")
    groups = given.size("--num-query-groups", 1) if given.flag("--group-query-attention") else heads
    head_dim = given.quotient("--kv-channels", given.size("--hidden-size"), "--num-attention-heads", heads)
    return AttentionMixer(
        heads,
        groups,
        head_dim,
        head_dim,
        output_gate=given.flag("--attention-output-gate"),
        qk_norm=given.flag("--qk-layernorm"),
        bias=_has_bias(given) or given.flag("--add-qkv-bias"),
        output_bias=_has_bias(given),
        sink=_has_sink(given),
    )


def _latent(given: Fields) -> AttentionMixer:
    heads, shared = given.size("--num-attention-heads"), given.size("--qk-pos-emb-head-dim", 64, least=0)
    return AttentionMixer(
        heads,
        heads,
        given.size("--qk-head-dim", 128) + shared,
        given.size("--v-head-dim", 128),
        qk_norm=given.flag("--qk-layernorm"),
        output_bias=_has_bias(given),
        sink=_has_sink(given),
        kv_rank=given.size("--kv-lora-rank", 32),
        query_rank=given.optional("--q-lora-rank"),
        shared_key_dim=shared,
    )


def _has_sink(given: Fields) -> bool:
    """Returns True if softmax has one more score a head; that of off-by-one is 0, and counted as if it were learnt."""
    found = given.get("--softmax-type") or _SOFTMAXES[0]
    if found not in _SOFTMAXES:
        remedy = did_you_mean(found, _SOFTMAXES)
        raise ArgumentError("--softmax-type", found, " or ".join(_SOFTMAXES), remedy)
    return bool(found != _SOFTMAXES[0])


_SOFTMAXES = ("vanilla", "off-by-one", "learnable")


def _gated_delta_net(given: Fields) -> LinearMixer:
    return gated_delta_net(
        given.size("--linear-num-value-heads", 32),
        given.size("--linear-num-key-heads", 16),
        given.size("--linear-key-head-dim", 128),
        given.size("--linear-value-head-dim", 128),
        given.size("--linear-conv-kernel-dim", 4),
    )


def _mamba(given: Fields) -> LinearMixer:
    head_dim = given.size("--mamba-head-dim", 64)
    heads = given.quotient("--mamba-num-heads", 2 * given.size("--hidden-size"), "--mamba-head-dim", head_dim)
    return mamba2(heads, given.size("--mamba-num-groups", 8), given.size("--mamba-state-dim", 128), head_dim)


def _mlp(given: Fields) -> MLP:
    return MLP(_ffn_size(given), _is_gated(given), _has_bias(given))


def _ffn_size(given: Fields) -> int:
    # SwiGLU has three matrices: with two thirds of the usual size, a multiple of 64, it has as many weights.
    hidden_size = given.size("--hidden-size")
    return given.size(
        "--ffn-hidden-size", hidden_size * 8 // 3 // 64 * 64 if given.flag("--swiglu") else 4 * hidden_size
    )


def _experts(given: Fields) -> MLP:
    return MLP(
        given.size("--moe-ffn-hidden-size") if "--moe-ffn-hidden-size" in given else _ffn_size(given),
        _is_gated(given),
        _has_bias(given),
        experts=given.size("--num-experts"),
        experts_per_token=given.size("--moe-router-topk", 2),
        shared_size=given.size("--moe-shared-expert-intermediate-size", 0, least=0),
        shared_gate=given.flag("--moe-shared-expert-gate"),
    )


def _is_gated(given: Fields) -> bool:
    return given.flag("--swiglu") or given.flag("--quick-geglu")


def _has_bias(given: Fields) -> bool:
    return not given.flag("--disable-bias-linear")


# -- values ------------------------------------------------------------------------------------------------------------


def _window(given: Fields) -> str | None:
    """Returns the mask of layers with a window; None if they see all tokens."""
    text = given.get("--window-size")
    if text is None:
        return None
    try:
        left, right = (int(number) for number in text.strip("()").split(","))
    except ValueError:
        left, right = -2, 0
    if left < -1 or right not in (-1, 0):
        allowed = "LEFT,0 or LEFT 0 with the tokens before a query that it sees, or -1 for all"
        raise ArgumentError("--window-size", text, allowed, "The attention of these models is causal.")
    return None if left == -1 else f"window:{left},0"


def _pattern(given: Fields, flag: str, layers: int, default: int | None, *, last: bool) -> list[bool]:
    """Returns True for the layers of a kind, by a list of 0 and 1 such as "[1]*3+[0]", or by a number.

    Args:
        given: the flags.
        flag: the flag whose value is read.
        layers: number of the model's layers.
        default: the value if none is given; None if one is required.
        last: by a number N, True makes every N-th layer of the other kind, False every N-th from the first of this
            kind.
    """
    text = given.get(flag)
    if text is None and default is None:
        raise ArgumentError(flag, None, "a number of layers, or a list of 0 and 1 such as [1]*3+[0]")
    if text is None or str(text).strip().isdecimal():
        step = Fields({flag: default if text is None else _integer(flag, text)}).size(flag)
        return [(number + 1) % step != 0 if last else number % step == 0 for number in range(layers)]
    found = _listed(flag, text)
    if len(found) != layers or not set(found) <= {0, 1}:
        raise ArgumentError(flag, text, f"0 or 1 for each of the {layers} layers")
    return [number == 1 for number in found]


def _listed(flag: str, text: str) -> list[int]:
    """Evaluates an expression of lists, + and *, and nothing else."""
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ArgumentError(flag, text, "a list of 0 and 1 such as [1]*3+[0]") from None


def _evaluated(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=elements):
            return [_constant(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _evaluated(left) + _evaluated(right)
        case ast.BinOp(left=ast.Constant() as times, op=ast.Mult(), right=part):
            found = _repeated(_evaluated(part), _constant(times))
        case ast.BinOp(left=part, op=ast.Mult(), right=times):
            found = _repeated(_evaluated(part), _constant(times))
        case _:
            raise ValueError
    return found


def _repeated(part: list[int], times: int) -> list[int]:
    if len(part) * times > MAX_LAYERS:
        raise ValueError
    return part * times


def _constant(node: ast.expr) -> int:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        raise ValueError
    return node.value
