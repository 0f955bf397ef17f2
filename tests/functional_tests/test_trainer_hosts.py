r"""axolotl's and LlamaFactory's own training, as docs/hosts.md starts it, beside the stock host on one rank and alone.

The tests of a host run where it is at hand, with what its import needs. Each host has an environment of its own, since
they want different versions:

    pip install --no-deps --target wheels_axolotl axolotl==0.21.0 transformers==5.20.1 trl==1.14.1 \
        datasets==5.0.1 addict art axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 backoff bitsandbytes \
        colorama distro evaluate==0.4.1 fastcore fire httpcore httpx kernels==0.17.2 llvmlite numba \
        opentelemetry-api platformdirs posthog==6.7.11 pydantic==2.13.5 pydantic-core==2.46.5 python-dotenv \
        schedulefree scipy six termcolor wandb
    pip install --no-deps --target wheels_llamafactory llamafactory==0.9.5 transformers==5.6.0 trl==0.24.0 \
        datasets==4.0.0 peft==0.18.1 huggingface-hub==1.33.0 tokenizers==0.22.2 antlr4-python3-runtime==4.9.3 \
        docstring-parser fastapi fire httpcore httpx modelscope omegaconf scipy sentencepiece shtab \
        sse-starlette starlette termcolor tiktoken torchaudio==2.11.0 torchdata==0.11.0 tyro==0.8.14 uvicorn
    PYTHONPATH=.:wheels_axolotl python -m pytest tests/functional_tests/test_trainer_hosts.py
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.limits import limit
from tests.transformers_cases import TRAINED

ROOT = Path(__file__).parents[2]
SECTIONS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/hosts.md").read_text(), re.DOTALL | re.MULTILINE)
)
# Each process imports a host anew, which is nearly all of the time; so a model runs on one number of ranks, and alone.
RANKS = {"Llama": 2, "Qwen3Next": 3}
LENGTHS = (13, 21, 5, 17)  # all in one pack, so that a step has them all, packed or one by one
SHARED = {"learning_rate": 0.01, "max_steps": 3, "max_grad_norm": 1.0, "eval_strategy": "steps",
          "eval_steps": 3, "logging_steps": 1, "save_strategy": "no",
          "bf16": False, "output_dir": "out"}  # fmt: skip
PACKED, ALONE = {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": len(LENGTHS)}


def block(host, language, beginning):
    """Returns the block of a host's section of the page that begins so."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[host], re.DOTALL | re.MULTILINE)
    (found,) = [each for each in blocks if each.startswith(beginning)]
    return found


# Read when tests are collected, so that a page that has them no more is seen without the hosts.
KEYS, LINE = block("axolotl", "yaml", "context_parallel_size: 2"), block("LlamaFactory", "bash", "torchrun ")


def host(name, package):
    missing = importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{package} is not installed"))


pytestmark = [pytest.mark.thorough, pytest.mark.timeout(0)]  # each launch has a limit of its own, for this machine


def documents():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=random).tolist() for length in LENGTHS]


def launch(folder, *command):
    found = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=limit(240), check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1",
             "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
             "AXOLOTL_DO_NOT_TRACK": "1"},
    )  # fmt: skip
    assert found.returncode == 0, (found.stderr + found.stdout)[-5000:]


def axolotl(folder, ranks):
    """Trains by axolotl, on one rank without the plugin. Returns what its trainer logged."""
    data = [
        {"input_ids": ids, "labels": [-100, -100, *ids[2:]], "attention_mask": [1] * len(ids)} for ids in documents()
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    rows = {"path": "rows.jsonl", "ds_type": "json", "type": None, "split": "train"}
    config = {
        **SHARED, **(ALONE if ranks == 1 else PACKED), "base_model": "model", "micro_batch_size": 1, "num_epochs": 3,
        "sample_packing": ranks > 1, "sequence_len": 64, "optimizer": "adamw_torch", "lr_scheduler": "constant",
        "datasets": [rows], "test_datasets": [rows], "attn_implementation": "sdpa", "val_set_size": 0,
        "eval_sample_packing": ranks > 1, "eval_batch_size": 1 if ranks > 1 else len(LENGTHS),
        "dataset_prepared_path": "prepared", "dataset_num_proc": 1, "fp16": False, "tf32": False,
    }  # fmt: skip
    added = "" if ranks == 1 else KEYS.replace("size: 2", f"size: {ranks}")
    (folder / "job.yaml").write_text(
        "\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items()) + "\n" + added
    )
    script = [str(Path(__file__).with_name("run_axolotl.py")), "job.yaml", "log.json"]
    launch(folder, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *script)
    return json.loads((folder / "log.json").read_text())


def llamafactory(folder, ranks):
    """Trains by LlamaFactory, on one rank by its own launcher. Returns what its trainer logged."""
    words = [[f"t{token}" for token in ids] for ids in documents()]
    rows = [{"instruction": " ".join(each[:2]), "input": "", "output": " ".join(each[2:])} for each in words]
    (folder / "tiny.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    config = {
        **SHARED, **(ALONE if ranks == 1 else PACKED), "model_name_or_path": "model", "per_device_train_batch_size": 1,
        "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "tiny", "dataset_dir": ".",
        "template": "empty", "cutoff_len": 70, "preprocessing_num_workers": 1, "num_train_epochs": 3, "use_cpu": True,
        "neat_packing": ranks > 1, "eval_dataset": "tiny", "report_to": "none", "flash_attn": "sdpa",
        "per_device_eval_batch_size": 1 if ranks > 1 else len(LENGTHS), "lr_scheduler_type": "constant",
    }  # fmt: skip
    (folder / "job.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items()))
    script = (
        shlex.split(LINE.replace(" 2", f" {ranks}"))[1:]
        if ranks > 1
        else ["-m", "llamafactory.cli", "train", "job.yaml"]
    )
    launch(folder, *(["-m", "torch.distributed.run", "--standalone"] if ranks > 1 else []), *script)
    return json.loads((folder / "out/trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("trained", [host(axolotl, "axolotl"), host(llamafactory, "llamafactory")])
def test_packed_ranks_log_what_the_stock_host_logs_of_each_document_alone(trained, name, tmp_path):
    from tests.transformers_cases import build, tokenizer

    found = {}
    for ranks in (1, RANKS[name]):
        folder = tmp_path / str(ranks)
        build(name, dtype=torch.float32, **TRAINED[name]).save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
        logs = trained(folder, ranks)
        found[ranks] = [log[key] for log in logs for key in ("loss", "grad_norm", "eval_loss") if key in log]
    assert len(found[1]) >= 7  # axolotl evaluates at the beginning too
    assert found[RANKS[name]] == pytest.approx(found[1], rel=2e-4)
