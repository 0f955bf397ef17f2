"""`megatron-cp doctor --megatron`: judges the flags of a Megatron job without starting it."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from megatron_cp.cli.environment import version_of
from megatron_cp.cli.parser import UsageError
from megatron_cp.cli.report import Report
from megatron_cp.errors import ArgumentError
from megatron_cp.megatron import rules
from megatron_cp.megatron.features import FEATURE_BY_FLAG, PROVED, REFUSED
from megatron_cp.megatron.flags import Flags, add_megatrons_arguments, read_by_megatron, version
from megatron_cp.megatron.options import add_arguments, option_errors, schemes_of
from megatron_cp.megatron.slots import attention_slot
from megatron_cp.plan.transport import Transport, knows_hosts
from megatron_cp.planner.capabilities import require

HELP = "judge each following flag of a Megatron job: proved, expected, untried or refused with context parallelism"
_ORDER = ("refused", "undecided", "untried", "unknown", "expected", "proved")


def judged(words: Sequence[str]) -> Report:
    """Returns a verdict on every flag that is given, the worst first; refusals are those of building the model.

    It imports neither torch nor Megatron: flags are read by a table of Megatron's parser, and judged by the rules that
    the layers have. The report fails if a flag is refused, or if several context-parallel ranks lack a flag that they
    need.
    """
    flags = _of_launch(list(words))
    if not flags:
        raise UsageError("--megatron: got no flags; allowed: the flags of a job, or its whole command line.")
    args, given, typed, strange = _parsed(flags)
    rows = sorted(_rows(args, given, strange), key=lambda row: (_ORDER.index(row[0]), row[1]))
    counts = {verdict: sum(row[0] == verdict for row in rows) for verdict in _ORDER}
    # A refusal may be of one value alone, so it is shown with the flag.
    shown = {flag: typed.get(flag, flag) if verdict == "refused" else flag for verdict, flag, _ in rows}
    width = max(map(len, shown.values()), default=0)
    unread = _unread(args, given)
    lines = [_verdict(rows), ""]
    lines += [f"{verdict:<11}{shown[flag]:<{width + 2}}{remark}" for verdict, flag, remark in rows]
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no flags"]
    lines += [f"not judged: {each}" for each in unread]
    if args.context_parallel_size == 1:
        lines.append("one context-parallel rank: --context-parallel-size is 1, so nothing is spread over ranks")
    names = ("verdict", "flag", "typed", "remark")
    data = {
        "flags": [
            dict(zip(names, (verdict, flag, typed.get(flag), remark), strict=True)) for verdict, flag, remark in rows
        ],
        "not_judged": unread,
    }
    is_ready = not counts["refused"] + counts["undecided"]
    return Report("\n".join(lines), {"ready": is_ready, **data, "counts": counts}, ok=is_ready)


def _rows(args: argparse.Namespace, given: Sequence[str], strange: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yields the verdict on each flag and on each that is missing, and the reason."""
    config = Flags(args)
    errors = {error.argument: str(error).removeprefix(f"{error.argument}: ") for error in _refusals(args, config)}
    cp, length = args.context_parallel_size, args.seq_length
    if cp > 1 and length and length % (2 * cp):
        errors["--seq-length"] = (
            f"got {length}; allowed: a multiple of {2 * cp}, as Megatron asks. Packs may be shorter."
        )
    for flag in given:  # two older names set what a newer one does
        if flag in _OLDER and _OLDER[flag] in errors:
            errors[flag] = errors.pop(_OLDER[flag])
    elsewhere = [flag for flag in strange if flag in FEATURE_BY_FLAG]
    if _judges_what_is_here():
        errors |= {flag: _of_another_release(flag) for flag in elsewhere}
    yield from (("refused", flag, error) for flag, error in errors.items())
    undecided = dict(_undecided(args))
    yield from (("undecided", flag, remark) for flag, remark in undecided.items())
    yield from (
        ("unknown", flag, f"no flag of megatron-core {version()}, whose flags are judged")
        for flag in strange
        if flag not in elsewhere
    )
    for flag in (*given, *elsewhere):
        if flag in errors or flag in undecided:
            continue
        feature = FEATURE_BY_FLAG.get(flag)
        if feature is None:
            yield "unknown", flag, "not in the table: compare a step with one rank"
        elif feature.verdict == REFUSED:
            yield "expected", flag, f"as given; else {feature.remark}"
        elif feature.verdict == PROVED:
            yield feature.verdict, flag, f"{feature.remark}: {feature.proof}"
        else:
            yield feature.verdict, flag, feature.remark


def _judges_what_is_here() -> bool:
    """True unless a Megatron is installed whose flags are others than those of the table."""
    return version_of("megatron-core") in (None, version())


def _of_another_release(flag: str) -> str:
    feature = FEATURE_BY_FLAG[flag]
    others = " and ".join(f"{name} of Megatron-LM" for name in feature.releases)
    return f"no flag of megatron-core {version()}. In {others} it is {feature.verdict}: {feature.remark}"


_OLDER = {"--enable-cuda-graph": "--cuda-graph-impl", "--external-cuda-graph": "--cuda-graph-impl"}


def _unread(args: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """Returns what of the flags nothing here reads."""
    unread = []
    values = sorted(read_by_megatron().intersection(given))
    if values:
        unread.append(f"the values of {', '.join(values)}, which Megatron reads")
    for flag, value in (("--use-checkpoint-args", args.use_checkpoint_args), ("--yaml-cfg", args.yaml_cfg)):
        if value:
            unread.append(f"what {flag} loads")
    if not _judges_what_is_here():
        here = version_of("megatron-core")
        unread.append(f"flags that megatron-core {here}, which is installed, does not share with {version()}")
    return unread


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


def _parsed(words: list[str]) -> tuple[argparse.Namespace, list[str], dict[str, str], list[str]]:
    """Returns the values of all flags, the given ones of Megatron, the words of each given one, and unknown ones.

    Flags are in their main spelling; of a repeated one, the words are the last ones. Unknown flags are refused unless
    another Megatron is installed, which may have them, or the table of features has them for another release.
    """
    parser = _Parser(prog="megatron-cp doctor --megatron", allow_abbrev=False, add_help=False)
    add_megatrons_arguments(parser)
    theirs = {option for action in parser._actions for option in action.option_strings}
    add_arguments(parser)
    names = {option: action.option_strings[0] for action in parser._actions for option in action.option_strings}
    args, unknown = parser.parse_known_args(words)
    strange = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    wrong = [flag for flag in strange if flag not in FEATURE_BY_FLAG] if _judges_what_is_here() else []
    if unknown and not unknown[0].startswith("--"):
        wrong = [unknown[0]]
    if wrong:
        raise UsageError(f"--megatron: {wrong[0]} is no flag of megatron-core {version()} or of megatron_cp.")
    for number, word in enumerate(unknown):  # the rules look for them among the values
        flag, _, value = word.partition("=")
        if flag in FEATURE_BY_FLAG:
            behind = itertools.takewhile(lambda each: not each.startswith("--"), unknown[number + 1 :])
            setattr(args, flag.removeprefix("--").replace("-", "_"), value or next(behind, True))
    typed: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = names.get(word.partition("=")[0], "")
            typed[flag] = []
        typed.setdefault(flag, []).append(word)
    typed.pop("", None)
    texts = {flag: _shortened(shlex.join(each)) for flag, each in typed.items()}
    return args, [flag for flag in typed if flag in theirs], texts, strange


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"--megatron: {message}.")


def _refusals(args: argparse.Namespace, config: Any) -> Iterator[ArgumentError]:
    """Yields the errors of the rules, for all layers that the flags describe."""
    divisors = ("num_attention_heads", "tensor_model_parallel_size", "context_parallel_size")
    wrong = [name for name in divisors if getattr(args, name) is not None and getattr(args, name) < 1]
    if wrong:  # other rules divide by them
        for name in wrong:
            yield ArgumentError(f"--{name.replace('_', '-')}", getattr(args, name), "an integer of at least 1")
        return
    te = find_spec("transformer_engine") is not None and config.transformer_impl != "local"
    pattern, is_sparse = config.hybrid_layer_pattern or "", config.experimental_attention_variant == "dsa"
    yield from rules.unsupported(config)
    yield from rules.unsupported_attention(config)
    yield from rules.unsupported_spec(config)
    yield from rules.unsupported_layers(pattern.replace("|", "").replace("/", ""))  # stages, and layers that look ahead
    yield from rules.unsupported_shards(args, config.context_parallel_size)
    if args.cp_dynamic:
        yield from rules.unsupported_groups(args)
    if config.multi_latent_attention:
        yield from rules.unsupported_latent_attention(config, te=te)
    if is_sparse:
        yield from rules.unsupported_sparse_attention(config, te=te)
    if "M" in pattern:
        yield from rules.unsupported_mamba(config)
    ours = list(option_errors(config))
    yield from ours
    sizes = (config.num_attention_heads, config.hidden_size or args.kv_channels)
    has_softmax = not is_sparse and (not pattern or "*" in pattern)
    if not has_softmax or config.context_parallel_size == 1:
        return
    if ours or None in sizes:  # no layer can be planned, but schemes have names
        yield from _misspelt(config)
    else:
        yield from _unplanned(config)


def _misspelt(config: Any) -> Iterator[ArgumentError]:
    for scheme in dict.fromkeys(schemes_of(config)):
        try:
            require("scheme", scheme, name="--cp-comm-type")
        except ArgumentError as error:
            yield error


def _unplanned(config: Any) -> Iterator[ArgumentError]:
    """Yields the errors of planning the softmax layers, one for each scheme that `--cp-comm-type` names."""
    latent = config.multi_latent_attention
    of_heads = {"k_channels": config.qk_head_dim + config.qk_pos_emb_head_dim, "v_channels": config.v_head_dim}
    hosts = knows_hosts(config.cp_transport)  # which are not known before the job runs
    options = {
        "head_chunks": config.cp_head_chunks, "codec": config.cp_codec, "hardware": config.cp_hardware,
        "transport": Transport.named("collective" if hosts else config.cp_transport),
        "item_size": 2 if config.bf16 or config.fp16 else 4,
    }  # fmt: skip
    for scheme in dict.fromkeys(schemes_of(config)):
        try:
            attention_slot(
                config, config.context_parallel_size, scheme, "causal", options,
                tp_size=config.tensor_model_parallel_size, **(of_heads if latent else {}),
            )  # fmt: skip
        except ArgumentError as error:
            yield error
