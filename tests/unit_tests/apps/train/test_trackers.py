"""TensorBoard and Weights & Biases are asked for by flags, and refused by name where they are not installed."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_cp.apps.train import trackers
from megatron_cp.apps.train.options import Run, TrainingOptions
from megatron_cp.cli.main import main


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_rejects_a_tracker_that_is_not_installed(name, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    assert main(["train", f"--{name}", "there"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"megatron-cp train: --{name}: got 'there'; allowed: only where {name} is installed. pip install {name}\n"
    )


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_rejects_a_tracker_without_a_place(name, capsys):
    assert main(["train", f"--{name}", " "]) == 2
    assert f"--{name}: got ' '" in capsys.readouterr().err


def test_sends_numbers_of_steps_to_those_that_were_asked_for(monkeypatch, tmp_path):
    sent = []
    wandb = ModuleType("wandb")
    wandb.init = lambda **options: (
        sent.append(options)
        or SimpleNamespace(log=lambda numbers, step: sent.append((step, numbers)), finish=lambda: sent.append("end"))
    )
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda folder: SimpleNamespace(
        add_scalar=lambda *given: sent.append(given), close=lambda: sent.append(folder)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    run = Run(TrainingOptions(lr=0.5), Path("runs/mine"), tensorboard=str(tmp_path), wandb="project")
    tracker = trackers.Trackers(run)
    tracker.log(3, {"step": 3, "loss": 0.5, "layouts": {"zigzag": 1}, "layout_choice": "a"})
    tracker.close()
    begun, *others = sent
    assert (begun["project"], begun["name"], begun["config"]["lr"]) == ("project", "mine", 0.5)
    assert others == [("loss", 0.5, 3), (3, {"loss": 0.5}), str(tmp_path), "end"]


def test_sends_nothing_by_default(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    tracker = trackers.Trackers(Run(TrainingOptions(), Path("runs/mine")))
    tracker.log(1, {"loss": 1.0})
    tracker.close()
