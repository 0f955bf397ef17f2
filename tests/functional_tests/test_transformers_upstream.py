"""docs/transformers-upstream.md: its patch applies to what is installed, and the stock trainers then train with it."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

# Nothing of transformers may be imported here: the ranks import this module before they know where the patched one is.
from tests.forked_ranks import as_launched, run_ranks_after
from tests.limits import limit

if not all(importlib.util.find_spec(name) for name in ("accelerate", "peft", "transformers", "trl")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

PAGE = (Path(__file__).parents[2] / "docs/transformers-upstream.md").read_text()
STEPS = 6
LOGGED, FLOAT64 = 2e-6, 1e-9  # as in test_transformers_training


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def patched_files():
    return re.findall(r"^--- a/(\S+)", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the packages, patched: links, but for the files of the patch and the folders on the way to them."""
    site = tmp_path_factory.mktemp("site")
    for path in map(Path, patched_files()):
        package = Path(importlib.util.find_spec(path.parts[0]).origin).parents[1]
        for folder in reversed(path.parents[:-1]):
            link_entries(package / folder, site / folder)
        (site / path).unlink()
        (site / path).write_bytes((package / path).read_bytes())
    subprocess.run(["git", "apply", "-p1", "-"], cwd=site, input="".join(blocks("diff")), text=True, check=True,
                   env={**os.environ, "GIT_CEILING_DIRECTORIES": str(site.parent)})  # fmt: skip
    return site


def link_entries(folder, links):
    if links.is_symlink():
        links.unlink()
    links.mkdir(exist_ok=True)
    for entry in folder.iterdir():
        link = links / entry.name
        if entry.name != "__pycache__" and not link.exists():
            link.symlink_to(entry)


def use(site):
    sys.path.insert(0, str(site))
    import torch

    torch.set_num_threads(1)
    import tests.functional_tests.test_transformers_training  # noqa: F401  # imported once, by the process that forks


def on_rank(world, folder):
    """Returns the results of `by_trainer` for the stock trainers."""
    as_launched(world, 29999, PARALLELISM_CONFIG_CP_BACKEND="megatron_cp")
    exec(blocks("python")[0], {"__name__": "backend"})
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from transformers import Trainer
    from trl import SFTTrainer

    from tests.functional_tests.test_transformers_training import by_trainer

    stock = ParallelismConfig(cp_size=2, cp_backend="torch")
    assert stock.cp_by_torch
    assert stock.cp_plugin is None
    with pytest.raises(ValueError, match=r"cp_backend must be one of \['torch', 'megatron_cp'\]"):
        ParallelismConfig(cp_size=2, cp_backend="ring")
    launched = launch_command_parser().parse_args(["--parallelism_config_cp_backend", "megatron_cp", "train.py"])
    assert launched.parallelism_config_cp_backend == "megatron_cp"
    found = {}
    for kind in (Trainer, SFTTrainer):
        found[kind.__name__] = by_trainer(kind, "Qwen3Next", folder, world.size)
        AcceleratorState._reset_state(True)
    return found


@pytest.mark.thorough
def test_stock_trainers_train_with_the_patch(site, tmp_path):
    found = run_ranks_after(partial(use, site), partial(on_rank, folder=tmp_path), 2, timeout=limit(200))[0]
    for logged, expected, steps, evaluated in found.values():
        assert steps == STEPS
        assert [loss for loss, _ in logged] == pytest.approx([loss for loss, _ in expected], abs=LOGGED)
        assert [norm for _, norm in logged] == pytest.approx([norm for _, norm in expected], rel=FLOAT64)
        assert evaluated is None or evaluated[0] == pytest.approx(evaluated[1], abs=FLOAT64)
    assert found["Trainer"][-1] is not None
