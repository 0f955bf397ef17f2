"""examples/pretrain_hybrid.py where there is no CUDA device: what a rank of test_pretrain_example.py runs.

Under `--sft` with stand-ins for the two packages that Megatron's SFT needs and that are not installed here: `datasets`,
which reads the lines, and a tokenizer that knows conversations.
"""

import importlib.util
import json
import logging
import sys
import types
import warnings
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_hybrid.py"


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


if __name__ == "__main__":
    main()
