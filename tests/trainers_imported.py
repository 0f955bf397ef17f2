"""Imports transformers, its trainers and TRL's, for the process whose forks are ranks of tests that need them."""

import datasets  # noqa: F401
import trl
from peft import LoraConfig  # noqa: F401

import megatron_cp.transformers.generation
import megatron_cp.transformers.preference
import megatron_cp.transformers.trainer  # noqa: F401
from tests.transformers_cases import class_of

class_of("Llama"), class_of("Qwen3Next")
trl.DPOTrainer, trl.KTOTrainer, trl.GRPOTrainer, trl.RLOOTrainer, trl.SFTTrainer  # noqa: B018
