"""Ranks of test_pretrain_example.py, on CPUs: examples/pretrain_hybrid.py, or the step of examples/pretrain_gpt.patch.

Under `--sft` with stand-ins for the two packages that Megatron's SFT needs and that are not installed here: `datasets`,
which reads the lines, and a tokenizer that knows conversations.
"""

import importlib.util
import json
import logging
import re
import sys
import types
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE, PATCH = ROOT / "examples/pretrain_hybrid.py", ROOT / "examples/pretrain_gpt.patch"


class Tokenizer:
    """A token a letter, and prompts that are not learnt."""

    eod, pad, vocab_size, path = 61, 62, 64, "letters"
    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        tokens, targets = [], []
        for message in conversation:
            letters = [ord(letter) % 60 for letter in message["content"]]
            tokens += letters
            targets += letters if message["role"] == "assistant" else [-100] * len(letters)
        return np.array(tokens), np.array(targets)


def load_dataset(kind, data_files, split):
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


def main():
    """Runs with the arguments of this process, and with the ranks that torchrun's variables name."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    spec = importlib.util.spec_from_file_location("pretrain_hybrid", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if "--sft" in sys.argv:
        datasets = types.ModuleType("datasets")
        datasets.load_dataset = load_dataset
        sys.modules["datasets"] = datasets
        example.build_tokenizer = lambda args: Tokenizer()
    run_megatron_on_cpu(pretrain=True)
    example.main()


def main_of_the_patch():
    """Runs Megatron's GPT with its own data sets and the forward step that the patch adds to Megatron's script."""
    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    run_megatron_on_cpu(pretrain=True)
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

    from megatron_cp.megatron.config import TransformerConfig, add_arguments

    dataset_utils.compile_helpers = lambda: None  # the wheel brings them compiled
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    config = core_transformer_config_from_args(args, TransformerConfig)
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args, config))
    (added,) = [hunk for hunk in re.split(r"^@@.*\n", PATCH.read_text(), flags=re.MULTILINE) if "\n+def " in hunk]
    code = "\n".join(line[1:] for line in added.splitlines() if line.startswith("+"))
    scope = {"get_args": get_args, "lru_cache": cache, "torch": torch}
    exec(code, scope)
    data_sets.is_distributed = True
    pretrain(container, data_sets, ModelType.encoder_or_decoder, scope["packed_step"])


def data_sets(samples):
    """Builds the data sets by Megatron's builder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, of_splits = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=blend, blend_per_split=of_splits,
        split=args.split, tokenizer=build_tokenizer(args), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, path_to_cache=args.data_cache_path,
        inter_document_masking=args.dataloader_inter_document_masking,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()
