"""Whole programs that stand on pages run as they are printed, on several ranks, and agree with one."""

import contextlib
import os
import re
import runpy
import socket

import pytest
import torch

from tests.forked_ranks import forking_context
from tests.limits import limit
from tests.unit_tests.test_pages import block

LOSS = re.compile(r"step (\d+): loss ([\d.]+), and this rank had (\d+) of 301 tokens")


def rank_of_a_job(script, rank, size, port, out):
    """Runs a script as a rank that torchrun would start, with its output in a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    torch.set_num_threads(1)  # as torchrun does
    with out.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        runpy.run_path(str(script), run_name="__main__")


def printed(script, size, folder):
    """Returns what each rank prints."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outs = [folder / f"{size}.{rank}.txt" for rank in range(size)]
    ranks = [
        forking_context().Process(target=rank_of_a_job, args=(script, rank, size, port, outs[rank]))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        for process, out in zip(ranks, outs, strict=True):
            process.join(limit(60))
            assert process.exitcode == 0, out.read_text()
    finally:
        for process in ranks:
            process.kill()
    return [out.read_text() for out in outs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return printed(program(tmp_path_factory), 1, tmp_path_factory.mktemp("alone"))[0]


def program(tmp_path_factory):
    script = tmp_path_factory.mktemp("readme") / "train.py"
    script.write_text(block("README.md", "import megatron_cp as cp"))
    return script


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_program_of_the_readme_trains_as_on_one_rank(size, alone, tmp_path, tmp_path_factory):
    first, *others = printed(program(tmp_path_factory), size, tmp_path)
    assert set(others) == {""}
    ours, one = LOSS.findall(first), LOSS.findall(alone)
    assert [step for step, _, _ in ours] == [step for step, _, _ in one] == [str(step) for step in range(10)]
    assert [float(loss) for _, loss, _ in ours] == pytest.approx([float(loss) for _, loss, _ in one], abs=1e-5)
    assert float(ours[-1][1]) < 0.1 < float(ours[0][1])
    assert {int(tokens) for _, _, tokens in ours} <= {301 // size, -(-301 // size)}
    assert {int(tokens) for _, _, tokens in one} == {301}
