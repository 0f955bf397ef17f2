"""The table of supported and unsupported options, which refusals and `megatron-cp doctor` read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.block_masks import BLOCK_TABLES
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import AUTO, MODES, SCHEMES

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class Capability:
    """A value of an argument.

    Attributes:
        argument: the name of the argument in the planning functions.
        value: the value that a user may ask for.
        works: it can be planned.
        remark: a description of the value, or the alternative to use.
    """

    argument: str
    value: str
    works: bool
    remark: str


_BALANCE = (
    "balance by --moe-router-enable-expert-bias (with --moe-router-score-function sigmoid and"
    " --moe-router-load-balancing-type none), or use one rank"
)

# For each argument the values that can be planned, with a description of each.
_WORKS: dict[str, dict[str, str]] = {
    "scheme": {scheme.name: scheme.remark for scheme in SCHEMES.values()}
    | {AUTO: "the scheme that is predicted to be fastest"},
    "mask": {
        "causal": "a query sees its document up to itself",
        "full": "a query sees all of its document",
        "window:N": "itself and the N - 1 tokens before it, as sliding_window=N of transformers",
        "window:LEFT,RIGHT": "so many tokens before and after itself; -1 for no limit",
        "prefix:N": "the first N tokens see one another, the rest is causal",
        "chunk:N": "causal within chunks of N tokens",
        "first:N+window:LEFT,RIGHT": "a window, and the first N tokens stay visible",
        **{table.spelling: table.remark for table in BLOCK_TABLES.values()},
    },
    "attention": {
        "shared questions": "Mask.shared_question: answers see their question, not each other",
        "any union of slices or blocks": "Mask.from_slices, Mask.from_blocks",
        "cross-attention": "kv_packing and kv_layout of plan_attention",
        "learned sink": "sink of attention(), on every kernel",
        "softcap": "softcap of attention(), on kernels reference, flex and flash-attn's",
        "dropout": (
            "dropout of attention(), the same at every number of ranks; only on kernel reference, which is slow"
        ),
    },
    "kind": {kind.name: kind.remark for kind in KINDS.values()},
    "mode": {mode.name: mode.remark for mode in MODES.values()} | {AUTO: "the mode that is predicted to be fastest"},
    "latent_mode": {
        "expand": "latents travel, and are expanded to keys and values where they arrive",
        "absorb": "latents travel; queries are multiplied with the up-projection",
        "heads": "latents are expanded before they travel",
        AUTO: "the mode that is predicted to be fastest",
    },
    "transport": {
        "collective": "the backend's own all-to-all and all-gather",
        "pairwise": "disjoint pairs of ranks, round by round; any number of ranks",
        "hierarchical": "one message from a rank to each other host, which passes it on",
        "shared_memory": "copies from the other ranks' memory; one Linux host, on the CPU",
        "symmetric_memory": "copies from the other ranks' devices; one host, CUDA; not on a GPU yet",
    },
    "codec": {
        "none": "heads, keys and values travel in their own type",
        "fp8": "E4M3 both ways, with a scale for each token and head",
        "fp8_e5m2": "E4M3 forward and E5M2 for gradients, with a scale for each token and head",
        "int8": "INT8 both ways, with a scale for each token and head",
    },
    "layout": {
        "balanced": "tokens and attention work both even, for any mask",
        "contiguous": "the stream cut into equal ranges",
        "zigzag": "Megatron's order, for any lengths",
        AUTO: "contiguous, zigzag or balanced: in which all layers are predicted to be fastest",
        "random": "random fragments, for checks",
    },
    "packed_order": {
        "document": "Megatron's own batches, each document cut in 2 * cp chunks: --sft",
        "pack": "Megatron's batches, the pack cut in 2 * cp: --dataloader-inter-document-masking",
    },
    "layer": {"attention": "softmax attention", **{kind.name: kind.mixer for kind in KINDS.values()}},
    "megatron": {
        "GPTModel": "--spec megatron_cp.megatron.specs gpt_layer_spec",
        "HybridModel": "--spec megatron_cp.megatron.specs hybrid_stack_spec: layers GM*+D-",
        "sparse_attention": "--experimental-attention-variant dsa, or D in a --hybrid-layer-pattern",
        "windows": "--window-size, --window-attn-skip-freq: in global positions",
        "sinks": "--softmax-type off-by-one or learnable",
        "dropout": (
            "--attention-dropout: the same weights at every number of ranks; only on kernel reference, which is slow"
        ),
        "multi_latent_attention": "--multi-latent-attention: values are not padded to keys",
        "mtp_num_layers": "--mtp-num-layers: in every layout and never across a document, with batches of shard_batch",
        "mrope_section": "--mrope-section: position_ids of several axes, dealt by shard_batch",
        "moe_aux_loss_coeff": "--moe-aux-loss-coeff, --moe-z-loss-coeff: means over all ranks' tokens",
    },
}
# Values that a user may ask for and that cannot be planned, with the alternative to use.
_REFUSED: dict[str, dict[str, str]] = {
    "megatron": {
        "apply_rope_fusion": "latent attention has its own positions; use --no-rope-fusion",
        "cache_mla_latents": "only for inference; leave it out",
        "largest_score": "no kernel of megatron_cp reports it, and without it the optimizer's steps differ",
        "dynamic_context_parallel": "Megatron's own loader loses the lengths; parse flags with "
        "megatron_cp.megatron.config.add_arguments, and read packs by megatron_cp.megatron.dynamic.grouped_packs",
        "moe_token_dispatcher_type": "allgather needs equal ranks; use alltoall",
        "moe_router_load_balancing_type": f"these use only one rank's tokens; {_BALANCE}",
        "moe_expert_capacity_factor": "each rank would drop tokens by its own counts; leave it out",
        "reset_attention_mask": (
            "attention does not read masks that are tensors; use --dataloader-inter-document-masking, or shard_batch"
        ),
        "cuda_graph_impl": (
            "Megatron's graphs of attention serve one pack; give --cuda-graph-modules without it, leave graphs out, or "
            "capture your own step over GraphTables"
        ),
        "cross_attention": "not built yet; self-attention only",
    },
}

CAPABILITIES = tuple(
    Capability(argument, value, works, text)
    for table, works in ((_WORKS, True), (_REFUSED, False))
    for argument, values in table.items()
    for value, text in values.items()
)


def remark(argument: str, value: str) -> str:
    """Returns the table's remark on a value."""
    return next(entry.remark for entry in CAPABILITIES if (entry.argument, entry.value) == (argument, value))


def working(argument: str) -> list[str]:
    """Returns the values of an argument that can be planned."""
    return [entry.value for entry in CAPABILITIES if entry.argument == argument and entry.works]


def require(argument: str, value: str, *, name: str | None = None) -> str:
    """Returns the table's spelling of `value` if it can be planned; see `spelled`.

    Args:
        argument: the argument's name in the table.
        value: the value that the user asked for.
        name: the user's name of the argument, if the table has another one.

    Raises:
        ArgumentError: the value cannot be planned; the error names the alternatives.
    """
    refuse_unbuilt(argument, value, name=name)
    known, meant = working(argument), spelled(argument, value)
    if not isinstance(meant, str) or meant not in known:
        raise ArgumentError(name or argument, value, " or ".join(known) or "None", did_you_mean(value, known))
    return meant


def refuse_unbuilt(argument: str, value: str, *, name: str | None = None) -> None:
    """Refuses a value that the table lists as unsupported; accepts all others, known or not.

    Raises:
        ArgumentError: the value is unsupported; the error names the alternatives.
    """
    for entry in CAPABILITIES if isinstance(value, str) else ():
        if entry.value == value and entry.argument == argument and not entry.works:
            raise ArgumentError(
                name or argument, value, " or ".join(working(argument)) or "None", f"{value} is {entry.remark}."
            )


def spelled(argument: str, value: Any) -> Any:
    """Returns the table's spelling of a value in another one; any other value as it is.

    Case, dashes and underscores do not count, and names of other projects are understood.

    Example:
        >>> [spelled("scheme", name) for name in ("ring", "All-Gather", "ulysses+ring", "rings")]
        ['p2p', 'all_gather', 'a2a+p2p', 'rings']
        >>> spelled("dtype", "bf16")
        'bfloat16'
    """
    if not isinstance(value, str) or value in working(argument):
        return value
    others = SYNONYMS.get(argument, {})
    known = {_plain(name): name for name in (*others.values(), *working(argument))} | others
    parts = [known.get(_plain(part)) for part in value.split("+")]  # a product of two schemes
    found = "+".join(part or "" for part in parts)
    return found if found in known.values() else value


def did_you_mean(value: object, known: Iterable[str], alike: float = 0.75) -> str:
    """Returns a question with the most similar known value, if its similarity is at least `alike` (0 to 1), or ""."""
    if not isinstance(value, str):
        return ""
    known = list(known)
    others = {other: name for names in SYNONYMS.values() for other, name in names.items()} | _SUGGESTED
    plain = {_plain(name): name for name in known} | {other: name for other, name in others.items() if name in known}
    near = get_close_matches(_plain(value), plain, n=1, cutoff=alike)
    return f"Did you mean {plain[near[0]]}?" if near else ""


def hints_keywords(made: Made) -> Made:
    """Decorates a function or a class so that the error for an unknown keyword names the argument that it resembles.

    Python itself does so from 3.13 on, but does not know the names of other projects.
    """
    if isinstance(made, type):
        made.__init__ = hints_keywords(made.__init__)  # type: ignore[misc]
        return made
    parameters = signature(made).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return made
    known = [name for name, each in parameters.items() if each.kind is not each.POSITIONAL_ONLY]

    @wraps(made)
    def call(*args: Any, **named: Any) -> Any:
        for name in named:
            if name == "search_cache" and "search_seconds" in known:  # which left
                allowed, remedy = "only search_seconds", "Every rank finds the same tiles without a cache."
                raise ArgumentError(name, named[name], allowed, remedy)
            if name not in known:
                hint = did_you_mean(name, known)
                text = f"{made.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{text}. {hint}" if hint else text)
        return made(*args, **named)

    return cast(Made, call)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "+")


# Names of other projects and short forms, in plain letters, with the values that they are taken for.
SYNONYMS: dict[str, dict[str, str]] = {
    "scheme": {
        "ulysses": "a2a", "alltoall": "a2a", "ring": "p2p", "ringattention": "p2p", "ag": "all_gather",
        "usp": "a2a+p2p",
    },
    "kind": {
        "gateddeltanet": "gdn", "gateddeltarule": "gdn", "gateddeltanet2": "gdn2", "gateddeltaproduct": "gdp",
        "kimideltaattention": "kda", "mamba2": "mamba", "ssd": "mamba", "conv": "conv1d", "causalconv1d": "conv1d",
    },
    "codec": {"e4m3": "fp8"},
    "dtype": {
        "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
        "fp64": "float64", "double": "float64",
    },
}  # fmt: skip
SYNONYMS["layer"] = {"softmax": "attention", **SYNONYMS["kind"]}
_SUGGESTED = {
    "cpsize": "--cp",
    "learningrate": "--lr",
    "nheads": "heads",
    "numattentionheads": "heads",
    "numheads": "heads",
    "numkeyvalueheads": "kv_heads",
    "numkvheads": "kv_heads",
    "numquerygroups": "kv_heads",
    "kvchannels": "head_dim",
    "nccl": "collective",
    "gloo": "collective",
    "nodes": "--hosts",
    "relay": "redistribute",
    "e5m2": "fp8_e5m2",
}  # former names, and what is not quite it
