"""Options that several commands share: documents, a layer's shape, the layout."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.cli.applications import application
from megatron_cp.cli.parser import (
    MAX_TOKENS,
    document_tokens,
    flags,
    mask_name,
    natural,
    number,
    of_kind,
    parents,
    positive,
    rows,
    scheme_or_mode,
    size,
    tokens,
)
from megatron_cp.cli.shapes import TINY, LayerShape, hidden_size_for, layers_of
from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray, Packing
from megatron_cp.plan.describe import counted
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.transport import knows_hosts
from megatron_cp.planner.capabilities import require, working
from megatron_cp.testing.case import DTYPES, LayerCase

if TYPE_CHECKING:
    from megatron_cp.executor.groups import RankGroup
    from megatron_cp.testing.parity import Case

DOCUMENTS = 8  # that are drawn if no number is given
MAX_LOCAL_RANKS = 64
BALANCED = "balanced"  # the layout where none is given
RANK_KINDS = ("threads", "processes")  # those of `run_ranks`, whose module imports torch
# Flags that left, and what to take instead.
LEFT_OPTIONS = {"--search-cache": "Every rank finds the same tiles without a cache: pass only --search SECONDS."}


def _with(argument: str) -> str:
    """Names the kinds of linear layers for which `plan_linear` takes this argument."""
    names = [kind.name for kind in KINDS.values() if argument in (size.name for size in kind.arguments)]
    return " and ".join(names)


def add_layer_arguments(parser: argparse.ArgumentParser, *, dtype: str) -> None:
    """Adds `--layer` and the options of its shape; `dtype` is the default of `--dtype`."""
    group = parser.add_argument_group("layer")
    models = ", ".join(sorted(application("estimate").MODELS))
    group.add_argument(
        "--layer",
        type=of_kind("layer"),
        default="attention",
        metavar="|".join(working("layer")),
        help="default: attention",
    )
    group.add_argument(
        "--model",
        metavar="NAME|FILE|FLAGS",
        help=f"take the layer's shape and masks from: {models}, a Hugging Face config.json, or Megatron's flags in one "
        f"string or a file; other options replace the model's values (default: {TINY})",
    )
    group.add_argument(*flags("heads"), type=size, help="number of query heads, value heads, or heads of x (mamba)")
    group.add_argument(*flags("kv-heads"), type=size, help="number of key/value heads of attention")
    group.add_argument("--key-heads", type=size, help=f"number of query and key heads of {_with('key_heads')}")
    group.add_argument("--groups", type=size, help=f"number of groups of B and C of {_with('groups')}")
    group.add_argument(*flags("head-dim"), type=size, help="features of a query or key head, or of a head of x (mamba)")
    group.add_argument("--value-dim", type=size, help="features of a value head (default: --head-dim)")
    group.add_argument("--state", type=size, help=f"size of the state of {_with('state')}: features of B and C")
    group.add_argument(
        "--num-householder", type=positive, metavar="N",
        help=f"steps of a token of {_with('num_householder')} (default: --model's)",
    )  # fmt: skip
    group.add_argument("--conv-width", type=positive, help="taps of the causal convolution of a linear layer")
    group.add_argument(
        "--hidden-size",
        type=size,
        help="features of a token between layers, to redistribute linear layers (default: --model's)",
    )
    group.add_argument(
        "--softmax-scale", type=number, help="factor of attention scores (default: --model's, or head_dim ** -0.5)"
    )
    group.add_argument(
        "--learned-sink",
        action=argparse.BooleanOptionalAction,
        help="add a learned score for each head to every softmax (default: --model's)",
    )
    group.add_argument("--softcap", type=number, help="limit of attention scores, 0 for none (default: --model's)")
    group.add_argument("--dropout", type=number, help="fraction of attention weights to drop (default: 0)")
    group.add_argument(
        "--dtype",
        type=of_kind("dtype"),
        choices=list(DTYPES),
        default=dtype,
        help=f"type of the inputs, also as fp64, fp32, bf16, fp16, half (default: {dtype})",
    )
    group.add_argument(
        *flags("scheme"),
        type=scheme_or_mode,
        help=f"{', '.join(working('scheme'))} for attention; {', '.join(working('mode'))} for linear layers; "
        "ring is p2p and ulysses is a2a (default: auto; check runs each that auto may choose)",
    )
    group.add_argument("--ulysses-degree", type=positive, metavar="U", help="number of ranks that exchange heads")
    group.add_argument(
        *flags("head-chunks"),
        type=positive,
        metavar="N",
        help="number of chunks in which to exchange heads (default: 1), or to gather keys (default: 2)",
    )
    group.add_argument(
        *flags("search"),
        type=number,
        default=0.0,
        metavar="SECONDS",
        help="for tiled: seconds for which a solver may search for better tiles in each direction (default: 0); "
        "above 0, auto also considers tiled",
    )
    group.add_argument(
        *flags("transport"),
        type=of_kind("transport"),
        default="collective",
        metavar="|".join(working("transport")),
        help="how messages travel (default: collective)",
    )
    group.add_argument(
        "--hosts",
        type=positive,
        metavar="N",
        help="with --transport hierarchical: number of hosts, which share the ranks evenly (default: the job's, or 2)",
    )
    group.add_argument(
        *flags("codec"),
        type=of_kind("codec"),
        default="none",
        metavar="|".join(working("codec")),
        help="quantisation of heads, keys and values in messages (default: none)",
    )
    group.add_argument(
        *flags("latent-mode"),
        type=of_kind("latent_mode"),
        metavar="|".join(working("latent_mode")),
        help="what travels in a --model with latents: these, or keys and values (default: heads)",
    )
    group.add_argument(
        "--mask",
        type=mask_name,
        metavar="|".join(working("mask")),
        help="keys that a query of attention sees (default: --model's, or causal). window:128 is the token itself and "
        "the 127 before it, as in transformers' sliding_window=128. window:127,0 is the same window: two numbers do "
        "not count the token itself, as in Megatron's --window-size",
    )


def add_batch_arguments(parser: argparse.ArgumentParser, *, corpus: str | None = None) -> None:
    """Adds the options of documents and their layout; `corpus` is the default of `--corpus`."""
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--lengths", type=document_tokens, metavar="N,N,...", help="tokens of each document, such as 130,256k"
    )
    group.add_argument(
        "--parents", type=parents, metavar="N,N,...",
        help="for documents that branch: each of --lengths is a segment. Give the number of the segment that it "
        "continues, counted from 0, or -1 for a root, as in --parents -1,0,0",
    )  # fmt: skip
    group.add_argument(
        "--documents",
        type=rows,
        metavar="N",
        help="instead of --lengths: draw the lengths of this many documents from --corpus, or without a corpus from a "
        f"log-normal distribution (default: {DOCUMENTS})",
    )
    group.add_argument(
        "--corpus",
        default=corpus,
        metavar="PATH",
        help="with --documents: a path as for train's --data-path, or default for the source files of Python's library"
        + (f" (default: {corpus})" if corpus else ""),
    )
    group.add_argument("--tokens-per-rank", type=tokens, metavar="N", help="scale the drawn lengths to N * cp tokens")
    group.add_argument(
        "--seed", type=natural, default=0, help="seed of drawn lengths, inputs and random layouts (default: 0)"
    )
    group.add_argument(
        *flags("layout"),
        type=of_kind("layout"),
        metavar="|".join(working("layout")),
        help=f"default: {BALANCED}; plan chooses the fastest layout; zigzag is Megatron's order",
    )
    group.add_argument("--align", type=rows, default=1, help="pad every rank's rows to a multiple of this (default: 1)")


def case_of(args: argparse.Namespace, cp_size: int, shape: LayerShape | None = None, **rest: Any) -> Case:
    """Returns the case that the arguments describe, to be run over `cp_size` ranks. Imports torch."""
    case = layer_case_of(args, cp_size, shape)
    import torch

    from megatron_cp.testing.parity import Case

    return Case(**{**vars(case), "dtype": getattr(torch, args.dtype), **rest})


def layer_case_of(args: argparse.Namespace, cp_size: int, shape: LayerShape | None = None) -> LayerCase:
    """Returns the case that the arguments describe, only to be planned. Imports no torch.

    `shape` is one of `layers_of`, the first one if it is not given.
    """
    layer = require("layer", args.layer)
    shape = next(iter(layers_of(args))) if shape is None else shape
    lengths = document_lengths(args, cp_size)
    return LayerCase(
        layer=layer,
        cp=cp_size,
        lengths=lengths,
        parents=_parents(args, lengths),
        layout=args.layout or BALANCED,
        heads=shape.heads,
        groups=shape.groups,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_dim,
        conv_width=shape.conv_width,
        num_householder=shape.num_householder,
        mask=shape.mask,
        layout_mask=shape.layout_mask,
        scheme=args.scheme or "auto",
        hidden_size=hidden_size_for(args, shape),
        ulysses_degree=args.ulysses_degree,
        head_chunks=args.head_chunks,
        transport=require("transport", args.transport, name="--transport"),
        num_hosts=_num_hosts(args, cp_size),
        codec=require("codec", args.codec, name="--codec"),
        softcap=shape.softcap,
        dropout=args.dropout or 0.0,
        learned_sink=shape.learned_sink,
        softmax_scale=shape.softmax_scale,
        latent=shape.latent if args.latent_mode else None,
        latent_mode=args.latent_mode,
        align=args.align,
        dtype=DTYPES[args.dtype],
        seed=args.seed,
        search_seconds=args.search,
    )


def hosts_of_job(args: argparse.Namespace, world: RankGroup | None, cp_size: int) -> tuple[int, ...]:
    """Returns the host of each of the first `cp_size` ranks of a job on several hosts.

    It is empty if the transport needs no hosts, `--hosts` is given or the job has one host. Every rank must call it.
    """
    if world is None or not knows_hosts(args.transport) or args.hosts is not None:
        return ()
    from megatron_cp.executor.hosts import hosts_of

    hosts = hosts_of(world)[:cp_size]
    return hosts if len(set(hosts)) > 1 else ()


def _num_hosts(args: argparse.Namespace, cp_size: int) -> int:
    if args.hosts is None:
        return 2
    if not knows_hosts(args.transport):
        raise ArgumentError("--hosts", args.hosts, "only with --transport hierarchical")
    if args.hosts > cp_size:
        raise ArgumentError("--hosts", args.hosts, f"at most the {cp_size} ranks of --cp {cp_size}")
    return int(args.hosts)


def given_axes(args: argparse.Namespace) -> list[str]:
    """Returns the axes that `check --all` does not vary, since the user has set an option of theirs."""
    heads = (
        "model", "heads", "kv_heads", "key_heads", "groups", "head_dim", "value_dim", "state",
        "num_householder", "learned_sink", "softcap", "dropout",
    )  # fmt: skip
    axes = {"scheme": ("scheme",), "layout": ("layout",), "mask": ("model", "mask"), "heads": heads}
    return [axis for axis, options in axes.items() if any(getattr(args, name) is not None for name in options)]


def document_lengths(args: argparse.Namespace, cp_size: int) -> tuple[int, ...]:
    """Returns the documents' lengths: given, or drawn from the corpus or from a log-normal law."""
    if args.lengths is not None:
        for name in ("documents", "tokens_per_rank"):
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name.replace('_', '-')}", getattr(args, name), "only without --lengths")
        if not any(args.lengths):
            raise ArgumentError("--lengths", args.lengths, "at least one token")
        _check_total("--lengths", sum(args.lengths))
        return tuple(args.lengths)
    random = np.random.default_rng(args.seed)
    count = args.documents or DOCUMENTS
    _check_total("--documents", count)
    draws = random.lognormal(mean=3.0, sigma=1.2, size=count) if args.corpus is None else _drawn(args, count, random)
    if args.tokens_per_rank is None:
        _check_total("--documents", int(draws.sum()))
        return tuple(np.maximum(1, draws).astype(int).tolist())
    total = args.tokens_per_rank * cp_size
    _check_total("--tokens-per-rank", total)
    edges = np.round(np.cumsum(draws) / draws.sum() * total).astype(int)  # sums exactly; the shortest may round to 0
    return tuple(np.diff(edges, prepend=0).tolist())


def _parents(args: argparse.Namespace, lengths: tuple[int, ...]) -> tuple[int, ...] | None:
    if args.parents is None:
        return None
    if args.lengths is None:
        raise ArgumentError("--parents", args.parents, "only with --lengths, the tokens of each segment")
    Packing.tree(lengths, args.parents)  # refuses what is no tree
    return tuple(args.parents)


def described_documents(args: argparse.Namespace) -> list[str]:
    """Returns a line that says how lengths are drawn; nothing if they are given."""
    if args.lengths is not None:
        return []
    origin = "a law of short lengths" if args.corpus is None else f"the documents of --corpus {args.corpus}"
    scaled = f", scaled to {args.tokens_per_rank} tokens a rank" if args.tokens_per_rank else ""
    return [
        f"documents: {counted(args.documents or DOCUMENTS, 'length')} drawn from {origin} with --seed {args.seed}"
        f"{scaled}; pass --lengths for your own"
    ]


def _drawn(args: argparse.Namespace, count: int, random: np.random.Generator) -> IntArray:
    """Draws the lengths of `count` documents of the corpus, without replacement."""
    from megatron_cp.data.corpus import read_corpus
    from megatron_cp.data.tokenizer import ByteTokenizer

    try:
        lengths = read_corpus(None if args.corpus == "default" else args.corpus, ByteTokenizer()).lengths
    except ArgumentError as error:
        raise ArgumentError("--corpus", args.corpus, error.allowed, error.remedy) from None
    if count > lengths.size:
        raise ArgumentError("--documents", count, f"at most the {lengths.size} documents of the corpus")
    return random.choice(lengths, size=count, replace=False)


def _check_total(flag: str, total: int) -> None:
    if total > MAX_TOKENS:
        raise ArgumentError(flag, f"{total} tokens", f"at most {MAX_TOKENS} tokens in a batch")
