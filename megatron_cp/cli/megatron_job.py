"""`megatron-cp doctor --megatron`: judges the flags of a Megatron job without starting it."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_cp.cli.installed import INSTALL_MEGATRON, megatron_is_installed
from megatron_cp.cli.parser import UsageError
from megatron_cp.cli.report import Report

HELP = "judge all following flags of a Megatron job: proved, expected, untried or refused with context parallelism"
_ORDER = ("refused", "undecided", "untried", "unknown", "expected", "proved")


def judged(words: Sequence[str]) -> Report:
    """Returns a verdict on every flag that is given, the worst first; refusals are those of building the model.

    The report fails if a flag is refused, or if several context-parallel ranks lack a flag that they need.
    """
    if not megatron_is_installed():
        raise UsageError(f"--megatron reads flags with megatron-core's parser: {INSTALL_MEGATRON}.")
    flags = _of_launch(list(words))
    _refuse_unknown(flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Megatron and its packages as they are imported
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        return _judged(flags)


def _refuse_unknown(words: Sequence[str]) -> None:
    """Refuses a flag that stands nowhere in the source of Megatron's parser and ours, whose import takes a minute.

    Megatron's flags are strings, or fields of a configuration. Others that stand there, its parser refuses.
    """
    known = {
        name.replace("_", "-")
        for source in _sources()
        for found in re.findall(r"""["']--([\w-]+)["']|^ +(\w+) *:""", source, re.MULTILINE)
        for name in found
    }
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("_", "-")
        if word.startswith("--") and known.isdisjoint((name, name.removeprefix("no-"), name.removeprefix("disable-"))):
            raise _unknown(flag)


def _sources() -> Iterator[str]:
    """Yields the text of the modules in which flags may be defined."""
    core, ours = (find_spec(name) for name in ("megatron.core", "megatron_cp.megatron"))
    assert core is not None
    assert ours is not None
    for place in core.submodule_search_locations or []:
        yield from (path.read_text(errors="replace") for path in Path(place).parent.glob("training/**/*.py"))
        of_core = (path.read_text(errors="replace") for path in Path(place).glob("**/*.py"))
        yield from (text for text in of_core if "@dataclass" in text)
    for place in ours.submodule_search_locations or []:
        yield Path(place, "config.py").read_text()


def _unknown(flag: str) -> UsageError:
    return UsageError(f"--megatron: {flag} is no flag of megatron-core 0.19 or of megatron_cp.")


def _judged(words: Sequence[str]) -> Report:
    from megatron_cp.megatron.features import FEATURE_BY_FLAG, REFUSED

    args, given, typed = _parsed(list(words))
    errors = {error.argument: str(error).removeprefix(f"{error.argument}: ") for error in _refusals(_AsConfig(args))}
    cp, length = args.context_parallel_size, args.seq_length
    if cp > 1 and length and length % (2 * cp):
        errors["--seq-length"] = (
            f"got {length}; allowed: a multiple of {2 * cp}, as Megatron asks. Packs may be shorter."
        )
    rows: list[tuple[str, str, str]] = [("refused", flag, error) for flag, error in errors.items()]
    undecided = dict(_undecided(args))
    rows += [("undecided", flag, remark) for flag, remark in undecided.items()]
    for flag in given:
        if flag in errors or flag in undecided:
            continue
        feature = FEATURE_BY_FLAG.get(flag)
        if feature is None:
            rows.append(("unknown", flag, "not in the table: compare a step with one rank"))
        elif feature.verdict == REFUSED and feature.depends:
            rows.append(("expected", flag, f"with this value; else {feature.remark}"))
        else:
            rows.append((feature.verdict, flag, feature.remark))
    rows.sort(key=lambda row: (_ORDER.index(row[0]), row[1]))
    counts = {verdict: sum(row[0] == verdict for row in rows) for verdict in _ORDER}
    # A refusal may be of one value alone, so it is shown with the flag.
    shown = {flag: typed.get(flag, flag) if verdict == "refused" else flag for verdict, flag, _ in rows}
    width = max(map(len, shown.values()), default=0)
    lines = [_verdict(rows), ""]
    lines += [f"{verdict:<11}{shown[flag]:<{width + 2}}{remark}" for verdict, flag, remark in rows]
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no flags"]
    if args.context_parallel_size == 1:
        lines.append("one context-parallel rank: --context-parallel-size is 1, so nothing is spread over ranks")
    names = ("verdict", "flag", "typed", "remark")
    data = {
        "flags": [
            dict(zip(names, (verdict, flag, typed.get(flag), remark), strict=True)) for verdict, flag, remark in rows
        ]
    }
    is_ready = not counts["refused"] + counts["undecided"]
    return Report("\n".join(lines), {"ready": is_ready, **data, "counts": counts}, ok=is_ready)


def _of_launch(words: list[str]) -> list[str]:
    """Returns the flags behind the script of a launch, which may be quoted as one word; flags alone as they are."""
    try:
        words = shlex.split(words[0]) if len(words) == 1 else words
    except ValueError as error:
        raise UsageError(f"--megatron: {error} in {_shortened(words[0])}.") from None
    scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
    return words[scripts[0] + 1 :] if scripts and not words[0].startswith("-") else words


def _verdict(rows: Sequence[tuple[str, str, str]]) -> str:
    """Returns the first line: whether this job can start, and which flags stop it or were never tried."""
    flags = {verdict: [flag for each, flag, _ in rows if each == verdict] for verdict in _ORDER}
    stops = [
        f"{name}: {', '.join(flags[verdict])}"
        for verdict, name in (("undecided", "missing or undecided"), ("refused", "refused"))
        if flags[verdict]
    ]
    if stops:
        return f"NOT READY: {'; '.join(stops)}"
    unproved = len(flags["untried"]) + len(flags["unknown"])
    return "READY: no flag is refused" + (f", and {unproved} of them were never tried" if unproved else "")


def _undecided(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields each flag without which ranks would compute something else, or no model be built, and the remedy."""
    several, name = args.context_parallel_size > 1, _spec_of(args)
    if several and not args.spec:
        yield "--spec", f"not given, so context parallelism is Megatron's own: --spec {_SPECS} {name}"
    elif several and args.spec[0] != _SPECS:
        remark = f"not from {_SPECS}, whose layers alone have this library's context parallelism"
        yield "--spec", f"{remark}: --spec {_SPECS} {name}, or replace its modules by theirs"
    elif args.spec and args.spec[0] == _SPECS and args.spec[1:] != [name]:
        yield "--spec", f"not that of the model that the other flags describe: --spec {_SPECS} {name}"
    if several and not args.calculate_per_token_loss:
        yield (
            "--calculate-per-token-loss",
            "not given, so the loss is a mean of the ranks' means, which the layers refuse: give it, or take the loss "
            "of megatron_cp.megatron.loss (forward_step or loss_of), which no flag shows",
        )


_SPECS = "megatron_cp.megatron.specs"


def _spec_of(args: argparse.Namespace) -> str:
    """Returns the name of our spec for the model and its layers. Beside Transformer Engine no other one is accepted."""
    if not args.hybrid_layer_pattern:
        return "gpt_layer_spec"
    return "local_hybrid_stack_spec" if args.transformer_impl == "local" else "hybrid_stack_spec"


def _parsed(words: list[str]) -> tuple[argparse.Namespace, list[str], dict[str, str]]:
    """Returns the values of Megatron's flags and ours, the given flags of Megatron, and all given ones as typed.

    Flags are in their main spelling; the last of the three has the words of each, the last ones if it is repeated.
    """
    from megatron_cp.megatron.config import add_arguments, add_megatrons_arguments

    parser = _Parser(prog="megatron-cp doctor --megatron", allow_abbrev=False, add_help=False)
    add_megatrons_arguments(parser)
    ours = argparse.ArgumentParser(add_help=False)
    add_arguments(ours)
    add_arguments(parser)
    names = {option: action.option_strings[0] for action in parser._actions for option in action.option_strings}
    own = {option for action in ours._actions for option in action.option_strings}
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise _unknown(unknown[0])
    typed: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = names[word.partition("=")[0]]
            typed[flag] = []
        typed[flag].append(word)
    texts = {flag: _shortened(shlex.join(each)) for flag, each in typed.items()}
    return args, [flag for flag in typed if flag not in own], texts


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"--megatron: {message}.")


class _AsConfig:
    """Presents flags under their names in Megatron's configuration."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        args = self._args
        if name in _WITHOUT_FLAGS:
            return _WITHOUT_FLAGS[name]
        if name == "heterogeneous_block_specs":
            given = args.heterogeneous_layers_config_path, args.heterogeneous_layers_config_encoded_json
            return any(value is not None for value in given)
        value = getattr(args, {"num_moe_experts": "num_experts"}.get(name, name))
        if name == "cuda_graph_impl":
            return "none" if value is None else value
        if name == "mamba_training_ssm_states_dtype":
            return None if value == "fp32" else value
        return value[0] if isinstance(value, list) and len(value) == 1 else value


# Fields of the configuration that no flag sets; our configuration sets the first.
_WITHOUT_FLAGS = {"variable_seq_lengths": True, "log_max_attention_logit": False}


def _refusals(config: Any) -> Iterator[Any]:
    from megatron_cp.errors import ArgumentError
    from megatron_cp.megatron.config import check_options, schemes_of
    from megatron_cp.megatron.layers import refusals
    from megatron_cp.planner.capabilities import require

    yield from refusals.unsupported(config)
    yield from refusals.unsupported_attention(config)
    yield from refusals.unsupported_spec(config)
    if config.multi_latent_attention:
        yield from refusals.unsupported_latent_attention(config)
    if "D" in (config.hybrid_layer_pattern or "") or config.experimental_attention_variant == "dsa":
        yield from refusals.unsupported_sparse_attention(config)
    if "M" in (config.hybrid_layer_pattern or ""):
        yield from refusals.unsupported_mamba(config)
    try:
        check_options(config)
    except ArgumentError as error:
        yield error
    for scheme in schemes_of(config):
        try:
            require("scheme", scheme, name="--cp-comm-type")
        except ArgumentError as error:
            yield error
