"""Context parallelism for LlamaFactory: the same configuration file, by another launcher.

    torchrun --standalone --nproc-per-node 4 -m megatron_cp.integrations.llamafactory --cp-size 4 qwen3_sft.yaml

or, in a script of your own, `register(cp_size=4)` before `llamafactory.train.tuner.run_exp()`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.integrations import require
from megatron_cp.transformers.padding import join_documents
from megatron_cp.transformers.trainer import ContextParallelMixin

_STAGE = "Their trainers need whole rows, or a loss of their own."
_OTHER = "It runs another trainer, or replaces layers itself."
_IMAGES = (
    "We have not run LlamaFactory's rows with images. Train on text, packed, or on images with ContextParallelTrainer."
)
_REFUSED = {
    "predict_with_generate": "Generate without context parallelism, from the saved model.",
    "use_mca": _OTHER,
    "use_hyper_parallel": _OTHER,
    "use_badam": _OTHER,
    "use_unsloth": _OTHER,
    "shift_attn": _OTHER,
    "mixture_of_depths": _OTHER,
    "use_kt": _OTHER,
    "enable_liger_kernel": "For a loss without all logits: register(cp_options={'logit_rows': 1024}).",
}


def register(cp_size: int | None = None, **options: Any) -> None:
    """Makes LlamaFactory's trainers of the stages pt and sft use context parallelism.

    Args:
        cp_size: number of ranks that share a batch; those of all processes if None.
        options: arguments of `ContextParallelMixin`: `layout`, `scheme`, `linear_mode` and `cp_options`.

    Raises:
        ArgumentError: when a job starts: another stage, packing that does not keep documents apart, or an argument of
            LlamaFactory that computes something else.
    """
    require("llamafactory", "llamafactory")
    from llamafactory.hparams import get_train_args
    from llamafactory.train import tuner
    from llamafactory.train.pt import workflow as pretraining
    from llamafactory.train.pt.trainer import CustomTrainer
    from llamafactory.train.sft import workflow as finetuning
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    def checked_args(args: Any = None) -> Any:
        found = get_train_args(args)
        check_arguments(*found[:4])
        found[2].parallelism_config = _parallelism(cp_size)
        return found

    def init(self: Any, **named: Any) -> None:
        if getattr(named.get("data_collator"), "neat_packing", False):
            named["data_collator"] = collate_packed
        else:
            check_collator(named.get("data_collator"))
        ContextParallelMixin.__init__(self, **named, **options)

    tuner.get_train_args = checked_args
    for module, trainer in ((pretraining, CustomTrainer), (finetuning, CustomSeq2SeqTrainer)):
        derived = type(f"ContextParallel{trainer.__name__}", (ContextParallelMixin, trainer), {"__init__": init})
        setattr(module, trainer.__name__, derived)


def check_arguments(model: Any, data: Any, training: Any, finetuning: Any) -> None:
    """Refuses arguments of LlamaFactory that context parallelism does not compute."""
    if finetuning.stage not in ("pt", "sft"):
        raise ArgumentError("stage", finetuning.stage, "pt or sft", _STAGE)
    if finetuning.stage == "sft" and data.packing and not data.neat_packing:
        raise ArgumentError("packing", True, "neat_packing: true", "Documents of a row would attend to each other.")
    for group in (training, finetuning, model):
        for name, remedy in _REFUSED.items():
            if value := getattr(group, name, None):
                raise ArgumentError(name, value, "none", remedy)


def check_collator(collator: Any) -> None:
    """Refuses LlamaFactory's collator of rows with images and sounds, which adds one to batches of text too."""
    template = getattr(collator, "template", None)
    plugin = getattr(template, "mm_plugin", None)
    for name in ("image_token", "video_token", "audio_token"):
        if (token := getattr(plugin, name, None)) is not None:
            raise ArgumentError(f"template.mm_plugin.{name}", token, "None, or neat_packing: true", _IMAGES)


def collate_packed(features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns a batch of one row from packed rows, whose `attention_mask` numbers their documents."""
    for name in ("images", "videos", "audios"):
        if any(each.get(name) for each in features):
            raise ArgumentError(name, "files in a row", "none", _IMAGES)
    return join_documents(features)


def _parallelism(cp_size: int | None) -> ParallelismConfig:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = world if cp_size is None else checked_integer("cp_size", cp_size, 1)
    if world % size:
        raise ArgumentError("cp_size", size, f"a divisor of the {world} processes")
    replicas = {"dp_shard_size": world // size} if world > size else {}
    return ParallelismConfig(cp_size=size, **replicas)


def main() -> None:
    """Trains by LlamaFactory: its arguments come after those of this launcher."""
    parser = argparse.ArgumentParser(prog="python -m megatron_cp.integrations.llamafactory", allow_abbrev=False)
    parser.add_argument("--cp-size", type=int, help="ranks that share a batch; all processes if it is left out")
    for name in ("layout", "scheme", "linear-mode"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help="as in enable_context_parallel")
    ours, sys.argv[1:] = parser.parse_known_args()
    register(**vars(ours))
    from llamafactory.train.tuner import run_exp

    run_exp()


if __name__ == "__main__":
    main()
