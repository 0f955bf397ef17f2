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
dist.init_process_group("gloo")
kept = as_rank_group(dist.group.WORLD, dist.get_world_size())
for _ in range(50):
    dist.all_gather([torch.empty(1000) for _ in range(dist.get_world_size())], torch.ones(1000))
if sys.argv[1] == "leaves":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("end", "ranks"),
    [("leaves", 2), *(pytest.param(end, 4, marks=pytest.mark.thorough) for end in ("leaves", "stays"))],
)
def test_processes_end_without_an_abort(end, ranks, tmp_path):
    (tmp_path / "ends.py").write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "ends.py", end],
        cwd=tmp_path, capture_output=True, text=True, timeout=limit(120), check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
