"""`megatron-cp`: parses, runs one command, prints its report and its JSON, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from typing import Any

from megatron_cp import __version__
from megatron_cp.cli import check, doctor, plan
from megatron_cp.cli.applications import application
from megatron_cp.cli.parser import Parser, UsageError, as_flag
from megatron_cp.cli.report import Report
from megatron_cp.errors import ArgumentError, PlanMismatchError

COMMANDS = ("train", "check", "plan", "bench", "doctor")

_JSON = "one JSON object on the last line of standard output, and the text on standard error"


def command(name: str) -> Any:
    """Returns a command's module. Importing it is cheap: it imports torch and the like only when the command runs."""
    library = {"check": check, "plan": plan, "doctor": doctor}
    return library[name] if name in library else application(f"{name}.command")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0 success, 1 a check failed, 2 bad usage."""
    parser = Parser(
        prog="megatron-cp",
        description="Context parallelism for packed batches: check it, plan it, measure it, see what works here.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        module = command(name)
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        sub.add_argument("--json", action="store_true", help=_JSON)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    try:
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            commands.choices[args.command].refuse_unknown(unknown)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    args.command_line = shlex.join(["megatron-cp", *(sys.argv[1:] if arguments is None else arguments)])  # for reports
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        report: Report = args.run(args)
    except (ArgumentError, UsageError) as error:
        text = as_flag(error, args) if isinstance(error, ArgumentError) else str(error)
        print(f"megatron-cp {args.command}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megatron-cp {args.command}: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        from megatron_cp.executor.launch import RankError  # imports torch, as the code that raised this has

        if not isinstance(error, PlanMismatchError | RankError):
            raise
        print(f"megatron-cp {args.command}: {error}", file=sys.stderr)
        return 1
    if not report.quiet:
        print(report.text, file=sys.stderr if args.json else sys.stdout)
        if args.json:
            print(json.dumps(report.data))
    return 0 if report.ok else 1


def console() -> None:
    """Runs the command line and exits, without waiting for threads that exceeded their time limit."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.stderr.flush()
    if any(thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    console()
