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
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_cp.apps.train.comparison import (
    CODED_LOSS_TOLERANCE,
    GRADIENT_DIFF,
    GRADIENT_TOLERANCE,
    GRADIENTS,
    LOSS_TOLERANCE,
    REFERENCE,
    agrees,
    compared,
    limits,
)
from megatron_cp.apps.train.curves import LOSS_PICTURE, entries_of, loss_figure
from megatron_cp.apps.train.documents import read_text, split_corpus
from megatron_cp.apps.train.interruption import PATIENCE, Terminated, Terminations, cause_of, record_interruption
from megatron_cp.apps.train.options import METRICS, Run, TrainingOptions
from megatron_cp.apps.train.record import LOG_FILE, RUN_FILE, RunRecord, write_report
from megatron_cp.apps.train.run_folder import (
    CHECKPOINTS,
    LOCK,
    is_resumed,
    latest_checkpoint,
    locked,
    refuse_early,
    refuse_steps,
    write_whole,
    writing,
)
from megatron_cp.apps.train.trackers import check_trackers
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
from megatron_cp.errors import ArgumentError
from megatron_cp.extras import installed_version
from megatron_cp.files import whole_file
from megatron_cp.plan import plural
from megatron_cp.testing import CODEC_TOLERANCES

if TYPE_CHECKING:
    from megatron_cp.data import Corpus
    from megatron_cp.executor import TorchGroup

EXAMPLES = (
    "train --cp 2 --train-iters 20 --run-dir runs/first",
    "train --resume runs/first --cp 3 --train-iters 40",
)
OPTIONS_FILE = "options.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `TrainingOptions`, and the options of the run's folder, comparison and device."""
    groups: dict[str, Any] = {}
    for entry in dataclasses.fields(TrainingOptions):
        details = dict(entry.metadata)
        group = details.pop("group")
        for own in ("shape", "kept"):
            details.pop(own, None)
        groups.setdefault(group, parser.add_argument_group(group))
        # Absent unless given, so that a resumed run can tell what is to change.
        details |= {"default": argparse.SUPPRESS, "help": _help(entry, details.pop("help"))}
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
    run.add_argument("--run-dir", metavar="DIR", help="folder to write to (default: runs/ and the time)")
    run.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from the last checkpoint of the run in DIR; docs/trust.md says what is trusted there",
    )
    run.add_argument(
        "--compare",
        action="store_true",
        help="train at --context-parallel-size 1 too; fails in fp32 if gradients of the first step differ by more than "
        f"{GRADIENT_TOLERANCE:g} or losses by more than {LOSS_TOLERANCE:g}; with --cp-codec gradients by more than "
        f"{', '.join(f'{limit:g} ({codec})' for codec, limit in CODEC_TOLERANCES.items())} or losses by more than "
        f"{CODED_LOSS_TOLERANCE:g}",
    )
    run.add_argument(
        "--tensorboard", metavar="DIR", help="write the metrics for TensorBoard too, where it is installed"
    )
    run.add_argument(
        "--wandb", metavar="PROJECT", help="send the metrics to Weights & Biases too, where it is installed"
    )
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if present")


_TYPES = {"int": whole, "float": number, "str": str}
# Options whose values have several spellings.
_SPELLED = {
    "cp_comm_type": "scheme", "linear_cp_mode": "mode", "cp_layout": "layout", "cp_transport": "transport",
    "cp_codec": "codec",
}  # fmt: skip


def _help(entry: dataclasses.Field[Any], text: str) -> str:
    default = entry.default
    if default is None or default is False:
        return text
    formatted = " ".join(default) if isinstance(default, tuple) else default
    return f"{text} (default: {formatted})"


def run(args: argparse.Namespace) -> Report:
    """Trains; `--compare` trains again on one context-parallel rank."""
    options = _options(args)
    options.check()
    if options.seq_length > MAX_TOKENS:
        raise ArgumentError("seq_length", options.seq_length, f"at most {MAX_TOKENS} tokens in a pack")
    if args.compare:
        _check_comparison(options)
    check_paths(args)
    check_trackers(args.tensorboard, args.wandb)
    refuse_early(args.run_dir, args.resume)
    if not megatron_is_installed():
        raise UsageError("Megatron-Core is not installed here. Run: " + INSTALL_MEGATRON)
    text = read_text(options)
    with Terminations(PATIENCE if "RANK" in os.environ else None) as terminations:
        try:
            return _started(args, options, text, terminations)
        except KeyboardInterrupt as error:
            said = str(error) or f"{cause_of(error)} before the first step; nothing was saved"
            raise KeyboardInterrupt(said) from None


def _started(
    args: argparse.Namespace, options: TrainingOptions, text: Corpus | None, terminations: Terminations
) -> Report:
    """Imports torch and Megatron, which takes seconds, and trains on the ranks of torchrun or on local ones."""
    _quiet_imports()
    import torch.distributed as dist

    from megatron_cp.executor import in_torchrun, start_torchrun_rank

    world = start_torchrun_rank() if in_torchrun() else None
    is_interrupted = False
    try:
        with contextlib.ExitStack() as held:  # the folder's lock
            return _run(args, options, text, world, held, terminations)
    except KeyboardInterrupt:
        is_interrupted = True  # in operations that may never end, as other ranks are interrupted too
        raise
    finally:
        if world is not None and dist.is_initialized() and not is_interrupted:
            dist.destroy_process_group()


def _run(
    args: argparse.Namespace, options: TrainingOptions, text: Corpus | None, world: TorchGroup | None,
    held: contextlib.ExitStack, terminations: Terminations,
) -> Report:  # fmt: skip
    import torch

    from megatron_cp.apps.train.checkpoint import check_checkpoint, other_data
    from megatron_cp.apps.train.loop import load_corpus
    from megatron_cp.apps.train.setup import transformer_config

    device = _device(args.device)
    if world is None and options.model_parallel_size * options.data_parallel_size > MAX_LOCAL_RANKS:
        allowed = f"at most {MAX_LOCAL_RANKS} local ranks, with tensor and data parallelism"
        remedy = "Run larger jobs under torchrun."
        raise ArgumentError("context_parallel_size", options.context_parallel_size, allowed, remedy)
    config = transformer_config(options, torch.device(device))  # refuses a wrong spec or shape before data is read
    corpus, held_out = split_corpus(options, load_corpus(options) if text is None else text)
    checkpoint, remarks_on_data = None, list[str]()
    if args.resume is not None:
        checkpoint = latest_checkpoint(Path(args.resume) / CHECKPOINTS)
        steps = check_checkpoint(checkpoint, options, corpus.vocab_size)
        if others := other_data(checkpoint, options.data(corpus)):
            at = f"The run goes on at pack {steps * options.global_batch_size} of the new order"
            remarks_on_data = [f"other data: {'; '.join(others)}. {at}: documents are read again, or left out."]
    folder = _folder(args, options, world, checkpoint, held)
    quiet = world is not None and world.rank > 0
    about = [_about(corpus, held_out, options, folder), *remarks_on_data]
    if config.transformer_impl == "local" and installed_version("transformer-engine") is not None:
        about.append("Layers are Megatron's own (--transformer-impl local): Transformer Engine's need CUDA.")
    record = None if quiet else RunRecord(folder, options, command_line(args))
    if record is not None:
        print("\n".join(about), file=sys.stderr)
        record.say("\n".join(about))
    label = f"CP={options.context_parallel_size}"
    gradients = folder / GRADIENTS if args.compare else None
    main_run = Run(
        options, folder, checkpoint, label, first_gradients=gradients, tensorboard=args.tensorboard, wandb=args.wandb
    )
    if record is not None:
        terminations.last_words = lambda: print(
            record_interruption(main_run, record, command_line(args), Terminated()), file=sys.stderr, flush=True
        )
    try:
        summary = _train(main_run, device, world)
        if record is None:
            return Report("", quiet=True)
        report = _finished(args, main_run, summary, record, checkpoint, device)
    except KeyboardInterrupt as error:
        if record is None:
            raise KeyboardInterrupt("interrupted; the first rank says how far the run came") from None
        if (folder / METRICS).exists():
            print(file=sys.stderr)  # the progress bar's line has no end
        raise KeyboardInterrupt(record_interruption(main_run, record, command_line(args), error)) from None
    except BaseException as error:
        if record is not None:
            record.ended(error=cause_of(error))
        is_new = isinstance(error, ArgumentError) and args.resume is None and record is not None
        if is_new and {path.name for path in folder.iterdir()} <= {OPTIONS_FILE, RUN_FILE, LOG_FILE, LOCK}:
            shutil.rmtree(folder)  # no run to go on with
        raise
    finally:
        if record is not None:
            shutil.rmtree(folder / GRADIENTS, ignore_errors=True)
    return report


def _finished(
    args: argparse.Namespace, run: Run, summary: dict[str, Any], record: RunRecord, checkpoint: Path | None, device: str
) -> Report:
    """Compares with one rank if that was asked for, and writes what a run leaves to look at."""
    options, folder, label = run.options, run.folder, run.name
    shown = {name: summary.pop(name) for name in ("layers", "samples")}
    record.environment["threads"] = summary.pop("threads")
    data: dict[str, Any] = {
        **summary, "max_loss_diff": None, "max_validation_diff": None, "first_step_grad_diff": None,
        "run_dir": str(folder),
    }  # fmt: skip
    lines = [
        f"{label}: {summary['steps']} steps, loss {summary['first_loss']:.4f} to {summary['final_loss']:.4f}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['pad_tokens']} pad tokens{_held_out(summary)}"
    ]
    entries, theirs, is_good = entries_of(folder), None, math.isfinite(summary["final_loss"])
    verdict = lines[0]
    if args.compare:
        reference = _reference(options, folder, checkpoint, device)
        theirs = entries_of(folder / REFERENCE)
        numbers, remarks = compared(folder, options, entries, theirs)
        data |= numbers
        lines += [
            f"CP=1: loss {reference['first_loss']:.4f} to {reference['final_loss']:.4f}, "
            f"{reference['tokens_per_second']:,.0f} tokens/s{_held_out(reference)}",
            *remarks,
        ]
        if not options.bf16:
            is_good = agrees(data, options)
            losses_limit, gradients_limit = (limits(options)[name] for name in ("max_loss_diff", GRADIENT_DIFF))
            verdict = (
                f"{label} and CP=1 {'agree' if is_good else 'DO NOT AGREE'} (limits {losses_limit:g} for losses, "
                f"{gradients_limit:g} for gradients)"
            )
            lines.append(verdict)
    with writing(folder, LOSS_PICTURE), whole_file(folder / LOSS_PICTURE) as new:
        loss_figure(entries, label, theirs).savefig(new, dpi=130)
    write_report(
        folder, options, command_line(args), record.environment, label, entries, theirs, data | shown,
        (verdict, is_good), limits(options) if args.compare else {},
    )  # fmt: skip
    # JSON has no NaN.
    data = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in data.items()}
    record.say("\n".join(lines))
    record.ended(data)
    lines.append(f"in {folder}: {', '.join(sorted(path.name for path in folder.glob('[!.]*')))}")
    return Report("\n".join(lines), data, is_good)


def _held_out(summary: dict[str, Any]) -> str:
    found = summary["validation_loss"]
    return "" if found is None else f", validation loss {found:.4f}"


def _train(run: Run, device: str, world: TorchGroup | None) -> dict[str, Any]:
    from megatron_cp.apps.train.loop import train

    if world is not None:
        return train(world, run, device)
    from megatron_cp.executor import run_ranks

    size = run.options.model_parallel_size * run.options.data_parallel_size
    return run_ranks(_local_rank, size, run, device, kind="processes", timeout=None)[0]


def _local_rank(world: TorchGroup, run: Run, device: str) -> dict[str, Any]:
    _quiet_imports()
    from megatron_cp.apps.train.loop import train

    return train(world, run, device)


def _reference(options: TrainingOptions, folder: Path, checkpoint: Path | None, device: str) -> dict[str, Any]:
    """Trains again on this machine, with one context-parallel rank for each replica and tensor-parallel shard."""
    alone = dataclasses.replace(options, context_parallel_size=1, cp_comm_type=("auto",))
    target = folder / REFERENCE
    target.mkdir(exist_ok=True)
    gradients = folder / GRADIENTS / REFERENCE
    run = Run(alone, target, checkpoint, "CP=1", save=False, first_gradients=gradients)
    with _without_torchrun():
        return _train(run, device, None)


@contextlib.contextmanager
def _without_torchrun() -> Any:
    """Hides torchrun's variables, so that local ranks of one rank of its job do not use its address."""
    names = [name for name in os.environ if name.startswith("TORCHELASTIC_") or name in _TORCHRUN]
    saved = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(saved)


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
        if "spec" not in args:
            _check_named(TrainingOptions(**known).spec, args.resume)
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


def _check_named(spec: tuple[str, ...], folder: str) -> None:
    """Refuses to run code that a file names, unless it belongs to this program or Megatron-Core."""
    if not spec[0].startswith(("megatron_cp.", "megatron.core.")):
        allowed = f"a run whose {OPTIONS_FILE} names a spec of megatron_cp or megatron.core, or --spec MODULE NAME too"
        remedy = f"It names {' '.join(spec)}, whose code would run. If you trust it: --spec {' '.join(spec)}"
        raise ArgumentError("resume", folder, allowed, remedy)


def _check_comparison(options: TrainingOptions) -> None:
    """Refuses to compare options of messages on one rank, which sends none: both runs would be the same."""
    names = ("cp_codec", "cp_transport", "cp_head_chunks")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(_DEFAULTS, name)]
    if options.context_parallel_size == 1 and given:
        allowed = f"2 or more with --compare and {' and '.join(given)}"
        remedy = "One rank sends nothing, so that there is nothing to compare."
        raise ArgumentError("context_parallel_size", 1, allowed, remedy)


_DEFAULTS = TrainingOptions()


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", name, "cpu or auto", "This machine has no CUDA device.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _folder(
    args: argparse.Namespace,
    options: TrainingOptions,
    world: TorchGroup | None,
    checkpoint: Path | None,
    held: contextlib.ExitStack,
) -> Path:
    """Makes the run's folder, locks it for as long as `held` is open, and writes the run's options there."""
    named = args.run_dir or args.resume
    folder = Path(named) if named else Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    if world is not None:
        folder = Path(world.all_gather_object(str(folder))[0])
    try:
        folder.mkdir(parents=True, exist_ok=named is not None or world is not None)
        if world is None or world.rank == 0:
            held.enter_context(locked(folder, "resume" if is_resumed(folder, args.resume) else "run_dir"))
            if is_resumed(folder, args.resume) and latest_checkpoint(folder / CHECKPOINTS) != checkpoint:
                remedy = "It has just saved another checkpoint: start again."
                raise ArgumentError("resume", args.resume, "the folder of a run that has ended", remedy)
            refuse_steps(folder, args.resume)
            write_whole(folder / OPTIONS_FILE, json.dumps(dataclasses.asdict(options), indent=2) + "\n")
    except OSError as error:
        raise ArgumentError("run_dir", str(folder), "a folder that can be written", f"{error.strerror}.") from None
    return folder


def _about(corpus: Any, held_out: Any, options: TrainingOptions, folder: Path) -> str:
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(corpus.skipped.items()))
    lengths = corpus.lengths
    kept = "" if held_out is None else f"; {held_out.lengths.size:,} more are held out for validation"
    return (
        f"{corpus.name}: {lengths.size:,} {plural('document', lengths.size)}, "
        f"{int(lengths.sum()):,} tokens, the longest {int(lengths.max()):,}"
        f"{f'; skipped {skipped}' if skipped else ''}{kept}. Packs of {options.seq_length} tokens. Writing to {folder}."
    )


def _quiet_imports() -> None:
    """Silences the warnings of Megatron and torch about optional packages."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron\.core|torch|fla)\b.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.ERROR)
