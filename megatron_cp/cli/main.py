"""`megatron-cp`: parses, runs one command, prints its report and its JSON, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from megatron_cp import __version__
from megatron_cp.cli.applications import application
from megatron_cp.cli.parser import Parser, UsageError, as_flag
from megatron_cp.cli.report import Report
from megatron_cp.cli.terminal import coloured
from megatron_cp.errors import ArgumentError, PlanMismatchError

COMMANDS = {
    "train": "train a Megatron model with context parallelism on packed documents",
    "check": "compare the outputs and all gradients of one layer on N ranks with those on one rank",
    "plan": "predict the fastest layout and scheme, and explain the plan: tokens, transfers and balance",
    "doctor": "show versions, kernels and devices, and what works on this machine",
}

_BENCH = "in a clone of the repository, `python -m benchmarks --help` lists the benchmarks."
INTERRUPTED = 130  # the exit status
_JSON = "print one JSON object to standard output instead of text"

_STATUS = (
    "exit status: 0 success, 1 a check or a rank failed, 2 wrong arguments, 3 nothing fits the memory "
    f"(plan --whole), {INTERRUPTED} interrupted"
)
_NUMBERS = "numbers of tokens: 256k is 262144 and 1M is 1048576, since k is 1024 and M is 1024 * 1024"


def command(name: str) -> Any:
    """Returns a command's module. Importing it is cheap: it imports torch and the like only when the command runs."""
    in_library = name in ("check", "plan", "doctor")
    return import_module(f"megatron_cp.cli.{name}") if in_library else application(f"{name}.command")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status, one of those that `--help` lists."""
    try:
        args = parsed(arguments)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return _run(args)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command line, with its command as `run`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["bench"]:
        raise UsageError(f"megatron-cp bench: it is not in the package: {_BENCH}")
    parser, commands = _parsers(next((word for word in words if not word.startswith("-")), None))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        commands[args.command].refuse_unknown(unknown, getattr(command(args.command), "LEFT", {}))
    args.words = words
    return args


def _parsers(chosen: str | None) -> tuple[Parser, dict[str, Parser]]:
    """Returns the command line's parser and those of all commands, of which the chosen one alone has its options."""
    parser = Parser(
        prog="megatron-cp",
        description="Context parallelism for packed documents: plan it, check it, train with it, see what works here.",
        epilog=f"{_examples('plan --cp 8 --model llama3-8b --lengths 100k,20k', 'doctor')}\n\n{_NUMBERS}\n{_STATUS}",
    )
    parser.add_argument("--version", action="version", version=f"megatron-cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, purpose in COMMANDS.items():
        sub = commands.add_parser(name, help=purpose, description=purpose)
        if name != chosen:  # whose options take a second to import
            continue
        module = command(name)
        if hasattr(module, "COMMON"):
            sub.list_common(module.COMMON)
        sub.epilog = f"{_examples(*module.EXAMPLES)}\n\n{_NUMBERS}"
        sub.add_argument("--json", action="store_true", help=_JSON)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser, commands.choices


def _run(args: argparse.Namespace) -> int:
    try:
        report: Report = args.run(args)
    except (ArgumentError, UsageError) as error:
        text = as_flag(error, args) if isinstance(error, ArgumentError) else str(error)
        print(f"megatron-cp {args.command}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"megatron-cp {args.command}: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except RuntimeError as error:
        from megatron_cp.executor.launch import RankError  # imports torch, as the code that raised this has

        if not isinstance(error, PlanMismatchError | RankError):
            raise
        print(f"megatron-cp {args.command}: {error}", file=sys.stderr)
        return 1
    if not report.quiet:
        print(json.dumps(report.data) if args.json else coloured(report.text, sys.stdout))
    return report.status


def _examples(*lines: str) -> str:
    """Returns the end of a help text with these command lines."""
    return "\n".join(["examples:", *(f"  megatron-cp {line}" for line in lines)])


def console() -> None:
    """Runs the command line and exits, without waiting for threads that exceeded their time limit."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.stderr.flush()
    # What was interrupted may have threads of torch that would abort the interpreter's shutdown.
    if status == INTERRUPTED or any(
        thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()
    ):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    console()
