"""Our flags beside Megatron's, and the checks of their values. It imports neither torch nor Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.plan.schemes import AUTO, MODES
from megatron_cp.planner.capabilities import require, spelled
from megatron_cp.planner.predict.machine_files import SAFE, machine, presets
from megatron_cp.planner.tiled import checked_search


def check_options(config: Any) -> None:
    """Refuses unknown values of our options, and those that contradict Megatron's; names get their own spelling."""
    for error in option_errors(config):
        raise error


def option_errors(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors of `check_options`."""
    for check in _CHECKS:
        try:
            check(config)
        except ArgumentError as error:
            yield error


def _check_name(option: str, attribute: str, config: Any) -> None:
    setattr(config, attribute, require(option, getattr(config, attribute), name=f"--{attribute.replace('_', '-')}"))


def _check_order(config: Any) -> None:
    if config.cp_packed_order is not None:
        _check_name("packed_order", "cp_packed_order", config)


def _check_latents(config: Any) -> None:
    if config.cp_latent_mode != "heads" and not config.multi_latent_attention:
        remedy = "Other attention has no latents."
        raise ArgumentError("--cp-latent-mode", config.cp_latent_mode, "heads without --multi-latent-attention", remedy)


def _check_search(config: Any) -> None:
    checked_search(config.cp_search, schemes_of(config), name="--cp-search")


def _check_logits(config: Any) -> None:
    if config.logit_rows is not None:
        checked_integer("--logit-rows", config.logit_rows, 1)


def _check_stages(config: Any) -> None:
    if config.cp_layout == AUTO and config.pipeline_model_parallel_size > 1:
        allowed = "balanced, contiguous or zigzag with --pipeline-model-parallel-size above 1"
        remedy = "A stage knows only its own layers, but all stages must use the same layout."
        raise ArgumentError("--cp-layout", AUTO, allowed, remedy)


_CHECKS: tuple[Callable[[Any], object], ...] = (
    *(partial(_check_name, name, f"cp_{name}") for name in ("layout", "transport", "codec", "latent_mode")),
    _check_latents,
    partial(_check_name, "mode", "linear_cp_mode"),
    lambda config: machine(config.cp_hardware, argument="--cp-hardware"),
    _check_search,
    _check_logits,
    _check_stages,
    _check_order,
)


def scheme_name(cp_comm_type: str) -> str:
    """Returns this package's name of a scheme of Megatron's."""
    name: str = spelled("scheme", cp_comm_type)
    return name


def schemes_of(config: Any) -> list[str]:
    """Returns the schemes that `--cp-comm-type` names; "auto" if it names none, or on one rank."""
    given = config.cp_comm_type
    if given is None or config.context_parallel_size == 1:
        return [AUTO]
    return [scheme_name(scheme) for scheme in ([given] if isinstance(given, str) else given)]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags to Megatron's parser; pass it as `extra_args_provider`.

    A flag that Megatron has too stays Megatron's, with its default, and takes our values beside Megatron's.

    Raises:
        ArgumentError: Megatron has a flag with the name of one of ours that means something else.
    """
    add = partial(_add, parser, parser.add_argument_group("megatron_cp"))
    layouts = "layout of tokens: balanced, contiguous, zigzag (Megatron's order) or auto"
    add("--cp-layout", layouts, default="balanced")
    modes = "mode of linear layers: headwise, chunkwise, redistribute or auto"
    add("--linear-cp-mode", modes, (*MODES, AUTO), default="auto")
    add("--cp-head-chunks", "number of chunks to exchange heads or gather keys in", type=int)
    transports = "transport of messages: collective, pairwise, hierarchical, shared_memory or symmetric_memory"
    add("--cp-transport", transports, default="collective")
    orders = "unit that Megatron's own pipeline cut into 2 * cp chunks: each document, or the whole pack"
    add("--cp-packed-order", f"{orders} (default: from --sft or its masking)")
    codecs = "codec of heads, keys and values in messages: none, fp8, fp8_e5m2 or int8"
    add("--cp-codec", codecs, default="none")
    latents = "what multi-latent attention does with latents: heads (expands them before they travel), expand"
    add("--cp-latent-mode", f"{latents} (on arrival), absorb (in queries) or auto", default="heads")
    hardware = f"hardware for which auto predicts: {', '.join(presets())} or a file; {SAFE} by default"
    add("--cp-hardware", hardware)
    search = "seconds for which OR-Tools may search for better tiles, for each pack and direction; above 0, auto"
    add("--cp-search", f"{search} also considers tiled", type=float, default=0.0, metavar="SECONDS")
    add("--logit-rows", "with labels, the rows of which there are logits at a time (default: all)", type=int)
    # Megatron's flags of this name start its own loader, its groups and its schedule: here they set an option of ours.
    megatrons = parser.add_argument_group("megatron_cp, for Megatron's flags", conflict_handler="resolve")
    names = "--hybrid-context-parallel", "--dynamic-context-parallel"
    dynamic = "deal a step's documents to groups of data- and context-parallel ranks, of any size"
    megatrons.add_argument(*names, dest="cp_dynamic", action="store_true", help=dynamic)
    smallest = "fewest ranks of a group with --dynamic-context-parallel"
    megatrons.add_argument("--min-dynamic-context-parallel-size", type=int, default=1, help=smallest)
    parser.set_defaults(dynamic_context_parallel=False, hybrid_context_parallel=False)
    return parser


# The flags that Megatron may have with our meaning, to which our values are added.
_SHARED = ("--linear-cp-mode",)


def _add(
    parser: argparse.ArgumentParser, group: Any, flag: str, help_text: str, values: Iterable[str] = (), **others: Any
) -> None:
    """Adds a flag to a group of a parser, or `values` to the flag of that name that Megatron's parser has already."""
    theirs = parser._option_string_actions.get(flag)
    if theirs is None:
        group.add_argument(flag, help=help_text, **others)
        return
    takes_one_word = theirs.nargs is None and theirs.type in (None, str) and isinstance(theirs, argparse._StoreAction)
    if flag not in _SHARED or not takes_one_word or theirs.dest != flag.strip("-").replace("-", "_"):
        kind = getattr(theirs.type, "__name__", None) or type(theirs).__name__.strip("_")
        given = Plain(f"a flag of Megatron's own, {theirs.help or kind}, which is not ours ({help_text})")
        raise ArgumentError(flag, given, f"a Megatron-Core without it: {TAKEN}")
    if theirs.choices is not None:
        theirs.choices = [*theirs.choices, *(value for value in values if value not in theirs.choices)]
    theirs.help = f"{help_text}; the default is Megatron's, {theirs.default}"


TAKEN = "0.19.2, or main or dev of August 2026 (docs/versions.md)"  # the releases of Megatron-Core


class Plain(str):
    """Words that an error shows without quotes."""

    def __repr__(self) -> str:
        return str(self)
