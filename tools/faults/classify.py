"""Classifies the outcome of a fault from its record: plain data in, plain data out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tools.faults.cases import HELD_UP, LOST, PARENT, SAVING, Case

# From bad to good. All before "error" are failures.
OUTCOMES = ("hang", "abort", "silent", "orphan", "checkpoint", "refused", "no cause", "not reached", "not known",
            "error", "right")  # fmt: skip
FAILURES = OUTCOMES[: OUTCOMES.index("error")]
_CRASHES = (-6, -11, -7, -4, -8)  # SIGABRT, SIGSEGV, SIGBUS, SIGILL, SIGFPE
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}

# What an error must say of what the ranks do not agree on.
CAUSES = {
    "dtype": r"\bd?types?\b|float64|float32|bfloat16",
    "batch": r"\bbatch|\[t, b, |\bb\b|shape",
    "scale": r"scale|dt_limit",
    "softcap": r"softcap|soft cap",
    "sink_given": r"sink",
    "sink_values": r"sink",
    "dropout": r"dropout",
    "seed": r"seed",
    "kernel": r"kernel",
    "requires_grad": r"requires?_grad|gradient|\bgrad\b",
    "no_grad": r"no_grad|grad mode|gradient|\bgrad\b",
    "inference_mode": r"inference|no_grad|grad mode|gradient|\bgrad\b",
    "lengths": r"lengths?|documents?|packing|total|\btokens\b",
    "scheme": r"scheme|\bmode\b|headwise|chunkwise|a2a|p2p|all_gather|exact",
    "transport": r"transport|collective|pairwise|hierarchical",
    "chunks": r"head_chunks|chunks?\b",
    "codec": r"codec|fp8|int8",
}
_ENDED = ("kill", "kill_outside", "exit", "interrupt", "raise", "kill_in_save")
# Of these no rank can tell more than whom it waits for in vain.
_NAMED_BY_RANK = (*LOST, *SAVING, "skip_layer", "skip_backward", "order", "checkpoint", "requires_grad", "no_grad",
                  "inference_mode")  # fmt: skip


@dataclass
class Verdict:
    """The outcome of one case.

    Attributes:
        outcome: the worst outcome of all.
        of: the outcome of each survivor (by rank, or "caller"), and of checks of the job as a whole.
        messages: the survivors' error messages.
        seconds: time from the fault to the last survivor's end; None if one of them is not known.
        named: the number of errors, and the number of those that name the cause.
    """

    outcome: str
    of: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    named: tuple[int, int] = (0, 0)

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


def classify(record: dict[str, Any]) -> Verdict:
    """Returns the verdict on a record of `watch`."""
    case = Case.of(json.dumps(record["case"]))
    of = {_name(number): "hang" for number in record["hung"]}
    messages: dict[str, str] = {}
    (_judge_launcher if case.launch == "launcher" else _judge_ranks)(case, record, of, messages)
    if record["orphans"]:
        of["processes"] = "orphan"
    if record["checkpoint"]:
        of["checkpoint"] = "checkpoint"
    if not record["fault"]:
        of["fault"] = "not reached"
    errors = [name for name, outcome in of.items() if outcome == "error" and name in messages]
    named = [name for name in errors if names_cause(case, messages[name])]
    for name in set(errors) - set(named):
        # Where ranks wait in a row, one must name the fault's rank, the others their peers.
        peers = [rank for rank in range(case.cp_size) if _name(rank) != name]
        in_a_row = bool(named) and case.fault.kind in _NAMED_BY_RANK
        if not (in_a_row and any(names_rank(said(messages[name]), rank) for rank in peers)):
            of[name] = "no cause"
    worst = min(of.values(), key=OUTCOMES.index, default="right")
    began, last = record["fault"].get("at"), record["last"]
    seconds = max(0.0, last - began) if began and last and not record["hung"] else None
    return Verdict(worst, of, messages, seconds, (len(errors), len(named)))


def survivors(case: Case) -> list[int]:
    """Returns the ranks that are left after the fault: all, if it ends none."""
    lost = case.fault.kind in LOST or case.fault.kind in SAVING
    return [rank for rank in range(case.cp_size) if not (lost and rank == case.fault.rank)]


def names_cause(case: Case, message: str) -> bool:
    """Returns True if an error states the cause: the values that differ, or the rank that is lost."""
    kind = case.fault.kind
    own_words = without_routine(said(message))
    if kind not in _ENDED:  # of others the launcher names whoever complained or ran out of time first
        own_words = re.sub(r"\brank \d+ of \d+ (failed|ended|was)\b", "", own_words)
    if kind in CAUSES and re.search(CAUSES[kind], own_words, re.IGNORECASE):
        return True
    if kind == "seed":  # which stands among the steps of all that wait, so that two must be shown
        return len(set(re.findall(r"\bseed (\d+)", said(message)))) > 1
    # Whom torch's own collectives have lost no error of theirs says.
    saves = case.save != "none" and kind in _ENDED
    if saves and "saving iter_" in own_words and "another rank did not answer, has ended" in own_words:
        return True
    return kind in _NAMED_BY_RANK and names_rank(own_words, case.fault.rank)


def without_routine(message: str) -> str:
    """Returns a message without the parts of every message: its own rank, the steps of plans, and advice.

    In a comparison of calls the lines that differ from another rank's stay, and not the whole of a call, in which every
    word stands that could be a cause.
    """
    message = re.sub(r" \((?:operation|layer|kind): [^\n]*?\), waiting for", ", waiting for", message)
    message = re.sub(r"\b(?:is |was )?in (?!comparison of)[^\n]*?, waiting for", "waiting for", message)
    message = re.sub(r"\brank \d+ of \d+(, in\b|, waiting\b| stopped)", "", message)
    return re.sub(r"every rank must make the same calls in the same order, forward and backward", "", message)


def names_rank(message: str, rank: int) -> bool:
    """Returns True if a message names the rank, as in "rank 2" or "ranks 0 and 2"."""
    return any(
        str(rank) in re.findall(r"\d+", numbers)
        for numbers in re.findall(r"\branks?\s+((?:\d+(?:,? and |, |,)?)+)", message, re.IGNORECASE)
    )


def said(message: str) -> str:
    """Returns a message without lines of a traceback and places in C++, which quote arbitrary source."""
    message, kept, inside = re.sub(r"\[\S+\.cc:\d+\]", "", message), [], False
    for line in message.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line.startswith(" "):
            continue
        else:  # the error itself, and what it says in further lines
            inside = False
            kept.append(line)
    return "\n".join(kept)


def _judge_ranks(case: Case, record: dict[str, Any], of: dict[str, str], messages: dict[str, str]) -> None:
    """Judges ranks that started by themselves: each survivor by its own end."""
    for rank in survivors(case):
        name, code, result = _name(rank), record["codes"].get(str(rank)), record["ranks"][rank]
        if name in of:
            continue
        if code in _CRASHES:
            of[name] = "abort"
        elif "error" in result or code != 0:
            # Of `megatron-cp train`, and of ranks that fail before or after their steps, the log has it.
            log = record["log"].get(str(rank), "")
            messages[name] = result["error"]["message"] if "error" in result else _final_message(log)
            of[name] = _of_error(case) if messages[name] else "no cause"
        else:
            of[name] = "right" if case.train else _compared(case, record, rank)


def _of_error(case: Case) -> str:
    return "refused" if case.fault.kind in HELD_UP else "error"


def _judge_launcher(case: Case, record: dict[str, Any], of: dict[str, str], messages: dict[str, str]) -> None:
    """Judges ranks of the launcher by what its caller gets. A rank that ends in a crash is one all the same."""
    caller = record["caller"]
    crashes = [rank for rank, code in enumerate(caller.get("exit_codes", [])) if code in _CRASHES]
    of |= {_name(rank): "abort" for rank in crashes}
    if case.fault.kind in PARENT or "caller" in of:
        return
    if re.search(r"exit code -(6|11|7|4|8)\b", caller.get("error", {}).get("message", "")):
        of["a rank"] = "abort"  # a new process, of which nobody else knows how it ended
    if record["codes"].get("-1") in _CRASHES or not caller:
        of["caller"] = "abort"
    elif caller["ok"]:
        for rank in range(case.cp_size) if not case.train else ():
            of.setdefault(_name(rank), _compared(case, record, rank))
        of["caller"] = "right"
    else:
        log = record["log"].get("-1", "")
        messages["caller"] = caller["error"]["message"] if "error" in caller else _final_message(log)
        of["caller"] = _of_error(case)


def _compared(case: Case, record: dict[str, Any], rank: int) -> str:
    """Compares the numbers of a rank that ended without an error with those of a job without the fault."""
    reference, numbers = record.get("reference"), record["ranks"][rank].get("numbers")
    if not isinstance(reference, list) or numbers is None:
        return "not known"
    return "right" if equal(numbers, reference[rank], _TOLERANCE[case.dtype]) else "silent"


def equal(numbers: list[list[float]], reference: list[list[float]], tolerance: float) -> bool:
    """Returns True if two runs have the same numbers, up to rounding."""
    if [len(step) for step in numbers] != [len(step) for step in reference]:
        return False
    pairs = zip(chain(*numbers), chain(*reference), strict=True)
    return all(math.isfinite(a) and abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)


def _final_message(log: str) -> str:
    """Returns a command's final message: from its own name or its last error on, or the last line but bars."""
    starts = [found.start() for found in re.finditer(r"[\w.]+Error: ", log)]
    start = log.rfind("megatron-cp train: ")
    start = starts[-1] if start < 0 and starts else start
    lines = [line for line in re.split(r"[\r\n]+", log) if line.strip() and not re.search(r"\d+%\|", line)]
    return log[start:].rstrip() if start >= 0 else "".join(lines[-1:])


def _name(number: int) -> str:
    return "caller" if number == -1 else f"rank {number}"
