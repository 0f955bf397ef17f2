"""Judges a cell: its ranks are processes with a time limit, and what they compute is compared with documents alone."""

import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

import torch
from torch import Tensor, distributed

BOUND = 1e-4
RIGHT, WRONG, REFUSED, HUNG = "right", "wrong without a word", "refused", "hung"
ABSENT, UNABLE, CRASHED = "not installed", "not runnable", "crashed"
_GRACE = 3.0  # seconds that other ranks get after one has failed


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


def run_cell(compare: Callable[[int, int], tuple[float, float | None]], ranks: int, seconds: float) -> Outcome:
    """Runs `compare(rank, ranks)` in forked processes that share a gloo group. Returns what became of it.

    Args:
        compare: returns a rank's relative errors of outputs and of the gradient.
        ranks: number of processes.
        seconds: what is still running after so long is killed and called hung.
    """
    context = multiprocessing.get_context("fork")  # the parent has imported torch and the peers already
    readers, workers, found = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            worker = context.Process(target=_rank, args=(compare, rank, ranks, folder, writer))
            worker.start()
            writer.close()  # so that a rank which ends without an answer ends the pipe
            readers.append(reader)
            workers.append(worker)
        deadline = time.monotonic() + seconds
        while len(found) < ranks and time.monotonic() < deadline:
            waiting = [reader for rank, reader in enumerate(readers) if rank not in found]
            for reader in connection.wait(waiting, deadline - time.monotonic()):
                try:
                    answer = reader.recv()
                except EOFError:
                    answer = (CRASHED, "")
                found[readers.index(reader)] = answer
                if answer[0] != "done":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for worker in workers:
            worker.kill()
            worker.join()
    return _outcome(found, ranks, [worker.exitcode for worker in workers])


def _outcome(found, ranks, codes):
    failures = [found[rank] for rank in sorted(found) if found[rank][0] != "done"]
    own = [each for each in failures if "gloo" not in each[1]] or failures  # else another rank's failure
    if own:
        kind, words = own[0]
        return Outcome(kind, words=f"exit codes {codes}" if kind == CRASHED else words)
    silent = sorted(set(range(ranks)) - set(found))
    if silent:
        return Outcome(HUNG, words=f"ranks {silent} of {ranks} had not answered")
    errors = [each[1] for each in found.values()]
    gradients = [each[2] for each in found.values() if each[2] is not None]
    is_right = all(error <= BOUND for error in (*errors, *gradients))  # a NaN is not
    return Outcome(RIGHT if is_right else WRONG, max(errors), max(gradients, default=None))


def _rank(compare, rank, ranks, folder, answers):
    log = os.open(Path(folder, f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    )  # fmt: skip
    torch.set_num_threads(1)  # a fork has none of its parent's threads, for which OpenMP would wait
    try:
        if ranks > 1:
            distributed.init_process_group(
                "cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
            )
        answer = ("done", *compare(rank, ranks))
    except ImportError as error:  # a kernel's package, which wants a GPU
        answer = (UNABLE, _first_line(error))
    except Exception as error:
        traceback.print_exc()
        words = _first_line(error)
        answer = (UNABLE if "cpu" in words.lower() else REFUSED, words)  # such as "FlexAttention ... backward on CPU"
    answers.send(answer)
    answers.close()
    if answer[0] == "done" and ranks > 1:
        distributed.barrier()  # no rank leaves while another still receives from it
    os._exit(0)


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
