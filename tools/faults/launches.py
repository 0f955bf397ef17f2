"""Starts the processes of a job; each writes its results to files in the job's folder."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.executor import launch
from megatron_cp.executor.groups import TorchGroup
from tools.faults import training
from tools.faults.cases import Case
from tools.faults.job import Job
from tools.forks import ranks_are_forks

CALLER = "caller.json"
_ROOT = Path(__file__).parents[2]


def result_file(folder: Path, rank: int) -> Path:
    """Returns the file of the value that a rank returned or the error that it raised."""
    return folder / f"result.{rank}.json"


def write(path: Path, value: Any) -> None:
    """Writes a value as JSON, atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value))
    new.replace(path)


def choose_port() -> None:
    """Chooses a free port for the store over which ranks meet that start by themselves, which inherit it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def show_stacks_on_demand(folder: Path) -> None:
    """Makes SIGUSR1 write the stacks of this process, also while it waits in a collective."""
    file = (folder / f"stacks.{os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def recorded(folder: Path, rank: int, run: Callable[[], Any]) -> Any:
    """Calls `run`, and leaves what it returned or raised in the folder."""
    result: dict[str, Any] = {}
    try:
        result["numbers"] = run()
        return result["numbers"]
    except BaseException as error:
        result["error"] = described(error)
        raise
    finally:
        write(result_file(folder, rank), result)


def described(error: BaseException) -> dict[str, Any]:
    """Formats an error for people: its message and those of its causes."""
    chain: list[BaseException] = [error]
    while before := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        chain.append(before)
    message = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
    return {"message": message, "traceback": "".join(traceback.format_exception(error))[-6000:]}


def _of_case(case: Case, group: Any, folder: Path) -> Any:
    torch.set_num_threads(1)
    sums = dist.new_group(timeout=timedelta(seconds=case.timeout)) if case.own_reduce else group
    return Job(case, group, sums, folder).run()


def become_fresh_rank(case: Case, rank: int, folder: Path) -> None:
    """Makes this process a rank that is no fork: it imports what it needs, and it ends as a script does."""
    arguments = ["-P", "-m", "tools.faults.launches", case.text(), str(rank), str(folder)]
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(_ROOT)})


def independent_rank(case: Case, rank: int, folder: Path) -> None:
    """Runs a rank in a process without a launcher, as torchrun's are; the first rank holds the store."""
    show_stacks_on_demand(folder)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(case.cp_size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_WORLD_SIZE": str(case.cp_size), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    if case.train:
        raise SystemExit(training.run(case, folder))
    port, waits = int(os.environ["MASTER_PORT"]), timedelta(seconds=60)  # for ranks that import for longer than others
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=waits)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case.cp_size, timeout=timedelta(seconds=case.timeout)
    )
    try:
        recorded(folder, rank, lambda: _of_case(case, dist.group.WORLD, folder))
        TorchGroup(dist.group.WORLD).barrier()  # nobody leaves while others need its store
    finally:
        if case.destroy:
            dist.destroy_process_group()


def call_launcher(case: Case, folder: Path) -> None:
    """Runs `run_ranks`, or `megatron-cp train`, in this process, and records the outcome."""
    show_stacks_on_demand(folder)
    outcome: dict[str, Any] = {}
    with contextlib.nullcontext([]) if case.spawn else ranks_are_forks() as processes:
        try:
            if case.train:
                outcome["ok"] = training.run(case, folder) == 0
            else:
                launch.run_ranks(
                    _rank_of_launcher, case.cp_size, case.text(), str(folder), kind="processes",
                    timeout=5 * case.timeout,
                )  # fmt: skip
                outcome["ok"] = True
        except BaseException as error:
            outcome |= {"ok": False, "error": described(error)}
    write(folder / CALLER, outcome | {"exit_codes": [p.exitcode for p in processes]})


def _rank_of_launcher(group: TorchGroup, text: str, folder: str) -> Any:
    case, home = Case.of(text), Path(folder)
    show_stacks_on_demand(home)
    return recorded(home, group.rank, lambda: _of_case(case, group.group, home))


if __name__ == "__main__":
    independent_rank(Case.of(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
