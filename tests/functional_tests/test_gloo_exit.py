"""A process may end while a gloo thread still holds the tensors of the last collective."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit

SCRIPT = """
import sys, torch, torch.distributed as dist
from megatron_cp.executor.groups import as_rank_group
end, store, rank, size = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
kept = as_rank_group(dist.group.WORLD, dist.get_world_size())
for _ in range(50):
    dist.all_gather([torch.empty(1000) for _ in range(dist.get_world_size())], torch.ones(1000))
if end == "leaves":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("end", "ranks"), [("leaves", 2), pytest.param("stays", 4, marks=pytest.mark.thorough)])
def test_processes_end_without_an_abort(end, ranks, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", SCRIPT, end, tmp_path / "store", str(n), str(ranks)] for n in range(ranks)]
    started = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True, env=environment) for each in commands]
    try:
        for process in started:
            _, said = process.communicate(timeout=limit(120))
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in started:
            process.kill()
