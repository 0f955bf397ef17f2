"""The steps: their shares of the time, and their commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BUDGET = 540.0  # seconds
START = 15.0  # seconds in which torch and the package are imported, and doctor looks at the machine
RESERVE = 15.0  # seconds for ending the last step, for the summary and for removing what was installed
TESTS = "tests/functional_tests/test_cuda"


@dataclass(frozen=True)
class Step:
    """A step of the check.

    Attributes:
        share: its seconds, of a budget of 540.
        least: seconds below which it teaches nothing: Python, torch and tests have to be imported first.
        files: of tests, by what follows `TESTS`.
        tests: which of these: an expression of pytest; what earlier steps run is left out. Without one, all tests that
            no other step runs.
        measures: which rows are measured after the tests, on a device that is then idle, each by a process.
        memory: GiB that the device must have.
    """

    name: str
    share: int
    least: int
    files: tuple[str, ...] = ()
    tests: str = ""
    measures: tuple[str, ...] = ()
    memory: int = 8


STEPS = (
    Step(
        "smoke", 80, 25, ("", "_streams"),
        "very_bits or host_never_waits or test_cuda_streams or (varlen and 2-zigzag)",
    ),
    Step("kernels", 80, 25, ("",), "kernels_move or kernels_of_gates or gates_are or gated_norm", ("kernels",)),
    Step(
        "one-rank", 150, 40, ("", "_flash_attn_4"), "test_layer_equals and (varlen or flash_attn or fla or mamba_ssm)",
        ("attention", "linear"), memory=32,
    ),
    Step("parity", 110, 30, ("", "_graphs", "_flex", "_flash_attn_4", "_symmetric_memory", "_commands")),
    Step("nccl", 30, 15, ("_one_device",), "test_cuda_one_device", ("nccl",)),
    Step("train", 60, 30),
)  # fmt: skip
BY_NAME = {step.name: step for step in STEPS}
# The step `train` trains for longer, and no check starts another.
NEVER = "gpu_check or training_agrees"


def expression(step: Step, only: str = "") -> str:
    """Returns pytest's expression for the tests of a step, so that no test is in two steps."""
    others = STEPS[: STEPS.index(step)] if step.tests else STEPS
    apart = " or ".join(f"({each.tests})" for each in others if each.tests)
    parts = [step.tests, f"not ({apart})" if apart else "", f"not ({NEVER})", only]
    return " and ".join(f"({part})" for part in parts if part)


def seconds_for(step: Step, after: Sequence[Step], left: float) -> float:
    """Returns a step's part of the seconds that are left for it and the steps after it; what others spare is shared."""
    return left * step.share / (step.share + sum(each.share for each in after))


def commands(
    step: Step, *, repeats: int, workers: int, small: bool, only: str, folder: str, checker: str | None
) -> Iterator[tuple[float, list[str]]]:
    """Yields the commands of a step, each with the part that it may take of the seconds that the step has left.

    Args:
        step: the step.
        repeats: of each timing.
        workers: processes of pytest, where several tests may run at a time.
        small: measure and train little, to see that it runs.
        only: an expression; of the tests those alone.
        folder: for what training writes.
        checker: compute-sanitizer, if it is there.
    """
    python = sys.executable
    if step.files:
        several = [] if workers == 1 or step.name == "nccl" else ["-n", str(workers), "--dist", "worksteal"]
        yield (0.5 if step.measures else 0.7 if step.name == "smoke" else 1.0), [
            python, "-m", "pytest", "-q", "-p", "tools.gpu_check.told", "-p", "no:cacheprovider", *several,
            "-k", expression(step, only), *(f"{TESTS}{name}.py" for name in step.files),
        ]  # fmt: skip
    if step.name == "smoke":
        checked = [checker, "--error-exitcode", "9"] if checker else []
        yield 1.0, [*checked, python, "-m", "tools.gpu_check.pack_once"]
    for number, what in enumerate(step.measures):
        more = ["--small"] if small else []
        yield (
            1 / (len(step.measures) - number),
            [python, "-m", "tools.gpu_check.measure", what, "--repeats", str(repeats), *more],
        )
    if step.name == "train":
        little = ["--train-iters", "2", "--seq-length", "64", "--hybrid-layer-pattern", "G*-"]
        little = little if small else ["--train-iters", "20"]
        yield 1.0, [
            python, "-m", "megatron_cp.cli.main", "train", "--context-parallel-size", "2", "--compare", "--json",
            "--device", "cuda", "--run-dir", f"{folder}/run", *little,
        ]  # fmt: skip
