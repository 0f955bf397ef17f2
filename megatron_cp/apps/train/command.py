"""`megatron-cp train`: trains a Megatron model on packed documents, on local ranks or those of torchrun."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.apps.train.interruption import PATIENCE, Terminated, Terminations, cause_of, record_interruption
from megatron_cp.apps.train.options import METRICS, Run, TrainingOptions
from megatron_cp.apps.train.record import Entry, RunRecord, draws_pictures, entries_of, losses_of
from megatron_cp.apps.train.run_folder import CHECKPOINTS, claimed, latest_checkpoint, write_whole
from megatron_cp.cli import (
    INSTALL_MEGATRON,
    MAX_LOCAL_RANKS,
    MAX_TOKENS,
    Report,
    UsageError,
    check_paths,
    command_line,
    flags,
    megatron_is_installed,
    number,
    of_kind,
    tokens,
    whole,
)
from megatron_cp.data import read_corpus, read_tokenizer
from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install, installed_version
from megatron_cp.page import check_charts
from megatron_cp.plan import plural
from megatron_cp.testing import CODEC_TOLERANCES

if TYPE_CHECKING:
    from megatron_cp.data import Corpus
    from megatron_cp.executor import TorchGroup

EXAMPLES = (
    "train --cp 2 --train-iters 20 --run-dir runs/first",
    "train --resume runs/first --cp 3 --train-iters 40",
)
# The options that --help lists.
COMMON = (
    "spec", "hybrid_layer_pattern", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
    "context_parallel_size", "cp_comm_type", "linear_cp_mode", "cp_layout", "data_path", "seq_length", "train_iters",
    "lr", "bf16", "run_dir", "resume", "compare", "report",
)  # fmt: skip
_METRICS = "metrics.jsonl in the run's folder has a line of metrics for each step."
_OF_MEGATRON = "Use it in a Megatron job of your own, such as examples/pretrain_hybrid.py."
# Flags that left or are not there, and what to take instead.
LEFT = {
    "--cp-search-cache": "Every rank finds the same tiles without a cache: pass only --cp-search.",
    "--micro-batch-size": "A microbatch is one pack of --seq-length tokens.",
    "--tensorboard": _METRICS, "--wandb": _METRICS,
    "--sample-tokens": "Load the checkpoint with Megatron's inference.",
    "--validation": "Use --eval-iters in a Megatron job of your own, such as examples/pretrain_hybrid.py.",
    **dict.fromkeys(
        ("--cp-even-packs", "--eval-interval", "--eval-iters", "--tensor-model-parallel-size", "--sequence-parallel",
         "--use-distributed-optimizer", "--vocab-size", "--min-lr", "--lr-decay-style", "--lr-decay-iters",
         "--experimental-attention-variant", "--linear-attention-freq", "--window-attn-skip-freq",
         "--attention-dropout", "--position-embedding-type", "--norm-epsilon", "--make-vocab-size-divisible-by"),
        _OF_MEGATRON,
    ),
}  # fmt: skip
OPTIONS_FILE = "options.json"
REFERENCE = "one_rank"  # what --compare trains for comparison
GRADIENTS = ".first_gradients"  # while it compares
# Limits of --compare in fp32. Gradients of the first step differ by rounding alone; losses then drift apart.
GRADIENT_TOLERANCE, LOSS_TOLERANCE = 1e-5, 1e-3
CODED_LOSS_TOLERANCE = 2e-2
GRADIENT_DIFF = "first_step_grad_diff"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `TrainingOptions`, and the options of the run's folder, comparison and device."""
    groups: dict[str, Any] = {}
    for entry in dataclasses.fields(TrainingOptions):
        details = {name: value for name, value in entry.metadata.items() if name not in ("group", "shape", "kept")}
        group = entry.metadata["group"]
        groups.setdefault(group, parser.add_argument_group(group))
        # Absent unless given, so that a resumed run can tell what is to change.
        details |= {"default": argparse.SUPPRESS, "help": _help(entry)}
        if entry.type == "bool":
            details["action"] = argparse.BooleanOptionalAction
        elif details.get("type") is int:
            details["type"] = whole
        elif entry.name == "seq_length":
            details["type"] = tokens
        elif entry.name in _SPELLED:
            details["type"] = of_kind(_SPELLED[entry.name])
        elif "nargs" not in details:
            details["type"] = _TYPES[str(entry.type).removesuffix(" | None")]
        groups[group].add_argument(*flags(entry.name.replace("_", "-")), **details)
    run = parser.add_argument_group("run")
    run.add_argument("--run-dir", metavar="DIR", help="folder of the run's files (default: runs/ and the time)")
    run.add_argument(
        "--resume",
        metavar="DIR",
        help="continue from the last checkpoint of the run in DIR; use only runs of your own, see docs/trust.md",
    )
    run.add_argument(
        "--compare",
        action="store_true",
        help="train at --context-parallel-size 1 too. In fp32, fail if gradients of the first step differ by more than "
        f"{GRADIENT_TOLERANCE:g} or losses by more than {LOSS_TOLERANCE:g}; with --cp-codec, gradients by more than "
        f"{', '.join(f'{limit:g} ({codec})' for codec, limit in CODEC_TOLERANCES.items())} or losses by more than "
        f"{CODED_LOSS_TOLERANCE:g}",
    )
    run.add_argument("--report", metavar="FILE.html", help="save a page with the run's curves; needs plotly")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if present")


_TYPES = {"int": whole, "float": number, "str": str}
# Options whose values have several spellings.
_SPELLED = {
    "cp_comm_type": "scheme", "linear_cp_mode": "mode", "cp_layout": "layout", "cp_transport": "transport",
    "cp_codec": "codec",
}  # fmt: skip


def _help(entry: dataclasses.Field[Any]) -> str:
    default, text = entry.default, entry.metadata["help"]
    if default is None or default is False:
        return str(text)
    return f"{text} (default: {' '.join(default) if isinstance(default, tuple) else default})"


def run(args: argparse.Namespace) -> Report:
    """Trains; `--compare` trains again on one context-parallel rank."""
    options = _options(args)
    options.check()
    if options.seq_length > MAX_TOKENS:
        raise ArgumentError("seq_length", options.seq_length, f"at most {MAX_TOKENS} tokens in a pack")
    if args.compare:
        _check_comparison(options)
    check_paths(args)
    if args.report is not None:
        check_charts("report", args.report)
    if not megatron_is_installed():
        raise UsageError("Megatron-Core is not installed here. Run: " + INSTALL_MEGATRON)
    named = args.run_dir or args.resume
    is_new = named is None or not Path(named).is_dir()
    patience = PATIENCE if "RANK" in os.environ else None
    with Terminations(patience) as terminations, contextlib.ExitStack() as held:
        is_first = os.environ.get("RANK", "0") == "0"  # others of a job would meet the lock of their own first rank
        folder = claimed(args.run_dir, args.resume, held) if is_first else None
        try:
            corpus = read_corpus(options.data_path, read_tokenizer(options.tokenizer_model))
            return _started(args, options, corpus, folder, terminations)
        except KeyboardInterrupt as error:
            said = str(error) or f"{cause_of(error)} before the first step; nothing was saved"
            raise KeyboardInterrupt(said) from None
        except ArgumentError:
            if folder is not None and is_new and not (folder / METRICS).exists():
                shutil.rmtree(folder)  # no run to go on with
            raise


def _started(
    args: argparse.Namespace, options: TrainingOptions, corpus: Corpus, folder: Path | None, terminations: Terminations
) -> Report:
    """Imports torch and Megatron, which takes seconds, and trains on the ranks of torchrun or on local ones."""
    _quiet_imports()
    import torch.distributed as dist

    from megatron_cp.executor import in_torchrun, start_torchrun_rank

    world = start_torchrun_rank() if in_torchrun() else None
    is_interrupted = False
    try:
        return _run(args, options, corpus, folder, world, terminations)
    except KeyboardInterrupt:
        is_interrupted = True  # in operations that may never end, as other ranks are interrupted too
        raise
    finally:
        if world is not None and dist.is_initialized() and not is_interrupted:
            dist.destroy_process_group()


def _run(
    args: argparse.Namespace, options: TrainingOptions, corpus: Corpus, own: Path | None, world: TorchGroup | None,
    terminations: Terminations,
) -> Report:  # fmt: skip
    """Trains in a folder, which is `own` on the rank that has claimed it and None on the others."""
    import torch

    from megatron_cp.apps.train.checkpoint import check_checkpoint
    from megatron_cp.apps.train.setup import transformer_config

    device = _device(args.device)
    if world is None and options.context_parallel_size * options.data_parallel_size > MAX_LOCAL_RANKS:
        allowed = f"at most {MAX_LOCAL_RANKS} local ranks, with data parallelism"
        remedy = "Run larger jobs under torchrun."
        raise ArgumentError("context_parallel_size", options.context_parallel_size, allowed, remedy)
    config = transformer_config(options, torch.device(device))  # refuses a wrong shape before ranks start
    checkpoint = None
    if args.resume is not None:
        checkpoint = latest_checkpoint(Path(args.resume) / CHECKPOINTS)
        check_checkpoint(checkpoint, options, corpus.vocab_size)
    folder = Path(world.all_gather_object(str(own))[0]) if world is not None else own
    assert folder is not None
    record = None
    if own is not None:
        write_whole(folder / OPTIONS_FILE, json.dumps(dataclasses.asdict(options), indent=2) + "\n")
        record = RunRecord(folder, options, command_line(args), args.report)
        print(_about(corpus, options, folder), file=sys.stderr)
        if config.transformer_impl == "local" and installed_version("transformer-engine") is not None:
            remark = "Layers are Megatron's own, without Transformer Engine, whose layers need CUDA."
            print(remark, file=sys.stderr)
        if not draws_pictures():
            print(f"No loss.png, no plan.png: matplotlib is not installed; {install('plot')}", file=sys.stderr)
    label = f"CP={options.context_parallel_size}"
    run = Run(options, folder, checkpoint, label, first_gradients=folder / GRADIENTS if args.compare else None)
    if record is not None:
        terminations.last_words = lambda: print(
            record_interruption(run, record, Terminated()), file=sys.stderr, flush=True
        )
    try:
        summary = _train(run, device, world)
        return Report("", quiet=True) if record is None else _finished(args, run, summary, record, device)
    except KeyboardInterrupt as error:
        if record is None:
            raise KeyboardInterrupt("interrupted; the first rank prints how far the run came") from None
        if (folder / METRICS).exists():
            print(file=sys.stderr)  # the progress bar's line has no end
        raise KeyboardInterrupt(record_interruption(run, record, error)) from None
    except BaseException as error:
        if record is not None:
            record.ended(error=cause_of(error))
        raise
    finally:
        if record is not None:
            shutil.rmtree(folder / GRADIENTS, ignore_errors=True)


def _finished(args: argparse.Namespace, run: Run, summary: dict[str, Any], record: RunRecord, device: str) -> Report:
    """Compares with one rank if that was asked for, and writes what a run leaves to look at."""
    options, folder, entries, theirs = run.options, run.folder, entries_of(run.folder), list[dict[str, Any]]()
    record.environment["threads"] = summary.pop("threads")
    data = {**summary, "max_loss_diff": None, GRADIENT_DIFF: None, "run_dir": str(folder)}
    lines, is_good = [_described(run.name, summary)], math.isfinite(summary["final_loss"])
    verdict, allowed = lines[0], limits(options) if args.compare else {}
    if args.compare:
        reference = _reference(run, device)
        theirs = entries_of(folder / REFERENCE)
        numbers, remark = compared(folder, entries, theirs)
        data |= numbers
        lines += [_described("CP=1", reference), remark]
        if not options.bf16:
            is_good = agrees(data, options)
            verdict = (
                f"{run.name} and CP=1 {'agree' if is_good else 'DO NOT AGREE'} (limits {allowed['max_loss_diff']:g} "
                f"for losses, {allowed[GRADIENT_DIFF]:g} for gradients)"
            )
            lines.append(verdict)
    rows = [[name.replace("_", " "), value, allowed.get(name)] for name, value in data.items() if value is not None]
    record.report((verdict, is_good), entries, theirs, rows)
    # JSON has no NaN.
    data = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in data.items()}
    record.ended(data)
    lines.append(f"in {folder}: {', '.join(sorted(path.name for path in folder.glob('[!.]*')))}")
    return Report("\n".join(lines), data, is_good)


def _described(name: str, summary: dict[str, Any]) -> str:
    return (
        f"{name}: {summary['steps']} steps, loss {summary['first_loss']:.4f} to {summary['final_loss']:.4f}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['pad_tokens']} pad tokens"
    )


def _train(run: Run, device: str, world: TorchGroup | None) -> dict[str, Any]:
    from megatron_cp.apps.train.loop import train

    if world is not None:
        return train(world, run, device)
    from megatron_cp.executor import run_ranks

    size = run.options.context_parallel_size * run.options.data_parallel_size
    return run_ranks(_local_rank, size, run, device, kind="processes", timeout=None)[0]


def _local_rank(world: TorchGroup, run: Run, device: str) -> dict[str, Any]:
    _quiet_imports()
    from megatron_cp.apps.train.loop import train

    return train(world, run, device)


def _reference(run: Run, device: str) -> dict[str, Any]:
    """Trains again on this machine, with one context-parallel rank for each replica."""
    alone = dataclasses.replace(run.options, context_parallel_size=1, cp_comm_type=("auto",))
    target = run.folder / REFERENCE
    target.mkdir(exist_ok=True)
    gradients = run.folder / GRADIENTS / REFERENCE
    hidden = {name for name in os.environ if name.startswith("TORCHELASTIC_") or name in _TORCHRUN}
    saved = {name: os.environ.pop(name) for name in hidden}  # local ranks must not use the address of torchrun's job
    try:
        return _train(Run(alone, target, run.resume, "CP=1", save=False, first_gradients=gradients), device, None)
    finally:
        os.environ.update(saved)


def compared(folder: Path, ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[dict[str, float], str]:
    """Returns the numbers of `--compare`, and the line that describes them."""
    from megatron_cp.apps.train.checkpoint import compare_gradients
    from megatron_cp.apps.train.loop import FIRST_GRADIENTS

    kept = folder / GRADIENTS
    error, worst = compare_gradients(kept / FIRST_GRADIENTS, kept / REFERENCE / FIRST_GRADIENTS)
    losses = losses_of(ours), losses_of(theirs)
    steps = losses[0].keys() & losses[1].keys()
    # No step in common agrees with nothing; np.max is NaN if any is.
    loss_diff = float(np.max([abs(losses[0][step] - losses[1][step]) for step in steps])) if steps else math.nan
    line = f"max_loss_diff {loss_diff:.3g} over {len(steps)} steps, {GRADIENT_DIFF} {error:.3g} in {worst}"
    return {"max_loss_diff": loss_diff, GRADIENT_DIFF: error}, line


def agrees(data: dict[str, Any], options: TrainingOptions) -> bool:
    """Returns True if the two runs of `--compare` are equal up to rounding; a loss of NaN agrees with nothing."""
    return options.bf16 or all(data[name] is None or data[name] <= limit for name, limit in limits(options).items())


def limits(options: TrainingOptions) -> dict[str, float]:
    """Returns the largest differences allowed between the two runs: rounding, or the loss of a codec."""
    if options.cp_codec != "none" and options.context_parallel_size > 1:
        losses, gradients = CODED_LOSS_TOLERANCE, CODEC_TOLERANCES[options.cp_codec]
    else:
        losses, gradients = LOSS_TOLERANCE, GRADIENT_TOLERANCE
    return {"max_loss_diff": losses, GRADIENT_DIFF: gradients}


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def _options(args: argparse.Namespace) -> TrainingOptions:
    """Returns the options of the run that is resumed, replaced by those that are given."""
    known: dict[str, Any] = {}
    if args.resume is not None:
        path = Path(args.resume) / OPTIONS_FILE
        try:
            known = _tuples(json.loads(path.read_text()))
            TrainingOptions(**known).check()
        except (OSError, TypeError, ValueError, RecursionError, AttributeError) as error:  # another version, by hand
            remedy = f"Cannot read {OPTIONS_FILE}: {str(error).removesuffix('.')}."
            raise ArgumentError("resume", args.resume, "the folder of a run", remedy) from None
    given = {
        entry.name: getattr(args, entry.name) for entry in dataclasses.fields(TrainingOptions) if entry.name in args
    }
    merged: dict[str, Any] = {**known, **given}
    if "lr_warmup_iters" not in merged:
        steps = merged.get("train_iters", TrainingOptions.train_iters)
        merged["lr_warmup_iters"] = max(0, min(TrainingOptions.lr_warmup_iters, steps // 5))
    options = TrainingOptions(**_tuples(merged))
    vars(args).update(dataclasses.asdict(options))  # `main` spells as flags what is in there
    return options


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces the lists of JSON and the command line by tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_comparison(options: TrainingOptions) -> None:
    """Refuses to compare options of messages on one rank, which sends none: both runs would be the same."""
    names = ("cp_codec", "cp_transport", "cp_head_chunks")
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) != getattr(TrainingOptions, n)]
    if options.context_parallel_size == 1 and given:
        allowed = f"2 or more with --compare and {' and '.join(given)}"
        remedy = "One rank sends nothing, so there is nothing to compare."
        raise ArgumentError("context_parallel_size", 1, allowed, remedy)


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", name, "cpu or auto", "This machine has no CUDA device.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _about(corpus: Any, options: TrainingOptions, folder: Path) -> str:
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(corpus.skipped.items()))
    lengths = corpus.lengths
    return (
        f"{corpus.name}: {lengths.size:,} {plural('document', lengths.size)}, "
        f"{int(lengths.sum()):,} tokens, the longest {int(lengths.max()):,}"
        f"{f'; skipped {skipped}' if skipped else ''}. Packs of {options.seq_length} tokens. Writing to {folder}."
    )


def _quiet_imports() -> None:
    """Silences the warnings of Megatron and torch about optional packages."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron\.core|torch|fla)\b.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.ERROR)
