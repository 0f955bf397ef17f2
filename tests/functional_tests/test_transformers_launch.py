"""The script and the launch lines of docs/transformers.md, as they are printed, on CPUs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit

if not all(importlib.util.find_spec(name) for name in ("accelerate", "transformers")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/transformers.md").read_text().partition("## Trainer and TRL")[2]
LINES = re.findall(r"^(?:torchrun|accelerate launch) .*$", PAGE, re.MULTILINE)
LINES += re.findall(r"`(accelerate launch --config_file .*?)`", PAGE)
SAID = re.compile(r"^ *parallelism_config=.*\n", re.MULTILINE)
LOSS_PRINTED = re.compile(r"cp_size 2, eval_loss ([\d.]+)")


def block(language):
    return re.search(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]


def test_the_page_has_these_lines():
    assert [line.split()[0] for line in LINES] == ["torchrun", "accelerate", "accelerate"]
    assert len(SAID.findall(block("python"))) == 1


@pytest.mark.thorough  # `test_transformers_evaluation` runs the script by forks, which import nothing again
@pytest.mark.parametrize("line", LINES)
def test_launch_lines_run_as_printed(line, tmp_path):
    script = block("python")
    (tmp_path / "train.py").write_text(script if line.startswith("torchrun") else SAID.sub("", script))
    (tmp_path / "cp2.yaml").write_text(block("yaml"))
    found = subprocess.run(
        line.split(), cwd=tmp_path, capture_output=True, text=True, timeout=limit(120), check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
             "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    expected = float(LOSS_PRINTED.search(PAGE)[1])
    assert [float(loss) for loss in LOSS_PRINTED.findall(found.stdout)] == [pytest.approx(expected, abs=1e-3)] * 2
