"""Judges a cell: its ranks are processes with a time limit, and what they compute is compared with documents alone."""

import dataclasses
import os
import sys
import tempfile
import traceback
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import RankError, run_ranks
from tools.forks import ranks_are_forks

BOUND = 1e-4
RIGHT, WRONG, REFUSED, HUNG = "right", "wrong without a word", "refused", "hung"
ABSENT, UNABLE, CRASHED = "not installed", "not runnable", "crashed"
Compare = Callable[[int, int], tuple[float, float | None]]
_SAID = "a cell is "  # before a rank's name of what became of it


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A cell's result.

    Attributes:
        name: right, wrong without a word, refused, hung, not installed, not runnable or crashed.
        error: largest difference of outputs over their largest element; None where nothing was computed.
        gradient: the same for the gradient of one early weight; None where it is not compared.
        words: the first line of the error.
    """

    name: str
    error: float | None = None
    gradient: float | None = None
    words: str = ""


def relative(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference over the largest element; infinite where something is missing or not finite."""
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    top = expected.double().abs().max().clamp(min=1e-30)
    return ((found.double() - expected.double()).abs().max() / top).item()


def run_cell(compare: Compare, ranks: int, seconds: float) -> Outcome:
    """Runs `compare(rank, ranks)` in forked processes that share a gloo group. Returns what became of it.

    Args:
        compare: returns a rank's relative errors of outputs and of the gradient.
        ranks: number of processes.
        seconds: what is still running after so long is ended and called hung.
    """
    try:
        # This process has imported torch and the peers already.
        with tempfile.TemporaryDirectory() as folder, ranks_are_forks():
            found = run_ranks(_compared, ranks, compare, folder, kind="processes", timeout=seconds)
    except RankError as error:
        return _failed(error, seconds)
    errors, gradients = [each[0] for each in found], [each[1] for each in found if each[1] is not None]
    is_right = all(error <= BOUND for error in (*errors, *gradients))  # a NaN is not
    return Outcome(RIGHT if is_right else WRONG, max(errors), max(gradients, default=None))


def _failed(error: RankError, seconds: float) -> Outcome:
    """Returns what a rank said about its error, or how ranks ended that said nothing."""
    text = str(error)
    if _SAID in text:
        name, _, words = text.partition(_SAID)[2].splitlines()[0].partition(": ")
        return Outcome(name, words=words)
    if "did not finish in" in text or "exit code 1 and no result" in text:
        return Outcome(HUNG, words=f"not answered in {seconds:g} s")
    return Outcome(CRASHED, words=text.partition(";")[0])


def _compared(group: RankGroup, compare: Compare, folder: str) -> tuple[float, float | None]:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(silence, number)
    rank, ranks = str(group.rank), str(group.size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    if group.size > 1:  # a group that knows no CUDA, which diffusers would use
        distributed.destroy_process_group()
        distributed.init_process_group(
            "cpu:gloo", init_method=f"file://{folder}/store", rank=group.rank, world_size=group.size
        )
    try:
        return compare(group.rank, group.size)
    except Exception as error:
        words = _first_line(error)
        # A kernel's package, which wants a GPU; or such as "FlexAttention ... backward on CPU".
        is_unable = isinstance(error, ImportError) or "cpu" in words.lower()
        raise RuntimeError(f"{_SAID}{UNABLE if is_unable else REFUSED}: {words}") from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if text:
        return f"{type(error).__name__}: {text[0].strip()}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.name}: {last.line}"


def over_ranks(local: Tensor) -> Tensor:
    """Returns the sum over ranks of a tensor that each of them has."""
    total = local.detach().clone()
    if distributed.is_initialized():
        distributed.all_reduce(total)
    return total


def in_order(rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Returns all rows in the order of the stream on every rank; NaN where no rank has one.

    Args:
        rows: `[t, width]`, a rank's rows.
        places: `[t]`, each row's place in the stream; rows of places outside it are padding.
        total: number of rows of the stream.
    """
    kept = (places >= 0) & (places < total)
    whole = rows.new_zeros(total, rows.shape[1]).index_add_(0, places[kept], rows.detach()[kept])
    count = rows.new_zeros(total).index_add_(0, places[kept], rows.new_ones(int(kept.sum())))
    whole, count = over_ranks(whole), over_ranks(count)
    return torch.where(count[:, None] == 1, whole, float("nan"))
